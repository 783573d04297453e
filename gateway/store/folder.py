"""The state folder: what lies where in it, who holds it, and what a crash may have left behind.

    lock                    held by the one server that uses the folder; its process's number
    tidemill.db             rows
    adapters.json           LoRA adapters that were loaded while the server ran, by name: their folders
    files/<file id>         bodies of uploads and results; each has a row, or it goes at the next start
    journals/<batch id>     results of a running batch in the order of their ends
    tmp/                    what is being written; emptied at start

Names are ids that this server drew itself; nothing of a client's becomes a part of a path.
"""

import asyncio
import errno
import fcntl
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes, token_hex

from engine.errors import ConfigError
from gateway.store.disk import Disk, DiskFile, StorageError
from gateway.store.objects import BATCH_ID, FILE_ID
from gateway.store.sqlite import SqliteStore

SWEEP = 1000
SECRET_BYTES = 32
PROBE = b"tidemill" * 512


class StateFolder:
    """An open state folder. Use `open_state`."""

    def __init__(self, root: Path, disk: Disk, store: SqliteStore, lock: int) -> None:
        self.root = root
        self.disk = disk
        self.store = store
        self._lock = lock
        self._in_doubt: set[str] = set()

    def secret(self) -> bytes:
        """What tenants' prefix caches are separated by, drawn once: a cache on a disk outlives the server."""
        path = self.root / "salt"
        with suppress(FileNotFoundError):
            if len(known := path.read_bytes()) == SECRET_BYTES:
                return known
        drawn, temporary = token_bytes(SECRET_BYTES), self.root / "tmp" / token_hex(16)
        with suppress(OSError):  # a full disk: then it is this process's
            temporary.touch(mode=0o600)
            temporary.write_bytes(drawn)
            temporary.replace(path)
        return drawn

    def file_path(self, file_id: str) -> Path:
        assert FILE_ID.fullmatch(file_id)
        return self.root / "files" / file_id

    def journal_path(self, batch_id: str) -> Path:
        assert BATCH_ID.fullmatch(batch_id)
        return self.root / "journals" / batch_id

    def create_temp(self) -> DiskFile:
        """A file for something that will be published. Raises StorageError."""
        with self.disk.storing():
            return self.disk.create(self.root / "tmp" / token_hex(16))

    def publish_files(self, *files: tuple[DiskFile, str]) -> None:
        """Let files appear under their ids. Raises StorageError, after which nothing is left of any."""
        with self.disk.storing():
            self.disk.publish(*((file, self.file_path(file_id)) for file, file_id in files))

    def remove_body(self, file_id: str) -> None:
        """Best effort: what stays goes at the next start."""
        with self.disk.storing():
            self.disk.remove(self.file_path(file_id))

    def check_disk(self) -> None:
        """Write, sync, read back and remove a small file. Blocks. Raises StorageError."""
        file = self.create_temp()
        try:
            with self.disk.storing():
                file.write(PROBE)
                file.sync()
                if file.path.read_bytes() != PROBE:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        finally:
            file.discard()

    async def check_recovery(self) -> None:
        """After a fault: note whether the folder takes data again, also when there is nothing to store."""
        if self.disk.health.fault is not None:
            with suppress(StorageError):
                await asyncio.to_thread(self.check_disk)
            await self.store.settle()
            self.disk.health.worked("database")

    async def withdraw(self, error: Exception, *file_ids: str) -> None:
        """Remove bodies that could not be given rows; while a commit is in doubt they stay until it is settled."""
        if isinstance(error, StorageError) and error.in_doubt:
            self._in_doubt.update(file_ids)
            with suppress(StorageError):
                await self.settle()
            return
        for file_id in file_ids:
            with suppress(Exception):  # what stays goes at the next start
                await asyncio.to_thread(self.remove_body, file_id)

    async def settle(self) -> None:
        """Decide what was in doubt: bodies without a row go. Raises StorageError, and then it is still in doubt."""
        if self._in_doubt:
            doubted = list(self._in_doubt)
            await self.store.settle()
            known = await self.store.known_files(doubted)
            await asyncio.to_thread(self._remove_all, "files", [name for name in doubted if name not in known])
            self._in_doubt.difference_update(doubted)

    async def recover(self) -> None:
        """Remove what belongs to nothing. Before anything else is done with the folder."""
        journals = {batch.id for batch in await self.store.unfinished_batches()}
        await asyncio.to_thread(self._remove_all, "tmp", await self._names("tmp"))
        left = [name for name in await self._names("journals") if name not in journals]
        await asyncio.to_thread(self._remove_all, "journals", left)
        names = await self._names("files")
        for start in range(0, len(names), SWEEP):
            known = await self.store.known_files(names[start : start + SWEEP])
            orphans = [name for name in names[start : start + SWEEP] if name not in known]
            await asyncio.to_thread(self._remove_all, "files", orphans)

    async def _names(self, folder: str) -> list[str]:
        return await asyncio.to_thread(os.listdir, self.root / folder)

    def _remove_all(self, folder: str, names: list[str]) -> None:
        for name in names:
            self.disk.remove(self.root / folder / name)

    async def close(self) -> None:
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Finish what was begun and let another server have the folder. Blocks. Idempotent."""
        self.store.close_now()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def default_state_dir(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "tidemill"


def state_path(given: str | None, environment: Mapping[str, str]) -> Path:
    """The folder that was named, or the default."""
    return Path(given).expanduser() if given else default_state_dir(environment)


def check_free(root: Path) -> None:
    """Raises ConfigError if another server holds the folder; makes and changes nothing."""
    try:
        if (root / "lock").exists():
            os.close(_take_lock(root / "lock"))
    except OSError as error:
        raise ConfigError(f"--state-dir {root} cannot be used: {error.strerror}") from None


def open_state(
    root: Path, disk: Disk | None = None, on_commit: Callable[[sqlite3.Connection], None] | None = None
) -> StateFolder:
    """Take hold of a folder, making it if there is none. Blocks.

    Raises ConfigError, with nothing changed in the folder, when another server holds it or the database cannot be
    used.
    """
    disk = disk or Disk()
    made = [path.parent for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_mode & 0o077:
            root.chmod(0o700)
        lock = _take_lock(root / "lock")
    except OSError as error:
        raise ConfigError(f"--state-dir {root} cannot be used: {error.strerror}") from None
    try:
        return _open_locked(root, {root, root.parent, *made}, disk, on_commit, lock)
    except BaseException as error:  # also a Ctrl-C must not leave the folder locked
        os.close(lock)
        if isinstance(error, OSError):
            raise ConfigError(f"--state-dir {root} cannot be used: {error.strerror}") from None
        raise


def _open_locked(
    root: Path, folders: set[Path], disk: Disk, on_commit: Callable[[sqlite3.Connection], None] | None, lock: int
) -> StateFolder:
    store = SqliteStore(root / "tidemill.db", on_commit, disk.health)
    try:
        for name in ("files", "journals", "tmp"):
            (root / name).mkdir(mode=0o700, exist_ok=True)
        for folder in sorted(folders):  # names are durable only when their folder is
            disk.sync_folder(folder)
    except BaseException:  # also a Ctrl-C must not leave the store's thread behind
        store.close_now()
        raise
    return StateFolder(root, disk, store, lock)


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"--state-dir {path.parent} is in use by another server") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def holder(root: Path) -> int | None:
    """The process that holds a folder; None: nobody does, or it has not said who it is."""
    try:
        descriptor = os.open(root / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(descriptor, 32) or b"0") or None
    finally:
        os.close(descriptor)
    return None
