"""The device side of the unified block pool: one flat tensor of slices, and the addresses of units in it.

A *unit* is one block of K, or of V, or of hidden state, for all layers. Unit u of layer l is slice `u * layers + l`; a
slice is `[block_size, kv_heads, head_dim]`, a *cell* one token's part of it; in 8 bits as `engine.models.byte_cells`
has it. One more unit behind the last is all zeros, never written, the target of every padded block table entry. Behind
it lie the scratch slices, which K and V of hidden blocks pass through: table entry -1 - i is scratch slice i, the same
in every layer. A pool without scratch is *paired*: V of a block lies in the unit behind its K. A host tier of units of
the same layout takes what is swapped out. Who owns which unit is the control plane's affair.

A pool may be laid out anew for fewer layers, whose units are smaller and so more of them (KunServe §4.1), and back: it
has more addresses than memory then (`PoolMemory`).
"""

import mmap
from collections.abc import Callable
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.execution.huge_pages import advise
from engine.execution.lane import host_zeros
from engine.models.byte_cells import ByteSlices, slice_elements
from engine.models.spec import ModelShape, hidden_offer
from predictor.limits import Limits

_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
_PIECE = 16 * 2**20  # bytes that are moved at once
SLICES_PER_SCRATCH_BLOCK = 2  # K and V


class PoolMemory(Protocol):
    """Addresses of which only a part needs memory. `tensor`: over all of them, uint8, zeros where there is memory."""

    tensor: Tensor

    def back(self, num_bytes: int) -> None:
        """Have memory at the first bytes; what was there stays. Raises ValueError where there is not so much."""

    def give_back(self, num_bytes: int) -> None:
        """Nothing lies behind the first bytes any more: the memory there may serve something else."""


Reserve = Callable[[int, int], PoolMemory]
"""(bytes at once, bytes that may come behind them) -> memory."""


class HostMemory:
    """A PoolMemory of a CPU: the system commits a page when it is first touched."""

    def __init__(self, num_bytes: int, spare_bytes: int) -> None:
        self._pages = mmap.mmap(-1, num_bytes + spare_bytes, _PRIVATE)
        advise(self._pages)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def back(self, num_bytes: int) -> None:
        """See PoolMemory; the system has what it has."""

    def give_back(self, num_bytes: int) -> None:
        """See PoolMemory. It reads as zeros then, on whole pages."""
        begin = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < len(self._pages):
            self._pages.madvise(mmap.MADV_DONTNEED, begin, len(self._pages) - begin)


class UnitPool:
    """`num_units` units of `layers` slices, zero at first. `dtype`: what K and V are computed in, and stored in but for
    `cell_type`, one of 8 bits.

    `slices [num_slices, block_size * kv_heads * head_dim]`, `cells [num_slices * block_size, kv_heads * head_dim]`
    (none of 8 bits) and `units [num_units + 1, elements of a unit]` are views of the same memory; `host_units
    [num_host_units, elements of a unit]` is pinned where the device is not the CPU. On the CPU a page is committed
    when it is first touched.

    `layers`: whose slices a unit has. `spare_bytes`: addresses that more units of fewer layers may
    take, in memory that `reserve` gives.
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
        cell_type: torch.dtype | None = None,
        spare_bytes: int = 0,
        reserve: Reserve = HostMemory,
    ) -> None:
        assert not (cell_type and scratch_blocks), "hidden state does not fit in units of 8 bits"
        assert not (spare_bytes and (scratch_blocks or num_host_units)), "nothing else depends on a unit's size"
        self.num_units = num_units
        self.spare_bytes = spare_bytes
        self.num_layers = num_layers
        self.layers = range(num_layers)
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.zero_unit = num_units
        self.scratch_blocks = scratch_blocks
        self.scratch_base = (num_units + 1) * num_layers
        stored = cell_type or dtype
        slice_size = slice_elements(block_size, num_kv_heads, head_dim, stored)
        unit_size = num_layers * slice_size
        num_slices = self.scratch_base + scratch_blocks * SLICES_PER_SCRATCH_BLOCK
        held = num_slices * slice_size
        self._memory: PoolMemory | None = None
        if spare_bytes:
            self._memory = reserve(held * stored.itemsize, spare_bytes)
            num_slices += spare_bytes // (slice_size * stored.itemsize)
            storage = self._memory.tensor[: num_slices * slice_size * stored.itemsize].view(stored)
        else:
            storage = _zeros(held, stored, device)
        self.slices: Tensor = storage[: num_slices * slice_size].view(num_slices, slice_size)
        self.bytes = ByteSlices(self.slices, block_size, num_kv_heads, head_dim) if cell_type else None
        if not cell_type:
            self.cells: Tensor = self.slices.view(num_slices * block_size, num_kv_heads * head_dim)
        self.units: Tensor = storage[: (num_units + 1) * unit_size].view(num_units + 1, unit_size)
        self.host_units = _host_zeros(num_host_units * unit_size, stored, device).view(num_host_units, unit_size)
        self._layers = np.arange(num_layers, dtype=np.int64)[:, None]

    @property
    def paired(self) -> bool:
        """Whether the entry of a block's K says where its V lies, too: `num_layers` slices behind it, once for all."""
        return not self.scratch_blocks and not self.spare_bytes

    @classmethod
    def of(
        cls,
        spec: ModelShape,
        limits: Limits,
        like: Tensor,
        scratch_blocks: int,
        host_units: int,
        *,
        cell_type: torch.dtype | None = None,
        spare_bytes: int = 0,
        reserve: Reserve = HostMemory,
    ) -> Self:
        """The pool of a model, in the type and on the device of `like`. Raises ConfigError for scratch where the
        model's hidden state is no use as a cache."""
        if scratch_blocks and (refusal := hidden_offer(spec).refusal):
            raise ConfigError(refusal)
        return cls(
            limits.num_units, num_layers=spec.num_layers, block_size=limits.block_size, num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, dtype=like.dtype, device=like.device, scratch_blocks=scratch_blocks,
            num_host_units=host_units, cell_type=cell_type, spare_bytes=spare_bytes, reserve=reserve,
        )  # fmt: skip

    def write(self, cells: Tensor, values: Tensor) -> None:
        """Keep values [n, heads, d] in cells [n], which may be wider if they are not of 8 bits."""
        if self.bytes is not None:
            self.bytes.write(cells, values)
        else:
            self.cells[:, : values.shape[1:].numel()].index_copy_(0, cells, values.flatten(1))

    def read(self, slices: Tensor) -> Tensor:
        """What slices [n] hold, in `dtype`: [n, block_size * kv_heads * head_dim]."""
        return self.slices.index_select(0, slices) if self.bytes is None else self.bytes.read(slices, self.dtype)

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

    def bytes_of(self, layers: range, num_units: int) -> int:
        """What so many units of these layers take. Raises ValueError for more than there are addresses for."""
        if not layers or (num_units + 1) * len(layers) > len(self.slices):
            raise ValueError(f"there is no room for {num_units} units of {len(layers)} layers")
        return (num_units + 1) * len(layers) * self.slices.shape[1] * self.slices.itemsize

    def relay(self, layers: range, num_units: int) -> None:
        """Lay the units out for these layers, in place, so many of them. Those that there were and are keep what they
        hold of layers that they had and have; all else they hold is undefined. Memory behind them is given back.

        Raises ValueError for more than there are addresses, or is memory, for.
        """
        assert self._memory is not None, "a pool without spare addresses stays as it is"
        before, common = self.layers, range(max(layers.start, self.layers.start), min(layers.stop, self.layers.stop))
        self._memory.back(self.bytes_of(layers, num_units))
        kept = min(num_units, self.num_units) if common else 0
        per = max(1, _PIECE // (max(len(before), len(layers)) * self.slices.shape[1] * self.slices.itemsize))
        pieces = range(0, kept, per)
        # Towards the front from the front on, and towards the back from the back: what is overwritten was moved.
        for first in pieces if len(layers) <= len(before) else reversed(pieces):
            last = min(first + per, kept)
            held = self._view(first, last, len(before))[:, common.start - before.start : common.stop - before.start]
            target = self._view(first, last, len(layers))
            target[:, common.start - layers.start : common.stop - layers.start] = held.clone()
        self.layers, self.num_layers = layers, len(layers)
        self.num_units = self.zero_unit = num_units
        self.scratch_base = (num_units + 1) * len(layers)
        self._layers = np.arange(len(layers), dtype=np.int64)[:, None]
        self.units = self._view(0, num_units + 1, len(layers)).flatten(1)
        self.units[self.zero_unit] = 0
        self.give_back(num_units + 1)

    def give_back(self, first: int) -> None:
        """Give the memory of units from `first` on back: nothing lies there, and nobody looks."""
        assert self._memory is not None
        self._memory.give_back(first * self.num_layers * self.slices.shape[1] * self.slices.itemsize)

    def past(self, units: np.ndarray, layers: range) -> Tensor:
        """What units [n] hold of some of the layers: a copy on the host, [n, layers, elements of a slice]."""
        ids = self._ids_of(units, layers)
        parts = [self.slices.index_select(0, self._to_device(part.ravel())).cpu() for part in self._pieces(ids)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*ids.shape, self.slices.shape[1])

    def put_past(self, units: np.ndarray, layers: range, values: Tensor) -> None:
        """Write what `past` gave of as many units and the same layers."""
        ids = self._ids_of(units, layers)
        rows = values.reshape(ids.size, self.slices.shape[1])
        for part in self._pieces(ids):
            held, rows = rows[: part.size], rows[part.size :]
            self.slices.index_copy_(0, self._to_device(part.ravel()), held.to(self.device))

    def _pieces(self, ids: np.ndarray) -> list[np.ndarray]:
        """Ids [n, layers] a few units at a time: a device has no room for all of a past once more."""
        if self.device.type == "cpu" or not ids.size:
            return [ids]
        per = max(1, _PIECE // (ids.shape[1] * self.slices.shape[1] * self.slices.itemsize))
        return [ids[first : first + per] for first in range(0, len(ids), per)]

    def _ids_of(self, units: np.ndarray, layers: range) -> np.ndarray:
        """[n, layers]"""
        if len(layers) and (layers.start < self.layers.start or layers.stop > self.layers.stop):
            raise ValueError(f"layers {layers} are not all among {self.layers}")
        if units.size and not 0 <= int(units.min()) <= int(units.max()) < self.num_units:
            raise ValueError(f"a unit that is none of the {self.num_units}")
        within = np.arange(layers.start, layers.stop) - self.layers.start
        ids: np.ndarray = units[:, None] * self.num_layers + within
        return ids

    def _view(self, first: int, last: int, num_layers: int) -> Tensor:
        """Units as if each had so many layers: [last - first, num_layers, elements of a slice]."""
        return self.slices[first * num_layers : last * num_layers].view(last - first, num_layers, -1)

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
    return host_zeros(num_elements * dtype.itemsize, device).view(dtype)


def _host_zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = num_elements * dtype.itemsize
    try:
        return host_zeros(num_bytes, device).view(dtype)
    except RuntimeError as error:
        wanted = num_bytes / 2**30
        raise ConfigError(f"no {wanted:.2f} GiB of page-locked host memory: give --swap-space less") from error
