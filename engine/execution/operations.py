"""Cache operations of a step: restoring K and V from hidden state, and copying units between the tiers.

Adjacent operations of the same action run as one batch.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np

from engine.arrays import IntArray
from engine.cache.blocks import CacheAction, CacheKind, CacheOperation, Tier
from engine.execution.pool import UnitPool


class CacheMover(Protocol):
    """Moves and converts the contents of units of `pool`; calls take effect in order."""

    pool: UnitPool

    def restore(self, units: IntArray, starts: IntArray) -> None:
        """Project K and V of blocks [n], full or not, with `units [n, 3]` (hidden state, K, V) and first positions
        `starts [n]`."""

    def swap_out(self, pairs: IntArray) -> None:
        """Copy device units to host units [n, 2]; later work may overwrite the device units."""

    def swap_in(self, pairs: IntArray) -> None:
        """Copy host units to device units [n, 2], before later work reads them."""


def run_operations(mover: CacheMover, operations: Sequence[CacheOperation]) -> None:
    """Run, or launch, the operations of one step in order."""
    for action, group in groupby(operations, key=lambda operation: operation.action):
        batch = list(group)
        if action is CacheAction.RESTORE:
            mover.restore(_restored_units(batch), np.array([each.start for each in batch], dtype=np.int64))
        elif action is CacheAction.SWAP_IN:
            mover.swap_in(_swapped_units(batch, Tier.HOST, Tier.DEVICE))
        else:
            mover.swap_out(_swapped_units(batch, Tier.DEVICE, Tier.HOST))


def _restored_units(batch: Sequence[CacheOperation]) -> IntArray:
    for each in batch:
        assert (each.source.kind, each.source.tier) == (CacheKind.HIDDEN, Tier.DEVICE), "only hidden state is restored"
        assert (each.target.kind, each.target.tier) == (CacheKind.KV, Tier.DEVICE), "a restore writes K and V"
    return np.array([each.source.units + each.target.units for each in batch], dtype=np.int64)


def _swapped_units(batch: Sequence[CacheOperation], source: Tier, target: Tier) -> IntArray:
    pairs: list[tuple[int, int]] = []
    for each in batch:
        assert (each.source.tier, each.target.tier) == (source, target), "a swap moves a block to the other tier"
        assert each.source.kind is each.target.kind, "a swap keeps the kind"
        pairs.extend(zip(each.source.units, each.target.units, strict=True))
    return np.array(pairs, dtype=np.int64)
