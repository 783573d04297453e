"""The circuit breaker of co-location: closed, open, half-open (ours; the last line behind prediction and search).

Closed: offline work may use its budget. It opens when requests beside offline work break the SLO more than chance
explains (see `predictor.evidence`), or when steps overrun their predictions by what endangers it; then nothing offline
runs beside online work. After a while it is half-open: a tenth of the budget, until a few requests have passed the
probe, and then closed. It closes by itself, also when no request comes to prove anything. Misses of requests that no
offline work touched, or that came before the last opening, never count.

Requests that no offline work touched say what the promise is worth without any. While they miss it as well nothing can
be shown beside them and every trial makes it worse: it stays open until they keep it again, or nobody comes to say so.

What is granted follows the evidence: a quarter of a budget that nobody has proven, a little of itself more by every
good request beside offline work, half by every one that missed a limit or came close to it; once evidence
has changed it, it also grows back while nothing happens. Who opens again and again stays open longer and longer.

A pure state machine without timers: times are arguments, in seconds, and never go back; it may be asked at any event.
"""

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from predictor.evidence import ExcessTest, MissTest


class BreakerState(enum.Enum):
    """The three states of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When the breaker opens, for how long, and what runs while it probes.

    attainment      share of requests that must be good (the SLO's target); None: no limit is one of single requests
    max_overrun     by how much steps may be longer than predicted with the margin, on average, as a share of what they
                    may take: half of what a budget of 0.8 × the TBT limit leaves free
    steps           steps of which that mean is taken
    min_steps       steps before it counts
    open_seconds    time in the open state, doubled with every opening soon after the last, up to `longest_open`
    probe_seconds   time in the half-open state at least, ten times that at most
    probe_requests  requests that must pass the probe before `probe_seconds` are enough
    probe_share     share of the budget while half-open
    first_share     share of a budget that nobody has proven, where requests are judged one by one
    smallest_share  what repeated openings leave of the budget at least
    quiet_seconds   without a judged request until the budget grows by itself: evidence comes before hope
    regrow_seconds  time in which the budget grows back from nothing; openings within it are repeated ones
    """

    attainment: float | None = 0.99
    max_overrun: float = 0.1
    steps: int = 64
    min_steps: int = 20
    open_seconds: float = 10.0
    longest_open: float = 320.0
    probe_seconds: float = 10.0
    probe_requests: int = 3
    probe_share: float = 0.1
    first_share: float = 0.25
    smallest_share: float = 0.125
    quiet_seconds: float = 10.0
    regrow_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.probe_share <= 0.1:
            raise ValueError("probe_share must be between 0 and 0.1")
        if self.attainment is not None and not 0.0 < self.attainment <= 1.0:
            raise ValueError("attainment must be in (0, 1]")


SUSPICION = 0.75
"""Where the test of a half-open or just closed breaker begins, of its threshold: one clear miss opens it again."""

ALONE, MISSES_ALONE = 16, 1
"""Of so many of the last requests without offline work at most so many may be misses, for a trial to mean something."""

MOMENTS = 128
"""Worst moments that are remembered: twice as many as requests run at once, or so."""

CLOSE = 0.8
"""A request that took more of a limit came close: budgets and the time of prompts leave a fifth of it free. There are
several times as many of them as misses, and they come first: what only follows misses gives way when it has broken the
promise, and a burst has broken it a dozen times before the first of its requests is judged."""


class CircuitBreaker:
    """Decides what share of its budget offline work may use beside online work; O(1) amortised but for aggregates."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self.settings = settings or BreakerSettings()
        self.num_openings = 0
        self.cause: str | None = None
        self._state = BreakerState.CLOSED
        self._since = 0.0
        self._opened_at = -math.inf
        self._open_for = self.settings.open_seconds
        self._granted = 1.0 if self.settings.attainment is None else self.settings.first_share
        self._granted_at = math.inf  # never: time alone proves nothing, and the clock may have run for days
        self._probed = 0
        self._misses = MissTest(1.0 - (self.settings.attainment or 0.0))
        self._excesses: dict[str, ExcessTest] = {}
        self._moments: deque[tuple[float, bool]] = deque(maxlen=MOMENTS)
        self._alone: deque[bool] = deque(maxlen=ALONE)
        self._alone_at = -math.inf
        self._overruns: deque[float] = deque(maxlen=self.settings.steps)

    def record_request(
        self,
        now: float,
        arrival: float,
        good: bool,
        offline_contributed: bool,
        excesses: Mapping[str, float] | None = None,
        moment: float | None = None,
        used: float = 0.0,
    ) -> None:
        """One online request was judged at `now`; `offline_contributed`: offline chunks ran in its steps.

        `good`: it kept every limit of single requests; `used`: what share of the one that it came closest to it took;
        `moment`: when it was worst off. Requests that miss by the same step are two misses at most, and those that come
        close by it two of that kind: a single hiccup is no evidence, however many it hits. `excesses`: by how much it
        was over the bound of each aggregate, as a share of the bound.
        """
        self._advance(now)
        counted = True
        if moment is not None and (not good or used > CLOSE):
            counted = self._moments.count((moment, good)) < 2
            self._moments.append((moment, good))
        if not offline_contributed and arrival >= self._opened_at:
            self._alone.append(good)
            self._alone_at = now
        if self._state is BreakerState.OPEN or not offline_contributed or arrival < self._opened_at:
            return
        self._probed += 1
        if self.settings.attainment is not None and (counted or good):
            if counted:
                self._grant(now, good, used)
            self._misses.record(not good)
            if self._misses.alarm:
                self._open(now, "slo")
                return
        self.record_excesses(now, arrival, excesses or {})

    def _grant(self, now: float, good: bool, used: float) -> None:
        """A little of itself more by every good request, half by one that missed or came close: it comes to rest where
        1.4 times what is allowed does either, however much a share of the budget costs; steps of one size would rest
        above that. Where waits fall off exponentially, half as many miss then as may. Limits so tight that requests
        alone come close leave the smallest share."""
        if self._state is not BreakerState.CLOSED:
            return
        granted, smallest = self.share(now), self.settings.smallest_share
        if not good:
            self._granted = granted / 2.0
        elif used > CLOSE:
            self._granted = max(granted / 2.0, min(granted, smallest))
        else:
            allowed = 1.0 - (self.settings.attainment or 0.0)
            self._granted = min(1.0, granted + allowed * max(granted, smallest))
        self._granted_at = now

    def record_excesses(self, now: float, arrival: float, excesses: Mapping[str, float]) -> None:
        """What became known only now about aggregates of a request that arrived then, beside offline work."""
        self._advance(now)
        if self._state is BreakerState.OPEN or arrival < self._opened_at:
            return
        for key, excess in excesses.items():
            test = self._excesses.setdefault(key, ExcessTest())
            test.record(excess)
            if test.alarm:
                self._open(now, key)
                return

    def record_step(self, now: float, overrun: float) -> None:
        """One step beside online work ended at `now`, later than predicted by `overrun` ≥ 0 of what a step may take.

        One step counts for at most four times the bound, so that a single hiccup cannot open the breaker.
        """
        self._advance(now)
        if self._state is BreakerState.OPEN:
            return
        self._overruns.append(min(max(overrun, 0.0), 4.0 * self.settings.max_overrun))
        if len(self._overruns) >= self.settings.min_steps and self.overrun > self.settings.max_overrun:
            self._open(now, "predictor")

    def state(self, now: float) -> BreakerState:
        """The state at `now`."""
        self._advance(now)
        return self._state

    def share(self, now: float) -> float:
        """What of its budget offline work may use beside online work, 0 to 1."""
        state, settings = self.state(now), self.settings
        if state is BreakerState.OPEN:
            return 0.0
        quiet = max(0.0, now - max(self._since, self._granted_at) - settings.quiet_seconds)
        grown = min(1.0, self._granted + quiet / settings.regrow_seconds)
        return grown if state is BreakerState.CLOSED else min(settings.probe_share, self._granted)

    def renew(self) -> None:
        """A budget that was replayed is in force: what the last one did is no reason to grant less of it."""
        self._granted = 1.0

    def rescale(self, factor: float) -> None:
        """Another budget is in force that nobody has replayed: `factor` is how many times as large the last one was."""
        if self.settings.attainment is not None:
            self._granted = min(1.0, factor * self._granted)

    @property
    def opened_at(self) -> float:
        """When it last opened; minus infinity before that."""
        return self._opened_at

    @property
    def overrun(self) -> float:
        """The mean overrun of the last steps beside online work; 0 without steps."""
        return math.fsum(self._overruns) / len(self._overruns) if self._overruns else 0.0

    def _advance(self, now: float) -> None:
        """Transitions that time alone makes."""
        settings = self.settings
        if self._state is BreakerState.OPEN:
            end = self._since + self._open_for
            end = max(end, self._alone_at + (settings.longest_open if self._misses_alone else 0.0))
            if now >= end:
                self._enter(BreakerState.HALF_OPEN, end)
        if self._state is BreakerState.HALF_OPEN:
            enough = self._probed >= settings.probe_requests
            end = self._since + (1.0 if enough else 10.0) * settings.probe_seconds
            if now >= end:
                # Requests that made it enough came late; the state must not begin before them.
                self._enter(BreakerState.CLOSED, now if enough else end)
                self.cause = None

    @property
    def _misses_alone(self) -> bool:
        """Whether the promise is broken without offline work, too."""
        return self._alone.count(False) > MISSES_ALONE

    def _open(self, now: float, cause: str) -> None:
        settings = self.settings
        repeated = now - self._opened_at < self._open_for + settings.regrow_seconds
        self._open_for = min(2.0 * self._open_for, settings.longest_open) if repeated else settings.open_seconds
        if cause == "slo":  # each miss has halved it
            self._granted = max(self._granted, settings.smallest_share)
        elif cause != "predictor":
            self._granted = max(self.share(now) / 2.0, settings.smallest_share)
            self._granted_at = now
        self.num_openings += 1
        self.cause = cause
        self._opened_at = now
        self._enter(BreakerState.OPEN, now)

    def _enter(self, state: BreakerState, now: float) -> None:
        """What happened under another state says little about this one."""
        self._state = state
        self._since = now
        self._probed = 0
        self._misses.restart(SUSPICION if self.num_openings else 0.0)
        for test in self._excesses.values():
            test.restart()
        self._overruns.clear()
