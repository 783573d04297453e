"""Swaps between the pool and the host tier, beside the steps that compute.

Units pass through a staging area on the device. Outwards they are copied there in the lane of the steps, at the speed
of device memory, and go on to the host in a lane of their own: once the copy to staging is enqueued their units may be
given away, and steps wait for the host's link only where staging is full. Inwards the transfer begins at once, beside
steps launched before, and the lane of the steps waits for its end. All transfers share one lane, so that what was just
written to the host can be read back. The scales of blocks in 8 bits go beside their units. Knows nothing of requests or
of what lies in a unit.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cuda.buffers import send
from engine.execution.cuda.kernels import Kernels
from engine.execution.lane import Lane, Mark
from engine.execution.pool import UnitPool

STAGING_BYTES = 64 * 1024**2
"""Of staging in all, or what two units take if that is more: a transfer of half of it hides its launch."""

_HALVES = 2  # one is filled while the other is emptied


def staging_units(host_units: int, bytes_per_unit: int) -> int:
    """Units of staging for a host tier of so many: 0 without one."""
    per_half = max(1, STAGING_BYTES // _HALVES // bytes_per_unit)
    return _HALVES * min(host_units, per_half)


@dataclass(slots=True)
class _Half:
    """`parts`, each [n, elements]: units, and the scales that lie beside them, which may be overwritten once `free` is
    passed."""

    parts: list[Tensor]
    free: Mark

    def __len__(self) -> int:
        return len(self.parts[0])


class Swapper:
    """Moves units of `pool` to and from its host units. `lane`: where steps run; `transfers`: where copies run."""

    def __init__(self, pool: UnitPool, kernels: Kernels, lane: Lane, transfers: Lane) -> None:
        self._pool, self._kernels, self._lane, self._transfers = pool, kernels, lane, transfers
        self._device, self._host = [pool.units], [pool.host_units]
        if (compressed := pool.compressed) is not None:  # as numbers of the pool's type: no other variant of a kernel
            self._device.append(compressed.scales.flatten(1).view(pool.units.dtype))
            self._host.append(compressed.host_scales.flatten(1).view(pool.units.dtype))
        count = staging_units(len(pool.host_units), sum(part[:1].nbytes for part in self._device))
        halves = zip(*(part.new_zeros((count, part.shape[1])).chunk(_HALVES) for part in self._device), strict=True)
        self._halves = deque(_Half(list(parts), lane.mark()) for parts in halves if len(parts[0]))

    def swap_out(self, pairs: IntArray) -> None:
        """Device units to host units [n, 2]. What is launched next in `lane` may overwrite the device units."""
        for half, part in self._parts(pairs, host=1):
            self._lane.wait(half.free)
            staged = np.stack((part[:, 0], np.arange(len(part))), axis=1)
            sent = self._send(staged)
            for units, passing in zip(self._device, half.parts, strict=True):
                self._kernels.unit_copy(units, passing, sent)
            self._transfers.wait(self._lane.mark())
            for first, last, unit in _runs(part[:, 1]):
                for passing, kept in zip(half.parts, self._host, strict=True):
                    self._transfers.copy(passing[first:last], kept[unit : unit + last - first])
            half.free = self._transfers.mark()

    def swap_in(self, pairs: IntArray) -> None:
        """Host units to device units [n, 2]. What is launched next in `lane` finds them there."""
        for half, part in self._parts(pairs, host=0):
            self._transfers.wait(half.free)
            for first, last, unit in _runs(part[:, 0]):
                for passing, kept in zip(half.parts, self._host, strict=True):
                    self._transfers.copy(kept[unit : unit + last - first], passing[first:last])
            self._lane.wait(self._transfers.mark())
            staged = np.stack((np.arange(len(part)), part[:, 1]), axis=1)
            sent = self._send(staged)
            for units, passing in zip(self._device, half.parts, strict=True):
                self._kernels.unit_copy(passing, units, sent)
            half.free = self._lane.mark()

    def _parts(self, pairs: IntArray, host: int) -> Iterator[tuple[_Half, IntArray]]:
        """Pairs in the order of their host units, as many at a time as half of staging takes, and which half."""
        assert self._halves, "this runner was made without a host tier"
        pairs = pairs[np.argsort(pairs[:, host], kind="stable")]
        per_half = min(map(len, self._halves))
        for first in range(0, len(pairs), per_half):
            self._halves.rotate(1)
            yield self._halves[0], pairs[first : first + per_half]

    def _send(self, pairs: IntArray) -> Tensor:
        return send(pairs.astype(np.int32), self._pool.device)


def _runs(units: IntArray) -> Iterator[tuple[int, int, int]]:
    """Neighbours among ascending units [n]: places [first, last) hold units `unit`, `unit + 1`, ..."""
    cuts = np.flatnonzero(np.diff(units) != 1) + 1
    firsts = [0, *cuts.tolist()]
    lasts = [*firsts[1:], len(units)]
    yield from zip(firsts, lasts, units[firsts].tolist(), strict=True)
