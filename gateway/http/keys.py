"""API keys: whose a key is, which service tier its requests have by default, what its tenant may have at once. Only
digests are kept.

A key file has a line per key: the SHA-256 of the key in hex, the tenant, and if wanted a default tier (default or
flex), the word `metrics` for a key that may see every tenant's figures, and limits (`requests=8 queued=64 tokens=100000
lines=200000 bytes=50G`, see `gateway.http.quotas`); `#` begins a comment. Several keys may belong to one tenant; its
limits may stand on any of their lines. `printf %s "$KEY" | sha256sum` gives the digest. Knows nothing of HTTP.
"""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from engine.errors import ConfigError
from gateway.http.quotas import UNLIMITED, Quota, parse_quota

Tier = Literal["default", "flex"]
TIERS: tuple[Tier, ...] = ("default", "flex")
_FILE_TIERS: dict[str, Tier] = {"default": "default", "flex": "flex", "priority": "default"}
"""Words of the key file; there is no priority among online requests, and files of earlier versions may have it."""
MAX_FILE_BYTES = 1024 * 1024
_DIGEST = re.compile("[0-9a-fA-F]{64}")
_TENANT = re.compile("[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Key:
    """`digest`: SHA-256 of the key. `sees_all`: may see figures that are made of every tenant's requests."""

    digest: bytes
    tenant: str
    service_tier: Tier = "default"
    sees_all: bool = False


class KeyRing:
    """The keys that are accepted, and the limits of tenants. An empty ring is false: no key is asked for."""

    def __init__(self, keys: Iterable[Key], quotas: Mapping[str, Quota] = MappingProxyType({})) -> None:
        self._keys = tuple(keys)
        self._quotas = quotas

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, sent: bytes) -> Key | None:
        """The key that was sent. All digests are compared each time: the time taken tells nothing of a key."""
        digest = hashlib.sha256(sent).digest()
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return matches[0] if matches else None

    def sees_all(self, key: Key) -> bool:
        """Whether the key may see figures of every tenant; where there is one only, they are its own."""
        return key.sees_all or len({other.tenant for other in self._keys}) == 1

    def quota(self, tenant: str) -> Quota:
        """What a tenant may have at once."""
        return self._quotas.get(tenant, UNLIMITED)

    def __str__(self) -> str:
        return f"{len(self._keys)} keys of {len({key.tenant for key in self._keys})} tenants"


class KeyStore:
    """The ring that holds now. Raises ConfigError, as does `reload`, which then keeps the ring that held before."""

    def __init__(self, api_keys: Iterable[str] = (), file: str | None = None) -> None:
        self._api_keys = tuple(api_keys)
        self.file = file
        self.ring = load_keys(self._api_keys, file)

    def reload(self) -> None:
        """Read the key file again. Blocking."""
        self.ring = load_keys(self._api_keys, self.file)

    def quota(self, tenant: str) -> Quota:
        """What a tenant may have at once, as of now."""
        return self.ring.quota(tenant)


def load_keys(api_keys: Iterable[str], file: str | None) -> KeyRing:
    """Keys given one by one are tenants of their own, named by their digests, and the operator's: they see everything.
    Raises ConfigError."""
    keys = [key_of(text) for text in api_keys]
    quotas: dict[str, Quota] = {}
    if file is not None:
        found, quotas = _read_file(Path(file).expanduser())
        keys += found
    return KeyRing(keys, quotas)


def key_of(text: str) -> Key:
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return Key(digest, digest.hex()[:16], sees_all=True)


def _read_file(path: Path) -> tuple[list[Key], dict[str, Quota]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"--api-key-file {path}: not a file")
            if found.st_mode & 0o077:
                raise ConfigError(f"--api-key-file {path}: others can read it; chmod 600 it first")
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path}: not a text file") from None
    return _parse(path, lines)


def _parse(path: Path, lines: list[str]) -> tuple[list[Key], dict[str, Quota]]:
    keys: dict[bytes, Key] = {}
    quotas: dict[str, Quota] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            key, quota = _parse_line(words)
        except ValueError as error:
            raise ConfigError(f"--api-key-file {path}, line {number}: {error}") from None
        if key.digest in keys:
            raise ConfigError(f"--api-key-file {path}, line {number}: this key is in the file twice")
        if quota != UNLIMITED and quotas.setdefault(key.tenant, quota) != quota:
            message = "its tenant has other limits on a line above; they need to be on one line only"
            raise ConfigError(f"--api-key-file {path}, line {number}: {message}")
        keys[key.digest] = key
    if not keys:  # else a server that asks for keys would become one that asks for none
        raise ConfigError(f"--api-key-file {path}: has no keys")
    return list(keys.values()), quotas


def _parse_line(words: list[str]) -> tuple[Key, Quota]:
    """Raises ValueError, whose text does not repeat what was written: it may be a key."""
    limits = [word for word in words if "=" in word]
    given, sees_all = words[: len(words) - len(limits)], "metrics" in words[2:]
    plain = [word for index, word in enumerate(given) if index < 2 or word != "metrics"]
    digest, tenant, tier = (*plain, "default")[:3] if len(plain) in (2, 3) else ("", "", "")
    is_plain = _DIGEST.fullmatch(digest) and _TENANT.fullmatch(tenant) and tier in _FILE_TIERS
    if not is_plain or given + limits != words or len(given) - len(plain) != sees_all:
        tiers = ", ".join(TIERS)
        raise ValueError(f"expected a SHA-256 in hex, a tenant and, if wanted, one of {tiers}, 'metrics', then limits")
    return Key(bytes.fromhex(digest), tenant, _FILE_TIERS[tier], sees_all), parse_quota(limits)
