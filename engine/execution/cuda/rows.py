"""Per-row state on host and device, updated in place from the deltas of a `SchedulerOutput`.

Block tables live on the device only: the host sends what changed. A sampled token stays on the device until its step
is collected; until then its place in `tokens` holds UNKNOWN and the device reads it from `last_tokens`. Knows nothing
of models or sampling.
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
    """`tables [2, rows, max_blocks]` int32 on the device, K first: `unit * num_layers` for every block of a row, to
    which a kernel adds its layer. `last_tokens [rows + 1]` int32: the token sampled last; the place behind the last
    row takes what padding writes. `generation [rows]` counts the requests a row has held."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_layers: int, device: torch.device
    ) -> None:
        max_blocks = max_model_len // block_size + 1
        self.block_size = block_size
        self.padding_row = max_num_seqs
        self.sampling = SamplingTable(max_num_seqs)
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.generation = np.zeros(max_num_seqs, dtype=np.int64)
        self.tables = torch.zeros((2, max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._num_layers = num_layers
        self._changes: list[tuple[IntArray, IntArray]] = []

    def apply(self, output: SchedulerOutput) -> tuple[Int32Array, Int32Array]:
        """Release rows, write new requests whole, extend block tables: in this order.

        Returns what changed in `tables`: flat places [n] and entries [n], no place twice.
        """
        self._changes = []
        for row in output.released_rows:
            self.num_blocks[row] = 0
        for new in output.new_requests:
            self._write(new)
        for appended in output.appended:
            self._extend(appended.row, appended.entries)
        if not self._changes:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        places, entries = (np.concatenate(parts).astype(np.int32) for parts in zip(*self._changes, strict=True))
        return places, entries

    def settle(self, rows: IntArray, ends: IntArray, generations: IntArray, tokens: Int32Array) -> None:
        """Note sampled tokens [n] at positions `ends` of rows that still hold the request they were sampled for."""
        same = self.generation[rows] == generations
        self.tokens[rows[same], ends[same]] = np.where(tokens[same] == INVALID_TOKEN, 0, tokens[same])

    def _write(self, new: NewRequest) -> None:
        self.tokens[new.row, : len(new.token_ids)] = new.token_ids
        self.num_prompt[new.row] = new.num_prompt_tokens
        self.num_blocks[new.row] = 0
        self.generation[new.row] += 1
        self.sampling.write(new.row, new.sampling)
        self._extend(new.row, new.entries)

    def _extend(self, row: int, entries: Sequence[CacheEntry]) -> None:
        if not entries:
            return
        assert all(e.kind is CacheKind.KV and e.tier is Tier.DEVICE for e in entries), (
            "only KV on the device can be read"
        )
        first, (_, num_rows, max_blocks) = int(self.num_blocks[row]), self.tables.shape
        assert first + len(entries) <= max_blocks, "a block table is longer than the longest context"
        units = np.array([entry.units for entry in entries], dtype=np.int64)
        k_places = row * max_blocks + first + np.arange(len(entries))
        self._changes.append((k_places, units[:, 0] * self._num_layers))
        self._changes.append((k_places + num_rows * max_blocks, units[:, 1] * self._num_layers))
        self.num_blocks[row] = first + len(entries)
