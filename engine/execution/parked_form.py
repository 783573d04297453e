"""How the tiers behind the pool keep what a unit holds: as it is, or K and V in 8 bits (`parked-int8`).

In 8 bits it takes about half the room of 16, and what comes back is off by half a step of its head and token, of which
the largest number has 127, and by what the scale and the pool's type round; another stay there may round once more.
What runs in the pool and never leaves it is exact. NaN comes back as NaN, for its whole head and token.
"""

import torch
from torch import Tensor

from engine.models.byte_cells import INTEGERS, ByteSlices, dequantize, is_bytes, quantize, slice_elements


class ParkedForm:
    """`elements` of type `dtype`, in all `num_bytes`, are kept of a unit whose numbers the pool stores as `stored`.
    `int8`: in integers of 8 bits, each layer as `engine.models.byte_cells` has it, unless the pool is of 8 bits."""

    def __init__(
        self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, stored: torch.dtype, *, int8: bool
    ) -> None:
        self._rounds = int8 and not is_bytes(stored)
        self.dtype = INTEGERS if self._rounds else stored
        self.elements = num_layers * slice_elements(block_size, num_kv_heads, head_dim, self.dtype)
        self.num_bytes = self.elements * self.dtype.itemsize
        self._shape = (num_layers, block_size, num_kv_heads, head_dim)

    def keep(self, unit: Tensor, parked: Tensor) -> None:
        """Write a unit of the pool to `parked [elements]`."""
        if not self._rounds:
            parked.copy_(unit, non_blocking=True)
            return
        slices = self._slices(parked)
        values, scales = quantize(unit.view(self._shape))
        slices.values.copy_(values)
        slices.scales.copy_(scales)

    def give_back(self, parked: Tensor, unit: Tensor) -> None:
        """The other way."""
        if not self._rounds:
            unit.copy_(parked, non_blocking=True)
            return
        slices = self._slices(parked)
        unit.view(self._shape).copy_(dequantize(slices.values, slices.scales, unit.dtype))

    def _slices(self, parked: Tensor) -> ByteSlices:
        return ByteSlices(parked.view(self._shape[0], -1), *self._shape[1:])
