"""EngineCore: the state machine between arrivals and steps. Pure: no torch, no clock, no I/O, no asyncio.

    schedule(now) ──► SchedulerOutput ──► (a runner) ──► ModelRunnerOutput ──► update(output, result, now)

With `pipeline_depth` 1, `schedule(n+1)` may be called before `update(n)`: progress is advanced when a chunk is
scheduled, a token not yet known is a placeholder, a request that turns out to have ended costs one discarded token,
and units it gave up wait until the step in flight has ended. Blocks are offered to other requests only in `update`,
once their content is confirmed. HyGen §4.1; reliability E1-E8.
"""

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

from engine.api import (
    EngineRequest,
    EngineStats,
    FinishReason,
    Lane,
    LoadReport,
    RequestClass,
    RequestOutput,
    RequestTimes,
    TokenLogprobs,
)
from engine.cache.blocks import CacheEntry, count_units
from engine.config import SchedulerConfig
from engine.errors import (
    EngineUnavailableError,
    ErrorInfo,
    InvalidRequestError,
    TidemillError,
)
from engine.request import Request, RequestStatus
from engine.scheduling.admission import Admission, check_length
from engine.scheduling.blame import LONE_WAITS, Blame
from engine.scheduling.canary import CANARY_ID
from engine.scheduling.counters import StepCounters
from engine.scheduling.draft import Step, StepDraft
from engine.scheduling.last_resort import LastResort
from engine.scheduling.moving import MovedRequest, Moves
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import (
    ModelRunnerOutput,
    SchedulerOutput,
)
from engine.scheduling.planner import OfflinePlan, plan_offline
from engine.scheduling.policies import find_policy
from engine.scheduling.recovery import Ending, Reached, Recovery
from engine.scheduling.report import report_load
from engine.scheduling.results import InFlight, Results
from engine.scheduling.service_cost import usual_costs
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepBuilder
from engine.scheduling.trial import TrialBuilder
from predictor.limits import UNITS_PER_BLOCK
from predictor.load import Lengths
from predictor.model import LatencyPredictor

MAX_QUIET_RECOVERIES = 2
"""Attempts to get a standing engine going that end nobody's request."""
KEPT_BYTES = 16 * 1024**2
"""Of one step that keeps prefixes: the time for it may be over behind any of them."""


_aside = attrgetter("aside")


class OpenRequest(NamedTuple):
    """A request that has not ended. `units`: of the device that it holds; `running`: whether it has a row."""

    request_id: str
    arrival: float
    units: int
    running: bool


class EngineCore:
    """Requests in, steps out, outputs back. Drive it by hand on any clock (seconds, monotonic)."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        online_policy: str = "fcfs",
        offline_policy: str = "psm",
        model: LatencyPredictor | None = None,
        objective: StepObjective | None = None,
        lone_waits: Sequence[float] = LONE_WAITS,
    ) -> None:
        self.config = config
        policy = find_policy(online_policy)
        self._state = SchedulerState(config, policy, offline_policy, model, objective or StepObjective())
        self._requests: dict[str, Request] = {}
        self._admission = Admission(self._state)
        self._recovery = Recovery(self._state, self._requests, Blame(lone_waits))
        self._moves = Moves(self._state, self._requests)
        self._in_flight: deque[InFlight] = deque()
        self._next_step_id = 0
        self._undone_through = -1
        self._num_arrived = 0
        self._counters = StepCounters()
        self._results = Results(self._state, self._counters, self._in_flight, self._finish)
        self._rest_until: float | None = None
        self._online_at = -math.inf

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    @property
    def has_online(self) -> bool:
        """Whether any online request is waiting or running."""
        return self._state.has_online

    @property
    def has_offline(self) -> bool:
        """Whether any offline request is waiting or running."""
        return bool(self._state.running[RequestClass.OFFLINE] or len(self._state.waiting_offline))

    def has_adapter(self, number: int) -> bool:
        """Whether any request has this LoRA adapter."""
        return any(request.spec.adapter == number for request in self._requests.values())

    @property
    def retry_at(self) -> float | None:
        """When to call `schedule` again although nothing has happened: something waits for that time."""
        times = [self._recovery.retry_at, self._rest_until if self.has_offline else None]
        return min((time for time in times if time is not None), default=None)

    @property
    def sick_since(self) -> float | None:
        """Since when steps have been failing whoever is in them; None while the engine is not known to be sick."""
        return self._recovery.sick_since

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def add_request(self, spec: EngineRequest, now: float) -> None:
        """Queue a request. Raises InvalidRequestError if it can never run, QueueFullError if the queue is full."""
        if spec.request_id in self._requests:
            raise InvalidRequestError(f"A request '{spec.request_id}' is already running.", param="request_id")
        resumed = spec.resumed
        arrival = now if spec.arrived is None else spec.arrived
        request = Request(spec, RequestTimes(arrival) if resumed is None else resumed.times, self._num_arrived)
        request.most_blocks = self.config.most_blocks
        if resumed is None:
            self._admission.check(request, now)
        else:
            check_length(spec, self.config.max_model_len)
        self._num_arrived += 1
        self._requests[spec.request_id] = request
        self._state.add(request)
        if spec.request_class is RequestClass.ONLINE and not spec.probe:
            self._online_at = now
        if resumed is not None and resumed.apart_until:
            self._recovery.suspect(Reached(request, resumed.apart_until))

    def check_room(self, request_class: RequestClass, tenant: str, now: float) -> None:
        """Raises QueueFullError if a tenant's request of this class would not be queued now, whatever it asks for."""
        self._admission.check_any(request_class, tenant, now)

    def abort(
        self,
        request_id: str,
        now: float,
        reason: FinishReason = FinishReason.ABORT,
        error: TidemillError | None = None,
    ) -> RequestOutput | None:
        """End a request now, whatever it is doing; its terminal output, or None if it has already ended."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, reason, now, error=error)

    def set_lane(self, job: str, lane: Lane) -> None:
        """The offline requests of a job, waiting and running, go with this lane from now on."""
        for request in self._requests.values():
            spec = request.spec
            if spec.request_class is RequestClass.OFFLINE and spec.job == job and spec.lane is not lane:
                waits = request.status is not RequestStatus.RUNNING and not request.aside
                self._state.waiting_offline.move(request, lane, waits=waits)

    def plan_offline(self, now: float) -> Generator[None, None, OfflinePlan]:
        """The offline fill of the next step, computed in slices; see engine.scheduling.planner."""
        return plan_offline(self._state, now)

    def schedule(self, now: float, plan: OfflinePlan | None = None) -> SchedulerOutput | None:
        """Decide the next step, or None when nothing can run now. Without a plan the step is online-only.

        At most `pipeline_depth` steps may be in flight. A None with a step in flight means: update first.
        """
        assert len(self._in_flight) <= self.config.pipeline_depth, "too many steps in flight"
        if self.has_online:
            if not math.isinf(self._online_at):
                self._online_at = now
        elif self._rests(now):
            plan = None
        last_completed = self._in_flight[0].output.step_id - 1 if self._in_flight else self._next_step_id - 1
        step = self._build(plan, last_completed, now)
        if step is None:
            return None
        output, requests = step
        self._next_step_id += 1
        self._in_flight.append(InFlight(output, requests, [request.epoch for request in requests]))
        for request in requests:
            if request.times.first_scheduled is None:
                request.times = RequestTimes(request.times.arrival, first_scheduled=now)
        return output

    def _rests(self, now: float) -> bool:
        """Whether offline work gives who may arrive a rest (see `StepObjective.wait`). What the step in flight takes
        decides on the next one."""
        objective = self._state.objective
        if math.isinf(objective.wait) or now - self._online_at >= objective.awaited:
            self._rest_until = None
        elif self._in_flight:
            return True
        elif self._rest_until is not None and now >= self._rest_until:
            self._rest_until = None
        return self._rest_until is not None

    def _build(self, plan: OfflinePlan | None, last_completed: int, now: float) -> Step | None:
        """The next step: the first turn in which anything can run. A trial has the device for itself, so that whatever
        it breaks, no other step is in question."""
        if any(any(map(_aside, flight.requests)) for flight in self._in_flight):
            return None
        draft = partial(StepDraft, self._state, self._next_step_id, last_completed, now)
        turns = self._recovery.turns(now)
        for turn in turns:
            if turn.requests is None:
                step = StepBuilder(draft(), self._requests.get).build(plan)
            elif self._in_flight:
                return None
            else:
                trial = TrialBuilder(draft(reserved=False))
                step = trial.build(turn.requests, turn.force)
                if step is None and trial.awaits_units:
                    self._recovery.waits(turn)
                    return None
            if step is not None:
                self._recovery.took(turn)
                return step
        if not turns or self._in_flight:
            return None
        return LastResort(draft(reserved=False)).build(with_offline=plan is not None)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput | None, now: float) -> list[RequestOutput]:
        """Take in what the oldest step in flight gave: a result, or None when it failed. One with logits that are not
        finite has failed as well: whether that is a request's fault or the device's is for the trials to tell.

        A failed step is rewound to the last confirmed progress, and its requests run again, at last one by one (see
        `engine.scheduling.recovery`): one that is proven to be the cause ends with an EngineStepError. What steps in
        flight behind it give is ignored, and their requests run again. Returns the outputs of this step's requests and
        of those that ended.
        """
        flight = self._in_flight.popleft()
        assert flight.output is output, "steps must be updated in the order they were scheduled"
        alone = all(request.request_class is RequestClass.OFFLINE for request in flight.requests)
        rest = self._state.objective.rest_after(result.latency) if alone and result is not None else 0.0
        self._rest_until = now + rest if rest > 0.0 else None
        if self.is_undone(output):
            outputs = []  # it was built on a step that failed; whatever it gave, its requests run again
        elif result is None or self._results.distrusts(flight, result):
            outputs = list(self._fail(flight, now))
        else:
            outputs = list(self._results.take_in(flight, result, now))
            if self._recovery.active:
                outputs = list(self._pass(flight, outputs, now))
        self._state.cache.tiers.complete_step(output.step_id)
        if result is not None and result.disk_failed:
            self._state.cache.tiers.lose_disk()
        return outputs

    def is_undone(self, output: SchedulerOutput) -> bool:
        """Whether a step in flight was built on one that failed: what it gives, or fails with, means nothing."""
        return output.step_id <= self._undone_through

    def clear_stall(self, now: float, attempt: int) -> list[RequestOutput]:
        """Nothing runs although there is work: build the queues anew, and give the room of offline requests back.

        The second `attempt` takes that of online ones too; from the third on the oldest online request, behind which
        the others may wait, ends with an error that asks its client to try again.
        """
        assert not self._in_flight, "a step is in flight: the engine does not stand still"
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

    def set_offline_share(self, share: float) -> None:
        """Scale the offline budget beside online work, 0 to 1 (the circuit breaker's dial)."""
        self._state.offline_share = share

    def set_objective(self, objective: StepObjective) -> None:
        """Follow another objective or budget from the next step on."""
        self._state.objective = objective

    def offline_lengths(self, limit: int) -> list[Lengths]:
        """Of up to `limit` offline requests that have not ended, their prompts and the most they may answer."""
        state = self._state
        requests = chain(state.running[RequestClass.OFFLINE], state.waiting_offline)
        return [Lengths(r.num_prompt_tokens, r.spec.sampling.max_tokens) for r in islice(requests, limit)]

    def stats(self) -> EngineStats:
        """A snapshot; see EngineStats."""
        state = self._state
        cache, counters = state.cache, state.counters
        pool, host, disk = cache.device, cache.host, cache.tiers.disk
        return EngineStats(
            running={c: state.num_running(c) for c in RequestClass},
            waiting={c: state.num_waiting(c) for c in RequestClass},
            units_total=pool.num_units,
            units_free=pool.num_free_units,
            units_cached=pool.num_cached_units,
            units_owned=pool.num_owned_units + pool.num_deferred_units,
            host_units_total=host.num_units,
            host_units_used=host.num_units - host.num_free_units,
            host_units_cached=host.num_cached_units,
            hidden_blocks=cache.num_compact,
            cache_units=dict(cache.tiers.moved_units),
            prefix_queried_tokens=counters.prefix_queried_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prefix_host_hit_tokens=counters.prefix_host_hit_tokens,
            prefix_disk_hit_tokens=counters.prefix_disk_hit_tokens,
            disk_units_total=disk.num_units,
            disk_units_used=disk.num_units - disk.num_free_units,
            preemptions=dict(counters.preemptions),
            leftover_seconds=counters.leftover_seconds,
            leftover_used_seconds=counters.leftover_used_seconds,
            token_costs=None if state.model is None else usual_costs(state.model, self.config),
            refused_requests=self._admission.num_refused,
            **asdict(self._counters),
        )

    def adopt(self, found: Iterable[tuple[CacheEntry, bytes]]) -> None:
        """What an earlier process has left on the disk: entries, and the hashes they are published under."""
        self._state.cache.tiers.adopt(found)

    def keep_prefixes(self) -> Iterator[SchedulerOutput]:
        """At the end: steps without chunks that write to the disk what chats may come back for; none while requests are
        left, as those of a trial. Each step is updated before the next one is asked for."""
        if self._requests or self._in_flight or not self.config.disk_units:
            return
        tiers, size = self._state.cache.tiers, max(1, KEPT_BYTES // (UNITS_PER_BLOCK * self.config.unit_bytes))
        blocks = tiers.unkept()
        for first in range(0, len(blocks), size):
            tiers.keep(blocks[first : first + size], self._next_step_id)
            output = SchedulerOutput(self._next_step_id, (), operations=tiers.take_operations())
            self._next_step_id += 1
            self._in_flight.append(InFlight(output, [], []))
            yield output

    def load(self, now: float) -> LoadReport:
        """What whoever routes requests to several engines must know of this one."""
        means = self._admission.mean_prompt_tokens, self._admission.mean_output_tokens
        return report_load(self._state, now, *means, self._counters.offline_computed_tokens)

    def detach(self, request_id: str) -> MovedRequest:
        """Take a request out, with nobody told, so that another engine goes on with it. No step may be in flight."""
        assert not self._in_flight, "a step in flight may hold the request"
        if self._requests[request_id].aside:
            self._recovery.forget(self._requests[request_id])
        return self._moves.detach(request_id)

    def stall(self, request_id: str, num_units: int) -> tuple[int, tuple[int, ...]] | None:
        """Have a request stand still with what it holds until `arrived`: the number of tokens whose past it has, and
        where that lies. None: it has none, or not in the first `num_units` units, and starts over. No step may be in
        flight."""
        assert not self._in_flight, "a step in flight may hold the request"
        if not self._moves.stall(request_id, num_units):
            self.start_over(request_id)
            return None
        num_tokens = self._requests[request_id].num_confirmed_tokens
        return num_tokens, self.units_of(request_id)[: UNITS_PER_BLOCK * -(-num_tokens // self.config.block_size)]

    def put_last(self, request_id: str) -> None:
        """A request that is here is behind all others from now on; unless it stands still it starts over."""
        if self._requests[request_id].status is not RequestStatus.RUNNING:
            self.start_over(request_id)
            return
        self._num_arrived += 1
        self._moves.put_last(request_id, self._num_arrived - 1)

    def attach(self, moved: MovedRequest) -> bool:
        """Go on with a request of another engine, behind all that are here. True: it has room for its past, and stands
        still until `arrived`; False: it waits like one that was preempted."""
        self._num_arrived += 1
        return self._moves.attach(moved, self._num_arrived - 1)

    def arrived(self, request_id: str) -> None:
        """The past of a request that was attached has come."""
        if request_id in self._requests:
            self._moves.arrived(request_id)

    def start_over(self, request_id: str) -> None:
        """What was computed of a request is lost; it waits its turn. No step may be in flight."""
        self.attach(self.detach(request_id)._replace(num_tokens=0))

    def units_of(self, request_id: str) -> tuple[int, ...]:
        """Where a request's past lies on the device, in the order of its block table."""
        blocks = self._requests[request_id].cache_map.blocks
        return tuple(unit for block in blocks for unit in block.entry.units)

    @property
    def model(self) -> LatencyPredictor | None:
        """The latency model that steps are sized by."""
        return self._state.model

    @property
    def is_recovering(self) -> bool:
        """Whether a step failed and its requests are being tried."""
        return self._recovery.active

    def open_requests(self) -> Iterator[OpenRequest]:
        """Every request that has not ended, and the units that it holds."""
        for request in self._requests.values():
            held = count_units(block for block in request.cache_map.blocks if block.on_device)
            yield OpenRequest(request.request_id, request.times.arrival, held, request.row >= 0)

    def grow_cache(self, units: int) -> None:
        """There are so many more units of cache from now on."""
        self._state.pool.grow(units)

    def shrink_cache(self, units: int) -> None:
        """The last units of the cache are given out no more; see `num_retiring_units`."""
        self._state.pool.shrink(units)

    def resize_cache(self, units: int) -> None:
        """The cache has so many units now, and offers nothing of what was in it. No request may hold any of those that
        it loses."""
        pool = self._state.pool
        pool.forget()
        if units > pool.num_units:
            pool.grow(units - pool.num_units)
        else:
            pool.shrink(pool.num_units - units)
        assert not pool.num_retiring_units, "somebody holds a unit"

    @property
    def num_retiring_units(self) -> int:
        """Units that the cache has lost and that blocks still hold: their memory is not free yet."""
        return self._state.pool.num_retiring_units

    @property
    def state(self) -> SchedulerState:
        """What steps are built from: to be looked at."""
        return self._state

    def check_integrity(self) -> None:
        """Assert E1 (every unit in one place), E3 (ended requests hold nothing) and the queues' agreement."""
        self._state.check_integrity(self._requests)

    def _pass(self, flight: InFlight, outputs: list[RequestOutput], now: float) -> Iterator[RequestOutput]:
        """A step passed while suspects, or the canary, are about; nobody waits for what the canary says."""
        self._recovery.passed(flight.reached())
        for output in outputs:
            if output.request_id != CANARY_ID:
                yield output
            elif output.finish_reason is not None:
                works = output.finish_reason is not FinishReason.ERROR
                yield from self._end(self._recovery.canary_ended(works, now), now)

    def _fail(self, flight: InFlight, now: float) -> Iterator[RequestOutput]:
        self._counters.failed_steps += 1
        step = flight.reached()
        self._rewind(flight)
        yield from self._end(self._recovery.failed(step, now), now)

    def _end(self, endings: list[Ending], now: float) -> Iterator[RequestOutput]:
        for request, error in endings:
            yield self._finish(request, FinishReason.ERROR, now, error=error)

    def _rewind(self, flight: InFlight) -> None:
        """Undo a failed step and the steps in flight behind it, which were built on its tokens.

        The runner may have applied only part of the deltas: every row concerned is released and written whole again.
        """
        self._undone_through = self._next_step_id - 1
        undone = (flight, *self._in_flight)
        for each in undone:
            for request in each.live():
                self._restart(request)
        failed = {each.output.step_id for each in undone}
        for request in self._requests.values():  # who runs from 8 bits that are in doubt, in a step or not
            if request.cache_map.num_narrow and request.cache_map.parked_in_step in failed:
                self._restart(request)
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

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        *,
        stop_token_id: int | None = None,
        error: TidemillError | None = None,
    ) -> RequestOutput:
        self._state.end(request)
        request.move_to(RequestStatus.FINISHED)
        if request.aside:
            self._recovery.forget(request)
        else:
            self._admission.note_end(request)
        del self._requests[request.request_id]
        request.times = request.times._replace(finished=now)
        if request.withholds:
            token_ids = request.tell()
        return RequestOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            times=request.times,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            error=None if error is None else ErrorInfo.of(error),
            num_preemptions=request.num_preemptions,
            request_class=request.spec.request_class,
            beside_offline=request.beside_offline,
            probe=request.spec.probe,
        )
