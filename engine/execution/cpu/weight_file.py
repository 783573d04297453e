"""Streamed layers, and a streamed cache, in private files that threads read into two buffers.

The file holds the layers one after the other, as kernels read them. They are packed once at load, so that a pass over
the model consists of a few long reads; packing in every pass would take longer than the reads. The file has no name, so
other processes cannot open or change it, and it disappears with the process.

Reads bypass the page cache (O_DIRECT). The cache would otherwise grow to the size of the model beyond the stated budget
and evict the start of the file before the next pass. If the file system does not support this, read data is dropped
from the page cache at once (POSIX_FADV_DONTNEED).

A streamed cache has a file of its own, layer by layer. Each of its buffers has a thread, which keeps the order of reads
and writes: a layer always passes through the same buffer.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError, StreamingError
from engine.execution.offload import BUFFERS
from engine.execution.streamed_cache import BUFFERS as CACHE_BUFFERS
from engine.execution.streamed_cache import Span

PAGE = 4096  # O_DIRECT needs addresses, offsets and sizes to be multiples of this
_PIECE = 8 * 2**20  # bytes per call
_HELPERS = 4
_Move = Callable[[int, memoryview], None]
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_MOUNTS = Path("/proc/self/mountinfo")


class WeightFile:
    """A Transport of `count` layers of up to `size` bytes each, in a file in `folder`, freed with its last reader.

    Raises ConfigError.
    """

    def __init__(self, folder: Path, size: int, count: int) -> None:
        self._size = -(-size // PAGE) * PAGE
        self._count = count
        self._file = _open(folder, self._size * count, "--offload-weights")
        self._maps = [mmap.mmap(-1, self._size) for _ in range(BUFFERS)]
        self.buffers = [torch.frombuffer(each, dtype=torch.uint8) for each in self._maps]
        self._threads = ThreadPoolExecutor(BUFFERS, thread_name_prefix="tidemill-weights")
        self._reads: list[Future[None] | None] = [None] * BUFFERS

    def keep(self, place: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        for at, part in parts:
            self.buffers[0][at : at + part.nbytes].copy_(part)
        try:
            self._file.write(place * self._size, memoryview(self._maps[0]))
        except OSError as error:
            raise ConfigError(f"writing the streamed weights failed: {error.strerror}") from None

    def begin(self, place: int, buffer: int) -> None:
        target = memoryview(self._maps[buffer])
        self._reads[buffer] = self._threads.submit(self._file.read, place * self._size, target)

    def wait(self, buffer: int) -> None:
        read = self._reads[buffer]
        assert read is not None, "begin() must precede wait()"
        read.result()

    def release(self, buffer: int) -> None:
        """See Transport; a no-op, because computing has ended."""

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


class CacheFile:
    """A CacheStore in a file in `folder`."""

    alignment = PAGE

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, _File(-1, direct=False)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="tidemill-cache") for _ in range(CACHE_BUFFERS)]
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="tidemill-cache-part")
        self._loads: list[Future[None] | None] = [None] * CACHE_BUFFERS
        self._saves: list[Future[None]] = []
        self._lost: StreamingError | None = None

    def attach(self, buffers: Tensor, num_layers: int) -> None:
        self._views = [memoryview(each.view(-1).numpy()) for each in buffers]
        self._slice_bytes, self._size = buffers.shape[2], len(self._views[0])
        self._file = _open(self._folder, self._size * num_layers, "--swap-space")

    def load(self, layer: int, spans: Sequence[Span]) -> None:
        self._loads[layer % CACHE_BUFFERS] = self._submit(self._file.read, layer, spans)

    def wait(self, layer: int) -> None:
        load = self._loads[layer % CACHE_BUFFERS]
        assert load is not None, "load() must precede wait()"
        load.result()

    def save(self, layer: int, spans: Sequence[Span]) -> None:
        if spans:
            self._saves.append(self._submit(self._file.write, layer, spans))

    def settle(self) -> None:
        """See CacheStore. After a failed write the cache is lost, and every later step fails."""
        saves, self._saves = self._saves, []
        try:
            for save in saves:
                save.result()
        except OSError as error:
            self._lost = StreamingError(f"writing the streamed cache failed: {error.strerror}")
        if self._lost is not None:
            raise self._lost

    def _submit(self, move: _Move, layer: int, spans: Sequence[Span]) -> Future[None]:
        each, first, view = self._slice_bytes, layer * self._size, self._views[layer % CACHE_BUFFERS]
        firsts = [first + begin * each for begin, _ in spans]
        views = [view[begin * each : end * each] for begin, end in spans]
        return self._threads[layer % CACHE_BUFFERS].submit(_move_all, self._helpers, move, firsts, views)


class _File:
    """An unnamed file. An access in progress holds it, but not its user, so that its end need not be awaited.

    `direct`: accesses bypass the page cache; otherwise they drop their pages from it.
    """

    def __init__(self, number: int, *, direct: bool) -> None:
        self.number, self.direct = number, direct

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)

    def read(self, first: int, view: memoryview) -> None:
        """Fill `view` from position `first` on. Raises StreamingError."""
        at, size = 0, len(view)
        try:
            while at < size:
                got = os.preadv(self.number, [view[at : at + _PIECE]], first + at)
                if got <= 0:
                    raise StreamingError(
                        f"the file of streamed layers ends after {first + at} bytes, expected {first + size}"
                    )
                at += got
            if not self.direct:
                os.posix_fadvise(self.number, first, size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise StreamingError(f"reading streamed layers failed: {error.strerror}") from None

    def write(self, first: int, view: memoryview) -> None:
        """Write `view` from position `first` on. Raises OSError."""
        at = 0
        while at < len(view):
            at += os.pwrite(self.number, view[at : at + _PIECE], first + at)
        if not self.direct:
            os.fdatasync(self.number)
            os.posix_fadvise(self.number, first, len(view), os.POSIX_FADV_DONTNEED)


def _move_all(helpers: ThreadPoolExecutor, move: _Move, firsts: list[int], views: list[memoryview]) -> None:
    """Move all parts, several at a time: a small one takes less time than its latency."""
    for _ in helpers.map(move, firsts, views):
        pass


def _open(folder: Path, size: int, flag: str) -> _File:
    """Create an unnamed file of this size. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (kind := file_system(folder)) in _IN_MEMORY:
            raise ConfigError(
                f"{flag}: {folder} is on {kind}, which is memory; set XDG_CACHE_HOME to a folder on a disk"
            )
        handle, name = tempfile.mkstemp(prefix="weights-", dir=folder)
        try:
            os.posix_fallocate(handle, 0, size)
            past = _past_the_cache(name)
            return _File(os.dup(handle), direct=False) if past is None else _File(past, direct=True)
        finally:
            os.unlink(name)
            os.close(handle)
    except OSError as error:
        room = f"{folder} has no room for {size / 2**30:.1f} GiB: {error.strerror}"
        raise ConfigError(f"{flag}: {room}; set XDG_CACHE_HOME to a folder with room") from None


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
