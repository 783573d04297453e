"""Vectors of the rows that want one instead of tokens: taken from a step's hidden states, summed up across chunks.

A sum belongs to a row's request: it begins with the request's first token and is made anew whenever the row is written.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.layout import Layout
from engine.execution.rows import RowTable
from engine.pooling import Pooling

TakeHidden = Callable[[Layout, Tensor], None]
"""Takes the hidden states [T, H] of a step, behind the final norm, in the order of its layout."""


class RowPools:
    """The sums of a runner's rows."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._sums: dict[int, tuple[int, Tensor]] = {}

    def begin(self, chunks: IntArray) -> "StepPools | None":
        """What a step with chunks [n, 4] (row, start, length, sample) has to pool; None: nothing."""
        if not self._rows.pools[chunks[:, 0]].any():
            return None
        return StepPools(self, {int(row): index for index, row in enumerate(chunks[:, 0])})

    def add(self, row: int, start: int, hidden: Tensor) -> Tensor | None:
        """Take in the hidden states [n, H] of a row's tokens from `start` on; its vector [H], if they are the last."""
        rows = self._rows
        ends = start + len(hidden) == rows.num_prompt[row]
        if rows.pooling[row] is Pooling.LAST:
            return hidden[-1].float() if ends else None
        total, generation = hidden.float().sum(dim=0), int(rows.generation[row])
        if start:
            held, before = self._sums.pop(row)
            assert held == generation, "a mean began in the middle of its text"
            total += before
        if ends:
            return total / int(rows.num_prompt[row])
        self._sums[row] = generation, total
        return None


class StepPools:
    """The vectors of one step, by the index of their chunk. Call it with the step's hidden states."""

    def __init__(self, pools: RowPools, indices: Mapping[int, int]) -> None:
        self._pools = pools
        self._indices = indices
        self._vectors: dict[int, Tensor] = {}

    def __call__(self, layout: Layout, hidden: Tensor) -> None:
        wanted = np.flatnonzero(self._pools._rows.pools[layout.rows])
        for place in wanted.tolist():
            row, start, length, _ = layout.chunks[place].tolist()
            first = int(layout.firsts[place])
            vector = self._pools.add(row, start, hidden[first : first + length])
            if vector is not None:
                self._vectors[self._indices[row]] = vector

    def fetch(self) -> dict[int, bytes]:
        """When the step has ended: float32 numbers as they lie in memory; none where one is not finite."""
        if not self._vectors:
            return {}
        vectors = torch.stack(list(self._vectors.values())).cpu().numpy()
        finite = np.isfinite(vectors).all(axis=1)
        return {
            index: vector.tobytes() if ok else b""
            for index, vector, ok in zip(self._vectors, vectors, finite.tolist(), strict=True)
        }
