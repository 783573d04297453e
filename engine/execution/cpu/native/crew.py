"""How many threads work on a step: chosen at start by what steps take, watched while serving. Torch-free, no clock.

The second core of two halves a step when it is free and prolongs it when a neighbour has it; neighbours come and go. A
step's measured time over its predicted time is the signal: that they came shows in it, that they went does not while
few threads work, so other counts are tried from time to time as well. A trial alternates between two counts in short
turns, so that both see the same hour and the same kinds of steps, and takes the other one only if it is clearly faster.
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
        self._taken = 0
        self._ratios: dict[int, list[float]] = {now: [], other: []}

    @property
    def threads(self) -> int:
        """Of the next step."""
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

    Tell it of every step (`observe`) and use `threads` for the next one. `on_change(before, after)` is called when the
    choice changes, not for the turns of a trial.
    """

    def __init__(self, counts: tuple[int, ...], threads: int, on_change: Callable[[int, int], None]) -> None:
        assert threads in counts
        self._counts = counts
        self._settled = threads
        self._on_change = on_change
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._before: deque[float] = deque(maxlen=SETTLED)
        self._trial: _Trial | None = None
        self._waiting: list[int] = []  # counts to try
        self._patience, self._last_look = PATIENCE[0], math.nan

    @property
    def threads(self) -> int:
        """Of the next step."""
        return self._settled if self._trial is None else self._trial.threads

    def observe(self, ratio: float, now: float) -> None:
        """A step took `ratio` times what was predicted and ended at `now`, in seconds of any clock."""
        if not 0.0 < ratio < math.inf:
            return
        if math.isnan(self._last_look):
            self._last_look = now
        if self._trial is not None:
            self._trial.take(ratio)
            if self._trial.over:
                self._end_trial(self._trial, now)
            return
        if len(self._recent) == RECENT:
            self._before.append(self._recent[0])
        self._recent.append(ratio)
        shifted = self._has_shifted()
        if shifted:
            self._patience = PATIENCE[0]
        if shifted or now - self._last_look >= self._patience:
            self._look_around()

    def _has_shifted(self) -> bool:
        if len(self._before) < RECENT:
            return False
        change = median(self._recent) / median(self._before)
        return not 1.0 / SHIFT < change < SHIFT

    def _look_around(self) -> None:
        """Try the neighbours among the counts, the larger first."""
        at = self._counts.index(self._settled)
        self._waiting = [*self._counts[at + 1 : at + 2], *self._counts[max(at - 1, 0) : at]]
        self._next_trial()

    def _next_trial(self) -> None:
        self._trial = _Trial(self._settled, self._waiting.pop(0)) if self._waiting else None

    def _end_trial(self, trial: _Trial, now: float) -> None:
        won, before = trial.won, self._settled
        if won:
            self._settled, self._waiting, self._patience = trial.other, [], PATIENCE[0]
        self._next_trial()
        if self._trial is not None:
            return
        if not won:
            self._patience = min(2.0 * self._patience, PATIENCE[1])
        self._recent.clear()
        self._before.clear()
        self._last_look = now
        if won:
            self._on_change(before, self._settled)
