"""The CPU's runner with its steps by the C++ library: tables, sampling and everything else are `ModelRunner`'s.

A step that touches hidden state goes through torch's path, with the same weights; the scratch that K and V pass
through then is no business of the tape.
"""

import numpy as np

from engine.execution.attention import clear_new_blocks
from engine.execution.cpu.native.linear import Native
from engine.execution.cpu.native.model import NativeModel
from engine.execution.hidden import has_hidden
from engine.execution.runner import ModelRunner
from engine.models.decoder import Decoder
from engine.request import TokenLogprobs
from engine.scheduling.output import INVALID_TOKEN, SchedulerOutput


class NativeRunner(ModelRunner):
    """As `ModelRunner`, on the CPU; `native` are the library and its threads."""

    def __init__(self, decoder: Decoder, native: Native, **sizes: object) -> None:
        super().__init__(decoder, **sizes)  # type: ignore[arg-type]
        length = self._rows.tokens.shape[1] - 1
        self._native = NativeModel(native, decoder.spec, decoder.weights, self._pool, self._rows, length)

    def _run(self, output: SchedulerOutput) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        chunks = np.array(output.chunks, dtype=np.int64)
        if has_hidden(self._rows, chunks):
            return super()._run(output)
        if self.scratch_blocks:  # a later step by torch reads blocks whole
            clear_new_blocks(self._pool, self._rows, chunks)
        sampled = chunks[chunks[:, 3] > 0]
        rows, ends = sampled[:, 0], sampled[:, 1] + sampled[:, 2]
        table = self._sampling
        plain = bool((table.greedy[rows] & ~table.edits[rows] & (table.num_logprobs[rows] < 0)).all())
        result = self._native.run(chunks, logits=not plain)
        if not len(sampled):
            return [], None
        if result.logits is not None:
            return self._sample(result.logits, rows, ends)
        tokens = np.where(np.isfinite(result.best), result.best_ids, INVALID_TOKEN)
        # an invalid token ends its request; a step already in flight behind it still needs some id to read
        self._rows.tokens[rows, ends] = np.where(tokens == INVALID_TOKEN, 0, tokens)
        return tokens.tolist(), None
