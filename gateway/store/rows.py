"""Between rows and objects. Knows nothing of transactions."""

import json
import sqlite3

from gateway.store.objects import BatchJob, FileObject, InputError, LineRecord, LineRef, Usage
from gateway.store.states import BatchStatus


def read_file_row(row: sqlite3.Row) -> FileObject:
    names = ("id", "tenant", "bytes", "created_at", "filename", "purpose", "expires_at")
    return FileObject(**{name: row[name] for name in names})


def insert_file(connection: sqlite3.Connection, file: FileObject) -> None:
    connection.execute(
        "INSERT INTO files (id, tenant, bytes, created_at, filename, purpose, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO NOTHING",
        (file.id, file.tenant, file.bytes, file.created_at, file.filename, file.purpose, file.expires_at),
    )


def read_batch_row(row: sqlite3.Row) -> BatchJob:
    plain = (
        "id", "tenant", "endpoint", "input_file_id", "completion_window", "created_at", "expires_at",
        "output_expires_after", "model", "output_file_id", "error_file_id", "total", "completed", "failed",
    )  # fmt: skip
    return BatchJob(
        **{name: row[name] for name in plain},
        status=BatchStatus(row["status"]),
        metadata=None if row["metadata"] is None else json.loads(row["metadata"]),
        errors=tuple(InputError(*error) for error in json.loads(row["errors"])),
        times=json.loads(row["times"]),
        usage=Usage(row["input_tokens"], row["cached_tokens"], row["output_tokens"], row["reasoning_tokens"]),
    )


def insert_batch(connection: sqlite3.Connection, batch: BatchJob, idempotency: tuple[str, str] | None) -> None:
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


def read_line_row(row: sqlite3.Row) -> LineRef:
    return LineRef(row["rank"], row["number"], row["start"], row["length"])


def read_record_row(row: sqlite3.Row) -> LineRecord:
    succeeded = None if row["succeeded"] is None else bool(row["succeeded"])
    return LineRecord(read_line_row(row), succeeded, row["result_start"], row["result_length"])
