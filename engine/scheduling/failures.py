"""A step that failed, or an engine that stands still: what is undone, who runs again, and who ends.

Joins the core's requests with `engine.scheduling.recovery`, which finds out whose fault it is.
"""

from collections import deque
from collections.abc import Iterator, MutableMapping

from engine.api import FinishReason, RequestClass, RequestOutput
from engine.errors import EngineUnavailableError
from engine.request import Request, RequestStatus
from engine.scheduling.canary import CANARY_ID
from engine.scheduling.counters import StepCounters
from engine.scheduling.recovery import Ending, Recovery
from engine.scheduling.results import Finish, InFlight
from engine.scheduling.state import SchedulerState

MAX_QUIET_RECOVERIES = 2
"""Attempts to get a standing engine going that end nobody's request."""


class Failures:
    """`requests`: the core's own, by id; `in_flight`: the steps behind the one that is looked at. Steps up to
    number `undone_through` were built on one that failed: what they give, or fail with, means nothing."""

    def __init__(
        self,
        state: SchedulerState,
        requests: MutableMapping[str, Request],
        recovery: Recovery,
        counters: StepCounters,
        in_flight: deque[InFlight],
        finish: Finish,
    ) -> None:
        self.undone_through = -1
        self._state = state
        self._requests = requests
        self._recovery = recovery
        self._counters = counters
        self._in_flight = in_flight
        self._finish = finish

    def passed(self, flight: InFlight, outputs: list[RequestOutput], now: float) -> Iterator[RequestOutput]:
        """A step passed while suspects, or the canary, are about; nobody waits for what the canary says."""
        self._recovery.passed(flight.reached())
        for output in outputs:
            if output.request_id != CANARY_ID:
                yield output
            elif output.finish_reason is not None:
                works = output.finish_reason is not FinishReason.ERROR
                yield from self._end(self._recovery.canary_ended(works, now), now)

    def failed(self, flight: InFlight, now: float) -> Iterator[RequestOutput]:
        self._counters.failed_steps += 1
        step = flight.reached()
        self._rewind(flight)
        yield from self._end(self._recovery.failed(step, now), now)

    def clear_stall(self, now: float, attempt: int) -> list[RequestOutput]:
        """Nothing runs although there is work: build the queues anew, and give the room of offline requests back.

        The second `attempt` takes that of online ones too; from the third on the oldest online request, behind which
        the others may wait, ends with an error that asks its client to try again.
        """
        self._counters.stalls += attempt == 1
        state = self._state
        state.rebuild(self._requests.values())
        for request_class in (RequestClass.OFFLINE,) if attempt == 1 else RequestClass:
            for request in list(state.running[request_class]):
                state.preempt(request, "stall", now)
        for request in [request for request in state.aside if request.status is RequestStatus.RUNNING]:
            state.preempt(request, "stall", now)
        if attempt <= MAX_QUIET_RECOVERIES or not state.waiting_online:
            return []
        error = EngineUnavailableError("The engine could not start this request.", retry_after=1.0)
        return [self._finish(state.waiting_online[0], FinishReason.ERROR, now, error=error)]

    def _end(self, endings: list[Ending], now: float) -> Iterator[RequestOutput]:
        for request, error in endings:
            yield self._finish(request, FinishReason.ERROR, now, error=error)

    def _rewind(self, flight: InFlight) -> None:
        """Undo a failed step and the steps in flight behind it, which were built on its tokens.

        The runner may have applied only part of the deltas: every row concerned is released and written whole again.
        """
        undone = (flight, *self._in_flight)
        self.undone_through = undone[-1].output.step_id
        for each in undone:
            for request in each.live():
                self._restart(request)
        failed = {each.output.step_id for each in undone}
        self._state.cache.rewind(self._requests.values(), failed)
        for each in undone:
            self._state.released_rows.extend(each.output.released_rows)

    def _restart(self, request: Request) -> None:
        request.epoch += 1
        request.num_placeholders = 0
        if request.status is RequestStatus.RUNNING:
            self._state.rewind(request)
        else:
            self._state.cache.parked.forget(request)
