"""Locate, check, lock and open a state folder. Blocking."""

import errno
import fcntl
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from engine.errors import ConfigError
from engine.machine.folders import expand, user_folder
from gateway.store.disk import Disk, StorageError
from gateway.store.recovery import LOST_AND_FOUND, LostAndFound
from gateway.store.writer import open_database

DATABASE = "tidemill.db"
_PRIVATE = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", "engine.pid")
_FOLDERS = ("files", "journals", "tmp")
_FORMER = ("adapters.json", "cache", "salt")
"""Names that earlier versions wrote. They do not make a folder a foreign one."""
_OURS = {*_PRIVATE, *_FOLDERS, *_FORMER, *LOST_AND_FOUND, "lock", "flights"}
MISTAKES = frozenset(
    {
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)  # fmt: skip
"""Errors of a wrong path, where a retry cannot help. All other errors may be temporary."""


def state_path(given: str | None) -> Path:
    """Return the given state folder, or the default. Raise ConfigError for a user without a home folder."""
    return expand(given, "--state-dir") if given else user_folder("state", "--state-dir")


def check_free(root: Path) -> None:
    """Raise ConfigError if a start would refuse the folder: it is locked by another server, or shared with other files.
    Changes nothing."""
    try:
        _check_foreign(root)
        if (root / "lock").exists():
            os.close(_take_lock(root / "lock"))
    except OSError as error:
        if error.errno in MISTAKES:
            raise _unusable(root, error) from None


def holder(root: Path) -> int | None:
    """Return the id of the process that has locked the folder; None if it is not locked or the id is unknown."""
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


class Opening:
    """Open one state folder; `open` may be repeated after an error. `found`: destination for unknown files."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._lock = -1
        self.found = LostAndFound(root, disk)

    def open(self) -> sqlite3.Connection:
        """Lock the folder and open its database. Raises ConfigError, or StorageError if a retry may succeed."""
        try:
            connection = self._open()
        except BaseException as error:  # also a Ctrl-C must not leave the folder locked
            self.close()
            if isinstance(error, OSError) and error.errno in MISTAKES:
                raise _unusable(self._root, error) from None
            if isinstance(error, OSError | StorageError):
                self._disk.health.failed("database", error)
                raise StorageError from error.__cause__ or error
            raise
        self._disk.health.worked("database")
        return connection

    def _open(self) -> sqlite3.Connection:
        root = self._root
        made = {path.parent for path in (root, *root.parents) if not path.exists()}
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_foreign(root)
        self._lock = _take_lock(root / "lock")
        self._make_private()
        connection = open_database(root / DATABASE)
        try:
            for name in _FOLDERS:
                (root / name).mkdir(mode=0o700, exist_ok=True)
            for folder in sorted({root, root.parent, *made}):  # directory entries become durable with their folder
                self._disk.sync_folder(folder)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make_private(self) -> None:
        """Give all files mode 0600: earlier versions used the umask. SQLite copies the mode of the database."""
        database, wal = self._root / DATABASE, self._root / f"{DATABASE}-wal"
        if wal.exists() and not (database.exists() and database.stat().st_size):
            self.found.take(wal)  # SQLite would delete the log of a missing database, which may hold transactions
        if database.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for name in _PRIVATE:
            with suppress(FileNotFoundError, PermissionError):  # a volume may come from a server of another user
                if (self._root / name).stat().st_mode & 0o077:
                    (self._root / name).chmod(0o600)

    def close(self) -> None:
        """Unlock the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _check_foreign(root: Path) -> None:
    """Raise ConfigError for a shared folder such as /tmp. The mode of an existing folder is left unchanged."""
    if not root.is_dir() or (root / DATABASE).exists() or not root.stat().st_mode & 0o077:
        return
    foreign = sorted(name for name in os.listdir(root) if name not in _OURS)
    if foreign:
        raise ConfigError(
            f"--state-dir {root} contains other files ({foreign[0]}) and is accessible to other users; "
            f"use a folder for tidemill alone, e.g. {root / 'tidemill'}"
        )


def _take_lock(path: Path) -> int:
    """Lock a file and return its descriptor. Raises OSError, or ConfigError if another server has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            pid = holder(path.parent)
            by = "another server" if pid is None else f"another server (pid {pid})"
            raise ConfigError(f"--state-dir {path.parent} is in use by {by}; use another folder") from None
        raise
    with suppress(OSError):  # the process id is informational; the disk may be full
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _unusable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--state-dir {root} cannot be used: {error.strerror}")
