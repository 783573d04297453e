"""Engine: the async loop around EngineCore, the one place that joins the control plane with the data plane.

Model steps run one after another in one worker thread; the loop schedules, awaits and hands outputs to their streams.
It wakes on events, never polls, and never waits on a client: a stream that is not read fills its own bounded queue and
its request is ended. Implements `engine.api.EngineClient` in this process.
"""

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from engine.api import (
    EngineInfo,
    EngineRequest,
    EngineState,
    EngineStats,
    FinishReason,
    Lane,
    LoadReport,
    RequestClass,
    RequestOutput,
    RequestTimes,
    SamplingParams,
)
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
from engine.loop.fault_log import FaultLog
from engine.loop.planner import Planner, PlanOffline
from engine.loop.step_watch import StepLimits, StepWatch, check_result
from engine.loop.watchdog import STALL_SECONDS, ProgressWatchdog
from engine.machine import interpreter
from engine.machine.activity import Activity, read_activity
from engine.machine.link import LinkLostError
from engine.scheduling.moving import MovedRequest
from engine.scheduling.output import ModelRunner, ModelRunnerOutput, SchedulerOutput
from engine.scheduling.recovery import RETRY_AFTER
from engine.stream import RequestStream

if TYPE_CHECKING:  # an engine needs neither what compiles grammars nor what writes records, nor torch
    from engine.execution.runner import OtherRanks
    from engine.flight.recorder import FlightRecorder
    from engine.structured.ready import Grammars

log = logging.getLogger("tidemill.engine")

Result = TypeVar("Result")

OutputSink = Callable[[RequestOutput], bool]
"""Takes the outputs of one request, one after another; False: whoever reads them is too far behind."""

WARM_UP_ID = "warm-up"
STOP_SECONDS = 1.0
"""How long `stop` waits for a step that runs."""
SICK_SECONDS = 10.0
"""How long every step may fail before the engine ends: an error of a device often ends with the process that met it."""
DEVICE_SECONDS = 5.0
"""How long a device may take to say whether it still runs."""
REST_SECONDS = 3.0
"""The longest that no step is launched because somebody asks for rest: below what the watchdog takes for a stall."""
MIN_REST = 0.01
"""The shortest sleep in seconds before the core is asked again for work that it could not start."""


class Engine:
    """One model on one device, in this process. `core` and `runner` must agree on pool and block size.

    Every failure after which no step can run has one ending, `_give_up`: a step hangs, every step fails, the loop
    breaks, the device or a rank is lost. `on_death(cause, why)` is called first, then every open request ends with an
    error.

    `step_limits`: when a step counts as hung. `stall_seconds`: with work but without a step for longer, the engine is
    not ready and recovers (see `engine.loop.watchdog`). `device_lost`: called after a failed step, outside the loop's
    thread; returns why no further step can run, or None. `ranks`: the runner's other ranks.
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
        plan_offline: PlanOffline | None = None,
        colocation: Colocation | None = None,
        tuner: BudgetTuner | None = None,
        grammars: "Grammars | None" = None,
        ranks: "OtherRanks | None" = None,
    ) -> None:
        self.info = info
        self._ranks = ranks
        self._core = core
        self._runner = runner
        self._clock = clock
        self._step_watch = StepWatch(step_limits or StepLimits(), self._on_hung, self._read_activity)
        self._device_lost = device_lost
        self.on_death: Callable[[str, str], None] = lambda _cause, _why: None
        self._death: str | None = None
        self._dead = asyncio.Event()
        self._recorder: FlightRecorder | None = None
        self.colocation = colocation
        self._tuner = tuner
        self._grammars = grammars
        self._streams: dict[str, OutputSink] = {}
        self._in_flight: deque[tuple[SchedulerOutput, asyncio.Future[ModelRunnerOutput]]] = deque()
        self._step_started: float | None = None
        self._busy_since = clock()
        self._wake = asyncio.Event()
        self._rest_until = 0.0
        self._at_rest = asyncio.Event()
        self._held = False
        self.on_parted: Callable[[], None] = lambda: None
        self._planner = Planner(plan_offline or core.plan_offline, clock, self._wake.set)
        self._plan_tried = False
        self._watchdog = ProgressWatchdog(core, clock, self._recover, stall_seconds)
        self._idle = asyncio.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-runner")
        self._waiter = self._executor
        if core.config.pipeline_depth and core.config.ahead_seconds == math.inf:
            self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-waiter")
        self._loop_task: asyncio.Task[None] | None = None
        self._warm = self._draining = self._stopping = False
        self._faults = FaultLog(log, clock)

    @property
    def state(self) -> EngineState:
        if self._death is not None or (self._loop_task is not None and self._loop_task.done()):
            return EngineState.DEAD
        if self._draining:
            return EngineState.DRAINING
        if self._loop_task is None or not self._warm:
            return EngineState.STARTING
        return EngineState.READY if self.trouble is None else EngineState.DEGRADED

    @property
    def trouble(self) -> str | None:
        """See EngineClient.trouble."""
        if self._death is not None:
            return self._death
        since = self._core.sick_since
        if since is not None:
            return f"every model step has failed for {self._clock() - since:.0f} s"
        return self._watchdog.trouble

    async def start(self) -> None:
        """Start the loop and run one request through it; raises what the runner raised if that fails."""
        self._loop_task = asyncio.create_task(self._run(), name="tidemill-engine")
        if self._ranks is not None:
            self._ranks.watch(partial(self._tell_lost_rank, asyncio.get_running_loop()))
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

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new work, let requests end for `drain_seconds`, abort the rest, stop the loop and the worker."""
        self._draining = True
        if self._loop_task is None:
            await self._end_ranks()
            return
        if drain_seconds > 0 and self._streams and self.state is not EngineState.DEAD:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
            except TimeoutError:
                log.info("%d requests did not end within %.0f s", len(self._streams), drain_seconds)
        for request_id in list(self._streams):
            self.abort(request_id)
        self._stopping = True
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
        await self._end_ranks()

    async def _end_ranks(self) -> None:
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.close)

    async def check_room(self, request_class: RequestClass, prompt_tokens: int, tenant: str) -> None:
        """See EngineClient.check_room."""
        self.look_for_room(request_class, prompt_tokens, tenant)

    def look_for_room(self, request_class: RequestClass, prompt_tokens: int, tenant: str) -> None:
        """What `check_room` does, now."""
        self._check_accepting()
        with self._noting_refusal(request_class, prompt_tokens):
            self._core.check_room(request_class, tenant, self._clock())

    def _check_accepting(self) -> None:
        state = self.state
        if state is EngineState.DRAINING:
            raise EngineUnavailableError("The server is shutting down.", retry_after=5.0)
        if state is EngineState.DEAD or self._loop_task is None:
            raise EngineUnavailableError("The engine is not running.", retry_after=5.0)
        if self._core.sick_since is not None:
            raise EngineUnavailableError(f"The engine is not ready: {self.trouble}.", retry_after=RETRY_AFTER)

    @contextmanager
    def _noting_refusal(self, request_class: RequestClass, prompt_tokens: int) -> Iterator[None]:
        try:
            yield
        except RetryableError:
            self._tell_keeper(Colocation.on_refused, request_class, prompt_tokens, self._clock())
            raise

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        """See EngineClient.submit."""
        await self.prepare(requests)
        streams = [RequestStream.of(request, partial(self.abort, request.request_id)) for request in requests]
        self.open(zip(requests, (stream.push for stream in streams), strict=True))
        return streams

    async def prepare(self, requests: Sequence[EngineRequest]) -> None:
        """Make the grammars of requests ready, before they are queued. Raises InvalidRequestError for a grammar that
        cannot be enforced, and QueueFullError where it cannot be compiled now."""
        self._check_accepting()
        for grammar in (request.sampling.grammar for request in requests):
            if grammar is not None and self._grammars is None:
                message = f"'{grammar.param}' is not supported by this server."
                raise InvalidRequestError(message, param=grammar.param, code="unsupported_parameter")
        if self._grammars is not None:
            await self._grammars.prepare(requests)

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """No step runs during the block, or during its first seconds: those in flight have ended, none is launched."""
        self._at_rest.clear()
        self._rest_until = self._clock() + REST_SECONDS
        try:
            if self._in_flight:
                await self._at_rest.wait()
            yield
        finally:
            self._rest_until = 0.0
            self._wake_up()

    @property
    def core(self) -> EngineCore:
        """Only to be touched while the engine is held."""
        return self._core

    @property
    def runner(self) -> ModelRunner:
        """See `aside`."""
        return self._runner

    async def hold(self) -> None:
        """No step runs from the end of this on, until `go`."""
        self._held = True
        self._watchdog.suspend(True)
        if self._in_flight:
            self._at_rest.clear()
            await self._at_rest.wait()

    def go(self) -> None:
        """Steps may run again."""
        self._held = False
        self._watchdog.suspend(False)
        self._planner.restart()
        self._wake_up()

    async def aside(self, work: Callable[..., Result], *args: Any) -> Result:
        """Have the thread of the steps do something else."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def serves(self, request_id: str, sink: OutputSink) -> bool:
        """Whether the outputs of a request go there."""
        return self._streams.get(request_id) == sink

    def detach(self, request_id: str) -> MovedRequest:
        """Let go of a request: nothing more is said about it here."""
        moved = self._core.moves.detach(request_id)
        self._close(request_id)
        return moved

    def attach(self, moved: MovedRequest, sink: OutputSink) -> bool:
        """Go on with a request of another engine; see EngineCore.attach."""
        self._check_accepting()
        if self._grammars is not None:
            with suppress(QueueFullError):  # its row fails, if the grammar could not be compiled here
                self._grammars.hold(moved.spec)
        self._streams[moved.spec.request_id] = sink
        return self._core.moves.attach(moved)

    def open(self, pairs: Iterable[tuple[EngineRequest, OutputSink]]) -> None:
        """Queue requests, all or none; their outputs go to the sinks. Raises what `submit` raises."""
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
        with self._noting_refusal(request.request_class, len(request.prompt_token_ids)):
            self._core.add_request(request, self._clock())
        if request.resumed is None and not request.probe:
            self._tell_keeper(Colocation.on_arrival, request.request_class, self._clock())
        self._wake_up()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See EngineClient.abort."""
        if request_id in self._streams:
            self._deliver(self._abort(request_id, reason))
            self._wake_up()

    def drop(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request now, without an output: nobody waits for it. Unknown ids are ignored."""
        if request_id in self._streams:
            self._abort(request_id, reason)
            self._close(request_id)
            self._wake_up()

    def _abort(self, request_id: str, reason: FinishReason) -> RequestOutput:
        output = self._core.abort(request_id, self._clock(), reason)
        assert output is not None, "a stream is open for a request that the core does not know"
        self._tell_keeper(Colocation.on_end, output, self._clock())
        return output

    def _close(self, request_id: str) -> None:
        del self._streams[request_id]
        if self._grammars is not None:
            self._grammars.release(request_id)
        if not self._streams:
            self._idle.set()

    def set_lane(self, job: str, lane: Lane) -> None:
        """See EngineClient.set_lane."""
        self._core.set_lane(job, lane)
        self._wake_up()

    async def stats(self) -> EngineStats:
        """See EngineClient.stats."""
        return self.snapshot()

    def snapshot(self) -> EngineStats:
        """The figures of now."""
        stats = self._core.stats()
        if self.colocation is None:
            return stats
        return replace(stats, colocation=self.colocation.stats(self._clock()))

    def load(self) -> LoadReport:
        """How much of it is taken now."""
        return self._core.load(self._clock())

    async def wait_dead(self) -> str:
        """See EngineClient.wait_dead."""
        await self._dead.wait()
        assert self._death is not None
        return self._death

    async def renew(self, *, anyway: bool = False) -> str:  # noqa: ARG002
        """See EngineClient.renew."""
        return "the engine runs inside the server, and changes when that is started again"

    def kill(self) -> None:
        """See EngineClient.kill: all of it runs in this process."""

    def put_between(self, wrap: Callable[[ModelRunner], ModelRunner]) -> None:
        """Steps go through what `wrap` makes of the runner; before `start`."""
        self._runner = wrap(self._runner)

    def be_recorded(self, recorder: "FlightRecorder") -> None:
        """From now on every step is written there before it runs."""
        self._recorder = recorder

    def _give_up(self, cause: str, why: str, error: TidemillError | None = None) -> None:
        """End the engine: no further step runs here. `cause`: a name of `engine.process.causes`; `error`: ends the open
        requests, once `on_death` had the chance to move them to another engine."""
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
        self._dead.set()
        self._wake_up()

    def _tell_lost_rank(self, loop: asyncio.AbstractEventLoop, why: str) -> None:
        """End the engine, from the thread that watches the ranks."""
        loop.call_soon_threadsafe(self._give_up, "device", f"the device is lost: {why}")

    async def _run(self) -> None:
        try:
            while self._death is None and (not self._stopping or self._in_flight):
                self._launch()
                interpreter.collect_due(at_rest=not self._core.has_online)
                if self._in_flight:
                    await self._complete_oldest()
                else:
                    await self._sleep()
                    self._busy_since = self._clock()
        except Exception as error:
            log.critical("the engine loop ended: %r", error, exc_info=error)
            self._give_up("loop", "its loop ended")

    async def _sleep(self) -> None:
        """Until something happens, or until the time for which something waits in the core."""
        if self._recorder is not None:
            self._recorder.idle(self._clock())
        self._at_rest.set()
        retry_at = None if self._held else self._rest_until or self._core.retry_at
        rest = None if retry_at is None else max(MIN_REST, retry_at - self._clock())
        try:
            await asyncio.wait_for(self._wake.wait(), rest)
        except TimeoutError:
            self._plan_tried = False  # what waited may need a plan

    def _wake_up(self) -> None:
        self._plan_tried = False
        self._wake.set()

    def _launch(self) -> None:
        """Schedule steps until the pipeline is full or nothing can run.

        The offline plan was made while the last step ran. A step does not wait for it where there is something to run,
        online work or what the last plan has begun; else the planner wakes the loop when it comes.
        """
        self._wake.clear()
        core = self._core
        if self._held or self._clock() < self._rest_until:
            return
        while not self._stopping and len(self._in_flight) <= core.config.pipeline_depth and core.may_run_ahead:
            plan = self._planner.take(go_on=core.has_online or bool(self._in_flight))
            output = core.schedule(self._clock(), plan)
            if output is None:
                if core.has_offline and not self._plan_tried:
                    self._plan_tried = True  # one fresh plan per event: when even that runs nothing, wait for the next
                    self._planner.want()
                return
            self._plan_tried = False
            if self._recorder is not None:
                self._recorder.launched(output, self._clock())
            if self._step_started is None:
                self._step_started = self._clock()
                self._watch_step(output)
            self._in_flight.append((output, self._start(output)))
            if core.has_offline:
                self._planner.want()

    def _watch_step(self, output: SchedulerOutput) -> None:
        """The first steps do what no later one does, on a machine that may be busy: nobody knows how long they take."""
        self._step_watch.begin(output.predicted_latency if self._warm else None)

    def _start(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        """Launches happen in one thread, waits where a device runs by itself in another: a step starts while another
        runs. Elsewhere a launch is the step, and one that is launched ahead begins when its thread is done with the
        one before it."""
        launched = self._executor.submit(self._runner.launch, output)
        return asyncio.wrap_future(self._waiter.submit(lambda: launched.result()()))

    async def _complete_oldest(self) -> None:
        output, future = self._in_flight[0]
        result: ModelRunnerOutput | None = None
        try:
            result = await future
            check_result(output, result, self.info.vocab_size)
            if self._recorder is not None:
                self._recorder.completed(result, self._clock())
        except Exception as error:  # whatever a model step raises must end at its requests, not at the server
            result = None
            await self._on_failed_step(output, error)
        if self._death is not None:
            return
        self._in_flight.popleft()
        now = self._clock()
        self._step_started = now if self._in_flight else None
        # What a step costs a request that waits for its next token: scheduling it and delivering the last one included.
        taken, self._busy_since = now - self._busy_since, now
        if self._in_flight:
            self._watch_step(self._in_flight[0][0])
        else:
            self._step_watch.end()
        outputs = self._core.update(output, result, now)
        self._watchdog.on_step()
        if result is None:
            for ended in outputs:
                self._tell_keeper(Colocation.on_end, ended, now)
        elif self._warm:
            self._tell_keeper(Colocation.on_step, output, taken, outputs, now, result.latency, result.trial)
        for request_output in outputs:
            self._deliver(request_output)
        since = self._core.sick_since
        if since is not None and now - since > SICK_SECONDS:
            self._give_up("sick", f"every model step has failed for {now - since:.0f} s")

    async def _on_failed_step(self, output: SchedulerOutput, error: Exception) -> None:
        """Record and report a failed step. End the engine if it was the first step, or if the device is lost."""
        if isinstance(error, LinkLostError):
            self._held = True  # no step can run, and no request is to blame
            self._watchdog.suspend(True)
            self.on_parted()
        if self._recorder is not None:
            self._recorder.failed(output, error, self._clock())
        if not self._core.is_undone(output):
            self._faults.report("a model step failed", error)
        if not self._warm:
            why = "the first model step failed"
            self._give_up("start", why, EngineStepError("The first model step failed."))
        elif (lost := await self._find_lost_device()) is not None:
            self._give_up("device", f"the device is lost: {lost}")

    async def _find_lost_device(self) -> str | None:
        """Return why the device can run no further step; None if it can, or if it did not say within DEVICE_SECONDS.
        Trials on a lost device would blame requests for it."""
        asked = asyncio.get_running_loop().run_in_executor(self._waiter, self._device_lost)
        try:
            return await asyncio.wait_for(asked, DEVICE_SECONDS)
        except TimeoutError:
            return None  # a long step in flight may be in the way; the next step shows whether the device hangs

    def _tell_keeper(self, tell: Callable[..., None], *facts: Any) -> None:
        """A fault in what learns from steps costs learning only."""
        if self.colocation is None:
            return
        try:
            tell(self.colocation, *facts)
        except Exception as error:
            self._faults.report("the SLO keeper failed", error)

    def _deliver(self, output: RequestOutput) -> None:
        keeps_up = self._streams[output.request_id](output)
        if output.finish_reason is not None:
            self._close(output.request_id)
        elif not keeps_up:
            self.abort(output.request_id)

    def _recover(self, attempt: int) -> None:
        """The engine stands still, and no step is in flight."""
        if self.state is EngineState.DEAD:
            return
        now = self._clock()
        for output in self._core.clear_stall(now, attempt):
            self._tell_keeper(Colocation.on_end, output, now)
            self._deliver(output)
        self._planner.restart()
        self._wake_up()

    def _read_activity(self) -> Activity | None:
        return read_activity([os.getpid(), *(() if self._ranks is None else self._ranks.pids)])

    def _on_hung(self, limit: float) -> None:
        self._give_up("hung", f"a model step has got nowhere for {limit:.1f} s")
