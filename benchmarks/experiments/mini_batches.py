"""A layer's requests in mini-batches, so that loading and regenerating take as long as each other (HybridServe §4.3.3).

Pure. Blocks are counted as in `engine.cache.placement`, which divides the host between their types.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.cache.placement import OffloadCosts


class HostBlocks(NamedTuple):
    """What one request has on the host."""

    kv: int
    act: int


EPSILON = 0.1
"""An imbalance that is not worth another mini-batch."""


def imbalance(costs: OffloadCosts, kv: int, act: int) -> float:
    """F_b of a mini-batch (Eq. 12, 13): regeneration against loading, the larger over the smaller; 1 is best.

    Infinite while one side is empty, so that any request is welcome there.
    """
    regenerate, load = costs.regenerate * act, costs.load_kv * kv
    if regenerate <= 0.0 or load <= 0.0:
        return math.inf
    return max(regenerate / load, load / regenerate)


def mini_batches(
    requests: Sequence[HostBlocks], costs: OffloadCosts, *, max_kv: int, max_act: int
) -> list[tuple[int, ...]]:
    """Indices of the requests of each mini-batch (§4.3.3): largest first, while they fit into the buffers.

    A request joins if the imbalance then is no more than it was, or than 1 + EPSILON. While one side is empty,
    requests that have blocks of that type come first. Raises ValueError if one does not fit the buffers by itself.
    """
    for blocks in requests:
        if blocks.kv > max_kv or blocks.act > max_act:
            raise ValueError(f"{blocks} does not fit a buffer of {max_kv} KV and {max_act} ACT blocks")
    rest = sorted(range(len(requests)), key=lambda index: (-_load(costs, requests[index]), index))
    batches = []
    while rest:
        batch = [rest.pop(0)]
        kv, act = requests[batch[0]]
        while (index := _next(requests, rest, costs, (kv, act), (max_kv, max_act))) is not None:
            rest.remove(index)
            batch.append(index)
            kv, act = kv + requests[index].kv, act + requests[index].act
        batches.append(tuple(batch))
    return batches


def even_mini_batches(
    requests: Sequence[HostBlocks], costs: OffloadCosts, *, max_kv: int, max_act: int
) -> list[tuple[int, ...]]:
    """`mini_batches` of about equal size, each with the balance of all requests together.

    Eq. 12 leaves out weights, the load of ACT blocks and the forward pass, which the split has weighed, so that its own
    balance is not 1: by the printed rule a request that rounding puts a block further off stays alone. And the last
    mini-batch should not be a small one: the pipelines would wait for each other.
    """
    kv, act = sum(blocks.kv for blocks in requests), sum(blocks.act for blocks in requests)
    if kv and act:
        costs = replace(costs, regenerate=costs.load_kv * kv / act)
    found = mini_batches(requests, costs, max_kv=max_kv, max_act=max_act)
    if len(found) < 2:
        return found
    share_kv = kv // len(found) + max(blocks.kv for blocks in requests)
    share_act = act // len(found) + max(blocks.act for blocks in requests)
    even = mini_batches(requests, costs, max_kv=min(share_kv, max_kv), max_act=min(share_act, max_act))
    return even if len(even) <= len(found) else found


def _load(costs: OffloadCosts, blocks: HostBlocks) -> float:
    return costs.load_kv * blocks.kv + costs.regenerate * blocks.act


def _next(
    requests: Sequence[HostBlocks],
    rest: list[int],
    costs: OffloadCosts,
    held: tuple[int, int],
    limits: tuple[int, int],
) -> int | None:
    """The first of `rest` (largest first) that may join a mini-batch of `held` (KV, ACT) blocks."""
    # Requests that are all alike must share a mini-batch: their sums differ by rounding.
    bound = max(imbalance(costs, *held), 1.0 + EPSILON) * (1.0 + 1e-9)
    welcome = None
    for index in rest:
        kv, act = held[0] + requests[index].kv, held[1] + requests[index].act
        if kv > limits[0] or act > limits[1] or imbalance(costs, kv, act) > bound:
            continue
        if bound < math.inf or (kv and act):
            return index
        welcome = index if welcome is None else welcome
    return welcome
