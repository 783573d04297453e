"""Start, kill and reap a child process. This module does not deal with requests."""

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

from engine import flight
from engine.errors import EngineUnavailableError
from engine.machine.activity import Activity, read_activity
from engine.machine.processes import start_process
from engine.process import frames

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
