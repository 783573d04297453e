"""Locate, check, lock and open a state folder, and clean it up at the start. Blocking.

The cleanup removes known leftovers, and moves unknown files to `lost+found/<time>/`.
The database knows a body by its row, by the row of a deleted file, or by an announcement: ids are announced before
their bodies appear, which identifies bodies that a crash left without a row. Other bodies and journals belong to
another database, which was lost, emptied or replaced by a backup. They are never removed.
"""

import asyncio
import errno
import fcntl
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from engine.errors import ConfigError
from engine.machine.extras import install_command
from engine.machine.folders import expand, user_folder
from gateway.store.bucket import Bucket
from gateway.store.disk import Disk, StorageError
from gateway.store.row_store import RowStore
from gateway.store.sqlite import open_database

log = logging.getLogger("tidemill.gateway")

SWEEP = 1000
LOST_AND_FOUND = ("lost+found", "tidemill-lost+found")
"""The second name is used where `lost+found` belongs to the file system and is not writable."""

Explain = Callable[[Sequence[str]], Awaitable[Mapping[str, bool]]]
"""Return whether each name must stay (True) or can be removed (False), leaving out unknown names."""


class LostAndFound:
    """Destination for unknown files, created with the first file. Blocking. Raises OSError."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self.folder: Path | None = None
        self.moved = 0

    def take(self, path: Path) -> None:
        """Move a file out of the way, durably."""
        folder = self._place()
        target = folder / path.relative_to(self._root)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        self._disk.rename(path, target)
        self.moved += 1
        for changed in (target.parent, folder, folder.parent, self._root, path.parent):
            self._disk.sync_folder(changed)

    def keep_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write damaged database rows to `batches.jsonl`."""
        file = self._disk.create(self._place() / "batches.jsonl")
        try:
            for row in rows:
                file.write(json.dumps(dict(row), default=repr).encode() + b"\n")
            file.sync()
        finally:
            file.close()

    def _place(self) -> Path:
        if self.folder is None:
            name = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            try:
                self.folder = self._make(LOST_AND_FOUND[0], name)
            except PermissionError:
                self.folder = self._make(LOST_AND_FOUND[1], name)
        return self.folder

    def _make(self, base: str, name: str) -> Path:
        (self._root / base).mkdir(mode=0o700, exist_ok=True)
        (self._root / base / name).mkdir(mode=0o700)
        return self._root / base / name


class StateRecovery:
    """Cleanup at one start. Steps that fail are left to the next start."""

    def __init__(
        self, root: Path, disk: Disk, store: RowStore, found: LostAndFound, bucket: Bucket | None = None
    ) -> None:
        self._root = root
        self._disk = disk
        self._store = store
        self._found = found
        self._bucket = bucket
        self._has_begun = False

    async def run(self, now: int) -> str | None:
        """Clean up and return the findings for the operator, if any. Raises StorageError."""
        notes: list[str] = []
        if not self._has_begun:  # later, these files can be in use
            await self._tidy("tmp", _all_can_go)
            if self._bucket is not None:  # another machine may have written more
                await self._tidy("journals", _all_can_go)
            self._has_begun = True
        damaged = await self._store.damaged_batches()
        if damaged:
            notes.append(f"the database rows of {len(damaged)} batches are damaged; these batches have failed")
            await self._try(lambda: self._found.keep_rows(damaged.values()))
        await self._tidy("journals", self._store.explain_journals)
        await self._tidy("files", self._store.explain_files)
        if self._bucket is not None:
            await self._tidy_objects(self._bucket)
        with suppress(StorageError):
            await self._store.fail_damaged(list(damaged), now)
            await self._store.forget_announced()
        if self._bucket is None and (lacking := await self._count_lacking()):
            notes.append(f"the bodies of {lacking} files are missing or incomplete; these files cannot be read")
        if self._found.folder is not None:
            where = self._found.folder.relative_to(self._root)
            notes.append(
                f"{self._found.moved} files without a database entry were moved to {where} in the state folder; if the "
                "database was lost or replaced, stop the server, restore the database and these files, and start it; "
                "otherwise delete them"
            )
        for note in notes:
            log.error("%s", note)
        return "; ".join(notes) or None

    async def _tidy(self, folder: str, explain: Explain) -> None:
        with self._disk.storing():
            names = await asyncio.to_thread(os.listdir, self._root / folder)
        for start in range(0, len(names), SWEEP):
            some = names[start : start + SWEEP]
            explained = await explain(some)
            for name in some:
                if not explained.get(name, False):
                    is_copy = self._bucket is not None and folder == "files"
                    move = self._disk.remove if name in explained or is_copy else self._found.take
                    await self._try(lambda move=move, name=name: move(self._root / folder / name))  # type: ignore[misc]

    async def remove_copies(self) -> None:
        """Remove copies of files that are not in the database. Raises StorageError."""
        await self._tidy("files", self._store.explain_files)

    async def _tidy_objects(self, bucket: Bucket) -> None:
        """Remove objects of bodies that never got a row, and of journals whose batch has ended. Raises StorageError."""
        orphans = [f"files/{file_id}" for file_id in await self._store.announced_files()]
        await asyncio.to_thread(bucket.delete, orphans)
        batches = await asyncio.to_thread(bucket.folders, "journals/")
        for start in range(0, len(batches), SWEEP):
            explained = await self._store.explain_journals(batches[start : start + SWEEP])
            for batch in (name for name, must_stay in explained.items() if not must_stay):
                await asyncio.to_thread(bucket.delete_all, f"journals/{batch}/")

    async def _try(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(work)
        except OSError as error:
            log.warning("the state folder cannot be cleaned up: %s", error.strerror)

    async def _count_lacking(self) -> int:
        """Count files whose body is missing or has another size."""

        def sizes() -> dict[str, int]:
            with self._disk.storing(), os.scandir(self._root / "files") as entries:
                return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}

        there, lacking, after = await asyncio.to_thread(sizes), 0, 0
        while rows := await self._store.bodies(after, SWEEP):
            lacking += sum(there.get(file_id) != size for _, file_id, size in rows)
            after = rows[-1][0]
        return lacking


async def _all_can_go(names: Sequence[str]) -> Mapping[str, bool]:
    return dict.fromkeys(names, False)


DATABASE = "tidemill.db"
_PRIVATE = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", "engine.pid")
STORES = ("s3", "gs", "az")
"""Schemes of object stores."""
_FOLDERS = ("files", "journals", "tmp")
MOVED = f"{DATABASE}.moved"
"""Name of the database after `tidemill migrate`."""
_OURS = {*_PRIVATE, *_FOLDERS, MOVED, *LOST_AND_FOUND, "cache", "lock", "server", "keys", "flights"}
MISTAKES = frozenset(
    {
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)  # fmt: skip
"""Errors of a wrong path, where a retry cannot help. All other errors may be temporary."""


class Place(NamedTuple):
    """The folder of the bodies, the address of the database (None: SQLite in the folder), and the URL of the object
    store whose bodies and journals the folder copies (None: they are in the folder alone)."""

    folder: Path
    database: str | None = None
    objects: str | None = None


def find_state(given: str | None) -> Place:
    """Return the default place, the given folder, or the parts of `postgresql://HOST/NAME?objects=URL`: a URL of a
    folder, or of an object store, which the default folder copies.

    Raise ConfigError for an invalid address, or a user without a home folder."""
    if not given:
        return Place(user_folder("state", "--state-dir"))
    if not given.startswith(("postgresql://", "postgres://")):
        return Place(expand(given, "--state-dir"))
    address = urlsplit(given)
    options = dict(parse_qsl(address.query))
    objects = urlsplit(options.pop("objects", ""))
    is_folder = objects.scheme == "file" and not objects.netloc and len(objects.path) > 1
    if not is_folder and not (objects.scheme in STORES and objects.netloc):
        raise ConfigError(
            "--state-dir postgresql://... needs a place for the contents of files: "
            "add ?objects=file:///FOLDER or ?objects=s3://BUCKET/PREFIX"
        )
    if ("@" in address.netloc and ":" in address.netloc.rpartition("@")[0]) or "password" in options:
        raise ConfigError("--state-dir must not contain a password; set PGPASSWORD or PGPASSFILE")
    database = f"postgresql://{address.netloc}{address.path}?{urlencode(options)}"
    if is_folder:
        return Place(Path(unquote(objects.path)), database)
    return Place(user_folder("state", "--state-dir"), database, objects.geturl())


def state_path(given: str | None) -> Path:
    """Return the folder of `find_state`."""
    return find_state(given).folder


def find_postgres() -> Any:
    """Return the module of PostgreSQL. Raise ConfigError without psycopg."""
    try:
        from gateway.store import postgres
    except ImportError as error:
        raise ConfigError(
            f"--state-dir postgresql://... needs {error.name}; run {install_command('cluster')}"
        ) from None
    return postgres


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
    """Open one state folder; `open` may be repeated after an error, or a loss of the connection. `found`: destination
    for unknown files."""

    def __init__(self, place: Place, disk: Disk) -> None:
        self._root = place.folder
        self._database = place.database
        self._objects = place.objects
        self._disk = disk
        self._lock = -1
        self.found = LostAndFound(place.folder, disk)

    def open(self) -> Any:
        """Lock the folder and return its open database. Raises ConfigError, or StorageError if a retry may succeed."""
        is_open = self._lock >= 0
        try:
            connection = self._open_database() if is_open else self._open()
        except BaseException as error:  # also a Ctrl-C must not leave the folder locked
            if not is_open:
                self.close()
            if isinstance(error, OSError) and error.errno in MISTAKES:
                raise _unusable(self._root, error) from None
            if isinstance(error, OSError | StorageError):
                self._disk.health.failed("database", error)
                raise StorageError from error.__cause__ or error
            raise
        self._disk.health.worked("database")
        return connection

    def _open(self) -> Any:
        root = self._root
        made = {path.parent for path in (root, *root.parents) if not path.exists()}
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_foreign(root)
        self._lock = _take_lock(root / "lock")
        if self._database is None:
            self._create_database()
        connection = self._open_database()
        try:
            for name in _FOLDERS:
                (root / name).mkdir(mode=0o700, exist_ok=True)
            for folder in sorted({root, root.parent, *made}):  # directory entries become durable with their folder
                self._disk.sync_folder(folder)
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_database(self) -> Any:
        if self._database is None:
            return open_database(self._root / DATABASE)
        if (self._root / DATABASE).exists():
            raise ConfigError(
                f"{self._root} holds the batches of a server without PostgreSQL ({DATABASE}); use another folder"
            )
        return find_postgres().open_database(self._database, self._objects)

    def _create_database(self) -> None:
        """Create an empty database with mode 0600 unless it is there. SQLite copies the mode for its other files."""
        database, wal = self._root / DATABASE, self._root / f"{DATABASE}-wal"
        if wal.exists() and not (database.exists() and database.stat().st_size):
            self.found.take(wal)  # SQLite would delete the log of a missing database, which may hold transactions
        if database.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

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
