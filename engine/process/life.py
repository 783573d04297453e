"""Start, watch and restart the processes of one engine.

The gateway's connection to the current engine process: its socket, open calls, and requests sent to it.

`Regrouping` is for a process that joins or leaves a pipeline: it sends the orders, and moves open requests between
engines without interrupting their streams.
"""

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast

from engine.api import EngineRequest
from engine.client import EngineInfo, EngineState, Figures, LoadReport
from engine.config import EngineConfig
from engine.errors import EngineUnavailableError
from engine.loop.watchdog import StepWatch
from engine.machine.activity import Activity
from engine.process import frames
from engine.process.frames import FrameError, FrameReader, Message, Order, Past, Reset, encode
from engine.process.launcher import Launcher, ProcessEndpoint, ProcessOptions, end_now, reaped
from engine.process.requests import DeathJudge, OpenRequest, Requests, RestartPolicy
from engine.process.suspects import RENEWED, START, SYSTEM, Origin, is_of_system, origin_of, start_error

MessageT = TypeVar("MessageT")

FRAME_TOKENS, FRAME_REQUESTS = 1 << 16, 64
"""Tokens and resumed requests after which a frame ends; the last request may exceed the tokens."""
TURN_TOKENS = 1 << 20
"""Tokens of resumed requests sent in one turn of the event loop: about 10 ms."""
MAX_UNSENT, DRAIN_SECONDS = 1 << 26, 0.01
"""Unsent bytes from which on resumed requests wait, and the seconds until the next check."""


class Connection(asyncio.Protocol, Generic[MessageT]):
    """A socket that passes each message to `on_message`.

    `on_lost` is called once at the end, with the fault if the bytes were invalid, else None.
    """

    def __init__(
        self,
        reader: FrameReader[MessageT],
        on_message: Callable[[MessageT], None],
        on_lost: Callable[[str | None], None],
    ) -> None:
        self._reader = reader
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._fault: str | None = None

    async def connect(self, sock: socket.socket) -> None:
        """Begin to receive from the socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._fault is not None:
            return
        try:
            messages = self._reader.feed(data)
        except FrameError as error:
            self._fault = str(error)
            self.close()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._on_lost(self._fault)

    def send(self, message: Message) -> None:
        """Send a message. Ignore it if the connection is lost: `on_lost` reports that."""
        if self._transport is not None:
            self._transport.write(encode(message))

    @property
    def unsent(self) -> int:
        """Bytes in the write buffer."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class GoneError(Exception):
    """The process died before it answered."""


class Calls:
    """Open calls by number. `send` sends a message to the process."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._open: dict[int, tuple[asyncio.Future[Any], Sequence[EngineRequest]]] = {}
        self._number = 0

    async def ask(self, make: Callable[[int], Message], submitted: Sequence[EngineRequest] = ()) -> Any:
        """Send a call and return its answer. Raise the error of a refusal, or GoneError."""
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._open[number] = answer, submitted
        try:
            self._send(make(number))
            return await answer
        finally:
            self._open.pop(number, None)

    def settle(self, number: int, value: Any) -> Sequence[EngineRequest]:
        """Set the answer or the error of a call, and return the requests that it submits.

        Ignore a call whose caller was cancelled.
        """
        answer, submitted = self._open.get(number, (None, ()))
        if answer is not None and not answer.done():
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)
        return submitted

    def end(self) -> None:
        """Fail all open calls with GoneError."""
        for number in list(self._open):
            self.settle(number, GoneError())
        self._open.clear()


class SentRequests:
    """Requests sent to the process.

    Attributes:
        report: The last load report of the process; None before the first one.
        unreported: Requests that the report does not include, in the order sent.
    """

    def __init__(self) -> None:
        self.report: LoadReport | None = None
        self.unreported: deque[EngineRequest] = deque()
        self._num_reported = 0

    def hear(self, report: LoadReport | None) -> None:
        """Record a load report, and drop the requests that the process had received before it."""
        if report is None:
            return
        self.report = report
        for _ in range(min(report.received - self._num_reported, len(self.unreported))):
            self.unreported.popleft()
        self._num_reported = report.received


class ProcessLink:
    """The connection to the current process.

    Args:
        receive: Called with each message of the process.
        resumed: Returns a request in the form that the next process resumes, or None if the request has ended.
    """

    def __init__(
        self,
        receive: Callable[[frames.ToGateway], None],
        resumed: Callable[[OpenRequest], EngineRequest | None],
    ) -> None:
        self.calls = Calls(self.send)
        self.given = SentRequests()
        self.num_resumed = 0
        self._receive = receive
        self._resumed = resumed
        self._connection: Connection[frames.ToGateway] | None = None
        self._resuming: deque[OpenRequest] = deque()

    async def open(self, child: ProcessEndpoint, on_lost: Callable[[str | None], None]) -> None:
        """Connect to a process and receive its messages. `on_lost` is called once at the end, see `Connection`."""
        self._connection = Connection(child.reader, self._receive, on_lost)
        await self._connection.connect(child.sock)
        for message in child.read_ahead():
            self._receive(message)

    def send(self, message: frames.Message) -> None:
        """Send a message, if there is a process."""
        if self._connection is not None:
            self._connection.send(message)

    def resume(self, entries: Sequence[OpenRequest]) -> None:
        """Resume requests in the process."""
        self.num_resumed += len(entries)
        self._resuming.extend(entries)
        self._resume_some()

    def _resume_some(self) -> None:
        """Send resumed requests in bounded frames, and continue in a later turn of the event loop if some are left."""
        unsent = 0 if self._connection is None else self._connection.unsent
        left = TURN_TOKENS if unsent < MAX_UNSENT else 0
        while self._resuming and left > 0:
            requests: list[EngineRequest] = []
            size = 0
            while self._resuming and size < FRAME_TOKENS and len(requests) < FRAME_REQUESTS:
                entry = self._resuming.popleft()
                if (request := self._resumed(entry)) is not None:
                    requests.append(request)
                    size += entry.num_computed + 1
            left -= size
            if requests:
                self.given.unreported.extend(requests)
                self.send(frames.Resume(tuple(requests)))
        if self._resuming:
            pause = 0.0 if unsent < MAX_UNSENT else DRAIN_SECONDS
            asyncio.get_running_loop().call_later(pause, self._resume_some)

    def end(self) -> None:
        """Forget the sent requests and fail the open calls of a process that has ended."""
        self.given = SentRequests()
        self._resuming.clear()
        self.calls.end()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Regrouping:
    """The orders and the open requests of one engine.

    Attributes:
        life: Number of processes that have ended so far.
        parted: Whether the process has lost the other engine of its pipeline.
    """

    def __init__(self, calls: Calls, requests: Requests, abort: Callable[[str], None]) -> None:
        self.life = 0
        self.parted = False
        self._calls = calls
        self._requests = requests
        self._abort = abort

    @property
    def is_calm(self) -> bool:
        """Whether no open request is a suspect."""
        return len(self._requests.innocent(self._requests)) == len(self._requests)

    def lost(self) -> None:
        """Record the end of the process. The next process is a whole engine."""
        self.life += 1
        self.parted = False

    async def order(self, order: Order) -> tuple[Past, ...]:
        """Send an order and return its answer. Raise the error with which the process refuses it."""
        try:
            pasts: tuple[Past, ...] = await self._calls.ask(lambda call: frames.Regroup(call, order))
        except GoneError:
            raise EngineUnavailableError("the engine process ended") from None
        return pasts

    async def reset(self, num_units: int) -> None:
        """Make the process a whole engine again, with the open requests. Raise the error of the order."""
        known = tuple(entry.request.request_id for entry in self._requests)
        requests = tuple(entry.resumed() for entry in self._requests.innocent(self._requests.accepted()))
        await self.order(Reset(num_units, known, requests))
        self.parted = False

    def accepted(self) -> list[OpenRequest]:
        """Return the open requests that the process has accepted, in order of arrival."""
        return sorted(self._requests.accepted(), key=lambda entry: entry.arrival)

    def leave(self, request_ids: Collection[str] | None = None) -> list[OpenRequest]:
        """Remove and return the accepted requests that another engine continues: `request_ids`, or all if None."""
        return self._requests.leave(lambda e: request_ids is None or e.request.request_id in request_ids)

    def join(self, entries: Sequence[OpenRequest]) -> None:
        """Add requests of another engine. An order tells the process about them."""
        self._requests.take_over(entries, self._abort)


log = logging.getLogger("tidemill.engine")

RETRY_AFTER = 5.0
"""The `Retry-After` of a request during a restart, in seconds: about the duration of a start."""
START_SECONDS = 900.0
"""Timeout of a start in seconds; a start loads the model, measures step times and runs the first step."""
STOP_SECONDS = 2.0
SPARE_SECONDS = 1.0
"""Pause in seconds between the start of a process and the preparation of its spare."""
_LEVELS = {Origin.ASKED: logging.INFO, Origin.SYSTEM: logging.DEBUG}
STARTED_ANYWAY = "the engine is being started anyway"


class ProcessLife(ABC):
    """The processes of one engine, one after another."""

    def __init__(self, config: EngineConfig, options: ProcessOptions) -> None:
        clock = self._clock = options.clock
        self._requests = Requests(clock)
        self._link = ProcessLink(self._receive, self._requests.resumed)
        self._figures = Figures()
        self.launcher = Launcher(config, options)
        self.judge = DeathJudge(self._requests, options.policy or RestartPolicy(), clock, waits=options.waits)
        self.child: ProcessEndpoint | None = None
        self.pulse: frames.Pulse | None = None
        self.ready = asyncio.Event()
        self.turned = asyncio.Event()
        """Set when a process has started or no further one will; waiting requests check the state again."""
        self.death: str | None = None
        self.dead = asyncio.Event()
        self.draining = self.judged = self.has_worked = False
        self._info: EngineInfo | None = None
        self._options = options
        self._watch = StepWatch(options.silence, self._on_silence, self._read_activity)
        self._cause: str | None = None
        self._lost: asyncio.Future[str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._making_spare: asyncio.Task[None] | None = None
        self._started = self._stopping = False

    @abstractmethod
    def _receive(self, message: frames.ToGateway) -> None:
        """Handle one message of the process."""

    @abstractmethod
    def _on_change(self) -> None:
        """Report that the process has started or ended."""

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the model is not loaded yet"
        return self._info

    @property
    def state(self) -> EngineState:
        if self.death is not None:
            return EngineState.DEAD
        if self.draining:
            return EngineState.DRAINING
        if not self._started:
            return EngineState.STARTING
        if not self.ready.is_set():
            return EngineState.DEGRADED
        return EngineState.READY if self.pulse is None else self.pulse.state

    @property
    def trouble(self) -> str | None:
        """See EngineClient.trouble."""
        if self.death is not None:
            return self.death
        if self.judge.outage.why is not None:
            return f"the system does not let an engine process start: {self.judge.outage.why}; retrying"
        if self._started and not self.ready.is_set():
            return "the engine process ended and is started again"
        return None if self.pulse is None else self.pulse.trouble

    def check_accepting(self) -> None:
        """Raise EngineUnavailableError if the engine drains or is dead."""
        if self.draining:
            raise EngineUnavailableError("The server is shutting down.", retry_after=5.0)
        if self.death is not None:
            raise EngineUnavailableError("The engine is not running.", retry_after=5.0)

    # Messages of the process

    def on_pulse(self, pulse: frames.Pulse) -> None:
        self.pulse = pulse
        if self.ready.is_set():  # an ending process sends no further pulse
            self._watch.begin(None)

    def on_started(self) -> None:
        """Record that the process accepts requests."""
        self._watch.begin(None)
        self.judged = False
        self.ready.set()
        self.turned.set()
        self._on_change()

    def on_not_started(self, message: frames.NotStarted) -> None:
        self._cause, self.judge.refusal = message.cause, message.error.message
        if self._lost is not None and not self._lost.done():
            self._lost.set_exception(message.error.to_error())

    def on_dying(self, message: frames.Dying) -> None:
        self._cause = message.cause
        log.critical("the engine process ends itself: %s", message.message)
        self.ready.clear()
        self._on_change()

    def keep_flight(self, cause: str, child: ProcessEndpoint | None) -> None:
        """Write the last steps of a process to the disk."""
        flights = self._options.flights
        if flights is not None and child is not None and self._info is not None and cause != RENEWED:
            flights.keep(cause, self._info, child.entries)

    # The first process and the last

    def load(self, planned: Callable[[frames.Planned], None]) -> None:
        """Start the first process and wait until its model is loaded. Call it before the event loop runs.

        `planned` is called before the model is loaded. If the start fails, end the process and raise its error.
        """
        child = self.child = self.launcher.spawn()
        try:
            message = child.receive()
            assert isinstance(message, frames.Planned)
            self.launcher.plan(message)
            planned(message)
            message = child.receive()
            assert isinstance(message, frames.Built)
            self._info = message.info
        except BaseException as error:
            self.discard()
            raise (start_error(error) if isinstance(error, OSError) else error) from None

    def discard(self) -> None:
        """End the loaded processes, which will not be used."""
        child, self.child = self.child, None
        if child is not None:
            end_now(child)
        self.launcher.discard()

    def kill(self) -> None:
        """See EngineClient.kill."""
        if self.child is not None:
            self.child.kill()
        self.launcher.kill()

    async def start(self) -> None:
        """See EngineClient.start. Begin with the loaded process, and supervise it."""
        child = self.child or await self.launcher.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._begin(child)
        except BaseException as error:
            await self._end(child, grace=0.0)
            raise (start_error(error) if isinstance(error, OSError | TimeoutError) else error) from None
        self._started = True
        self._task = asyncio.create_task(self._supervise(child), name="tidemill-supervisor")

    async def _shut_down(self) -> None:
        """Ask the process to shut down; kill it after `STOP_SECONDS`."""
        self._stopping = True
        task, self._task = self._task, None
        tasks = [each for each in (task, self._making_spare) if each is not None]
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        if self.child is not None:
            self._link.send(frames.Shutdown())
            await self._end(self.child, grace=STOP_SECONDS)
        self._watch.end()
        await asyncio.to_thread(self.discard)

    async def renew(self, *, anyway: bool = False) -> str:
        """See EngineClient.renew. The next process is prepared before the current one is killed.

        The preparation is skipped for a forced renewal in a fleet, because the other engines continue to serve.
        """
        child, launcher = self.child, self.launcher
        if child is None or not self.ready.is_set() or self.death is not None or not launcher.may_renew:
            return STARTED_ANYWAY
        source = await launcher.look()
        if source == launcher.source and not anyway:
            return "weights and engine have not changed"
        others_go_on = anyway and not self._options.waits
        if launcher.holds_spares and not others_go_on:
            await launcher.hold()
            if self.child is not child or self._stopping:
                await launcher.drop()
                return STARTED_ANYWAY
        launcher.source = source
        self._cause = RENEWED
        self.ready.clear()
        child.kill()
        while not self.ready.is_set() and self.death is None and not self.draining:
            self.turned.clear()
            await self.turned.wait()
        return "another engine process runs"

    # One process after another

    async def _begin(self, child: ProcessEndpoint) -> None:
        """Connect to the child and wait until it accepts requests. Raise the error of a failed start."""
        self.child = child
        self._cause = None
        self.has_worked = False
        lost = self._lost = asyncio.get_running_loop().create_future()
        await self._link.open(child, partial(self._on_lost, lost))
        ready = asyncio.ensure_future(self.ready.wait())
        try:
            await asyncio.wait([ready, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self.ready.is_set():
            error = lost.exception()
            raise error if error is not None else EngineUnavailableError("the engine process ended while it started")
        self.judge.policy.ready(self._clock())
        self.launcher.has_served()
        if self._options.spare and (self._making_spare is None or self._making_spare.done()):
            self._making_spare = asyncio.create_task(self._keep_spare(), name="tidemill-spare")

    async def _keep_spare(self) -> None:
        """Prepare a spare process after `SPARE_SECONDS`; requests that waited for the new process run first."""
        await asyncio.sleep(SPARE_SECONDS)
        await self.launcher.keep_spare()

    async def _supervise(self, child: ProcessEndpoint) -> None:
        try:
            await self._start_again_and_again(child)
        except Exception as error:
            log.critical("the supervisor of the engine process failed", exc_info=error)
            self._give_up("the supervisor of the engine process failed")

    async def _start_again_and_again(self, first: ProcessEndpoint) -> None:
        """Restart the child after each death, until the judge gives up."""
        child: ProcessEndpoint | None = first
        while True:
            cause, ended = await self._outlive(child) if child is not None else (self._cause or START, "an error")
            delay = self.judge.judge(cause, [] if child is None else child.entries, worked=self.has_worked)
            self.turned.set()
            self._figures.restarts[cause] += 1
            self.judged = True
            self._on_change()
            if delay is None:
                self._give_up(f"the engine process ended too often, at last by {ended} ({cause})")
                return
            log.log(
                _LEVELS.get(origin_of(cause), logging.ERROR),
                "the engine process ended by %s (%s); it is started again %s, %d requests wait for it",
                ended, cause, f"in {delay:.0f} s" if delay else "at once", len(self._requests),
            )  # fmt: skip
            await asyncio.sleep(delay)
            child = await self._restart()

    async def _restart(self) -> ProcessEndpoint | None:
        """Start the next child and return it; None if no process could be started.

        The child may have died already; `_outlive` reports that like any other death.
        """
        self._cause = None
        try:
            child = await self.launcher.start()
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
        """Record and log why a process did not start."""
        if is_of_system(error):
            self._cause, self.judge.refusal = SYSTEM, str(error) or type(error).__name__
            return
        if isinstance(error, TimeoutError):
            self._cause = START
        log.error("the engine process did not start: %s", error or "it took too long")

    async def _outlive(self, child: ProcessEndpoint) -> tuple[str, str]:
        """Wait for the death of a child. Return its cause and its exit status as text."""
        assert self._lost is not None
        await asyncio.wait([self._lost])
        if not self._lost.cancelled():
            self._lost.exception()
        ended = await self._end(child, grace=0.0)
        cause = self._cause or ("killed" if ended == "signal 9" else "crash")
        self.keep_flight(cause, child)
        return cause, ended

    async def _end(self, child: ProcessEndpoint, grace: float) -> str:
        """End a child and fail its open calls. Kill it after `grace` seconds. Return its exit status as text."""
        self.down()
        ended = ""
        if grace > 0:
            with suppress(TimeoutError):
                ended = await reaped(child, grace)
        if not ended:
            child.kill()
            ended = await reaped(child)
        self._link.close()
        if self.child is child:
            self.child = None
        return ended

    def down(self) -> None:
        """Record that no process runs."""
        self.ready.clear()
        self.judged = False
        self.pulse = None
        self._watch.end()
        self._link.end()
        self._figures.process_ended()
        self._on_change()

    def _give_up(self, why: str) -> None:
        self.death = why
        log.critical("%s", why)
        self._on_change()
        self._requests.end_all("The engine stopped while this request was running.")
        self._on_change()
        self.turned.set()
        self.dead.set()

    def _on_lost(self, lost: "asyncio.Future[str]", fault: str | None) -> None:
        """Handle the end of a child's connection."""
        if fault is not None:
            self._cause = self._cause or "protocol"
            log.error("the engine process sent an invalid message: %s", fault)
        if not lost.done():
            lost.set_result("")

    def _read_activity(self) -> Activity | None:
        return None if self.child is None else self.child.activity()

    def _on_silence(self, limit: float) -> None:
        """Handle a missing pulse: make the child write the stacks of its threads, then kill it."""
        log.critical("the engine process has sent no message and made no progress for %.0f s", limit)
        self._cause = self._cause or "silent"
        child = self.child
        if child is not None:
            child.dump()
            asyncio.get_running_loop().call_later(1.0, child.kill)
