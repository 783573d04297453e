"""API keys with their tenant, default service tier and roles, and the limits of tenants. Only digests are stored.

A key file has one line per key: the SHA-256 of the key in hex, the tenant, and optionally a default tier (default or
flex), roles, limits (`requests=8 queued=64 tokens=100000 lines=200000 bytes=50G`, see `gateway.http.quotas`) and a
promise (`class=premium,default ttft=500ms tbt=80ms e2e=20s`); `#` starts a comment. The role `metrics` gives access to
the metrics of all tenants; `operator` also to their files and batches. Several keys may belong to one tenant, whose
limits are given on one of the lines. The classes are the service classes that requests may name, the first one that of
the others; `ttft`, `tbt` and `e2e` are the tightest limits that requests may state.
`printf %s "$KEY" | sha256sum` prints the digest.

The values of --api-key, and requests to a server without keys, belong to the tenant `default`. Servers that share a
store and have no key file take the lines that `tidemill keys` has put into the store.
"""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from engine.errors import ConfigError
from gateway.http.quotas import UNLIMITED, Quota, parse_quota
from predictor.slo import CLASS_NAME, SLOError, parse_seconds

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
