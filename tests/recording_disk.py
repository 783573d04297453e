"""A `Disk` that records its operations, a `Disk` that fails, and crash images of a recorded log.

An image is a possible state after a power loss at some point of the log, in three readings: nothing that was not
fsynced ("cautious"), everything ("eager"), and names without the data behind them ("torn").
"""

import errno
import os
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.store.disk import Disk, DiskFile

READINGS = ("cautious", "eager", "torn")


@dataclass
class Log:
    """Operations in the order in which they happened: (kind, path or name, payload)."""

    root: Path
    entries: list[tuple[str, str, Any]] = field(default_factory=list)

    def add(self, kind: str, path: Path | str, payload: Any = None) -> None:
        name = str(path.relative_to(self.root)) if isinstance(path, Path) and path.is_relative_to(self.root) else path
        self.entries.append((kind, str(name), payload))

    def on_commit(self, connection: sqlite3.Connection) -> None:
        self.add("commit", "tidemill.db", connection.serialize())

    def barriers(self) -> list[int]:
        """Where the log has an fsync of a file or a folder, or a rename."""
        return [i for i, (kind, _, _) in enumerate(self.entries) if kind in {"sync", "sync_folder", "rename"}]

    def without(self, index: int) -> "Log":
        """The log of a program that forgot one operation."""
        return Log(self.root, self.entries[:index] + self.entries[index + 1 :])

    def acknowledged(self, end: int) -> list[tuple[str, Any]]:
        return [(name, payload) for kind, name, payload in self.entries[:end] if kind == "ack"]


class RecordingDisk(Disk):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def create(self, path: Path) -> DiskFile:
        self.log.add("create", path)
        return super().create(path)

    def open_journal(self, path: Path) -> DiskFile:
        if not path.exists():
            self.log.add("create", path)
        return super().open_journal(path)

    def write(self, descriptor: int, path: Path, data: bytes | bytearray | memoryview, start: int) -> None:
        self.log.add("write", path, (start, bytes(data)))
        super().write(descriptor, path, data, start)

    def sync(self, descriptor: int, path: Path) -> None:
        super().sync(descriptor, path)
        self.log.add("sync", path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.log.add("rename", source, str(target.relative_to(self.log.root)))

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.log.add("sync_folder", folder)

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.log.add("remove", path)


class FaultyDisk(Disk):
    """Fails at the operations whose numbers (from 0) are in `faults`, with the given errno."""

    def __init__(self, faults: dict[int, int]) -> None:
        super().__init__()
        self.faults = faults
        self.count = 0

    def _maybe_fail(self) -> None:
        number, self.count = self.count, self.count + 1
        if number in self.faults:
            raise OSError(self.faults[number], os.strerror(self.faults[number]))

    def create(self, path: Path) -> DiskFile:
        self._maybe_fail()
        return super().create(path)

    def write(self, descriptor: int, path: Path, data: bytes | bytearray | memoryview, start: int) -> None:
        try:
            self._maybe_fail()
        except OSError:
            os.pwrite(descriptor, data[: len(data) // 2], start)  # a full disk takes a part
            raise
        super().write(descriptor, path, data, start)

    def sync(self, descriptor: int, path: Path) -> None:
        self._maybe_fail()
        super().sync(descriptor, path)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe_fail()
        super().rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        self._maybe_fail()
        super().sync_folder(folder)


NO_SPACE, IO_ERROR = errno.ENOSPC, errno.EIO


class _Model:
    """Names and contents as the process sees them, and as the disk is sure to have them."""

    def __init__(self) -> None:
        self.inodes: list[dict[str, bytearray]] = []
        self.seen: dict[str, int] = {}
        self.sure: dict[str, int] = {}
        self.database = b""
        self.folders: set[str] = set()

    def apply(self, kind: str, name: str, payload: Any) -> None:
        if kind == "create":
            self.inodes.append({"seen": bytearray(), "sure": bytearray()})
            self.seen[name] = len(self.inodes) - 1
        elif kind == "write":
            start, data = payload
            content = self.inodes[self.seen[name]]["seen"]
            content.extend(b"\0" * (start - len(content)))
            content[start : start + len(data)] = data
        elif kind == "sync":
            inode = self.inodes[self.seen[name]]
            inode["sure"] = bytearray(inode["seen"])
        elif kind == "rename":
            self.seen[payload] = self.seen.pop(name)
        elif kind == "remove":
            self.seen.pop(name, None)
        elif kind == "sync_folder":
            self.folders.add(name)
            inside = {n: i for n, i in self.sure.items() if os.path.dirname(n) != name}
            self.sure = inside | {n: i for n, i in self.seen.items() if os.path.dirname(n) == name}
        elif kind == "commit":
            self.database = payload

    def contents(self, reading: str) -> dict[str, bytes]:
        names = self.sure if reading == "cautious" else self.seen
        state = "seen" if reading == "eager" else "sure"
        return {name: bytes(self.inodes[inode][state]) for name, inode in names.items()}


def write_image(log: Log, end: int, reading: str, target: Path) -> None:
    """The state folder as a crash just before operation `end` may leave it."""
    model = _Model()
    for entry in log.entries[:end]:
        try:
            model.apply(*entry)
        except KeyError:  # a forgotten rename: what followed was about a file that is not there
            continue
    target.mkdir()
    if reading == "cautious" and not model.folders >= {".", str(log.root.parent)}:
        return  # the state folder itself, or all that is in it, was never sure to be there
    for folder in ("files", "journals", "tmp"):
        (target / folder).mkdir()
    for name, content in model.contents(reading).items():
        (target / name).write_bytes(content)
    if model.database:
        (target / "tidemill.db").write_bytes(model.database)
