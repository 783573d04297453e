"""What the resources of files and batches share, beside the context that every resource has."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

from starlette.requests import Request

from gateway.http.quotas import UploadPlaces
from gateway.store.folder import StateFolder
from gateway.store.objects import BatchJob

UPLOADS_EACH, UPLOADS_IN_ALL = 16, 64
MAX_BACK_OFF = 60.0
"""Seconds."""
MAX_DOUBLINGS = 30


class JobListener(Protocol):
    """Who works on batches."""

    def added(self, batch: BatchJob) -> None:
        """A new batch is durable."""
        ...

    def cancelled(self, batch: BatchJob) -> None:
        """A batch is being cancelled."""
        ...

    def notes(self, batch: BatchJob) -> dict[str, str]:
        """What is expected of a batch, for its metadata."""
        ...

    async def first_notes(self, batch: BatchJob, num_bytes: int) -> dict[str, str]:
        """The same of a batch that was just created, by its input's size and first lines; nothing unless it is bad
        news."""
        ...


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Sizes in bytes, times in seconds. `window_lines` and `window_bytes` bound what of all batches is in memory at
    once, `line_bytes` a single line. After a fault the disk is tried again every `retry_seconds`; a file that cannot be
    read is read again `read_attempts` times, ever later. What fails for no reason that anybody knows is tried
    `attempts` times; reading an input may take `check_seconds`, and no longer than `cancel_seconds` once its batch is
    being cancelled."""

    file_bytes: int = 200 * 1024 * 1024
    lines: int = 50_000
    line_bytes: int = 4 * 1024 * 1024
    window_lines: int = 256
    window_bytes: int = 32 * 1024 * 1024
    retry_seconds: float = 1.0
    read_attempts: int = 5
    attempts: int = 5
    check_seconds: float = 600.0
    cancel_seconds: float = 60.0
    tick_seconds: float = 30.0

    def back_off(self, faults: int) -> float:
        """Return the pause in seconds after so many faults in a row: `retry_seconds`, doubled after each of them."""
        return min(MAX_BACK_OFF, self.retry_seconds * float(1 << min(faults - 1, MAX_DOUBLINGS)))


@dataclass(frozen=True, slots=True)
class BatchState:
    """`clock` is the wall clock; `uploads` bounds how many bodies are parsed at once, by tenant and in all."""

    folder: StateFolder
    limits: BatchLimits
    jobs: JobListener
    clock: Callable[[], float] = time.time
    uploads: UploadPlaces = field(default_factory=lambda: UploadPlaces(UPLOADS_EACH, UPLOADS_IN_ALL))

    def now(self) -> int:
        return int(self.clock())


def state_of(request: Request) -> BatchState:
    return cast(BatchState, request.app.state.batches)
