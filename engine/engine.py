"""The asyncio loop around EngineCore, which connects the scheduler (control plane) to the model runner (data plane).

Model steps run one after another in a worker thread. The loop schedules steps, awaits them and passes their outputs to
the request streams. The loop wakes on events and never polls. It never waits for a client: an unread stream fills its
own bounded queue, and then its request is aborted.
"""

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from engine.api import EngineRequest, FinishReason, Lane, RequestOutput, RequestTimes, SamplingParams
from engine.client import EngineInfo, EngineState, EngineStats, LoadReport
from engine.colocation.keeper import Colocation
from engine.colocation.tuner import BudgetTuner
from engine.core import EngineCore
from engine.errors import (
    EngineStepError,
    EngineUnavailableError,
    ErrorInfo,
    InvalidRequestError,
    QueueFullError,
    RetryableError,
    TidemillError,
)
from engine.loop.planner import Planner, may_run_ahead
from engine.loop.watchdog import (
    STALL_SECONDS,
    FaultLog,
    ProgressWatchdog,
    StepLimits,
    StepWatch,
    check_result,
    clear_stall,
)
from engine.machine.activity import Activity, read_activity
from engine.machine.child import LinkLostError, collect_due
from engine.panics import as_error
from engine.scheduling.moving import MovedRequest, Moves
from engine.scheduling.output import ModelRunner, ModelRunnerOutput, SchedulerOutput
from engine.scheduling.recovery import RETRY_AFTER
from engine.scheduling.report import report_load, report_stats
from engine.stream import RequestStream

if TYPE_CHECKING:  # the engine runs without the grammar compiler, the flight recorder and torch
    from engine.flight import FlightRecorder
    from engine.structured.ready import Grammars

log = logging.getLogger("tidemill.engine")

Result = TypeVar("Result")

OutputSink = Callable[[RequestOutput], bool]
"""Takes the outputs of one request in order. Returns False if the reader of the stream is too far behind."""

WARM_UP_ID = "warm-up"
STOP_SECONDS = 1.0
"""Maximum time in seconds for which `stop` waits for the running step."""
SICK_SECONDS = 10.0
"""Time in seconds for which every step may fail before the engine ends: a new process often clears a device error."""
DEVICE_SECONDS = 5.0
"""Timeout in seconds of the device check after a failed step."""
REST_SECONDS = 3.0
"""Maximum pause in seconds of `at_rest`; shorter than the watchdog's stall time."""
MIN_REST = 0.01
"""Minimum sleep in seconds before the loop asks the core again for work that could not start."""


class Engine:
    """One model on one device, in this process.

    Every fatal failure ends in `_give_up`: a hung step, only failing steps, an error in the loop, a lost device.
    `on_death(cause, why)` is called first; then every open request ends with an error.

    Args:
        core: The scheduler; it must have the same pool and block size as `runner`. Other code may change it only while
            the engine is held.
        runner: Runs model steps. Other code calls it through `aside`.
        step_limits: Times after which a step counts as hung.
        stall_seconds: Time with work but without a step after which the engine is degraded and recovers, see
            `engine.loop.watchdog`.
        device_lost: Called in a worker thread after a failed step; returns why no further step can run, or None.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        info: EngineInfo,
        *,
        step_limits: StepLimits | None = None,
        stall_seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        device_lost: Callable[[], str | None] = lambda: None,
        colocation: Colocation | None = None,
        tuner: BudgetTuner | None = None,
        grammars: "Grammars | None" = None,
    ) -> None:
        self.info = info
        self.core = core
        self.moves = Moves(core.state, core.recovery)
        self.runner = runner
        self._clock = clock
        self._step_watch = StepWatch(step_limits or StepLimits(), self._on_hung, self._read_activity)
        self._device_lost = device_lost
        self.on_death: Callable[[str, str], None] = lambda _cause, _why: None
        self._death: str | None = None
        self._recorder: FlightRecorder | None = None
        self.colocation = colocation
        self._tuner = tuner
        self._grammars = grammars
        self._streams: dict[str, OutputSink] = {}
        self._in_flight: deque[tuple[SchedulerOutput, Callable[[], asyncio.Future[ModelRunnerOutput]]]] = deque()
        """Steps, and functions that return the futures of their results."""
        self._step_started: float | None = None
        self._busy_since = clock()
        self._wake = asyncio.Event()
        self._rest_until = 0.0
        self._at_rest = asyncio.Event()
        self._held = False
        self.on_parted: Callable[[], None] = lambda: None
        self._planner = Planner(core.plan_offline, clock, self._wake.set)
        self._plan_tried = False
        self._watchdog = ProgressWatchdog(core, clock, self._recover, stall_seconds)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-runner")
        self._waiter = self._executor
        if core.config.pipeline_depth and core.config.ahead_seconds == math.inf:
            self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-waiter")
        self._loop_task: asyncio.Task[None] | None = None
        self._warm = self._stopping = False
        self._faults = FaultLog(log, clock)

    @property
    def state(self) -> EngineState:
        if self._death is not None or (self._loop_task is not None and self._loop_task.done()):
            return EngineState.DEAD
        if self._stopping:
            return EngineState.DRAINING
        if self._loop_task is None or not self._warm:
            return EngineState.STARTING
        return EngineState.READY if self.trouble is None else EngineState.DEGRADED

    @property
    def trouble(self) -> str | None:
        """See EngineClient.trouble."""
        if self._death is not None:
            return self._death
        since = self.core.recovery.sick_since
        if since is not None:
            return f"every model step has failed for {self._clock() - since:.0f} s"
        return self._watchdog.trouble

    async def start(self) -> None:
        """Start the loop and run a warm-up request. Raise the request's error if it fails."""
        self._loop_task = asyncio.create_task(self._run(), name="tidemill-engine")
        self._planner.start()
        self._watchdog.start()
        length = min(8, self.info.max_model_len - 2)
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        spec = EngineRequest(WARM_UP_ID, (0,) * length, sampling, final_only=True, probe=True)
        for stream in await self.submit([spec]):
            output = await anext(stream)
            if output.error is not None:
                await self.stop()
                raise output.error.to_error()
        self._warm = True
        if self._tuner is not None:
            self._tuner.start()

    async def stop(self) -> None:
        """Refuse new requests, abort the open ones, and stop the loop."""
        self._stopping = True
        if self._loop_task is None:
            return
        for request_id in list(self._streams):
            self.abort(request_id)
        self._wake.set()
        _, running = await asyncio.wait([self._loop_task], timeout=STOP_SECONDS)
        if running:
            log.critical("a model step does not end: its thread is left behind")
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task], timeout=STOP_SECONDS)
        self._step_watch.end()
        await self._planner.stop()
        await self._watchdog.stop()
        if self._tuner is not None:
            await self._tuner.stop()
        if self._grammars is not None:
            await self._grammars.stop()
        self._executor.shutdown(wait=False)
        self._waiter.shutdown(wait=False)

    def _check_accepting(self) -> None:
        state = self.state
        if state is EngineState.DRAINING:
            raise EngineUnavailableError("The server is shutting down.", retry_after=5.0)
        if state is EngineState.DEAD or self._loop_task is None:
            raise EngineUnavailableError("The engine is not running.", retry_after=5.0)
        if self.core.recovery.sick_since is not None:
            raise EngineUnavailableError(f"The engine is not ready: {self.trouble}.", retry_after=RETRY_AFTER)

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        """See EngineClient.submit."""
        await self.prepare(requests)
        streams = [RequestStream.of(request, partial(self.abort, request.request_id)) for request in requests]
        self.open(zip(requests, (stream.push for stream in streams), strict=True))
        return streams

    async def prepare(self, requests: Sequence[EngineRequest]) -> None:
        """Compile the grammars of requests before the requests are queued.

        Raise InvalidRequestError for a grammar that cannot be enforced, QueueFullError if it cannot be compiled now.
        """
        self._check_accepting()
        for grammar in (request.sampling.grammar for request in requests):
            if grammar is not None and self._grammars is None:
                message = f"'{grammar.param}' is not supported by this server."
                raise InvalidRequestError(message, param=grammar.param, code="unsupported_parameter")
        if self._grammars is not None:
            await self._grammars.prepare(requests)

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Run the block while no step is in flight. After `REST_SECONDS` steps are launched again."""
        self._at_rest.clear()
        self._rest_until = self._clock() + REST_SECONDS
        try:
            if self._in_flight:
                await self._at_rest.wait()
            yield
        finally:
            self._rest_until = 0.0
            self._wake_up()

    async def hold(self) -> None:
        """Wait for the steps in flight, and launch no step until `go`."""
        self._held = True
        self._watchdog.suspend(True)
        if self._in_flight:
            self._at_rest.clear()
            await self._at_rest.wait()

    def go(self) -> None:
        """Undo `hold`: launch steps again."""
        self._held = False
        self._watchdog.suspend(False)
        self._planner.restart()
        self._wake_up()

    def arrived(self, request_id: str) -> None:
        """Let a stalled request run, whose K and V are complete."""
        self.moves.arrived(request_id)
        self._wake_up()

    async def aside(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run `work(*args)` in the thread that launches steps, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def serves(self, request_id: str, sink: OutputSink) -> bool:
        """Return whether the outputs of the request go to `sink`."""
        return self._streams.get(request_id) == sink

    def detach(self, request_id: str) -> MovedRequest:
        """Remove a request without an output, and return its state for another engine."""
        moved = self.moves.detach(request_id)
        self._close(request_id)
        return moved

    def attach(self, moved: MovedRequest, sink: OutputSink) -> bool:
        """Continue a request that another engine detached; see `Moves.attach`."""
        self._check_accepting()
        if self._grammars is not None:
            with suppress(QueueFullError):  # without a compiled grammar the step fails for this request only
                self._grammars.hold(moved.spec)
        self._streams[moved.spec.request_id] = sink
        return self.moves.attach(moved)

    def open(self, pairs: Iterable[tuple[EngineRequest, OutputSink]]) -> None:
        """Queue all requests or none, and send their outputs to the sinks. Raise the same errors as `submit`."""
        opened: list[str] = []
        try:
            for request, sink in pairs:
                self._add(request)
                self._streams[request.request_id] = sink
                opened.append(request.request_id)
                if self._grammars is not None:
                    self._grammars.hold(request)
        except BaseException:
            for request_id in opened:
                self.drop(request_id)
            raise

    def _add(self, request: EngineRequest) -> None:
        self._check_accepting()
        if request.adapter > len(self.info.adapters):
            raise InvalidRequestError(
                "The request names a LoRA adapter that this engine does not have.",
                param="model",
                code="model_not_found",
            )
        self._watchdog.on_work()
        try:
            self.core.add_request(request, self._clock())
        except RetryableError:
            length = len(request.prompt_token_ids)
            self._tell_keeper(Colocation.on_refused, request.request_class, length, self._clock(), request.promise)
            raise
        if request.resumed is None and not request.probe:
            self._tell_keeper(Colocation.on_arrival, request.request_class, self._clock())
        if request.promise is not None:
            self._tell_keeper(Colocation.on_promise, request, self._clock())
        self._wake_up()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See EngineClient.abort."""
        if request_id in self._streams:
            self._deliver(self._abort(request_id, reason))
            self._wake_up()

    def drop(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request without an output. Unknown ids are ignored."""
        if request_id in self._streams:
            self._abort(request_id, reason)
            self._close(request_id)
            self._wake_up()

    def _abort(self, request_id: str, reason: FinishReason) -> RequestOutput:
        output = self.core.abort(request_id, self._clock(), reason)
        assert output is not None, "a stream is open for a request that the core does not know"
        self._tell_keeper(Colocation.on_end, output, self._clock())
        return output

    def _close(self, request_id: str) -> None:
        del self._streams[request_id]
        if self._grammars is not None:
            self._grammars.release(request_id)

    def set_lane(self, job: str, lane: Lane) -> None:
        """See EngineClient.set_lane."""
        self.core.set_lane(job, lane)
        self._wake_up()

    def stats(self) -> EngineStats:
        """Return the current statistics."""
        colocation = None if self.colocation is None else self.colocation.stats(self._clock())
        return replace(report_stats(self.core.state), plans=dict(self._planner.counts), colocation=colocation)

    def load(self) -> LoadReport:
        """Return the current load."""
        return report_load(self.core.state, self._clock())

    def be_recorded(self, recorder: "FlightRecorder") -> None:
        """Write every later step to the flight recorder before it runs."""
        self._recorder = recorder

    def _give_up(self, cause: str, why: str, error: TidemillError | None = None) -> None:
        """End the engine and run no further step.

        Args:
            cause: A name in `engine.process.suspects`.
            why: The reason, for the log and for clients.
            error: The error of the requests that are still open after `on_death`.
        """
        if self._death is not None:
            return
        self._death = why
        log.critical("the engine ends: %s", why)
        self.on_death(cause, why)
        stopped = f"The engine stopped while this request was running: {why}."
        failure, now = ErrorInfo.of(error or EngineUnavailableError(stopped, retry_after=5.0)), self._clock()
        times = RequestTimes(now, finished=now)
        for request_id, push in list(self._streams.items()):
            push(RequestOutput(request_id, (), None, times, 0, 0, 0, FinishReason.ERROR, error=failure))
            self._close(request_id)
        self._wake_up()

    async def _run(self) -> None:
        try:
            while self._death is None and (not self._stopping or self._in_flight):
                self._launch()
                collect_due(at_rest=not self.core.state.has_online)
                if self._in_flight:
                    await self._complete_oldest()
                else:
                    await self._sleep()
                    self._busy_since = self._clock()
        except BaseException as raised:
            error = as_error(raised)
            log.critical("the engine loop ended: %r", error, exc_info=error)
            self._give_up("loop", "its loop ended")

    async def _sleep(self) -> None:
        """Sleep until an event or until the core's next retry time."""
        if self._recorder is not None:
            self._recorder.idle(self._clock())
        self._at_rest.set()
        retry_at = None if self._held else self._rest_until or self.core.retry_at
        rest = None if retry_at is None else max(MIN_REST, retry_at - self._clock())
        try:
            await asyncio.wait_for(self._wake.wait(), rest)
        except TimeoutError:
            self._plan_tried = False  # the waiting work may need a new plan

    def _wake_up(self) -> None:
        self._plan_tried = False
        self._wake.set()

    def _launch(self) -> None:
        """Schedule steps until the pipeline is full or nothing can run.

        The planner makes the offline plan while the last step runs. A step does not wait for the plan if there are
        online requests or steps in flight. Otherwise the planner wakes the loop when the plan is ready.
        """
        self._wake.clear()
        core = self.core
        if self._held or self._clock() < self._rest_until:
            return
        while not self._stopping and len(self._in_flight) <= core.config.pipeline_depth and may_run_ahead(core.state):
            plan = self._planner.take(go_on=core.state.has_online or bool(self._in_flight))
            output = core.schedule(self._clock(), plan)
            if output is None:
                if core.has_offline and not self._plan_tried:
                    self._plan_tried = True  # one new plan per event: if it starts nothing, wait for the next event
                    self._planner.want()
                return
            self._plan_tried = False
            if self._recorder is not None:
                self._recorder.launched(output, self._clock())
            if self._step_started is None:
                self._step_started = self._clock()
                self._watch_step(output)
            self._in_flight.append((output, self._start(output)))
            if core.state.speculation is not None:
                core.state.speculation.catch_up()  # index tokens for drafts while the step runs
            if core.has_offline:
                self._planner.want()

    def _watch_step(self, output: SchedulerOutput) -> None:
        """Start the hang timer of a step. Warm-up steps get no predicted latency because they also initialize."""
        self._step_watch.begin(output.predicted_latency if self._warm else None, output.features.num_tokens)

    def _start(self, output: SchedulerOutput) -> Callable[[], asyncio.Future[ModelRunnerOutput]]:
        """Launch a step in the runner thread. Return a function that returns a future of its result; call it once.

        On an asynchronous device a second thread waits for the result, so that the next launch can overlap. Elsewhere
        the launch itself computes the step, and a step launched ahead starts after the previous one. The leader of a
        pipeline launches the next step before it asks for a result, so that all stages compute.
        """
        staged = self.core.state.staged
        waiter, launched = self._executor if staged else self._waiter, self._executor.submit(self.runner.launch, output)

        def collect() -> asyncio.Future[ModelRunnerOutput]:
            return asyncio.wrap_future(waiter.submit(lambda: launched.result()()))

        if staged:
            return collect
        future = collect()
        return lambda: future

    async def _complete_oldest(self) -> None:
        output, collect = self._in_flight[0]
        result: ModelRunnerOutput | None = None
        try:
            result = await collect()
            check_result(output, result, self.info.vocab_size)
            if self._recorder is not None:
                self._recorder.completed(result, self._clock())
        except BaseException as raised:  # an error of a model step ends its requests, not the server
            error = as_error(raised)
            result = None
            await self._on_failed_step(output, error)
        if self._death is not None:
            return
        if result is not None:
            self._step_watch.succeeded(output.features.num_tokens)
        self._in_flight.popleft()
        now = self._clock()
        self._step_started = now if self._in_flight else None
        # The time per token that a request observes: it includes scheduling and the delivery of the last step.
        taken, self._busy_since = now - self._busy_since, now
        if result is not None and self.core.state.staged:
            taken = result.latency  # steps of a pipeline overlap
        if self._in_flight:
            self._watch_step(self._in_flight[0][0])
        else:
            self._step_watch.end()
        outputs = self.core.update(output, result, now)
        self._watchdog.on_step()
        if result is None:
            for ended in outputs:
                self._tell_keeper(Colocation.on_end, ended, now)
        elif self._warm:
            self._tell_keeper(Colocation.on_step, output, taken, outputs, now, result.latency, result.trial)
        for request_output in outputs:
            self._deliver(request_output)
        since = self.core.recovery.sick_since
        if since is not None and now - since > SICK_SECONDS:
            self._give_up("sick", f"every model step has failed for {now - since:.0f} s")

    async def _on_failed_step(self, output: SchedulerOutput, error: Exception) -> None:
        """Record and report a failed step. End the engine if it was the first step, or if the device is lost."""
        if isinstance(error, LinkLostError):
            self._held = True  # no step can run, but no request caused this
            self._watchdog.suspend(True)
            self.on_parted()
        if self._recorder is not None:
            self._recorder.failed(output, error, self._clock())
        if not self.core.is_undone(output):
            self._faults.report("a model step failed", error)
        if not self._warm:
            why = "the first model step failed"
            self._give_up("start", why, EngineStepError("The first model step failed."))
        elif (lost := await self._find_lost_device()) is not None:
            self._give_up("device", f"the device is lost: {lost}")

    async def _find_lost_device(self) -> str | None:
        """Return why the device can run no further step; None if it can or did not answer within DEVICE_SECONDS.

        Without this check, recovery would retry requests on a lost device and blame them for the failures.
        """
        asked = asyncio.get_running_loop().run_in_executor(self._waiter, self._device_lost)
        try:
            return await asyncio.wait_for(asked, DEVICE_SECONDS)
        except TimeoutError:
            return None  # a long step in flight may be in the way; the next step shows whether the device hangs

    def _tell_keeper(self, tell: Callable[..., None], *facts: Any) -> None:
        """Report facts to the SLO keeper. Log an error of the keeper and skip this update."""
        if self.colocation is None:
            return
        try:
            tell(self.colocation, *facts)
        except BaseException as raised:
            error = as_error(raised)
            self._faults.report("the SLO keeper failed", error)

    def _deliver(self, output: RequestOutput) -> None:
        keeps_up = self._streams[output.request_id](output)
        if output.finish_reason is not None:
            self._close(output.request_id)
        elif not keeps_up:
            self.abort(output.request_id)

    def _recover(self, attempt: int) -> None:
        """Recover from a stall: the engine has work, but no step is in flight."""
        if self.state is EngineState.DEAD:
            return
        now = self._clock()
        if (output := clear_stall(self.core, now, attempt)) is not None:
            self._tell_keeper(Colocation.on_end, output, now)
            self._deliver(output)
        self._planner.restart()
        self._wake_up()

    def _read_activity(self) -> Activity | None:
        return read_activity([os.getpid()])

    def _on_hung(self, limit: float) -> None:
        self._give_up("hung", f"a model step has made no progress for {limit:.1f} s")
