"""EngineCore: the state machine between arrivals and steps. Pure: no torch, no clock, no I/O, no asyncio.

    schedule(now) ──► SchedulerOutput ──► (a runner) ──► ModelRunnerOutput ──► update(output, result, now)

With `pipeline_depth` 1, `schedule(n+1)` may be called before `update(n)`. Progress advances when a chunk is scheduled,
and a token in flight is a placeholder. If a request turns out to have ended, one token is discarded, and its units stay
deferred until the step in flight completes. `update` publishes blocks to the prefix cache only once their content is
confirmed. Sources: HyGen §4.1; reliability E1-E8.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING

from engine.api import EngineRequest, FinishReason, Lane, RequestClass, RequestOutput, RequestTimes
from engine.errors import TidemillError
from engine.limits import SchedulerConfig
from engine.request import RequestStatus
from engine.scheduling.admission import accept
from engine.scheduling.objective import StepObjective
from engine.scheduling.offline import OfflinePlan, plan_offline
from engine.scheduling.output import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.recovery import FaultRecovery
from engine.scheduling.results import Results
from engine.scheduling.state import FCFS, OnlinePolicy, ReachedPoint, SchedulerState
from engine.scheduling.step import OfflineRest, build_next
from predictor.features import LatencyPredictor

if TYPE_CHECKING:  # the caller supplies them
    from engine.cache.snapshots import Snapshots
    from engine.scheduling.speculation import Speculation


class EngineCore:
    """Turn requests into steps and step results into outputs. The caller supplies the time (seconds, monotonic).

    The caller also supplies the collaborators that only some engines have: `speculation` drafts tokens, and `snapshots`
    holds the recurrent states if `config` has slots for them.

    Other modules only read `state`, and move requests by `recovery` (`engine.scheduling.moving`).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        online_policy: OnlinePolicy = FCFS,
        offline_policy: str = "psm",
        model: LatencyPredictor | None = None,
        objective: StepObjective | None = None,
        speculation: "Speculation | None" = None,
        snapshots: "Snapshots | None" = None,
    ) -> None:
        self.config = config
        objective = objective or StepObjective()
        self.state = state = SchedulerState(config, online_policy, offline_policy, model, objective, snapshots)
        state.speculation = speculation
        self.recovery = FaultRecovery(state)
        self._results = Results(state, self.recovery)
        self._rest = OfflineRest()

    @property
    def has_requests(self) -> bool:
        """Return whether any request has not ended."""
        return bool(self.state.requests)

    @property
    def has_offline(self) -> bool:
        """Return whether any offline request is waiting or running."""
        return bool(self.state.running[RequestClass.OFFLINE] or len(self.state.waiting_offline))

    @property
    def retry_at(self) -> float | None:
        """Return the time at which `schedule` must be called again even without an event, or None."""
        times = [self.recovery.retry_at, self._rest.until if self.has_offline else None]
        return min((time for time in times if time is not None), default=None)

    def add_request(self, spec: EngineRequest, now: float) -> None:
        """Queue a request. Raise the errors of `admission.accept` if it must not be queued."""
        request = accept(self.state, spec, now)
        self.state.requests[spec.request_id] = request
        self.state.add(request)
        if spec.request_class is RequestClass.ONLINE and not spec.probe:
            self._rest.online_came(now)
        if spec.resumed is not None and spec.resumed.apart_until:
            self.recovery.suspect(ReachedPoint(request, spec.resumed.apart_until))

    def abort(
        self,
        request_id: str,
        now: float,
        reason: FinishReason = FinishReason.ABORT,
        error: TidemillError | None = None,
    ) -> RequestOutput | None:
        """End a request in any state. Return its terminal output, or None if it has already ended."""
        request = self.state.requests.get(request_id)
        return None if request is None else self._results.finish(request, reason, now, error=error)

    def set_lane(self, job: str, lane: Lane) -> None:
        """Move all offline requests of a job, waiting and running, to this lane."""
        for request in self.state.requests.values():
            spec = request.spec
            if spec.request_class is RequestClass.OFFLINE and spec.job == job and spec.lane is not lane:
                waits = request.status is not RequestStatus.RUNNING and not request.quarantined
                self.state.waiting_offline.move(request, lane, waits=waits)

    def plan_offline(self, now: float) -> Generator[None, None, OfflinePlan]:
        """Plan the offline fill of the next step in slices; see `engine.scheduling.offline`."""
        return plan_offline(self.state, now)

    def schedule(self, now: float, plan: OfflinePlan | None = None) -> SchedulerOutput | None:
        """Return the next step, or None if no request can run now. Without a plan the step is online-only.

        At most `pipeline_depth` other steps may be in flight. If None is returned with a step in flight, call `update`
        first.
        """
        assert len(self.state.in_flight) <= self.config.pipeline_depth, "too many steps in flight"
        if self.state.has_online:
            self._rest.online_runs(now)
        elif self._rest.rests(self.state.objective, now, in_flight=bool(self.state.in_flight)):
            plan = None
        step = build_next(self.state, self.recovery, plan, now)
        if step is None:
            return None
        self.state.next_step_id += 1
        self.state.in_flight.append(step)
        for request in step.requests if step.output.new_requests else ():
            if request.times.first_scheduled is None:
                request.times = RequestTimes(request.times.arrival, first_scheduled=now)
        return step.output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput | None, now: float) -> list[RequestOutput]:
        """Apply the result of the oldest step in flight; a result of None means that the step failed.

        A step with non-finite logits counts as failed. A failed step and the steps in flight behind it are rewound, and
        their requests run again, in the end one at a time (see `engine.scheduling.recovery`). Returns the outputs of
        the step's requests and of all requests that ended.
        """
        flight = self.state.in_flight.popleft()
        assert flight.output is output, "steps must be updated in the order they were scheduled"
        alone = all(request.request_class is RequestClass.OFFLINE for request in flight.requests)
        seconds = result.latency if alone and result is not None else None
        self._rest.stepped(self.state.objective, seconds, now)
        if self.is_undone(output):
            outputs = []  # the step was built on a failed one: ignore its result; its requests run again
        elif result is None or self._results.distrusts(flight, result):
            outputs = list(self._results.failed(flight, now))
        else:
            outputs = list(self._results.take_in(flight, result, now))
            if self.recovery.active:
                outputs = list(self._results.passed(flight, outputs, now))
        self.state.cache.complete_step(output.step_id)
        return outputs

    def is_undone(self, output: SchedulerOutput) -> bool:
        """Return whether a step in flight was built on a failed step, so that its result or error must be ignored."""
        return output.step_id <= self._results.undone_through

    def set_offline_share(self, share: float) -> None:
        """Scale the offline budget beside online work, 0 to 1. The circuit breaker sets it."""
        self.state.offline_share = share

    def set_objective(self, objective: StepObjective) -> None:
        """Use this objective and budget from the next step on."""
        self.state.objective = objective
