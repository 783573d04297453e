"""Host memory in pages of 2 MiB, if the system supports them.

Every step reads all weights. Each page of 4 KiB costs a page table lookup, two on a virtual machine.
"""

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

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
