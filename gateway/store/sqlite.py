"""Rows of files and batches in one SQLite database: WAL, synchronous=FULL, one writer thread, group commit.

Every method is one transaction, which is durable when it returns. All methods raise StorageError if the disk fails.
Then nothing has changed, but with `in_doubt` the change may still appear after a crash until `settle` or another
change succeeds. Additions are idempotent; repeating a change of a batch's state raises IllegalTransition.
"""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from secrets import token_hex
from sqlite3 import Connection

from gateway.store.disk import StorageHealth
from gateway.store.objects import Holdings
from gateway.store.schema import VERSION
from gateway.store.sqlite_batches import SqliteBatches
from gateway.store.sqlite_files import SqliteFiles
from gateway.store.sqlite_recovery import SqliteRecovery
from gateway.store.writer import Rows, SqliteWriter, Work, open_database, transaction

_HOLDINGS = """
SELECT tenant, SUM(batches) AS batches, SUM(files) AS files FROM (
    SELECT tenant, COUNT(*) AS batches, 0 AS files FROM batches
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling') GROUP BY tenant
    UNION ALL
    SELECT tenant, 0, COUNT(*) FROM files
    WHERE deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now) GROUP BY tenant
) GROUP BY tenant ORDER BY tenant
"""


class SqliteTenants(Rows):
    """Mixin of `SqliteStore` to reassign and count the objects of tenants."""

    @transaction
    def adopt(self, connection: Connection, tenant: str, owners: Collection[str]) -> int:
        """Move all files and batches of `owners` to `tenant` and return their number.

        A moved batch loses its idempotency key if `tenant` already has a batch with this key.
        """
        changed = 0
        for owner in owners:
            values = {"owner": owner, "tenant": tenant}
            connection.execute(
                "UPDATE batches SET idempotency_key = NULL, idempotency_digest = NULL WHERE tenant = :owner "
                "AND idempotency_key IN (SELECT idempotency_key FROM batches WHERE tenant = :tenant)",
                values,
            )
            for table in ("batches", "files"):
                query = f"UPDATE {table} SET tenant = :tenant WHERE tenant = :owner"
                changed += connection.execute(query, values).rowcount
        return changed

    @transaction
    def holdings(self, connection: Connection, now: int) -> list[Holdings]:
        """Return the number of unfinished batches and stored files per tenant, ordered by name."""
        return [Holdings(**row) for row in connection.execute(_HOLDINGS, {"now": now})]


class SqliteStore(SqliteFiles, SqliteBatches, SqliteTenants, SqliteRecovery):
    """Raises ConfigError if the database cannot be used."""

    def __init__(
        self,
        path: Path,
        on_commit: Work[None] | None = None,
        health: StorageHealth | None = None,
        connection: Connection | None = None,
        open_later: Callable[[], Connection] | None = None,
    ) -> None:
        if connection is None and open_later is None:
            connection = open_database(path)
        self._writer = SqliteWriter(connection, on_commit, path, health, open_later)
        self._run = token_hex(8)

    def is_in_place(self) -> bool:
        """Return whether the database file is still at its path. Checks the disk; callable from any thread."""
        return self._writer.is_in_place()

    @transaction
    def settle(self, connection: Connection) -> None:
        """Make a commit, which settles earlier commits in doubt: changes that are invisible now cannot reappear."""
        connection.execute(f"PRAGMA user_version = {VERSION}").fetchone()

    async def close(self) -> None:
        """Wait for queued work, and close."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Wait for queued work, and close. Blocking."""
        self._writer.close()
