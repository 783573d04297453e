"""Sampling parameters of rows as numpy columns, and the random numbers of requests.

The random number of output position i is a pure function of (seed, i), so other rows, preemption and batch order cannot
change the output of a request. Torch-free.
"""

import numpy as np

from engine.api import NEVER, SamplingParams
from engine.arrays import FloatArray, IntArray

GREEDY_BELOW = 1e-5
"""Lower temperatures are treated as greedy, because logits divided by them would overflow float32."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SamplingTable:
    """One column per parameter, one entry per row.

    Attributes:
        num_logprobs: Number of best log-probabilities; -1: none are wanted.
        edits: Whether logits must be changed before sampling (bias, penalties, or a minimum length).
        penalised: Whether `penalties` apply.
        penalties: [rows, 3] (repetition, frequency, presence).
        masked_from: Output position from which a mask may limit the tokens.
    """

    def __init__(self, num_rows: int) -> None:
        self.params: list[SamplingParams | None] = [None] * num_rows
        self.temperature = np.zeros(num_rows)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows)
        self.min_p = np.zeros(num_rows)
        self.seed = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)
        self.greedy = np.ones(num_rows, dtype=bool)
        self.edits = np.zeros(num_rows, dtype=bool)
        self.penalised = np.zeros(num_rows, dtype=bool)
        self.penalties = np.zeros((num_rows, 3))
        self.masked_from = np.full(num_rows, NEVER, dtype=np.int64)

    def write(self, row: int, params: SamplingParams) -> None:
        """Store a request's parameters."""
        self.params[row] = params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.greedy[row] = params.temperature < GREEDY_BELOW
        self.masked_from[row] = params.masked_from
        self.penalised[row] = params.has_penalties
        self.penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.edits[row] = bool(params.logit_bias) or has_minimum(params) or params.has_penalties

    def plain(self, rows: IntArray) -> bool:
        """Return whether all rows are greedy without edits or log-probabilities."""
        special = ~self.greedy[rows] | self.edits[rows] | (self.num_logprobs[rows] >= 0)
        return not special.any()

    def additions(self, row: int, output_position: int) -> tuple[IntArray, FloatArray]:
        """Return the constant additions to the row's logits: token ids [n], possibly repeated, and values [n]."""
        params = self.params[row]
        assert params is not None, "a sampled row must hold a request"
        pairs = list(params.logit_bias)
        if has_minimum(params) and output_position < params.min_tokens:
            pairs += [(token_id, -np.inf) for token_id in sorted(params.stop_token_ids)]
        ids, values = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float64)


def has_minimum(params: SamplingParams) -> bool:
    """Return whether stop tokens are forbidden up to a minimum length; with a grammar, the masks handle that."""
    return params.min_tokens > 0 and params.grammar is None


def uniforms(seeds: IntArray, positions: IntArray) -> FloatArray:
    """Return one number in [0, 1) per (seed, output position), by SplitMix64; 52 bits, so that u * x < x for x > 0."""
    stream = _mix(seeds.astype(np.int64).view(np.uint64) + _GOLDEN)
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
