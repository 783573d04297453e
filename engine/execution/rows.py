"""Host state of a runner's rows, updated in place from the deltas of a `SchedulerOutput`.

A row is the index of a running request in every table: tokens, sampling parameters, and block table (per block units of
K and V, one unit of both, or one of hidden state, in any mix). All tables are numpy, so that the index arrays of a step
are vector operations; native kernels read tokens and tables (64 bits) in place.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.arrays import IntArray
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.execution.sampling_table import SamplingTable
from engine.forms import Pooling
from engine.limits import Limits
from engine.scheduling.output import NewRequest, SavedState, SchedulerOutput

UNKNOWN = -1
"""Placeholder for a token that only the device knows so far."""


class StateMoves(NamedTuple):
    """Transfers of recurrent states between slots and rows in a step.

    Attributes:
        parked: (slot, slot on the host), before all others.
        loaded: (row, slot), after `parked`.
        saved: States saved while the step runs.
    """

    parked: tuple[tuple[int, int], ...] = ()
    loaded: tuple[tuple[int, int], ...] = ()
    saved: tuple[SavedState, ...] = ()


class RowTable:
    """Tables of all rows. The memory of the large tables is committed only where it is used.

    Attributes:
        tokens: [rows, max_model_len + 1].
        num_prompt: [rows], prompt tokens.
        num_blocks: [rows], blocks of the table.
        tables: [3, rows, max_blocks], units of K, V and hidden state; also as `k_table`, `v_table`, `hidden_table`.
        generation: [rows], number of requests that the row has held.
        known_to: [rows], tokens before this position were known before they were sampled.
        pooling: Pooling of the row's request, or None.
        pools: [rows], whether the row's request is pooled.
        adapters: [rows], number of the LoRA adapter; 0: none.
        window: See `SchedulerConfig`. Entries of blocks before the window may be stale and are not read
            (`num_unseen`).
        is_hidden: [rows, max_blocks], whether a block is hidden state; else its entry in `hidden_table` is undefined.
        num_hidden: [rows], number of hidden blocks; always 0 unless `hidden`. K and V of hidden blocks pass through
            scratch: `engine.execution.hidden` sets their entries in `k_table` and `v_table`, which are negative, in
            every step that projects them.
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
        """Release rows, write new requests, extend tables, replace entries, and write drafts, in this order."""
        for row in output.released_rows:
            self._empty(row)
        for new in output.new_requests:
            self._write(new)
        for appended in output.appended:
            self._extend(appended.row, appended.entries)
        for row, block, entry in output.replaced:
            assert block < self.num_blocks[row], "a replaced block must exist in the row"
            self._put(row, block, entry)
            self.note(row, np.array([block]))
        for draft in output.drafts:
            self.tokens[draft.row, draft.start : draft.start + len(draft.token_ids)] = draft.token_ids
        loaded = tuple((new.row, new.state) for new in output.new_requests if new.state >= 0)
        self._state_moves = StateMoves(output.parked_states, loaded, output.saved_states)

    def take_state_moves(self) -> StateMoves:
        """Return, once, the state transfers of the step applied last."""
        moves, self._state_moves = self._state_moves, StateMoves()
        return moves

    def settle(self, rows: IntArray, ends: IntArray, generations: IntArray, tokens: npt.NDArray[np.integer]) -> None:
        """Store sampled tokens [n] at positions `ends` that are UNKNOWN, for rows that still hold the same request."""
        same = (self.generation[rows] == generations) & (self.tokens[rows, ends] == UNKNOWN)
        # Without a token the request ends or repeats the step, but a step already in flight needs a valid id to read.
        self.tokens[rows[same], ends[same]] = np.maximum(tokens[same], 0)

    def force(self, row: int, end: int, token_ids: Sequence[int]) -> None:
        """Write the forced tokens from position `end` on."""
        self.known_to[row] = end + len(token_ids)
        self.tokens[row, end : end + len(token_ids)] = token_ids

    def point(self, rows: IntArray, blocks: IntArray, k_entries: IntArray, v_entries: IntArray) -> None:
        """Set the K and V entries of blocks [n] of rows [n]."""
        self.k_table[rows, blocks], self.v_table[rows, blocks] = k_entries, v_entries
        self.note(rows, blocks)

    def mirror(self, tables: IntArray) -> None:
        """Copy the K and V entries [2, n, blocks] of another engine's rows to the first rows."""
        _, count, blocks = tables.shape
        here = self.tables[:2, :count, :blocks]
        if self._changed is not None:
            self.note(*np.nonzero((here != tables).any(axis=0)))
        here[...] = tables
        self.num_blocks[:count] = blocks

    def num_unseen(self, starts: IntArray) -> IntArray:
        """Return the number of leading blocks that chunks beginning at `starts` [n] do not see."""
        return np.maximum(starts - self.window + 1, 0) // self.block_size if self.window else np.zeros_like(starts)

    def track_changes(self) -> None:
        """Enable `take_changes`."""
        self._changed = []

    def take_changes(self) -> IntArray:
        """Return the blocks [n] (row * max_blocks + block), unique, whose entries changed since the last call."""
        if not self._changed:
            return np.zeros(0, np.int64)
        changed, self._changed = self._changed, []
        return np.unique(np.concatenate(changed))

    def note(self, rows: IntArray | int, blocks: IntArray) -> None:
        """Record that entries of the blocks were written."""
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
        assert last <= self.tables.shape[2], "the block table exceeds the longest context"
        if all(entry.kind is CacheKind.KV and entry.tier is Tier.DEVICE for entry in entries):
            self.tables[:2, row, first:last] = np.array([entry.units for entry in entries]).T
        else:
            for block, entry in enumerate(entries, first):
                self._put(row, block, entry)
        self.num_blocks[row] = last
        self.note(row, np.arange(first, last))

    def _put(self, row: int, block: int, entry: CacheEntry) -> None:
        assert entry.tier is Tier.DEVICE, "blocks of a row must be on the device"
        if entry.kind is CacheKind.GONE:
            assert self.window, "only blocks before a window can be given back"
            self.tables[:2, row, block] = 0, 1  # existing units, because some checks read the whole table
            return
        hidden = entry.kind is CacheKind.HIDDEN
        assert self._takes_hidden or not hidden, "this runner has no scratch for hidden state"
        self.num_hidden[row] += int(hidden) - int(self.is_hidden[row, block])
        self.is_hidden[row, block] = hidden
        if hidden:
            (self.hidden_table[row, block],) = entry.units
            self.k_table[row, block] = self.v_table[row, block] = -1
        else:
            self.k_table[row, block], self.v_table[row, block] = entry.units
