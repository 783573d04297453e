"""Streamed layers in a private file, read by threads into two buffers.

The file holds the layers one after the other, as kernels read them. They are packed once at load, so that a pass over
the model consists of a few long reads; packing in every pass would take longer than the reads. The file has no name, so
other processes cannot open or change it, and it disappears with the process.

Reads bypass the page cache (O_DIRECT). The cache would otherwise grow to the size of the model beyond the stated budget
and evict the start of the file before the next pass. If the file system does not support this, read data is dropped
from the page cache at once (POSIX_FADV_DONTNEED).
"""

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError, WeightReadError
from engine.execution.offload import BUFFERS

PAGE = 4096  # O_DIRECT needs addresses, offsets and sizes to be multiples of this
_PIECE = 8 * 2**20  # bytes per call
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_MOUNTS = Path("/proc/self/mountinfo")


class WeightFile:
    """A Transport of `count` layers of up to `size` bytes each, in a file in `folder`. Raises ConfigError."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        self._size = -(-size // PAGE) * PAGE
        self._count = count
        descriptor, self.direct = _open(folder, self._size * count)
        self._file = _Descriptor(descriptor)
        self._maps = [mmap.mmap(-1, self._size) for _ in range(BUFFERS)]
        self.buffers = [torch.frombuffer(each, dtype=torch.uint8) for each in self._maps]
        self._threads = ThreadPoolExecutor(BUFFERS, thread_name_prefix="tidemill-weights")
        self._reads: list[Future[None] | None] = [None] * BUFFERS

    def keep(self, place: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        """See Transport."""
        for at, part in parts:
            self.buffers[0][at : at + part.nbytes].copy_(part)
        view, at = memoryview(self._maps[0]), 0
        try:
            while at < self._size:
                at += os.pwrite(self._file.number, view[at : at + _PIECE], place * self._size + at)
            if not self.direct:
                os.fdatasync(self._file.number)
                _forget(self._file.number, (place * self._size, self._size))
        except OSError as error:
            raise ConfigError(f"writing the streamed weights failed: {error.strerror}") from None

    def begin(self, place: int, buffer: int) -> None:
        """See Transport."""
        span = (place * self._size, self._size)
        self._reads[buffer] = self._threads.submit(_read, self._file, span, self.direct, self._maps[buffer])

    def wait(self, buffer: int) -> None:
        """See Transport."""
        read = self._reads[buffer]
        assert read is not None, "begin() must precede wait()"
        read.result()

    def release(self, buffer: int) -> None:
        """See Transport; a no-op, because computing has ended."""

    def close(self) -> None:
        """Free the file; no read may be started afterwards. Without a call the file is freed with its last reader."""
        self._threads.shutdown(wait=True)
        self._file.close()

    def seconds(self) -> float:
        """Return the seconds per layer, as a mean over all layers, at least once, for about half a second."""
        began, done = time.perf_counter(), 0
        for place in range(max(self._count, BUFFERS)):
            if done and place % BUFFERS == 0 and time.perf_counter() - began > 0.5:
                break
            buffer = place % BUFFERS
            if place >= BUFFERS:
                self.wait(buffer)
                done += 1
            self.begin(place % self._count, buffer)
        for buffer in range(BUFFERS):
            self.wait(buffer)
            done += 1
        return (time.perf_counter() - began) / done


class _Descriptor:
    """Owner of a file descriptor. A read in progress holds it, so that its end need not be awaited."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1

    __del__ = close


def _read(file: _Descriptor, span: tuple[int, int], direct: bool, target: mmap.mmap) -> None:
    """Read `span` = (first, size) of a file. A function without WeightFile, so that a read does not keep it alive."""
    first, size = span
    view, at = memoryview(target), 0
    try:
        while at < size:
            got = os.preadv(file.number, [view[at : at + _PIECE]], first + at)
            if got <= 0:
                raise WeightReadError(f"the weight file ends after {first + at} bytes, expected {first + size}")
            at += got
        if not direct:
            _forget(file.number, span)
    except OSError as error:
        raise WeightReadError(f"reading the streamed weights failed: {error.strerror}") from None


def _forget(fd: int, span: tuple[int, int]) -> None:
    """Drop a span from the page cache."""
    os.posix_fadvise(fd, *span, os.POSIX_FADV_DONTNEED)


def _open(folder: Path, size: int) -> tuple[int, bool]:
    """Create an unnamed file of this size; return its descriptor and whether it bypasses the page cache."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (kind := file_system(folder)) in _IN_MEMORY:
            raise ConfigError(
                f"--offload-weights: {folder} is on {kind}, which is memory; set XDG_CACHE_HOME to a folder on a disk"
            )
        handle, name = tempfile.mkstemp(prefix="weights-", dir=folder)
        try:
            os.posix_fallocate(handle, 0, size)
            past = _past_the_cache(name)
            return (os.dup(handle), False) if past is None else (past, True)
        finally:
            os.unlink(name)
            os.close(handle)
    except OSError as error:
        room = f"{folder} has no room for {size / 2**30:.1f} GiB: {error.strerror}"
        raise ConfigError(f"--offload-weights: {room}; set XDG_CACHE_HOME to a folder with room") from None


def _past_the_cache(name: str) -> int | None:
    """Open the file to bypass the page cache; None if its file system does not support it."""
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None


def file_system(folder: Path) -> str:
    """Return the type of the folder's file system; empty if unknown."""
    device = folder.stat().st_dev
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            return rest.split()[0]
    return ""
