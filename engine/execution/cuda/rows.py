"""Per-row state on host and device, updated in place from the deltas of a `SchedulerOutput`.

The device reads block tables from its own copy, to which the host sends what changed. A sampled token stays on the
device until its step is collected; until then its place in `tokens` holds UNKNOWN and the device reads it from
`last_tokens`. Knows nothing of models or sampling.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.cache.cache_map import CacheEntry, CacheKind, Tier
from engine.execution.sampling_table import SamplingTable
from engine.scheduling.output import INVALID_TOKEN, NewRequest, SchedulerOutput

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]

UNKNOWN = -1
"""Stands on the host for a token that only the device knows."""


class Rows:
    """`tables [2 or 3, rows, max_blocks]` int32 on the device: `unit * num_layers` for K, for V and, with `hidden`, for
    the hidden state of every block of a row, to which a kernel adds its layer. `last_tokens [rows + 1]` int32: the
    token sampled last; the place behind the last row takes what padding writes. `generation [rows]` counts the requests
    a row has held. `is_hidden`, `hidden_table [rows, max_blocks]`, `num_hidden [rows]` as in `RowTable`."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_layers: int,
        device: torch.device,
        *,
        hidden: bool = False,
    ) -> None:
        max_blocks = max_model_len // block_size + 1
        self.block_size = block_size
        self.padding_row = max_num_seqs
        self.sampling = SamplingTable(max_num_seqs)
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.generation = np.zeros(max_num_seqs, dtype=np.int64)
        self.is_hidden = np.zeros((max_num_seqs, max_blocks), dtype=np.bool_)
        self.hidden_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self.num_hidden = np.zeros(max_num_seqs, dtype=np.int64)
        self.tables = torch.zeros((2 + hidden, max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._entries = np.zeros(self.tables.shape, dtype=np.int32)
        self._num_layers = num_layers
        self._changed: list[IntArray] = []

    def apply(self, output: SchedulerOutput) -> None:
        """Release rows, write new requests whole, extend block tables, replace entries: in this order."""
        for row in output.released_rows:
            self._empty(row)
        for new in output.new_requests:
            self._write(new)
        for appended in output.appended:
            self._extend(appended.row, appended.entries)
        if output.replaced:
            rows, blocks = np.array([(each.row, each.block) for each in output.replaced], dtype=np.int64).T
            assert (blocks < self.num_blocks[rows]).all(), "a block that the row does not have is replaced"
            self._place(rows, blocks, [each.entry for each in output.replaced])

    def point(self, table: int, rows: IntArray, blocks: IntArray, entries: IntArray) -> None:
        """Set entries [n] of one of the tables."""
        self._entries[table, rows, blocks] = entries
        _, num_rows, max_blocks = self._entries.shape
        self._changed.append((table * num_rows + rows) * max_blocks + blocks)

    def take_changes(self) -> tuple[Int32Array, Int32Array]:
        """What changed in `tables` since the last call: flat places [n], none twice, and their entries [n]."""
        if not self._changed:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        places = np.unique(np.concatenate(self._changed))
        self._changed = []
        return places.astype(np.int32), self._entries.reshape(-1)[places]

    def settle(self, rows: IntArray, ends: IntArray, generations: IntArray, tokens: Int32Array) -> None:
        """Note sampled tokens [n] at positions `ends` of rows that still hold the request they were sampled for."""
        same = self.generation[rows] == generations
        self.tokens[rows[same], ends[same]] = np.where(tokens[same] == INVALID_TOKEN, 0, tokens[same])

    def _empty(self, row: int) -> None:
        self.num_blocks[row] = 0
        if self.num_hidden[row]:
            self.is_hidden[row] = False
            self.num_hidden[row] = 0

    def _write(self, new: NewRequest) -> None:
        self.tokens[new.row, : len(new.token_ids)] = new.token_ids
        self.num_prompt[new.row] = new.num_prompt_tokens
        self._empty(new.row)
        self.generation[new.row] += 1
        self.sampling.write(new.row, new.sampling)
        self._extend(new.row, new.entries)

    def _extend(self, row: int, entries: Sequence[CacheEntry]) -> None:
        if not entries:
            return
        first = int(self.num_blocks[row])
        last = first + len(entries)
        assert last <= self.tables.shape[2], "a block table is longer than the longest context"
        self._place(np.full(len(entries), row, dtype=np.int64), np.arange(first, last), entries)
        self.num_blocks[row] = last

    def _place(self, rows: IntArray, blocks: IntArray, entries: Sequence[CacheEntry]) -> None:
        """Blocks [n] of rows [n] lie in these entries now."""
        assert all(entry.tier is Tier.DEVICE for entry in entries), "a row's blocks are on the device"
        hidden = np.array([entry.kind is CacheKind.HIDDEN for entry in entries])
        if not hidden.all():
            units = [entry.units for entry in entries if entry.kind is CacheKind.KV]
            for table, column in enumerate(np.array(units, dtype=np.int64).T):
                self.point(table, rows[~hidden], blocks[~hidden], column * self._num_layers)
        if not (hidden.any() or self.is_hidden[rows, blocks].any()):
            return
        assert len(self.tables) == 3, "this runner was made without scratch for hidden state"
        self.is_hidden[rows, blocks] = hidden
        touched = np.unique(rows)
        self.num_hidden[touched] = self.is_hidden[touched].sum(axis=1)
        units = [entry.units for entry in entries if entry.kind is CacheKind.HIDDEN]
        if units:
            where, (column,) = (rows[hidden], blocks[hidden]), np.array(units, dtype=np.int64).T
            self.hidden_table[where] = column
            self.point(2, *where, column * self._num_layers)
