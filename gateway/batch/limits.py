"""Limits and shared state of the files and batches endpoints."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from anyio import CapacityLimiter
from starlette.requests import Request

from gateway.http.quotas import UploadPlaces
from gateway.store.folder import StateFolder

if TYPE_CHECKING:
    from gateway.batch.tenants import TenantExchange
    from gateway.batch.worker import BatchWorker

UPLOADS_EACH, UPLOADS_IN_ALL = 16, 64
READERS = 2
MAX_BACK_OFF = 60.0
"""Maximum pause in seconds."""
MAX_DOUBLINGS = 30


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of files and batches. Sizes in bytes, times in seconds."""

    file_bytes: int = 8 * 1024 * 1024 * 1024
    lines: int = 1_000_000
    """Maximum lines per batch."""
    line_bytes: int = 4 * 1024 * 1024
    window_lines: int = 256
    """Maximum lines of all batches in memory."""
    window_bytes: int = 32 * 1024 * 1024
    """Maximum input bytes of all batches in memory."""
    retry_seconds: float = 1.0
    """First pause after a failure; it doubles with each further one."""
    read_attempts: int = 5
    """Attempts to read an unreadable file before its unreadable lines count as lost."""
    attempts: int = 5
    """Attempts after unexpected errors."""
    check_seconds: float = 600.0
    """Time limit for validating an input file."""
    cancel_seconds: float = 60.0
    """The same, once the batch is being cancelled."""
    tick_seconds: float = 30.0
    beat_seconds: float = 2.0
    """Time between two heartbeats of servers that share batches."""

    def back_off(self, faults: int) -> float:
        """Return the pause in seconds after `faults` consecutive failures: exponential, at most MAX_BACK_OFF."""
        return min(MAX_BACK_OFF, self.retry_seconds * float(1 << min(faults - 1, MAX_DOUBLINGS)))


@dataclass(frozen=True, slots=True)
class BatchState:
    """`uploads` limits concurrent uploads per tenant and in total."""

    folder: StateFolder
    limits: BatchLimits
    jobs: "BatchWorker"
    tenants: "TenantExchange"
    readers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(READERS))
    """Threads that read and verify files for downloads."""
    uploads: UploadPlaces = field(default_factory=lambda: UploadPlaces(UPLOADS_EACH, UPLOADS_IN_ALL))

    def now(self) -> int:
        """Return the time for new objects."""
        return self.jobs.clock.now()

    def expiry_now(self) -> int:
        """Return the time that decides what has expired."""
        return self.jobs.clock.expiry_now()


def state_of(request: Request) -> BatchState:
    return cast(BatchState, request.app.state.batches)
