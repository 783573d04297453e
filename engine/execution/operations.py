"""Cache operations of a step: restore K and V from hidden state, and copy units between the tiers.

Neighbouring operations of one action run as one batch, in their order.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np

from engine.arrays import IntArray
from engine.cache.blocks import CacheAction, CacheKind, CacheOperation, Tier
from engine.execution.pool import UnitPool


class CacheMover(Protocol):
    """Moves and converts what lies in units of `pool`, each call behind the ones before it."""

    pool: UnitPool

    def restore(self, units: IntArray, starts: IntArray) -> None:
        """Project K and V of whole blocks [n], full or not: `units [n, 3]` (hidden state, K, V) of tokens that begin at
        positions `starts [n]`."""

    def swap_out(self, pairs: IntArray) -> None:
        """Copy device units to host units [n, 2]; the device units may be overwritten by what follows."""

    def swap_in(self, pairs: IntArray) -> None:
        """Copy host units to device units [n, 2]; what follows finds them there."""


def run_operations(mover: CacheMover, operations: Sequence[CacheOperation]) -> None:
    """Run, or launch, the operations of one step in their order."""
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
        assert (each.source.kind, each.source.tier) == (CacheKind.HIDDEN, Tier.DEVICE), "hidden state is restored"
        assert (each.target.kind, each.target.tier) == (CacheKind.KV, Tier.DEVICE), "... to K and V on the device"
    return np.array([each.source.units + each.target.units for each in batch], dtype=np.int64)


def _swapped_units(batch: Sequence[CacheOperation], source: Tier, target: Tier) -> IntArray:
    pairs: list[tuple[int, int]] = []
    for each in batch:
        assert (each.source.tier, each.target.tier) == (source, target), "a swap moves a block to the other tier"
        assert each.source.kind is each.target.kind, "a swap keeps the kind"
        pairs.extend(zip(each.source.units, each.target.units, strict=True))
    return np.array(pairs, dtype=np.int64)
