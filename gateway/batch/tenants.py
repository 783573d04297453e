"""Access of requests to the files and batches of tenants, and detection of tenants without a key."""

import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from gateway.context import is_operator, tenant_of
from gateway.http.errors import ApiError
from gateway.http.keys import KeyStore
from gateway.store.disk import StorageError
from gateway.store.objects import BatchJob, FileObject, Holdings
from gateway.store.row_store import RowStore

log = logging.getLogger("tidemill.gateway")

ALL_TENANTS = "*"


def reached_tenant(request: Request) -> str | None:
    """Return the tenant whose objects the request may access by id; None for an operator: all tenants."""
    return None if is_operator(request) else tenant_of(request)


def listed_tenant(request: Request) -> str | None:
    """Return the tenant whose objects a list shows, from the query's `tenant`; None: all tenants.

    Raises ApiError 403 for another tenant, existing or not, without the role `operator`.
    """
    own = tenant_of(request)
    tenant = request.query_params.get("tenant") or own
    if tenant != own and not is_operator(request):
        message = "A key needs the role 'operator' to list objects of other tenants."
        raise ApiError(403, message, param="tenant", code="operator_needed")
    return None if tenant == ALL_TENANTS else tenant


def shown(request: Request, item: BatchJob | FileObject, content: dict[str, Any]) -> dict[str, Any]:
    """Add the tenant's name to an object of another tenant, and to all objects if the query has `tenant`."""
    if "tenant" in request.query_params or item.tenant != tenant_of(request):
        content["tenant"] = item.tenant
    return content


class Ownership:
    """Report tenants without a key. Implements BackgroundWork.

    Attributes:
        unreachable: tenants with files or unfinished batches but without a key, as of the last `report`.
    """

    def __init__(self, store: RowStore, keys: KeyStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self.unreachable: list[Holdings] = []

    async def start(self) -> None:
        """See BackgroundWork."""
        await self.report()

    async def stop(self) -> None:
        """See BackgroundWork."""

    async def report(self) -> None:
        """Log a warning for each tenant without a key."""
        ring = self._keys.ring
        try:
            holdings = await self._store.holdings(int(self._clock()))
        except StorageError as error:
            log.error("tenants without a key could not be determined: %s", error.message)
            return
        self.unreachable = [each for each in holdings if each.tenant not in ring.tenants]
        for each in self.unreachable:
            log.warning(
                "no key belongs to tenant %s, which has %d unfinished batches and %d files; %s",
                *each,
                _advice(each.tenant, has_operator=ring.has_operator),
            )


def _advice(tenant: str, *, has_operator: bool) -> str:
    """Return how the operator of the server can make a tenant's objects accessible."""
    ways = ["add a key of this tenant, or one with the role 'operator', to --api-key-file"]
    if has_operator:
        ways = [f"an operator's key reaches them: tidemill batch list --tenant {tenant}"]
    return ", or ".join(ways)
