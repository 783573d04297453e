"""The device side of the unified block pool: one flat tensor of slices, and the addresses of units in it.

A *unit* is one block of K, or of V, or of hidden state, for all layers. Unit u of layer l is slice `u * layers + l`; a
slice is `[block_size, kv_heads, head_dim]`, a *cell* one token's part of it; in 8 bits as `engine.models.int8_cells`
has it. One more unit behind the last is all zeros, never written, the target of every padded block table entry. Behind
it lie the scratch slices, which K and V of hidden blocks pass through: table entry -1 - i is scratch slice i, the same
in every layer. A host tier of units of the same layout takes what is swapped out. Who owns which unit is the control
plane's affair.
"""

from typing import Self

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.int8_cells import Int8Slices, slice_elements
from engine.models.spec import ModelShape, hidden_offer
from engine.triton_kernels import configs
from predictor.limits import Limits

_PAGE = 4096
SLICES_PER_SCRATCH_BLOCK = 2  # K and V


class UnitPool:
    """`num_units` units of `layers` slices, zero at first. `dtype`: what K and V are computed in, and stored in but for
    `int8`.

    `slices [num_slices, block_size * kv_heads * head_dim]`, `cells [num_slices * block_size, kv_heads * head_dim]`
    (none of 8 bits) and `units [num_units + 1, elements of a unit]` are views of the same memory; `host_units
    [num_host_units, elements of a unit]` is pinned where the device is not the CPU. On the CPU a page is committed when
    it is first touched.
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
        scratch_blocks: int = 0,
        num_host_units: int = 0,
        int8: bool = False,
    ) -> None:
        assert not (int8 and scratch_blocks), "hidden state does not fit in units of 8 bits"
        self.num_units = num_units
        self.num_layers = num_layers
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.zero_unit = num_units
        self.scratch_blocks = scratch_blocks
        self.scratch_base = (num_units + 1) * num_layers
        num_slices = self.scratch_base + scratch_blocks * SLICES_PER_SCRATCH_BLOCK
        stored = torch.int8 if int8 else dtype
        slice_size = slice_elements(block_size, num_kv_heads, head_dim, stored)
        unit_size = num_layers * slice_size
        storage = _zeros(num_slices * slice_size, stored, device)
        self.slices: Tensor = storage.view(num_slices, slice_size)
        self.int8 = Int8Slices(self.slices, block_size, num_kv_heads, head_dim) if int8 else None
        if not int8:
            self.cells: Tensor = storage.view(num_slices * block_size, num_kv_heads * head_dim)
        self.units: Tensor = storage[: (num_units + 1) * unit_size].view(num_units + 1, unit_size)
        self.host_units = _host_zeros(num_host_units * unit_size, stored, device).view(num_host_units, unit_size)
        self._layers = np.arange(num_layers, dtype=np.int64)[:, None]

    @classmethod
    def of(
        cls,
        spec: ModelShape,
        limits: Limits,
        like: Tensor,
        scratch_blocks: int,
        host_units: int,
        *,
        int8: bool = False,
    ) -> Self:
        """The pool of a model, in the type and on the device of `like`. Raises ConfigError for scratch where the
        model's hidden state is no use as a cache."""
        if scratch_blocks and (refusal := hidden_offer(spec).refusal):
            raise ConfigError(refusal)
        return cls(
            limits.num_units, num_layers=spec.num_layers, block_size=limits.block_size, num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, dtype=like.dtype, device=like.device, scratch_blocks=scratch_blocks,
            num_host_units=host_units, int8=int8,
        )  # fmt: skip

    def write(self, cells: Tensor, values: Tensor) -> None:
        """Keep values [n, heads, d] in cells [n], which may be wider if they are not of 8 bits."""
        if self.int8 is not None:
            self.int8.write(cells, values)
        else:
            self.cells[:, : values.shape[1:].numel()].index_copy_(0, cells, values.flatten(1))

    def read(self, slices: Tensor) -> Tensor:
        """What slices [n] hold, in `dtype`: [n, block_size * kv_heads * head_dim]."""
        return self.slices.index_select(0, slices) if self.int8 is None else self.int8.read(slices, self.dtype)

    def slice_ids(self, entries: np.ndarray) -> Tensor:
        """Table entries [n] -> slice ids [layers, n] on the device."""
        return self._to_device(self._slices_of(entries))

    def cell_ids(self, entries: np.ndarray, offsets: np.ndarray) -> Tensor:
        """Table entries [n] and offsets in their blocks [n] -> cell ids [layers, n] on the device."""
        return self._to_device(self._slices_of(entries) * self.block_size + offsets[None, :])

    def scratch_cell_ids(self, entries: np.ndarray, offsets: np.ndarray) -> Tensor:
        """Entries [n] of scratch and offsets in their blocks [n] -> cell ids [n], of every layer, on the device."""
        return self._to_device((self.scratch_base - 1 - entries) * self.block_size + offsets)

    def clear(self, entries: np.ndarray) -> None:
        """Zero whole units and scratch slices [n]: what an earlier owner left there may be NaN, which no mask hides."""
        units, scratch = entries, entries[:0]
        if self.scratch_blocks:
            units, scratch = entries[entries >= 0], entries[entries < 0]
        if units.size:
            self.units.index_fill_(0, self._to_device(units), 0)
        if scratch.size:
            self.slices.index_fill_(0, self._to_device(self.scratch_base - 1 - scratch), 0)

    def _slices_of(self, entries: np.ndarray) -> np.ndarray:
        slices: np.ndarray = entries[None, :] * self.num_layers + self._layers
        if self.scratch_blocks and (entries < 0).any():
            slices = np.where(entries < 0, self.scratch_base - 1 - entries, slices)
        return slices

    def _to_device(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self.device, non_blocking=True)


def _zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    num_bytes = num_elements * dtype.itemsize
    memory = np.zeros(num_bytes + _PAGE, dtype=np.uint8)  # calloc: the pages stay uncommitted
    first = -memory.ctypes.data % _PAGE
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype)


def _host_zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if configs.is_cuda(device) and num_elements:
        try:
            return torch.zeros(num_elements, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            wanted = num_elements * dtype.itemsize / 2**30
            raise ConfigError(f"no {wanted:.2f} GiB of page-locked host memory: give --swap-space less") from error
    return _zeros(num_elements, dtype, torch.device("cpu"))
