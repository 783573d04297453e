"""Swaps between the pool and the host tier, beside the steps that compute.

Units pass through a staging area on the device. Outwards they are copied there in the lane of the steps, at the speed
of device memory, and go on to the host in a lane of their own: once the copy to staging is enqueued their units may be
given away, and steps wait for the host's link only where staging is full. Inwards the transfer begins at once, beside
steps launched before, and the lane of the steps waits for its end. All transfers share one lane, so that what was just
written to the host can be read back. Knows nothing of requests or of what lies in a unit.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
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
    """`units [n, elements of a unit]`, which may be overwritten once `free` is passed."""

    units: Tensor
    free: Mark


class Swapper:
    """Moves units of `pool` to and from its host units. `lane`: where steps run; `transfers`: where copies run."""

    def __init__(self, pool: UnitPool, kernels: Kernels, lane: Lane, transfers: Lane) -> None:
        self._pool, self._kernels, self._lane, self._transfers = pool, kernels, lane, transfers
        size = pool.units.shape[1]
        count = staging_units(len(pool.host_units), pool.units[:1].nbytes)
        staging = torch.zeros((count, size), dtype=pool.units.dtype, device=pool.device)
        self._halves = deque(_Half(units, lane.mark()) for units in staging.chunk(_HALVES) if len(units))

    def swap_out(self, pairs: IntArray) -> None:
        """Device units to host units [n, 2]. What is launched next in `lane` may overwrite the device units."""
        for half, part in self._parts(pairs, host=1):
            self._lane.wait(half.free)
            staged = np.stack((part[:, 0], np.arange(len(part))), axis=1)
            self._kernels.unit_copy(self._pool.units, half.units, self._send(staged))
            self._transfers.wait(self._lane.mark())
            for first, last, unit in _runs(part[:, 1]):
                self._transfers.copy(half.units[first:last], self._pool.host_units[unit : unit + last - first])
            half.free = self._transfers.mark()

    def swap_in(self, pairs: IntArray) -> None:
        """Host units to device units [n, 2]. What is launched next in `lane` finds them there."""
        for half, part in self._parts(pairs, host=0):
            self._transfers.wait(half.free)
            for first, last, unit in _runs(part[:, 0]):
                self._transfers.copy(self._pool.host_units[unit : unit + last - first], half.units[first:last])
            self._lane.wait(self._transfers.mark())
            staged = np.stack((np.arange(len(part)), part[:, 1]), axis=1)
            self._kernels.unit_copy(half.units, self._pool.units, self._send(staged))
            half.free = self._lane.mark()

    def _parts(self, pairs: IntArray, host: int) -> Iterator[tuple[_Half, IntArray]]:
        """Pairs in the order of their host units, as many at a time as half of staging takes, and which half."""
        assert self._halves, "this runner was made without a host tier"
        pairs = pairs[np.argsort(pairs[:, host], kind="stable")]
        per_half = min(len(half.units) for half in self._halves)
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
