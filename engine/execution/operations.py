"""Cache operations on the device: restore K and V from hidden state, and copies between the device and the host tier.

Neighbouring operations of one action run as one batch: a restore as matrix products over many blocks per layer, a swap
as one copy per unit. Synchronous on the CPU; on other devices in the order of the current stream, out of pinned memory.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from engine.cache.cache_map import CacheKind, Tier
from engine.execution.hidden import PIECE
from engine.execution.pool import UnitPool
from engine.execution.rows import IntArray
from engine.models.heads import Heads
from engine.scheduling.output import CacheAction, CacheOperation


def run_operations(heads: Heads, pool: UnitPool, operations: Sequence[CacheOperation]) -> None:
    """Run the operations of one step in their order."""
    for action, group in groupby(operations, key=lambda operation: operation.action):
        batch = list(group)
        if action is CacheAction.RESTORE:
            _restore(heads, pool, batch)
        else:
            _swap(pool, batch, inwards=action is CacheAction.SWAP_IN)


def restored_units(batch: Sequence[CacheOperation]) -> IntArray:
    """Units [n, 3] of restores: hidden state, K, V."""
    for each in batch:
        assert (each.source.kind, each.source.tier) == (CacheKind.HIDDEN, Tier.DEVICE), "hidden state is restored"
        assert (each.target.kind, each.target.tier) == (CacheKind.KV, Tier.DEVICE), "... to K and V on the device"
    return np.array([each.source.units + each.target.units for each in batch], dtype=np.int64)


def swapped_units(batch: Sequence[CacheOperation], *, inwards: bool) -> IntArray:
    """Units [n, 2] of swaps, source and target."""
    tiers = (Tier.HOST, Tier.DEVICE) if inwards else (Tier.DEVICE, Tier.HOST)
    pairs: list[tuple[int, int]] = []
    for each in batch:
        assert (each.source.tier, each.target.tier) == tiers, "a swap moves a block to the other tier"
        assert each.source.kind is each.target.kind, "a swap keeps the kind"
        pairs.extend(zip(each.source.units, each.target.units, strict=True))
    return np.array(pairs, dtype=np.int64)


def _restore(heads: Heads, pool: UnitPool, batch: list[CacheOperation]) -> None:
    """Project K and V of whole blocks; the cells of a block that is not full hold zeros, whose K and V are finite."""
    every, per_call = restored_units(batch), max(1, PIECE // pool.block_size)
    for first in range(0, len(batch), per_call):
        part, units = batch[first : first + per_call], every[first : first + per_call]
        sources, k_targets, v_targets = (pool.slice_ids(units[:, column]) for column in range(3))
        starts = np.array([each.start for each in part], dtype=np.int64)
        positions = (starts[:, None] + np.arange(pool.block_size)).reshape(-1)
        rotary = heads.rotary(torch.from_numpy(positions).to(pool.device))
        for layer in range(pool.num_layers):
            cells = pool.slices.index_select(0, sources[layer]).view(len(positions), -1)
            k, v = heads.kv(layer, cells[:, : heads.hidden_size], rotary)
            pool.slices.index_copy_(0, k_targets[layer], k.reshape(len(part), -1))
            pool.slices.index_copy_(0, v_targets[layer], v.reshape(len(part), -1))


def _swap(pool: UnitPool, batch: list[CacheOperation], *, inwards: bool) -> None:
    sources, targets = (pool.host_units, pool.units) if inwards else (pool.units, pool.host_units)
    for source, target in swapped_units(batch, inwards=inwards).tolist():
        targets[target].copy_(sources[source], non_blocking=True)
