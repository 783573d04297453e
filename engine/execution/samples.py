"""Samples of a step on the device, and their transfer to the host."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.api import MAX_LOGPROBS, TokenLogprobs
from engine.arrays import Int32Array, IntArray

LOGPROB_COLUMNS = 1 + 2 * MAX_LOGPROBS
"""Maximum number of columns of `RowLogprobs.packed`."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of samples.

    Attributes:
        packed: [w, 1 + 2n] int32 on the device: bits of the chosen token's and the n best log-probabilities, then the
            ids of the n best tokens.
        places: [w], samples with log-probabilities.
        counts: [w], number of best tokens wanted.
    """

    packed: Tensor
    places: IntArray
    counts: IntArray

    def read(self, packed: Int32Array, tokens: Int32Array) -> list[TokenLogprobs | None]:
        """Decode a host copy; None for samples without a token or without log-probabilities."""
        results: list[TokenLogprobs | None] = [None] * len(tokens)
        most = packed.shape[1] // 2
        values, ids = packed[:, : 1 + most].view(np.float32), packed[:, 1 + most :]
        for index, (place, count) in enumerate(zip(self.places.tolist(), self.counts.tolist(), strict=True)):
            if tokens[place] >= 0:
                best = zip(ids[index, :count].tolist(), values[index, 1 : 1 + count].tolist(), strict=True)
                results[place] = TokenLogprobs(float(values[index, 0]), tuple(best))
        return results


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """`tokens [S]` int32 on the device, negative for samples without a token (`engine.scheduling.output`)."""

    tokens: Tensor
    logprobs: RowLogprobs | None = None
