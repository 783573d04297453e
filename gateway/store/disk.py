"""The only way that files and batches reach the disk: temporary file, fsync, rename, fsync of the folder.

Every primitive is a method of `Disk`, so that a test can record them and replay each prefix as a crash, or let any of
them fail. Blocking: call it in a worker thread. Knows nothing of what the files hold.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.http.errors import ApiError
from gateway.store.health import StorageHealth

# Faults of one stored file: a bad sector, a failed checksum of the file system, a folder in the file's place.
FILE_FAULTS = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EISDIR})


class StorageError(ApiError):
    """The state folder is full or faulty: 507 to a client, a pause to a job. Acknowledged data is not affected.

    `in_doubt`: a commit whose end the disk did not confirm. It has not happened, but may have after a crash, until
    another commit succeeds.
    """

    def __init__(self, *, in_doubt: bool = False) -> None:
        self.in_doubt = in_doubt
        message = "The server cannot store or read data at the moment; try again later."
        super().__init__(507, message, code="insufficient_storage", headers={"retry-after": "10"})


class UnreadableError(Exception):
    """A stored file is damaged; `gone`: the file, or its end, does not exist, so another attempt is of no use."""

    def __init__(self, *, gone: bool = False) -> None:
        super().__init__(gone)
        self.gone = gone


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Raise UnreadableError for a fault of the file `path`, StorageError for a fault of the folder or the system."""
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


class DiskFile:
    """A file open for writing at chosen places. Use `Disk.create` and `Disk.open_journal`."""

    def __init__(self, disk: "Disk", path: Path, descriptor: int) -> None:
        self.path = path
        self.size = 0
        self.disk = disk
        self._descriptor = descriptor

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append to what this object has written so far."""
        self.write_at(data, self.size)
        self.size += len(data)

    def write_at(self, data: bytes | bytearray | memoryview, start: int) -> None:
        self.disk.write(self._descriptor, self.path, data, start)

    def length(self) -> int:
        """Return the bytes that the file has on the disk."""
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        """Return when everything written is on the disk. After an error the data must be written again: the kernel
        may have dropped it and will not say so twice."""
        self.disk.sync(self._descriptor, self.path)
        self.disk.health.worked("files")

    def close(self) -> None:
        """Idempotent."""
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
    """The primitives, and `publish`, which puts them together. `health` is told of faults and successes."""

    def __init__(self) -> None:
        self.health = StorageHealth()

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Turn every OSError into StorageError: whatever its number, the data is not stored and may be later."""
        try:
            yield
        except OSError as error:
            self.health.failed("files", error)
            raise StorageError from error

    def create(self, path: Path) -> DiskFile:
        """A new file, readable by its owner only."""
        return DiskFile(self, path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def open_journal(self, path: Path) -> DiskFile:
        """A file whose content stays, made if there is none."""
        return DiskFile(self, path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def write(self, descriptor: int, path: Path, data: bytes | bytearray | memoryview, start: int) -> None:  # noqa: ARG002
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, start)
            if written == 0:
                raise OSError(errno.ENOSPC, "nothing was written")
            view, start = view[written:], start + written

    def read_at(self, descriptor: int, start: int, length: int) -> bytes:
        """Return exactly these bytes. Raises EOFError when the file ends before them."""
        data = os.pread(descriptor, length, start)
        while len(data) < length:
            more = os.pread(descriptor, length - len(data), start + len(data))
            if not more:
                raise EOFError("a stored file is shorter than its rows say")
            data += more
        return data

    def sync(self, descriptor: int, path: Path) -> None:  # noqa: ARG002
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Make names in a folder durable: files that appeared in it or were renamed into it."""
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
        """Let finished files of one folder appear under their names, whole and for good. On an error none is left."""
        try:
            for file, target in files:
                file.sync()
                file.close()
                self.rename(file.path, target)
            for folder in {target.parent for _, target in files}:
                self.sync_folder(folder)
        except BaseException:  # all files or none, whatever came between
            for file, target in files:
                file.discard()
                with suppress(OSError):
                    self.remove(target)
            raise
