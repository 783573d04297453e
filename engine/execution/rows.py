"""Host state of a runner's rows, updated in place from the deltas of a `SchedulerOutput`.

A row is the index of a running request in every table: tokens, sampling parameters, and block table (per block units of
K and V, one unit of both, or one of hidden state, in any mix). All tables are numpy, so that the index arrays of a step
are vector operations; native kernels read tokens and tables (64 bits) in place. Torch-free.

`Layout` is the order of a step's chunks and tokens for the model. No library of the server is imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from engine.api import NEVER, SamplingParams
from engine.arrays import FloatArray, IntArray
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.forms import Pooling
from engine.limits import Limits
from engine.scheduling.output import AppendedEntries, Chunk, NewRequest, SavedState, SchedulerOutput

UNKNOWN = -1
"""Placeholder for a token that only the device knows so far."""
SLICES_PER_SCRATCH_BLOCK = 2  # K and V
GREEDY_BELOW = 1e-5
"""Lower temperatures are treated as greedy, because logits divided by them would overflow float32."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SamplingTable:
    """Sampling parameters of rows: one column per parameter, one entry per row.

    Attributes:
        num_logprobs: Number of best log-probabilities; -1: none are wanted.
        edits: Whether logits must be changed before sampling (bias, penalties, or a minimum length).
        penalised: Whether `penalties` apply.
        penalties: [rows, 3] (repetition, frequency, presence).
        masked_from: Output position from which a mask may limit the tokens.
    """

    def __init__(self, num_rows: int) -> None:
        self.params: list[SamplingParams | None] = [None] * num_rows
        self.temperature = np.zeros(num_rows)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows)
        self.min_p = np.zeros(num_rows)
        self.seed = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)
        self.greedy = np.ones(num_rows, dtype=bool)
        self.edits = np.zeros(num_rows, dtype=bool)
        self.penalised = np.zeros(num_rows, dtype=bool)
        self.penalties = np.zeros((num_rows, 3))
        self.masked_from = np.full(num_rows, NEVER, dtype=np.int64)

    def write(self, row: int, params: SamplingParams) -> None:
        """Store a request's parameters."""
        self.params[row] = params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.greedy[row] = params.temperature < GREEDY_BELOW
        self.masked_from[row] = params.masked_from
        self.penalised[row] = params.has_penalties
        self.penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.edits[row] = bool(params.logit_bias) or has_minimum(params) or params.has_penalties

    def plain(self, rows: IntArray) -> bool:
        """Return whether all rows are greedy without edits or log-probabilities."""
        special = ~self.greedy[rows] | self.edits[rows] | (self.num_logprobs[rows] >= 0)
        return not special.any()

    def additions(self, row: int, output_position: int) -> tuple[IntArray, FloatArray]:
        """Return the constant additions to the row's logits: token ids [n], possibly repeated, and values [n]."""
        params = self.params[row]
        assert params is not None, "a sampled row must hold a request"
        pairs = list(params.logit_bias)
        if has_minimum(params) and output_position < params.min_tokens:
            pairs += [(token_id, -np.inf) for token_id in sorted(params.stop_token_ids)]
        ids, values = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float64)


def has_minimum(params: SamplingParams) -> bool:
    """Return whether stop tokens are forbidden up to a minimum length; with a grammar, the masks handle that."""
    return params.min_tokens > 0 and params.grammar is None


def uniforms(seeds: IntArray, positions: IntArray) -> FloatArray:
    """Return one number in [0, 1) per (seed, output position), by SplitMix64; 52 bits, so that u * x < x for x > 0.

    It depends on nothing else, so other rows, preemption and batch order cannot change the output of a request.
    """
    stream = _mix(seeds.astype(np.int64).view(np.uint64) + _GOLDEN)
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


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
        version: Number of times that a row was written, or got or lost a block of hidden state.
        known_to: [rows], tokens before this position were known before they were sampled.
        pooling: Pooling of the row's request, or None.
        pools: [rows], whether the row's request is pooled.
        adapters: [rows], number of the LoRA adapter; 0: none.
        is_long: [rows], whether the long factors of longrope apply to the row's request.
        window: See `SchedulerConfig`. Entries of blocks before the window may be stale and are not read
            (`num_unseen`).
        is_hidden: [rows, max_blocks], whether a block is hidden state; else its entry in `hidden_table` is undefined.
        num_hidden: [rows], number of hidden blocks; always 0 unless `hidden`. K and V of hidden blocks pass through
            scratch: `ScratchPlan` sets their entries in `k_table` and `v_table`, which are negative, in every step
            that projects them.
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
        self.is_long = np.zeros(self.num_rows, dtype=np.bool_)
        self.num_blocks = np.zeros(self.num_rows, dtype=np.int64)
        self.generation = np.zeros(self.num_rows, dtype=np.int64)
        self.tables = np.zeros((3, self.num_rows, max_blocks), dtype=np.int64)
        self.k_table, self.v_table, self.hidden_table = self.tables
        self.is_hidden = np.zeros((self.num_rows, max_blocks), dtype=np.bool_)
        self.num_hidden = np.zeros(self.num_rows, dtype=np.int64)
        self.version = 0
        self._takes_hidden = hidden
        self._changed: list[IntArray] | None = None
        self._state_moves = StateMoves()

    def apply(self, output: SchedulerOutput) -> None:
        """Release rows, write new requests, extend tables, replace entries, and write drafts, in this order."""
        for row in output.released_rows:
            self._empty(row)
        for new in output.new_requests:
            self._write(new)
        if len(output.appended) < 2 or not self._extend_each(output.appended):
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
        if not same.all():
            rows, ends, tokens = rows[same], ends[same], tokens[same]
        # Without a token the request ends or repeats the step, but a step already in flight needs a valid id to read.
        self.tokens[rows, ends] = np.maximum(tokens, 0)

    def force(self, row: int, end: int, token_ids: Sequence[int]) -> None:
        """Write the forced tokens from position `end` on."""
        self.known_to[row] = end + len(token_ids)
        self.tokens[row, end : end + len(token_ids)] = token_ids

    def point(self, rows: IntArray, blocks: IntArray, k_entries: IntArray, v_entries: IntArray) -> None:
        """Set the K and V entries of blocks [n] of rows [n]."""
        self.k_table[rows, blocks], self.v_table[rows, blocks] = k_entries, v_entries
        self.note(rows, blocks)

    def mirror(self, tables: IntArray, is_long: npt.NDArray[np.bool_]) -> None:
        """Copy the K and V entries [2, n, blocks], and `is_long [n]`, of another engine's rows to the first rows."""
        _, count, blocks = tables.shape
        here = self.tables[:2, :count, :blocks]
        if self._changed is not None:
            self.note(*np.nonzero((here != tables).any(axis=0)))
        here[...] = tables
        self.num_blocks[:count] = blocks
        self.is_long[:count] = is_long

    def num_unseen(self, starts: IntArray) -> IntArray:
        """Return the number of leading blocks that chunks beginning at `starts` [n] do not see."""
        return np.maximum(starts - self.window + 1, 0) // self.block_size if self.window else np.zeros_like(starts)

    def units_of(self, rows: IntArray, num_blocks: int) -> IntArray:
        """Return the stored units [2, n, num_blocks] of the first blocks of rows [n]: K and V, or hidden state and -1.

        Entries of blocks that a row does not have are undefined.
        """
        units: IntArray = self.tables[:2, rows, :num_blocks]
        if self._takes_hidden:
            hidden = self.is_hidden[rows, :num_blocks]
            units[0][hidden] = self.hidden_table[rows, :num_blocks][hidden]
            units[1][hidden] = -1
        return units

    def track_changes(self) -> None:
        """Enable `take_changes`."""
        self._changed = []

    def take_changes(self) -> IntArray:
        """Return the blocks [n] (row * max_blocks + block), unique, whose entries changed since the last call."""
        if not self._changed:
            return np.zeros(0, np.int64)
        changed, self._changed = self._changed, []
        return changed[0] if len(changed) == 1 else np.unique(np.concatenate(changed))

    def note(self, rows: IntArray | int, blocks: IntArray) -> None:
        """Record that entries of the blocks, all different, were written."""
        self._note(rows * self.tables.shape[2] + blocks)

    def _note(self, places: IntArray) -> None:
        if self._changed is not None:
            self._changed.append(places)

    def _empty(self, row: int) -> None:
        self.num_blocks[row] = 0
        if self.num_hidden[row]:
            self.is_hidden[row] = False
            self.num_hidden[row] = 0

    def _write(self, new: NewRequest) -> None:
        self.tokens[new.row, : len(new.token_ids)] = new.token_ids
        self.num_prompt[new.row] = new.num_prompt_tokens
        self.known_to[new.row] = 0
        self.version += 1
        self._empty(new.row)
        self.generation[new.row] += 1
        self.sampling.write(new.row, new.sampling)
        self.pooling[new.row] = new.pooling
        self.pools[new.row] = new.pooling is not None
        self.adapters[new.row] = new.adapter
        self.is_long[new.row] = new.is_long
        self._extend(new.row, new.entries)

    def _extend_each(self, appended: Sequence[AppendedEntries]) -> bool:
        """Append one block of K and V to each of several rows, or return False without a change."""
        rows = [row for row, _ in appended]
        entries = [each[0] for _, each in appended if len(each) == 1]
        units = [e[2] for e in entries if e[0] is CacheKind.KV and e[1] is Tier.DEVICE]
        if not len(units) == len(set(rows)) == len(rows):
            return False
        where, width = np.array(rows), self.tables.shape[2]
        blocks = self.num_blocks[where]
        assert blocks.max() < width, "the block table exceeds the longest context"
        places = where * width + blocks
        flat = np.fromiter(chain.from_iterable(units), np.int64, 2 * len(rows))
        self.k_table.reshape(-1)[places], self.v_table.reshape(-1)[places] = flat[::2], flat[1::2]
        self.num_blocks[where] = blocks + 1
        self._note(places)
        return True

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
        self.version += int(hidden or self.is_hidden[row, block])
        self.num_hidden[row] += int(hidden) - int(self.is_hidden[row, block])
        self.is_hidden[row, block] = hidden
        if hidden:
            (self.hidden_table[row, block],) = entry.units
            self.k_table[row, block] = self.v_table[row, block] = -1
        else:
            self.k_table[row, block], self.v_table[row, block] = entry.units


def has_hidden(rows: RowTable, chunks: IntArray) -> bool:
    """Return whether any row of the chunks [n, >=3] has a block of hidden state."""
    return bool(rows.num_hidden[chunks[:, 0]].any())


class ScratchPlan:
    """Hidden blocks of a step's rows, and the scratch slices of their K and V (Apt-Serve §4).

    A step assigns two scratch slices to every hidden block of its rows and enters them in the K and V tables of the
    rows, so that attention needs no special case. Before a layer attends, the device stores the input of new tokens in
    their hidden blocks and projects K and V of past tokens into the scratch; attention writes K and V of new tokens
    there. All layers use the same slices in turn. A block shared by several rows is projected once.

    Attributes:
        places: [m], chunk of every hidden block in use.
        blocks: [m], its block number.
        rows: [m], its row.
        units: [d], distinct hidden units.
        first: [d], index into `places` of a block of each unit.
        scratch: [m], index into `units`.
    """

    def __init__(self, rows: RowTable, chunks: IntArray, scratch_blocks: int) -> None:
        members, ends = chunks[:, 0], chunks[:, 1] + chunks[:, 2]
        counts = -(-ends // rows.block_size)
        width = int(counts.max())
        used = rows.is_hidden[members, :width] & (np.arange(width) < counts[:, None])
        self.places, self.blocks = np.nonzero(used)
        self.rows = members[self.places]
        found = np.unique(rows.hidden_table[self.rows, self.blocks], return_index=True, return_inverse=True)
        self.units, self.first, self.scratch = found
        assert len(self.units) <= scratch_blocks, (
            f"the step reads {len(self.units)} blocks of hidden state, scratch holds {scratch_blocks}"
        )

    def past_tokens(self, chunks: IntArray, block_size: int) -> tuple[IntArray, IntArray]:
        """Return index into `units`, and offset in the block, of the tokens [t] whose K and V must be projected."""
        # A shared block is full for all its rows, so its first occurrence represents all.
        begins = self.blocks[self.first] * block_size
        past = np.clip(chunks[self.places[self.first], 1] - begins, 0, block_size)
        index = np.repeat(np.arange(len(past)), past)
        return index, np.arange(len(index)) - np.repeat(np.cumsum(past) - past, past)

    def enter(self, rows: RowTable) -> None:
        """Point the K and V tables at scratch."""
        entries = SLICES_PER_SCRATCH_BLOCK * self.scratch
        rows.point(self.rows, self.blocks, -1 - entries, -2 - entries)

    def beyond(self, rows: RowTable, chunks: IntArray) -> IntArray:
        """Return the scratch entries of blocks that are not full after the chunks [n, >=3] have run."""
        ends = chunks[self.places, 1] + chunks[self.places, 2]
        partial = ends < (self.blocks + 1) * rows.block_size
        where = (self.rows[partial], self.blocks[partial])
        entries: IntArray = np.concatenate((rows.k_table[where], rows.v_table[where]))
        return entries


@dataclass(frozen=True, slots=True)
class Layout:
    """Chunks and tokens of a step in the order of the model.

    Attributes:
        chunks: [n, 4] (row, start, length, sample); `rows`, `starts` and `lengths` [n] are its columns.
        firsts: [n], index of a chunk's first token among the T tokens.
        token_rows: [T], row of each token.
        positions: [T], position of each token.
        sampled: [S], index of each sampling chunk, in the order of the step.
    """

    chunks: IntArray
    rows: IntArray
    starts: IntArray
    lengths: IntArray
    firsts: IntArray
    token_rows: IntArray
    positions: IntArray
    sampled: IntArray

    @classmethod
    def of(cls, chunks: IntArray, order: IntArray) -> Self:
        """Arrange `chunks`; `order [n]` is the index in the step of the chunk at each place."""
        place = np.empty(len(chunks), dtype=np.int64)
        place[order] = np.arange(len(chunks))
        sampled = place[np.flatnonzero(chunks[:, 3])]
        chunks = chunks[order]
        rows, starts, lengths, _ = chunks.T
        firsts = np.cumsum(lengths) - lengths
        positions = np.arange(int(lengths.sum())) + np.repeat(starts - firsts, lengths)
        return cls(chunks, rows, starts, lengths, firsts, np.repeat(rows, lengths), positions, sampled)

    @property
    def num_decodes(self) -> int:
        return int((self.lengths == 1).sum())

    @property
    def sampled_rows(self) -> IntArray:
        rows: IntArray = self.chunks[self.sampled, 0]
        return rows

    @property
    def sampled_tokens(self) -> IntArray:
        """[S], index of the token after which each sample comes."""
        tokens: IntArray = self.firsts[self.sampled] + self.lengths[self.sampled] - 1
        return tokens


def chunk_array(chunks: Sequence[Chunk]) -> IntArray:
    """Return chunks as an array [n, 4] (row, start, length, sample)."""
    return np.fromiter(chain.from_iterable(chunks), np.int64, 4 * len(chunks)).reshape(-1, 4)


def decodes_first(chunks: IntArray) -> Layout:
    """Arrange chunks [n, 4] with those of one token first, otherwise in the order of the step."""
    return Layout.of(chunks, np.argsort(chunks[:, 2] > 1, kind="stable"))
