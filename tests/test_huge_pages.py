"""Memory of large pages: parts that do not meet, and that go back to the system."""

import gc
import mmap
import threading
from itertools import pairwise

import pytest
import torch

from engine.execution.pool import HostMemory
from engine.execution.stream import HugePages


def test_parts_lie_side_by_side_and_do_not_meet() -> None:
    pages = HugePages()
    sizes = [1, 64, 65, 0, 4096, 3 * 2**20, 2**20 + 1, 9 * 2**20, 40 * 2**20, 7]
    parts = [pages.empty(size) for size in sizes]
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert part.shape == (size,) and part.dtype == torch.uint8 and (not size or part.data_ptr() % 64 == 0)
        assert not part.any()
        part.fill_(number + 1)
    assert all((part == number + 1).all() for number, part in enumerate(parts))
    small = [part.data_ptr() for size, part in zip(sizes, parts, strict=True) if 0 < size < 2**20]
    assert max(small) - min(small) < 32 * 2**20


@pytest.mark.slow
def test_what_nobody_uses_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared piece when its last part is given up, a piece of one part at once."""
    closed: list[int] = []

    class Pages(mmap.mmap):
        def __del__(self) -> None:
            closed.append(len(self))

    monkeypatch.setattr(mmap, "mmap", Pages)
    pages = HugePages()
    large, first, second = pages.empty(20 * 2**20), pages.empty(2**20), pages.empty(2**20)
    del large
    gc.collect()
    assert closed == [22 * 2**20]
    filled = [pages.empty(2**20) for _ in range(31)]  # the piece is full, and one more begun
    del first, filled
    gc.collect()
    assert len(closed) == 1
    second.fill_(1)
    del second
    gc.collect()
    assert closed == [22 * 2**20, 34 * 2**20]


@pytest.mark.parametrize("refused", [True, False])
def test_a_system_without_them_gives_others(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    if refused:

        class Pages(mmap.mmap):
            def madvise(self, *args: int) -> None:
                if args[0] == mmap.MADV_HUGEPAGE:
                    raise OSError("invalid argument")
                super().madvise(*args)

        monkeypatch.setattr(mmap, "mmap", Pages)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert HugePages().empty(100).sum() == 0
    memory = HostMemory(2**20, 2**20)
    memory.tensor.fill_(1)
    memory.give_back(2**20)
    assert memory.tensor.sum() == 2**20


def test_threads_get_parts_of_their_own() -> None:
    pages = HugePages()
    found: list[torch.Tensor] = []

    def take() -> None:
        found.extend(pages.empty(1000) for _ in range(200))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    addresses = sorted(part.data_ptr() for part in found)
    assert min(b - a for a, b in pairwise(addresses)) >= 1000
