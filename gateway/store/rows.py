"""Conversion between database rows and objects.

A row with invalid values (bit rot, a manual edit) becomes a failed object with the reason. Reading never raises, so
that lists and other objects are not affected.
"""

import json
from typing import Any

import msgspec

from gateway.store.objects import (
    BatchId,
    BatchJob,
    BatchStatus,
    Count,
    FileId,
    FileObject,
    InputError,
    LineRecord,
    LineRef,
    Usage,
    new_batch_id,
    new_file_id,
)
from gateway.store.writer import RowConnection

Row = Any
"""A row with values by column name and by position; `dict(row)` is possible."""
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


def read_batch_row(row: Row) -> BatchJob:
    try:
        return _read_batch(row)
    except ValueError as damage:
        reason = f"The server's record of this batch is damaged ({damage}); resend the lines without a result."
        return BatchJob(
            id=str(row["id"]),
            tenant=str(row["tenant"]),
            endpoint=str(row["endpoint"]),
            input_file_id=str(row["input_file_id"]),
            completion_window=str(row["completion_window"]),
            created_at=_or(0, Count, row["created_at"]),
            expires_at=_or(0, Count, row["expires_at"]),
            status=BatchStatus.FAILED,
            errors=(InputError(ROW_DAMAGED, reason),),
            output_file_id=_or(None, FileId, row["output_file_id"]),
            error_file_id=_or(None, FileId, row["error_file_id"]),
            is_damaged=True,
        )


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
    columns = ("tenant", "endpoint", "completion_window", "created_at", "expires_at", "output_file_id", "error_file_id")
    counts = ("total", "completed", "failed", *Usage._fields)
    return {
        **{name: getattr(batch, name) for name in columns},
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
        "id": batch.id,
        "tenant": batch.tenant,
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "status": batch.status.value,
        "output_expires_after": batch.output_expires_after,
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
