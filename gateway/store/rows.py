"""Conversion between database rows and objects, and the rows of files.

A row with invalid values (bit rot, a manual edit) becomes a failed object with the reason. Reading never raises, so
that lists and other objects are not affected. The row of a deleted file stays for a day as a tombstone, because clients
that delete while they page use its id as a cursor.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.store.objects import (
    BatchId,
    BatchJob,
    BatchStatus,
    Count,
    FileId,
    FileInUse,
    FileObject,
    InputError,
    LineRecord,
    LineRef,
    Page,
    StorageQuota,
    UnknownCursor,
    Usage,
    new_batch_id,
    new_file_id,
)
from gateway.store.writer import OBJECTS, RowConnection, Rows, transaction

Row = Any
"""A row with values by column name; `dict(row)` is possible."""
ROW_DAMAGED = "record_damaged"


def read_file_row(row: Row) -> FileObject:
    try:
        return msgspec.convert(dict(row), FileObject)
    except ValueError as damage:
        reason = f"The server's record of this file is damaged ({damage}); upload it again."
        return FileObject(str(row["id"]), str(row["tenant"]), 0, 0, "damaged", "batch", damage=reason)


def insert_file(connection: RowConnection, file: FileObject) -> None:
    connection.execute(
        "INSERT INTO files (id, tenant, bytes, created_at, filename, purpose, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO NOTHING",
        (file.id, file.tenant, file.bytes, file.created_at, file.filename, file.purpose, file.expires_at),
    )
    connection.execute("DELETE FROM announced WHERE id = ?", (file.id,))


_AS_THEY_ARE = ("tenant", "endpoint", "completion_window", "created_at", "expires_at")
"""Columns of a batch with the values of its fields."""


def read_batch_row(row: Row) -> BatchJob:
    try:
        return _read_batch(row)
    except ValueError as damage:
        reason = f"The server's record of this batch is damaged ({damage}); resend the lines without a result."
        texts = ("id", "tenant", "endpoint", "input_file_id", "completion_window")
        values: dict[str, Any] = {name: str(row[name]) for name in texts}
        values |= {name: _or(0, Count, row[name]) for name in ("created_at", "expires_at")}
        values |= {name: _or(None, FileId, row[name]) for name in ("output_file_id", "error_file_id")}
        error = InputError(ROW_DAMAGED, reason)
        return BatchJob(**values, status=BatchStatus.FAILED, errors=(error,), is_damaged=True)


def _read_batch(row: Row) -> BatchJob:
    """Read a row. Raises ValueError, which names the column."""
    values = dict(row)
    for name in ("errors", "metadata", "times"):
        try:
            values[name] = None if values[name] is None else json.loads(values[name])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}: {error}") from None
    values["usage"] = [values[name] for name in Usage._fields]
    batch = msgspec.convert(values, BatchJob)
    if batch.status is BatchStatus.CANCELLING and "cancelling_at" not in batch.times:
        raise ValueError("times: no cancelling_at")
    return batch


def _or(default: Any, kind: Any, value: object) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return default


def repair_batch(row: Row, now: int) -> dict[str, Any]:
    """Return the columns of a batch that failed at `now`, to replace a damaged row."""
    batch = read_batch_row(row)
    counts = ("total", "completed", "failed", *Usage._fields)
    return {
        **{name: getattr(batch, name) for name in (*_AS_THEY_ARE, "output_file_id", "error_file_id")},
        "id": _or(new_batch_id(), BatchId, row["id"]),
        "input_file_id": _or(new_file_id(), FileId, row["input_file_id"]),
        "status": batch.status.value,
        "errors": json.dumps([list(error) for error in batch.errors]),
        "times": json.dumps({"failed_at": now}),
        **dict.fromkeys(("metadata", "model", "output_expires_after"), None),
        **dict.fromkeys(counts, 0),
    }


def insert_batch(connection: RowConnection, batch: BatchJob, idempotency: tuple[str, str] | None) -> None:
    key, digest = idempotency or (None, None)
    values = {
        **{name: getattr(batch, name) for name in (*_AS_THEY_ARE, "id", "input_file_id", "output_expires_after")},
        "status": batch.status.value,
        "metadata": None if batch.metadata is None else json.dumps(dict(batch.metadata)),
        "idempotency_key": key,
        "idempotency_digest": digest,
    }
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO batches ({columns}) VALUES ({marks})", tuple(values.values()))


def insert_notice(connection: RowConnection, batch: BatchJob, status: BatchStatus, now: int) -> None:
    """Add the report of a batch's end that is part of the same transaction."""
    query = "INSERT INTO notices (batch, tenant, status, ended_at, due_at) VALUES (?, ?, ?, ?, ?)"
    connection.execute(query, (batch.id, batch.tenant, status.value, now, now))


def read_line_row(row: Row) -> LineRef:
    return LineRef(row["rank"], row["number"], row["start"], row["length"])


def read_record_row(row: Row) -> LineRecord:
    succeeded = None if row["succeeded"] is None else bool(row["succeeded"])
    return LineRecord(read_line_row(row), succeeded, row["result_start"], row["result_length"])


TOMBSTONE_SECONDS = 24 * 3600
UNFINISHED_STATES = "('validating', 'in_progress', 'finalizing', 'cancelling')"
_IN_USE = f"EXISTS (SELECT 1 FROM batches b WHERE b.input_file_id = files.id AND b.status IN {UNFINISHED_STATES})"
_STORED = "deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)"


def owned(tenant: str | None) -> str:
    """Return the SQL condition that a row belongs to `:tenant`; None means all tenants."""
    return "TRUE" if tenant is None else "tenant = :tenant"


class FileRows(Rows):
    """Rows of files. Expired files and files of other tenants count as missing; `tenant` None means all tenants."""

    @transaction(OBJECTS)
    def add_file(self, connection: RowConnection, file: FileObject, max_bytes: int | None = None) -> None:
        """Add a file. `max_bytes`: quota for all files of the tenant. Raises StorageQuota."""
        known = connection.execute("SELECT 1 FROM files WHERE id = ?", (file.id,)).fetchone()
        if max_bytes is not None and known is None:
            used = _stored_bytes(connection, file.tenant, file.created_at)
            if used + file.bytes > max_bytes:
                raise StorageQuota(used)
        insert_file(connection, file)

    @transaction()
    def stored_bytes(self, connection: RowConnection, tenant: str, now: int) -> int:
        """Return the total size of a tenant's files in bytes."""
        return _stored_bytes(connection, tenant, now)

    @transaction()
    def get_file(self, connection: RowConnection, tenant: str | None, file_id: str, now: int) -> FileObject | None:
        return find_file(connection, tenant, file_id, now)

    @transaction()
    def list_files(
        self, connection: RowConnection, tenant: str | None, page: Page, purpose: str | None, now: int
    ) -> tuple[list[FileObject], bool]:
        """Return a page, and whether more files follow. Raises UnknownCursor."""
        where = f"{owned(tenant)} AND {_STORED}"
        values: dict[str, str | int | None] = {"tenant": tenant, "now": now, "purpose": purpose}
        if purpose is not None:
            where += " AND purpose = :purpose"
        rows, more = read_page(connection, "files", where, values, page)
        return [read_file_row(row) for row in rows], more

    @transaction(OBJECTS)
    def delete_file(self, connection: RowConnection, tenant: str | None, file_id: str, now: int) -> bool:
        """Delete a file; return False if it does not exist. Raises FileInUse for the input of an unfinished batch."""
        if find_file(connection, tenant, file_id, now) is None:
            return False
        values = {"id": file_id, "now": now}
        changed = connection.execute(f"UPDATE files SET deleted_at = :now WHERE id = :id AND NOT {_IN_USE}", values)
        if not changed.rowcount:
            raise FileInUse
        return True

    @transaction()
    def newest_time(self, connection: RowConnection) -> int | None:
        """Return the newest time at which a file or batch was created; None without one."""
        query = "SELECT MAX(created_at) AS newest FROM files UNION ALL SELECT MAX(created_at) FROM batches"
        return max((row["newest"] for row in connection.execute(query) if row["newest"] is not None), default=None)

    @transaction(OBJECTS)
    def expire_files(self, connection: RowConnection, now: int, limit: int) -> list[str]:
        """Mark expired files as deleted, except inputs in use, and return their ids for removal of the bodies."""
        rows = connection.execute(
            "UPDATE files SET deleted_at = ? WHERE seq IN (SELECT seq FROM files "
            f"WHERE deleted_at IS NULL AND expires_at <= ? AND NOT {_IN_USE} LIMIT ?) RETURNING id",
            (now, now, limit),
        )
        return [row["id"] for row in rows]

    @transaction()
    def old_tombstones(self, connection: RowConnection, now: int, limit: int) -> list[str]:
        """Return the ids of files that were deleted more than TOMBSTONE_SECONDS ago."""
        query = "SELECT id FROM files WHERE deleted_at < ? LIMIT ?"
        values = (now - TOMBSTONE_SECONDS, limit)
        return [row["id"] for row in connection.execute(query, values)]

    @transaction()
    def purge_files(self, connection: RowConnection, file_ids: Sequence[str]) -> None:
        """Remove the rows of deleted files whose bodies have been removed."""
        query = "DELETE FROM files WHERE id = ? AND deleted_at IS NOT NULL"
        connection.executemany(query, ((file_id,) for file_id in file_ids))

    @transaction()
    def known_files(self, connection: RowConnection, file_ids: Sequence[str]) -> set[str]:
        """Return the ids that belong to a file of any tenant that has not been deleted."""
        query = "SELECT 1 FROM files WHERE id = ? AND deleted_at IS NULL"
        return {file_id for file_id in file_ids if connection.execute(query, (file_id,)).fetchone()}


def _stored_bytes(connection: RowConnection, tenant: str, now: int) -> int:
    query = f"SELECT COALESCE(SUM(bytes), 0) AS used FROM files WHERE tenant = :tenant AND {_STORED}"
    return int(connection.execute(query, {"tenant": tenant, "now": now}).fetchone()["used"])


def find_file(connection: RowConnection, tenant: str | None, file_id: str, now: int) -> FileObject | None:
    values = {"tenant": tenant, "id": file_id, "now": now}
    query = f"SELECT * FROM files WHERE id = :id AND {owned(tenant)} AND {_STORED}"
    row = connection.execute(query, values).fetchone()
    return None if row is None else read_file_row(row)


def read_page(
    connection: RowConnection, table: str, where: str, values: dict[str, str | int | None], page: Page
) -> tuple[list[Row], bool]:
    """Return the rows of a page, and whether more follow. `table` and `where` must not contain client input; `values`
    contains the tenant, see `owned`."""
    if page.after is not None:
        owner = values["tenant"]
        assert not isinstance(owner, int)
        query = f"SELECT seq FROM {table} WHERE id = :id AND {owned(owner)}"
        cursor = connection.execute(query, {"id": page.after, "tenant": owner}).fetchone()
        if cursor is None:
            raise UnknownCursor(page.cursor)
        values = {**values, "after": cursor["seq"]}
        where += f" AND seq {'>' if page.ascending else '<'} :after"
    order = "ASC" if page.ascending else "DESC"
    query = f"SELECT * FROM {table} WHERE {where} ORDER BY seq {order} LIMIT {page.limit + 1}"
    rows = connection.execute(query, values).fetchall()
    return rows[: page.limit], len(rows) > page.limit
