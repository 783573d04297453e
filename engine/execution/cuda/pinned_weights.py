"""Streamed layers in page-locked host memory, copied to two buffers on the device while steps compute.

Copies run in their own stream. On the device, a copy waits for the kernels that read its buffer, and later kernels wait
for the copy. The host waits for neither, so that a step is launched while the previous one runs.
"""

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.errors import ConfigError, first_line
from engine.execution.host_memory import host_zeros
from engine.execution.offload import BUFFERS
from engine.execution.stream import DeviceStream, Mark

_MEASURED = 16  # layers


class PinnedWeights:
    """A Transport of `count` layers of up to `size` bytes each. Raises ConfigError if the host lacks memory."""

    def __init__(self, size: int, count: int, device: torch.device) -> None:
        self._transfers = DeviceStream(device)
        self._steps = partial(DeviceStream.current, device)  # the stream of the caller
        try:
            self._host = [host_zeros(size, device) for _ in range(count)]
            self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        except RuntimeError as error:
            wanted = f"{count * size / 2**30:.1f} GiB of streamed weights"
            raise ConfigError(f"no memory for {wanted}: {first_line(error)}") from None
        self._free = [self._steps().mark() for _ in range(BUFFERS)]
        self._arrived: list[Mark | None] = [None] * BUFFERS

    def keep(self, place: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        """See Transport."""
        for at, part in parts:
            self._host[place][at : at + part.nbytes].copy_(part)

    def begin(self, place: int, buffer: int) -> None:
        """See Transport."""
        self._transfers.wait(self._free[buffer])
        self._transfers.copy(self._host[place], self.buffers[buffer])
        self._arrived[buffer] = self._transfers.mark()

    def wait(self, buffer: int) -> None:
        """See Transport; reading host memory cannot fail."""
        arrived = self._arrived[buffer]
        assert arrived is not None, "begin() must precede wait()"
        self._steps().wait(arrived)

    def release(self, buffer: int) -> None:
        """See Transport."""
        self._free[buffer] = self._steps().mark()

    def seconds(self) -> float:
        """See Transport; waits for the copies."""
        began, copies = time.perf_counter(), min(len(self._host), _MEASURED)
        for place in range(copies):
            self.begin(place, place % BUFFERS)
        self._transfers.mark().synchronize()
        return (time.perf_counter() - began) / copies
