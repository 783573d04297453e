"""Swaps between the pool and the host tier, concurrent with steps.

Units pass through a staging area on the device. Outwards, the stream of the steps copies them to staging at the speed
of device memory, and another stream copies them to the host. Their units may be reused once the copy to staging is
enqueued; steps wait for the host link only if staging is full. Inwards, the transfer starts at once, concurrent with
steps launched before, and the stream of the steps waits for its end. The link carries both directions concurrently, so
each has its own stream and staging.

A host unit is read only after its last write has arrived. It is written only after pending reads: outward copies wait
for the stream of the steps, which has waited for inward transfers.

Streamed layers in page-locked host memory, copied to two buffers on the device while steps compute.

A streamed cache (`engine.execution.streamed_cache`) is in page-locked memory, too, with a stream for each direction.

Copies run in their own stream. On the device, a copy waits for the kernels that read its buffer, and later kernels wait
for the copy. The host waits for neither, so that a step is launched while the previous one runs.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.errors import ConfigError, first_line
from engine.execution.cuda.buffers import send
from engine.execution.offload import BUFFERS
from engine.execution.pool import UnitPool
from engine.execution.stream import DeviceStream, Mark, host_zeros
from engine.execution.streamed_cache import BUFFERS as CACHE_BUFFERS
from engine.execution.streamed_cache import Span
from engine.triton_kernels import Kernels

STAGING_BYTES = 64 * 1024**2
"""Total size of staging, or four units if that is more. A transfer of a quarter of it hides its launch."""

_HALVES = 2  # per direction: one is filled while the other is emptied
_PARTS = 2 * _HALVES
_MOST_MARKS = 64  # kept per stream; an older mark is replaced by the oldest one


def staging_units(host_units: int, bytes_per_unit: int) -> int:
    """Return the number of staging units for a host tier; 0 without one."""
    per_half = max(1, STAGING_BYTES // _PARTS // bytes_per_unit)
    return _PARTS * min(host_units, per_half)


@dataclass(slots=True)
class _Half:
    """A half of a staging area: `units` [n, elements], which may be overwritten once `free` is passed."""

    units: Tensor
    free: Mark


class _Written:
    """Time of the last write of each of `num_units` host units; transfers end in order."""

    def __init__(self, num_units: int) -> None:
        self._transfers = np.zeros(num_units, dtype=np.int64)  # number of the last transfer per unit, from 1
        self._count = 0
        self._marks: deque[Mark] = deque(maxlen=_MOST_MARKS)  # of the newest transfers

    def put(self, units: IntArray, mark: Mark) -> None:
        """Record that the next transfer writes these units and ends at `mark`."""
        self._marks.append(mark)
        self._count += 1
        self._transfers[units] = self._count

    def awaited_in(self, stream: DeviceStream, units: IntArray) -> None:
        """Make later work in `stream` wait until these units are written."""
        newest = int(self._transfers[units].max())
        if newest:
            stream.wait(self._marks[max(0, len(self._marks) - 1 - (self._count - newest))])


class Swapper:
    """Moves units between `pool` and its host units.

    Steps run in `stream`, copies to the host in `out`, copies from the host in `back`.
    """

    def __init__(
        self, pool: UnitPool, kernels: Kernels, stream: DeviceStream, out: DeviceStream, back: DeviceStream
    ) -> None:
        self._pool, self._kernels = pool, kernels
        self._stream, self._out, self._back = stream, out, back
        self._written = _Written(len(pool.host_units))
        count = staging_units(len(pool.host_units), pool.units[:1].nbytes)
        staging = pool.units.new_zeros((count, pool.units.shape[1])).chunk(_PARTS) if count else ()
        halves = [_Half(units, stream.mark()) for units in staging]
        self._outwards, self._inwards = deque(halves[:_HALVES]), deque(halves[_HALVES:])

    def swap_out(self, pairs: IntArray) -> None:
        """Copy device units to host units [n, 2]. Later work in `stream` may overwrite the device units."""
        for half, part in _parts(pairs, self._outwards, host=1):
            self._stream.wait(half.free)
            staged = np.stack((part[:, 0], np.arange(len(part))), axis=1)
            self._kernels.unit_copy(self._pool.units, half.units, self._send(staged))
            self._out.wait(self._stream.mark())
            for first, last, unit in self._runs(part[:, 1]):
                self._out.copy(half.units[first:last], self._pool.host_units[unit : unit + last - first])
            half.free = self._out.mark()
            self._written.put(part[:, 1], half.free)

    def swap_in(self, pairs: IntArray) -> None:
        """Copy host units to device units [n, 2]. Later work in `stream` reads the copies."""
        for half, part in _parts(pairs, self._inwards, host=0):
            self._back.wait(half.free)
            self._written.awaited_in(self._back, part[:, 0])
            for first, last, unit in self._runs(part[:, 0]):
                self._back.copy(self._pool.host_units[unit : unit + last - first], half.units[first:last])
            self._stream.wait(self._back.mark())
            staged = np.stack((np.arange(len(part)), part[:, 1]), axis=1)
            self._kernels.unit_copy(half.units, self._pool.units, self._send(staged))
            half.free = self._stream.mark()

    def _runs(self, units: IntArray) -> Iterator[tuple[int, int, int]]:
        """Yield (first, last, unit) for runs in ascending host units [n]: places [first, last) hold `unit`, `unit + 1`,
        ... Their memory is page-locked; a run ends where a piece of it does, and the next piece is locked while the
        run is copied."""
        cuts = np.flatnonzero((np.diff(units) != 1) | (units[1:] % self._pool.host.per_piece == 0)) + 1
        firsts = [0, *cuts.tolist()]
        lasts = [*firsts[1:], len(units)]
        for first, last, unit in zip(firsts, lasts, units[firsts].tolist(), strict=True):
            self._pool.host.lock(unit // self._pool.host.per_piece)
            yield first, last, unit

    def _send(self, pairs: IntArray) -> Tensor:
        return send(pairs.astype(np.int32), self._pool.device)


def _parts(pairs: IntArray, halves: deque[_Half], host: int) -> Iterator[tuple[_Half, IntArray]]:
    """Yield halves and pairs in the order of host units, as many pairs as a half holds."""
    assert halves, "this runner has no host tier"
    pairs = pairs[np.argsort(pairs[:, host], kind="stable")]
    per_half = min(len(half.units) for half in halves)
    for first in range(0, len(pairs), per_half):
        halves.rotate(1)
        yield halves[0], pairs[first : first + per_half]


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
        for at, part in parts:
            self._host[place][at : at + part.nbytes].copy_(part)

    def begin(self, place: int, buffer: int) -> None:
        self._transfers.wait(self._free[buffer])
        self._transfers.copy(self._host[place], self.buffers[buffer])
        self._arrived[buffer] = self._transfers.mark()

    def wait(self, buffer: int) -> None:
        """See Transport; reading host memory cannot fail."""
        arrived = self._arrived[buffer]
        assert arrived is not None, "begin() must precede wait()"
        self._steps().wait(arrived)

    def release(self, buffer: int) -> None:
        self._free[buffer] = self._steps().mark()

    def seconds(self) -> float:
        """See Transport; waits for the copies."""
        began, copies = time.perf_counter(), min(len(self._host), _MEASURED)
        for place in range(copies):
            self.begin(place, place % BUFFERS)
        self._transfers.mark().synchronize()
        return (time.perf_counter() - began) / copies


class PinnedCache:
    """A CacheStore in page-locked host memory, with a stream for each direction."""

    alignment = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._back, self._out = DeviceStream(device), DeviceStream(device)
        self._steps = partial(DeviceStream.current, device)  # the stream of the caller

    def attach(self, buffers: Tensor, num_layers: int) -> None:
        size = buffers[0].numel()
        try:
            self._host = [host_zeros(size, self._device).view(buffers[0].shape) for _ in range(num_layers)]
        except RuntimeError as error:
            wanted = f"{num_layers * size / 2**30:.1f} GiB of cache"
            raise ConfigError(f"--swap-space: no memory for {wanted}: {first_line(error)}") from None
        self._buffers = buffers
        self._saved = [self._steps().mark() for _ in range(CACHE_BUFFERS)]
        self._loaded = self._saved.copy()

    def load(self, layer: int, spans: Sequence[Span]) -> None:
        """See CacheStore. The last copy out of the buffer waits for all kernels that use it, and comes after the last
        one of the layer."""
        buffer = layer % CACHE_BUFFERS
        self._back.wait(self._saved[buffer])
        for first, last in spans:
            self._back.copy(self._host[layer][first:last], self._buffers[buffer, first:last])
        self._loaded[buffer] = self._back.mark()

    def wait(self, layer: int) -> None:
        self._steps().wait(self._loaded[layer % CACHE_BUFFERS])

    def save(self, layer: int, spans: Sequence[Span]) -> None:
        buffer = layer % CACHE_BUFFERS
        self._out.wait(self._steps().mark())
        for first, last in spans:
            self._out.copy(self._buffers[buffer, first:last], self._host[layer][first:last])
        self._saved[buffer] = self._out.mark()

    def settle(self) -> None:
        """See CacheStore; a no-op, because copies cannot fail alone."""
