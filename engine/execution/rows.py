"""Per-row state of a runner on the host, updated in place from the deltas of a `SchedulerOutput`.

A row is a running request's place in every table: its tokens, its sampling parameters, and its block table (units of K
and of V per block, or one of both or of hidden state, in any mix). All numpy, so that a step's index arrays are vector
operations; native kernels read tokens and tables, 64 bits wide, where they lie. Knows nothing of tensors or models.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.arrays import IntArray
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.execution.sampling_table import SamplingTable
from engine.pooling import Pooling
from engine.scheduling.output import NewRequest, SavedState, SchedulerOutput
from predictor.limits import Limits

UNKNOWN = -1
"""Stands for a token that only the device knows yet."""


class StateMoves(NamedTuple):
    """What a step does with slots of recurrent layers' states: before all some are `parked`, (slot, slot on the host);
    then (row, slot) are `loaded`; on the way others are `saved`."""

    parked: tuple[tuple[int, int], ...] = ()
    loaded: tuple[tuple[int, int], ...] = ()
    saved: tuple[SavedState, ...] = ()


class RowTable:
    """`tokens [rows, max_model_len + 1]`; `num_blocks`, `num_prompt [rows]`; `tables [3, rows, max_blocks]`: units of
    K, V and hidden state, also as `k_table`, `v_table`, `hidden_table`. `generation [rows]`: requests a row has held.
    `known_to [rows]`: tokens before that position were known before anything sampled them.
    `pooling`, `pools [rows]`: how, and whether, a row's request is made one vector. `adapters [rows]`: the number of
    its LoRA adapter, 0: none.

    `window`: see `SchedulerConfig`. Entries of blocks before it may be of units that others have by now, or mean
    nothing: nobody reads what they say (`num_unseen`).

    `is_hidden [rows, max_blocks]`: blocks of hidden state (the entries of other blocks in `hidden_table` mean nothing),
    `num_hidden [rows]`: how many a row has; refused unless `hidden`. K and V of those pass through scratch, to which
    `engine.execution.hidden` points `k_table` and `v_table` anew for every step that projects them: such entries are
    below zero, always. Memory of the large tables is committed only where it is used.
    """

    def __init__(self, limits: Limits, *, hidden: bool = False) -> None:
        self.num_rows, max_blocks = limits.max_num_seqs, limits.max_model_len // limits.block_size + 1
        self.block_size = limits.block_size
        self.window = limits.window
        self.sampling = SamplingTable(self.num_rows)
        self.tokens = np.zeros((self.num_rows, limits.max_model_len + 1), dtype=np.int64)
        self.num_prompt = np.zeros(self.num_rows, dtype=np.int64)
        self.known_to = np.zeros(self.num_rows, dtype=np.int64)
        self.pooling: list[Pooling | None] = [None] * self.num_rows
        self.pools = np.zeros(self.num_rows, dtype=np.bool_)
        self.adapters = np.zeros(self.num_rows, dtype=np.int64)
        self.num_blocks = np.zeros(self.num_rows, dtype=np.int64)
        self.generation = np.zeros(self.num_rows, dtype=np.int64)
        self.tables = np.zeros((3, self.num_rows, max_blocks), dtype=np.int64)
        self.k_table, self.v_table, self.hidden_table = self.tables
        self.is_hidden = np.zeros((self.num_rows, max_blocks), dtype=np.bool_)
        self.num_hidden = np.zeros(self.num_rows, dtype=np.int64)
        self._takes_hidden = hidden
        self._changed: list[IntArray] | None = None
        self._state_moves = StateMoves()

    def apply(self, output: SchedulerOutput) -> None:
        """Release rows, write new requests whole, extend block tables, replace entries: in this order."""
        for row in output.released_rows:
            self._empty(row)
        for new in output.new_requests:
            self._write(new)
        for appended in output.appended:
            self._extend(appended.row, appended.entries)
        for row, block, entry in output.replaced:
            assert block < self.num_blocks[row], "a block that the row does not have is replaced"
            self._put(row, block, entry)
            self.note(row, np.array([block]))
        loaded = tuple((new.row, new.state) for new in output.new_requests if new.state >= 0)
        self._state_moves = StateMoves(output.parked_states, loaded, output.saved_states)

    def take_state_moves(self) -> StateMoves:
        """What the step that was applied last does with states, once."""
        moves, self._state_moves = self._state_moves, StateMoves()
        return moves

    def settle(self, rows: IntArray, ends: IntArray, generations: IntArray, tokens: npt.NDArray[np.integer]) -> None:
        """Note sampled tokens [n] at positions `ends` that wait for one, of rows that still hold the request they were
        sampled for."""
        same = (self.generation[rows] == generations) & (self.tokens[rows, ends] == UNKNOWN)
        # without a token its request ends, or runs the step again; one already in flight still needs some id to read
        self.tokens[rows[same], ends[same]] = np.maximum(tokens[same], 0)

    def force(self, row: int, end: int, token_ids: Sequence[int]) -> None:
        """Write what must follow the token before position `end`."""
        self.known_to[row] = end + len(token_ids)
        self.tokens[row, end : end + len(token_ids)] = token_ids

    def point(self, rows: IntArray, blocks: IntArray, k_entries: IntArray, v_entries: IntArray) -> None:
        """Set the K and V entries of blocks [n] of rows [n]."""
        self.k_table[rows, blocks], self.v_table[rows, blocks] = k_entries, v_entries
        self.note(rows, blocks)

    def mirror(self, tables: IntArray) -> None:
        """Let the first rows have these entries of K and V, [2, n, blocks]: those of another engine's rows."""
        _, count, blocks = tables.shape
        here = self.tables[:2, :count, :blocks]
        if self._changed is not None:
            self.note(*np.nonzero((here != tables).any(axis=0)))
        here[...] = tables
        self.num_blocks[:count] = blocks

    def num_unseen(self, starts: IntArray) -> IntArray:
        """Blocks in front of all that chunks see which begin at `starts` [n]."""
        return np.maximum(starts - self.window + 1, 0) // self.block_size if self.window else np.zeros_like(starts)

    def track_changes(self) -> None:
        """From now on `take_changes` says what changed in the tables."""
        self._changed = []

    def take_changes(self) -> IntArray:
        """Blocks [n] (row * max_blocks + block), none twice, whose entries changed since the last call."""
        if not self._changed:
            return np.zeros(0, np.int64)
        changed, self._changed = self._changed, []
        return np.unique(np.concatenate(changed))

    def note(self, rows: IntArray | int, blocks: IntArray) -> None:
        """Entries of these blocks were written."""
        if self._changed is not None:
            self._changed.append(rows * self.tables.shape[2] + blocks)

    def _empty(self, row: int) -> None:
        self.num_blocks[row] = 0
        if self.num_hidden[row]:
            self.is_hidden[row] = False
            self.num_hidden[row] = 0

    def _write(self, new: NewRequest) -> None:
        self.tokens[new.row, : len(new.token_ids)] = new.token_ids
        self.num_prompt[new.row] = new.num_prompt_tokens
        self.known_to[new.row] = 0
        self._empty(new.row)
        self.generation[new.row] += 1
        self.sampling.write(new.row, new.sampling)
        self.pooling[new.row] = new.pooling
        self.pools[new.row] = new.pooling is not None
        self.adapters[new.row] = new.adapter
        self._extend(new.row, new.entries)

    def _extend(self, row: int, entries: Sequence[CacheEntry]) -> None:
        if not entries:
            return
        first = int(self.num_blocks[row])
        last = first + len(entries)
        assert last <= self.tables.shape[2], "a block table is longer than the longest context"
        if all(entry.kind is CacheKind.KV and entry.tier is Tier.DEVICE for entry in entries):
            self.tables[:2, row, first:last] = np.array([entry.units for entry in entries]).T
        else:
            for block, entry in enumerate(entries, first):
                self._put(row, block, entry)
        self.num_blocks[row] = last
        self.note(row, np.arange(first, last))

    def _put(self, row: int, block: int, entry: CacheEntry) -> None:
        assert entry.tier is Tier.DEVICE, "a row's blocks are on the device"
        if entry.kind is CacheKind.GONE:
            assert self.window, "a block was given back that is read"
            self.tables[:2, row, block] = 0, 1  # units that exist, as a block's do: some check the whole table
            return
        hidden = entry.kind is CacheKind.HIDDEN
        assert self._takes_hidden or not hidden, "this runner was made without scratch for hidden state"
        self.num_hidden[row] += int(hidden) - int(self.is_hidden[row, block])
        self.is_hidden[row, block] = hidden
        if hidden:
            (self.hidden_table[row, block],) = entry.units
            self.k_table[row, block] = self.v_table[row, block] = -1
        else:
            self.k_table[row, block], self.v_table[row, block] = entry.units
