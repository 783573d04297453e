"""An engine in a process of its own, as the gateway sees it: when the process dies, the next one goes on with its
requests.

Of every open request it keeps the prompt and the tokens given, which is all that a preempted request is made of: the
next engine computes them again and goes on at the same position. A client sees a pause. See docs/develop/process.md.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.api import (
    EngineInfo,
    EngineRequest,
    EngineState,
    EngineStats,
    FinishReason,
    Lane,
    LoadReport,
    RequestClass,
)
from engine.config import EngineConfig
from engine.errors import EngineStepError, EngineUnavailableError, InvalidRequestError
from engine.flight import recorder as flight
from engine.loop.step_watch import StepLimits, StepWatch
from engine.machine.activity import Activity
from engine.machine.facts import Place
from engine.process import frames
from engine.process.calls import Calls, GoneError
from engine.process.causes import RENEWED, START, SYSTEM, Origin, Outage, is_of_system, origin_of, start_error
from engine.process.connection import Connection
from engine.process.figures import Figures
from engine.process.flights import FAILED_STEP, Flights
from engine.process.given import Given
from engine.process.handover import hand_over, take_over
from engine.process.launcher import Launcher, end_now
from engine.process.policy import RestartPolicy
from engine.process.regroup import Regrouping
from engine.process.reputation import Reputation
from engine.process.requests import OpenRequest, OpenRequests
from engine.process.supervisor import Endpoint
from engine.process.suspects import Suspects, Verdict
from engine.queue_time import QueueTime
from engine.stream import RequestStream
from predictor.slo import SLO

log = logging.getLogger("tidemill.engine")

PATIENCE = 10.0
"""Seconds for the TTFT where none is promised."""
RETRY_AFTER = 5.0
"""Seconds; about what a start takes."""
SILENCE = StepLimits(unknown=10.0)
"""How long a process may say nothing: its event loop does not turn, or it is stopped."""
START_SECONDS = 900.0
"""The longest start: model, profile and first step."""
STOP_SECONDS = 2.0
REAP_SECONDS = 0.05
SPARE_SECONDS = 1.0
"""After the start of a process, until the next one is made ready."""
ANSWER_SECONDS = 1.0
"""How long figures may take before those of the last time are given."""
FRAME_TOKENS, FRAME_REQUESTS = 1 << 16, 64
"""After so many tokens or requests that go on in another process a frame ends: it holds one more request at most."""
TURN_TOKENS = 1 << 20
"""Of requests that go on, sent in one turn of the event loop: about 10 ms."""
MAX_UNSENT, DRAIN_SECONDS = 1 << 26, 0.01
"""Bytes that the process has not read yet, beyond which the rest waits."""
NOWHERE = Place()
_LEVELS = {Origin.ASKED: logging.INFO, Origin.SYSTEM: logging.DEBUG}
STARTED_ANYWAY = "the engine is being started anyway"


def _nobody_asks() -> None:
    pass


class EngineProcess:
    """Implements engine.api.EngineClient. `pid_file` holds the number of the process. `command` starts one, its
    descriptor behind it, which runs at `place`. `flights` keeps what processes did at last.

    One of a fleet: `changed` is called when the process comes or goes, and when a request has ended; with `waits` off
    nothing waits here for the next process, as it can go elsewhere. `spare`: the next process is kept ready while one
    runs. `spawn` starts processes that are no children.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_level: str = "info",
        pid_file: Path | None = None,
        command: Sequence[str] | None = None,
        policy: RestartPolicy | None = None,
        flights: Flights | None = None,
        silence: StepLimits = SILENCE,
        clock: Callable[[], float] = time.monotonic,
        place: Place = NOWHERE,
        changed: Callable[[], None] = _nobody_asks,
        waits: bool = True,
        spare: bool = False,
        spawn: Callable[[frames.Launch], Endpoint] | None = None,
    ) -> None:
        self._patience = patience(config) if waits else None
        self._launcher = Launcher(
            config, log_level=log_level, place=place, pid_file=pid_file, command=command, spawn=spawn
        )
        self._keeps_spare = spare
        self._making_spare: asyncio.Task[None] | None = None
        self._tell_change = changed
        self._given = Given()
        self._policy = policy or RestartPolicy()
        self._outage = Outage()
        self._refusal = ""
        self._clock = clock
        self._info: EngineInfo | None = None
        self._child: Endpoint | None = None
        self._connection: Connection[frames.ToGateway] | None = None
        self._lost: asyncio.Future[str] | None = None
        self._cause: str | None = None
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()
        self._pulse: frames.Pulse | None = None
        self._watch = StepWatch(silence, self._on_silence, self._read_activity)
        self._flights = flights
        self._open = OpenRequests()
        self._suspects = Suspects()
        self._reputation = Reputation()
        self._unjudged: set[float] = set()
        self._resuming: deque[OpenRequest] = deque()
        self._idle = asyncio.Event()
        self._calls = Calls(self._send)
        self.regroup = Regrouping(self._calls, self._open, self._suspects, self.abort)
        self._figures = Figures()
        self._task: asyncio.Task[None] | None = None
        self._started = self._draining = self._stopping = self._judged = self._has_worked = False
        self._death: str | None = None
        self._dead = asyncio.Event()

    # What the gateway asks

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "nothing is known of a model before it is loaded"
        return self._info

    @property
    def state(self) -> EngineState:
        if self._death is not None:
            return EngineState.DEAD
        if self._draining:
            return EngineState.DRAINING
        if not self._started:
            return EngineState.STARTING
        if not self._ready.is_set():
            return EngineState.DEGRADED
        return EngineState.READY if self._pulse is None else self._pulse.state

    @property
    def trouble(self) -> str | None:
        """See EngineClient.trouble."""
        if self._death is not None:
            return self._death
        if self._outage.why is not None:
            return f"the system does not let an engine process start: {self._outage.why}; retrying"
        if self._started and not self._ready.is_set():
            return "the engine process ended and is started again"
        return None if self._pulse is None else self._pulse.trouble

    @property
    def is_up(self) -> bool:
        """Whether there is a process that takes requests."""
        return self._ready.is_set() and self._death is None

    @property
    def report(self) -> LoadReport | None:
        """What the process said last of its load; None before its first word."""
        return self._given.report

    @property
    def unreported(self) -> Iterable[EngineRequest]:
        """What it was given since then."""
        return self._given.unreported

    def holds(self, request_id: str) -> bool:
        """Whether the request is open here."""
        return request_id in self._open

    @property
    def num_offline(self) -> int:
        """Open offline requests."""
        return self._open.num_offline

    @property
    def num_online(self) -> int:
        """Open online requests."""
        return len(self._open) - self._open.num_offline

    async def check_room(self, request_class: RequestClass, prompt_tokens: int, tenant: str) -> None:
        """See EngineClient.check_room. While there is no engine nobody knows: `submit` will wait for one."""
        self._check_accepting()
        if self._ready.is_set():
            with suppress(GoneError):
                await self._calls.ask(lambda call: frames.CheckRoom(call, request_class, prompt_tokens, tenant))

    async def submit(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        """See EngineClient.submit. Without an engine a request waits for one up to its TTFT limit or the longest queue
        time, whichever is later, and the line of a batch as long as it takes."""
        self._check_accepting()
        now = self._clock()
        for request in requests:
            if request.request_id in self._open:
                raise InvalidRequestError(f"A request '{request.request_id}' is already running.", param="request_id")
        entries = []
        for request in requests:
            stream = RequestStream.of(request, partial(self.abort, request.request_id))
            entries.append(OpenRequest(request, stream, now))
            self._open.add(entries[-1])
        try:
            until = now if self._patience is None else now + longest_wait(requests, self._patience)
            if not self._recognise(entries):
                await self._queue(entries, until)
        except BaseException:
            for request in requests:
                self._forget(request.request_id)
            raise
        return [entry.stream for entry in entries]

    def take_movable(self) -> list[OpenRequest]:
        """What another engine is to go on with, as there is no process here. See `hand_over`."""
        is_gone = self._judged and not self._ready.is_set()
        if not is_gone and self._death is None:
            return []
        return hand_over(self._open, self._suspects, given_up=self._death is not None)

    def adopt(self, entries: Sequence[OpenRequest]) -> None:
        """Go on with what another engine had accepted: at the same token."""
        for entry in entries:
            entry.stream.rebind(partial(self.abort, entry.request.request_id))
        if beside_others := take_over(entries, self._open, self._suspects):
            self._resume(beside_others)
        self._try_suspect()

    def _recognise(self, entries: Sequence[OpenRequest]) -> bool:
        """Return whether one of them is a suspect by its content; then all are resumed, suspects in a trial. Raises
        EngineStepError for content that is proven to end processes."""
        for entry in entries:
            known = self._reputation.find(entry.request, self._clock())
            if known is not None:
                suspicion, guilty = known
                if guilty:
                    raise EngineStepError(f"The engine process ended {suspicion.deaths} times while it computed this.")
                self._suspects.admit(entry.request.request_id, suspicion)
        innocent = [entry for entry in entries if entry.request.request_id not in self._suspects]
        if len(innocent) == len(entries):
            return False
        self._open.accept(entry.request.request_id for entry in entries)
        if innocent and self._ready.is_set():
            self._resume(innocent)
        self._try_suspect()
        return True

    async def _queue(self, entries: Sequence[OpenRequest], until: float) -> None:
        """Until an engine has accepted them, or has died of it, perhaps: then they are resumed like others, however
        long it takes to judge them."""
        arrived = self._clock()
        requests = [entry.request for entry in entries]
        while True:
            if not self._ready.is_set():
                await self._wait_for_engine(until, entries)
                waiting = [entry.request for entry in entries if not entry.accepted]
                if not waiting:
                    return
                requests = [replace(request, arrived=arrived) for request in waiting]
            self._given.add(requests)
            try:
                await self._calls.ask(partial(frames.Submit, requests=tuple(requests)), requests)
            except GoneError:
                continue
            except frames.FrameError as error:
                raise InvalidRequestError(f"The request is too large for the engine: {error}.") from None
            return

    async def _wait_for_engine(self, until: float, entries: Sequence[OpenRequest]) -> None:
        """Or until all `entries` have taken part in a death: they are not given up before they are judged. Raises
        EngineUnavailableError at the time `until`, or when there will be none."""
        while not self._ready.is_set():
            self._check_accepting()
            if all(entry.accepted for entry in entries):
                return
            left = until - self._clock()
            if left <= 0.0:
                raise EngineUnavailableError("The engine is being started again.", retry_after=RETRY_AFTER)
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if math.isinf(left) else left)
        self._check_accepting()

    def _check_accepting(self) -> None:
        if self._draining:
            raise EngineUnavailableError("The server is shutting down.", retry_after=5.0)
        if self._death is not None:
            raise EngineUnavailableError("The engine is not running.", retry_after=5.0)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See EngineClient.abort."""
        entry = self._open.get(request_id)
        if entry is not None:
            self._forget(request_id, reason)
            entry.end(reason, self._clock())

    def _forget(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if (entry := self._open.pop(request_id)) is not None:
            suspicion = self._suspects.release(request_id)
            if suspicion is not None:
                self._reputation.remember(entry.request, suspicion, self._clock())
                self._unjudged.update(suspicion.died_at)
            self._send(frames.Abort(request_id, reason))
            self._look_whether_idle()

    def set_lane(self, job: str, lane: Lane) -> None:
        """See EngineClient.set_lane."""
        self._open.set_lane(job, lane)
        self._send(frames.SetLane(job, lane))

    async def stats(self) -> EngineStats:
        """See EngineClient.stats. Of a process that does not answer, what it said last."""
        figures = self._figures
        if self._ready.is_set():
            with suppress(GoneError, TimeoutError):
                figures.last = await asyncio.wait_for(self._calls.ask(frames.AskStats), ANSWER_SECONDS)
        return figures.total()

    async def wait_dead(self) -> str:
        """See EngineClient.wait_dead."""
        await self._dead.wait()
        assert self._death is not None
        return self._death

    def kill(self) -> None:
        """See EngineClient.kill."""
        if self._child is not None:
            self._child.kill()
        self._launcher.kill()

    # Life

    def load(self, planned: Callable[[frames.Planned], None]) -> None:
        """Start the first process and wait until its model is loaded; before the event loop runs. `planned` is told
        what will be loaded before it is. Raises what keeps it from starting; the process is gone then."""
        child = self._child = self._launcher.spawn()
        try:
            message = child.receive()
            assert isinstance(message, frames.Planned)
            self._launcher.plan(message)
            planned(message)
            message = child.receive()
            assert isinstance(message, frames.Built)
            self._info = message.info
        except BaseException as error:
            self.discard()
            raise (start_error(error) if isinstance(error, OSError) else error) from None

    def discard(self) -> None:
        """End processes that were loaded and will not be used."""
        child, self._child = self._child, None
        if child is not None:
            end_now(child)
        self._launcher.discard()

    async def renew(self, *, anyway: bool = False) -> str:
        """See EngineClient.renew. The next process is ready to load before this one ends, unless others of a fleet go
        on: it is made ready with time that nobody wants, and a busy machine has none."""
        child, launcher = self._child, self._launcher
        if child is None or not self.is_up or not launcher.may_renew:
            return STARTED_ANYWAY
        source = await launcher.look()
        if source == launcher.source and not anyway:
            return "weights and engine are those that run"
        others_go_on = anyway and self._patience is None
        if launcher.holds_spares and not others_go_on:
            await launcher.hold()
            if self._child is not child or self._stopping:
                await launcher.drop()
                return STARTED_ANYWAY
        launcher.source = source
        self._cause = RENEWED
        self._ready.clear()
        child.kill()
        while not self._ready.is_set() and self._death is None and not self._draining:
            self._changed.clear()
            await self._changed.wait()
        return "another engine process runs"

    async def start(self) -> None:
        """Start stepping; a process that cannot is an error now, and later one that died."""
        child = self._child or await self._launcher.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._begin(child)
        except BaseException as error:
            await self._end(child, grace=0.0)
            raise (start_error(error) if isinstance(error, OSError | TimeoutError) else error) from None
        self._started = True
        self._task = asyncio.create_task(self._supervise(child), name="tidemill-supervisor")

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """See EngineClient.stop. A process that does not end by itself within a moment is killed."""
        self._draining = True
        self._changed.set()
        if self._task is None:
            return
        if drain_seconds > 0 and len(self._open) and self._death is None:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
            except TimeoutError:
                log.info("%d requests did not end within %.0f s", len(self._open), drain_seconds)
        for entry in self._open:
            self.abort(entry.request.request_id)
        self._stopping = True
        task, self._task = self._task, None
        tasks = [task] if self._making_spare is None else [task, self._making_spare]
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        if self._child is not None:
            self._send(frames.Shutdown())
            await self._end(self._child, grace=STOP_SECONDS)
        self._watch.end()
        await asyncio.to_thread(self.discard)

    async def _begin(self, child: Endpoint) -> None:
        """Until the child takes requests; it is given those that are open. Raises what keeps it from starting."""
        self._child = child
        self._cause = None
        self._has_worked = False
        loop = asyncio.get_running_loop()
        lost = self._lost = loop.create_future()
        self._connection = await Connection.open(child.sock, child.reader, self._receive, partial(self._on_lost, lost))
        for message in child.read_ahead():
            self._receive(message)
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait([ready, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._ready.is_set():
            error = lost.exception()
            raise error if error is not None else EngineUnavailableError("the engine process ended while it started")
        self._policy.ready(self._clock())
        self._launcher.has_served()
        if self._keeps_spare and (self._making_spare is None or self._making_spare.done()):
            self._making_spare = asyncio.create_task(self._keep_spare(), name="tidemill-spare")

    async def _keep_spare(self) -> None:
        """Not at once: what waited for the process that has just come gets on first."""
        await asyncio.sleep(SPARE_SECONDS)
        await self._launcher.keep_spare()

    async def _supervise(self, child: Endpoint) -> None:
        try:
            await self._start_again_and_again(child)
        except Exception as error:
            log.critical("the supervisor of the engine process failed", exc_info=error)
            self._give_up("the supervisor of the engine process failed")

    async def _start_again_and_again(self, first: Endpoint) -> None:
        """Start one child after another until they die too often."""
        child: Endpoint | None = first
        while True:
            cause, ended = await self._outlive(child) if child is not None else (self._cause or START, "an error")
            delay = self._judge(cause, child)
            self._figures.restarts[cause] += 1
            self._judged = True
            self._tell_change()
            if delay is None:
                self._give_up(f"the engine process ended too often, at last by {ended} ({cause})")
                return
            log.log(
                _LEVELS.get(origin_of(cause), logging.ERROR),
                "the engine process ended by %s (%s); it is started again %s, %d requests wait for it",
                ended, cause, f"in {delay:.0f} s" if delay else "at once", len(self._open),
            )  # fmt: skip
            await asyncio.sleep(delay)
            child = await self._restart()

    def _keep_flight(self, cause: str, child: Endpoint | None) -> None:
        if self._flights is not None and child is not None and self._info is not None and cause != RENEWED:
            self._flights.keep(cause, self._info, child.entries)

    def _judge(self, cause: str, child: Endpoint | None) -> float | None:
        """Seconds until the next start; None: never. A death in a trial does not count; a request whose fault it is
        proven to be ends, and what it took down before counts no more. Where nothing else got on since the last such
        proof, the engine may be at fault, and the proof counts as one death."""
        origin = origin_of(cause)
        if origin is Origin.ASKED or origin is Origin.SYSTEM:
            self._suspects.died(cause, {}, self._clock())
            if origin is Origin.ASKED:
                self._reputation.clear()
            return 0.0 if origin is Origin.ASKED else self._outage.refused(self._refusal, self._policy.max_delay)
        entries = [] if child is None else child.entries
        in_flight = {name: tokens for name, tokens in flight.in_flight(entries).items() if name in self._open}
        if self._patience is not None:  # otherwise whoever submitted them has gone to another engine
            self._open.accept(in_flight)
            self._changed.set()
        now = self._clock()
        verdict = self._suspects.died(cause, in_flight, now)
        if verdict is None:
            in_question = self._suspects.deaths_to_try(in_flight)
            self._policy.forgive(in_question)
            worked = self._has_worked and origin is Origin.OUTSIDE
            return self._policy.died(now, worked=worked, counts=now not in in_question)
        if not verdict.guilty:
            return 0.0
        self._policy.forgive(verdict.suspicion.died_at)
        self._end_guilty(verdict, now)
        return 0.0 if verdict.others_well else self._policy.died(now)

    def _end_guilty(self, verdict: Verdict, now: float) -> None:
        """End a request that is proven to end processes, and suspects of the same content."""
        guilty = self._open.get(verdict.request_id)
        assert guilty is not None, "only open requests are suspected"
        self._reputation.remember(guilty.request, verdict.suspicion, now, guilty=True)
        for entry in self._open:
            name = entry.request.request_id
            known = self._reputation.find(entry.request, now) if entry is guilty or name in self._suspects else None
            if known is None or not known[1]:
                continue
            log.error("request %s ended the engine process %d times; it ends now", name, verdict.deaths)
            self._open.pop(name)
            self._suspects.forget(name)
            message = f"The engine process ended {verdict.deaths} times while it computed this request."
            entry.end(FinishReason.ERROR, now, EngineStepError(message))
        self._look_whether_idle()

    async def _restart(self) -> Endpoint | None:
        """The next child, which may have died already: that is found out like any death. None: there is none."""
        self._cause = None
        try:
            child = await self._launcher.start()
        except Exception as error:
            self._note_refusal(error)
            return None
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._begin(child)
        except Exception as error:
            if self._cause != SYSTEM:
                self._note_refusal(error)
            if self._lost is not None and not self._lost.done():
                self._lost.set_result("")
        return child

    def _note_refusal(self, error: Exception) -> None:
        """A process could not be started, or did not get as far as taking requests."""
        if is_of_system(error):
            self._cause, self._refusal = SYSTEM, str(error) or type(error).__name__
            return
        if isinstance(error, TimeoutError):
            self._cause = START
        log.error("the engine process did not start: %s", error or "it took too long")

    async def _outlive(self, child: Endpoint) -> tuple[str, str]:
        """Wait for its death; returns the cause, and how it ended."""
        assert self._lost is not None
        await asyncio.wait([self._lost])
        if not self._lost.cancelled():
            self._lost.exception()
        ended = await self._end(child, grace=0.0)
        cause = self._cause or ("killed" if ended == "signal 9" else "crash")
        self._keep_flight(cause, child)
        return cause, ended

    async def _end(self, child: Endpoint, grace: float) -> str:
        """See that it is gone, and all that was asked of it with it."""
        self._down()
        ended = ""
        if grace > 0:
            with suppress(TimeoutError):
                ended = await _reaped(child, grace)
        if not ended:
            child.kill()
            ended = await _reaped(child)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._child is child:
            self._child = None
        return ended

    def _down(self) -> None:
        """There is no engine."""
        self._ready.clear()
        self._judged = False
        self._watch.end()
        self._given = Given()
        self._resuming.clear()
        self._pulse = None
        self._figures.process_ended()
        self._calls.end()
        self.regroup.lost()
        self._tell_change()

    def _give_up(self, why: str) -> None:
        self._death = why
        log.critical("%s", why)
        self._tell_change()
        self._open.end_all(self._clock(), "The engine stopped while this request was running.")
        self._look_whether_idle()
        self._changed.set()
        self._dead.set()

    # Messages

    def _send(self, message: frames.Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _receive(self, message: frames.ToGateway) -> None:
        """One message of the child."""
        match message:
            case frames.Outputs(outputs, load):
                self._given.hear(load)
                for output in outputs:
                    self._deliver(output)
                self._try_suspect()
            case frames.Done(call):
                self._open.accept(request.request_id for request in self._calls.submitted(call))
                self._calls.settle(call)
            case frames.Refused(call, error):
                self._calls.refuse(call, error.to_error())
            case frames.Stats(call, answer) | frames.Regrouped(call, answer):
                self._calls.settle(call, answer)
            case frames.Parted():
                self.regroup.parted = True
                self._tell_change()
            case frames.Pulse():
                self._pulse = message
                self._given.hear(message.load)
                if self._ready.is_set():  # none comes any more from one that ends
                    self._watch.begin(None)
                self._try_suspect()
            case frames.Built(info):
                self._info = info
            case frames.Started():
                self._up()
            case frames.NotStarted(error, cause):
                self._cause, self._refusal = cause, error.message
                if self._lost is not None and not self._lost.done():
                    self._lost.set_exception(error.to_error())
            case frames.Dying(cause, why):
                self._cause = cause
                log.critical("the engine process ends itself: %s", why)
                self._ready.clear()
                self._tell_change()
            case frames.StepFailed():
                self._keep_flight(FAILED_STEP, self._child)
            case frames.Planned():
                pass

    def _up(self) -> None:
        """The child takes requests; first those that the last one left."""
        self._outage.end()
        resumed = [entry for entry in self._open.accepted() if entry.request.request_id not in self._suspects]
        if resumed:
            self._resume(resumed)
            log.warning("%d requests go on in the new engine process", len(resumed))
        streams = [entry.request.request_id for entry in resumed if entry.is_online and entry.last is not None]
        self._suspects.after(streams, self._clock())
        self._try_suspect()
        self._watch.begin(None)
        self._judged = False
        self._ready.set()
        self._changed.set()
        self._tell_change()

    def _resume(self, entries: Sequence[OpenRequest]) -> None:
        self._figures.resumed += len(entries)
        self._resuming.extend(entries)
        self._resume_some()

    def _resume_some(self) -> None:
        """Send what a turn of the event loop has time for, in frames of bounded size, while the process reads it."""
        unsent = 0 if self._connection is None else self._connection.unsent
        left = TURN_TOKENS if unsent < MAX_UNSENT else 0
        while self._resuming and left > 0:
            requests: list[EngineRequest] = []
            size = 0
            while self._resuming and size < FRAME_TOKENS and len(requests) < FRAME_REQUESTS:
                entry = self._resuming.popleft()
                if self._open.get(entry.request.request_id) is entry:
                    requests.append(entry.resumed(self._suspects.apart_until(entry.request.request_id)))
                    size += entry.num_computed + 1
            left -= size
            if requests:
                self._given.add(requests)
                self._send(frames.Resume(tuple(requests)))
        if self._resuming:
            pause = 0.0 if unsent < MAX_UNSENT else DRAIN_SECONDS
            asyncio.get_running_loop().call_later(pause, self._resume_some)

    def _try_suspect(self) -> None:
        """Let the next request go on that may have ended the process, if it is its turn."""
        request_id = self._suspects.next_trial(self._clock())
        if request_id is not None and (entry := self._open.get(request_id)) is not None:
            self._resume([entry])

    def _deliver(self, output: Any) -> None:
        entry = self._open.get(output.request_id)
        if entry is None:
            return  # ended here meanwhile
        keeps_up = entry.take(output)
        self._has_worked = self._has_worked or bool(output.token_ids)
        if self._suspects.got_on(output.request_id, entry.num_computed):
            self._reputation.forget(entry.request)
        elif self._unjudged and output.token_ids and output.request_id not in self._suspects:
            self._policy.forgive(self._unjudged)  # the engine works without the requests that were in these deaths
            self._unjudged.clear()
        if output.finish_reason is not None:
            self._open.pop(output.request_id)
            self._suspects.forget(output.request_id)
            self._look_whether_idle()
        elif not keeps_up:
            self.abort(output.request_id)

    def _look_whether_idle(self) -> None:
        """A request has ended."""
        if not len(self._open):
            self._idle.set()
        self._tell_change()

    def _on_lost(self, lost: "asyncio.Future[str]", fault: str | None) -> None:
        """Nothing more comes from a child."""
        if fault is not None:
            self._cause = self._cause or "protocol"
            log.error("the engine process sent nonsense: %s", fault)
        if not lost.done():
            lost.set_result("")

    def _read_activity(self) -> Activity | None:
        return None if self._child is None else self._child.activity()

    def _on_silence(self, limit: float) -> None:
        """No pulse: the child's event loop stands still. Its last act is to show where."""
        log.critical("the engine process has said nothing and got nowhere for %.0f s", limit)
        self._cause = self._cause or "silent"
        child = self._child
        if child is not None:
            child.dump()
            asyncio.get_running_loop().call_later(1.0, child.kill)


async def _reaped(child: Endpoint, within: float | None = None) -> str:
    """How a child ended. Raises TimeoutError. Polls where the system gives no thread to wait in."""
    try:
        return await asyncio.to_thread(child.reap, within)
    except RuntimeError:
        async with asyncio.timeout(within):
            while True:
                with suppress(TimeoutError):
                    return child.reap(0.0)
                await asyncio.sleep(REAP_SECONDS)


def patience(config: EngineConfig) -> float:
    """Seconds that an online request waits for an engine: a start takes longer than most TTFT limits."""
    limit = SLO.parse(config.slo).limit_of("ttft") or PATIENCE
    return max(limit, QueueTime.parse(config.max_queue_time).longest(limit))


def longest_wait(requests: Sequence[EngineRequest], patience: float) -> float:
    """Seconds for which requests wait for an engine."""
    lines = all(r.request_class is RequestClass.OFFLINE and r.lane is not Lane.FLEX for r in requests)
    return math.inf if lines else patience
