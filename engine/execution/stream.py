"""A CUDA stream with its events; on the CPU a no-op, so that the same runner works on both.

All computation of a runner uses one stream, in order. Transfers of the host tier use two others, one for each
direction, so that no step waits on the host for another.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import first_line
from engine.machine.facts import read_processor
from engine.triton_kernels import configs

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
