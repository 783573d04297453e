"""API keys: whose a key is, and which service tier its requests have by default. Only digests are kept.

A key file has a line per key: the SHA-256 of the key in hex, the tenant, and optionally a default tier (default,
priority or flex); `#` begins a comment. Several keys may belong to one tenant. `printf %s "$KEY" | sha256sum` gives the
digest. Knows nothing of HTTP.
"""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

TIERS = ("default", "priority", "flex")
MAX_FILE_BYTES = 1024 * 1024
_DIGEST = re.compile("[0-9a-fA-F]{64}")
_TENANT = re.compile("[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Key:
    """`digest`: SHA-256 of the key."""

    digest: bytes
    tenant: str
    service_tier: str = "default"


class KeyRing:
    """The keys that are accepted. An empty ring is false: no key is asked for."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, sent: bytes) -> Key | None:
        """The key that was sent. All digests are compared each time: the time taken tells nothing of a key."""
        digest = hashlib.sha256(sent).digest()
        matches = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return matches[0] if matches else None


def load_keys(api_keys: Iterable[str], file: str | None) -> KeyRing:
    """Keys given one by one are tenants of their own, named by their digests. Raises ConfigError."""
    keys = [key_of(text) for text in api_keys]
    if file is not None:
        keys += _read_file(Path(file).expanduser())
    return KeyRing(keys)


def key_of(text: str) -> Key:
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return Key(digest, digest.hex()[:16])


def _read_file(path: Path) -> list[Key]:
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


def _parse(path: Path, lines: list[str]) -> list[Key]:
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        digest, tenant, tier = (*words, "default")[:3] if len(words) in (2, 3) else ("", "", "")
        if not _DIGEST.fullmatch(digest) or not _TENANT.fullmatch(tenant) or tier not in TIERS:
            expected = "a SHA-256 in hex, a tenant and, if wanted, one of " + ", ".join(TIERS)
            raise ConfigError(f"--api-key-file {path}, line {number}: expected {expected}")
        key = Key(bytes.fromhex(digest), tenant, tier)
        if key.digest in keys:
            raise ConfigError(f"--api-key-file {path}, line {number}: this key is in the file twice")
        keys[key.digest] = key
    if not keys:  # else a server that asks for keys would become one that asks for none
        raise ConfigError(f"--api-key-file {path}: has no keys")
    return list(keys.values())
