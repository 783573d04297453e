"""How many threads work on a step: chosen at start by what steps take, watched while serving. Torch-free, no clock.

The second core of two halves a step when it is free and prolongs it when a neighbour has it; neighbours come and go. A
step's measured time over its predicted time is the signal: that they came shows in it, that they went does not while
few threads work, so other counts are tried from time to time as well. A trial alternates between two counts in short
turns, so that both see the same hour and the same kinds of steps, and takes the other one only if it is clearly faster.

A step of a trial may take twice as long as was predicted, and somebody may wait for it: only steps that may take so
long are tried with another count.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

WORTH = 1.05
"""Fewer threads do if they take no more than this many times the shortest time: cores are good for others, too."""
WIN, SURE = 0.9, 0.9
"""What a trial's median must come down to for a change, and in what share of all pairs of steps the other count must
have been the faster one: by chance that happens in one trial of a thousand."""
SHIFT = 1.3
"""Steps this many times as long, or as short, as they were: somebody came or went."""
TURN, TURNS = 4, 3
"""Steps of one count in a trial before the other's turn, and turns of each; a turn's first step is not counted."""
RECENT, SETTLED = 12, 48
"""Steps that stand for now, and at most so many for before."""
LONGER = 2.0
"""How many times as long as predicted a step of a trial may take, where one count is no more than twice the other."""
TRIAL_SECONDS = 60.0
"""A trial that finds no steps for so long is given up: what its first steps showed is another hour."""
PATIENCE = (30.0, 480.0)
"""Seconds until other counts are tried although nothing happened: at first, and at most (it doubles in vain)."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step of decodes and of one of a prompt."""

    decode: float
    prefill: float


def candidates(most: int) -> tuple[int, ...]:
    """Sensible counts up to `most`: all of few, halves and quarters of many."""
    if most <= 4:
        return tuple(range(1, most + 1))
    return tuple(sorted({1, most // 4, most // 2, 3 * most // 4, most}))


def choose(times: Mapping[int, Times]) -> int:
    """The count of threads with the shortest steps, decodes and prompts weighed alike; of equals the smallest."""
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
    """Least times of `rounds` rounds in alternation, of one round at least, of no more than about `seconds`.
    `run(threads, kind)`: seconds of one step, kind "decode" or "prefill"."""
    ends = clock() + seconds
    best = {(n, kind): math.inf for n in counts for kind in ("decode", "prefill")}
    for _ in range(rounds):
        for (n, kind), least in best.items():
            best[n, kind] = min(least, run(n, kind))
        if clock() >= ends:
            break
    return {n: Times(best[n, "decode"], best[n, "prefill"]) for n, _kind in best}


class _Trial:
    """Two counts in turns."""

    def __init__(self, now: int, other: int) -> None:
        self.now, self.other = now, other
        self.longer = max(LONGER, now / other, other / now)
        self.began: float | None = None
        self._taken = 0
        self._ratios: dict[int, list[float]] = {now: [], other: []}

    @property
    def threads(self) -> int:
        """Of its next step."""
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
    """The number of threads of an engine. `counts`: those that may be used, ascending; `threads`: the first one.

    Ask it before every step (`choose`) and tell it what that took (`observe`). `threads`: of steps that are no part of
    a trial. `on_change(before, after)` is called when these change.
    """

    def __init__(self, counts: tuple[int, ...], threads: int, on_change: Callable[[int, int], None]) -> None:
        assert threads in counts
        self._counts = counts
        self.threads = threads
        self._on_change = on_change
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._before: deque[float] = deque(maxlen=SETTLED)
        self._trial: _Trial | None = None
        self._tried = False  # whether the last step is a part of the trial
        self._waiting: list[int] = []  # counts to try
        self._patience, self._last_look = PATIENCE[0], math.nan

    def choose(self, longer: float = math.inf) -> int:
        """The count for the next step, which may take `longer` times what was predicted (1: no longer than that)."""
        self._tried = self._trial is not None and longer >= self._trial.longer
        return self._trial.threads if self._trial is not None and self._tried else self.threads

    def observe(self, ratio: float, now: float) -> None:
        """The step took `ratio` times what was predicted and ended at `now`, in seconds of any clock."""
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
        """Try the neighbours among the counts, the larger first."""
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
