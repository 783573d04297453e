"""One CUDA stream with its events; on the CPU nothing at all. Lets the same runner run on both.

Everything the runner computes goes down one lane, in order, and transfers of the host tier down two others, one each
way: no step has to wait for another on the host.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.machine.facts import read_processor
from engine.triton_kernels import configs

_PAGE = 4096
_FEW_CORES = 4
"""With so many a thread that spins takes a core from planning, the event loop or the tokenizer."""


@cache
def _few_cores() -> bool:
    return read_processor().cores <= _FEW_CORES


class Mark(Protocol):
    """A point in a lane."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


class _Passed:
    def synchronize(self) -> None:
        pass


class Lane:
    """`use()` makes it current in this thread; `mark()` sets a point behind all that was launched so far."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if configs.is_cuda(device) else None  # type: ignore[no-untyped-call]

    @classmethod
    def current(cls, device: torch.device) -> "Lane":
        """The lane that this thread launches in."""
        lane = cls.__new__(cls)
        lane.stream = torch.cuda.current_stream(device) if configs.is_cuda(device) else None
        return lane

    def use(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def lost(self) -> str | None:
        """Why nothing runs in it any more; None: it runs. An error inside a CUDA kernel stays: every later call of the
        process meets it, whoever asks. (To have no memory is no such error.)"""
        try:
            if self.stream is not None:
                self.stream.synchronize()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return None

    def mark(self) -> Mark:
        if self.stream is None:
            return _Passed()
        # a thread that waits for a CUDA event spins, unless it is told to sleep: that takes some 20 µs longer
        event = torch.cuda.Event(blocking=_few_cores())  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def wait(self, mark: Mark) -> None:
        """What is launched from here on begins when `mark`, of any lane, is passed. Does not wait itself."""
        if self.stream is not None:
            assert isinstance(mark, torch.cuda.Event)
            self.stream.wait_event(mark)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Start a copy, one side of it in pinned memory."""
        with self.use():
            target.copy_(source, non_blocking=True)

    def fetch(self, source: Tensor, target: Tensor) -> Mark:
        """Start a copy to the host, into `target` (pinned on CUDA), and mark its end."""
        target.copy_(source, non_blocking=True)
        return self.mark()


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [size] on the host, page-locked where a CUDA device will copy them."""
    return torch.zeros(size, dtype=dtype, pin_memory=configs.is_cuda(device))


def host_zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Zeros [num_bytes] uint8 on the host in pages of their own, RuntimeError where there is no room: page-locked where
    a CUDA device will copy them, as many as were asked for (torch's allocator takes the next power of two); else
    committed when they are first touched."""
    memory = np.zeros(num_bytes + _PAGE, dtype=np.uint8)  # calloc: the pages stay uncommitted
    first = -memory.ctypes.data % _PAGE
    zeros = torch.from_numpy(memory[first : first + num_bytes])
    if not configs.is_cuda(device) or not num_bytes:
        return zeros
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(zeros.data_ptr(), num_bytes, 0)) == 0:
        # before the memory is given away, or the device would go on reading pages that are no longer these
        weakref.finalize(memory, cudart.cudaHostUnregister, zeros.data_ptr()).atexit = False
        return zeros
    with suppress(RuntimeError):  # the error waits for the next launch of a kernel: this one
        torch.ones(1, device=device)
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
