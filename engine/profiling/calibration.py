"""The latency profile of this model on this machine: loaded if it is stored, else measured.

HyGen §4.2: a sweep over step shapes on the real runner within a time limit, then a non-negative least squares fit. Rows
and units are assigned here, without the core, so the runner must be idle. The module does not import torch.

Start-up sweep: the steps to measure, their order, and the time limit (HyGen §4.2, "Training Data").

Pure: the caller runs a shape on its runner and returns seconds; the clock is an argument. Prompts and contexts that
grow come first, until they determine the cost of a token beyond that of the weights, then anchors for every term.
Points around the knee between the memory-bound and the compute-bound regime follow, interleaved with a low-discrepancy
sequence of mixed steps. Any prefix of this order gives a usable fit, so the sweep can stop at any time.

Measurement of cache operations on a real runner: decoding from hidden state, restoring KV, and swapping.

Steps with and without an operation alternate; its cost is the median difference of such pairs, which suppresses
outliers and drift. A cost below the noise is measured longer, then set to its lower bound: the time to move its bytes.
A cost of zero would let the scheduler treat the operation as free.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from engine.api import SamplingParams
from engine.cache.blocks import COMPACT, CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.cache.placement import HostSplit, OffloadCosts, split_host
from engine.forms import Grammar
from engine.limits import UNITS_PER_BLOCK, Limits
from engine.machine.activity import QUIET_SHARE
from engine.machine.facts import BUS_RATE
from engine.scheduling.output import Chunk, ModelRunner, NewRequest, SchedulerOutput
from predictor.features import EVERYTHING, BatchFeatures, Reach
from predictor.fitting import fit
from predictor.model import LatencyModel, Sample, split_samples
from predictor.profile import (
    FEW_TOKENS,
    MANY_TOKENS,
    MEMORY_RATE,
    Affine,
    CacheCosts,
    Profile,
    ProfileError,
    ProfileKey,
    affine,
)

MAX_SHAPES = 400
REPEATS = 3
SHAPE_SHARE = 0.02
"""Share of the time limit for the repeats of one shape: on a slow device, more shapes help more than more repeats."""
LONGEST_SHARE = 0.05
"""Maximum expected share of the time limit for one run. Longer steps are skipped and extrapolated."""
GROWTH = 4
"""Growth of the sizes in `growing_shapes`: a step takes at most GROWTH times as long as the one before it."""
GROWING_SHARE = 0.5
"""Share of the time left that a growing step may take. Where the weights alone take long, a token costs nothing in
small steps; a fit without a larger one predicts that prompts are free."""
SLOWER = 2.0
"""Ratio to the smallest step from which the times of growing steps can be extrapolated."""
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


def growing_shapes(limits: Limits) -> Iterator[Iterator[StepShape]]:
    """Yield prompts of 4, 16, 64, ... tokens, then a decode with contexts that grow likewise, within the limits."""
    length = limits.max_model_len
    sizes = [GROWTH**power for power in range(1, 16)]
    prompts = (StepShape(0, 0, ((0, size),)) for size in sizes)
    decodes = (StepShape(1, min(size, length)) for size in sizes[2:] if size < GROWTH * length)
    for shapes in (prompts, decodes):
        yield itertools.takewhile(lambda shape: shape.fits(limits), shapes)


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
    sweep.take(anchors[0])
    grown = {shape for shapes in growing_shapes(limits) for shape in sweep.take_growing(shapes)}
    for shape in anchors[1:]:
        if shape not in grown:
            sweep.take(shape)
    known = grown.union(anchors)
    shapes = under_adapters(plan_sweep(limits, find_knee(sweep.samples), max_shapes), adapters)
    for shape in under_masks(shapes) if masks else shapes:
        if shape not in known and not sweep.take(shape):
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

    def take_growing(self, shapes: Iterable[StepShape]) -> Iterator[StepShape]:
        """Measure and yield growing shapes up to the first that takes clearly longer than the smallest step, or that
        may take too much of the time left."""
        smallest = self.samples[0].seconds
        for shape in shapes:
            longest = GROWING_SHARE * (self._deadline - self._clock())
            if self._expected(shape) > longest:
                return
            self.take(shape, longest)
            yield shape
            if self.samples[-1].seconds > SLOWER * smallest:
                return

    def take(self, shape: StepShape, longest: float | None = None) -> bool:
        """Measure `shape` if the remaining time allows it; return False once the time is up.

        `longest`: maximum expected seconds, in place of LONGEST_SHARE.
        """
        left = self._deadline - self._clock()
        if self.samples and left <= 0:
            return False
        if self.samples and self._expected(shape) > min(left, self._longest if longest is None else longest):
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


COST_REPEATS = 15
"""Number of step pairs; up to PATIENCE times as many if the difference is below the noise."""
PATIENCE = 3
MAX_UNITS = 256
"""Maximum number of units copied in a measured step."""
FEWER = 4
"""The smaller of two measured sizes is at most 1 / FEWER of the larger one, so that both determine a line."""
SPLIT_BLOCKS = 16
"""Blocks of a context for which the split of a streamed cache is measured."""
Measured = tuple[int, float]
"""(tokens, seconds)."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def _timed(runner: ModelRunner, output: Callable[[], SchedulerOutput], *, ahead: bool) -> float:
    """Return the seconds of a step. With `ahead` it is launched while the same step runs before it, as a server does:
    the device does not wait for the host."""
    before = runner.launch(output()) if ahead else None
    collect = runner.launch(output())
    if before is not None:
        before()
    return collect().latency


@dataclass(frozen=True, slots=True)
class CacheTiers:
    """Cache features of a runner beside KV on the device; none by default."""

    scratch_blocks: int = 0  # blocks of scratch for hidden state
    host_units: int = 0  # size of the host tier
    unit_bytes: int = 0
    copy_rate: float = BUS_RATE  # upper bound of copies between the tiers, bytes/s


KV_ONLY = CacheTiers()


def measure_cache_costs(
    runner: ModelRunner, limits: Limits, tiers: CacheTiers, repeats: int = COST_REPEATS, *, ahead: bool = False
) -> CacheCosts:
    """Measure the operations that `tiers` offers and the pool has room for; others stay None. The runner is idle after.

    Lower bounds: a swapped unit at `tiers.copy_rate`; at MEMORY_RATE, one read for a token from hidden state, and one
    read and two writes (K and V) for a restored token. `ahead`: the device takes steps ahead, see `_timed`.
    """
    bench = _Bench(runner, limits, repeats, ahead=ahead)
    unit_bytes = max(1, tiers.unit_bytes)
    token_seconds = unit_bytes / limits.block_size / MEMORY_RATE
    run_hidden = restore = swap_out = swap_in = None
    longest = limits.max_model_len // limits.block_size

    def at_two_sizes(work: Callable[[int, float], Measured], blocks: int, floor: float) -> Affine:
        few = max(2, min(blocks // FEWER, -(-FEW_TOKENS // limits.block_size)))
        many = work(blocks, floor)
        return affine(many if few >= blocks else work(few, floor), many, floor)

    def in_rows(work: Callable[[Sequence[range], float], Measured]) -> Callable[[int, float], Measured]:
        return lambda blocks, floor: work(_shares(blocks, longest, limits.max_num_seqs), floor)

    blocks = min(tiers.scratch_blocks, (limits.num_units - 2) // 3, -(-MANY_TOKENS // limits.block_size))
    if min(blocks, longest) > 0:
        run_hidden = at_two_sizes(in_rows(bench.run_hidden), blocks, token_seconds)
        restore = at_two_sizes(bench.restore, min(blocks, longest), 3 * token_seconds)
    units = min(tiers.host_units, limits.num_units - 2, MAX_UNITS)
    if units > 0:
        floor = unit_bytes / tiers.copy_rate
        swap_out, swap_in = (bench.swap(units, action, floor) for action in (CacheAction.SWAP_OUT, CacheAction.SWAP_IN))
    return CacheCosts(
        run_hidden and run_hidden.token,
        restore and restore.token,
        swap_out,
        swap_in,
        run_hidden and run_hidden.fixed,
        restore and restore.fixed,
    )


def measure_split(
    runner: ModelRunner, limits: Limits, room: int, load_weights: float, load_kv: float
) -> tuple[HostSplit, OffloadCosts]:
    """Return the split of a streamed cache of `room` KV blocks by kind, and the costs behind it (HybridServe §4.3).

    Streams are paused, so that steps take the device's time alone. The rows fill the pool with contexts of SPLIT_BLOCKS
    blocks. A whole step replaces the paper's layer. `load_weights`, `load_kv`: seconds to load the streamed weights,
    and a KV block of all layers.
    """
    bench, longest = _Bench(runner, limits, 0), limits.max_model_len // limits.block_size
    many = min(SPLIT_BLOCKS, longest, room)
    few, rows = max(1, many // FEWER), max(1, min(limits.max_num_seqs, room // many))

    def seconds(blocks: int, units: int) -> float:
        """Return the time of a step whose rows have `blocks` blocks, of so many units each."""
        shares = [range(row * blocks * units, (row + 1) * blocks * units) for row in range(rows)]
        run = bench.decode([_kv(share) if units == UNITS_PER_BLOCK else _hidden(share) for share in shares])
        return min([run() for _ in range(1 + REPEATS)][1:])

    short, long = (seconds(blocks, UNITS_PER_BLOCK) for blocks in (few, many))
    regenerate = max(0.0, seconds(many, COMPACT.form.units) - long) / (rows * many)
    forward = max(0.0, long - short) / (rows * max(1, many - few))
    fixed = max(0.0, long - forward * rows * many)
    ratio = COMPACT.form.units / UNITS_PER_BLOCK
    costs = OffloadCosts(load_weights, load_kv, regenerate, fixed, forward, ratio)
    return split_host(costs, room, 0), costs


def _shares(blocks: int, longest: int, max_rows: int) -> list[range]:
    """Split `blocks` into the fewest rows of at most `longest`, equal within one block, in at most `max_rows` rows."""
    rows = min(-(-blocks // longest), max_rows)
    each = [min(longest, blocks // rows + (row < blocks % rows)) for row in range(rows)]
    starts = [sum(each[:row]) for row in range(rows)]
    return [range(start, start + count) for start, count in zip(starts, each, strict=True)]


class _Bench:
    """Runs the measured steps. Rows from 0 on hold their requests: one, or more if the blocks exceed a context."""

    def __init__(self, runner: ModelRunner, limits: Limits, repeats: int, *, ahead: bool = False) -> None:
        self._runner, self._ahead = runner, ahead
        self._block_size = limits.block_size
        self._repeats = repeats
        self._step_ids = itertools.count()

    def run_hidden(self, shares: Sequence[range], floor: float) -> Measured:
        """Compare a decode over each share of blocks from hidden state with one from KV; count past tokens."""
        hidden = self.decode([_hidden(share) for share in shares])
        kv = self.decode([_kv(range(2 * share.start, 2 * share.stop)) for share in shares])
        tokens = sum(len(share) * self._block_size - 1 for share in shares)
        return self._cost(hidden, kv, tokens, floor)

    def restore(self, blocks: int, floor: float) -> Measured:
        """Measure restoring blocks; count tokens. Units 0 and 1 belong to the step's own request."""
        sources = _hidden(range(2, 2 + blocks))
        targets = _kv(range(2 + blocks, 2 + 3 * blocks))
        operations = [
            CacheOperation(CacheAction.RESTORE, source, target, index * self._block_size)
            for index, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]
        return self._cost_of(operations, blocks * self._block_size, floor)

    def swap(self, units: int, action: CacheAction, floor: float) -> float:
        """Return seconds per unit in one direction."""
        device = _hidden(range(2, 2 + units))
        operations = []
        for index, entry in enumerate(device):
            on_host = CacheEntry(entry.kind, Tier.HOST, (index,))
            source, target = (entry, on_host) if action is CacheAction.SWAP_OUT else (on_host, entry)
            operations.append(CacheOperation(action, source, target))
        return self._cost_of(operations, units, floor)[1] / units

    def _cost_of(self, operations: Sequence[CacheOperation], count: int, floor: float) -> Measured:
        own = [_kv(range(2))]
        return self._cost(self.decode(own, operations), self.decode(own), count, floor)

    def _cost(self, more: Callable[[], float], less: Callable[[], float], count: int, floor: float) -> Measured:
        """Return `count` and the additional seconds of `more` over `less`, at least `floor` × `count`."""
        more(), less()  # warm-up
        differences: list[float] = []
        for _ in range(PATIENCE):
            for index in range(self._repeats):
                # the order alternates so that a drift of the machine's speed favours neither
                first, second = (more, less) if index % 2 else (less, more)
                taken = {first: first(), second: second()}
                differences.append(taken[more] - taken[less])
            if median(differences) > floor * count:
                break
        return count, max(median(differences), floor * count)

    def decode(
        self, rows: Sequence[tuple[CacheEntry, ...]], operations: Sequence[CacheOperation] = ()
    ) -> Callable[[], float]:
        """Return a function that runs a decode step over these entries, a request per row, and returns its seconds."""
        lengths = [len(entries) * self._block_size for entries in rows]
        new = tuple(
            NewRequest(row, f"profile-cache-{row}", (0,) * length, length, GREEDY, entries)
            for row, (entries, length) in enumerate(zip(rows, lengths, strict=True))
        )
        chunks = tuple(Chunk(row, length - 1, 1, True) for row, length in enumerate(lengths))
        released = tuple(range(len(rows)))

        def output() -> SchedulerOutput:
            return SchedulerOutput(next(self._step_ids), chunks, new, (), released, operations=tuple(operations))

        return lambda: _timed(self._runner, output, ahead=self._ahead)


def _hidden(units: Sequence[int]) -> tuple[CacheEntry, ...]:
    return tuple(CacheEntry(CacheKind.HIDDEN, Tier.DEVICE, (unit,)) for unit in units)


def _kv(units: Sequence[int]) -> tuple[CacheEntry, ...]:
    pairs = zip(units[::2], units[1::2], strict=True)
    return tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, pair) for pair in pairs)


log = logging.getLogger("tidemill.engine")

HELD_OUT = 0.2
POOR = 0.3
"""Held-out error above which the next start measures again: the machine was probably busy."""
MIN_SAMPLES = 10
DRAWN = SamplingParams(max_tokens=1)
"""Temperature 1, the default of requests: sampling is part of a step's time."""
INSIDE_STRING = Grammar("regex", r'[^"\\\x00-\x1f]*"')
"""Grammar of masked rows in the sweep. Inside a JSON string, masks take longer than elsewhere in most answers."""
_LIMITED = replace(DRAWN, grammar=INSIDE_STRING)


class ShapeRunner:
    """Runs steps of a given shape. A new shape first fills its rows in a step that is not measured.

    `vocab_size` bounds the synthetic token ids. `ahead`: see `_timed`. Call `close` before the runner serves requests.
    """

    def __init__(self, runner: ModelRunner, limits: Limits, vocab_size: int, *, ahead: bool = False) -> None:
        self._runner, self._ahead = runner, ahead
        self._limits = limits
        self._vocab_size = vocab_size
        self._step_ids = itertools.count()
        self._shape: StepShape | None = None
        self._chunks: tuple[Chunk, ...] = ()

    def measure(self, shape: StepShape) -> float:
        """Return the seconds of one step of this shape, including input deltas and sampling. No server takes a step of
        requests with grammars ahead."""
        if shape != self._shape:
            self._write(shape)
        return _timed(self._runner, lambda: self._step(shape), ahead=self._ahead and not shape.masked)

    def close(self) -> None:
        """Release every row."""
        rows = tuple(chunk.row for chunk in self._chunks)
        self._shape, self._chunks = None, ()
        if rows:  # a step cannot be empty: one of one token in row 0, which the next user releases
            new = NewRequest(0, "profile-end", (0,), 1, DRAWN, _kv(range(UNITS_PER_BLOCK)))
            self._runner.launch(SchedulerOutput(next(self._step_ids), (Chunk(0, 0, 1, True),), (new,), (), rows))()

    def _write(self, shape: StepShape) -> None:
        released = tuple(chunk.row for chunk in self._chunks)
        spans = [(shape.decode_context - 1, 1)] * shape.num_decodes + list(shape.chunks)
        first, new_requests = 0, []
        for row, (start, length) in enumerate(spans):
            end = first + self._limits.units(start + length)
            entries, first = _kv(range(first, end)), end
            tokens = tuple((row * 7919 + i * 31) % self._vocab_size for i in range(start + length))
            adapter = 1 + row % shape.adapters if shape.adapters else 0
            sampling = _LIMITED if row < shape.masked else DRAWN
            name = f"profile-{row}"
            new_requests.append(NewRequest(row, name, tokens, len(tokens), sampling, entries, adapter=adapter))
        self._shape = shape
        self._chunks = tuple(Chunk(row, start, length, True) for row, (start, length) in enumerate(spans))
        self._runner.launch(self._step(shape, tuple(new_requests), released))()

    def _step(
        self, shape: StepShape, new_requests: tuple[NewRequest, ...] = (), released_rows: tuple[int, ...] = ()
    ) -> SchedulerOutput:
        step_id, features = next(self._step_ids), shape.features()
        return SchedulerOutput(step_id, self._chunks, new_requests, released_rows=released_rows, features=features)


def measure_profile(
    runner: ModelRunner,
    limits: Limits,
    vocab_size: int,
    key: ProfileKey,
    seconds: float,
    progress: Callable[[int, float], None] = lambda _count, _spent: None,
    tiers: CacheTiers = KV_ONLY,
    adapters: int = 0,
    masks: bool = False,
    *,
    ahead: bool = False,
) -> Profile:
    """Measure step times for about `seconds` at most, fit the model, and measure the cache operations of `tiers`.

    `progress(shapes, seconds)` is called after every shape. `adapters` is the number of LoRA adapters; `masks` tells
    whether the runner can enforce INSIDE_STRING, `ahead` whether the device takes steps ahead. The runner must be idle
    and is idle afterwards.
    """
    shapes = ShapeRunner(runner, limits, vocab_size, ahead=ahead)
    began = time.perf_counter()
    measured: set[StepShape] = set()

    def measure(shape: StepShape) -> float:
        taken = shapes.measure(shape)
        measured.add(shape)
        progress(len(measured), time.perf_counter() - began)
        return taken

    samples = run_sweep(measure, limits, seconds, time.perf_counter, adapters=adapters, masks=masks)
    shapes.close()
    train, held_out = split_samples(samples, HELD_OUT) if len(samples) >= MIN_SAMPLES else (samples, samples)
    limit, padding = limits.max_num_batched_tokens, limits.padding

    def fitted(chosen: list[Sample]) -> LatencyModel:
        sizes: dict[str, Any] = {"buckets": padding.mixed, "decode_buckets": padding.decode, "jump_at": padding.jump}
        return fit(chosen, token_limit=limit, **sizes, reach=limits.reach)

    created = datetime.now(UTC).isoformat(timespec="seconds")
    error = fitted(train).mape(held_out)
    profile = Profile(key, created, fitted(samples), error, len(samples), sweep=tuple(samples))
    costs = measure_cache_costs(runner, limits, tiers, COST_REPEATS if seconds > 0 else 1, ahead=ahead)
    return profile.with_cache_costs(costs, tiers.unit_bytes)


def load_profile(folder: Path, key: ProfileKey, limits: Limits) -> Profile | None:
    """Return the stored profile, or None if there is none. Raise ProfileError if it cannot be used."""
    path = folder / key.filename()
    if not path.exists():
        return None
    profile = Profile.load(path, key)
    if profile.model.token_limit < limits.max_num_batched_tokens:
        return None  # measured for smaller steps: measure again rather than extrapolate
    return profile


def load_or_measure(
    folder: Path,
    runner: ModelRunner,
    limits: Limits,
    vocab_size: int,
    key: ProfileKey,
    seconds: float,
    say: Callable[[str], None],
    tiers: CacheTiers = KV_ONLY,
    adapters: int = 0,
    masks: Callable[[], bool] = lambda: False,
    core_share: Callable[[], float] = lambda: 1.0,
    *,
    ahead: bool = False,
) -> Profile:
    """Return the profile for `key` in `folder`, measured and stored if it is missing, poor or unusable.

    A profile that was measured on a busy machine is measured again once the machine is quiet. Missing costs of `tiers`
    are measured and added.

    Args:
        masks: Returns whether the runner can enforce INSIDE_STRING; called before a sweep.
        core_share: Measures the share of their time that busy threads get now, 0 to 1.
        ahead: The device takes steps ahead.
    """
    try:
        profile = load_profile(folder, key, limits)
    except ProfileError as error:
        say(f"{error}; measuring again")
        profile = None
    if profile is not None and profile.held_out_mape > POOR and seconds > 0:
        say(f"the latency profile of {profile.created_at} is off by {profile.held_out_mape:.0%}; measuring again")
        profile = None
    if profile is not None and profile.core_share < QUIET_SHARE and seconds > 0 and core_share() >= QUIET_SHARE:
        taken = 1.0 - profile.core_share
        say(f"other work took {taken:.0%} of the cores when the latency profile was measured; measuring again")
        profile = None
    if profile is not None:
        log.debug("latency profile of %s, %d steps", profile.created_at, profile.num_samples)
        if profile.cache_costs.covers(hidden=tiers.scratch_blocks > 0, host=tiers.host_units > 0):
            return profile
        costs = measure_cache_costs(runner, limits, tiers, ahead=ahead).over(profile.cache_costs)
        profile = profile.with_cache_costs(costs, tiers.unit_bytes)
        _keep(profile, folder, say)
        return profile
    measure = partial(measure_profile, runner, limits, vocab_size, key, tiers=tiers, adapters=adapters, ahead=ahead)
    if seconds <= 0:
        say("step times are estimated from a single step (--profile-seconds 0)")
        return measure(0.0)
    say(f"measuring step times for at most {seconds:.0f} s (once; the profile is stored in {folder})")
    before = core_share()
    profile = replace(measure(seconds, masks=masks()), core_share=min(before, core_share()))
    say(f"measured {profile.num_samples} steps, held-out error {profile.held_out_mape:.1%}")
    if profile.core_share < QUIET_SHARE:
        say(f"other work takes {1.0 - profile.core_share:.0%} of the cores; a start on a quiet machine measures again")
    _keep(profile, folder, say)
    return profile


def _keep(profile: Profile, folder: Path, say: Callable[[str], None]) -> None:
    try:
        profile.save(folder / profile.key.filename())
    except OSError as error:
        say(f"cannot store the profile ({error.strerror}); the next start measures again")
