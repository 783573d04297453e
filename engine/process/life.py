"""Start, watch and restart the processes of one engine."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from engine.api import EngineInfo, EngineState
from engine.errors import EngineUnavailableError
from engine.loop.watchdog import StepWatch
from engine.machine.activity import Activity
from engine.process import frames
from engine.process.launcher import Launcher, ProcessEndpoint, ProcessOptions, end_now, reaped
from engine.process.link import ProcessLink
from engine.process.requests import DeathJudge, Requests
from engine.process.suspects import RENEWED, START, SYSTEM, Origin, is_of_system, origin_of, start_error
from engine.process.totals import Figures

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


class ProcessLife:
    """The processes of one engine, one after another.

    `down` is called when no process runs any more, `changed` when a process starts or ends.
    """

    def __init__(
        self,
        launcher: Launcher,
        link: ProcessLink,
        requests: Requests,
        figures: Figures,
        judge: DeathJudge,
        options: ProcessOptions,
        down: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self.launcher = launcher
        self.judge = judge
        self.info: EngineInfo | None = None
        self.child: ProcessEndpoint | None = None
        self.pulse: frames.Pulse | None = None
        self.ready = asyncio.Event()
        self.turned = asyncio.Event()
        """Set when a process has started or no further one will; waiting requests check the state again."""
        self.death: str | None = None
        self.dead = asyncio.Event()
        self.draining = self.judged = self.has_worked = False
        self._link = link
        self._requests = requests
        self._figures = figures
        self._options = options
        self._watch = StepWatch(options.silence, self._on_silence, self._read_activity)
        self._down = down
        self._changed = changed
        self._cause: str | None = None
        self._lost: asyncio.Future[str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._making_spare: asyncio.Task[None] | None = None
        self._started = self._stopping = False

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
        self._changed()

    def on_not_started(self, message: frames.NotStarted) -> None:
        self._cause, self.judge.refusal = message.cause, message.error.message
        if self._lost is not None and not self._lost.done():
            self._lost.set_exception(message.error.to_error())

    def on_dying(self, message: frames.Dying) -> None:
        self._cause = message.cause
        log.critical("the engine process ends itself: %s", message.message)
        self.ready.clear()
        self._changed()

    def keep_flight(self, cause: str, child: ProcessEndpoint | None) -> None:
        """Write the last steps of a process to the disk."""
        flights = self._options.flights
        if flights is not None and child is not None and self.info is not None and cause != RENEWED:
            flights.keep(cause, self.info, child.entries)

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
            self.info = message.info
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
        """Kill all processes at once."""
        if self.child is not None:
            self.child.kill()
        self.launcher.kill()

    async def start(self) -> None:
        """Begin serving with the first process and supervise it. Raise the error of a failed start."""
        child = self.child or await self.launcher.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._begin(child)
        except BaseException as error:
            await self._end(child, grace=0.0)
            raise (start_error(error) if isinstance(error, OSError | TimeoutError) else error) from None
        self._started = True
        self._task = asyncio.create_task(self._supervise(child), name="tidemill-supervisor")

    @property
    def is_supervised(self) -> bool:
        """Whether dead processes are restarted."""
        return self._task is not None

    async def stop(self) -> None:
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

    async def renew(self, *, anyway: bool) -> str:
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
        self.judge.policy.ready(self._options.clock())
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
            self._changed()
            if delay is None:
                self._give_up(f"the engine process ended too often, at last by {ended} ({cause})")
                return
            log.log(
                _LEVELS.get(origin_of(cause), logging.ERROR),
                "the engine process ended by %s (%s); it is started again %s, %d requests wait for it",
                ended, cause, f"in {delay:.0f} s" if delay else "at once", len(self._requests.open),
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
        self._down()
        self._changed()

    def _give_up(self, why: str) -> None:
        self.death = why
        log.critical("%s", why)
        self._changed()
        self._requests.open.end_all(self._options.clock(), "The engine stopped while this request was running.")
        self._changed()
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
