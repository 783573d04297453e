"""Quotas of tenants from the key file, and admission of requests within them.

A tenant may have `requests` requests with a total of `tokens` tokens (prompt and maximum output) in the engine. Further
requests wait here in FIFO order if `queued` allows, and are refused with 429 otherwise. They do not delay other
tenants. The store counts `lines` and `bytes`.

Servers that share a store exchange their loads and divide the limits between the servers that a tenant uses: a server
takes the tenant's load of the last exchange and an equal part of the rest, and at least an equal part of the limit.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import NamedTuple

from gateway.http.errors import ApiError

TENANT_LIMIT = "tenant_limit_exceeded"
_NUMBER = re.compile("([1-9][0-9]{0,17})([KMGT]?)")
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None: no limit."""

    requests: int | None = None
    """Requests in the engine."""
    queued: int | None = None
    """Requests that wait for a place in the engine."""
    tokens: int | None = None
    """Prompt and maximum output tokens of the requests in the engine."""
    lines: int | None = None
    """Lines of unfinished batches."""
    bytes: int | None = None
    """Bytes of stored files."""

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) is not None)


UNLIMITED = Quota()
LIMITS = tuple(f.name for f in fields(Quota))


class Load(NamedTuple):
    """Use of a tenant's limits."""

    requests: int
    """Requests in the engine."""
    tokens: int
    """Sum of the prompt and maximum output tokens of the requests in the engine."""
    queued: int
    """Requests that wait for a place in the engine."""


IDLE = Load(0, 0, 0)


class Division(NamedTuple):
    """Use of a tenant's limits by several servers at their last exchange."""

    servers: int
    """Number of servers with a load of the tenant, including this one."""
    elsewhere: Load
    own: Load

    def part(self, quota: Quota) -> Quota:
        """Return the limits of this server."""
        parts = {}
        for name, own, elsewhere in zip(Load._fields, self.own, self.elsewhere, strict=True):
            if (limit := getattr(quota, name)) is not None:
                rest = limit - own - elsewhere  # below 0: each server has to give up an equal part
                parts[name] = max(-(-limit // self.servers), own + -(-rest // self.servers))
        return replace(quota, **parts)


def parse_quota(words: Iterable[str]) -> Quota:
    """Parse limits such as `requests=8 bytes=50G`; K, M, G and T are powers of 1,024. Raises ValueError, whose message
    quotes nothing but names of limits."""
    values: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        match = _NUMBER.fullmatch(number)
        if name not in LIMITS:
            raise ValueError("a limit must be one of " + ", ".join(f"{limit}=N" for limit in LIMITS))
        if match is None:
            raise ValueError(f"'{name}' must be a whole number above 0, optionally with the suffix K, M, G or T")
        if name in values:
            raise ValueError(f"'{name}' is given twice; remove one")
        values[name] = int(match[1]) * _FACTORS[match[2]]
    if "queued" in values and not values.keys() & {"requests", "tokens"}:
        raise ValueError("'queued' needs 'requests' or 'tokens'; add one or remove 'queued'")
    return Quota(**values)


def limit_reached(name: str, limit: int, what: str, *, status: int = 429, retry_after: int = 1) -> ApiError:
    """Return the error for a limit that is reached. `what`: a clause with the current usage."""
    headers = {"retry-after": str(retry_after)} if status == 429 else None
    message = f"The limit '{name}={limit}' of this key's tenant is reached: {what}."
    return ApiError(status, message, code=TENANT_LIMIT, headers=headers)


@dataclass(slots=True, eq=False)
class AdmissionSlot:
    """A request's place in the engine, or in the queue until `granted` is set."""

    tenant: str
    num_requests: int
    num_tokens: int
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    left: bool = False


@dataclass(slots=True)
class _TenantUsage:
    """Current usage of one tenant."""

    num_requests: int = 0
    """Requests in the engine."""
    num_tokens: int = 0
    """Tokens of the tenant's requests."""
    waiting: OrderedDict[AdmissionSlot, None] = field(default_factory=OrderedDict)
    num_waiting: int = 0
    """Requests of the waiting places."""

    @property
    def load(self) -> Load:
        return Load(self.num_requests, self.num_tokens, self.num_waiting)

    def wait(self, place: AdmissionSlot) -> None:
        self.waiting[place] = None
        self.num_waiting += place.num_requests

    def stop_waiting(self, place: AdmissionSlot) -> None:
        del self.waiting[place]
        self.num_waiting -= place.num_requests

    def lacks(self, quota: Quota, num_requests: int, num_tokens: int) -> tuple[str, int] | None:
        """Return the name and current usage of the limit that the additional load would exceed, if any."""
        if quota.requests is not None and self.num_requests + num_requests > quota.requests:
            return "requests", self.num_requests
        if quota.tokens is not None and self.num_tokens + num_tokens > quota.tokens:
            return "tokens", self.num_tokens
        return None


class Admissions:
    """Admission of requests by tenant. `quota_of` is called each time, because quotas may change at runtime."""

    def __init__(self, quota_of: Callable[[str], Quota]) -> None:
        self._quota_of = quota_of
        self._tenants: dict[str, _TenantUsage] = {}
        self._divided: Mapping[str, Division] = MappingProxyType({})

    def loads(self) -> dict[str, Load]:
        """Return the load of each tenant with requests."""
        return {name: each.load for name, each in self._tenants.items()}

    def divide(self, divided: Mapping[str, Division]) -> None:
        """Divide the limits of tenants with loads on other servers."""
        self._divided = divided
        self.recheck()

    def check(self, tenant: str) -> None:
        """Raise ApiError 429 if not even the smallest request could wait. Called before any work on a request."""
        self._check_room(tenant, 1, 1)

    def enter(self, tenant: str, num_requests: int, num_tokens: int) -> AdmissionSlot:
        """Return a place, which is granted at once or later. The caller must pass it to `leave`.

        Raises ApiError 400 for a request that exceeds its tenant's limits by itself, and 429 if the queue is full."""
        quota = self._quota_of(tenant)
        for name, limit, asked in (("requests", quota.requests, num_requests), ("tokens", quota.tokens, num_tokens)):
            if limit is not None and asked > limit:
                message = f"The request needs {asked} {name}; its tenant's limit is '{name}={limit}'."
                raise ApiError(400, message, code=TENANT_LIMIT)
        self._check_room(tenant, num_requests, num_tokens)
        place = AdmissionSlot(tenant, num_requests, num_tokens)
        self._tenants.setdefault(tenant, _TenantUsage()).wait(place)
        self._grant(tenant)
        return place

    def leave(self, place: AdmissionSlot) -> None:
        """Release a place, or stop waiting for it. Idempotent."""
        if place.left:
            return
        place.left = True
        tenant = self._tenants[place.tenant]
        if place.granted.is_set():
            tenant.num_requests -= place.num_requests
            tenant.num_tokens -= place.num_tokens
        else:
            tenant.stop_waiting(place)
        self._grant(place.tenant)

    def recheck(self) -> None:
        """Grant waiting places that fit after a change of the quotas."""
        for tenant in list(self._tenants):
            self._grant(tenant)

    @property
    def num_running(self) -> int:
        """Number of admitted requests of all tenants."""
        return sum(tenant.num_requests for tenant in self._tenants.values())

    def num_waiting(self, tenant: str) -> int:
        """Return the number of a tenant's HTTP requests that wait for a place."""
        return len(self._tenants[tenant].waiting) if tenant in self._tenants else 0

    def _check_room(self, name: str, num_requests: int, num_tokens: int) -> None:
        whole, tenant = self._quota_of(name), self._tenants.get(name)
        if tenant is None:
            return
        quota, elsewhere = self._part(name, whole), IDLE
        if name in self._divided:
            elsewhere = self._divided[name].elsewhere
        lacks = tenant.lacks(quota, num_requests, num_tokens)
        if quota.queued is None:
            if lacks is not None:
                limit, count = lacks
                count += getattr(elsewhere, limit)
                raise limit_reached(limit, getattr(whole, limit), f"{count} {limit} are in flight")
            return
        waiting = tenant.num_waiting
        if (lacks is not None or waiting) and waiting + num_requests > quota.queued:
            waiting += elsewhere.queued
            raise limit_reached("queued", whole.queued or 0, f"{waiting} requests are waiting")

    def _part(self, name: str, quota: Quota) -> Quota:
        return self._divided[name].part(quota) if name in self._divided else quota

    def _grant(self, name: str) -> None:
        """Grant waiting places in order while they fit. A request that exceeds lowered limits is granted alone."""
        tenant, quota = self._tenants[name], self._part(name, self._quota_of(name))
        while tenant.waiting:
            place = next(iter(tenant.waiting))
            if tenant.num_requests and tenant.lacks(quota, place.num_requests, place.num_tokens) is not None:
                return
            tenant.stop_waiting(place)
            tenant.num_requests += place.num_requests
            tenant.num_tokens += place.num_tokens
            place.granted.set()
        if not tenant.num_requests:
            del self._tenants[name]


class UploadPlaces:
    """Limit on concurrent uploads: `each` per tenant, `total` overall."""

    def __init__(self, each: int, total: int) -> None:
        self._each = each
        self._total = asyncio.Semaphore(total)
        self._tenants: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        own, users = self._tenants.setdefault(tenant, (asyncio.Semaphore(self._each), []))
        users.append(None)
        try:
            async with own, self._total:
                yield
        finally:
            users.pop()
            if not users:
                del self._tenants[tenant]
