"""Host memory: page-locked for a GPU, or in pages of 2 MiB, if the system supports them.

Every step reads all weights. Each page of 4 KiB costs a page table lookup, two on a virtual machine.
"""

import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from engine.triton_kernels import configs

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
    memory = np.zeros(num_bytes + _PAGE, dtype=np.uint8)  # calloc leaves the pages uncommitted
    first = -memory.ctypes.data % _PAGE
    zeros = torch.from_numpy(memory[first : first + num_bytes])
    if not configs.is_cuda(device) or not num_bytes:
        return zeros
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(zeros.data_ptr(), num_bytes, 0)) == 0:
        # Unregister before the memory is freed, or the device would read pages of later allocations.
        weakref.finalize(memory, cudart.cudaHostUnregister, zeros.data_ptr()).atexit = False
        return zeros
    with suppress(RuntimeError):  # consume the pending error, which the next kernel launch would report
        torch.ones(1, device=device)
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
