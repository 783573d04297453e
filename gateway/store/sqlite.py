"""The SQLite database of a state folder (WAL, synchronous=FULL)."""

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import ConfigError
from gateway.store.disk import StorageError, StorageHealth
from gateway.store.schema import OLDEST, SCHEMA, VERSION, refusal, upgrade
from gateway.store.writer import Writer

log = logging.getLogger("tidemill.gateway")

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
    """Open a database; create its tables if it is empty, and upgrade those of an older version.

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
        _create(connection)
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
        _check_version(connection)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        connection.close()


def _check(connection: sqlite3.Connection, path: Path) -> None:
    _check_version(connection)
    if path.stat().st_size <= CHECKED_BYTES:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise _damaged(str(found).splitlines()[-1])


def _check_version(connection: sqlite3.Connection) -> int:
    """Return the version of the schema; 0: the database is empty. Raise ConfigError if it cannot be used."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version and not OLDEST <= version <= VERSION:
        raise ConfigError(refusal(version))
    return int(version)


def _create(connection: sqlite3.Connection) -> None:
    """Create or upgrade the tables, all or nothing."""
    version = _check_version(connection)
    if version < VERSION:
        script = upgrade(version) if version else SCHEMA
        connection.executescript(f"BEGIN IMMEDIATE;{script};PRAGMA user_version = {VERSION};COMMIT;")
        if version:
            log.info("the database of --state-dir was upgraded from schema %d to %d", version, VERSION)


class SqliteWriter(Writer):
    """`path`: path of the database. Writes fail while the file is not there: SQLite would write to a deleted file."""

    errors = sqlite3.Error
    clock = "CAST(strftime('%s', 'now') AS INTEGER)"
    settling = f"PRAGMA user_version = {VERSION}"
    """A write: its commit settles the earlier ones."""

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection | None,
        open_again: Callable[[], sqlite3.Connection],
        health: StorageHealth | None = None,
    ) -> None:
        self._path = path
        self._identity = None if connection is None else path.stat()
        self._changes = 0
        super().__init__(connection, open_again, health)

    def is_in_place(self) -> bool:
        """Return whether the open database is still at its path. Checks the disk; callable from any thread."""
        if self._identity is None:
            return True
        try:
            return os.path.samestat(self._path.stat(), self._identity)
        except OSError:
            return False

    def _open(self) -> None:
        super()._open()
        self._identity = self._identity or self._path.stat()

    def _begin(self, locks: Collection[str]) -> None:  # noqa: ARG002 - one server uses the database
        self._changes = self._connection.total_changes
        self._connection.execute("BEGIN")

    def _has_changed(self) -> bool:
        """Raises StorageError if the open database has been deleted or moved."""
        if self._connection.total_changes == self._changes:
            return False
        if not self.is_in_place():
            raise StorageError from FileNotFoundError(errno.ENOENT, "the database has been deleted or replaced")
        return True

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    @contextmanager
    def _one_by_one(self, error: Exception) -> Iterator[None]:
        """The wait for a lock is not repeated."""
        if _storage_code(error) in _BUSY_CODES:
            _wait_for_locks(self._connection, 0.0)
        yield
        _wait_for_locks(self._connection, BUSY_SECONDS)

    def _fault(self, error: Exception, committing: bool) -> StorageError | None:
        code = _storage_code(error)
        if code not in _STORAGE_CODES:
            return None
        return StorageError(in_doubt=committing and code not in _NOT_COMMITTED)


def _storage_code(error: BaseException) -> int:
    """Return SQLite's primary result code of an error, else 0."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
