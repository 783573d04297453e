"""The memory of caches: the unified block pool, and the states of recurrent layers.

Device side of the unified block pool: one flat tensor of slices, and the addresses of units in it.

A *unit* is one block of K, of V, or of hidden state, for all layers. Layer l of unit u is slice `u * layers + l`. A
slice is `[block_size, kv_heads, head_dim]`; a *cell* is one token's part of it. For 8 bits see
`engine.models.byte_cells`. An additional unit after the last is all zeros and never written; padded block table entries
point to it. The scratch slices for K and V of hidden blocks follow: table entry -1 - i is scratch slice i in every
layer. A pool without scratch is *paired*: V of a block is in the unit after its K. A host tier with units of the same
layout takes swapped-out units. The control plane decides the use of units.

With streamed weights the cache may lie outside compute memory (`engine.execution.streamed_cache`). The pool then holds
buffers of one layer each: layer l of unit u is slice `u + places[l]`, and its content is there inside `use(l)`.

A pool may be rearranged for fewer layers, with smaller and therefore more units (KunServe §4.1), and back. It then has
more addresses than memory (`PoolMemory`).

States of recurrent layers: one item of fixed size per request, in its row, and copies in slots on the device and the
host.

A chunk from a request's first token starts without a state, and one after a prefix from the state in a slot. Rows
therefore need no clearing between requests, and a failed step leaves nothing behind: its requests start over. Decodes
run stacked, longer chunks one by one; some layers continue a chunk token by token (`LayerState`). A chunk in which a
state is saved is cut there, in these layers only.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, Self, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.errors import ConfigError
from engine.execution.rows import SLICES_PER_SCRATCH_BLOCK, Layout, RowTable, StateMoves
from engine.execution.stream import HostUnits, advise, host_zeros
from engine.execution.streamed_cache import BUFFERS, OpenStore, StreamedCache
from engine.limits import Limits
from engine.models.byte_cells import ByteSlices, slice_elements
from engine.models.spec import ModelShape, hidden_state_refusal
from engine.models.transformers_calls import Call, LayerState, Part, Recur, RecurrentState

_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
_PIECE = 16 * 2**20  # bytes moved at once
_AT_HAND = nullcontext()


class PoolMemory(Protocol):
    """Address range that is only partly backed by memory. `tensor` [bytes] uint8 covers all of it, initially zero."""

    tensor: Tensor

    def back(self, num_bytes: int) -> None:
        """Back the first bytes with memory; contents stay. Raises ValueError if there is not enough memory."""

    def give_back(self, num_bytes: int) -> None:
        """Release the memory after the first bytes, which is unused."""


Reserve = Callable[[int, int], PoolMemory]
"""(bytes backed at once, bytes that may follow) -> memory."""


class HostMemory:
    """A PoolMemory on a CPU, where the system commits a page when it is first touched."""

    def __init__(self, num_bytes: int, spare_bytes: int) -> None:
        self._pages = mmap.mmap(-1, num_bytes + spare_bytes, _PRIVATE)
        advise(self._pages)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def back(self, num_bytes: int) -> None:
        """See PoolMemory; a no-op, because the system commits pages on demand."""

    def give_back(self, num_bytes: int) -> None:
        """See PoolMemory; released whole pages read as zeros."""
        begin = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < len(self._pages):
            self._pages.madvise(mmap.MADV_DONTNEED, begin, len(self._pages) - begin)


class PoolOptions(TypedDict, total=False):
    """Options of a pool.

    Attributes:
        scratch_blocks: Number of hidden blocks that one step may read or write; 0: none.
        spare_bytes: Addresses for additional units of fewer layers, in memory from `reserve`.
        reserve: Provides that memory.
        store: Opens the memory of a streamed cache.
    """

    scratch_blocks: int
    host_units: int
    cell_type: torch.dtype | None
    spare_bytes: int
    reserve: Reserve
    store: OpenStore


class UnitPool:
    """Pool of `num_units` units of `layers` slices, initially zero.

    Attributes:
        slices: [num_slices, block_size * kv_heads * head_dim].
        cells: [num_slices * block_size, kv_heads * head_dim], a view of the same memory; not for 8 bits.
        units: [num_units + 1, elements of a unit], a view of the same memory.
        host_units: [host units, elements of a unit]; see HostUnits.
        layers: Layers whose slices a unit has.
        num_layers: Slices from a unit to the next: the number of layers, or 1 in a streamed cache.
        places: Slice of each layer, from the first slice of a unit.
        stream: The streamed cache; None: units are in this pool.
        dtype: Type in which K and V are computed; also the stored type unless there is an 8-bit `cell_type`.
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
        host_units: int = 0,
        cell_type: torch.dtype | None = None,
        spare_bytes: int = 0,
        reserve: Reserve = HostMemory,
        store: OpenStore | None = None,
    ) -> None:
        assert not (cell_type and scratch_blocks), "an 8-bit pool cannot hold hidden state"
        assert not (spare_bytes and (scratch_blocks or host_units)), "scratch and host tier need a fixed unit size"
        assert store is None or not (spare_bytes or host_units), "a streamed cache is the only tier"
        self.num_units = num_units
        self.spare_bytes = spare_bytes
        self.layers = range(num_layers)
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.zero_unit = num_units
        self.scratch_blocks = scratch_blocks
        stored = cell_type or dtype
        slice_size = slice_elements(block_size, num_kv_heads, head_dim, stored)
        self.stream: StreamedCache | None = None
        self.num_layers, self.places, self.scratch_base = num_layers, [*self.layers], (num_units + 1) * num_layers
        if store is not None:
            self.stream = StreamedCache(store(), num_units, slice_size * stored.itemsize, num_layers)
            self.num_layers, self.places = 1, [self.stream.place(layer) for layer in self.layers]
            self.scratch_base = BUFFERS * self.stream.slots
        unit_size = self.num_layers * slice_size
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
        if self.stream is not None:
            self.stream.attach(self.slices[: self.scratch_base])
        self.host = HostUnits(host_units, unit_size, stored, device)
        self.host_units = self.host.units
        self._layers = np.array(self.places, dtype=np.int64)[:, None]

    @property
    def paired(self) -> bool:
        """Whether V of a block is `num_layers` slices after its K, so that the entry of K locates both."""
        return not self.scratch_blocks and not self.spare_bytes

    @classmethod
    def of(cls, spec: ModelShape, limits: Limits, like: Tensor, **options: Unpack[PoolOptions]) -> Self:
        """Return the pool of a model, with the type and device of `like`. Raises ConfigError for scratch if the model
        cannot use hidden state as a cache."""
        if options.get("scratch_blocks") and (refusal := hidden_state_refusal(spec)):
            raise ConfigError(refusal)
        return cls(
            limits.num_units, num_layers=spec.num_layers, block_size=limits.block_size, num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, dtype=like.dtype, device=like.device, **options,
        )  # fmt: skip

    def begin(self, rows: RowTable, chunks: IntArray) -> None:
        """Begin a step of chunks [n, >=3], before anything else of it uses the pool."""
        if self.stream is not None:
            self.stream.begin(rows, chunks)

    def use(self, layer: int) -> AbstractContextManager[None]:
        """Have the contents of a layer for work launched inside the context."""
        return _AT_HAND if self.stream is None else self.stream.use(layer)

    def write(self, cells: Tensor, values: Tensor) -> None:
        """Write values [n, heads, d] to cells [n]; cells may be wider, except in 8 bits."""
        if self.bytes is not None:
            self.bytes.write(cells, values)
        else:
            self.cells[:, : values.shape[1:].numel()].index_copy_(0, cells, values.flatten(1))

    def read(self, slices: Tensor) -> Tensor:
        """Return the contents of slices [n] in `dtype`, [n, block_size * kv_heads * head_dim]."""
        return self.slices.index_select(0, slices) if self.bytes is None else self.bytes.read(slices, self.dtype)

    def slice_ids(self, entries: np.ndarray) -> Tensor:
        """Convert table entries [n] to slice ids [layers, n] on the device."""
        return self._to_device(self._slices_of(entries))

    def cell_ids(self, entries: np.ndarray, offsets: np.ndarray) -> Tensor:
        """Convert table entries [n] and offsets in their blocks [n] to cell ids [layers, n] on the device."""
        return self._to_device(self._slices_of(entries) * self.block_size + offsets[None, :])

    def scratch_cell_ids(self, entries: np.ndarray, offsets: np.ndarray) -> Tensor:
        """Convert scratch entries [n] and offsets [n] to cell ids [n], the same for all layers, on the device."""
        return self._to_device((self.scratch_base - 1 - entries) * self.block_size + offsets)

    def clear(self, entries: np.ndarray) -> None:
        """Zero whole units and scratch slices [n]: earlier contents may be NaN, which a mask does not hide."""
        units, scratch = entries, entries[:0]
        if self.scratch_blocks:
            units, scratch = entries[entries >= 0], entries[entries < 0]
        if units.size and self.stream is not None:
            self.stream.clear(self._to_device(units))
        elif units.size:
            self.units.index_fill_(0, self._to_device(units), 0)
        if scratch.size:
            self.slices.index_fill_(0, self._to_device(self.scratch_base - 1 - scratch), 0)

    def bytes_of(self, layers: range, num_units: int) -> int:
        """Return the bytes of `num_units` units of `layers`. Raises ValueError if there are too few addresses."""
        if not layers or (num_units + 1) * len(layers) > len(self.slices):
            raise ValueError(f"the pool has no addresses for {num_units} units of {len(layers)} layers")
        return (num_units + 1) * len(layers) * self.slices.shape[1] * self.slices.itemsize

    def relay(self, layers: range, num_units: int) -> None:
        """Rearrange the pool in place for `num_units` units of `layers`.

        Units that exist before and after keep the contents of common layers; other contents are undefined. Memory after
        the last unit is released. Raises ValueError if there are too few addresses or too little memory.
        """
        assert self._memory is not None, "only a pool with spare addresses can be rearranged"
        before, common = self.layers, range(max(layers.start, self.layers.start), min(layers.stop, self.layers.stop))
        self._memory.back(self.bytes_of(layers, num_units))
        kept = min(num_units, self.num_units) if common else 0
        per = max(1, _PIECE // (max(len(before), len(layers)) * self.slices.shape[1] * self.slices.itemsize))
        pieces = range(0, kept, per)
        # Move in the direction that overwrites only slices that were already moved.
        for first in pieces if len(layers) <= len(before) else reversed(pieces):
            last = min(first + per, kept)
            held = self._view(first, last, len(before))[:, common.start - before.start : common.stop - before.start]
            target = self._view(first, last, len(layers))
            target[:, common.start - layers.start : common.stop - layers.start] = held.clone()
        self.layers, self.num_layers = layers, len(layers)
        self.num_units = self.zero_unit = num_units
        self.scratch_base = (num_units + 1) * len(layers)
        self.places = [*range(len(layers))]
        self._layers = np.array(self.places, dtype=np.int64)[:, None]
        self.units = self._view(0, num_units + 1, len(layers)).flatten(1)
        self.units[self.zero_unit] = 0
        self.give_back(num_units + 1)

    def give_back(self, first: int) -> None:
        """Release the memory of units from `first` on, which hold nothing."""
        assert self._memory is not None
        self._memory.give_back(first * self.num_layers * self.slices.shape[1] * self.slices.itemsize)

    def past(self, units: np.ndarray, layers: range) -> Tensor:
        """Return a host copy of some layers of units [n], [n, layers, elements of a slice]."""
        ids = self._ids_of(units, layers)
        parts = [self.slices.index_select(0, self._to_device(part.ravel())).cpu() for part in self._pieces(ids)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*ids.shape, self.slices.shape[1])

    def put_past(self, units: np.ndarray, layers: range, values: Tensor) -> None:
        """Write a result of `past` to as many units and the same layers."""
        ids = self._ids_of(units, layers)
        rows = values.reshape(ids.size, self.slices.shape[1])
        for part in self._pieces(ids):
            held, rows = rows[: part.size], rows[part.size :]
            self.slices.index_copy_(0, self._to_device(part.ravel()), held.to(self.device))

    def _pieces(self, ids: np.ndarray) -> list[np.ndarray]:
        """Split ids [n, layers] into groups of a few units, because a device may lack memory for a full copy."""
        if self.device.type == "cpu" or not ids.size:
            return [ids]
        per = max(1, _PIECE // (ids.shape[1] * self.slices.shape[1] * self.slices.itemsize))
        return [ids[first : first + per] for first in range(0, len(ids), per)]

    def _ids_of(self, units: np.ndarray, layers: range) -> np.ndarray:
        """Return slice ids [n, layers]. Raises ValueError for layers or units that the pool does not have."""
        if len(layers) and (layers.start < self.layers.start or layers.stop > self.layers.stop):
            raise ValueError(f"layers {layers} are not all in {self.layers}")
        if units.size and not 0 <= int(units.min()) <= int(units.max()) < self.num_units:
            raise ValueError(f"a unit is outside the pool of {self.num_units} units")
        within = np.arange(layers.start, layers.stop) - self.layers.start
        ids: np.ndarray = units[:, None] * self.num_layers + within
        return ids

    def _view(self, first: int, last: int, num_layers: int) -> Tensor:
        """View units as if each had `num_layers` layers, [last - first, num_layers, elements of a slice]."""
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


_NO_MOVES = StateMoves()
_Saves = Mapping[tuple[int, int], int]
"""(row, number of tokens) -> place of the saved state."""


class _Run(NamedTuple):
    """Tokens of one request that a layer runs at once, from token `first` of the step.

    The final state is also copied to place `kept` of the table if that is not negative.
    """

    row: int
    begins: bool
    first: int
    length: int
    kept: int


class StateTable:
    """States of all rows and slots.

    `layers` holds the states of one request per recurrent layer, as a template. The table has `num_rows` copies,
    initially zero, followed by `num_slots` slots, and `host_slots` slots on the host.
    """

    def __init__(
        self, layers: Mapping[int, LayerState], num_rows: int, num_slots: int = 0, host_slots: int = 0
    ) -> None:
        count = num_rows + num_slots
        self._layers = {
            layer: {part: state.new_zeros(count, *state.shape[1:]) for part, state in found.parts.items()}
            for layer, found in layers.items()
        }
        self._host = {
            layer: {part: _on_host(state, host_slots) for part, state in found.parts.items()}
            for layer, found in layers.items()
        }
        self._resumes = {layer: found.resumes for layer, found in layers.items()}
        self._num_rows, self._num_slots = num_rows, num_slots

    def of_step(self, layout: Layout, device: torch.device, moves: StateMoves = _NO_MOVES) -> Recur:
        """Return the function that runs the recurrent layers of a step."""
        decodes = (layout.lengths == 1) & (layout.starts > 0)
        where, places = (torch.from_numpy(each[decodes]).to(device) for each in (layout.rows, layout.firsts))
        saves = {(row, num_tokens): self._num_rows + slot for row, num_tokens, slot in moves.saved}
        runs = list(_runs(layout.chunks[~decodes], layout.firsts[~decodes], saves))
        ends = zip(layout.rows[decodes].tolist(), (layout.starts[decodes] + 1).tolist(), strict=True)
        kept = [(end[0], saves[end]) for end in ends if end in saves]
        assert len(kept) + sum(run.kept >= 0 for run in runs) == len(saves), "a saved state must end a chunk or part"
        self._park(moves.parked)
        loads = self._load(moves.loaded, device)
        copies = _places(kept, device)

        def recur(layer: int, call: Call, x: Tensor) -> Tensor:
            tables, output = self._layers[layer], torch.empty_like(x)
            _copy(tables, loads)
            if len(where):
                past = RecurrentState({part: table.index_select(0, where) for part, table in tables.items()})
                output[0].index_copy_(0, places, call(x[0].index_select(0, places)[:, None], past)[:, 0])
                for part, table in tables.items():
                    table.index_copy_(0, where, past.parts[part].to(table.dtype))
                _copy(tables, copies)
            for run in runs:
                self._run(layer, call, x, output, run)
            return output

        return recur

    def _park(self, parked: Sequence[tuple[int, int]]) -> None:
        """Copy slots of the device to slots of the host."""
        for slot, target in parked:
            for layer, tables in self._layers.items():
                for part, table in tables.items():
                    self._host[layer][part][target].copy_(table[self._num_rows + slot], non_blocking=True)

    def _load(self, loaded: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """Load states from the host into rows; return the places of the remaining copies on the device."""
        for row, slot in loaded:
            for layer, tables in self._layers.items() if slot >= self._num_slots else ():
                for part, table in tables.items():
                    table[row].copy_(self._host[layer][part][slot - self._num_slots], non_blocking=True)
        return _places([(self._num_rows + slot, row) for row, slot in loaded if slot < self._num_slots], device)

    def _run(self, layer: int, call: Call, x: Tensor, output: Tensor, run: _Run) -> None:
        tables, row = self._layers[layer], slice(run.row, run.row + 1)
        past = RecurrentState(None if run.begins else {part: table[row] for part, table in tables.items()})
        at_once = run.length if self._resumes[layer] or run.begins else 1
        for place in range(run.first, run.first + run.length, at_once):
            output[:, place : place + at_once] = call(x[:, place : place + at_once], past)
        for part, table in tables.items():
            table[row].copy_(past.parts[part])
            if run.kept >= 0:
                table[run.kept].copy_(past.parts[part][0])


def _runs(chunks: IntArray, firsts: IntArray, saves: _Saves) -> Iterator[_Run]:
    """Split chunks [n, 4] with first tokens `firsts` [n] wherever a state is saved."""
    for (row, start, length, _), first in zip(chunks.tolist(), firsts.tolist(), strict=True):
        cuts = sorted(num_tokens for of_row, num_tokens in saves if of_row == row and start < num_tokens)
        begin = start
        for end in sorted({*cuts, start + length}):
            yield _Run(row, begin == 0, first + begin - start, end - begin, saves.get((row, end), -1))
            begin = end


def _on_host(state: Tensor, slots: int) -> Tensor:
    """Return zeros for `slots` copies of a state [1, ...] on the host."""
    size = slots * state[0].numel() * state.element_size()
    return host_zeros(size, state.device).view(state.dtype).view(slots, *state.shape[1:])


def _places(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return [2, n], sources and targets."""
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous().to(device)


def _copy(tables: Mapping[Part, Tensor], places: Tensor) -> None:
    if places.shape[1]:
        source, target = places
        for table in tables.values():
            table.index_copy_(0, target, table.index_select(0, source))
