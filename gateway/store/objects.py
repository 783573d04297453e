"""Files, batches and lines as the store knows them, and as OpenAI's API shows them. Times are Unix seconds."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.store.states import BatchStatus

FILE_ID = re.compile("file-[0-9a-f]{32}")
BATCH_ID = re.compile("batch_[0-9a-f]{32}")


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class FileObject:
    """A file that is on the disk, whole. `expires_at` None: never. `damage`: why its row cannot be read."""

    id: str
    tenant: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    damage: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
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


class InputError(NamedTuple):
    """One reason why an input file cannot be a batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Usage(NamedTuple):
    """Tokens of the lines that succeeded."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

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
    """A batch as its row says. `times` holds the moments of OpenAI's `*_at` fields, by field name; `total` is 0 until
    the input is found valid. `is_damaged`: the row cannot be read, and is shown as a batch that has failed."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    output_expires_after: int | None = None
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    errors: Sequence[InputError] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)
    is_damaged: bool = False

    @property
    def remaining(self) -> int:
        """Lines without a durable result."""
        return self.total - self.completed - self.failed

    def as_json(self, notes: Mapping[str, str] | None = None) -> dict[str, Any]:
        """`notes` are shown with the metadata."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        errors = {"object": "list", "data": [error._asdict() for error in self.errors]} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
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
            "usage": self.usage.as_json() if self.total else None,
            "metadata": {**(self.metadata or {}), **notes} if notes else self.metadata,
        }


class LineRef(NamedTuple):
    """An input line: `rank` in the order of feeding, `number` in the file (from 1), and its place there in bytes."""

    rank: int
    number: int
    start: int
    length: int


class LineResult(NamedTuple):
    """A line that ended: whether it goes to the output file, and its row's place in the journal."""

    rank: int
    succeeded: bool
    start: int
    length: int


class LineRecord(NamedTuple):
    """A line with its result; `succeeded` None: it has none."""

    ref: LineRef
    succeeded: bool | None
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list: at most `limit` objects after the object `after` (None: from the beginning)."""

    limit: int
    after: str | None = None
    ascending: bool = False


class Holdings(NamedTuple):
    """Numbers of a tenant's unfinished batches and stored files."""

    tenant: str
    batches: int
    files: int


class UnknownCursor(Exception):
    """There is no such object to continue a list after."""


class FileInUse(Exception):
    """The file is the input of a batch that has not ended."""


class StorageQuota(Exception):
    """A file would take its tenant beyond the bytes that it may store; `used` are stored already."""

    def __init__(self, used: int) -> None:
        super().__init__(used)
        self.used = used


class LineQuota(Exception):
    """A batch would take its tenant beyond the lines that it may have in batches; `used` are there already."""

    def __init__(self, used: int) -> None:
        super().__init__(used)
        self.used = used


class NoSuchFile(Exception):
    """The batch's input file does not exist for its tenant."""


class WrongPurpose(Exception):
    """The file was not uploaded as the input of a batch."""


class IdempotencyConflict(Exception):
    """The same idempotency key came with another body."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Bytes of a batch's lines: all of them, and one that has no result yet, on average. `answers`: the most tokens
    that some of them may answer, as they say themselves; infinity where one does not."""

    total_bytes: int
    pending_line: float
    answers: tuple[float, ...] = ()
