"""The circuit breaker of co-location: closed, open, half-open (ours; the last line behind prediction and search).

Closed: offline work may use the latency budget L. It opens when, in a window, requests miss their SLO beside offline
work more often than the SLO allows, or when the predictor is off by too much; then nothing offline runs beside online
work. After a while it is half-open: at most a tenth of L, until the probe has passed, and closed again. It closes by
itself, also when no request comes to prove anything. Misses of requests that no offline work touched never open it.

A pure state machine: times are arguments, in seconds, and never go back.
"""

import enum
from collections import deque
from dataclasses import dataclass


class BreakerState(enum.Enum):
    """The three states of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When the breaker opens, for how long, and what runs while it probes.

    attainment      share of requests that must be good (the SLO's target)
    max_error       windowed mean relative error of the predictor above which its plans are worthless
    window          seconds of requests and steps that count
    min_requests    requests in the window before misses count (a quarter of it, at least one, while half-open)
    min_misses      misses in the window before they count (one while half-open): one alone is no evidence
    min_steps       steps in the window before the predictor's error counts
    open_seconds    time in the open state
    probe_seconds   time in the half-open state
    probe_share     share of the latency budget while half-open
    """

    attainment: float = 0.99
    max_error: float = 0.5
    window: float = 30.0
    min_requests: int = 20
    min_misses: int = 2
    min_steps: int = 20
    open_seconds: float = 10.0
    probe_seconds: float = 10.0
    probe_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.probe_share <= 0.1:
            raise ValueError("probe_share must be between 0 and 0.1")
        if not 0.0 < self.attainment <= 1.0:
            raise ValueError("attainment must be in (0, 1]")


class CircuitBreaker:
    """Decides what share of the latency budget offline work may use beside online work; O(1) amortised."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self.settings = settings or BreakerSettings()
        self.num_openings = 0
        self.cause: str | None = None
        self._state = BreakerState.CLOSED
        self._since = 0.0
        self._forget()

    def record_request(self, now: float, good: bool, offline_contributed: bool) -> None:
        """One online request was judged at `now`; `offline_contributed`: offline chunks ran in its steps."""
        self._advance(now)
        if self._state is BreakerState.OPEN:
            return
        miss = offline_contributed and not good
        self._requests.append((now, miss))
        self._misses += miss
        self._drop(now)
        needed, enough = self.settings.min_requests, self.settings.min_misses
        if self._state is BreakerState.HALF_OPEN:
            needed, enough = max(1, needed // 4), 1
        allowed = (1.0 - self.settings.attainment) * len(self._requests)
        if len(self._requests) >= needed and self._misses >= enough and self._misses > allowed + 1e-9:
            self._open(now, "slo")

    def record_step(self, now: float, relative_error: float) -> None:
        """One step ended at `now` whose time the predictor missed by |expected − measured| ÷ measured.

        One step counts for at most twice the bound, so that a single hiccup cannot open the breaker.
        """
        self._advance(now)
        if self._state is BreakerState.OPEN:
            return
        error = min(abs(relative_error), 2.0 * self.settings.max_error)
        self._steps.append((now, error))
        self._errors += error
        self._drop(now)
        if len(self._steps) >= self.settings.min_steps and self.error > self.settings.max_error:
            self._open(now, "predictor")

    def state(self, now: float) -> BreakerState:
        """The state at `now`."""
        self._advance(now)
        return self._state

    def budget(self, now: float, latency_budget: float, online_present: bool) -> float:
        """Seconds that a step with offline work may take: L, its probing share, or nothing.

        Without any online request waiting or running nobody can be hurt: L in every state.
        """
        if not online_present:
            return latency_budget
        state = self.state(now)
        if state is BreakerState.CLOSED:
            return latency_budget
        return latency_budget * self.settings.probe_share if state is BreakerState.HALF_OPEN else 0.0

    @property
    def attainment(self) -> float:
        """Share of the window's requests that no offline work made miss; 1 when there are none."""
        return 1.0 - self._misses / len(self._requests) if self._requests else 1.0

    @property
    def error(self) -> float:
        """The predictor's windowed mean relative error; 0 without steps."""
        return self._errors / len(self._steps) if self._steps else 0.0

    def _advance(self, now: float) -> None:
        """Transitions that time alone makes."""
        settings = self.settings
        if self._state is BreakerState.OPEN and now >= self._since + settings.open_seconds:
            self._enter(BreakerState.HALF_OPEN, self._since + settings.open_seconds)
        if self._state is BreakerState.HALF_OPEN and now >= self._since + settings.probe_seconds:
            self._enter(BreakerState.CLOSED, self._since + settings.probe_seconds)
            self.cause = None

    def _open(self, now: float, cause: str) -> None:
        self.num_openings += 1
        self.cause = cause
        self._enter(BreakerState.OPEN, now)

    def _enter(self, state: BreakerState, now: float) -> None:
        self._state = state
        self._since = now
        self._forget()

    def _forget(self) -> None:
        """What happened under another state says nothing about this one."""
        self._requests: deque[tuple[float, bool]] = deque()
        self._misses = 0
        self._steps: deque[tuple[float, float]] = deque()
        self._errors = 0.0

    def _drop(self, now: float) -> None:
        oldest = now - self.settings.window
        while self._requests and self._requests[0][0] < oldest:
            self._misses -= self._requests.popleft()[1]
        while self._steps and self._steps[0][0] < oldest:
            self._errors -= self._steps.popleft()[1]
        if not self._steps:
            self._errors = 0.0
