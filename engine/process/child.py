"""The engine process: it loads a model, runs its steps and sends the outputs over its socket.

    python -P -m engine.process.child DESCRIPTOR

The process ends when the gateway ends. It kills itself after a fatal failure; the gateway then starts the next process,
which continues the requests.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import logging
import math
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine import flight, openmp
from engine.api import EngineRequest, FinishReason, RequestOutput, RequestTimes
from engine.client import LoadReport
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineStepError, EngineUnavailableError, ErrorInfo, TidemillError
from engine.flight import FlightRecorder
from engine.machine.child import say, serve_socket, settle
from engine.machine.folders import user_folder
from engine.panics import as_error
from engine.process import frames
from engine.process.frames import Past
from engine.process.life import Connection
from engine.process.stage import PipelineStage
from engine.process.suspects import START, SYSTEM, is_of_system, start_error

log = logging.getLogger("tidemill.engine")

PULSE_SECONDS = 0.5
REPORT_SECONDS = 0.1
"""Minimum seconds between load reports with outputs: ten per second, as LARRY's load balancer requires."""
OOM_SCORE = "500"
"""Makes the kernel's OOM killer choose this process before the gateway, because it can be restarted."""
QUIETLY = 10
"""The nice value of a process while it imports modules: a tenth of a core on a busy machine."""
LAST_WORDS_SECONDS = 0.1
"""Time in seconds for the `Dying` message to leave the process."""

Plan = Callable[[frames.Planned], None]
Prepare = Callable[[frames.Launch], frames.Planned]
Build = Callable[[EngineConfig, Plan], Engine]
Work = Callable[[TidemillError | None], None]
"""Called when requests are prepared, with the error if that failed."""


def prepare(launch: frames.Launch) -> frames.Planned:
    """Prepare a start without loading weights or using the device, while another process may run. Raise ConfigError."""
    config = launch.config
    if launch.spare:
        if launch.waiting:
            os.environ[openmp.POLICY] = launch.waiting
    elif openmp.must_measure(config, os.environ):  # before torch is imported, while the machine is idle
        return frames.Planned("", ())
    else:
        openmp.announce(config, say)
    importing = threading.Thread(target=_import_quietly)
    importing.start()
    importing.join()
    if launch.spare:
        return frames.Planned("", ())
    return _planned(importlib.import_module("engine.build").plan_launch(config, beside=True))


def _import_quietly() -> None:
    """Import the engine in a thread with a raised nice value; the rest of the process keeps its own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), QUIETLY)
    importlib.import_module("engine.build")


def _planned(plan: Any) -> frames.Planned:
    return frames.Planned(str(plan.folder), tuple(plan.notes), os.environ.get(openmp.POLICY, ""))


def build(config: EngineConfig, planned: Plan) -> Engine:
    """Build the engine that `tidemill serve` runs. Raise ConfigError."""
    openmp.announce(config, say)
    with contextlib.suppress(ConfigError):  # beside the profiles, so that a container keeps them
        for compiler in ("triton", "humming"):
            folder = user_folder("cache", "--profile-dir") / compiler
            os.environ.setdefault(f"{compiler.upper()}_CACHE_DIR", str(folder))
    module: Any = importlib.import_module("engine.build")  # imports torch
    plan = module.plan_launch(config)
    planned(_planned(plan))
    built: Engine = module.build_engine(config, plan, say)
    return built


def main(arguments: list[str]) -> None:
    run(socket.socket(fileno=int(arguments[0])), build, prepare)


def run(sock: socket.socket, make: Build, prepare: Prepare) -> None:
    """Serve the engine that `make` builds until the gateway ends or sends `Shutdown`."""
    serve_socket(sock, _die)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    sock.setblocking(True)
    reader = frames.engine_reader()
    launch, *early = _first_messages(sock, reader)
    assert isinstance(launch, frames.Launch)

    def send_plan(planned: frames.Planned) -> None:
        sock.sendall(frames.encode(planned))

    logging.basicConfig(level=launch.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        launch.place.move_in(os.environ)
        if launch.held:
            sock.sendall(frames.encode(prepare(launch)))
            _begin, *early = early or _first_messages(sock, reader)
        settle()  # before step times are measured, as in service
        engine = make(launch.config, send_plan)
        sock.sendall(frames.encode(frames.Built(engine.info)))
    except Exception as error:
        if not isinstance(error, TidemillError) and not is_of_system(error):
            raise
        sock.sendall(frames.encode(_not_started(error, start_error(error))))
        return
    settle()
    server = EngineServer(engine)
    if launch.recorder is not None:
        server.be_recorded(mmap.mmap(launch.recorder, flight.SIZE))
        os.close(launch.recorder)
    asyncio.run(server.serve(sock, reader, early))


def _not_started(error: Exception, shown: TidemillError) -> frames.NotStarted:
    return frames.NotStarted(ErrorInfo.of(shown), SYSTEM if is_of_system(error) else START)


def _first_messages(sock: socket.socket, reader: frames.FrameReader[frames.ToEngine]) -> list[frames.ToEngine]:
    while True:
        data = sock.recv(1 << 16)
        if not data:
            sys.exit(0)  # the gateway has ended
        if messages := reader.feed(data):
            return messages


def _die() -> None:
    """Kill this process and its children; the process leads its own session."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class EngineServer:
    """Carries out the gateway's messages on an engine, and sends all outputs of a step in one message."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection[frames.ToEngine] | None = None
        self._outbox: list[RequestOutput] = []
        self._shutdown = asyncio.Event()
        self._ending = False
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._recorder: FlightRecorder | None = None
        self._num_received = 0
        self._reported = -math.inf
        self._tasks: set[asyncio.Task[None]] = set()
        self._stage = PipelineStage(engine, self._put, self._resume, self._knows, lambda: self._send(frames.Parted()))

    async def serve(
        self, sock: socket.socket, reader: frames.FrameReader[frames.ToEngine], early: list[frames.ToEngine]
    ) -> None:
        """Start the engine and serve it until `Shutdown`."""
        engine = self._engine
        connection = self._connection = Connection(reader, self.receive, lambda _fault: _die())
        await connection.connect(sock)
        try:
            await engine.start()
        except BaseException as raised:
            error = as_error(raised)
            log.critical("the first step failed", exc_info=error)
            known = error if isinstance(error, TidemillError) else EngineStepError("The first model step failed.")
            connection.send(_not_started(error, known))
            await asyncio.sleep(LAST_WORDS_SECONDS)
            return
        engine.on_death = self._end
        connection.send(frames.Started())
        for message in early:
            self.receive(message)
        beat = asyncio.create_task(self._beat(), name="tidemill-pulse")
        await self._shutdown.wait()
        beat.cancel()
        await asyncio.wait([beat])
        await engine.stop()

    async def _beat(self) -> None:
        while True:
            self._send(frames.Pulse(self._engine.state, self._engine.trouble, self._load()))
            await asyncio.sleep(PULSE_SECONDS)

    def receive(self, message: frames.ToEngine) -> None:
        """Handle one message of the gateway."""
        if self._ending:
            return  # the gateway sends it to the next process again
        match message:
            case frames.Submit(call, requests):
                self._num_received += len(requests)
                self._prepare(requests, partial(self._submit, call, requests))
            case frames.Resume(requests):
                self._num_received += len(requests)
                for request in requests:
                    self._resume(request)
            case frames.Abort(request_id, reason):
                if (preparing := self._preparing.pop(request_id, None)) is not None:
                    preparing.cancel()
                self._engine.drop(request_id, reason)
                self._stage.abort(request_id)
            case frames.SetLane(job, lane):
                self._engine.set_lane(job, lane)
            case frames.AskStats(call):
                self._send(frames.Answer(call, self._engine.stats()))
            case frames.Regroup(call, order):
                self._do(self._regroup(call, self._stage.take(order)))
            case frames.Shutdown():
                self._shutdown.set()
            case _:
                raise AssertionError(f"{message} comes once, and first")

    def be_recorded(self, memory: mmap.mmap) -> None:
        """Record every step in `memory`. The gateway saves the recording after a `StepFailed` message."""
        self._recorder = FlightRecorder(memory, lambda: self._send(frames.StepFailed()))
        self._engine.be_recorded(self._recorder)

    def _prepare(self, requests: Sequence[EngineRequest], work: Work) -> None:
        """Call `work` when the grammars of the requests are ready; at once if they have none."""
        if not any(request.sampling.grammar for request in requests):
            work(None)
            return
        task = self._do(self._when_prepared(requests, work))
        self._preparing.update((request.request_id, task) for request in requests)
        self._note_preparing()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _regroup(self, call: int, work: Awaitable[tuple[Past, ...]]) -> None:
        """Await an order, send the pending outputs, then send the answer."""
        try:
            pasts = await work
        except TidemillError as error:
            self._send(frames.Refused(call, ErrorInfo.of(error)))
        else:
            self._flush()
            self._send(frames.Answer(call, pasts))

    def _resume(self, request: EngineRequest) -> None:
        self._prepare((request,), partial(self._resume_prepared, request))

    def _knows(self, request_id: str) -> bool:
        return request_id in self._preparing or self._engine.serves(request_id, self._put)

    def _note_preparing(self) -> None:
        if self._recorder is not None:
            self._recorder.preparing(self._preparing, time.monotonic())

    async def _when_prepared(self, requests: Sequence[EngineRequest], work: Work) -> None:
        """Prepare the grammars of requests. Run no step while a suspect is prepared, so that a death has one cause."""
        fault: TidemillError | None = None
        on_trial = any(request.resumed is not None and request.resumed.apart_until for request in requests)
        try:
            async with self._engine.at_rest() if on_trial else contextlib.nullcontext():
                await self._engine.prepare(requests)
        except BaseException as raised:
            error = as_error(raised)
            if not isinstance(error, TidemillError):
                log.error("a request could not be prepared", exc_info=error)
                error = EngineStepError("The server failed to prepare this request.")
            fault = error
        finally:
            for request in requests:
                self._preparing.pop(request.request_id, None)
            self._note_preparing()
        work(fault)

    def _submit(self, call: int, requests: Sequence[EngineRequest], fault: TidemillError | None) -> None:
        try:
            if fault is not None:
                raise fault
            if self._stage.closed:
                raise EngineUnavailableError("The engine computes for another one.")
            self._engine.open((request, self._put) for request in requests)
        except TidemillError as error:
            self._send(frames.Refused(call, ErrorInfo.of(error)))
        else:
            self._send(frames.Answer(call))

    def _resume_prepared(self, request: EngineRequest, fault: TidemillError | None) -> None:
        if self._stage.closed:
            return  # the request has moved to the other engine
        try:
            if fault is not None:
                raise fault
            self._engine.open([(request, self._put)])
        except TidemillError as error:
            times = request.resumed.times if request.resumed is not None else RequestTimes(0.0)
            info = ErrorInfo.of(error)
            self._put(RequestOutput(request.request_id, (), None, times, 0, 0, 0, FinishReason.ERROR, error=info))

    def _put(self, output: RequestOutput) -> bool:
        """Queue an output for sending. Always return True, because the gateway bounds the stream of each reader.

        Outputs of an ending engine are dropped; the next process continues its requests.
        """
        if self._ending:
            return True
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(output)
        return True

    def _flush(self) -> None:
        outputs, self._outbox = tuple(self._outbox), []
        is_due = time.monotonic() - self._reported >= REPORT_SECONDS
        self._send(frames.Outputs(outputs, self._load() if is_due else None))

    def _load(self) -> LoadReport:
        self._reported = time.monotonic()
        return self._engine.load()._replace(received=self._num_received)

    def _send(self, message: frames.Message) -> None:
        assert self._connection is not None
        self._connection.send(message)

    def _end(self, cause: str, why: str) -> None:
        """End the process after a fatal failure: dump the stacks of all threads, send `Dying`, and die."""
        self._ending = True
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback()
        self._send(frames.Dying(cause, why))
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, _die)


if __name__ == "__main__":
    main(sys.argv[1:])
