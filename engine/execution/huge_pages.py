"""Host memory in pages of 2 MiB, where the system has them.

Every step reads the weights from one end to the other. In pages of 4 KiB each of them costs a look at the page tables,
which on a virtual machine are those of two systems.
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
    """Ask for large pages; without them, or on a system that knows none, the memory is as it was."""
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)


class HugePages:
    """Hands out memory. What is small lies side by side in pieces, each of which goes back to the system when nothing
    in it is in use any more; a page that nobody has touched takes no memory."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def empty(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 that begin at a multiple of 64 bytes; zeros at first."""
        taken = -(-num_bytes // _LINE) * _LINE
        if taken > _PIECE // 4:
            return _mapped(num_bytes)
        with self._lock:
            if taken > len(self._rest):
                self._rest = _mapped(_PIECE)
            part, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return part


def _mapped(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes + _HUGE, mmap.MAP_PRIVATE)  # `frombuffer` keeps it as long as any part is in use
    advise(pages)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE
    return whole[first : first + num_bytes]
