"""Circuit breaker of co-location: the last safeguard behind latency prediction and budget search.

States:

- Closed: offline work may use its budget. The breaker opens if requests beside offline work miss the SLO more often
  than chance explains (`predictor.evidence`), or if steps overrun their predictions by more than `max_overrun`.
- Open: no offline work runs beside online work.
- Half-open: offline work gets `probe_share` of its budget until enough requests have passed. The breaker then closes.
  It also closes by timeout if no requests arrive.

Misses of requests without offline work, and of requests that arrived before the last opening, never count. If requests
without offline work miss the SLO too, the breaker stays open until they meet it again or stop arriving.

The granted share of the budget follows the evidence. An unproven budget starts at `first_share`. A good request beside
offline work raises the share slightly; a miss or near miss halves it. Once evidence has changed it, the share also
grows while nothing happens. Repeated openings double the open time.

The state machine is pure. Times are arguments in seconds and must not decrease.
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
    """Thresholds and durations of the breaker.

    Attributes:
        attainment: Target share of good requests. None if the SLO has no limit on single requests.
        max_overrun: Mean overrun of steps that opens the breaker, as a share of the time a step may take. The default
            is half of the slack of a budget of 0.8 × the TBT limit.
        steps: Number of steps over which the mean overrun is taken.
        min_steps: Number of steps before the mean overrun counts.
        open_seconds: Time in the open state; doubled by each repeated opening, up to `longest_open`.
        longest_open: Maximum time in the open state.
        probe_seconds: Minimum time in the half-open state; the maximum is ten times as long.
        probe_requests: Requests that must pass before `probe_seconds` suffice.
        probe_share: Share of the budget while half-open.
        first_share: Initial share of an unproven budget if the SLO has limits on single requests.
        smallest_share: Lower bound of the share after repeated openings.
        quiet_seconds: Time without a judged request before the share grows by itself.
        regrow_seconds: Time in which the share grows from 0 to 1. Openings within it count as repeated.
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
    """Decide the share of its budget that offline work may use beside online work; O(1) amortised per event."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self.settings = settings or BreakerSettings()
        self.num_openings = 0
        self.cause: str | None = None
        self._state = BreakerState.CLOSED
        self._since = 0.0
        self.opened_at = -math.inf  # time of the last opening
        self._open_for = self.settings.open_seconds
        self._granted = 1.0 if self.settings.attainment is None else self.settings.first_share
        self._granted_at = math.inf  # no growth before the first evidence: the clock may have run for days
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
        if self.settings.attainment is not None and (counted or good):
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
        self._overruns.append(min(max(overrun, 0.0), 4.0 * self.settings.max_overrun))
        if len(self._overruns) >= self.settings.min_steps and self.overrun > self.settings.max_overrun:
            self._open(now, "predictor")

    def state(self, now: float) -> BreakerState:
        """Return the state at `now`."""
        self._advance(now)
        return self._state

    def share(self, now: float) -> float:
        """Return the share (0 to 1) of its budget that offline work may use beside online work."""
        state, settings = self.state(now), self.settings
        if state is BreakerState.OPEN:
            return 0.0
        quiet = max(0.0, now - max(self._since, self._granted_at) - settings.quiet_seconds)
        grown = min(1.0, self._granted + quiet / settings.regrow_seconds)
        return grown if state is BreakerState.CLOSED else min(settings.probe_share, self._granted)

    def renew(self) -> None:
        """Grant the whole budget: a budget that was verified by replay has come into force."""
        self._granted = 1.0

    def rescale(self, factor: float) -> None:
        """Scale the granted share for a new, unverified budget; `factor` is old budget ÷ new budget."""
        if self.settings.attainment is not None:
            self._granted = min(1.0, factor * self._granted)

    @property
    def overrun(self) -> float:
        """Mean overrun of the last steps beside online work; 0 without steps."""
        return math.fsum(self._overruns) / len(self._overruns) if self._overruns else 0.0

    def _advance(self, now: float) -> None:
        """Make the transitions that depend on time alone."""
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
                # The last probed requests may have ended after `end`; the closed state must not begin before them.
                self._enter(BreakerState.CLOSED, now if enough else end)
                self.cause = None

    @property
    def _misses_alone(self) -> bool:
        """Whether requests without offline work miss the SLO as well."""
        return self._alone.count(False) > MISSES_ALONE

    def _open(self, now: float, cause: str) -> None:
        settings = self.settings
        repeated = now - self.opened_at < self._open_for + settings.regrow_seconds
        self._open_for = min(2.0 * self._open_for, settings.longest_open) if repeated else settings.open_seconds
        if cause == "slo":  # the share was already halved by each miss
            self._granted = max(self._granted, settings.smallest_share)
        elif cause != "predictor":
            self._granted = max(self.share(now) / 2.0, settings.smallest_share)
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
