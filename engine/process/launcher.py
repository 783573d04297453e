"""Start, kill and reap the processes of one engine, and hold the next process ready while one runs."""

import asyncio
import contextlib
import hashlib
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

import msgspec

import engine
from engine import flight
from engine.config import EngineConfig, parse_adapters
from engine.errors import ConfigError, EngineUnavailableError
from engine.flight import Flights
from engine.loop.watchdog import StepLimits
from engine.machine.activity import Activity, read_activity
from engine.machine.child import python_module, start_process, starter
from engine.machine.facts import Resources, available_memory
from engine.process import frames
from engine.process.requests import RestartPolicy
from engine.process.suspects import start_error

log = logging.getLogger("tidemill.engine")

REAP_SECONDS = 0.05
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


class ProcessEndpoint(ABC):
    """The gateway's end of the socket of an engine process, on this or another machine."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = frames.gateway_reader()
        self._read: list[frames.ToGateway] = []

    def receive(self) -> frames.ToGateway:
        """Wait for the next message and return it. Call it only before an event loop reads the socket.

        Raise the error of a `NotStarted` message, or EngineUnavailableError if the process ended without one.
        """
        while not self._read:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EngineUnavailableError(f"the engine process ended while it started ({self.reap()})")
            self._read += self.reader.feed(data)
        message = self._read.pop(0)
        if isinstance(message, frames.NotStarted):
            raise message.error.to_error()
        return message

    def read_ahead(self) -> list[frames.ToGateway]:
        """Return and clear the messages that `receive` has read but not returned."""
        messages, self._read = self._read, []
        return messages

    @property
    @abstractmethod
    def entries(self) -> list[flight.AnyEntry]:
        """The entries of the flight recorder, also after the end of the process."""

    def activity(self) -> Activity | None:
        """Return the activity of the process's threads; None if it is unknown."""
        return None

    @abstractmethod
    def dump(self) -> None:
        """Make the process write the stacks of its threads to standard error and end."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and its children at once."""

    @abstractmethod
    def reap(self, timeout: float | None = None) -> str:
        """Wait for the end of the process and close the socket. Return the exit status as text. Raise TimeoutError."""


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with huge pages enabled in malloc, unless it already sets that tunable.

    A step on a CPU reads all weights, and the hardware prefetcher stops at page boundaries. The tunable needs glibc
    2.35; older versions ignore it.
    """
    tunables = environment.get(_TUNABLES, "")
    if _HUGE_PAGES not in tunables:
        tunables = ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))
    return {**environment, _TUNABLES: tunables}


class Child(ProcessEndpoint):
    """A running child of this process. Its flight recorder writes into shared memory."""

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket, recording: mmap.mmap) -> None:
        super().__init__(sock)
        self.process = process
        self._recording = recording
        self._reaping = threading.Lock()
        self._entries: list[flight.AnyEntry] | None = None

    @classmethod
    def spawn(cls, command: Sequence[str], launch: frames.Launch, pid_file: Path | None = None) -> "Child":
        """Start `command` with the number of its socket descriptor appended, and send `launch`. Raise OSError.

        The process gets its own session: it receives no signals of the terminal, and its children are killed with it.
        """
        ours, theirs = socket.socketpair()
        with theirs, _shared_file() as shared:
            shared.truncate(flight.SIZE)
            recording = mmap.mmap(shared.fileno(), flight.SIZE)
            process = start_process(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), shared.fileno()],
                start_new_session=True,
                env=with_huge_pages(os.environ),
            )
            launch = msgspec.structs.replace(launch, recorder=shared.fileno())
        child = cls(process, ours, recording)
        try:
            ours.sendall(frames.encode(launch))
            if not launch.held:
                child._take_over(pid_file)
        except OSError:
            child.kill()
            child.reap()
            raise
        return child

    @property
    def has_spoken(self) -> bool:
        """Whether the socket is readable: the process has sent a message or has ended."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def begin(self, pid_file: Path | None) -> None:
        """Make a held process load and run. If it has ended, reap it and raise OSError."""
        self._take_over(pid_file)
        try:
            self.sock.sendall(frames.encode(frames.Begin()))
        except OSError:
            self.kill()
            self.reap()
            raise

    def _take_over(self, pid_file: Path | None) -> None:
        """Write the process id to the pid file for operators.

        If the disk is full, log a warning and remove the file, so that no stale id remains.
        """
        if pid_file is None:
            return
        try:
            _write(pid_file, f"{self.process.pid}\n")
        except OSError as error:
            log.warning("%s could not be written: %s", pid_file, error.strerror)
            remove(pid_file)

    @property
    def entries(self) -> list[flight.AnyEntry]:
        return flight.read(self._recording) if self._entries is None else self._entries

    def activity(self) -> Activity | None:
        return read_activity([self.process.pid])

    def dump(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)

    def kill(self) -> None:
        if self.process.returncode is None:  # the system does not reuse the id before the process is reaped
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self, timeout: float | None = None) -> str:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        with self._reaping:  # a shutdown may reap the process at the same time
            self.sock.close()
            if self._entries is None:
                self._entries = flight.read(self._recording)
                self._recording.close()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _shared_file() -> IO[bytes]:
    """Return an unnamed file, in memory on Linux."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("tidemill-flight"), "w+b")
    return tempfile.TemporaryFile()


def _write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)


def remove(pid_file: Path | None) -> None:
    if pid_file is not None:
        with contextlib.suppress(OSError):
            pid_file.unlink(missing_ok=True)


async def reaped(child: ProcessEndpoint, within: float | None = None) -> str:
    """Wait for the end of a child and return its exit status as text. Raise TimeoutError.

    Poll if the system cannot start a thread to wait in.
    """
    try:
        return await asyncio.to_thread(child.reap, within)
    except RuntimeError:
        async with asyncio.timeout(within):
            while True:
                with contextlib.suppress(TimeoutError):
                    return child.reap(0.0)
                await asyncio.sleep(REAP_SECONDS)


CHILD = "engine.process.child"
ANYWHERE = Resources()
SILENCE = StepLimits(unknown=10.0)
"""Time without a message after which a process counts as hung: its event loop is blocked, or it is stopped."""
HOLD_SECONDS = 120.0
"""Timeout in seconds until a held process is ready to load."""
SPARE_ROOM = 1 << 31
"""Free memory in bytes required for a spare process, which uses about a tenth of that."""

TEXT = (".json", ".jinja", ".model", ".txt")
INDEX = ".index.json"
"""The weight index, which counts as a weight file."""

EndpointT = TypeVar("EndpointT", bound=ProcessEndpoint)


@dataclass(frozen=True, slots=True)
class Source:
    """The files from which an engine process was started.

    The gateway has read the model's configuration and tokenizer, so these must be the same in the next process. Weights
    and the engine's code may differ.
    """

    files: dict[str, tuple[int, int]]  # size and mtime (ns) of the files of weights, adapters and code
    texts: dict[str, str]  # digests of the files that the gateway has read, too

    @classmethod
    def of(cls, folder: Path, adapters: Iterable[Path] = ()) -> "Source":
        """Return the current source of a model folder and its adapters. Raise OSError."""
        code = Path(engine.__file__).parent
        found = [path for path in folder.iterdir() if path.is_file()]
        texts = [path for path in found if path.suffix in TEXT and not path.name.endswith(INDEX)]
        beside = [path for each in adapters for path in each.iterdir() if path.is_file()]
        files = [path for path in found if path not in texts] + beside + list(code.rglob("*.py"))
        return cls({str(path): _stamp(path) for path in files}, {path.name: _digest(path) for path in texts})

    def refusal(self, later: "Source") -> str | None:
        """Return why a process from the source `later` may not replace this one; None if it may."""
        names = sorted(self.texts.keys() | later.texts.keys())
        other = [name for name in names if self.texts.get(name) != later.texts.get(name)]
        return f"{', '.join(other)} changed after the server read them; restart the server" if other else None


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How the processes of one engine are started, watched and restarted.

    Attributes:
        place: The devices and cores of a process.
        pid_file: File for the id of the running process.
        command: Command that starts a process; the number of the socket's descriptor is appended.
        spawn: Starts a process that is not a child of the gateway.
        spare: Whether the next process is kept ready while one runs.
        waits: Whether requests wait here for the next process; False if a fleet can send them to another engine.
        policy: When a dead process is restarted.
        silence: Maximum time without a message.
        flights: Stores the flight recordings of dead processes.
        changed: Called when a process starts or ends, and when a request ends.
    """

    log_level: str = "info"
    place: Resources = ANYWHERE
    pid_file: Path | None = None
    command: Sequence[str] | None = None
    spawn: Callable[[frames.Launch], ProcessEndpoint] | None = None
    spare: bool = False
    waits: bool = True
    policy: RestartPolicy | None = None
    silence: StepLimits = SILENCE
    flights: Flights | None = None
    changed: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic


class Launcher:
    """Starts the processes of one engine.

    Attributes:
        launch: The first message to the next process.
        source: The source of the running process; None until it is known.
    """

    def __init__(self, config: EngineConfig, options: ProcessOptions) -> None:
        self.launch = frames.Launch(config, options.log_level, place=options.place)
        self.source: Source | None = None
        self._config = config
        self._command = options.command or python_module(CHILD)
        self._spawn_elsewhere = options.spawn
        self._pid_file = options.pid_file
        self._folder: Path | None = None
        self._adapters = [each.folder for each in parse_adapters(config.lora)]
        self._held: Child | None = None
        self._is_spare = False
        self._holding = asyncio.Lock()

    def plan(self, planned: frames.Planned) -> None:
        """Record the plan of a process, and the source if the model has a folder."""
        self.launch = msgspec.structs.replace(self.launch, waiting=planned.waiting)
        if planned.folder:
            self._folder = Path(planned.folder)
            self.source = Source.of(self._folder, self._adapters)

    def has_served(self) -> None:
        """Skip the self-test in later starts: the same model has served on this machine."""
        self.launch = msgspec.structs.replace(self.launch, config=replace(self.launch.config, self_test=False))

    # Starting

    def spawn(self) -> ProcessEndpoint:
        """Return the held process, or start a new one. Raise OSError.

        A spare that is not ready yet is ended, because finishing it takes longer than a new start.
        """
        if self._spawn_elsewhere is not None:
            return self._spawn_elsewhere(self.launch)
        held, self._held = self._held, None
        if held is not None and self._is_spare and not held.has_spoken:
            end_now(held)
        elif held is not None:
            try:
                held.begin(self._pid_file)
            except OSError as error:
                log.warning("the engine process that was held is gone (%s)", error)
            else:
                return held
        return Child.spawn(self._command, self.launch, self._pid_file)

    async def start(self) -> ProcessEndpoint:
        """Do the same as `spawn` in a thread."""
        return await _beside(self.spawn)

    # Holding the next one

    @property
    def may_renew(self) -> bool:
        """Whether the model has a folder and no renewal is under way."""
        return self._folder is not None and (self._held is None or self._is_spare)

    @property
    def holds_spares(self) -> bool:
        """Whether the next process can be held while one runs. Remote places have room for one process only."""
        return self._spawn_elsewhere is None

    async def look(self) -> Source:
        """Return the source of the next process. Raise ConfigError if it may not replace the running one."""
        assert self._folder is not None, "the model has no folder"
        source = await asyncio.to_thread(Source.of, self._folder, self._adapters)
        refusal = self.source.refusal(source) if self.source is not None else None
        if refusal is not None:
            raise ConfigError(refusal)
        return source

    async def hold(self) -> None:
        """Prepare a process from the current files that can load at once. Raise the error of a failed preparation."""
        await self.drop()
        async with self._holding:
            launch = msgspec.structs.replace(self.launch, config=self._config, held=True)
            child = await _beside(lambda: Child.spawn(self._command, launch))
            self._held, self._is_spare = await asyncio.to_thread(_wait_until_ready, child), False

    async def keep_spare(self) -> None:
        """Start a spare process if memory allows. It imports its modules and waits until the running process dies."""
        async with self._holding:
            if self._held is not None or not self.holds_spares or available_memory() < SPARE_ROOM:
                return
            launch = msgspec.structs.replace(self.launch, held=True, spare=True)
            try:
                self._held = await _beside(lambda: Child.spawn(self._command, launch))
            except (OSError, RuntimeError) as error:
                log.warning("no spare engine process: %s", error)
            self._is_spare = True

    def kill(self) -> None:
        """Kill the held process and remove the pid file. Call it when no process runs."""
        if self._held is not None:
            self._held.kill()
        remove(self._pid_file)

    def discard(self) -> None:
        """Do the same as `kill`, and wait for the end of the held process."""
        self._end_held()
        remove(self._pid_file)

    async def drop(self) -> None:
        """End the held process, which will not be used."""
        await asyncio.to_thread(self._end_held)

    def _end_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            end_now(held)


def _wait_until_ready(child: Child) -> Child:
    child.sock.settimeout(HOLD_SECONDS)
    try:
        child.receive()
    except BaseException as error:
        end_now(child)
        raise (start_error(error) if isinstance(error, OSError) else error) from None
    child.sock.settimeout(None)
    return child


async def _beside(spawn: Callable[[], EndpointT]) -> EndpointT:
    """Start a process in a thread and return it. End the process if the caller is cancelled."""
    spawning = asyncio.get_running_loop().run_in_executor(starter, spawn)
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:  # the thread still starts the process, and no other code can end it
        await asyncio.to_thread(end_now, await spawning)
        raise


def end_now(child: ProcessEndpoint) -> None:
    child.kill()
    child.reap()
