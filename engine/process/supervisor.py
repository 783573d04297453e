"""One child process after another: how one is started, told apart from the last, and brought to its end.

Knows nothing of requests.
"""

import asyncio
import contextlib
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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from engine.errors import EngineUnavailableError
from engine.flight import recorder as flight
from engine.machine.activity import Activity, read_activity
from engine.machine.child import start_process
from engine.process import frames

log = logging.getLogger("tidemill.engine")

REAP_SECONDS = 0.05
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


class ProcessEndpoint(ABC):
    """Our end of the socket of an engine's process, wherever that runs."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = frames.gateway_reader()
        self._read: list[frames.ToGateway] = []

    def receive(self) -> frames.ToGateway:
        """The next message, waited for: only before an event loop reads the socket. Raises what kept the child from
        starting, or EngineUnavailableError if it ended without a word."""
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
        """What has been read from the socket and by nobody else."""
        messages, self._read = self._read, []
        return messages

    @property
    @abstractmethod
    def entries(self) -> list[flight.AnyEntry]:
        """What the flight recorder has written, or has left."""

    def activity(self) -> Activity | None:
        """What its threads have done; None where that is not known."""
        return None

    @abstractmethod
    def dump(self) -> None:
        """Have it write the stacks of its threads to its standard error, as its last act."""

    @abstractmethod
    def kill(self) -> None:
        """End it and what it has started, at once."""

    @abstractmethod
    def reap(self, timeout: float | None = None) -> str:
        """Wait for its end, which is known to be near, and close the socket; how it ended. Raises TimeoutError."""


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment whose malloc asks for huge pages where it maps memory, unless it says something of that itself.

    A step on a CPU reads all weights, and its processor fetches ahead within a page only. glibc 2.35 and later do so;
    others do not know the name.
    """
    tunables = environment.get(_TUNABLES, "")
    if _HUGE_PAGES not in tunables:
        tunables = ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))
    return {**environment, _TUNABLES: tunables}


class Child(ProcessEndpoint):
    """A running child of this process; its flight recorder writes into memory of both."""

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket, recording: mmap.mmap) -> None:
        super().__init__(sock)
        self.process = process
        self._recording = recording
        self._reaping = threading.Lock()
        self._entries: list[flight.AnyEntry] | None = None

    @classmethod
    def spawn(cls, command: Sequence[str], launch: frames.Launch, pid_file: Path | None = None) -> "Child":
        """Start `command` with the number of its descriptor behind it, and tell it what to load. Raises OSError.

        In a session of its own: what a terminal sends to a group is not for it, and what it starts can be ended with
        it.
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
        """Whether there is something to read from it, or it is gone."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def begin(self, pid_file: Path | None) -> None:
        """Have a process that was held load and run. Raises OSError when it is gone already, and reaps it."""
        self._take_over(pid_file)
        try:
            self.sock.sendall(frames.encode(frames.Begin()))
        except OSError:
            self.kill()
            self.reap()
            raise

    def _take_over(self, pid_file: Path | None) -> None:
        """Note the number of the process for people. A disk that takes nothing does not end the process, but the number
        of the last one must not stay."""
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
        if self.process.returncode is None:  # until it is reaped its number belongs to nobody else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self, timeout: float | None = None) -> str:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        with self._reaping:  # a shutdown may come while somebody waits for its end
            self.sock.close()
            if self._entries is None:
                self._entries = flight.read(self._recording)
                self._recording.close()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _shared_file() -> IO[bytes]:
    """A file without a name, where the system can in memory."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("tidemill-flight"), "w+b")
    return tempfile.TemporaryFile()


def _write(path: Path, text: str) -> None:
    """So that nobody reads half of it."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)


def remove(pid_file: Path | None) -> None:
    if pid_file is not None:
        with contextlib.suppress(OSError):
            pid_file.unlink(missing_ok=True)


async def reaped(child: ProcessEndpoint, within: float | None = None) -> str:
    """Return how a child ended. Raises TimeoutError. Polls where the system gives no thread to wait in."""
    try:
        return await asyncio.to_thread(child.reap, within)
    except RuntimeError:
        async with asyncio.timeout(within):
            while True:
                with contextlib.suppress(TimeoutError):
                    return child.reap(0.0)
                await asyncio.sleep(REAP_SECONDS)
