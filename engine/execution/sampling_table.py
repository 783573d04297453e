"""Per-row sampling parameters as numpy columns, and the random numbers of the streams.

The random number of output position i is a pure function of (seed, i): nothing is consumed, so neighbours, preemption
and the order of a batch cannot change a stream. Torch-free.
"""

import numpy as np

from engine.api import NEVER, SamplingParams
from engine.arrays import FloatArray, IntArray

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: logits divided by them would overflow float32."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SamplingTable:
    """One column per parameter, one place per row. `num_logprobs` is -1 where none are wanted.

    `edits[row]`: its logits have to be changed before a token is chosen (bias, penalties, or a minimum length); those
    of `penalised` rows by `penalties[row]` (repetition, frequency, presence);
    `masked_from[row]`: the output position from which on a mask may say which tokens can be chosen.
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
        """Take over a request's parameters."""
        self.params[row] = params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.greedy[row] = params.temperature < GREEDY_BELOW
        self.masked_from[row] = params.masked_from
        self.penalised[row] = has_penalties(params)
        self.penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.edits[row] = bool(params.logit_bias) or has_minimum(params) or has_penalties(params)

    def plain(self, rows: IntArray) -> bool:
        """Whether each of these rows wants its best token, and nothing else."""
        special = ~self.greedy[rows] | self.edits[rows] | (self.num_logprobs[rows] >= 0)
        return not special.any()

    def additions(self, row: int, output_position: int) -> tuple[IntArray, FloatArray]:
        """What is added to the row's logits whatever was said: token ids [n], which may repeat, and values [n]."""
        params = self.params[row]
        assert params is not None, "a row is sampled that no request was written to"
        pairs = list(params.logit_bias)
        if has_minimum(params) and output_position < params.min_tokens:
            pairs += [(token_id, -np.inf) for token_id in sorted(params.stop_token_ids)]
        ids, values = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float64)


def has_minimum(params: SamplingParams) -> bool:
    """Whether an answer may not end before it has a length; of a row with a grammar the masks see to that."""
    return params.min_tokens > 0 and params.grammar is None


def has_penalties(params: SamplingParams) -> bool:
    """Whether a token's past counts against it (or for it)."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def uniforms(seeds: IntArray, positions: IntArray) -> FloatArray:
    """One number in [0, 1) per (seed, output position), by SplitMix64: 52 bits, so that u * x < x for every x > 0."""
    stream = _mix(seeds.astype(np.int64).view(np.uint64) + _GOLDEN)
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
