"""Faults of the disk under a state folder, put on and taken away while a server runs."""

import errno
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.chaos.server import Server

SOURCE = Path(__file__).with_name("disk_fault.c")
WRITE, SYNC, READ, NAME = 1, 2, 4, 8
"""Kinds of system calls, as in disk_fault.c."""
TMPFS = "16m"


class Fault(Protocol):
    """Something wrong with the machine. `refuses`: nothing can be stored meanwhile, so an upload gets 507."""

    @property
    def name(self) -> str: ...

    @property
    def refuses(self) -> bool: ...

    def begin(self, server: Server) -> None:
        """Put the fault on."""

    def end(self, server: Server) -> None:
        """Take the fault away."""


class Page:
    """The page of memory that the preloaded library reads."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 16)

    def set(self, operations: int = 0, error: int = 0, percent: int = 0, delay_ms: int = 0) -> None:
        self._memory[:] = struct.pack("4i", operations, error, percent, delay_ms)


@dataclass(frozen=True, slots=True)
class CallFault:
    """System calls on the state folder's files fail with `error`, or take long."""

    name: str
    page: Page
    operations: int
    error: int = 0
    percent: int = 100
    delay_ms: int = 0

    @property
    def refuses(self) -> bool:
        return self.percent == 100 and self.error != 0 and self.operations != READ

    def begin(self, server: Server) -> None:  # noqa: ARG002 - see Fault
        self.page.set(self.operations, self.error, self.percent, self.delay_ms)

    def end(self, server: Server) -> None:  # noqa: ARG002 - see Fault
        self.page.set()


@dataclass(frozen=True, slots=True)
class Full:
    """The state folder's file system, a small one of its own, has no room."""

    name: str = "full"
    refuses: bool = True

    def begin(self, server: Server) -> None:
        hog = os.open(_hog(server), os.O_WRONLY | os.O_CREAT)
        try:
            for size in (1 << 16, 1):
                while _write(hog, size):
                    pass
        finally:
            os.close(hog)

    def end(self, server: Server) -> None:
        _hog(server).unlink()


def _hog(server: Server) -> Path:
    return server.state.parent / "hog"


def _write(descriptor: int, size: int) -> bool:
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
        return os.write(descriptor, bytes(size)) == size
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Moved:
    """The state folder is under another name."""

    name: str = "moved away"
    refuses: bool = True

    def begin(self, server: Server) -> None:
        server.state.rename(server.state.with_name("away"))

    def end(self, server: Server) -> None:
        if server.state.exists():  # made again meanwhile, which would be a fault of the server
            shutil.rmtree(server.state)
        server.state.with_name("away").rename(server.state)


@dataclass(frozen=True, slots=True)
class Ground:
    """Where faults can happen: `environment` of the server, `folder` for its state, the faults, and messages on those
    that this machine cannot have."""

    environment: Mapping[str, str]
    folder: Path
    faults: tuple[Fault, ...]
    skipped: tuple[str, ...]


@contextmanager
def ground(folder: Path) -> Iterator[Ground]:
    """Compile the library and mount a small file system, where the machine allows it, until the end of the block."""
    disk, skipped, faults = folder / "disk", list[str](), list[Fault]()
    disk.mkdir()
    environment: dict[str, str] = {}
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS}", "tmpfs", str(disk)]
    mounted = _run(command, skipped, "'full' is a failing call instead of a full file system")
    if mounted:
        faults.append(Full())
    library = folder / "disk_fault.so"
    compiler = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    if _run(compiler, skipped, "faults of system calls are skipped: they need a C compiler"):
        page = Page(folder / "page")
        environment = {"LD_PRELOAD": str(library), "TIDEMILL_FAULT_PAGE": str(folder / "page"),
                       "TIDEMILL_FAULT_ROOT": str(disk)}  # fmt: skip
        faults += call_faults(page, full=not mounted)
    try:
        yield Ground(environment, disk, (*faults, Moved()), tuple(skipped))
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)


def _run(command: list[str], skipped: list[str], otherwise: str) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        skipped.append(f"{otherwise} ({error})")
        return False
    if done.returncode:
        skipped.append(f"{otherwise} ({done.stderr.strip()[:200]})")
    return not done.returncode


def call_faults(page: Page, *, full: bool) -> Iterator[Fault]:
    """Yield the faults of system calls; `full`: also that of a full disk."""
    if full:
        yield CallFault("full", page, WRITE | NAME, errno.ENOSPC)
    yield CallFault("read-only", page, WRITE | NAME, errno.EROFS)
    yield CallFault("EIO on writes", page, WRITE, errno.EIO)
    yield CallFault("EIO on fsync", page, SYNC, errno.EIO)
    yield CallFault("EIO on reads", page, READ, errno.EIO)
    yield CallFault("EIO on a third of all", page, WRITE | SYNC | READ, errno.EIO, percent=33)
    yield CallFault("fsync takes 3 s", page, SYNC, delay_ms=3000)
    yield CallFault("ESTALE on writes", page, WRITE, errno.ESTALE)
    yield CallFault("ENXIO on fsync", page, SYNC, errno.ENXIO)
    yield CallFault("ENOMEM on writes", page, WRITE, errno.ENOMEM)
    yield CallFault("EACCES on writes", page, WRITE | NAME, errno.EACCES)


@contextmanager
def during(fault: Fault, server: Server) -> Iterator[None]:
    """Put a fault on for the block."""
    fault.begin(server)
    try:
        yield
    finally:
        fault.end(server)
