"""State of the application for the endpoints of files and batches."""

from dataclasses import dataclass, field
from typing import cast

from anyio import CapacityLimiter
from starlette.requests import Request

from gateway.batch.run import BatchLimits
from gateway.batch.tenants import TenantExchange
from gateway.batch.worker import BatchWorker
from gateway.http.quotas import UploadPlaces
from gateway.store.folder import StateFolder

UPLOADS_EACH, UPLOADS_IN_ALL = 16, 64
READERS = 2


@dataclass(frozen=True, slots=True)
class BatchState:
    """`uploads` limits concurrent uploads per tenant and in total."""

    folder: StateFolder
    limits: BatchLimits
    jobs: BatchWorker
    tenants: TenantExchange
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
