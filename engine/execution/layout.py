"""A step's chunks and tokens in the order in which the model sees them. Torch-free; knows nothing of caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np

from engine.arrays import IntArray
from engine.scheduling.output import Chunk


@dataclass(frozen=True, slots=True)
class Layout:
    """`chunks [n, 4]` (row, start, length, sample); `firsts [n]`: index of a chunk's first token among the T tokens;
    `token_rows`, `positions [T]`. `sampled [S]`: places of the chunks that sample, in the step's own order."""

    chunks: IntArray
    firsts: IntArray
    token_rows: IntArray
    positions: IntArray
    sampled: IntArray

    @classmethod
    def of(cls, chunks: IntArray, order: IntArray) -> Self:
        """`order [n]`: for each place the index of its chunk in the step."""
        place = np.empty(len(chunks), dtype=np.int64)
        place[order] = np.arange(len(chunks))
        sampled = place[np.flatnonzero(chunks[:, 3])]
        chunks = chunks[order]
        lengths = chunks[:, 2]
        return cls(chunks, np.cumsum(lengths) - lengths, *token_places(chunks), sampled)

    @property
    def rows(self) -> IntArray:
        rows: IntArray = self.chunks[:, 0]
        return rows

    @property
    def starts(self) -> IntArray:
        starts: IntArray = self.chunks[:, 1]
        return starts

    @property
    def lengths(self) -> IntArray:
        lengths: IntArray = self.chunks[:, 2]
        return lengths

    @property
    def num_decodes(self) -> int:
        return int((self.lengths == 1).sum())

    @property
    def sampled_rows(self) -> IntArray:
        rows: IntArray = self.chunks[self.sampled, 0]
        return rows

    @property
    def sampled_tokens(self) -> IntArray:
        """[S]: which of the T tokens the sampled ones follow."""
        tokens: IntArray = self.firsts[self.sampled] + self.lengths[self.sampled] - 1
        return tokens


def chunk_array(chunks: Sequence[Chunk]) -> IntArray:
    """[n, 4]: row, start, length, sample."""
    return np.fromiter(chain.from_iterable(chunks), np.int64, 4 * len(chunks)).reshape(-1, 4)


def token_places(chunks: IntArray) -> tuple[IntArray, IntArray]:
    """Rows and positions [T] of the tokens of chunks [n, 4], in their order."""
    rows, starts, lengths = chunks[:, 0], chunks[:, 1], chunks[:, 2]
    firsts = np.cumsum(lengths) - lengths
    return np.repeat(rows, lengths), np.arange(int(lengths.sum())) + np.repeat(starts - firsts, lengths)


def decodes_first(chunks: IntArray) -> Layout:
    """Chunks [n, 4] of one token before longer ones, otherwise in the step's order."""
    return Layout.of(chunks, np.argsort(chunks[:, 2] > 1, kind="stable"))
