"""Number of threads per step: selected at start by measured step times and adapted while serving.

A second core halves a step when it is idle and prolongs it when a neighbour uses it, and neighbours come and go. The
signal is a step's measured time over its predicted time. It shows when neighbours arrive. It does not show when they
leave while few threads work, so other counts are also tried from time to time. A trial alternates between two counts in
short turns, so that both see the same conditions and kinds of steps, and adopts the other count only if it is clearly
faster.

A step of a trial may take twice its predicted time while requests wait for it, so only steps with enough slack are
used.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from engine.execution.cpu.native.device import NativeDevice
from engine.execution.runner import Runner
from engine.limits import UNITS_PER_BLOCK, Limits
from engine.profiling.calibration import ShapeRunner, StepShape
from engine.scheduling.output import Collect, ModelRunner, ModelRunnerOutput, SchedulerOutput

WORTH = 1.05
"""Prefer fewer threads if they take at most this factor of the shortest time, to leave cores to other processes."""
WIN, SURE = 0.9, 0.9
"""A trial changes the count if the median falls below WIN times the old one and the other count is faster in a share of
SURE of all pairs of steps, which happens by chance in one of a thousand trials."""
SHIFT = 1.3
"""Factor of a change of step times that indicates a change of neighbours."""
TURN, TURNS = 4, 3
"""Steps per turn of a trial, and turns per count; the first step of a turn is not counted."""
RECENT, SETTLED = 12, 48
"""Number of steps that represent the present, and maximum number that represents the past."""
LONGER = 2.0
"""Minimum slack of a step in a trial as a factor of its predicted time (more if the counts differ by more)."""
TRIAL_SECONDS = 60.0
"""A trial without enough steps in this time is cancelled, because its first steps are outdated."""
PATIENCE = (30.0, 480.0)
"""Seconds between trials without an event: initial value, and maximum (doubled after each vain trial)."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a decode step and of a prefill step."""

    decode: float
    prefill: float


def candidates(most: int) -> tuple[int, ...]:
    """Return the counts to consider: all up to 4, else multiples of a quarter of `most`."""
    if most <= 4:
        return tuple(range(1, most + 1))
    return tuple(sorted({1, most // 4, most // 2, 3 * most // 4, most}))


def choose(times: Mapping[int, Times]) -> int:
    """Return the count with the shortest steps, decodes and prompts weighted equally; fewer threads win ties."""
    decode, prefill = (min(getattr(each, kind) for each in times.values()) for kind in ("decode", "prefill"))
    costs = {n: math.sqrt(each.decode / decode * each.prefill / prefill) for n, each in times.items()}
    return min(n for n, cost in costs.items() if cost <= WORTH * min(costs.values()))


def measure(
    counts: Iterable[int],
    run: Callable[[int, str], float],
    rounds: int,
    seconds: float,
    clock: Callable[[], float],
) -> dict[int, Times]:
    """Measure the least times over up to `rounds` alternating rounds, at least one, within about `seconds`.

    `run(threads, kind)` returns the seconds of one step of kind "decode" or "prefill".
    """
    ends = clock() + seconds
    best = {(n, kind): math.inf for n in counts for kind in ("decode", "prefill")}
    for _ in range(rounds):
        for (n, kind), least in best.items():
            best[n, kind] = min(least, run(n, kind))
        if clock() >= ends:
            break
    return {n: Times(best[n, "decode"], best[n, "prefill"]) for n, _kind in best}


class _Trial:
    """Alternating turns of two counts."""

    def __init__(self, now: int, other: int) -> None:
        self.now, self.other = now, other
        self.longer = max(LONGER, now / other, other / now)
        self.began: float | None = None
        self._taken = 0
        self._ratios: dict[int, list[float]] = {now: [], other: []}

    @property
    def threads(self) -> int:
        """Count for the next step."""
        return self.other if self._taken // TURN % 2 == 0 else self.now

    @property
    def over(self) -> bool:
        return self._taken >= 2 * TURN * TURNS

    @property
    def won(self) -> bool:
        """Whether the other count is clearly faster (a rank sum test)."""
        now, other = self._ratios[self.now], self._ratios[self.other]
        faster = sum(mine < theirs for mine in other for theirs in now)
        return median(other) < WIN * median(now) and faster >= SURE * len(now) * len(other)

    def take(self, ratio: float) -> None:
        if self._taken % TURN:
            self._ratios[self.threads].append(ratio)
        self._taken += 1


class Crew:
    """The number of threads of an engine; knows no clock.

    Call `choose` before every step and `observe` after it.

    Args:
        counts: Allowed counts, ascending.
        threads: Initial count; as an attribute, the count of steps outside trials.
        on_change: Called as on_change(before, after) when `threads` changes.
    """

    def __init__(self, counts: tuple[int, ...], threads: int, on_change: Callable[[int, int], None]) -> None:
        assert threads in counts
        self._counts = counts
        self.threads = threads
        self._on_change = on_change
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._before: deque[float] = deque(maxlen=SETTLED)
        self._trial: _Trial | None = None
        self._tried = False  # whether the last step was part of the trial
        self._waiting: list[int] = []  # counts to try
        self._patience, self._last_look = PATIENCE[0], math.nan

    def choose(self, longer: float = math.inf) -> int:
        """Return the count for the next step, which may take up to `longer` times its predicted time."""
        self._tried = self._trial is not None and longer >= self._trial.longer
        return self._trial.threads if self._trial is not None and self._tried else self.threads

    def observe(self, ratio: float, now: float) -> None:
        """Record that the step took `ratio` times its predicted time and ended at `now`, in seconds of any clock."""
        if not 0.0 < ratio < math.inf:
            return
        if math.isnan(self._last_look):
            self._last_look = now
        if self._trial is not None:
            self._go_on(self._trial, ratio, now)
            return
        if len(self._recent) == RECENT:
            self._before.append(self._recent[0])
        self._recent.append(ratio)
        shifted = self._has_shifted()
        if shifted:
            self._patience = PATIENCE[0]
        if shifted or now - self._last_look >= self._patience:
            self._look_around()

    def _go_on(self, trial: _Trial, ratio: float, now: float) -> None:
        if trial.began is None:
            trial.began = now
        if self._tried:
            trial.take(ratio)
        if trial.over or now - trial.began > TRIAL_SECONDS:
            self._end_trial(trial, now)

    def _has_shifted(self) -> bool:
        if len(self._before) < RECENT:
            return False
        change = median(self._recent) / median(self._before)
        return not 1.0 / SHIFT < change < SHIFT

    def _look_around(self) -> None:
        """Try the adjacent counts, the larger first."""
        at = self._counts.index(self.threads)
        self._waiting = [*self._counts[at + 1 : at + 2], *self._counts[max(at - 1, 0) : at]]
        self._next_trial()

    def _next_trial(self) -> None:
        self._trial = _Trial(self.threads, self._waiting.pop(0)) if self._waiting else None

    def _end_trial(self, trial: _Trial, now: float) -> None:
        won, before = trial.over and trial.won, self.threads
        if won:
            self.threads, self._waiting, self._patience = trial.other, [], PATIENCE[0]
        self._next_trial()
        if self._trial is not None:
            return
        if not won:
            self._patience = min(2.0 * self._patience, PATIENCE[1])
        self._recent.clear()
        self._before.clear()
        self._last_look = now
        if won:
            self._on_change(before, self.threads)


logger = logging.getLogger("tidemill.threads")

ROUNDS, SECONDS = 5, 3.0
DECODES, CONTEXT, PROMPT = 4, 64, 64


class ThreadWatch:
    """Sets the number of threads of each step by `resize`; steps must run one at a time."""

    def __init__(
        self,
        counts: tuple[int, ...],
        threads: int,
        resize: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resize, self._clock = resize, clock
        self._crew = Crew(counts, threads, self._tell)
        self._threads = threads
        resize(threads)

    def launch(self, launch: Callable[[SchedulerOutput], Collect], output: SchedulerOutput) -> Collect:
        """Launch a step, and record its time when it is collected. Steps without a prediction (calibration) are
        ignored."""
        predicted = output.predicted_latency if output.chunks else None
        self._use(self._crew.choose(1.0 + output.spare / predicted) if predicted else self._crew.threads)
        trial = self._threads != self._crew.threads
        collect = launch(output)

        def collected() -> ModelRunnerOutput:
            result = collect()
            if predicted:
                self._crew.observe(result.latency / predicted, self._clock())
            return replace(result, trial=True) if trial else result

        return collected

    def _use(self, threads: int) -> None:
        if threads != self._threads:
            self._threads = threads
            self._resize(threads)

    def _tell(self, before: int, after: int) -> None:
        logger.info("steps now use %d threads instead of %d, which is faster at present", after, before)


class NativeRunner(Runner[NativeDevice]):
    """A Runner of the native kernels. `watch` adapts the threads; None: their number is fixed."""

    watch: ThreadWatch | None = None

    def launch(self, output: SchedulerOutput) -> Collect:
        launch = super().launch
        return launch(output) if self.watch is None else self.watch.launch(launch, output)


def choose_threads(
    runner: ModelRunner,
    limits: Limits,
    vocab_size: int,
    most: int,
    resize: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, str]:
    """Return the best count up to `most` for this model, measured with a few steps, and a log line with the reason.

    The runner must be idle.
    """
    room = limits.num_units // UNITS_PER_BLOCK * limits.block_size
    context = min(CONTEXT, limits.max_model_len, room)
    decodes = max(1, min(DECODES, limits.max_num_seqs, room // context))
    prompt = min(PROMPT, context, limits.max_num_batched_tokens)
    shapes = {"decode": StepShape(decodes, context), "prefill": StepShape(chunks=((0, prompt),))}
    steps = ShapeRunner(runner, limits, vocab_size)

    def run(threads: int, kind: str) -> float:
        resize(threads)
        steps.measure(shapes[kind])  # warm-up: starts threads and fills caches
        return steps.measure(shapes[kind])

    times = measure(candidates(most), run, ROUNDS, SECONDS, clock)
    steps.close()
    chosen = choose(times)
    seen = ", ".join(f"{n}: {t.decode * 1e3:.1f} / {t.prefill * 1e3:.1f} ms" for n, t in times.items())
    return chosen, f"steps use {chosen} of {most} threads (decodes / prompt with {seen}); adapted while serving"
