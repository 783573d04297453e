"""Mixin of `SqliteStore` for the tenants of files and batches."""

import sqlite3
from collections.abc import Iterable

from gateway.store.objects import Holdings
from gateway.store.writer import SqliteWriter

_HOLDINGS = """
SELECT tenant, SUM(batches) AS batches, SUM(files) AS files FROM (
    SELECT tenant, COUNT(*) AS batches, 0 AS files FROM batches
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling') GROUP BY tenant
    UNION ALL
    SELECT tenant, 0, COUNT(*) FROM files
    WHERE deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now) GROUP BY tenant
) GROUP BY tenant ORDER BY tenant
"""


class SqliteTenants:
    """Reassign and count the objects of tenants."""

    _writer: SqliteWriter

    async def adopt(self, tenant: str, owners: Iterable[str]) -> int:
        """Move all files and batches of `owners` to `tenant` and return their number.

        A moved batch loses its idempotency key if `tenant` already has a batch with this key.
        """
        former = tuple(owners)

        def work(connection: sqlite3.Connection) -> int:
            changed = 0
            for owner in former:
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

        return await self._writer.run(work)

    async def holdings(self, now: int) -> list[Holdings]:
        """Return the number of unfinished batches and stored files per tenant, ordered by name."""

        def work(connection: sqlite3.Connection) -> list[Holdings]:
            return [Holdings(**row) for row in connection.execute(_HOLDINGS, {"now": now})]

        return await self._writer.run(work)
