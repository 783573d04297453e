"""Decide, after the death of an engine process, when the next one starts and which request ends."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from engine import flight
from engine.process.causes import Origin, Outage, origin_of
from engine.process.requests import Requests

WINDOW, HEALTHY = 600.0, 60.0
"""Seconds in which deaths count, and for which a ready process must run to clear them."""


@dataclass(slots=True)
class RestartPolicy:
    """The delay of the next start: none after the first death, then 1, 2, 4 ... `max_delay` seconds.

    A process that gave tokens until it was killed from outside is restarted at once. The policy gives up at the
    `max_deaths`-th death within `WINDOW` seconds. A process that was ready for `HEALTHY` seconds clears all earlier
    deaths.
    """

    max_deaths: int = 6
    max_delay: float = 30.0
    _deaths: deque[float] = field(default_factory=deque)
    _in_a_row: int = 0
    _ready_since: float | None = None

    def ready(self, now: float) -> None:
        """Record that a process accepts requests."""
        self._ready_since = now

    def forgive(self, times: Collection[float]) -> None:
        """Remove the deaths at these times: a request caused them, or is about to be tried for them."""
        self._deaths = deque(at for at in self._deaths if at not in times)

    def died(self, now: float, *, worked: bool = False, counts: bool = True) -> float | None:
        """Record a death. Return the seconds until the next start; None: never.

        Args:
            now: The time of the death.
            worked: Whether the process gave tokens and was probably killed from outside, so that a pause is useless.
            counts: Whether the death counts towards `max_deaths`.
        """
        if self._ready_since is not None and now - self._ready_since >= HEALTHY:
            self._deaths.clear()
            self._in_a_row = 0
        self._ready_since = None
        if counts:
            self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > WINDOW:
            self._deaths.popleft()
        self._in_a_row = 0 if worked else min(self._in_a_row + 1, len(self._deaths))
        if len(self._deaths) >= self.max_deaths:
            return None
        return 0.0 if self._in_a_row <= 1 else min(self.max_delay, 2.0 ** min(self._in_a_row - 2, 30))


class DeathJudge:
    """Judges each death of a process and the requests in its steps.

    Attributes:
        policy: The restart policy.
        outage: The period in which the system refuses starts.
        refusal: The message with which the system refused the last start.

    `waits`: whether requests wait here for the next process; those in flight then count as accepted.
    """

    def __init__(self, requests: Requests, policy: RestartPolicy, clock: Callable[[], float], *, waits: bool) -> None:
        self.policy = policy
        self.outage = Outage()
        self.refusal = ""
        self._requests = requests
        self._clock = clock
        self._waits = waits

    def judge(self, cause: str, recorded: Sequence[flight.AnyEntry], *, worked: bool) -> float | None:
        """Judge a death. Return the seconds until the next start; None: never.

        A death in a trial does not count. A guilty request ends, and its earlier deaths no longer count. If no other
        request got tokens since the last proof of guilt, the engine may be at fault, and the proof counts as a death.

        Args:
            cause: A name in `engine.process.causes`.
            recorded: The entries of the process's flight recorder.
            worked: Whether the process gave tokens.
        """
        origin, requests, now = origin_of(cause), self._requests, self._clock()
        if origin is Origin.SYSTEM:
            requests.suspects.died(cause, {}, now)
            return self.outage.refused(self.refusal, self.policy.max_delay)
        if origin is Origin.ASKED:
            requests.suspects.died(cause, {}, now)
            requests.reputation.clear()  # other weights or another engine version run from now on
            return 0.0
        in_flight = requests.in_flight(flight.in_flight(recorded))
        if self._waits:  # otherwise the fleet has submitted them to another engine
            requests.open.accept(in_flight)
        verdict = requests.suspects.died(cause, in_flight, now)
        if verdict is None:
            in_question = requests.suspects.deaths_to_try(in_flight)
            self.policy.forgive(in_question)
            outside = origin is Origin.OUTSIDE
            return self.policy.died(now, worked=worked and outside, counts=now not in in_question)
        if not verdict.guilty:
            return 0.0
        self.policy.forgive(verdict.suspicion.died_at)
        requests.end_guilty(verdict)
        return 0.0 if verdict.others_well else self.policy.died(now)
