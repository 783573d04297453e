"""The latency profile of this model on this machine: loaded if it is stored, else measured.

HyGen §4.2: a sweep over step shapes on the real runner within a time limit, then a non-negative least squares fit. Rows
and units are assigned here, without the core, so the runner must be idle. The module does not import torch.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from engine.api import SamplingParams
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.forms import Grammar
from engine.limits import UNITS_PER_BLOCK, Limits
from engine.machine.activity import QUIET_SHARE
from engine.profiling.cache_costs import KV_ONLY, REPEATS, CacheTiers, measure_cache_costs
from engine.profiling.sweep import StepShape, run_sweep
from engine.scheduling.output import Chunk, ModelRunner, NewRequest, SchedulerOutput
from predictor.fitting import fit
from predictor.model import LatencyModel
from predictor.profile import Profile, ProfileError, ProfileKey
from predictor.samples import Sample, split_samples

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

    `vocab_size` bounds the synthetic token ids. Call `close` before the runner serves requests.
    """

    def __init__(self, runner: ModelRunner, limits: Limits, vocab_size: int) -> None:
        self._runner = runner
        self._limits = limits
        self._vocab_size = vocab_size
        self._step_ids = count()
        self._shape: StepShape | None = None
        self._chunks: tuple[Chunk, ...] = ()

    def measure(self, shape: StepShape) -> float:
        """Return the seconds of one step of this shape, including input deltas and sampling."""
        if shape != self._shape:
            self._write(shape)
        return self._runner.launch(self._step(shape))().latency

    def close(self) -> None:
        """Release every row."""
        rows = tuple(chunk.row for chunk in self._chunks)
        self._shape, self._chunks = None, ()
        if rows:
            self._run_released(rows)

    def _run_released(self, rows: tuple[int, ...]) -> None:
        """Release rows with a one-token step in row 0, because a step cannot be empty. The next user releases row 0."""
        entry = CacheEntry(CacheKind.KV, Tier.DEVICE, tuple(range(UNITS_PER_BLOCK)))
        new = NewRequest(0, "profile-end", (0,), 1, DRAWN, (entry,))
        self._runner.launch(SchedulerOutput(next(self._step_ids), (Chunk(0, 0, 1, True),), (new,), (), rows))()

    def _write(self, shape: StepShape) -> None:
        released = tuple(chunk.row for chunk in self._chunks)
        spans = [(shape.decode_context - 1, 1)] * shape.num_decodes + list(shape.chunks)
        units = count()
        new_requests = []
        for row, (start, length) in enumerate(spans):
            entries = tuple(
                CacheEntry(CacheKind.KV, Tier.DEVICE, tuple(next(units) for _ in range(UNITS_PER_BLOCK)))
                for _ in range(-(-(start + length) // self._limits.block_size))
            )
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
        return SchedulerOutput(
            next(self._step_ids),
            self._chunks,
            new_requests,
            released_rows=released_rows,
            features=shape.features(),
        )


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
) -> Profile:
    """Measure step times for about `seconds` at most, fit the model, and measure the cache operations of `tiers`.

    `progress(shapes, seconds)` is called after every shape. `adapters` is the number of LoRA adapters; `masks` tells
    whether the runner can enforce INSIDE_STRING. The runner must be idle and is idle afterwards.
    """
    shapes = ShapeRunner(runner, limits, vocab_size)
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
        buckets, decode_buckets = padding.mixed, padding.decode
        return fit(chosen, token_limit=limit, buckets=buckets, decode_buckets=decode_buckets, reach=limits.reach)

    created = datetime.now(UTC).isoformat(timespec="seconds")
    error = fitted(train).mape(held_out)
    profile = Profile(key, created, fitted(samples), error, len(samples), sweep=tuple(samples))
    costs = measure_cache_costs(runner, limits, tiers, REPEATS if seconds > 0 else 1)
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
) -> Profile:
    """Return the profile for `key` in `folder`, measured and stored if it is missing, poor or unusable.

    A profile that was measured on a busy machine is measured again once the machine is quiet. Missing costs of `tiers`
    are measured and added.

    Args:
        masks: Returns whether the runner can enforce INSIDE_STRING; called before a sweep.
        core_share: Measures the share of their time that busy threads get now, 0 to 1.
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
        costs = measure_cache_costs(runner, limits, tiers).over(profile.cache_costs)
        profile = profile.with_cache_costs(costs, tiers.unit_bytes)
        _keep(profile, folder, say)
        return profile
    if seconds <= 0:
        say("step times are estimated from a single step (--profile-seconds 0)")
        return measure_profile(runner, limits, vocab_size, key, 0.0, tiers=tiers, adapters=adapters)
    say(f"measuring step times for at most {seconds:.0f} s (once; the profile is stored in {folder})")
    before = core_share()
    profile = measure_profile(runner, limits, vocab_size, key, seconds, tiers=tiers, adapters=adapters, masks=masks())
    profile = replace(profile, core_share=min(before, core_share()))
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
