"""CUDA streams, and host memory for transfers.

A CUDA stream with its events; on the CPU a no-op, so that the same runner works on both.

All computation of a runner uses one stream, in order. Transfers of the host tier use two others, one for each
direction, so that no step waits on the host for another.

Host memory: page-locked for a GPU, or in pages of 2 MiB, if the system supports them.

Every step reads all weights. Each page of 4 KiB costs a page table lookup, two on a virtual machine.
"""

import logging
import math
import mmap
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import first_line
from engine.machine.facts import read_processor
from engine.triton_kernels import configs

Bytes = npt.NDArray[np.uint8]

log = logging.getLogger("tidemill.engine")

LOCKED_BYTES = 64 * 2**20
"""Least size of a piece of host memory that is page-locked at once, which takes about 20 ms."""

_PAGE = 4096
_HUGE = 2 * 2**20
_PIECE = 16 * _HUGE
_LINE = 64


def advise(pages: mmap.mmap) -> None:
    """Ask for huge pages; without support, the memory stays in normal pages."""
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)


class HugePages:
    """Allocator of host memory.

    Small blocks are packed into pieces. A piece returns to the system when none of its blocks is in use. Untouched
    pages take no memory.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def empty(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8, aligned to 64 bytes; initially zero."""
        taken = -(-num_bytes // _LINE) * _LINE
        if taken > _PIECE // 4:
            return _mapped(num_bytes)
        with self._lock:
            if taken > len(self._rest):
                self._rest = _mapped(_PIECE)
            part, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return part


def _mapped(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes + _HUGE, mmap.MAP_PRIVATE)  # `frombuffer` keeps it alive while any part is in use
    advise(pages)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE
    return whole[first : first + num_bytes]


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [size] on the host, page-locked for a CUDA device."""
    return torch.zeros(size, dtype=dtype, pin_memory=configs.is_cuda(device))


def host_zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Return zeros [num_bytes] uint8 in separate host pages. Raises RuntimeError if there is no memory.

    For a CUDA device they are page-locked, with exactly this size (torch's allocator rounds up to a power of two). Else
    pages are committed when first touched.
    """
    pages = _pages(num_bytes)
    if configs.is_cuda(device) and num_bytes and not _lock(pages, device):
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(pages)


def _pages(num_bytes: int) -> Bytes:
    memory = np.zeros(num_bytes + _PAGE, dtype=np.uint8)  # calloc leaves the pages uncommitted
    first = -memory.ctypes.data % _PAGE
    return memory[first : first + num_bytes]


def _lock(pages: Bytes, device: torch.device) -> bool:
    """Page-lock a part of `_pages` until all of it is freed. Return whether the driver did."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(pages.ctypes.data, pages.nbytes, 0)) == 0:
        # Unregister before the memory is freed, or the device would read pages of later allocations.
        weakref.finalize(pages.base, cudart.cudaHostUnregister, pages.ctypes.data).atexit = False
        return True
    with suppress(RuntimeError):  # consume the pending error, which the next kernel launch would report
        torch.ones(1, device=device)
    return False


class HostUnits:
    """Zeros [count, elements] on the host. For a CUDA device, pieces are page-locked by a thread.

    Locking commits memory, about 0.3 s per GiB: neither a start nor a step waits for all of it. A copy waits for the
    piece that it needs, and the thread locks the piece behind that one meanwhile. If the driver refuses, the rest stays
    unlocked: copies are then slower, and the host waits for them.

    Attributes:
        units: [count, elements].
        per_piece: Units that are locked together. No single copy may cross pieces.
    """

    def __init__(self, count: int, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        size = elements * dtype.itemsize
        aligned = _PAGE // math.gcd(size, _PAGE)  # fewest units in whole pages
        self.per_piece = -(-LOCKED_BYTES // (size * aligned)) * aligned
        self._pages, self._size, self._device = _pages(count * size), size, device
        self.units = torch.from_numpy(self._pages).view(dtype).view(count, elements)
        self._missing = set(range(-(-count // self.per_piece))) if configs.is_cuda(device) else set[int]()
        self._next = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def lock(self, piece: int) -> None:
        """Wait until a piece is page-locked; the thread takes it next. Call it before the first copy of its units."""
        if piece not in self._missing:
            return
        if self._thread is None:
            self._lock_piece(piece)
            return
        with self._changed:
            self._next = piece
            self._changed.wait_for(lambda: piece not in self._missing)

    def lock_all(self) -> None:
        """Begin to page-lock all pieces; return at once. Before this call, each caller of `lock` locks its own."""
        if self._missing and self._thread is None:
            self._thread = threading.Thread(target=self._lock_missing, name="tidemill-page-lock", daemon=True)
            self._thread.start()

    def _lock_missing(self) -> None:
        while self._missing:
            with self._changed:
                piece = min(self._missing, key=lambda each: (each < self._next, each))
                self._next = piece + 1
            self._lock_piece(piece)

    def _lock_piece(self, piece: int) -> None:
        """Lock a piece. After a refusal no other piece is tried."""
        size = self.per_piece * self._size
        part, locked = self._pages[piece * size : (piece + 1) * size], False
        try:
            part.fill(0)  # commits the pages; the driver would do that while steps cannot launch
            locked = _lock(part, self._device)
        finally:
            with self._changed:
                if not locked:
                    left = sum(self._pages[each * size : (each + 1) * size].nbytes for each in self._missing)
                    text = "cannot page-lock %.2f of %.2f GiB of host memory: swaps there are slow; reduce --swap-space"
                    log.warning(text, left / 2**30, self._pages.nbytes / 2**30)
                    self._missing.clear()
                self._missing.discard(piece)
                self._changed.notify_all()


_FEW_CORES = 4
"""Number of cores up to which a spinning thread would take a core from planning, event loop or tokenizer."""


@cache
def _few_cores() -> bool:
    return read_processor().cores <= _FEW_CORES


class Mark(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait until the device has passed the point."""


class _Passed:
    def synchronize(self) -> None:
        pass


class DeviceStream:
    """A stream: `use()` makes it current in this thread; `mark()` marks the point after all work launched so far."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if configs.is_cuda(device) else None  # type: ignore[no-untyped-call]

    @classmethod
    def current(cls, device: torch.device) -> "DeviceStream":
        """Return the stream in which this thread currently launches."""
        stream = cls.__new__(cls)
        stream.stream = torch.cuda.current_stream(device) if configs.is_cuda(device) else None
        return stream

    def use(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def lost(self) -> str | None:
        """Return why the stream is unusable; None if it works.

        An error in a CUDA kernel is sticky: every later call in the process fails. Lack of memory is not such an error.
        """
        try:
            if self.stream is not None:
                self.stream.synchronize()
        except RuntimeError as error:
            return first_line(error)
        return None

    def mark(self) -> Mark:
        if self.stream is None:
            return _Passed()
        # A thread that waits for a CUDA event spins unless it is told to block, which takes about 20 µs longer.
        event = torch.cuda.Event(blocking=_few_cores())  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def wait(self, mark: Mark) -> None:
        """Delay work launched from now on until `mark`, of any stream, is passed; return at once."""
        if self.stream is not None:
            assert isinstance(mark, torch.cuda.Event)
            self.stream.wait_event(mark)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Start a copy to or from pinned memory."""
        with self.use():
            target.copy_(source, non_blocking=True)

    def fetch(self, source: Tensor, target: Tensor) -> Mark:
        """Start a copy to `target` on the host (pinned on CUDA) and mark its end."""
        target.copy_(source, non_blocking=True)
        return self.mark()
