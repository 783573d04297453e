"""Per-row state of the runner, updated in place from the deltas of a `SchedulerOutput`.

A row is a running request's place in every table: its tokens, its block tables (unit ids of K and of V per block, or of
hidden state, in any mix). All numpy, so that a step's index arrays are vector operations. Knows nothing of tensors,
models or sampling.
"""

from collections.abc import Sequence

import numpy as np

from engine.cache.cache_map import CacheEntry, CacheKind, Tier
from engine.scheduling.output import NewRequest, SchedulerOutput

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class RowTable:
    """`tokens [rows, max_model_len + 1]`, `k_table`, `v_table [rows, max_blocks]`, `num_blocks`, `num_prompt [rows]`.

    `is_hidden`, `hidden_table [rows, max_blocks]`: blocks of hidden state and their units (elsewhere meaningless), and
    `num_hidden [rows]` how many a row has. K and V of those pass through scratch, where `engine.execution.hidden` puts
    them anew for every step: the entries of `k_table` and `v_table` are below zero then. The memory of the large tables
    is committed only where it is used.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = max_model_len // block_size + 1
        self.block_size = block_size
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.k_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self.v_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self.is_hidden = np.zeros((max_num_seqs, max_blocks), dtype=np.bool_)
        self.hidden_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self.num_hidden = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)

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

    def _empty(self, row: int) -> None:
        self.num_blocks[row] = 0
        if self.num_hidden[row]:
            self.is_hidden[row] = False
            self.num_hidden[row] = 0

    def _write(self, new: NewRequest) -> None:
        self.tokens[new.row, : len(new.token_ids)] = new.token_ids
        self.num_prompt[new.row] = new.num_prompt_tokens
        self._empty(new.row)
        self._extend(new.row, new.entries)

    def _extend(self, row: int, entries: Sequence[CacheEntry]) -> None:
        if not entries:
            return
        first = int(self.num_blocks[row])
        last = first + len(entries)
        if all(e.kind is CacheKind.KV and e.tier is Tier.DEVICE for e in entries):
            self.k_table[row, first:last] = [entry.units[0] for entry in entries]
            self.v_table[row, first:last] = [entry.units[1] for entry in entries]
        else:
            for block, entry in enumerate(entries, first):
                self._put(row, block, entry)
        self.num_blocks[row] = last

    def _put(self, row: int, block: int, entry: CacheEntry) -> None:
        assert entry.tier is Tier.DEVICE, "a row's blocks are on the device"
        hidden = entry.kind is CacheKind.HIDDEN
        self.num_hidden[row] += int(hidden) - int(self.is_hidden[row, block])
        self.is_hidden[row, block] = hidden
        if hidden:
            (self.hidden_table[row, block],) = entry.units
        else:
            self.k_table[row, block], self.v_table[row, block] = entry.units
