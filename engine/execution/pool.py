"""The device side of the unified block pool: one flat tensor of slices, and the addresses of units in it.

A *unit* is one block of K, or of V, for all layers. Unit u of layer l is slice `u * layers + l`; a slice is
`[block_size, kv_heads, head_dim]`, a *cell* one token's part of it. One more unit behind the last is scratch: all
zeros, never written, the target of every padded block table entry. Who owns which unit is the control plane's affair.
"""

import numpy as np
import torch
from torch import Tensor

_PAGE = 4096


class UnitPool:
    """`num_units` units of `layers * block_size * kv_heads * head_dim` elements, zero at first.

    `slices [num_slices, block_size * kv_heads * head_dim]` and `cells [num_slices * block_size, kv_heads * head_dim]`
    are views of the same memory. On the CPU a page is committed when it is first touched.
    """

    def __init__(
        self,
        num_units: int,
        *,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_units = num_units
        self.num_layers = num_layers
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.zero_unit = num_units
        num_slices = (num_units + 1) * num_layers
        cell_size = num_kv_heads * head_dim
        storage = _zeros(num_slices * block_size * cell_size, dtype, device)
        self.slices: Tensor = storage.view(num_slices, block_size * cell_size)
        self.cells: Tensor = storage.view(num_slices * block_size, cell_size)
        self._units: Tensor = storage.view(num_units + 1, num_layers * block_size * cell_size)
        self._layers = np.arange(num_layers, dtype=np.int64)[:, None]

    def slice_ids(self, units: np.ndarray) -> Tensor:
        """Unit ids [n] -> slice ids [layers, n] on the device."""
        return self._to_device(units[None, :] * self.num_layers + self._layers)

    def cell_ids(self, units: np.ndarray, offsets: np.ndarray) -> Tensor:
        """Unit ids [n] and offsets in their blocks [n] -> cell ids [layers, n] on the device."""
        return self._to_device((units[None, :] * self.num_layers + self._layers) * self.block_size + offsets[None, :])

    def clear(self, units: np.ndarray) -> None:
        """Zero whole units [n]: what an earlier owner left there may be NaN, which no mask of scores can hide."""
        if units.size:
            self._units.index_fill_(0, self._to_device(units), 0)

    def _to_device(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self.device, non_blocking=True)


def _zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    num_bytes = num_elements * dtype.itemsize
    memory = np.zeros(num_bytes + _PAGE, dtype=np.uint8)  # calloc: the pages stay uncommitted
    first = -memory.ctypes.data % _PAGE
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype)
