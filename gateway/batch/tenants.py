"""Access of requests to the files and batches of tenants, tenants without a key, and tenants of several servers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request

from engine.errors import ConfigError
from engine.refusals import is_loopback
from gateway.context import is_operator, tenant_of
from gateway.http.errors import ApiError, log_unexpected
from gateway.http.keys import IDLE, Admissions, Division, KeyStore
from gateway.store.disk import StorageError
from gateway.store.folder import StateFolder
from gateway.store.objects import BatchJob, FileObject, Holdings, Usage

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


class TenantExchange:
    """Usage of requests, and tenants without a key; with a shared store, also its keys, and loads of other servers.
    Implements BackgroundWork.

    Requests never wait for the store: while it is away, keys and divisions of limits stay, and usage is added later.
    `on_new_keys`: called after a change of the keys in the store.
    """

    def __init__(
        self,
        folder: StateFolder,
        keys: KeyStore,
        admissions: Admissions,
        host: str,
        seconds: float,
        on_new_keys: Callable[[], Awaitable[None]],
    ) -> None:
        self._folder = folder
        self._store = folder.store
        self._keys = keys
        self._admissions = admissions
        self._host = host
        self._seconds = seconds
        self._on_new_keys = on_new_keys
        self._version = ""
        self._number = 0
        self._sent: dict[str, Usage] = {}
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.usage: dict[str, Usage] = {}
        """Tokens of requests, other than batch lines, that ended and are not in the store, by tenant."""
        self.unreachable: list[Holdings] = []
        """Tenants with files or unfinished batches but without a key, as of the last `report`."""

    async def start(self) -> None:
        """See BackgroundWork. Raises ConfigError for a server that is open to other machines without keys."""
        if self._store.is_shared:
            with suppress(StorageError):
                kept = None if self._keys.file is not None else await asyncio.to_thread(self._folder.kept_keys)
                if kept is not None:
                    await self._adopt("", kept)
            with suppress(StorageError):
                await self.exchange()
            self._task = asyncio.create_task(self._run(), name="tidemill-tenants")
        if not self._keys.ring and not is_loopback(self._host):
            await self.stop()
            raise ConfigError(
                "--host is reachable from other machines, and the database of --state-dir has no keys or is away; run "
                "`tidemill keys FILE ADDRESS`, or set --api-key"
            )
        await self.report()

    async def stop(self) -> None:
        """See BackgroundWork."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def report(self) -> None:
        """Log a warning for each tenant without a key."""
        ring = self._keys.ring
        try:
            holdings = await self._store.holdings(int(time.time()))
        except StorageError as error:
            log.error("tenants without a key could not be determined: %s", error.message)
            return
        self.unreachable = [each for each in holdings if each.tenant not in ring.tenants]
        for each in self.unreachable:
            advice = "add a key of this tenant, or one with the role 'operator', to --api-key-file"
            if ring.has_operator:
                advice = f"an operator's key reaches them: tidemill batch list --tenant {each.tenant}"
            text = "no key belongs to tenant %s, which has %d unfinished batches and %d files; %s"
            log.warning(text, *each, advice)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self.exchange()
            except StorageError:
                pass  # the next exchange
            except BaseException as raised:
                log_unexpected(raised)

    async def exchange(self) -> None:
        """Store usage and loads, and apply the keys and loads of the store, if it is shared. Raises StorageError."""
        async with self._lock:
            if not self._store.is_shared:
                return
            if self.usage and not self._sent:  # else a report without an answer is repeated with its number
                self._sent, self.usage, self._number = self.usage, {}, self._number + 1
            own = self._admissions.loads()
            news = await self._store.exchange(self._number, self._sent, own, self._version)
            self._sent = {}
            self._admissions.divide(
                {name: Division(num + 1, load, own.get(name, IDLE)) for name, (num, load) in news.loads.items()}
            )
            if news.keys is not None and self._keys.file is None:
                await self._adopt(*news.keys)

    async def _adopt(self, version: str, lines: str) -> None:
        self._version = version
        try:
            self._keys.adopt(lines.splitlines())
        except ConfigError as error:  # of another version of tidemill, or a damaged copy
            log.error("the keys are unchanged: %s", error.message)
            return
        log.info("keys in the database: %s", self._keys.ring)
        with suppress(StorageError):
            await asyncio.to_thread(self._folder.keep_keys, lines)
        if self._task is not None:  # else the services that follow start later
            await self._on_new_keys()
