"""Input and output files of commands: paths, and URLs (`https://` is read, `s3://`, `gs://` and `az://` also written).

A path is checked before the work, written beside its place and put there by an atomic rename. Object stores need
obstore (the extra `files`), which takes credentials from the environment.
"""

import errno
import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from engine.errors import ConfigError
from engine.machine.extras import install_command


def disk_error(path: Path, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read or written, with the way out."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"{path}: {reason}; make room and run the same command again, which continues")
    return ConfigError(f"{path}: {reason}")


def same_file(first: Path, second: Path) -> bool:
    """Return whether two paths name one file: by another spelling, a symbolic link or a hard link."""
    try:
        return first.samefile(second)
    except OSError:
        return os.path.realpath(first) == os.path.realpath(second)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the folder of `path` that replaces it at the end of the block. A symbolic link remains one.

    Raises ConfigError if the file cannot be written. After an error `path` is as it was.
    """
    target = Path(os.path.realpath(path))
    try:
        part = _part_of(target)
        try:
            with part.open("xb") as file:
                if target.exists():
                    shutil.copymode(target, part)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(path, error) from None


def check_replaceable(path: Path) -> None:
    """Raise ConfigError if `replacing` would fail now. Remove files that killed runs have left."""
    target = Path(os.path.realpath(path))
    try:
        for left in target.parent.glob(f"{_prefix(target)}*.part"):
            left.unlink(missing_ok=True)
        part = _part_of(target)
        part.open("xb").close()
        part.unlink()
    except OSError as error:
        raise disk_error(path, error) from None


def _part_of(target: Path) -> Path:
    """Return the path of a new file that shall replace `target`. Raise OSError if that is a folder."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a folder; name a file")
    return target.with_name(f"{_prefix(target)}{token_hex(8)}.part")


def _prefix(target: Path) -> str:
    return f".tidemill-{blake2b(os.fsencode(target.name), digest_size=8).hexdigest()}-"


STORES = ("s3", "gs", "az")
WEB = ("https", "http")


def scheme_of(name: str) -> str:
    """Return the scheme of a URL that this module serves, or an empty string for a path."""
    scheme = name.partition("://")[0] if "://" in name else ""
    if scheme and scheme not in (*STORES, *WEB):
        raise ConfigError(f"{name}: the scheme is unknown; use one of {', '.join((*STORES, *WEB))}, or a path")
    return scheme


@contextmanager
def _store_errors(url: str) -> Iterator[None]:
    """Convert errors into ConfigError. Those of obstore share a base class that is not an OSError."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith(("obstore", "httpx")):
            raise
        raise ConfigError(f"{url}: {error}") from None


def fetch(url: str, target: Path) -> None:
    """Download a URL to a file. Raise ConfigError if it cannot be read."""
    import httpx

    with _store_errors(url), target.open("wb") as file:
        if scheme_of(url) in WEB:
            with httpx.stream("GET", url, follow_redirects=True, timeout=60.0) as response:
                response.raise_for_status()
                file.writelines(response.iter_bytes())
        else:
            store, key = _store_of(url)
            file.writelines(_obstore().get(store, key).stream())


def put(source: Path, url: str) -> None:
    """Upload a file to a URL of an object store. Raise ConfigError if it cannot be written."""
    store, key = _store_of(url)
    with _store_errors(url), source.open("rb") as file, _obstore().open_writer(store, key) as writer:
        shutil.copyfileobj(file, writer, 1 << 20)


def check_writable(url: str) -> None:
    """Raise ConfigError if nothing can be written to URLs of this kind."""
    if scheme_of(url) in WEB:
        raise ConfigError(f"{url}: the output must be a path or a URL of {', '.join(STORES)}")
    if scheme_of(url):
        _store_of(url)


def exists(url: str) -> bool:
    """Return whether a store has an object. Raise ConfigError if the store cannot be read."""
    store, key = _store_of(url)
    with _store_errors(url):
        try:
            _obstore().head(store, key)
        except FileNotFoundError:
            return False
    return True


def _store_of(url: str) -> tuple[Any, str]:
    """Return the store of a URL and the key within it."""
    parts = urlsplit(url)
    key = parts.path.lstrip("/")
    if not parts.netloc or not key:
        raise ConfigError(f"{url}: a URL looks like {parts.scheme}://BUCKET/KEY")
    _obstore()
    store: Any = importlib.import_module("obstore.store")
    return store.from_url(f"{parts.scheme}://{parts.netloc}"), key


def _obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise ConfigError(f"object stores need obstore; run {install_command('files')}") from None
