"""Files at URLs: `https://` is read, `s3://`, `gs://` and `az://` are read and written.

Object stores need obstore (the extra `files`), which takes credentials from the environment.
"""

import importlib
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from engine.errors import ConfigError
from engine.machine.extras import install_command

STORES = ("s3", "gs", "az")
WEB = ("https", "http")


def scheme_of(name: str) -> str:
    """Return the scheme of a URL that this module serves, or an empty string for a path."""
    scheme = name.partition("://")[0] if "://" in name else ""
    if scheme and scheme not in (*STORES, *WEB):
        raise ConfigError(f"{name}: the scheme is unknown; use one of {', '.join((*STORES, *WEB))}, or a path")
    return scheme


def fetch(url: str, target: Path) -> None:
    """Download a URL to a file. Raise ConfigError if it cannot be read."""
    try:
        with target.open("wb") as file:
            if scheme_of(url) in WEB:
                with httpx.stream("GET", url, follow_redirects=True, timeout=60.0) as response:
                    response.raise_for_status()
                    file.writelines(response.iter_bytes())
            else:
                store, key = _store_of(url)
                file.writelines(_obstore().get(store, key).stream())
    except (httpx.HTTPError, OSError) as error:
        raise ConfigError(f"{url}: {error}") from None
    except Exception as error:
        if not _is_store_error(error):
            raise
        raise ConfigError(f"{url}: {error}") from None


def put(source: Path, url: str) -> None:
    """Upload a file to a URL of an object store. Raise ConfigError if it cannot be written."""
    store, key = _store_of(url)
    obstore = _obstore()
    try:
        with source.open("rb") as file, obstore.open_writer(store, key) as writer:
            shutil.copyfileobj(file, writer, 1 << 20)
    except Exception as error:
        if not _is_store_error(error):
            raise
        raise ConfigError(f"{url}: {error}") from None


def check_writable(url: str) -> None:
    """Raise ConfigError if nothing can be written to URLs of this kind."""
    if scheme_of(url) in WEB:
        raise ConfigError(f"{url}: the output must be a path or a URL of {', '.join(STORES)}")
    if scheme_of(url):
        _store_of(url)


def exists(url: str) -> bool:
    """Return whether a store has an object. Raise ConfigError if the store cannot be read."""
    store, key = _store_of(url)
    try:
        _obstore().head(store, key)
    except FileNotFoundError:
        return False
    except Exception as error:
        if not _is_store_error(error):
            raise
        raise ConfigError(f"{url}: {error}") from None
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


def _is_store_error(error: Exception) -> bool:
    """Errors of obstore share a base class that is not an OSError; missing objects raise FileNotFoundError."""
    return isinstance(error, OSError) or type(error).__module__.startswith("obstore")


def _obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise ConfigError(f"object stores need obstore; run {install_command('files')}") from None
