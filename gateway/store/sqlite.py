"""Files and batches in one SQLite file: WAL, synchronous=FULL, one writer thread, group commit. Bodies are elsewhere.

Every method is one transaction: when it returns, what it did is durable. All of them raise StorageError when the disk
does not take it, in which case nothing was changed; with `in_doubt` set the change may still appear after a crash,
until `settle` or another change succeeds. What adds may be repeated: the second time it does nothing; what moves a
batch raises IllegalTransition then.
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
    """Raises ConfigError when the database cannot be used."""

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
        """Whether the database is where it was opened. Asks the disk, from any thread."""
        return self._writer.is_in_place()

    async def settle(self) -> None:
        """Commit something: what is not to be seen now of a commit in doubt cannot appear after a crash any more."""
        await self._writer.run(lambda connection: connection.execute(f"PRAGMA user_version = {VERSION}").fetchone())

    async def close(self) -> None:
        """Waits for what was begun."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Blocks until what was queued is done."""
        self._writer.close()
