"""API keys with their tenant, default service tier and roles, and the limits of tenants. Only digests are stored.

A key file has one line per key: the SHA-256 of the key in hex, the tenant, and optionally a default tier (default or
flex), roles, limits (`requests=8 queued=64 tokens=100000 lines=200000 bytes=50G`) and a
promise (`class=premium,default ttft=500ms tbt=80ms e2e=20s`); `#` starts a comment. The role `metrics` gives access to
the metrics of all tenants; `operator` also to their files and batches. Several keys may belong to one tenant, whose
limits are given on one of the lines. The classes are the service classes that requests may name, the first one that of
the others; `ttft`, `tbt` and `e2e` are the tightest limits that requests may state.
`printf %s "$KEY" | sha256sum` prints the digest.

The values of --api-key, and requests to a server without keys, belong to the tenant `default`. Servers that share a
store and have no key file take the lines that `tidemill keys` has put into the store.

A tenant may have `requests` requests with a total of `tokens` tokens (prompt and maximum output) in the engine. Further
requests wait here in FIFO order if `queued` allows, and are refused with 429 otherwise. They do not delay other
tenants. The store counts `lines` and `bytes`.

Servers that share a store exchange their loads and divide the limits between the servers that a tenant uses: a server
takes the tenant's load of the last exchange and an equal part of the rest, and at least an equal part of the limit.
"""

import asyncio
import hashlib
import hmac
import os
import re
import stat
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from engine.errors import ConfigError
from gateway.http.errors import ApiError
from predictor.slo import CLASS_NAME, SLOError, parse_seconds

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
        self.refused: Counter[str] = Counter()
        """Requests refused with 429 by tenant, as only tenants with limits have them."""

    def loads(self) -> dict[str, Load]:
        """Return the load of each tenant with requests."""
        return {name: each.load for name, each in list(self._tenants.items())}

    def loads_everywhere(self) -> dict[str, Load]:
        """Return the same for all servers that share the store; those of other servers are of the last exchange."""
        loads = self.loads()
        for name, each in self._divided.items():
            loads[name] = Load(*map(sum, zip(loads.get(name, IDLE), each.elsewhere, strict=True)))
        return loads

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
                self.refused[name] += 1
                raise limit_reached(limit, getattr(whole, limit), f"{count} {limit} are in flight")
            return
        waiting = tenant.num_waiting
        if (lacks is not None or waiting) and waiting + num_requests > quota.queued:
            waiting += elsewhere.queued
            self.refused[name] += 1
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


Tier = Literal["default", "flex"]
TIERS: tuple[Tier, ...] = ("default", "flex")
_ROLES = frozenset({"metrics", "operator"})
DEFAULT_TENANT = "default"
"""The tenant of every --api-key value, and of all requests to a server without keys."""
MAX_FILE_BYTES = 1024 * 1024
_DIGEST = re.compile("[0-9a-fA-F]{64}")
_BOUNDS = ("ttft", "tbt", "e2e")
_TENANT = re.compile("[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Key:
    """An API key."""

    digest: bytes
    """SHA-256 of the key."""
    tenant: str
    service_tier: Tier = "default"
    sees_all: bool = False
    """May read metrics of all tenants."""
    is_operator: bool = False
    """May read, cancel and delete files and batches of all tenants."""
    classes: tuple[str, ...] = ()
    """Service classes that its requests may have; empty: the default class."""
    bounds: tuple[tuple[str, float], ...] = ()
    """Tightest limits that its requests may state, in seconds, instead of those of the class."""


class KeyRing:
    """The accepted keys and the limits of tenants. An empty ring is false: no key is required."""

    def __init__(self, keys: Iterable[Key], quotas: Mapping[str, Quota] = MappingProxyType({})) -> None:
        self._keys = tuple(keys)
        self._quotas = quotas

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, sent: bytes) -> Key | None:
        """Return the key that was sent, or None. Always compares all digests, to prevent timing attacks."""
        digest = hashlib.sha256(sent).digest()
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return matches[0] if matches else None

    def holds(self, key: Key) -> bool:
        """Return whether the key is accepted with the same rights."""
        return key in self._keys

    def sees_all(self, key: Key) -> bool:
        """Return whether the key may read metrics of all tenants; always true with a single tenant."""
        return key.sees_all or len(self.tenants) == 1

    def quota(self, tenant: str) -> Quota:
        """Return the limits of a tenant."""
        return self._quotas.get(tenant, UNLIMITED)

    @property
    def tenants(self) -> frozenset[str]:
        """All tenants with a key; the default tenant if no key is required."""
        return frozenset(key.tenant for key in self._keys) if self._keys else frozenset({DEFAULT_TENANT})

    @property
    def classes(self) -> frozenset[str]:
        """All service classes that keys name."""
        return frozenset(name for key in self._keys for name in key.classes)

    @property
    def has_operator(self) -> bool:
        """Whether some key gives access to the files and batches of all tenants."""
        return not self._keys or any(key.is_operator for key in self._keys)

    def __str__(self) -> str:
        return f"{len(self._keys)} keys of {len(self.tenants)} tenants"


class KeyStore:
    """The current key ring. The constructor and `reload` raise ConfigError; a failed `reload` keeps the old ring."""

    def __init__(self, api_keys: Iterable[str] = (), file: str | None = None) -> None:
        self._api_keys = tuple(api_keys)
        self.file = file
        self.ring = load_keys(self._api_keys, file)

    def reload(self) -> None:
        """Read the key file again. Blocking."""
        self.ring = load_keys(self._api_keys, self.file)

    def adopt(self, lines: list[str]) -> None:
        """Use lines of a key file from a store."""
        self.ring = _ring(self._api_keys, parse_lines("the keys in the database", lines))

    def quota(self, tenant: str) -> Quota:
        """Return the current limits of a tenant."""
        return self.ring.quota(tenant)


def load_keys(api_keys: Iterable[str], file: str | None) -> KeyRing:
    """Return the ring of the --api-key values and the key file, which takes precedence for a key in both.

    Without a key file the --api-key values are operators. Raises ConfigError.
    """
    if file is None:
        return KeyRing(replace(key_of(text), is_operator=True) for text in api_keys)
    return _ring(api_keys, parse_lines(f"--api-key-file {file}", read_lines(file)))


def _ring(api_keys: Iterable[str], found: tuple[list[Key], dict[str, Quota]]) -> KeyRing:
    keys, quotas = found
    return KeyRing(keys + [key_of(text) for text in api_keys], quotas)


def is_readable_by_others(file: str) -> bool:
    """Return whether any user may read the tenants, limits and digests. A digest does not reveal a random key."""
    return bool(Path(file).expanduser().stat().st_mode & stat.S_IROTH)


def _others_may_write(found: os.stat_result) -> bool:
    """Return whether users may add keys that are neither the owner nor in a group of this process.

    Kubernetes gives files of a volume to the group of the pod: mode 0440 in Secrets, 0660 in other volumes.
    """
    is_own_group = found.st_gid in {os.getegid(), *os.getgroups()}
    return bool(found.st_mode & (stat.S_IWOTH if is_own_group else stat.S_IWOTH | stat.S_IWGRP))


def key_of(text: str) -> Key:
    """Return the key of an --api-key value."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return Key(digest, DEFAULT_TENANT, sees_all=True)


def read_lines(file: str) -> list[str]:
    """Return the lines of a key file without comments. Raises ConfigError."""
    path = Path(file).expanduser()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"--api-key-file {path}: not a file")
            if _others_may_write(found):
                raise ConfigError(f"--api-key-file {path}: other users can write it; run chmod go-w")
            raw = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return [line.partition("#")[0] for line in raw.decode().splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path}: not a text file") from None


def parse_lines(source: str, lines: list[str]) -> tuple[list[Key], dict[str, Quota]]:
    """Return the keys and the limits of tenants in the lines of a key file. Raises ConfigError with `source`."""
    keys: dict[bytes, Key] = {}
    quotas: dict[str, Quota] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        try:
            key, quota = _parse_line(words)
        except ValueError as error:
            raise ConfigError(f"{source}, line {number}: {error}") from None
        if key.digest in keys:
            raise ConfigError(f"{source}, line {number}: duplicate key; remove one of the lines")
        if quota != UNLIMITED and quotas.setdefault(key.tenant, quota) != quota:
            message = "the tenant has different limits on an earlier line; give them on one line only"
            raise ConfigError(f"{source}, line {number}: {message}")
        keys[key.digest] = key
    if not keys:  # an empty ring would disable authentication
        raise ConfigError(f"{source}: contains no keys; add one or remove the flag")
    return list(keys.values()), quotas


def _parse_line(words: list[str]) -> tuple[Key, Quota]:
    """Parse the words of a line. Raises ValueError, whose message quotes nothing from the line, which may be a key."""
    num_given = next((index for index, word in enumerate(words) if "=" in word), len(words))
    given, limits = words[:num_given], words[num_given:]
    digest, tenant, *rest = given if len(given) >= 2 else ("", "")
    roles = [word for word in rest if word in _ROLES]
    tiers = [word for word in rest if word not in _ROLES]
    is_ordered = all("=" in word for word in limits)
    is_plain = _DIGEST.fullmatch(digest) and _TENANT.fullmatch(tenant) and len(set(roles)) == len(roles)
    if not (is_ordered and is_plain and len(tiers) <= 1 and set(tiers) <= set(TIERS)):
        tiers_and_roles = f"a tier ({', '.join(TIERS)}), roles ({', '.join(sorted(_ROLES))})"
        raise ValueError(f"expected a SHA-256 in hex and a tenant, optionally {tiers_and_roles}, then limits")
    tier: Tier = "flex" if "flex" in tiers else "default"
    own = [word for word in limits if word.partition("=")[0] in ("class", *_BOUNDS)]
    classes, bounds = _parse_promise(own)
    key = Key(bytes.fromhex(digest), tenant, tier, bool(roles), "operator" in roles, classes, bounds)
    return key, parse_quota(word for word in limits if word not in own)


def _parse_promise(words: list[str]) -> tuple[tuple[str, ...], tuple[tuple[str, float], ...]]:
    """Return the classes and bounds of a key. Raises ValueError like `_parse_line`."""
    values = dict(word.split("=", 1) for word in words)
    if len(values) < len(words):
        raise ValueError("a class or bound is given twice; remove one")
    names = values.pop("class", None)
    classes = () if names is None else tuple(names.split(","))
    if not all(CLASS_NAME.fullmatch(name) for name in classes):
        raise ValueError("'class' must be names of service classes, separated by commas")
    try:
        return classes, tuple((name, parse_seconds(value)) for name, value in values.items())
    except SLOError:
        raise ValueError(f"{', '.join(_BOUNDS)} must be a time such as 500ms or 20s") from None
