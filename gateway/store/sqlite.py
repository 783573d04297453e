"""`Store` in one SQLite file: WAL, synchronous=FULL, one writer thread, group commit. Bodies are files elsewhere."""

import asyncio
from pathlib import Path

from gateway.store.schema import VERSION
from gateway.store.sqlite_batches import SqliteBatches
from gateway.store.sqlite_files import SqliteFiles
from gateway.store.writer import SqliteWriter, Work, open_database


class SqliteStore(SqliteFiles, SqliteBatches):
    """Implements Store. Raises ConfigError when the database cannot be used."""

    def __init__(self, path: Path, on_commit: Work[None] | None = None) -> None:
        self._writer = SqliteWriter(open_database(path), on_commit)

    async def settle(self) -> None:
        await self._writer.run(lambda connection: connection.execute(f"PRAGMA user_version = {VERSION}").fetchone())

    async def close(self) -> None:
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Blocks until what was queued is done."""
        self._writer.close()
