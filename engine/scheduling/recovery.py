"""What the core does after a failed step: asks the canary, tries the suspects apart from the others, and ends nobody
but the one whose fault it is proven to be, and online requests that an engine which fails at anything keeps waiting.

Joins `Blame` and `Canary` with the core's requests. While neither has anything to do, steps are as ever. Otherwise only
the canary may run until it has passed; then trials of the suspects alternate with ordinary steps of everybody else, so
that streams which have nothing to do with it go on.
"""

import math
from collections.abc import Iterable, MutableMapping, Sequence
from typing import NamedTuple

from engine.api import EngineRequest, RequestClass, RequestTimes, SamplingParams
from engine.errors import EngineStepError, EngineUnavailableError, TidemillError
from engine.request import Request
from engine.scheduling.blame import LONE_FAILURES, Blame
from engine.scheduling.state import SchedulerState

PATIENCE = 30.0
"""Seconds for which a stream that has begun waits for a sick engine; one that has not waits for its TTFT limit."""
RETRY_AFTER = 2.0


class StepTurn(NamedTuple):
    """What the next step may hold: these requests and nobody else, or with None everybody who is not aside."""

    requests: Sequence[Request] | None = None
    force: bool = False


class ReachedPoint(NamedTuple):
    """A request of a step, and how many of its tokens are computed after it."""

    request: Request
    num_tokens: int


class Ending(NamedTuple):
    """A request that must end now, and why."""

    request: Request
    error: TidemillError


ORDINARY = (StepTurn(),)


class FaultRecovery:
    """`requests`: the core's own, by id; the canary is one of them while it runs."""

    def __init__(self, state: SchedulerState, requests: MutableMapping[str, Request], blame: Blame) -> None:
        self._state = state
        self._requests = requests
        self._blame = blame
        self._canary = Canary()
        self._trial_first = False
        self._force = False

    @property
    def active(self) -> bool:
        """Whether there is anything to recover from."""
        return self._canary.wanted or bool(self._blame.suspects)

    @property
    def sick_since(self) -> float | None:
        """Since when the engine has been failing at anything; None while it is not known to."""
        return self._canary.sick_since

    @property
    def retry_at(self) -> float | None:
        """When a step may be possible that is not possible now, if nothing happens until then."""
        return self._canary.due if self._canary.wanted else self._blame.retry_at

    def turns(self, now: float) -> Sequence[StepTurn]:
        """What the next step may be, the first that can run."""
        if self._canary.wanted:
            return (StepTurn((self._canary_request(now),), force=True),) if now >= self._canary.due else ()
        group = [self._requests[request_id] for request_id in self._blame.on_trial(now)]
        if not group:
            return ORDINARY
        trial = StepTurn(group, self._force)
        first, second = (trial, *ORDINARY) if self._trial_first else (*ORDINARY, trial)
        return first, second, StepTurn(group, force=True)

    def took(self, turn: StepTurn) -> None:
        """The next step is this turn: the other kind comes first in the one behind it."""
        self._trial_first, self._force = turn.requests is None, False

    def waits(self, turn: StepTurn) -> None:
        """This turn took the place of others and waits for their units: it comes next, before they start again."""
        self._trial_first, self._force = True, turn.force

    def failed(self, step: Sequence[ReachedPoint], now: float) -> list[Ending]:
        """A step failed; its requests have been rewound already. Returns those that end because of it."""
        if any(request.request_id == CANARY_ID for request, _ in step):
            return self._canary_failed(now)
        for request, _ in step:
            if not request.aside:
                self._state.set_aside(request)
        self._blame.failed({request.request_id: num_tokens for request, num_tokens in step})
        self._canary.ask(now)
        return []

    def suspect(self, place: ReachedPoint) -> None:
        """A request that an engine before this one may have died of, and the tokens at which it is acquitted."""
        self._state.set_aside(place.request)
        self._blame.suspect(place.request.request_id, place.num_tokens)

    def passed(self, step: Iterable[ReachedPoint]) -> None:
        """A step passed: those of its requests that got past the place where they failed are like others again."""
        reached = {request.request_id: num_tokens for request, num_tokens in step if request.aside}
        self._acquit(self._blame.passed(reached))

    def canary_ended(self, works: bool, now: float) -> list[Ending]:
        """The canary has run to its end, or its logits were not finite. Returns those that end because of it."""
        if not works:
            return self._canary_failed(now)
        self._canary.passed()
        guilty = self._blame.judge(now)
        if guilty is None:
            return []
        message = f"The model step failed {LONE_FAILURES} times under this request alone."
        return [Ending(self._requests[guilty], EngineStepError(message))]

    def forget(self, request: Request) -> None:
        """A request that was kept aside has ended."""
        self._blame.forget(request.request_id)

    def _canary_failed(self, now: float) -> list[Ending]:
        self._acquit(self._blame.clear())
        self._canary.failed(now)
        return list(self._out_of_patience(now))

    def _out_of_patience(self, now: float) -> Iterable[Ending]:
        """Online requests that have waited too long for an engine that is sick."""
        if self._canary.sick_since is None:
            return
        limit, since = self._state.objective.ttft, self._canary.sick_since
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
            self._state.bring_back(self._requests[request_id])

    def _canary_request(self, now: float) -> Request:
        request = self._requests.get(CANARY_ID)
        if request is None:
            spec = canary_request(self._state.config.max_model_len)
            request = Request(spec, RequestTimes(arrival=now), arrival_order=-1)
            self._requests[CANARY_ID] = request
            self._state.add_waiting(request)
            self._state.set_aside(request)
        return request


CANARY_ID = "canary"
SICK_AFTER = 2
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
"""Seconds between two tries: it doubles from the first to the longest."""


def canary_request(max_model_len: int) -> EngineRequest:
    """A prefill and a decode; on a model of its own tenant, so that no cached block takes the work away."""
    length = max(1, min(8, max_model_len - 2))
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return EngineRequest(CANARY_ID, tuple(range(length)), sampling, cache_salt=b"canary", probe=True)


class Canary:
    """`wanted`: something failed, and nothing else may run before the canary has passed. `due`: when it may run next.
    `sick_since`: since when the engine has been failing at anything; None while it is not known to."""

    def __init__(self) -> None:
        self.wanted = False
        self.due = 0.0
        self.sick_since: float | None = None
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._first_failure = 0.0

    def ask(self, now: float) -> None:
        """A step failed at `now`."""
        self.wanted = True
        self.due = self._first_failure = now

    def failed(self, now: float) -> None:
        """It failed, too."""
        self._failures += 1
        if self._failures >= SICK_AFTER:
            self.sick_since = self._first_failure
            self.due = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def passed(self) -> None:
        self.wanted = False
        self.sick_since = None
        self._failures, self._pause = 0, FIRST_PAUSE
