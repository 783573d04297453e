"""Group commit for SQLite (WAL, synchronous=FULL): one thread with one connection commits all waiting work together.

Reads use the same connection in order, so they see all acknowledged writes.
"""

import asyncio
import errno
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from engine.errors import ConfigError
from gateway.store.disk import StorageError, StorageHealth
from gateway.store.schema import MIGRATIONS, VERSION

ResultT = TypeVar("ResultT")
RowsT = TypeVar("RowsT", bound="Rows")
Arguments = ParamSpec("Arguments")
Work = Callable[[sqlite3.Connection], ResultT]

MAX_GROUP = 256  # committing this many rows takes about five times as long as one row
CHECKED_BYTES = 64 * 1024 * 1024  # checking a larger database would take too long at start
BUSY_SECONDS = 2.0  # maximum wait for a lock of another program, such as a backup
_BUSY_CODES = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_STORAGE_CODES = _BUSY_CODES | {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOLFS,
}
_NOT_COMMITTED = _BUSY_CODES | {sqlite3.SQLITE_FULL}  # after any other error the commit is in doubt


def open_database(path: Path) -> sqlite3.Connection:
    """Open a database and migrate it to the current schema.

    Raises ConfigError, without changing the file, for a damaged database or a newer schema, and StorageError if the
    disk fails.
    """
    try:
        if path.exists():
            _look_first(path)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
    except sqlite3.DatabaseError as error:
        raise _refusal(error) from error
    try:
        _check(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        _wait_for_locks(connection, BUSY_SECONDS)
        connection.row_factory = sqlite3.Row
        connection.text_factory = lambda data: data.decode(errors="replace")  # damaged text must not break lists
        _migrate(connection)
    except BaseException as error:  # also a Ctrl-C must not leave the database open
        connection.close()
        if isinstance(error, sqlite3.DatabaseError):
            raise _refusal(error) from error
        raise
    return connection


def _refusal(error: sqlite3.DatabaseError) -> ConfigError | StorageError:
    code = _storage_code(error)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damaged(str(error))
    if code in _STORAGE_CODES:
        return StorageError()
    return ConfigError(f"the database in --state-dir cannot be used: {error}")


def _damaged(how: str) -> ConfigError:
    what_to_do = "restore a backup, or move it away to start with a new one (the stored files go to lost+found)"
    return ConfigError(f"the database tidemill.db in --state-dir is damaged ({how}); {what_to_do}")


def _wait_for_locks(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")


def _look_first(path: Path) -> None:
    """Check that the file is readable without changing it: closing a normal connection would checkpoint the WAL."""
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        _refuse_newer(connection)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        connection.close()


def _check(connection: sqlite3.Connection, path: Path) -> None:
    _refuse_newer(connection)
    if path.stat().st_size <= CHECKED_BYTES:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise _damaged(str(found).splitlines()[-1])


def _refuse_newer(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise ConfigError(
            f"--state-dir was written by a newer version (schema {version}, supported: {VERSION}); "
            "use that version or another folder"
        )


def _migrate(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        connection.executescript(f"BEGIN;{script};PRAGMA user_version = {number};COMMIT;")


class SqliteWriter:
    """Run functions of the connection in a thread. Each is atomic, and durable when its future is done.

    Args:
        connection: an open database, or None to call `open_later` at each group of work until it succeeds.
        on_commit: called in the thread after every commit that may have written.
        path: path of the database. Writes fail while the file is not there: SQLite would write to a deleted file.
        health: receives errors and successful commits.
    """

    def __init__(
        self,
        connection: sqlite3.Connection | None,
        on_commit: Work[None] | None = None,
        path: Path | None = None,
        health: StorageHealth | None = None,
        open_later: Callable[[], sqlite3.Connection] | None = None,
    ) -> None:
        self._path = path
        self._identity: os.stat_result | None = None
        self._open_later = open_later
        self._set_connection(connection)
        self._on_commit = on_commit
        self._health = health or StorageHealth()
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[Work[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tidemill-store", daemon=True)
        self._thread.start()

    async def run(self, work: Work[ResultT]) -> ResultT:
        """Run `work` in the thread. Raises its exceptions, or StorageError if the commit fails."""
        if self._closed:
            raise StorageError
        future: Future[ResultT] = Future()
        self._queue.put((work, future))
        return await asyncio.wrap_future(future)

    async def settle(self) -> None:
        """Make a commit, which settles earlier commits in doubt. Raises StorageError."""
        await self.run(lambda connection: connection.execute(f"PRAGMA user_version = {VERSION}").fetchone())

    def close(self) -> None:
        """Wait for queued work, and close the connection. Blocking. Idempotent."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            group = [self._queue.get()]
            while len(group) < MAX_GROUP and not self._queue.empty():
                group.append(self._queue.get())
            closing = None in group
            works = [item for item in group if item is not None and item[1].set_running_or_notify_cancel()]
            if self._is_open(works):
                self._commit(works)
        if self._opened is not None:
            self._opened.close()

    def _set_connection(self, connection: sqlite3.Connection | None) -> None:
        self._opened = connection
        if connection is not None and self._path is not None:
            self._identity = self._path.stat()

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._opened is not None
        return self._opened

    def _is_open(self, group: list[tuple[Work[Any], Future[Any]]]) -> bool:
        """Open the database if necessary. If that fails, fail the group and return False."""
        if self._opened is None and group:
            assert self._open_later is not None
            try:
                self._set_connection(self._open_later())
            except (StorageError, ConfigError, OSError) as error:
                self._health.failed("database", error)
                for _, future in group:
                    failure = StorageError()
                    failure.__cause__ = error.__cause__ or error
                    future.set_exception(failure)
        return self._opened is not None

    def _commit(self, group: list[tuple[Work[Any], Future[Any]]]) -> None:
        connection = self._connection
        outcomes: list[tuple[Future[Any], Any, Exception | None]] = []
        changes, committing = connection.total_changes, False
        try:
            connection.execute("BEGIN")
            for work, future in group:
                outcomes.append((future, *self._attempt(work)))
            if connection.total_changes > changes:
                self._check_place()
            committing = True
            connection.execute("COMMIT")
        except (sqlite3.Error, StorageError) as error:
            self._give_up(group, error, committing)
            return
        if connection.total_changes > changes:
            self._health.worked("database")
            if self._on_commit is not None:
                self._on_commit(connection)
        for future, result, failure in outcomes:
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

    def is_in_place(self) -> bool:
        """Return whether the open database is still at its path. Checks the disk; callable from any thread."""
        if self._path is None or self._identity is None:
            return True
        try:
            return os.path.samestat(self._path.stat(), self._identity)
        except OSError:
            return False

    def _check_place(self) -> None:
        """Raise StorageError if the open database has been deleted or moved."""
        if not self.is_in_place():
            raise StorageError from FileNotFoundError(errno.ENOENT, "the database has been deleted or replaced")

    def _attempt(self, work: Work[Any]) -> tuple[Any, Exception | None]:
        """Run one function in a savepoint; return its result or its exception. Raises StorageError."""
        connection = self._connection
        connection.execute("SAVEPOINT work")
        try:
            result = work(connection)
        except Exception as error:  # roll back this function alone, and pass the exception to its caller
            if _storage_code(error) in _STORAGE_CODES:
                raise StorageError from error
            connection.execute("ROLLBACK TO work")
            connection.execute("RELEASE work")
            return None, error
        connection.execute("RELEASE work")
        return result, None

    def _give_up(self, group: list[tuple[Work[Any], Future[Any]]], error: Exception, committing: bool) -> None:
        """Roll back. Retry the functions of a group one by one, so that reads succeed although a write fails; the wait
        for a lock is not repeated. A single function fails."""
        with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        code = _storage_code(error)
        if len(group) > 1:
            if code in _BUSY_CODES:
                _wait_for_locks(self._connection, 0.0)
            for item in group:
                self._commit([item])
            _wait_for_locks(self._connection, BUSY_SECONDS)
            return
        failure: Exception = error
        if isinstance(error, sqlite3.Error) and code in _STORAGE_CODES:
            failure = StorageError(in_doubt=committing and code not in _NOT_COMMITTED)
            failure.__cause__ = error
        if isinstance(failure, StorageError):
            self._health.failed("database", failure)
        group[0][1].set_exception(failure)


def _storage_code(error: BaseException) -> int:
    """Return SQLite's primary result code of an error or of the cause of a StorageError, else 0."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    return int(getattr(cause, "sqlite_errorcode", 0)) & 0xFF


class Cursor(Protocol):
    """Outcome of a statement. Rows have values by column name and by position."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class RowConnection(Protocol):
    """Statements of a transaction. Row modules use only SQL that SQLite and PostgreSQL share, with parameters `?` or
    `:name`."""

    def execute(self, query: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> Cursor: ...

    def executemany(self, query: str, values: Iterable[Sequence[Any]], /) -> object: ...


class Rows:
    """Base of the parts of `RowStore`."""

    _writer: SqliteWriter


def transaction(
    work: Callable[Concatenate[RowsT, RowConnection, Arguments], ResultT],
) -> Callable[Concatenate[RowsT, Arguments], Coroutine[Any, Any, ResultT]]:
    """Make a method with a connection a coroutine without: the writer's thread runs the method as one transaction."""

    @wraps(work)
    async def run(rows: RowsT, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> ResultT:
        return await rows._writer.run(lambda connection: work(rows, connection, *args, **kwargs))

    return run
