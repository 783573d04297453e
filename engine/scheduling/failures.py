"""Handles a failed step or a stalled engine: rewinds the requests and ends those at fault.

`engine.scheduling.recovery` finds out which request is at fault.
"""

from collections.abc import Iterator
from itertools import chain

from engine.api import FinishReason, RequestClass, RequestOutput
from engine.errors import EngineUnavailableError
from engine.request import Request, RequestStatus
from engine.scheduling.in_flight import InFlight
from engine.scheduling.recovery import CANARY_ID, Ending, FaultRecovery
from engine.scheduling.results import Results
from engine.scheduling.state import SchedulerState
from engine.scheduling.waiting import WaitingQueue

MAX_QUIET_RECOVERIES = 2
"""Attempts to restart a stalled engine before a request is ended with an error."""


class StepFailures:
    """Handle step failures and stalls.

    Attributes:
        undone_through: Steps up to this id were built on a failed step; their results and errors are ignored.
    """

    def __init__(self, state: SchedulerState, recovery: FaultRecovery, results: Results) -> None:
        self.undone_through = -1
        self._state = state
        self._recovery = recovery
        self._finish = results.finish

    def passed(self, flight: InFlight, outputs: list[RequestOutput], now: float) -> Iterator[RequestOutput]:
        """Handle a completed step while suspects or the canary exist. Outputs of the canary are not passed on."""
        self._recovery.passed(flight.reached())
        for output in outputs:
            if output.request_id != CANARY_ID:
                yield output
            elif output.finish_reason is not None:
                works = output.finish_reason is not FinishReason.ERROR
                yield from self._end(self._recovery.canary_ended(works, now), now)

    def failed(self, flight: InFlight, now: float) -> Iterator[RequestOutput]:
        """Rewind a failed step and the steps behind it. Yield the outputs of requests that end because of it."""
        self._state.counters.failed_steps += 1
        step = flight.reached()
        self._rewind(flight)
        yield from self._end(self._recovery.failed(step, now), now)

    def clear_stall(self, now: float, attempt: int) -> list[RequestOutput]:
        """Restart an engine that runs no step although requests wait: rebuild the queues and preempt requests.

        Attempt 1 preempts offline requests and requests set aside, attempt 2 online ones too. From attempt 3 on, the
        oldest waiting online request ends with a retryable error, because it may block the others.
        """
        state = self._state
        state.counters.stalls += attempt == 1
        rebuild_queues(state)
        classes = (RequestClass.OFFLINE,) if attempt == 1 else RequestClass
        running = [request for request_class in classes for request in state.running[request_class]]
        for request in [*running, *(r for r in state.aside if r.status is RequestStatus.RUNNING)]:
            state.preempt(request, "stall", now)
            state.cache.parked.forget(request)
        if attempt <= MAX_QUIET_RECOVERIES or not state.waiting_online:
            return []
        error = EngineUnavailableError("The engine could not start this request.", retry_after=1.0)
        return [self._finish(state.waiting_online[0], FinishReason.ERROR, now, error=error)]

    def _end(self, endings: list[Ending], now: float) -> Iterator[RequestOutput]:
        for request, error in endings:
            yield self._finish(request, FinishReason.ERROR, now, error=error)

    def _rewind(self, flight: InFlight) -> None:
        """Undo a failed step and the steps in flight behind it, which were built on its tokens.

        The runner may have applied only part of the deltas, so every affected row is released and written whole again.
        """
        undone = (flight, *self._state.in_flight)
        self.undone_through = undone[-1].output.step_id
        for each in undone:
            for request in each.live():
                self._restart(request)
        failed = {each.output.step_id for each in undone}
        self._state.cache.rewind(self._state.requests.values(), failed)
        for each in undone:
            self._state.released_rows.extend(each.output.released_rows)

    def _restart(self, request: Request) -> None:
        request.epoch += 1
        request.num_placeholders = 0
        if request.status is RequestStatus.RUNNING:
            self._state.rewind(request)
        else:
            self._state.cache.parked.forget(request)


def rebuild_queues(state: SchedulerState) -> None:
    """Rebuild queues and rows from all unfinished requests."""
    state.running = {request_class: [] for request_class in RequestClass}
    state.waiting_online, state.waiting_offline = WaitingQueue(), state.make_offline_queue()
    state.aside = WaitingQueue()
    for request in sorted(state.requests.values(), key=lambda request: request.arrival_order):
        if request.request_class is RequestClass.OFFLINE and request.status is not RequestStatus.WAITING:
            state.waiting_offline.adopt(request)
        if request.status is RequestStatus.RUNNING:
            if request.aside:
                state.aside.add(request)
            else:
                state.running[request.request_class].append(request)
        else:
            state.add_waiting(request)
    state.cache.recount(chain(*state.running.values(), (r for r in state.aside if r.status is RequestStatus.RUNNING)))
    held = {request.row for group in (*state.running.values(), state.aside) for request in group}
    state.free_rows = [row for row in range(state.config.max_num_seqs - 1, -1, -1) if row not in held]
