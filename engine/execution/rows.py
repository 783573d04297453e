"""Per-row state of the runner, updated in place from the deltas of a `SchedulerOutput`.

A row is a running request's place in every table: its tokens, its block tables (unit ids of K and of V per block).
All numpy, so that a step's index arrays are vector operations. Knows nothing of tensors, models or sampling.
"""

from collections.abc import Sequence

import numpy as np

from engine.cache.cache_map import CacheEntry, CacheKind, Tier
from engine.scheduling.output import NewRequest, SchedulerOutput

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class RowTable:
    """`tokens [rows, max_model_len + 1]`, `k_table`, `v_table [rows, max_blocks]`, `num_blocks`, `num_prompt [rows]`.

    The memory of the large tables is committed only where it is used.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = max_model_len // block_size + 1
        self.block_size = block_size
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.k_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self.v_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, output: SchedulerOutput) -> None:
        """Release rows, write new requests whole, extend block tables: in this order."""
        for row in output.released_rows:
            self.num_blocks[row] = 0
        for new in output.new_requests:
            self._write(new)
        for appended in output.appended:
            self._extend(appended.row, appended.entries)

    def _write(self, new: NewRequest) -> None:
        self.tokens[new.row, : len(new.token_ids)] = new.token_ids
        self.num_prompt[new.row] = new.num_prompt_tokens
        self.num_blocks[new.row] = 0
        self._extend(new.row, new.entries)

    def _extend(self, row: int, entries: Sequence[CacheEntry]) -> None:
        if not entries:
            return
        assert all(e.kind is CacheKind.KV and e.tier is Tier.DEVICE for e in entries), (
            "only KV on the device can be read"
        )
        first = self.num_blocks[row]
        last = first + len(entries)
        self.k_table[row, first:last] = [entry.units[0] for entry in entries]
        self.v_table[row, first:last] = [entry.units[1] for entry in entries]
        self.num_blocks[row] = last
