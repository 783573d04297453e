"""What one tenant may have of the server at once: limits from the key file, and who is inside them now.

`requests` of a tenant are in the engine at a time, with at most `tokens` among them (prompt and longest answer);
further ones wait here, first come first served, if `queued` has room for them, and are refused (429) otherwise. Other
tenants are not held up by those that wait. `lines` and `bytes` are counted by the store. Knows nothing of HTTP but its
errors.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields

from gateway.http.errors import ApiError

TENANT_LIMIT = "tenant_limit_exceeded"
_NUMBER = re.compile("([1-9][0-9]{0,17})([KMGT]?)")
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None: no limit. `requests`, `queued`, `tokens`: see above. `lines`: of batches that have
    not ended. `bytes`: of stored files."""

    requests: int | None = None
    queued: int | None = None
    tokens: int | None = None
    lines: int | None = None
    bytes: int | None = None

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) is not None)


UNLIMITED = Quota()
LIMITS = tuple(f.name for f in fields(Quota))


def parse_quota(words: Iterable[str]) -> Quota:
    """`requests=8 bytes=50G` as a quota; K, M, G and T stand for powers of 1,024. Raises ValueError, whose text says
    what is wrong and repeats nothing but the names of limits."""
    values: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        match = _NUMBER.fullmatch(number)
        if name not in LIMITS:
            raise ValueError("a limit must be one of " + ", ".join(f"{limit}=N" for limit in LIMITS))
        if match is None:
            raise ValueError(f"'{name}' must be a whole number above 0, with K, M, G or T behind it if wanted")
        if name in values:
            raise ValueError(f"'{name}' is given twice")
        values[name] = int(match[1]) * _FACTORS[match[2]]
    if "queued" in values and not values.keys() & {"requests", "tokens"}:
        raise ValueError("'queued' limits who waits behind 'requests' or 'tokens'; give one of them, too")
    return Quota(**values)


def limit_reached(name: str, limit: int, what: str, *, status: int = 429, retry_after: int = 1) -> ApiError:
    """The refusal that names the limit. `what`: a clause that says what there is already."""
    headers = {"retry-after": str(retry_after)} if status == 429 else None
    message = f"The limit '{name}={limit}' of this key's tenant is reached: {what}."
    return ApiError(status, message, code=TENANT_LIMIT, headers=headers)


@dataclass(slots=True, eq=False)
class Place:
    """A place in the engine, or in the queue for one: then `granted` is not yet set."""

    tenant: str
    num_requests: int
    num_tokens: int
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    left: bool = False


@dataclass(slots=True)
class _Tenant:
    """Requests and tokens in the engine, and the places that wait, with the sum of their requests."""

    num_requests: int = 0
    num_tokens: int = 0
    waiting: OrderedDict[Place, None] = field(default_factory=OrderedDict)
    num_waiting: int = 0

    def wait(self, place: Place) -> None:
        self.waiting[place] = None
        self.num_waiting += place.num_requests

    def stop_waiting(self, place: Place) -> None:
        del self.waiting[place]
        self.num_waiting -= place.num_requests

    def lacks(self, quota: Quota, num_requests: int, num_tokens: int) -> tuple[str, int] | None:
        """The limit that so many more would break, and how much of it is used."""
        if quota.requests is not None and self.num_requests + num_requests > quota.requests:
            return "requests", self.num_requests
        if quota.tokens is not None and self.num_tokens + num_tokens > quota.tokens:
            return "tokens", self.num_tokens
        return None


class Admissions:
    """Requests of clients by tenant. `quota_of` is asked each time: quotas may change while requests run."""

    def __init__(self, quota_of: Callable[[str], Quota]) -> None:
        self._quota_of = quota_of
        self._tenants: dict[str, _Tenant] = {}

    def check(self, tenant: str) -> None:
        """Before anything is done for a request: raises ApiError 429 if not even the least one could wait."""
        self._check_room(tenant, 1, 1)

    def enter(self, tenant: str, num_requests: int, num_tokens: int) -> Place:
        """A place, granted at once or in its turn. Raises ApiError 400 for what can never fit and 429 where nobody else
        may wait; every place must be given back by `leave`."""
        quota = self._quota_of(tenant)
        for name, limit, asked in (("requests", quota.requests, num_requests), ("tokens", quota.tokens, num_tokens)):
            if limit is not None and asked > limit:
                message = f"This request asks for {asked} {name}, beyond the limit '{name}={limit}' of its tenant."
                raise ApiError(400, message, code=TENANT_LIMIT)
        self._check_room(tenant, num_requests, num_tokens)
        place = Place(tenant, num_requests, num_tokens)
        self._tenants.setdefault(tenant, _Tenant()).wait(place)
        self._grant(tenant)
        return place

    def leave(self, place: Place) -> None:
        """Give a place back, or stop waiting for it. Idempotent."""
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
        """The quotas have changed: some who wait may come in now."""
        for tenant in list(self._tenants):
            self._grant(tenant)

    def num_waiting(self, tenant: str) -> int:
        """How many HTTP requests of a tenant wait for a place."""
        return len(self._tenants[tenant].waiting) if tenant in self._tenants else 0

    def _check_room(self, name: str, num_requests: int, num_tokens: int) -> None:
        quota, tenant = self._quota_of(name), self._tenants.get(name)
        if tenant is None:
            return
        lacks = tenant.lacks(quota, num_requests, num_tokens)
        if quota.queued is None:
            if lacks is not None:
                limit, count = lacks
                raise limit_reached(limit, getattr(quota, limit), f"{count} {limit} are in flight")
            return
        waiting = tenant.num_waiting
        if (lacks is not None or waiting) and waiting + num_requests > quota.queued:
            raise limit_reached("queued", quota.queued, f"{waiting} requests are waiting")

    def _grant(self, name: str) -> None:
        """Let in whoever is first, as long as there is room; one that has become too large comes in alone."""
        tenant, quota = self._tenants[name], self._quota_of(name)
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
    """How many bodies are parsed at once: `each` of one tenant, `total` of all. A tenant's stalled uploads hold up its
    own only."""

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
