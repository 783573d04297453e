"""Start-up sweep: the steps to measure, their order, and the time limit (HyGen §4.2, "Training Data").

Pure: the caller runs a shape on its runner and returns seconds; the clock is an argument. Anchors that determine every
term come first. Points around the knee between the memory-bound and the compute-bound regime follow, interleaved with a
low-discrepancy sequence of mixed steps. Any prefix of this order gives a usable fit, so the sweep can stop at any time.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.limits import Limits
from predictor.features import EVERYTHING, BatchFeatures, Reach
from predictor.samples import Sample

MAX_SHAPES = 400
REPEATS = 3
SHAPE_SHARE = 0.02
"""Share of the time limit for the repeats of one shape: on a slow device, more shapes help more than more repeats."""
LONGEST_SHARE = 0.05
"""Maximum expected share of the time limit for one run. Longer steps are skipped and extrapolated."""
DEFAULT_KNEE = 256
MIX_PRIMES = (2, 3, 5, 7)
ADAPTED = 3
"""One in ADAPTED shapes after the anchors runs LoRA adapters, if there are any."""
MASKED = 4
"""One in MASKED shapes after the anchors has rows with a grammar mask, if grammars are supported."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step to measure.

    Attributes:
        num_decodes: Number of decodes.
        decode_context: Context length of each decode, its own token included: a decode is the chunk
            (decode_context − 1, 1).
        chunks: Prefill chunks (start, length).
        adapters: Number of LoRA adapters, assigned to the sequences in turn.
        masked: Number of sequences whose samples are limited by a grammar.
    """

    num_decodes: int = 0
    decode_context: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    adapters: int = 0
    masked: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the step (T)."""
        return self.num_decodes + sum(length for _, length in self.chunks)

    def fits(self, limits: Limits) -> bool:
        """Return whether the step can run under these limits."""
        contexts = [start + length for start, length in self.chunks] + [self.decode_context] * self.num_decodes
        return (
            0 < len(contexts) <= limits.max_num_seqs
            and self.num_tokens <= limits.max_num_batched_tokens
            and max(contexts) <= limits.max_model_len
            and sum(map(limits.units, contexts)) <= limits.num_units
        )

    def features(self, reach: Reach = EVERYTHING) -> BatchFeatures:
        """Return the features of the step for the latency model."""
        features = BatchFeatures(reach)
        if self.num_decodes:
            features.add_decodes(self.num_decodes, self.num_decodes * reach.tokens(self.decode_context - 1, 1))
        for start, length in self.chunks:
            features.add_chunk(start, length)
        features.add_adapted(self.adapters, self.num_tokens if self.adapters else 0)
        features.add_masked(self.masked)
        return features


def anchor_shapes(limits: Limits) -> Iterator[StepShape]:
    """Yield the few shapes that determine every term. Small steps come first, to know the cost per token early."""
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
    """Assign adapters to every third shape: between one and `adapters`, at most one per sequence."""
    for index, shape in enumerate(shapes):
        count = min(1 + index // ADAPTED % adapters, shape.num_decodes + len(shape.chunks)) if adapters else 0
        yield shape if index % ADAPTED else replace(shape, adapters=count)


def under_masks(shapes: Iterable[StepShape]) -> Iterator[StepShape]:
    """Assign masks to every fourth shape: to all of its sequences, to one, or to half, in turn."""
    for index, shape in enumerate(shapes):
        sequences = shape.num_decodes + len(shape.chunks)
        count = (sequences, 1, -(-sequences // 2))[index // MASKED % 3]
        yield replace(shape, masked=count) if index % MASKED == 1 else shape


def edge_shapes(limits: Limits) -> Iterator[StepShape]:
    """Yield one step for each padding size, filled to that size."""
    context = min(256, limits.max_model_len)
    for size in limits.padding.decode:
        yield StepShape(min(size, limits.max_decodes(context)), context)
    for size in limits.padding.mixed:
        yield from _mixed(limits, size)


def knee_shapes(limits: Limits, knee: int) -> Iterator[StepShape]:
    """Yield steps of 16, 32, 48 … tokens up to four times the knee, then in eighths of an octave, knee first.
    Each step mixes decodes and one chunk, like a step with offline fill.
    """
    top = limits.max_num_batched_tokens
    counts = set(range(16, min(4 * knee, top) + 1, 16))
    counts |= {min(top, round(4 * knee * 2 ** (step / 8))) for step in range(64) if knee * 2 ** (step / 8) <= top / 4}
    for tokens in sorted(counts, key=lambda count: (abs(math.log2(count / knee)), count)):
        yield from _mixed(limits, tokens)


def _mixed(limits: Limits, tokens: int) -> Iterator[StepShape]:
    """Yield a step of `tokens` tokens, a quarter of them decodes, if a chunk fits beside the decodes."""
    context = min(256, limits.max_model_len)
    decodes = min(tokens // 4, limits.max_num_seqs - 1, limits.max_decodes(context) // 2)
    chunk = min(tokens - decodes, limits.max_model_len)
    if chunk >= 2:
        yield StepShape(decodes, context if decodes else 0, ((0, chunk),))


def mixed_shapes(limits: Limits) -> Iterator[StepShape]:
    """Yield endless mixes, a Halton sequence over the logarithms of (decodes, context, chunk, prefix)."""
    for index in itertools.count(1):
        u = [_radical_inverse(index, prime) for prime in MIX_PRIMES]
        context = _log_scale(u[1], limits.max_model_len)
        decodes = _log_scale(u[0], limits.max_decodes(context)) if index % 4 else 0
        chunk = _log_scale(u[2], limits.max_num_batched_tokens - decodes) if index % 3 or not decodes else 0
        start = _log_scale(u[3], limits.max_model_len) - 1
        chunk = min(chunk, limits.max_model_len - start)
        yield StepShape(decodes, context if decodes else 0, ((start, chunk),) if chunk >= 2 else ())


def plan_sweep(limits: Limits, knee: int, max_shapes: int = MAX_SHAPES) -> Iterator[StepShape]:
    """Yield the shapes after the anchors: padding edges, then knee points, alternating with mixes; without repetition,
    each within the limits."""
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
    """Return the token count at which prefill-only steps become compute-bound.

    The knee is the crossing of the floor (the least time) and the slope (time per token of the largest prefill).
    Returns DEFAULT_KNEE for fewer than two such samples.
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
    """Measure as many shapes as fit in `budget_seconds`; each is the median of up to REPEATS runs after a warm-up run.

    At least one shape is measured. A shape too long for repeats is measured once. A shape whose expected time exceeds
    the remaining time is skipped.

    Args:
        measure: Runs the step once and returns its seconds.
        limits: Limits that the shapes must respect.
        budget_seconds: Time limit of the sweep.
        clock: Monotonic clock in seconds.
        max_shapes: Maximum number of shapes after the anchors.
        adapters: Number of LoRA adapters of the runner, numbered from 1.
        masks: Whether the runner can enforce grammars.
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
    """Measures shapes one by one within the time limit."""

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
        """Measure `shape` if the remaining time allows it; return False once the time is up."""
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
            repeats = max(repeats, 1)  # the very first run includes lazy initialisation
        if repeats >= 1:
            times = [self._measure(shape) for _ in range(repeats)]
        features = shape.features(self._reach)
        self._costs.append((features.num_tokens, _num_read(features), first))
        self.samples.append(Sample(features, sorted(times)[len(times) // 2]))
        return True

    def _expected(self, shape: StepShape) -> float:
        """Return the expected seconds of the first run, extrapolated from smaller steps by tokens or contexts."""
        features = shape.features(self._reach)
        tokens, context = features.num_tokens, _num_read(features)
        grown = [
            cost * max(tokens / smaller_tokens, context / smaller_context)
            for smaller_tokens, smaller_context, cost in self._costs
            if smaller_tokens <= tokens and smaller_context <= context
        ]
        return min(grown, default=0.0)


def _num_read(features: BatchFeatures) -> int:
    """Return the tokens of all contexts that the step reads, a measure of memory traffic."""
    return features.decode_context_sum + features.prefill_context_sum


def _radical_inverse(index: int, base: int) -> float:
    """Return the radical inverse: the digits of `index` mirrored behind the point, evenly spread over [0, 1)."""
    value, scale = 0.0, 1.0
    while index:
        scale /= base
        index, digit = divmod(index, base)
        value += digit * scale
    return value


def _log_scale(u: float, top: int) -> int:
    """Map u in [0, 1) to 1 … `top`, uniform in the logarithm."""
    return max(1, round(math.pow(max(top, 1), u)))
