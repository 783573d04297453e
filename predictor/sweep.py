"""The start-up sweep: which steps to measure, in which order, within how much time (HyGen §4.2, "Training Data").

Pure: the caller runs a shape on its runner and returns seconds; the clock is an argument. Order is what makes a budget
safe: first the anchors that pin every term down, then points dense around the knee between the memory-bound and the
compute-bound regime, interleaved with a low-discrepancy sequence of mixed steps; any prefix gives a usable fit.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from predictor.features import BatchFeatures
from predictor.limits import Limits
from predictor.reach import EVERYTHING, Reach
from predictor.samples import Sample

MAX_SHAPES = 400
REPEATS = 3
SHAPE_SHARE = 0.02
"""Share of the budget that the repeats of one shape may take: on a slow device many shapes tell more than many runs."""
LONGEST_SHARE = 0.05
"""Share of the budget that one run may be expected to take; a longer step is left out and extrapolated to."""
DEFAULT_KNEE = 256
MIX_PRIMES = (2, 3, 5, 7)
ADAPTED = 3
"""Of so many shapes behind the anchors one is under LoRA adapters, where there are any."""
MASKED = 4
"""And of so many one has rows that a grammar limits, where grammars can be enforced."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step to measure: `num_decodes` decodes of `decode_context` tokens each, and prefill chunks (start, length).

    `decode_context` includes the decode's own token: such a decode is the chunk (decode_context − 1, 1).
    `adapters`: all chunks are under that many LoRA adapters, in turn. `masked`: of so many sequences the samples are
    limited by a grammar.
    """

    num_decodes: int = 0
    decode_context: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    adapters: int = 0
    masked: int = 0

    @property
    def num_tokens(self) -> int:
        """T of the step."""
        return self.num_decodes + sum(length for _, length in self.chunks)

    def fits(self, limits: Limits) -> bool:
        """True when the step can be run under these limits."""
        contexts = [start + length for start, length in self.chunks] + [self.decode_context] * self.num_decodes
        return (
            0 < len(contexts) <= limits.max_num_seqs
            and self.num_tokens <= limits.max_num_batched_tokens
            and max(contexts) <= limits.max_model_len
            and sum(map(limits.units, contexts)) <= limits.num_units
        )

    def features(self, reach: Reach = EVERYTHING) -> BatchFeatures:
        """The step as the latency model sees it."""
        features = BatchFeatures(reach)
        if self.num_decodes:
            features.add_decodes(self.num_decodes, self.num_decodes * reach.tokens(self.decode_context - 1, 1))
        for start, length in self.chunks:
            features.add_chunk(start, length)
        features.add_adapted(self.adapters, self.num_tokens if self.adapters else 0)
        features.add_masked(self.masked)
        return features


def anchor_shapes(limits: Limits) -> Iterator[StepShape]:
    """Few shapes that pin every term down: small steps first, so that what a token costs is known before large ones."""
    tokens, length = limits.max_num_batched_tokens, limits.max_model_len
    short = min(32, length)
    seqs = limits.max_decodes(short)
    yield from (StepShape(1, short), StepShape(0, 0, ((0, min(64, tokens, length)),)), StepShape(seqs, short))
    for chunk in (128, 256, 512, 1024, 2048, tokens):
        yield StepShape(0, 0, ((0, min(chunk, tokens, length)),))
    for count in (1, 4, seqs // 8, seqs // 2, seqs):
        for context in (512, 2048, length):
            context = min(context, length)
            yield StepShape(min(max(count, 1), limits.max_decodes(context)), context)
    for parts in (2, 4, 16):
        yield StepShape(0, 0, ((0, max(2, min(tokens // parts, 512, length))),) * parts)
    for start in (length // 4, length // 2, length):
        for chunk in (64, 512):
            yield StepShape(0, 0, ((max(min(start, length - chunk), 0), min(chunk, tokens, length)),))


def under_adapters(shapes: Iterable[StepShape], adapters: int) -> Iterator[StepShape]:
    """The shapes, every third of them under some of so many adapters: one, or several as far as it has chunks."""
    for index, shape in enumerate(shapes):
        count = min(1 + index // ADAPTED % adapters, shape.num_decodes + len(shape.chunks)) if adapters else 0
        yield shape if index % ADAPTED else replace(shape, adapters=count)


def under_masks(shapes: Iterable[StepShape]) -> Iterator[StepShape]:
    """The shapes, every fourth of them with masks, in turn for one of its sequences, a half and all."""
    for index, shape in enumerate(shapes):
        sequences = shape.num_decodes + len(shape.chunks)
        count = (sequences, 1, -(-sequences // 2))[index // MASKED % 3]
        yield replace(shape, masked=count) if index % MASKED == 1 else shape


def edge_shapes(limits: Limits) -> Iterator[StepShape]:
    """Steps that fill what they are padded to, where they are: the stairs of such a device, one step each."""
    context = min(256, limits.max_model_len)
    for size in limits.padding.decode:
        yield StepShape(min(size, limits.max_decodes(context)), context)
    for size in limits.padding.mixed:
        decodes = min(size // 4, limits.max_num_seqs - 1, limits.max_decodes(context) // 2)
        chunk = min(size - decodes, limits.max_model_len)
        if chunk >= 2:
            yield StepShape(decodes, context if decodes else 0, ((0, chunk),))


def knee_shapes(limits: Limits, knee: int) -> Iterator[StepShape]:
    """Steps of 16, 32, 48 … tokens up to four times the knee (then in eighths of an octave), nearest the knee first.

    Each is built as a mix of decodes and one chunk, as offline fill makes them.
    """
    top = limits.max_num_batched_tokens
    counts = set(range(16, min(4 * knee, top) + 1, 16))
    counts |= {min(top, round(4 * knee * 2 ** (step / 8))) for step in range(64) if knee * 2 ** (step / 8) <= top / 4}
    for tokens in sorted(counts, key=lambda count: (abs(math.log2(count / knee)), count)):
        context = min(256, limits.max_model_len)
        decodes = min(tokens // 4, limits.max_num_seqs - 1, limits.max_decodes(context) // 2)
        chunk = min(tokens - decodes, limits.max_model_len)
        if chunk >= 2:
            yield StepShape(decodes, context if decodes else 0, ((0, chunk),))


def mixed_shapes(limits: Limits) -> Iterator[StepShape]:
    """Endless mixes, spread evenly over the logarithms of (decodes, context, chunk, prefix): a Halton sequence."""
    for index in itertools.count(1):
        u = [_radical_inverse(index, prime) for prime in MIX_PRIMES]
        context = _log_scale(u[1], limits.max_model_len)
        decodes = _log_scale(u[0], limits.max_decodes(context)) if index % 4 else 0
        chunk = _log_scale(u[2], limits.max_num_batched_tokens - decodes) if index % 3 or not decodes else 0
        start = _log_scale(u[3], limits.max_model_len) - 1
        chunk = min(chunk, limits.max_model_len - start)
        yield StepShape(decodes, context if decodes else 0, ((start, chunk),) if chunk >= 2 else ())


def plan_sweep(limits: Limits, knee: int, max_shapes: int = MAX_SHAPES) -> Iterator[StepShape]:
    """What follows the anchors: edges of the padding, then knee points, and mixes in turn; without repetition, each
    within the limits."""
    seen: set[StepShape] = set()
    dense: Iterator[StepShape | None] = itertools.chain(
        edge_shapes(limits), knee_shapes(limits, knee), itertools.repeat(None)
    )
    mixes = itertools.islice(mixed_shapes(limits), 4 * max_shapes)
    for pair in zip(dense, mixes, strict=False):
        for shape in pair:
            if shape is not None and shape not in seen and shape.fits(limits) and len(seen) < max_shapes:
                seen.add(shape)
                yield shape


def find_knee(samples: Sequence[Sample]) -> int:
    """The token count where the slope of prefill-only steps takes over from their floor.

    The least time is the floor, the steepest time per token the slope; their crossing is the knee. Falls back on
    DEFAULT_KNEE when there is nothing to go by.
    """
    prefills = [
        (f.num_tokens, seconds)
        for f, seconds in samples
        if f.num_prefill_chunks == 1 and not f.num_decodes and not f.adapters and not f.masks
    ]
    if len(prefills) < 2:
        return DEFAULT_KNEE
    floor = min(seconds for _, seconds in prefills)
    tokens, seconds = max(prefills)
    return max(32, min(round(floor * tokens / seconds), 1024))


def run_sweep(
    measure: Callable[[StepShape], float],
    limits: Limits,
    budget_seconds: float,
    clock: Callable[[], float],
    max_shapes: int = MAX_SHAPES,
    adapters: int = 0,
    masks: bool = False,
) -> list[Sample]:
    """Measure as many shapes as the budget allows, each as the median of up to REPEATS runs after one to warm up.

    `measure` runs the step once and returns its seconds. A shape too long for repeats is measured once; one that is
    expected to overrun what is left is left out. At least one shape is always measured. `adapters`: LoRA adapters that
    the runner has, from 1 on. `masks`: it can enforce a grammar.
    """
    sweep = _Sweep(measure, clock, budget_seconds, limits.reach)
    anchors = [shape for shape in dict.fromkeys(anchor_shapes(limits)) if shape.fits(limits)]
    for shape in anchors:
        sweep.take(shape)
    shapes = under_adapters(plan_sweep(limits, find_knee(sweep.samples), max_shapes), adapters)
    for shape in under_masks(shapes) if masks else shapes:
        if shape not in anchors and not sweep.take(shape):
            break
    return sweep.samples


class _Sweep:
    """Measures shapes one by one and keeps within the deadline."""

    def __init__(
        self, measure: Callable[[StepShape], float], clock: Callable[[], float], budget: float, reach: Reach
    ) -> None:
        self._reach = reach
        self.samples: list[Sample] = []
        self._measure = measure
        self._clock = clock
        self._deadline = clock() + budget
        self._share = SHAPE_SHARE * budget
        self._longest = LONGEST_SHARE * budget
        self._costs: list[tuple[int, int, float]] = []

    def take(self, shape: StepShape) -> bool:
        """Measure `shape` if the time left allows; False once the budget is spent."""
        left = self._deadline - self._clock()
        if self.samples and left <= 0:
            return False
        if self.samples and self._expected(shape) > min(left, self._longest):
            return True
        begin = self._clock()
        times = [self._measure(shape)]
        first = self._clock() - begin
        repeats = REPEATS if first <= 0 else min(REPEATS, int(min(self._share, left - first) / first))
        if not self.samples and 2 * first <= left:
            repeats = max(repeats, 1)  # the very first run also pays for everything that is set up lazily
        if repeats >= 1:
            times = [self._measure(shape) for _ in range(repeats)]
        features = shape.features(self._reach)
        self._costs.append((features.num_tokens, _num_read(features), first))
        self.samples.append(Sample(features, sorted(times)[len(times) // 2]))
        return True

    def _expected(self, shape: StepShape) -> float:
        """Seconds the first run may take on the wall clock: a smaller step, grown by its tokens or its contexts."""
        features = shape.features(self._reach)
        tokens, context = features.num_tokens, _num_read(features)
        grown = [
            cost * max(tokens / smaller_tokens, context / smaller_context)
            for smaller_tokens, smaller_context, cost in self._costs
            if smaller_tokens <= tokens and smaller_context <= context
        ]
        return min(grown, default=0.0)


def _num_read(features: BatchFeatures) -> int:
    """Tokens of all contexts that the step reads: the memory that it touches."""
    return features.decode_context_sum + features.prefill_context_sum


def _radical_inverse(index: int, base: int) -> float:
    """The digits of `index` mirrored behind the point: evenly spread over [0, 1)."""
    value, scale = 0.0, 1.0
    while index:
        scale /= base
        index, digit = divmod(index, base)
        value += digit * scale
    return value


def _log_scale(u: float, top: int) -> int:
    """u in [0, 1) → 1 … `top`, even in the logarithm."""
    return max(1, round(math.pow(max(top, 1), u)))
