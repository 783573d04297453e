"""Value types of files, batches and lines, with their JSON form in OpenAI's API. Times are Unix seconds."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from gateway.http.errors import ApiError


class BatchStatus(StrEnum):
    """Batch states of OpenAI's API.

    The batch worker ends every non-terminal state, unless the disk fails: `validating` after a few attempts,
    `cancelling` within about a minute, and the others at the latest after the completion window."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


TRANSITIONS: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.FAILED, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING, BatchStatus.EXPIRED}
    ),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.EXPIRED}),
    # to IN_PROGRESS: compute results again that were damaged on the disk
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.IN_PROGRESS}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}

TERMINAL = frozenset(status for status, after in TRANSITIONS.items() if not after)
UNFINISHED = frozenset(BatchStatus) - TERMINAL

# Terminal state, without result files, of a batch that fails repeatedly in the given state.
GIVEN_UP = {
    BatchStatus.VALIDATING: BatchStatus.FAILED,
    BatchStatus.IN_PROGRESS: BatchStatus.EXPIRED,
    BatchStatus.FINALIZING: BatchStatus.FAILED,
    BatchStatus.CANCELLING: BatchStatus.CANCELLED,
}

# Error code and message of a line without a result when its batch ends.
UNFINISHED_LINE = {
    BatchStatus.EXPIRED: ("batch_expired", "This request could not be executed before the completion window closed."),
    BatchStatus.CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}


class IllegalTransition(Exception):
    """The batch cannot move to the requested state from its current one; nothing was changed."""


def check_transition(before: BatchStatus, after: BatchStatus) -> None:
    """Raise IllegalTransition unless TRANSITIONS allows the change."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"{before} -> {after}")


FILE_ID = re.compile("file-[0-9a-f]{32}")
BATCH_ID = re.compile("batch_[0-9a-f]{32}")
FileId = Annotated[str, Meta(pattern=f"^{FILE_ID.pattern}\\Z")]
BatchId = Annotated[str, Meta(pattern=f"^{BATCH_ID.pattern}\\Z")]
Count = Annotated[int, Meta(ge=0)]


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class FileObject:
    """A completely stored file."""

    id: FileId
    tenant: str
    bytes: Count
    created_at: Count
    filename: str
    purpose: str
    expires_at: Count | None = None
    damage: str | None = None
    """Why the database row is invalid, if it is."""

    def as_json(self) -> dict[str, Any]:
        """Return the API object. Fields without a value are absent."""
        fields = {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed" if self.damage is None else "error",
            "status_details": self.damage,
            "expires_at": self.expires_at,
        }
        return {name: value for name, value in fields.items() if value is not None}


class InputError(NamedTuple):
    """An error in an input file, or another error of its batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Usage(NamedTuple):
    """Token usage of the lines that succeeded; `engine_us`: their engine time in microseconds, set at their end."""

    input_tokens: Count = 0
    cached_tokens: Count = 0
    output_tokens: Count = 0
    reasoning_tokens: Count = 0
    engine_us: Count = 0

    def plus(self, other: "Usage") -> "Usage":
        return Usage(*(a + b for a, b in zip(self, other, strict=True)))

    def as_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


@dataclass(frozen=True, slots=True)
class BatchJob:
    """The database row of a batch."""

    id: BatchId
    tenant: str
    endpoint: str
    input_file_id: FileId
    completion_window: str
    created_at: Count
    expires_at: Count
    status: BatchStatus = BatchStatus.VALIDATING
    output_expires_after: Count | None = None
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    errors: tuple[InputError, ...] = ()
    output_file_id: FileId | None = None
    error_file_id: FileId | None = None
    times: Mapping[str, int] = field(default_factory=dict)
    """Values of the API's `*_at` fields, by field name."""
    total: Count = 0
    """Number of lines; 0 until the input has been validated."""
    completed: Count = 0
    failed: Count = 0
    usage: Usage = field(default_factory=Usage)
    is_damaged: bool = False
    """The row is invalid, and the batch is shown as failed."""

    @property
    def remaining(self) -> int:
        """Number of lines without a durable result."""
        return self.total - self.completed - self.failed

    def as_json(self, notes: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the API object; `notes` are added to its metadata. As at OpenAI, an unknown model is absent, and other
        fields without a value are null."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        errors = {"object": "list", "data": [error._asdict() for error in self.errors]} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            **({} if self.model is None else {"model": self.model}),
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.as_json(),
            "metadata": {**(self.metadata or {}), **notes} if notes else self.metadata,
        }


class LineRef(NamedTuple):
    """An input line: `rank` in feeding order, line `number` in the file (from 1), offset and length in bytes."""

    rank: int
    number: int
    start: int
    length: int


class LineResult(NamedTuple):
    """A finished line: whether it succeeded, the offset and length of its row in the journal, and its usage."""

    rank: int
    succeeded: bool
    start: int
    length: int
    usage: Usage = Usage()


class LineRecord(NamedTuple):
    """A line with its result; `succeeded` is None for a line without a result."""

    ref: LineRef
    succeeded: bool | None
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Page:
    """Page of a list: at most `limit` objects after the object `after` (None: from the beginning)."""

    limit: int
    after: str | None = None
    ascending: bool = False
    cursor: str = "after"
    """Query parameter of `after`, for errors."""


class Holdings(NamedTuple):
    """Number of a tenant's unfinished batches and stored files."""

    tenant: str
    batches: int
    files: int


class Notice(NamedTuple):
    """A report of a batch's end that is due at `due_at`, after `attempts` failed attempts."""

    batch: str
    tenant: str
    status: str
    ended_at: int
    attempts: int
    due_at: int


class UnknownCursor(ApiError):
    """The object after which a list should continue does not exist or belongs to another tenant."""

    def __init__(self, param: str) -> None:
        message = f"'{param}' must be the id of an object of this list."
        super().__init__(400, message, param=param, code="invalid_value")


class FileInUse(ApiError):
    """The file is the input of a batch that has not ended."""

    def __init__(self) -> None:
        message = "The file is the input of a batch that has not ended; cancel the batch first."
        super().__init__(400, message, param="file_id", code="file_in_use")


class NoSuchFile(ApiError):
    """The tenant has no such file."""

    def __init__(self, param: str = "file_id") -> None:
        super().__init__(404, "The file does not exist.", param=param, code="file_not_found")


class QuotaReached(Exception):
    """An object would exceed a quota of its tenant, of which `used` is in use."""

    def __init__(self, used: int) -> None:
        super().__init__(used)
        self.used = used


class StorageQuota(QuotaReached):
    """Bytes of stored files."""


class LineQuota(QuotaReached):
    """Lines in unfinished batches."""
