"""Embeddings: vectors pooled from the hidden states of a row, summed across chunks.

A sum belongs to the request of a row. It begins with the first token and restarts whenever the row is written.
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
"""Receives the hidden states [T, H] of a step after the final norm, in the order of its layout."""


class RowPools:
    """Sums of a runner's rows."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._sums: dict[int, tuple[int, Tensor]] = {}

    def begin(self, chunks: IntArray) -> "StepPools | None":
        """Return the pooling of a step with chunks [n, 4] (row, start, length, sample); None if there is none."""
        if not self._rows.pools[chunks[:, 0]].any():
            return None
        return StepPools(self, {int(row): index for index, row in enumerate(chunks[:, 0])})

    def add(self, row: int, start: int, hidden: Tensor) -> Tensor | None:
        """Add the hidden states [n, H] of a row's tokens from `start`; return its vector [H] if they are the last."""
        rows = self._rows
        ends = start + len(hidden) == rows.num_prompt[row]
        if rows.pooling[row] is Pooling.LAST:
            return hidden[-1].float() if ends else None
        total, generation = hidden.float().sum(dim=0), int(rows.generation[row])
        if start:
            held, before = self._sums.pop(row)
            assert held == generation, "the mean of a text must begin with its first token"
            total += before
        if ends:
            return total / int(rows.num_prompt[row])
        self._sums[row] = generation, total
        return None


class StepPools:
    """Vectors of one step by the index of their chunk; called with the hidden states of the step."""

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
        """Return the vectors as float32 bytes after the step has ended; empty bytes if a value is not finite."""
        if not self._vectors:
            return {}
        vectors = torch.stack(list(self._vectors.values())).cpu().numpy()
        finite = np.isfinite(vectors).all(axis=1)
        return {
            index: vector.tobytes() if ok else b""
            for index, vector, ok in zip(self._vectors, vectors, finite.tolist(), strict=True)
        }
