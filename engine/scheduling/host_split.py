"""How a full host tier is divided between KV and activations, and its layers into mini-batches (HybridServe §4.3).

Offloading overlaps two pipelines per layer: the link loads weights and host blocks, the device regenerates KV from
activation (ACT, hidden) blocks and runs the layer. The paper's balance forgets the load of the host's ACT blocks (Eq.
9) and the forward pass (Eq. 10); with both, and the host full, the load is a constant and the device's time is linear
in the number of ACT blocks, so that the split is a closed form. A block is `block_size` tokens of one request; an ACT
block takes r of the room of a KV block.

Pure. Knows nothing of requests, units or copies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class OffloadCosts:
    """Measured seconds of one layer. `ratio`: r, 0 < r < 1.

    load_weights   T_w, the layer's weights over the link
    load_kv        t_kv, one KV block over the link (an ACT block takes r times that)
    regenerate     g, K and V of one ACT block
    forward_fixed  T_f0, the layer's forward pass without any context
    forward        t_f, what one more block of context, of either type, adds to it
    """

    load_weights: float
    load_kv: float
    regenerate: float
    forward_fixed: float
    forward: float
    ratio: float

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio < 1.0:
            raise ValueError(f"activations must take less room than KV: 0 < ratio < 1, not {self.ratio}")

    def link_seconds(self, kv_host: float, act_host: float) -> float:
        """T_PCIe: weights and all host blocks."""
        return self.load_weights + self.load_kv * (kv_host + self.ratio * act_host)

    def device_seconds(self, kv_host: float, act_host: float, act_device: float) -> float:
        """T_computation: regenerating every ACT block, and the forward pass over the whole context."""
        acts = act_host + act_device
        return self.regenerate * acts + self.forward_fixed + self.forward * (kv_host + acts)


class HostSplit(NamedTuple):
    """Host blocks of each type."""

    kv: int
    act: int


def ideal_act(costs: OffloadCosts, room: float, act_device: float) -> float:
    """ACT_host that balances both pipelines over a full host of `room` KV blocks; clamped to 0 … room/r.

    Below it the link is the bottleneck and every ACT block adds context for nothing; above it the device is, and more
    ACT pays only while (1 − r)·T_f0 > g·(room + r·act_device): a forward pass that costs more than regeneration.
    """
    r, forward = costs.ratio, costs.forward
    link = costs.load_weights + costs.load_kv * room
    device = costs.forward_fixed + forward * (room + act_device) + costs.regenerate * act_device
    slope = costs.regenerate + forward * (1.0 - r)
    if slope <= 0.0:
        return room / r if link > device else 0.0
    return min(max((link - device) / slope, 0.0), room / r)


def split_host(costs: OffloadCosts, room: int, act_device: int) -> HostSplit:
    """The split in whole blocks: the neighbour of the ideal whose pipelines differ least. `room`: in KV blocks."""
    ideal = ideal_act(costs, room, act_device)
    most = int(room / costs.ratio + 1e-9)
    splits = [
        HostSplit(int(room - costs.ratio * act + 1e-9), act)
        for act in sorted({min(math.floor(ideal), most), min(math.ceil(ideal), most)})
    ]
    return min(
        splits, key=lambda s: abs(costs.link_seconds(s.kv, s.act) - costs.device_seconds(s.kv, s.act, act_device))
    )


def next_is_act(kv_blocks: int, act_blocks: int, split: HostSplit) -> bool:
    """The type of a request's next block: the one further behind its share of the host's split (Eq. 11).

    `kv_blocks`, `act_blocks`: what the request has. Equal deficits go to the type of which the host has more.
    """
    total = split.kv + split.act
    if total == 0:
        return False
    blocks = kv_blocks + act_blocks + 1
    # Deficits times `total`: share · blocks − held, in whole numbers.
    act_deficit = split.act * blocks - act_blocks * total
    kv_deficit = split.kv * blocks - kv_blocks * total
    return act_deficit > kv_deficit or (act_deficit == kv_deficit and split.act > split.kv)


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
    requests: Sequence[HostBlocks], costs: OffloadCosts, *, max_kv: int, max_act: int, epsilon: float = EPSILON
) -> list[tuple[int, ...]]:
    """Indices of the requests of each mini-batch (§4.3.3): largest first, while they fit into the buffers.

    A request joins if the imbalance then is no more than it was, or than 1 + `epsilon`. While one side is empty,
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
        while (index := _next(requests, rest, costs, (kv, act), (max_kv, max_act), epsilon)) is not None:
            rest.remove(index)
            batch.append(index)
            kv, act = kv + requests[index].kv, act + requests[index].act
        batches.append(tuple(batch))
    return batches


def even_mini_batches(
    requests: Sequence[HostBlocks], costs: OffloadCosts, *, max_kv: int, max_act: int, epsilon: float = EPSILON
) -> list[tuple[int, ...]]:
    """`mini_batches` of about equal size, each with the balance of all requests together.

    Eq. 12 leaves out weights, the load of ACT blocks and the forward pass, which the split has weighed, so that its own
    balance is not 1: by the printed rule a request that rounding puts a block further off stays alone. And the last
    mini-batch should not be a small one: the pipelines would wait for each other.
    """
    kv, act = sum(blocks.kv for blocks in requests), sum(blocks.act for blocks in requests)
    if kv and act:
        costs = replace(costs, regenerate=costs.load_kv * kv / act)
    found = mini_batches(requests, costs, max_kv=max_kv, max_act=max_act, epsilon=epsilon)
    if len(found) < 2:
        return found
    share_kv = kv // len(found) + max(blocks.kv for blocks in requests)
    share_act = act // len(found) + max(blocks.act for blocks in requests)
    even = mini_batches(requests, costs, max_kv=min(share_kv, max_kv), max_act=min(share_act, max_act), epsilon=epsilon)
    return even if len(even) <= len(found) else found


def _load(costs: OffloadCosts, blocks: HostBlocks) -> float:
    return costs.load_kv * blocks.kv + costs.regenerate * blocks.act


def _next(
    requests: Sequence[HostBlocks],
    rest: list[int],
    costs: OffloadCosts,
    held: tuple[int, int],
    limits: tuple[int, int],
    epsilon: float,
) -> int | None:
    """The first of `rest` (largest first) that may join a mini-batch of `held` (KV, ACT) blocks."""
    # Requests that are all alike must share a mini-batch: their sums differ by rounding.
    bound = max(imbalance(costs, *held), 1.0 + epsilon) * (1.0 + 1e-9)
    welcome = None
    for index in rest:
        kv, act = held[0] + requests[index].kv, held[1] + requests[index].act
        if kv > limits[0] or act > limits[1] or imbalance(costs, kv, act) > bound:
            continue
        if bound < math.inf or (kv and act):
            return index
        welcome = index if welcome is None else welcome
    return welcome
