"""Embeddings and scores: results from the hidden states of a row, collected across chunks.

A collection belongs to the request of a row. It begins with the first token and restarts whenever the row is written.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.rows import Layout, RowTable
from engine.forms import Pooling

Head = Callable[[Tensor], Tensor]
"""Returns logits [n, vocab] of hidden states [n, H] after the final norm."""
TakeHidden = Callable[[Layout, Tensor, Head], None]
"""Receives the hidden states [T, H] of a step after the final norm, in the order of its layout, and the head."""
PIECE = 64
"""Tokens scored at a time: their logits take 40 MB with 150,000 tokens in the vocabulary."""
LEAST = -3e38
"""Stands for the logarithm of 0, because results must be finite."""


class RowPools:
    """Sums and scores of a runner's rows."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._sums: dict[int, tuple[int, Tensor]] = {}

    def begin(self, chunks: IntArray) -> "StepPools | None":
        """Return the pooling of a step with chunks [n, 4] (row, start, length, sample); None if there is none."""
        if not self._rows.pools[chunks[:, 0]].any():
            return None
        rows = chunks[:, 0].tolist()
        scores = any(self._rows.pooling[row] is Pooling.SCORES for row in rows)
        return StepPools(self, {row: index for index, row in enumerate(rows)}, scores)

    def add(self, row: int, start: int, hidden: Tensor, head: Head) -> Tensor | None:
        """Add the hidden states [n, H] of a row's tokens from `start`; return its result if they are the last."""
        rows = self._rows
        ends, pooling = start + len(hidden) == rows.num_prompt[row], rows.pooling[row]
        if pooling is Pooling.LAST:
            return hidden[-1].float() if ends else None
        is_mean, generation = pooling is Pooling.MEAN, int(rows.generation[row])
        result = hidden.float().sum(dim=0) if is_mean else self._score(row, start, hidden, head)
        if start:
            held, before = self._sums.pop(row)
            assert held == generation, "a result must begin with the first token of its text"
            result = before + result if is_mean else torch.cat([before, result])
        if ends:
            return result / int(rows.num_prompt[row]) if is_mean else result.flatten()
        self._sums[row] = generation, result
        return None

    def _score(self, row: int, start: int, hidden: Tensor, head: Head) -> Tensor:
        """Return the rows of `Pooling.SCORES` [n, 1 + 2 · best] for the tokens after `start`, and for the first."""
        rows = self._rows
        best = max(0, int(rows.sampling.num_logprobs[row]))
        wanted = rows.tokens[row, start + 1 : min(start + len(hidden) + 1, int(rows.num_prompt[row]))]
        token_ids = torch.from_numpy(wanted.copy()).to(hidden.device)
        parts = [hidden.new_zeros((0 if start else 1, 1 + 2 * best), dtype=torch.float32)]
        for first in range(0, len(wanted), PIECE):
            ids = token_ids[first : first + PIECE, None]
            logits = head(hidden[first : first + len(ids)]).float()
            top = logits.topk(min(best, logits.shape[1]), dim=-1)
            values = torch.cat([logits.gather(1, ids), top.values], dim=1) - logits.logsumexp(dim=-1, keepdim=True)
            parts.append(torch.cat([values.clamp(min=LEAST), top.indices.float()], dim=1))
        return torch.cat(parts)


class StepPools:
    """Results of one step by the index of their chunk; called with the hidden states of the step.

    Attributes:
        scores: The step computes logits of prompt tokens, which takes time beyond its prediction.
    """

    def __init__(self, pools: RowPools, indices: Mapping[int, int], scores: bool) -> None:
        self.scores = scores
        self._pools = pools
        self._indices = indices
        self._vectors: dict[int, Tensor] = {}

    def __call__(self, layout: Layout, hidden: Tensor, head: Head) -> None:
        wanted = np.flatnonzero(self._pools._rows.pools[layout.rows])
        for place in wanted.tolist():
            row, start, length, _ = layout.chunks[place].tolist()
            first = int(layout.firsts[place])
            vector = self._pools.add(row, start, hidden[first : first + length], head)
            if vector is not None:
                self._vectors[self._indices[row]] = vector

    def fetch(self) -> dict[int, bytes]:
        """Return the results as float32 bytes after the step has ended; empty bytes if a value is not finite."""
        if not self._vectors:
            return {}
        ends = np.cumsum([len(vector) for vector in self._vectors.values()])
        vectors = np.split(torch.cat(list(self._vectors.values())).cpu().numpy(), ends[:-1])
        return {
            index: vector.tobytes() if np.isfinite(vector).all() else b""
            for index, vector in zip(self._vectors, vectors, strict=True)
        }
