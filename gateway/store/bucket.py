"""Bodies and journals in an object store (obstore), whose local files are copies. Blocking.

A body is one object. A journal has one object per written group, named by the group's offset. Credentials come from
the environment.
"""

import errno
import importlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.machine.extras import install_command
from engine.panics import LibraryPanicError, as_error
from gateway.store.disk import Disk, StorageError

PIECE_BYTES = 16 * 1024 * 1024
READERS = 16
"""Objects that are read side by side."""
_RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}


class Bucket:
    """Objects below a URL such as `s3://BUCKET/PREFIX`. Methods raise StorageError if the store cannot be reached.

    Raises ConfigError for an invalid URL, or without obstore.
    """

    def __init__(self, url: str, disk: Disk) -> None:
        try:
            self._obstore: Any = importlib.import_module("obstore")
            importlib.import_module("obstore.exceptions")
            stores: Any = importlib.import_module("obstore.store")
        except ImportError:
            raise ConfigError(f"--state-dir with objects needs obstore; run {install_command('cluster')}") from None
        self._disk = disk
        try:
            self._store: Any = stores.from_url(url, retry_config=_RETRIES)
        except BaseException as raised:
            error = as_error(raised)
            raise ConfigError(f"--state-dir objects={url} cannot be used: {str(error).splitlines()[0]}") from error

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except BaseException as raised:
            error = as_error(raised)
            if not isinstance(error, (self._obstore.exceptions.BaseError, OSError, LibraryPanicError)):
                raise
            fault = OSError(errno.EREMOTEIO, f"the object store: {type(error).__name__}")
            fault.__cause__ = error
            self._disk.health.failed("objects", OSError(*fault.args))
            raise StorageError(is_away=True) from fault
        self._disk.health.worked("objects")

    def put(self, key: str, content: Path | bytes) -> None:
        """Store an object; a file is sent in pieces."""
        with self._reaching():
            self._obstore.put(self._store, key, content)

    def fetch(self, key: str, target: Path, temp: Path) -> None:
        """Copy an object to a file, durably, by way of `temp`. Does nothing if there is no such object."""
        try:
            with self._reaching():
                size = self._obstore.head(self._store, key)["size"]
            with self._disk.storing():
                file = self._disk.create(temp)
            try:
                while file.size < size:
                    end = min(size, file.size + PIECE_BYTES)
                    with self._reaching():
                        piece = self._obstore.get_range(self._store, key, start=file.size, end=end)
                    with self._disk.storing():
                        file.write(memoryview(piece))
                with self._disk.storing():
                    self._disk.publish((file, target))
            except BaseException:
                file.discard()
                raise
        except FileNotFoundError:  # also if the object is deleted meanwhile
            return

    def parts(self, prefix: str, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents of the objects with the keys `prefix` + name."""
        with ThreadPoolExecutor(READERS) as pool:
            for start in range(0, len(names), READERS):
                some = names[start : start + READERS]
                yield from zip(some, pool.map(lambda name: self._read(prefix + name), some), strict=True)

    def _read(self, key: str) -> bytes:
        with self._reaching():
            return bytes(self._obstore.get(self._store, key).bytes())

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; a missing one is not an error."""
        with suppress(FileNotFoundError), self._reaching():
            self._obstore.delete(self._store, keys)

    def names(self, prefix: str) -> list[str]:
        """Return the sorted keys that begin with `prefix`, without the prefix."""
        with self._reaching():
            pages = self._obstore.list(self._store, prefix)
            return sorted(entry["path"].removeprefix(prefix) for page in pages for entry in page)

    def folders(self, prefix: str) -> list[str]:
        """Return the sorted first parts, up to a slash, of the keys that begin with `prefix`."""
        with self._reaching():
            found = self._obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        return sorted(str(name).removeprefix(prefix).strip("/") for name in found)

    def delete_all(self, prefix: str) -> None:
        """Remove the objects whose keys begin with `prefix`."""
        self.delete([prefix + name for name in self.names(prefix)])
