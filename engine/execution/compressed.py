"""Blocks of the pool in 8 bits (`preempted-int8`): K and V of a block in the unit that was K's.

A table names such a block by -1 - unit in place of both units, and attention widens it as it reads; nothing is written
to one. Scales have no room in the unit: they lie behind the pool, and beside the host tier for what goes there. Half a
step of its head and token is what a number is off by after a stay, and what the scale and the pool's type round
(`engine.models.byte_cells`); NaN comes back as NaN, for its whole head and token. In torch's operators, of any device.
"""

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.models.byte_cells import SCALE, dequantize, quantize
from engine.triton_kernels import configs

KEYS_AND_VALUES = 2
PIECE = 16
"""Blocks converted at once, at most."""
PIECE_BYTES = 2**24
"""Of them, if that is more than one block: what is in between takes a few times as much."""


class CompressedUnits:
    """`units [n, elements]`: the pool's, of which each layer has [block_size, kv_heads, head_dim] numbers; `scales`:
    memory of n times `scale_bytes`, `host_scales` of that of the host's units. `scales [n, 2, layers, block_size,
    kv_heads]` are those of a block in this unit, `host_scales` of one in this host unit."""

    def __init__(
        self,
        units: Tensor,
        scales: Tensor,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        host_scales: Tensor,
    ) -> None:
        assert units.itemsize >= KEYS_AND_VALUES, "numbers of 8 bits do not get any smaller"
        self._units, self._bytes = units, units.view(torch.int8)
        self._shape = (KEYS_AND_VALUES, num_layers, block_size, num_kv_heads, head_dim)
        self.scales = scales.view(SCALE).view(-1, *self._shape[:-1])
        size = KEYS_AND_VALUES * units.shape[1]
        self._values = torch.unflatten(self._bytes[:, :size], 1, self._shape)
        self.host_scales = host_scales.view(SCALE).view(-1, *self._shape[:-1])
        self._piece = max(1, min(PIECE, PIECE_BYTES // (KEYS_AND_VALUES * units[:1].nbytes)))

    def rehearse(self) -> None:
        """There and back for as many blocks as are ever converted at once, all of them units 0 and 1: what that takes,
        and every kernel of it loaded. Only while nobody has anything there."""
        blocks = np.tile(np.arange(KEYS_AND_VALUES), (self._piece, 1))
        self.compress(blocks)
        self.expand(blocks)

    def compress(self, blocks: IntArray) -> None:
        """Put blocks [n, 2] (K's unit, V's) in 8 bits, into K's unit."""
        for part in self._pieces(blocks):
            wide = self._units.index_select(0, part.flatten()).view(len(part), *self._shape)
            values, scales = quantize(wide)
            self._bytes[part[:, 0], : values[0].numel()] = values.flatten(1)
            self.scales[part[:, 0]] = scales

    def expand(self, blocks: IntArray) -> None:
        """The other way: K and V of blocks [n, 2] from K's unit."""
        for part in self._pieces(blocks):
            wide = dequantize(self._values[part[:, 0]], self.scales[part[:, 0]], self._units.dtype)
            self._units[part.flatten()] = wide.view(-1, self._units.shape[1])

    def read(self, layer: int, units: Tensor, parts: Tensor) -> Tensor:
        """K (part 0) or V (1) of blocks [n] in one layer: [n, block_size * kv_heads * head_dim]."""
        values, scales = self._values[units, parts, layer], self.scales[units, parts, layer]
        return dequantize(values, scales, self._units.dtype).flatten(1)

    def _pieces(self, blocks: IntArray) -> list[Tensor]:
        host = torch.from_numpy(blocks)
        # a copy from memory that is not page-locked would wait for the steps before it
        ids = (
            host.pin_memory().to(self._units.device, non_blocking=True) if configs.is_cuda(self._units.device) else host
        )
        return [ids[first : first + self._piece] for first in range(0, len(ids), self._piece)]


def scale_bytes(num_layers: int, block_size: int, num_kv_heads: int) -> int:
    """What the scales take beside each unit."""
    return KEYS_AND_VALUES * num_layers * block_size * num_kv_heads * SCALE.itemsize
