"""Mixin of `SqliteStore` for recovery at start: known bodies and journals, and damaged rows."""

from collections.abc import Mapping, Sequence
from sqlite3 import Connection
from typing import Any

from gateway.store.rows import read_batch_row, repair_batch
from gateway.store.states import TERMINAL, UNFINISHED
from gateway.store.writer import Rows, transaction


class SqliteRecovery(Rows):
    """`_run` identifies this run of the server: bodies announced by this run may still be in the making."""

    _run: str

    @transaction
    def announce_files(self, connection: Connection, file_ids: Sequence[str]) -> None:
        """Record ids before their bodies appear, so that recovery can remove bodies that never got a row."""
        query = "INSERT INTO announced (id, run) VALUES (?, ?) ON CONFLICT DO NOTHING"
        connection.executemany(query, ((file_id, self._run) for file_id in file_ids))

    @transaction
    def forget_announced(self, connection: Connection, file_ids: Sequence[str] | None = None) -> None:
        """Remove the announcements of the given ids, or of all earlier runs for None."""
        if file_ids is None:
            connection.execute("DELETE FROM announced WHERE run != ?", (self._run,))
        else:
            connection.executemany("DELETE FROM announced WHERE id = ?", ((file_id,) for file_id in file_ids))

    @transaction
    def explain_files(self, connection: Connection, names: Sequence[str]) -> Mapping[str, bool]:
        """Return whether each body must stay (True) or can be removed (False), leaving out unknown ones."""
        known: dict[str, bool] = {}
        for name in names:
            row = connection.execute("SELECT deleted_at FROM files WHERE id = ?", (name,)).fetchone()
            announced = connection.execute("SELECT run FROM announced WHERE id = ?", (name,)).fetchone()
            if row is not None:
                known[name] = row["deleted_at"] is None
            elif announced is not None:
                known[name] = announced["run"] == self._run
        return known

    @transaction
    def explain_journals(self, connection: Connection, names: Sequence[str]) -> Mapping[str, bool]:
        """Return the same for journals: those of unfinished batches must stay. Damaged rows are ignored."""
        known: dict[str, bool] = {}
        for name in names:
            row = connection.execute("SELECT * FROM batches WHERE id = ?", (name,)).fetchone()
            if row is not None and not (batch := read_batch_row(row)).is_damaged:
                known[name] = batch.status in UNFINISHED
                assert known[name] or batch.status in TERMINAL
        return known

    @transaction
    def bodies(self, connection: Connection, after: int, limit: int) -> list[tuple[int, str, int]]:
        """Return sequence number, id and size of stored files with numbers above `after`, in order."""
        query = "SELECT seq, id, bytes FROM files WHERE seq > ? AND deleted_at IS NULL ORDER BY seq LIMIT ?"
        return [tuple(row) for row in connection.execute(query, (after, limit))]

    @transaction
    def damaged_batches(self, connection: Connection) -> dict[int, dict[str, Any]]:
        """Return the unchanged damaged rows of batches by sequence number."""
        rows = connection.execute("SELECT * FROM batches")
        return {row["seq"]: dict(row) for row in rows if read_batch_row(row).is_damaged}

    @transaction
    def fail_damaged(self, connection: Connection, seqs: Sequence[int], now: int) -> None:
        """Replace damaged rows by rows of failed batches with the reason, and remove their lines."""
        for seq in seqs:
            row = connection.execute("SELECT * FROM batches WHERE seq = ?", (seq,)).fetchone()
            values = repair_batch(row, now)
            columns = ", ".join(f"{name} = :{name}" for name in values)
            connection.execute(f"UPDATE batches SET {columns} WHERE seq = :seq", {**values, "seq": seq})
            connection.execute("DELETE FROM lines WHERE batch = ?", (seq,))
