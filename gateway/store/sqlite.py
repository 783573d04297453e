"""Rows of files and batches in one SQLite database: WAL, synchronous=FULL, one writer thread, group commit.

Every method is one transaction, which is durable when it returns. All methods raise StorageError if the disk fails.
Then nothing has changed, but with `in_doubt` the change may still appear after a crash until `settle` or another
change succeeds. Additions are idempotent; repeating a change of a batch's state raises IllegalTransition.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

from gateway.store.health import StorageHealth
from gateway.store.schema import VERSION
from gateway.store.sqlite_batches import SqliteBatches
from gateway.store.sqlite_files import SqliteFiles
from gateway.store.sqlite_recovery import SqliteRecovery
from gateway.store.sqlite_tenants import SqliteTenants
from gateway.store.writer import SqliteWriter, Work, open_database


class SqliteStore(SqliteFiles, SqliteBatches, SqliteTenants, SqliteRecovery):
    """Raises ConfigError if the database cannot be used."""

    def __init__(
        self,
        path: Path,
        on_commit: Work[None] | None = None,
        health: StorageHealth | None = None,
        connection: sqlite3.Connection | None = None,
        open_later: Callable[[], sqlite3.Connection] | None = None,
    ) -> None:
        if connection is None and open_later is None:
            connection = open_database(path)
        self._writer = SqliteWriter(connection, on_commit, path, health, open_later)
        self._run = token_hex(8)

    def is_in_place(self) -> bool:
        """Return whether the database file is still at its path. Checks the disk; callable from any thread."""
        return self._writer.is_in_place()

    async def settle(self) -> None:
        """Make a commit, which settles earlier commits in doubt: changes that are invisible now cannot reappear."""
        await self._writer.run(lambda connection: connection.execute(f"PRAGMA user_version = {VERSION}").fetchone())

    async def close(self) -> None:
        """Wait for queued work, and close."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Wait for queued work, and close. Blocking."""
        self._writer.close()
