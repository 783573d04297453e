"""Recovery after a failed step: runs the canary, then tries the suspects in steps of their own.

A request ends only if it is proven guilty, or if it is online and has waited too long for an engine that fails at any
work. `FaultRecovery` joins `Blame` with the core's requests and the canary, a test request. After a failure only the
canary may run until it passes. Then trials of suspects alternate with ordinary steps of all other requests, so that
unaffected streams continue.

`Blame` is a pure state machine over request ids and token counts. A single failed step proves nothing. Its requests
become suspects and run again in separate steps, in halves, until one runs alone. A suspect that passes the position at
which it failed is acquitted. Each failure waits for a verdict on the engine. While the engine fails at any work, no
request is blamed and the suspects stay as they were. A request is guilty after `LONE_FAILURES` failures alone, each on
a working engine. A request that makes every step fail is found within ceil(log2 n) + `LONE_FAILURES` trial steps, for n
requests in the first failed step. A lone suspect is retried only after `LONE_WAITS`, so that a temporary shortage of
memory can pass.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.api import EngineRequest, RequestClass, RequestTimes, SamplingParams
from engine.errors import EngineStepError, EngineUnavailableError, TidemillError
from engine.request import Request
from engine.scheduling.state import ReachedPoint, SchedulerState

LONE_FAILURES = 3
LONE_WAITS = (2.0, 8.0)
"""Seconds before the second and before the third trial of a request that failed alone."""


@dataclass(slots=True)
class _Suspect:
    """`passes_at`: computed tokens required for acquittal, one more than at the failure.

    A token that fails as the next token of an answer might pass as the last token of a prompt.
    """

    passes_at: int = 0
    lone_failures: int = 0


class Blame:
    """Suspects in groups. Only the requests of `on_trial` may run in a trial step."""

    def __init__(self) -> None:
        self._suspects: dict[str, _Suspect] = {}
        self._groups: list[list[str]] = []  # the last group is tried first
        self._resting: list[tuple[float, str]] = []
        self._in_doubt: list[str] = []
        self._unproven: frozenset[str] = frozenset()

    @property
    def suspects(self) -> Iterable[str]:
        return self._suspects.keys()

    @property
    def retry_at(self) -> float | None:
        """Return the earliest time at which a resting suspect may run again, or None."""
        return min((due for due, _ in self._resting), default=None)

    def on_trial(self, now: float) -> Sequence[str]:
        """Return the suspects that may run in the next step; empty if there are none or all are resting."""
        for due, request_id in sorted(self._resting):
            if due <= now:
                self._resting.remove((due, request_id))
                self._groups.append([request_id])
        return tuple(self._groups[-1]) if self._groups else ()

    def suspect(self, request_id: str, passes_at: int) -> None:
        """Make a request a suspect for an external reason.

        It runs alone until `passes_at` of its tokens are computed.
        """
        self._suspects[request_id] = _Suspect(passes_at)
        self._groups.append([request_id])

    def failed(self, reached: Mapping[str, int]) -> None:
        """Record a failed step. `reached`: for each of its requests, the tokens computed after the step.

        `judge` or `clear` must be called before the next failure.
        """
        assert not self._in_doubt, "a step failed while another waits for its verdict"
        self._unproven = frozenset(request_id for request_id in reached if request_id not in self._suspects)
        for request_id, tokens in reached.items():
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.passes_at = max(suspect.passes_at, tokens + 1)
        self._in_doubt = self._withdraw(reached)

    def passed(self, reached: Mapping[str, int]) -> list[str]:
        """Record a completed step. Return the requests that it acquits."""
        acquitted = [
            request_id
            for request_id, tokens in reached.items()
            if request_id in self._suspects and tokens >= self._suspects[request_id].passes_at
        ]
        for request_id in acquitted:
            self.forget(request_id)
        return acquitted

    def clear(self) -> list[str]:
        """Record that the engine was at fault. Return the requests that are no longer suspects."""
        acquitted = [request_id for request_id in self._in_doubt if request_id in self._unproven]
        for request_id in acquitted:
            self.forget(request_id)
        if self._in_doubt:
            self._groups.append(self._in_doubt)
            self._in_doubt = []
        return acquitted

    def judge(self, now: float) -> str | None:
        """Record that the engine works, so a request caused the failure.

        Return the request id once it is proven guilty.
        """
        members, self._in_doubt = self._in_doubt, []
        if len(members) > 1:
            half = (len(members) + 1) // 2
            self._groups += [members[half:], members[:half]]
            return None
        for request_id in members:
            suspect = self._suspects[request_id]
            suspect.lone_failures += 1
            if suspect.lone_failures == LONE_FAILURES:
                return request_id
            self._resting.append((now + LONE_WAITS[suspect.lone_failures - 1], request_id))
        return None

    def forget(self, request_id: str) -> None:
        """Remove a request that ended or was acquitted."""
        if self._suspects.pop(request_id, None) is not None:
            self._withdraw((request_id,))
            if request_id in self._in_doubt:
                self._in_doubt.remove(request_id)

    def _withdraw(self, request_ids: Iterable[str]) -> list[str]:
        """Remove requests from the groups and from the resting suspects. Return them without duplicates."""
        gone = dict.fromkeys(request_ids)
        self._groups = [left for group in self._groups if (left := [each for each in group if each not in gone])]
        self._resting = [(due, each) for due, each in self._resting if each not in gone]
        return list(gone)


PATIENCE = 30.0
"""Seconds that a started stream waits for a failing engine; a request without a token waits for its TTFT limit."""
RETRY_AFTER = 2.0


CANARY_ID = "canary"
SICK_AFTER = 2
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
"""Maximum seconds between two canary runs; the pause starts at FIRST_PAUSE and doubles."""


class StepTurn(NamedTuple):
    """Content of the next step: only `requests`, or with None all requests that are not quarantined.

    `force`: preempt any request that is in the way.
    """

    requests: Sequence[Request] | None = None
    force: bool = False


class Ending(NamedTuple):
    """A request that must end now, and the error."""

    request: Request
    error: TidemillError


ORDINARY = (StepTurn(),)


class FaultRecovery:
    """Decide which requests may run after a failure.

    Attributes:
        sick_since: Time since which the engine has been failing at any work, or None.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.sick_since: float | None = None
        self._state = state
        self._requests = state.requests
        self._blame = Blame()
        self._canary_due: float | None = None  # no other request may run until the canary, from then on, has passed
        self._first_failure = 0.0
        self._num_failures, self._pause = 0, FIRST_PAUSE  # of the canary in a row
        self._trial_first = False
        self._force = False

    @property
    def active(self) -> bool:
        """Return whether the canary must run or a suspect exists."""
        return self._canary_due is not None or bool(self._blame.suspects)

    @property
    def retry_at(self) -> float | None:
        """Return the time at which a step may become possible without another event, or None."""
        return self._blame.retry_at if self._canary_due is None else self._canary_due

    def turns(self, now: float) -> Sequence[StepTurn]:
        """Return the possible contents of the next step, most preferred first."""
        if self._canary_due is not None:
            return (StepTurn((self._canary_request(now),), force=True),) if now >= self._canary_due else ()
        group = [self._requests[request_id] for request_id in self._blame.on_trial(now)]
        if not group:
            return ORDINARY
        trial = StepTurn(group, self._force)
        first, second = (trial, *ORDINARY) if self._trial_first else (*ORDINARY, trial)
        return first, second, StepTurn(group, force=True)

    def took(self, turn: StepTurn) -> None:
        """Record that the next step is `turn`, so that trial and ordinary step alternate."""
        self._trial_first, self._force = turn.requests is None, False

    def waits(self, turn: StepTurn) -> None:
        """Record that `turn` preempted requests and waits for their units; it runs before these requests restart."""
        self._trial_first, self._force = True, turn.force

    def failed(self, step: Sequence[ReachedPoint], now: float) -> list[Ending]:
        """Record a failed step, whose requests are already rewound. Return the requests that end because of it."""
        if any(request.request_id == CANARY_ID for request, _ in step):
            return self._canary_failed(now)
        for request, _ in step:
            if not request.quarantined:
                self._state.quarantine(request)
        self._blame.failed({request.request_id: num_tokens for request, num_tokens in step})
        self._canary_due = self._first_failure = now
        return []

    def suspect(self, place: ReachedPoint) -> None:
        """Quarantine a request that may have made a previous engine die.

        It is acquitted when `place.num_tokens` of its tokens are computed.
        """
        self._state.quarantine(place.request)
        self._blame.suspect(place.request.request_id, place.num_tokens)

    def passed(self, step: Iterable[ReachedPoint]) -> None:
        """Record a completed step: bring back those of its requests that passed the position of their failure."""
        reached = {request.request_id: num_tokens for request, num_tokens in step if request.quarantined}
        self._acquit(self._blame.passed(reached))

    def canary_passed(self, now: float) -> list[Ending]:
        """Record that the canary has its tokens. Return the requests that end."""
        self._canary_due = self.sick_since = None
        self._num_failures, self._pause = 0, FIRST_PAUSE
        guilty = self._blame.judge(now)
        if guilty is None:
            return []
        message = f"The model step failed {LONE_FAILURES} times under this request alone."
        return [Ending(self._requests[guilty], EngineStepError(message))]

    def forget(self, request: Request) -> None:
        """Forget a request that ended while it was quarantined."""
        self._blame.forget(request.request_id)

    def _canary_failed(self, now: float) -> list[Ending]:
        """Record that the canary failed. From `SICK_AFTER` failures on, its next run waits for a growing pause."""
        self._acquit(self._blame.clear())
        self._num_failures += 1
        if self._num_failures >= SICK_AFTER:
            self.sick_since = self._first_failure
            self._canary_due = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return list(self._out_of_patience(now))

    def _out_of_patience(self, now: float) -> Iterable[Ending]:
        """Yield the online requests that have waited too long for a failing engine."""
        if self.sick_since is None:
            return
        limit, since = self._state.objective.ttft, self.sick_since
        limit = limit if math.isfinite(limit) else PATIENCE
        for request in self._requests.values():
            if request.request_class is RequestClass.OFFLINE or request.request_id == CANARY_ID:
                continue
            begun = request.times.first_token is not None
            if now > (since + PATIENCE if begun else request.times.arrival + limit):
                error = EngineUnavailableError(
                    "The engine fails at every step; this request waited too long for it.", retry_after=RETRY_AFTER
                )
                yield Ending(request, error)

    def _acquit(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._state.end_quarantine(self._requests[request_id])

    def _canary_request(self, now: float) -> Request:
        request = self._requests.get(CANARY_ID)
        if request is None:
            spec = canary_request(self._state.config.max_model_len)
            request = Request(spec, RequestTimes(arrival=now), arrival_order=-1)
            self._requests[CANARY_ID] = request
            self._state.add_waiting(request)
            self._state.quarantine(request)
        return request


def canary_request(max_model_len: int) -> EngineRequest:
    """Return the canary: a prefill and a decode. Its own cache salt keeps the prefix cache from skipping the work."""
    length = max(1, min(8, max_model_len - 2))
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return EngineRequest(CANARY_ID, tuple(range(length)), sampling, cache_salt=b"canary", probe=True)
