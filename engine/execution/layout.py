"""Order of a step's chunks and tokens for the model. Torch-free, and without the server's libraries."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np

from engine.arrays import IntArray
from engine.scheduling.output import Chunk


@dataclass(frozen=True, slots=True)
class Layout:
    """Chunks and tokens of a step in the order of the model.

    Attributes:
        chunks: [n, 4] (row, start, length, sample).
        firsts: [n], index of a chunk's first token among the T tokens.
        token_rows: [T], row of each token.
        positions: [T], position of each token.
        sampled: [S], index of each sampling chunk, in the order of the step.
    """

    chunks: IntArray
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
        """[S], index of the token after which each sample comes."""
        tokens: IntArray = self.firsts[self.sampled] + self.lengths[self.sampled] - 1
        return tokens


def chunk_array(chunks: Sequence[Chunk]) -> IntArray:
    """Return chunks as an array [n, 4] (row, start, length, sample)."""
    return np.fromiter(chain.from_iterable(chunks), np.int64, 4 * len(chunks)).reshape(-1, 4)


def token_places(chunks: IntArray) -> tuple[IntArray, IntArray]:
    """Return rows and positions [T] of the tokens of chunks [n, 4], in order."""
    rows, starts, lengths = chunks[:, 0], chunks[:, 1], chunks[:, 2]
    firsts = np.cumsum(lengths) - lengths
    return np.repeat(rows, lengths), np.arange(int(lengths.sum())) + np.repeat(starts - firsts, lengths)


def decodes_first(chunks: IntArray) -> Layout:
    """Arrange chunks [n, 4] with those of one token first, otherwise in the order of the step."""
    return Layout.of(chunks, np.argsort(chunks[:, 2] > 1, kind="stable"))
