"""Durable file writes (temporary file, fsync, rename, fsync of the folder), and the health of the state folder.

Every primitive is a method of `Disk`, so that tests can record the calls, replay each prefix as a crash, or inject
errors. Blocking: call it in a worker thread.

`Bucket`: bodies and journals in an object store (obstore), whose local files are copies.

A body is one object. A journal has one object per written group, named by the group's offset. Credentials come from
the environment.
"""

import errno
import importlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.machine.extras import install_command
from engine.panics import LibraryPanicError, as_error
from gateway.http.errors import ApiError

log = logging.getLogger("tidemill.gateway")

QUIET_SECONDS = 600.0
"""Minimum seconds between two log lines with the same cause."""

# Errors that concern one file only: bad sector, file system checksum, a folder under the file's name.
FILE_FAULTS = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EISDIR})


class StorageError(ApiError):
    """The state folder is full or failing: clients get a 507 and batches pause. Acknowledged data is not affected.

    `in_doubt`: the disk did not confirm a commit. The change is not visible, but may reappear after a crash until
    another commit succeeds. `is_away`: a database on the network cannot be reached, and clients get a 503.
    """

    def __init__(self, *, in_doubt: bool = False, is_away: bool = False) -> None:
        self.in_doubt = in_doubt
        message = "The server cannot store or read data at the moment; try again later."
        status, code = (503, "store_unavailable") if is_away else (507, "insufficient_storage")
        super().__init__(status, message, code=code, headers={"retry-after": "10"})


class UnreadableError(Exception):
    """A stored file is damaged. `gone`: the file or its end is missing, so a retry cannot succeed."""

    def __init__(self, *, gone: bool = False) -> None:
        super().__init__(gone)
        self.gone = gone


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Raise UnreadableError if only the file `path` is damaged, and StorageError if the folder or the system fails."""
    try:
        yield
    except EOFError as error:
        raise UnreadableError(gone=True) from error
    except OSError as error:
        if error.errno == errno.ENOENT and path.parent.is_dir():
            raise UnreadableError(gone=True) from error
        if error.errno in FILE_FAULTS:
            raise UnreadableError from error
        raise StorageError from error


def cause_of(error: BaseException) -> str:
    """Describe the system error behind an exception, without paths, e.g. `ENOSPC: No space left on device`."""
    cause = error.__cause__ or error
    if isinstance(cause, OSError) and cause.errno is not None:
        return f"{errno.errorcode.get(cause.errno, cause.errno)}: {cause.strerror or os.strerror(cause.errno)}"
    if isinstance(cause, sqlite3.Error) and (name := getattr(cause, "sqlite_errorname", None)):
        return f"{name}: {cause}"
    if hasattr(cause, "sqlstate"):
        return f"PostgreSQL: {str(cause).splitlines()[0]}"
    return type(cause).__name__


class StorageHealth:
    """The current error of each part of the folder (e.g. `files`, `database`). Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults: dict[str, str] = {}
        self._logged: dict[str, float] = {}
        self._told = False

    @property
    def fault(self) -> str | None:
        """Cause of a current error; None if the last write of each part succeeded."""
        return next(iter(tuple(self._faults.values())), None)

    def failed(self, part: str, error: BaseException) -> None:
        """Record an error; log it unless its cause was logged within QUIET_SECONDS."""
        cause, now = cause_of(error), self._clock()
        self._faults[part] = cause
        if now - self._logged.get(cause, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._logged[cause] = now
            self._told = True
            log.error("the state folder cannot be used (%s); uploads are refused and batches pause until then", cause)

    def worked(self, part: str) -> None:
        """Record a successful write of the part."""
        if self._faults.pop(part, None) is not None and not self._faults and self._told:
            self._told = False
            log.info("the state folder can be used again")


class DiskFile:
    """A file open for writing at given offsets. Use `Disk.create` and `Disk.open_journal`."""

    def __init__(self, disk: "Disk", path: Path, descriptor: int) -> None:
        self.path = path
        self.size = 0
        self.disk = disk
        self._descriptor = descriptor

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append to the data that this object has written."""
        self.write_at(data, self.size)
        self.size += len(data)

    def write_at(self, data: bytes | bytearray | memoryview, start: int) -> None:
        self.disk.write(self._descriptor, self.path, data, start)

    def length(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        """Flush the data to the disk. After an error the data must be written again: the kernel may have dropped it,
        which it reports only once."""
        self.disk.sync(self._descriptor, self.path)
        self.disk.health.worked("files")

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def discard(self) -> None:
        """Close and remove a file that has not been acknowledged."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            self.disk.remove(self.path)


class Disk:
    """File primitives, and `publish`, which combines them. Errors and successes are reported to `health`."""

    def __init__(self) -> None:
        self.health = StorageHealth()

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Convert every OSError into StorageError: the data was not stored, and a retry may succeed."""
        try:
            yield
        except OSError as error:
            self.health.failed("files", error)
            raise StorageError from error

    def create(self, path: Path) -> DiskFile:
        """Create a file with mode 0600."""
        return DiskFile(self, path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def open_journal(self, path: Path) -> DiskFile:
        """Open a file without truncating it, and create it if necessary."""
        return DiskFile(self, path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def write(self, descriptor: int, path: Path, data: bytes | bytearray | memoryview, start: int) -> None:  # noqa: ARG002
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, start)
            if written == 0:
                raise OSError(errno.ENOSPC, "nothing was written")
            view, start = view[written:], start + written

    def read_at(self, descriptor: int, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`. Raises EOFError if the file is shorter."""
        data = os.pread(descriptor, length, start)
        while len(data) < length:
            more = os.pread(descriptor, length - len(data), start + len(data))
            if not more:
                raise EOFError("the stored file is shorter than recorded in the database")
            data += more
        return data

    def sync(self, descriptor: int, path: Path) -> None:  # noqa: ARG002
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Make the directory entries of a folder durable, after files were created in it or renamed into it."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file; a missing one is not an error."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def publish(self, *files: tuple[DiskFile, Path]) -> None:
        """Move finished files to their targets, durably. On an error all files are removed."""
        try:
            for file, target in files:
                file.sync()
                file.close()
                self.rename(file.path, target)
            for folder in {target.parent for _, target in files}:
                self.sync_folder(folder)
        except BaseException:  # all files or none, also on a cancellation
            for file, target in files:
                file.discard()
                with suppress(OSError):
                    self.remove(target)
            raise


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
