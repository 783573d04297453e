"""Circuit breaker of co-location: the last safeguard behind latency prediction and budget search.

States:

- Closed: offline work may use its budget. The breaker opens if requests beside offline work miss the SLO more often
  than chance explains, or if steps overrun their predictions by more than MAX_OVERRUN.
- Open: no offline work runs beside online work.
- Half-open: offline work returns, from SMALLEST_SHARE of its budget, doubled every DOUBLING_SECONDS. One clear miss
  opens the breaker again.

Misses of requests without offline work, and misses that happened before offline work returned, never count. While
requests without offline work miss the SLO too, the breaker stays open.

The granted share of the budget is the smaller of two:

- The lasting share follows the evidence of many requests. An unproven budget starts at FIRST_SHARE. A good request
  beside offline work raises the share slightly. A bad spell of BAD_SECONDS lowers it slightly, however many requests
  miss in it, since a disturbance of the machine says little about the budget.
- The brake halves the whole budget at each miss or near miss, and is released within seconds after the last one.

The share is never below SMALLEST_SHARE unless the breaker is open. Openings that follow each other without good
requests between them last longer and longer, and lower the lasting share.

The state machine is pure. Times are arguments in seconds and must not decrease.

Two sequential tests distinguish a broken promise from chance; both can be evaluated after every request.

- `MissTest`, for a promised share of good requests: Page's CUSUM of the log-likelihood ratio, one per alternative. The
  sums never fall below zero, so old good requests do not offset new misses. Age does not matter: four misses in a row
  count the same within a second or within ten minutes.
- `ExcessTest`, for a promised mean: Student's t over the last requests. Its threshold lies far in the tail because the
  test is repeated after every request.
"""

import enum
import math
from collections import deque
from collections.abc import Mapping

ODDS_RATIOS = (3.0, 10.0, 50.0)
"""Odds of a miss under each alternative, relative to the promise."""
FALSE_ALARMS = 1e-5
"""Maximum rate of false alarms per request while misses are exactly as frequent as allowed; far lower below that."""
FEWEST_SAMPLES = 8
FEWEST_MISSES_ALLOWED = 1e-3


class MissTest:
    """Test whether misses are more frequent than `allowed` (a share, in [0, 1)).

    With the threshold h = ln(alternatives ÷ FALSE_ALARMS), the mean number of requests until a false alarm is at least
    1 ÷ FALSE_ALARMS (Wald's inequality for each CUSUM, and a union bound).
    """

    def __init__(self, allowed: float) -> None:
        allowed = min(max(allowed, FEWEST_MISSES_ALLOWED), 1.0 - FEWEST_MISSES_ALLOWED)
        self._threshold = math.log(len(ODDS_RATIOS) / FALSE_ALARMS)
        self._steps: list[tuple[float, float]] = []
        for ratio in ODDS_RATIOS:
            odds = ratio * allowed / (1.0 - allowed)
            worse = odds / (1.0 + odds)
            self._steps.append((math.log((1.0 - worse) / (1.0 - allowed)), math.log(worse / allowed)))
        self._sums = [0.0] * len(self._steps)

    def record(self, missed: bool) -> None:
        """Add one request."""
        self._sums = [max(0.0, total + step[missed]) for total, step in zip(self._sums, self._steps, strict=True)]

    @property
    def alarm(self) -> bool:
        return max(self._sums) >= self._threshold

    def restart(self, suspicion: float = 0.0) -> None:
        """Discard all evidence. `suspicion`: share of the threshold to start from, so that fewer misses suffice."""
        self._sums = [suspicion * self._threshold] * len(self._sums)


class ExcessTest:
    """Test whether the mean of the values is positive; each value is the excess of one request over its bound.

    The test covers the last `window` values. The threshold of t is higher for few values, so that heavy tails alone do
    not raise an alarm. FEWEST_SAMPLES positive values of equal size do.
    """

    def __init__(self, window: int = 200) -> None:
        self._values: deque[float] = deque(maxlen=window)

    def record(self, excess: float) -> None:
        """Add one request."""
        self._values.append(excess)

    @property
    def alarm(self) -> bool:
        count = len(self._values)
        if count < FEWEST_SAMPLES:
            return False
        mean = math.fsum(self._values) / count
        if mean <= 0.0:
            return False
        variance = math.fsum((value - mean) ** 2 for value in self._values) / (count - 1)
        critical = 4.0 * (1.0 + 6.0 / (count - 1))
        return mean > critical * math.sqrt(variance / count)

    def restart(self) -> None:
        """Discard all evidence."""
        self._values.clear()


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
OPEN_SECONDS, LONGEST_OPEN = 2.5, 320.0
"""Time in the open state; each repeated opening doubles it, up to LONGEST_OPEN."""
REPEATED_SECONDS = 600.0
"""An opening is repeated if it follows the last one within this time, and fewer good requests than half a miss is
allowed for have passed beside offline work since then."""
FIRST_SHARE, SMALLEST_SHARE = 0.25, 0.125
"""Initial share of an unproven budget if the SLO has limits on single requests, and the smallest share."""
FIRST_PACE = 4.0
"""Growth of the lasting share before the first miss or near miss, relative to that after many good requests. The whole
budget of a target of 99 % is reached after 35 good requests."""
DOUBLING_SECONDS = 1.0
"""Time without a miss or near miss in which the brake lets the share double."""
BAD_SECONDS, BAD_SPELL = 45.0, 0.25
"""Length of a spell in which misses and near misses count once for the lasting share, in which it does not grow, and
the number of halvings that a spell costs."""
QUIET_SECONDS, REGROW_SECONDS = 10.0, 200.0
"""Time without a judged request before the lasting share grows by itself, and the time in which it doubles."""

SUSPICION = 0.75
"""Start value of the miss test after an opening, as a share of its threshold: one clear miss reopens."""

ALONE_SECONDS = 5.0
"""Time for which the breaker stays open after a miss without offline work."""

MOMENTS = 128
"""Number of worst moments that are remembered, about twice the number of concurrent requests."""

CLOSE = 0.8
"""Share of a limit above which a request counts as a near miss. Budgets and prompt times leave a fifth of a limit free.
Near misses are more frequent than misses and precede them. A burst causes a dozen misses before its first request is
judged, so a reaction to misses alone would come too late."""


_MOST = -math.log2(SMALLEST_SHARE)
RETURN_SECONDS = _MOST * DOUBLING_SECONDS
"""Time in the half-open state."""


class CircuitBreaker:
    """Decide the share of its budget that offline work may use beside online work; O(1) amortised per event.

    `attainment`: target share of good requests, in (0, 1]; None if the SLO has no limit on single requests.
    """

    def __init__(self, attainment: float | None) -> None:
        self._attainment = attainment
        self._allowed = 1.0 - (attainment or 0.0)
        self.num_openings = 0
        self.cause: str | None = None
        self.opened_at = -math.inf  # time of the last opening
        self._open_for, self._open_until = OPEN_SECONDS, -math.inf
        self._halvings = 0.0 if attainment is None else -math.log2(FIRST_SHARE)  # of the lasting share, from 1
        self._heard_at = math.inf  # no growth before the first evidence: the clock may have run for days
        self._bad_until = -math.inf
        self._good_in_a_row: float = math.inf
        self._braked, self._braked_at = 0.0, 0.0
        self._num_good = 0  # since the last opening
        self._misses = MissTest(self._allowed)
        self._excesses: dict[str, ExcessTest] = {}
        self._moments: deque[tuple[float, bool]] = deque(maxlen=MOMENTS)
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
        counted = True
        if moment is not None and (not good or used > CLOSE):
            counted = self._moments.count((moment, good)) < 2
            self._moments.append((moment, good))
        if arrival < self.opened_at:
            return
        is_open = self.state(now) is BreakerState.OPEN
        if is_open and not offline_contributed and not good:
            self._open_until = self._braked_at = max(self._open_until, now + ALONE_SECONDS)
        early = not good and moment is not None and moment < self._open_until
        if is_open or not offline_contributed or early:
            return
        self._num_good += good
        if self._attainment is not None and (counted or good):
            if counted:
                self._weigh(now, good and used <= CLOSE)
            self._misses.record(not good)
            if self._misses.alarm:
                self._open(now, "slo", moment)
                return
        self.record_excesses(now, arrival, excesses or {})

    def _weigh(self, now: float, good: bool) -> None:
        """Raise the lasting share after a good request; else brake, and lower the lasting share once per spell.

        The equilibrium lies where spells begin 1.4 times as often as misses may, relative to the requests outside of
        spells. If waiting times are distributed exponentially, half of the allowed misses occur there. After twice as
        many good requests in a row as a miss is allowed for, the share grows faster. It grows fastest before the first
        spell.
        """
        halvings, self._heard_at = self._lasting(now), now
        if not good:
            self._good_in_a_row = 0.0
            self._braked, self._braked_at = min(self._braking(now) + 1.0, _MOST), now
            self._charge(now, BAD_SPELL)
            return
        self._good_in_a_row += 1.0
        if now >= self._bad_until:
            usual = 1.0 if self._good_in_a_row * self._allowed >= 2.0 else BAD_SPELL
            pace = FIRST_PACE if math.isinf(self._bad_until) else usual
            halvings -= pace * self._allowed / math.log(2.0)
        self._halvings = max(halvings, 0.0)

    def _charge(self, now: float, halvings: float) -> None:
        """Lower the lasting share, at most once per spell."""
        self._halvings = self._lasting(now)
        if now >= self._bad_until:
            self._bad_until = now + BAD_SECONDS
            self._halvings = min(self._halvings + halvings, _MOST)

    def record_excesses(self, now: float, arrival: float, excesses: Mapping[str, float]) -> None:
        """Record excesses of aggregates that became known after the request ended; see `record_request`."""
        if self.state(now) is BreakerState.OPEN or arrival < self.opened_at:
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
        times the bound so that a single hiccup cannot open the breaker. A step over the bound holds the brake.
        """
        if self.state(now) is BreakerState.OPEN:
            return
        if overrun > MAX_OVERRUN:
            self._braked, self._braked_at = self._braking(now), max(now, self._braked_at)
        self._overruns.append(min(max(overrun, 0.0), 4.0 * MAX_OVERRUN))
        if len(self._overruns) >= MIN_STEPS and self.overrun > MAX_OVERRUN:
            self._open(now, "predictor")

    def state(self, now: float) -> BreakerState:
        """Return the state at `now`."""
        if now < self._open_until:
            return BreakerState.OPEN
        if now < self._open_until + RETURN_SECONDS:
            return BreakerState.HALF_OPEN
        self.cause = None
        return BreakerState.CLOSED

    def share(self, now: float) -> float:
        """Return the share (0 to 1) of its budget that offline work may use beside online work."""
        if self.state(now) is BreakerState.OPEN:
            return 0.0
        return math.pow(0.5, max(self._lasting(now), self._braking(now)))

    def limit(self, now: float) -> str:
        """Return what bounds the share: `breaker`, `brake`, `evidence`, or `none`."""
        if self.state(now) is BreakerState.OPEN:
            return "breaker"
        lasting, braking = self._lasting(now), self._braking(now)
        return "none" if lasting == braking == 0.0 else "brake" if braking > lasting else "evidence"

    def _lasting(self, now: float) -> float:
        """Return the halvings of the lasting share."""
        quiet = max(0.0, now - self._heard_at - QUIET_SECONDS)
        return max(0.0, self._halvings - quiet / REGROW_SECONDS)

    def _braking(self, now: float) -> float:
        """Return the halvings by the brake."""
        return max(0.0, self._braked - max(0.0, now - self._braked_at) / DOUBLING_SECONDS)

    def renew(self) -> None:
        """Grant the whole budget: a budget that was verified by replay has come into force."""
        self._halvings = 0.0

    def rescale(self, factor: float) -> None:
        """Scale the granted share for a new, unverified budget; `factor` is old budget ÷ new budget."""
        if self._attainment is not None:
            self._halvings = min(max(0.0, self._halvings - math.log2(factor)), _MOST)

    @property
    def overrun(self) -> float:
        """Mean overrun of the last steps beside online work; 0 without steps."""
        return math.fsum(self._overruns) / len(self._overruns) if self._overruns else 0.0

    def _open(self, now: float, cause: str, moment: float | None = None) -> None:
        """Open, from the `moment` of the last miss on: a late judgement does not prolong it."""
        proven = cause == "slo" and self._num_good * self._allowed >= 0.5
        repeated = not proven and now - self.opened_at < self._open_for + REPEATED_SECONDS
        self._open_for = min(2.0 * self._open_for, LONGEST_OPEN) if repeated else OPEN_SECONDS
        if cause != "predictor":  # then the budget is not to blame
            self._charge(now, 1.0 if repeated else BAD_SPELL)
            self._heard_at = min(self._heard_at, now)
        self.num_openings += 1
        self.cause = cause
        self.opened_at = now
        self._open_until = max(now, (now if moment is None else moment) + self._open_for)
        self._braked, self._braked_at = _MOST, self._open_until
        self._num_good = 0
        self._misses.restart(SUSPICION)
        for test in self._excesses.values():
            test.restart()
        self._overruns.clear()
