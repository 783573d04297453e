"""Latency model: the time of a step from its features, the time that a chunk adds, and the inverse (HyGen §4.2).

The model is linear with non-negative coefficients, so that more work never costs less. Its terms: intercept; hinges
max(0, T − k) of the padded token count T (convex: a memory-bound floor that bends into the compute-bound slope); a jump
where layers change how they multiply; contexts of decodes and of chunks; attention work; N_p; N_d; hidden cache, host
tier, adapters, and masks (of grammars and thinking budgets). The paper's squares of S_p and S_d do not describe the
bend.

`predictor.fitting` fits the coefficients.

Measured steps: (features, seconds) pairs in a flat array, so that a fit of 80,000 needs no Python loop.
"""

import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from predictor.features import EVERYTHING, SUMS, BatchFeatures, Reach

ROW_WIDTH = len(SUMS) + 1


class Sample(NamedTuple):
    """One executed step and its measured time in seconds."""

    features: BatchFeatures
    seconds: float


class SampleLog:
    """Samples as rows of a flat array of doubles: `ROW_WIDTH` values each, the seconds last.

    `values` has shape [len, ROW_WIDTH], flattened. With a `capacity`, new samples overwrite the oldest.
    """

    __slots__ = ("_capacity", "_next", "values")

    def __init__(self, samples: Iterable[Sample] = (), capacity: int | None = None) -> None:
        self.values = array("d")
        self._capacity = capacity
        self._next = 0
        self.extend(samples)

    def append(self, features: BatchFeatures, seconds: float) -> None:
        """Store one step (a copy of its sums)."""
        row = array("d", (*features.row(), seconds))
        if self._capacity is None or len(self) < self._capacity:
            self.values.extend(row)
            return
        offset = self._next * ROW_WIDTH
        self.values[offset : offset + ROW_WIDTH] = row
        self._next = (self._next + 1) % self._capacity

    def extend(self, samples: Iterable[Sample]) -> None:
        """Store several steps."""
        for features, seconds in samples:
            self.append(features, seconds)

    def __len__(self) -> int:
        return len(self.values) // ROW_WIDTH

    def __iter__(self) -> Iterator[Sample]:
        for offset in range(0, len(self.values), ROW_WIDTH):
            *sums, seconds = self.values[offset : offset + ROW_WIDTH]
            yield Sample(BatchFeatures.from_row(map(int, sums)), seconds)


def split_samples(samples: Iterable[Sample], held_out: float = 0.2, seed: int = 0) -> tuple[list[Sample], list[Sample]]:
    """Return (train, held-out), chosen by `seed`, each in original order; both are non-empty from two samples on."""
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out must be between 0 and 1, not {held_out}")
    everything = list(samples)
    order = list(range(len(everything)))
    random.Random(seed).shuffle(order)
    count = min(max(1, round(len(everything) * held_out)), len(everything) - 1)
    chosen = set(order[: max(count, 0)])
    train = [sample for index, sample in enumerate(everything) if index not in chosen]
    return train, [everything[index] for index in sorted(chosen)]


COLUMNS = {
    "decodes": "num_decodes",
    "decode_context": "decode_context_sum",
    "prefill_chunks": "num_prefill_chunks",
    "attention": "attention_work",
    "compact": "compact_tokens",
    "restored": "restored_tokens",
    "transferred": "transferred_bytes",
    "adapters": "adapters",
    "adapted_tokens": "adapted_tokens",
    "prefill_context": "prefill_context_sum",
    "masks": "masks",
    "masked_rows": "masked_rows",
}
"""Fitted coefficients and the sum of features that each multiplies."""
FITTED_TERMS = ("intercept", *COLUMNS, "jump")
LINEAR_TERMS = (*FITTED_TERMS, "prefill_tokens", "compact_step", "restored_step")
"""Names of all coefficients except the hinges; each is a field of `LatencyModel`. `prefill_tokens`, per token of prompt
chunks, is 0 in a fitted model: the hinges cover it."""

CACHE_TERMS = ("compact", "restored", "transferred", "compact_step", "restored_step")
"""Coefficients of work on the cache. They are measured separately (`predictor.profile`), never fitted."""

KNOT_SPACING = 32
LAST_KNOT = 1024


def default_knots(token_limit: int) -> tuple[int, ...]:
    """Return 0, 32, 64, ... 1,024, up to `token_limit` tokens."""
    return tuple(range(0, min(LAST_KNOT, max(token_limit - 1, 0)) + 1, KNOT_SPACING))


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Fitted coefficients, all non-negative, in seconds per unit of their feature. Implements `LatencyPredictor`.

    The coefficients are named as in LINEAR_TERMS. Raises ValueError for inconsistent parts.

    Attributes:
        knots: Token counts of the hinges, ascending.
        hinges: Slope increase at each knot.
        jump_at: Largest padded token count without `jump`, the seconds by which larger steps take longer; 0: no jump.
        token_limit: Size of the table of the hinge part; larger steps are extrapolated with its last slope.
        buckets: Token counts to which steps are padded, ascending; empty: no padding.
        decode_buckets: The same for steps without prompts; empty: `buckets`.
        reach: Windows with which the features count contexts.
    """

    intercept: float = 0.0
    decodes: float = 0.0
    decode_context: float = 0.0
    prefill_chunks: float = 0.0
    attention: float = 0.0
    compact: float = 0.0
    restored: float = 0.0
    transferred: float = 0.0
    adapters: float = 0.0
    adapted_tokens: float = 0.0
    prefill_context: float = 0.0
    masks: float = 0.0
    masked_rows: float = 0.0
    jump: float = 0.0
    prefill_tokens: float = 0.0
    compact_step: float = 0.0
    restored_step: float = 0.0
    knots: tuple[int, ...] = ()
    hinges: tuple[float, ...] = ()
    token_limit: int = 8192
    buckets: tuple[int, ...] = ()
    decode_buckets: tuple[int, ...] = ()
    jump_at: int = 0
    reach: Reach = EVERYTHING
    _table: list[float] = field(init=False, repr=False, compare=False)
    _decode_table: list[float] = field(init=False, repr=False, compare=False)
    _table_end: int = field(init=False, repr=False, compare=False)
    _last_slope: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.knots) != len(self.hinges) or any(a >= b for a, b in zip(self.knots, self.knots[1:], strict=False)):
            raise ValueError("knots must ascend and have one hinge each")
        sizes = (self.buckets, self.decode_buckets)
        if self.token_limit < 1 or any(a >= b for each in sizes for a, b in zip((0, *each), each, strict=False)):
            raise ValueError("token_limit must be positive and buckets ascend from 1")
        values = (*(getattr(self, name) for name in LINEAR_TERMS), *self.hinges)
        if not all(0.0 <= value < float("inf") for value in values):
            raise ValueError("coefficients must be finite and not negative")
        end = max((self.token_limit, self.jump_at + 1, *self.buckets[-1:], *self.decode_buckets[-1:], *self.knots[-1:]))
        jump = (self.jump_at, self.jump) if self.jump_at else (end, 0.0)
        table = _hinge_table(self.knots, self.hinges, self.buckets, end, jump)
        own = bool(self.decode_buckets)
        object.__setattr__(self, "_table", table)
        decodes = _hinge_table(self.knots, self.hinges, self.decode_buckets, end, jump) if own else table
        object.__setattr__(self, "_decode_table", decodes)
        object.__setattr__(self, "_table_end", end)
        object.__setattr__(self, "_last_slope", sum(self.hinges))

    def _hinge(self, tokens: int, prompts: int) -> float:
        """Return the hinge part at `tokens`, padded and extrapolated; `prompts` is the number of prefill chunks."""
        if tokens <= self._table_end:
            return self._table[tokens] if prompts else self._decode_table[tokens]
        return self._table[-1] + self._last_slope * (tokens - self._table_end)

    def predict(self, features: BatchFeatures) -> float:
        return (
            self.intercept
            + self._hinge(features.num_tokens, features.num_prefill_chunks)
            + self.decodes * features.num_decodes
            + self.decode_context * features.decode_context_sum
            + self.prefill_chunks * features.num_prefill_chunks
            + self.attention * features.attention_work
            + self.prefill_context * features.prefill_context_sum
            + self.prefill_tokens * features.prefill_token_sum
            + self.compact * features.compact_tokens
            + self.restored * features.restored_tokens
            + self.transferred * features.transferred_bytes
            + self.adapters * features.adapters
            + self.adapted_tokens * features.adapted_tokens
            + self.masks * features.masks
            + self.masked_rows * features.masked_rows
            + (self.compact_step if features.compact_tokens > 0 else 0.0)
            + (self.restored_step if features.restored_tokens > 0 else 0.0)
        )

    def marginal(self, features: BatchFeatures, start: int, length: int) -> float:
        tokens = features.num_tokens
        end = tokens + length
        prompts = features.num_prefill_chunks
        if end <= self._table_end:  # hot path
            before = self._table if prompts else self._decode_table
            hinge = (before if length == 1 else self._table)[end] - before[tokens]
        else:
            hinge = self._hinge(end, prompts or length > 1) - self._hinge(tokens, prompts)
        if length == 1:
            return hinge + self.decodes + self.decode_context * self.reach.tokens(start, 1)
        if not self.reach.kinds:  # hot path
            per_token = self.attention * (start + 0.5 * (length + 1)) + self.prefill_tokens
            return hinge + self.prefill_chunks + self.prefill_context * (start + length) + length * per_token
        attended = self.attention * self.reach.pairs(start, length)
        read = self.prefill_context * self.reach.tokens(start, length)
        return hinge + self.prefill_chunks + read + attended + length * self.prefill_tokens

    def marginal_decodes(self, features: BatchFeatures, count: int, context_sum: int) -> float:
        tokens = features.num_tokens
        prompts = features.num_prefill_chunks
        hinge = self._hinge(tokens + count, prompts) - self._hinge(tokens, prompts)
        return hinge + self.decodes * count + self.decode_context * context_sum

    def usual(self, features: BatchFeatures) -> float:
        return self.predict(features)

    def usual_decodes(self, features: BatchFeatures, count: int, context_sum: int) -> float:
        return self.marginal_decodes(features, count, context_sum)

    def cache_work(
        self,
        compact_tokens: int = 0,
        restored_tokens: int = 0,
        transferred_bytes: int = 0,
        beside: BatchFeatures | None = None,
    ) -> float:
        seconds = self.compact * compact_tokens + self.restored * restored_tokens + self.transferred * transferred_bytes
        if beside is not None:
            for step, before, more in (
                (self.compact_step, beside.compact_tokens, compact_tokens),
                (self.restored_step, beside.restored_tokens, restored_tokens),
            ):
                seconds += step * ((before + more > 0) - (before > 0))
        return seconds

    def adapter_work(self, adapters: int, tokens: int) -> float:
        return self.adapters * adapters + self.adapted_tokens * tokens

    def mask_work(self, features: BatchFeatures, rows: int) -> float:
        return (self.masks if rows and not features.masks else 0.0) + self.masked_rows * rows

    def likely(self) -> "LatencyModel":
        return self

    def steady(self) -> "LatencyModel":
        return self

    def scaled(self, factor: float) -> "LatencyModel":
        """Return the model of a device on which every step takes `factor` times as long."""
        linear = {name: factor * getattr(self, name) for name in LINEAR_TERMS}
        return replace(self, **linear, hinges=tuple(factor * hinge for hinge in self.hinges))

    def max_prefill(self, features: BatchFeatures, seconds: float, max_tokens: int, start: int) -> int:
        return largest_chunk(lambda length: self.marginal(features, start, length), seconds, max_tokens)

    def expected_prefill(self, features: BatchFeatures, limit: float, max_tokens: int, start: int) -> int:
        return self.max_prefill(features, limit - self.predict(features), max_tokens, start)

    def mape(self, samples: Iterable[Sample]) -> float:
        """Return the mean of |predicted − measured| ÷ measured; raises ValueError without samples."""
        errors = [abs(self.predict(features) - seconds) / seconds for features, seconds in samples]
        if not errors:
            raise ValueError("a mean error needs at least one sample")
        return sum(errors) / len(errors)


def largest_chunk(cost: Callable[[int], float], seconds: float, max_tokens: int) -> int:
    """Return the largest length ≤ `max_tokens` with cost(length) ≤ `seconds`, or 0.

    `cost` must not decrease for lengths ≥ 2. Length 1 is a decode with other terms and is tried separately.
    """
    if max_tokens < 1:
        return 0
    if cost(max_tokens) <= seconds:
        return max_tokens
    low, high = 1, max_tokens
    while high - low > 1:
        middle = (low + high) // 2
        if cost(middle) <= seconds:
            low = middle
        else:
            high = middle
    if low > 1 or cost(1) <= seconds:
        return low
    return 0


def _hinge_table(
    knots: tuple[int, ...], hinges: tuple[float, ...], buckets: tuple[int, ...], end: int, jump: tuple[int, float]
) -> list[float]:
    """Return the hinge part in seconds at 0 … `end` tokens, each count padded to its bucket (if not above the last).

    `jump`: a token count, and the seconds that are added beyond it.
    """
    table = [0.0] * (end + 1)
    value, slope, at = 0.0, 0.0, 0
    for knot, hinge in zip((*knots, end), (*hinges, 0.0), strict=True):
        stop = min(knot, end)
        for tokens in range(at + 1, stop + 1):
            table[tokens] = value + slope * (tokens - at)
        if stop > at:
            value, at = table[stop], stop
        slope += hinge
    for tokens in range(jump[0] + 1, end + 1):
        table[tokens] += jump[1]
    previous = 0
    for bucket in buckets:
        table[previous + 1 : bucket] = [table[bucket]] * (bucket - previous - 1)
        previous = bucket
    return table
