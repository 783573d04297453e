"""Circuit breaker of co-location: the last safeguard behind latency prediction and budget search.

States:

- Closed: offline work may use its budget. The breaker opens if requests beside offline work miss the SLO more often
  than chance explains (`predictor.evidence`), or if steps overrun their predictions by more than MAX_OVERRUN.
- Open: no offline work runs beside online work.
- Half-open: offline work gets PROBE_SHARE of its budget until enough requests have passed. The breaker then closes.
  It also closes by timeout if no requests arrive.

Misses of requests without offline work, and of requests that arrived before the last opening, never count. If requests
without offline work miss the SLO too, the breaker stays open until they meet it again or stop arriving.

The granted share of the budget follows the evidence. An unproven budget starts at FIRST_SHARE. A good request beside
offline work raises the share slightly; a miss or near miss halves it. Once evidence has changed it, the share also
grows while nothing happens. Repeated openings double the open time.

The state machine is pure. Times are arguments in seconds and must not decrease.
"""

import enum
import math
from collections import deque
from collections.abc import Mapping

from predictor.evidence import ExcessTest, MissTest


class BreakerState(enum.Enum):
    """The three states of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


MAX_OVERRUN = 0.1
"""Mean overrun of steps that opens the breaker, as a share of the time a step may take: half of the slack of a budget
of 0.8 × the TBT limit."""
STEPS, MIN_STEPS = 64, 20
"""Number of steps over which the mean overrun is taken, and the number from which it counts."""
OPEN_SECONDS, LONGEST_OPEN = 10.0, 320.0
"""Time in the open state; each repeated opening doubles it, up to LONGEST_OPEN."""
PROBE_SECONDS, PROBE_REQUESTS = 10.0, 3
"""Minimum time in the half-open state, if so many requests have passed; the maximum is ten times as long."""
PROBE_SHARE = 0.1
"""Share of the budget while half-open."""
FIRST_SHARE, SMALLEST_SHARE = 0.25, 0.125
"""Initial share of an unproven budget if the SLO has limits on single requests, and the lower bound of the share after
repeated openings."""
QUIET_SECONDS, REGROW_SECONDS = 10.0, 600.0
"""Time without a judged request before the share grows by itself, and the time in which it grows from 0 to 1. Openings
within REGROW_SECONDS count as repeated."""

SUSPICION = 0.75
"""Start value of the miss test after the first opening, as a share of its threshold: one clear miss reopens."""

ALONE, MISSES_ALONE = 16, 1
"""The last ALONE requests without offline work may include at most MISSES_ALONE misses for a probe to be meaningful."""

MOMENTS = 128
"""Number of worst moments that are remembered, about twice the number of concurrent requests."""

CLOSE = 0.8
"""Share of a limit above which a request counts as a near miss. Budgets and prompt times leave a fifth of a limit free.
Near misses are more frequent than misses and precede them. A burst causes a dozen misses before its first request is
judged, so a reaction to misses alone would come too late."""


class CircuitBreaker:
    """Decide the share of its budget that offline work may use beside online work; O(1) amortised per event.

    `attainment`: target share of good requests, in (0, 1]; None if the SLO has no limit on single requests.
    """

    def __init__(self, attainment: float | None) -> None:
        self._attainment = attainment
        self.num_openings = 0
        self.cause: str | None = None
        self._state = BreakerState.CLOSED
        self._since = 0.0
        self.opened_at = -math.inf  # time of the last opening
        self._open_for = OPEN_SECONDS
        self._granted = 1.0 if self._attainment is None else FIRST_SHARE
        self._granted_at = math.inf  # no growth before the first evidence: the clock may have run for days
        self._probed = 0
        self._misses = MissTest(1.0 - (self._attainment or 0.0))
        self._excesses: dict[str, ExcessTest] = {}
        self._moments: deque[tuple[float, bool]] = deque(maxlen=MOMENTS)
        self._alone: deque[bool] = deque(maxlen=ALONE)
        self._alone_at = -math.inf
        self._overruns: deque[float] = deque(maxlen=STEPS)

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
        """Record an online request that was judged at `now`.

        Requests that miss in the same step count as two misses at most, and likewise for near misses: a single hiccup
        is weak evidence, however many requests it affects.

        Args:
            now: Time of the judgement.
            arrival: Arrival time of the request.
            good: Whether every limit on single requests was met.
            offline_contributed: Whether offline chunks ran in the steps of the request.
            excesses: For each aggregate, the excess over its bound as a share of the bound.
            moment: Time at which the request was closest to a limit or furthest beyond it.
            used: Largest share of a limit that the request took.
        """
        self._advance(now)
        counted = True
        if moment is not None and (not good or used > CLOSE):
            counted = self._moments.count((moment, good)) < 2
            self._moments.append((moment, good))
        if not offline_contributed and arrival >= self.opened_at:
            self._alone.append(good)
            self._alone_at = now
        if self._state is BreakerState.OPEN or not offline_contributed or arrival < self.opened_at:
            return
        self._probed += 1
        if self._attainment is not None and (counted or good):
            if counted:
                self._grant(now, good, used)
            self._misses.record(not good)
            if self._misses.alarm:
                self._open(now, "slo")
                return
        self.record_excesses(now, arrival, excesses or {})

    def _grant(self, now: float, good: bool, used: float) -> None:
        """Update the granted share: raise it after a good request, halve it after a miss or a near miss.

        The equilibrium lies where misses and near misses together occur 1.4 times as often as misses may. If waiting
        times are distributed exponentially, half of the allowed misses occur there. If limits are so tight that
        requests without offline work come close to them, the smallest share remains.
        """
        if self._state is not BreakerState.CLOSED:
            return
        granted = self.share(now)
        if not good:
            self._granted = granted / 2.0
        elif used > CLOSE:
            self._granted = max(granted / 2.0, min(granted, SMALLEST_SHARE))
        else:
            allowed = 1.0 - (self._attainment or 0.0)
            self._granted = min(1.0, granted + allowed * max(granted, SMALLEST_SHARE))
        self._granted_at = now

    def record_excesses(self, now: float, arrival: float, excesses: Mapping[str, float]) -> None:
        """Record excesses of aggregates that became known after the request ended; see `record_request`."""
        self._advance(now)
        if self._state is BreakerState.OPEN or arrival < self.opened_at:
            return
        for key, excess in excesses.items():
            test = self._excesses.setdefault(key, ExcessTest())
            test.record(excess)
            if test.alarm:
                self._open(now, key)
                return

    def record_step(self, now: float, overrun: float) -> None:
        """Record a step beside online work that ended at `now`.

        `overrun` ≥ 0 is the time beyond the prediction, as a share of the time a step may take. It is clipped to four
        times the bound so that a single hiccup cannot open the breaker.
        """
        self._advance(now)
        if self._state is BreakerState.OPEN:
            return
        self._overruns.append(min(max(overrun, 0.0), 4.0 * MAX_OVERRUN))
        if len(self._overruns) >= MIN_STEPS and self.overrun > MAX_OVERRUN:
            self._open(now, "predictor")

    def state(self, now: float) -> BreakerState:
        """Return the state at `now`."""
        self._advance(now)
        return self._state

    def share(self, now: float) -> float:
        """Return the share (0 to 1) of its budget that offline work may use beside online work."""
        state = self.state(now)
        if state is BreakerState.OPEN:
            return 0.0
        quiet = max(0.0, now - max(self._since, self._granted_at) - QUIET_SECONDS)
        grown = min(1.0, self._granted + quiet / REGROW_SECONDS)
        return grown if state is BreakerState.CLOSED else min(PROBE_SHARE, self._granted)

    def renew(self) -> None:
        """Grant the whole budget: a budget that was verified by replay has come into force."""
        self._granted = 1.0

    def rescale(self, factor: float) -> None:
        """Scale the granted share for a new, unverified budget; `factor` is old budget ÷ new budget."""
        if self._attainment is not None:
            self._granted = min(1.0, factor * self._granted)

    @property
    def overrun(self) -> float:
        """Mean overrun of the last steps beside online work; 0 without steps."""
        return math.fsum(self._overruns) / len(self._overruns) if self._overruns else 0.0

    def _advance(self, now: float) -> None:
        """Make the transitions that depend on time alone."""
        if self._state is BreakerState.OPEN:
            end = self._since + self._open_for
            end = max(end, self._alone_at + (LONGEST_OPEN if self._misses_alone else 0.0))
            if now >= end:
                self._enter(BreakerState.HALF_OPEN, end)
        if self._state is BreakerState.HALF_OPEN:
            enough = self._probed >= PROBE_REQUESTS
            end = self._since + (1.0 if enough else 10.0) * PROBE_SECONDS
            if now >= end:
                # The last probed requests may have ended after `end`; the closed state must not begin before them.
                self._enter(BreakerState.CLOSED, now if enough else end)
                self.cause = None

    @property
    def _misses_alone(self) -> bool:
        """Whether requests without offline work miss the SLO as well."""
        return self._alone.count(False) > MISSES_ALONE

    def _open(self, now: float, cause: str) -> None:
        repeated = now - self.opened_at < self._open_for + REGROW_SECONDS
        self._open_for = min(2.0 * self._open_for, LONGEST_OPEN) if repeated else OPEN_SECONDS
        if cause == "slo":  # the share was already halved by each miss
            self._granted = max(self._granted, SMALLEST_SHARE)
        elif cause != "predictor":
            self._granted = max(self.share(now) / 2.0, SMALLEST_SHARE)
            self._granted_at = now
        self.num_openings += 1
        self.cause = cause
        self.opened_at = now
        self._enter(BreakerState.OPEN, now)

    def _enter(self, state: BreakerState, now: float) -> None:
        """Enter `state` and discard the evidence of the previous state."""
        self._state = state
        self._since = now
        self._probed = 0
        self._misses.restart(SUSPICION if self.num_openings else 0.0)
        for test in self._excesses.values():
            test.restart()
        self._overruns.clear()
