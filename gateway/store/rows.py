"""Conversion between database rows and objects.

A row with invalid values (bit rot, a manual edit) becomes a failed object with the reason. Reading never raises, so
that lists and other objects are not affected.
"""

import json
import re
import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from gateway.store.objects import (
    BATCH_ID,
    FILE_ID,
    BatchJob,
    FileObject,
    InputError,
    LineRecord,
    LineRef,
    Usage,
    new_batch_id,
    new_file_id,
)
from gateway.store.states import BatchStatus

ValueT = TypeVar("ValueT")

ROW_DAMAGED = "record_damaged"


class _Damage(Exception):
    """A column contains an invalid value."""


def _number(row: sqlite3.Row, name: str) -> int:
    value = row[name]
    if not isinstance(value, int) or value < 0:
        raise _Damage(name)
    return value


def _optional(row: sqlite3.Row, name: str) -> int | None:
    return None if row[name] is None else _number(row, name)


def _text(row: sqlite3.Row, name: str, pattern: re.Pattern[str] | None = None) -> str:
    value = row[name]
    if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
        raise _Damage(name)
    return value


def _file_id(row: sqlite3.Row, name: str) -> str | None:
    return None if row[name] is None else _text(row, name, FILE_ID)


def _json(row: sqlite3.Row, name: str) -> Any:
    try:
        return json.loads(_text(row, name))
    except (ValueError, RecursionError):
        raise _Damage(name) from None


def _mapping(row: sqlite3.Row, name: str, kind: type) -> dict[str, Any]:
    value = _json(row, name)
    if not isinstance(value, dict) or not all(isinstance(item, kind) for item in value.values()):
        raise _Damage(name)
    return value


def read_file_row(row: sqlite3.Row) -> FileObject:
    try:
        return FileObject(
            _text(row, "id", FILE_ID),
            _text(row, "tenant"),
            _number(row, "bytes"),
            _number(row, "created_at"),
            _text(row, "filename"),
            _text(row, "purpose"),
            _optional(row, "expires_at"),
        )
    except _Damage as damage:
        return FileObject(str(row["id"]), str(row["tenant"]), 0, 0, "damaged", "batch", damage=_reason("file", damage))


def _reason(kind: str, damage: _Damage) -> str:
    if kind == "file":
        return f"The server's record of this file is damaged ({damage}); upload it again."
    return f"The server's record of this batch is damaged ({damage}); resend the lines without a result."


def insert_file(connection: sqlite3.Connection, file: FileObject) -> None:
    connection.execute(
        "INSERT INTO files (id, tenant, bytes, created_at, filename, purpose, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO NOTHING",
        (file.id, file.tenant, file.bytes, file.created_at, file.filename, file.purpose, file.expires_at),
    )
    connection.execute("DELETE FROM announced WHERE id = ?", (file.id,))


def read_batch_row(row: sqlite3.Row) -> BatchJob:
    try:
        return _read_batch(row)
    except _Damage as damage:
        return BatchJob(
            id=str(row["id"]),
            tenant=str(row["tenant"]),
            endpoint=str(row["endpoint"]),
            input_file_id=str(row["input_file_id"]),
            completion_window=str(row["completion_window"]),
            created_at=_or(0, _number, row, "created_at"),
            expires_at=_or(0, _number, row, "expires_at"),
            status=BatchStatus.FAILED,
            errors=(InputError(ROW_DAMAGED, _reason("batch", damage)),),
            output_file_id=_or(None, _file_id, row, "output_file_id"),
            error_file_id=_or(None, _file_id, row, "error_file_id"),
            is_damaged=True,
        )


def repair_batch(row: sqlite3.Row, now: int) -> dict[str, Any]:
    """Return the columns of a batch that failed at `now`, to replace a damaged row."""
    batch = read_batch_row(row)
    columns = ("tenant", "endpoint", "completion_window", "created_at", "expires_at", "output_file_id", "error_file_id")
    counts = ("total", "completed", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    return {
        **{name: getattr(batch, name) for name in columns},
        "id": _or(new_batch_id(), lambda row, name: _text(row, name, BATCH_ID), row, "id"),
        "input_file_id": _or(new_file_id(), lambda row, name: _text(row, name, FILE_ID), row, "input_file_id"),
        "status": batch.status.value,
        "errors": json.dumps([list(error) for error in batch.errors]),
        "times": json.dumps({"failed_at": now}),
        **dict.fromkeys(("metadata", "model", "output_expires_after"), None),
        **dict.fromkeys(counts, 0),
    }


def _or(default: ValueT, read: Callable[[sqlite3.Row, str], ValueT], row: sqlite3.Row, name: str) -> ValueT:
    try:
        return read(row, name)
    except _Damage:
        return default


def _read_batch(row: sqlite3.Row) -> BatchJob:
    """Read a row. Raises _Damage."""
    batch = BatchJob(
        id=_text(row, "id", BATCH_ID),
        tenant=_text(row, "tenant"),
        endpoint=_text(row, "endpoint"),
        input_file_id=_text(row, "input_file_id", FILE_ID),
        completion_window=_text(row, "completion_window"),
        created_at=_number(row, "created_at"),
        expires_at=_number(row, "expires_at"),
        status=_status(row),
        output_expires_after=_optional(row, "output_expires_after"),
        metadata=None if row["metadata"] is None else _mapping(row, "metadata", str),
        model=None if row["model"] is None else _text(row, "model"),
        errors=_errors(row),
        output_file_id=_file_id(row, "output_file_id"),
        error_file_id=_file_id(row, "error_file_id"),
        times=_mapping(row, "times", int),
        total=_number(row, "total"),
        completed=_number(row, "completed"),
        failed=_number(row, "failed"),
        usage=Usage(*(_number(row, f"{kind}_tokens") for kind in ("input", "cached", "output", "reasoning"))),
    )
    if batch.status is BatchStatus.CANCELLING and "cancelling_at" not in batch.times:
        raise _Damage("times")
    return batch


def _status(row: sqlite3.Row) -> BatchStatus:
    try:
        return BatchStatus(row["status"])
    except ValueError:
        raise _Damage("status") from None


def _errors(row: sqlite3.Row) -> tuple[InputError, ...]:
    found = _json(row, "errors")
    try:
        return tuple(InputError(*error) for error in found)
    except TypeError:
        raise _Damage("errors") from None


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
