"""Cost model for the blocks of waiting requests: keep, copy to the host, or drop (Apt-Serve §4, HybridServe §4).

Giving up a block has a measured cost of restoring it: a copy to the bounded host pool and back, or recomputation of the
tail. `release_units` frees units at the least cost per unit; while the host has room, a plan costs more than the best
one by at most its last step on one block.

The second half splits a full host between representations so that restoring keeps link and device equally busy
(HybridServe §4.3). The paper's balance omits the load of the host's compact blocks (Eq. 9) and the forward pass (Eq.
10). With both, the load is constant and the device time is linear in the number of compact (ACT) blocks, so the split
has a closed form.
"""

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.cache.blocks import COMPACT, CacheKind
from engine.limits import UNITS_PER_BLOCK, SchedulerConfig
from predictor.features import EVERYTHING, BatchFeatures, LatencyPredictor, Reach


class BlockPlace(enum.IntEnum):
    """Ways to give up blocks; at equal cost the first one is used."""

    DROP = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class RestoreCosts:
    """Measured seconds, all ≥ 0, of the real runner.

    Attributes:
        recompute: A token's share of a full prefill step.
        recompute_pair: The same for each earlier token that it attends to.
        restore: K and V of one token from its compact form, once.
        copy: One unit to the host and back, as far as it delays steps.
        reach: Which earlier tokens a token attends to.
    """

    recompute: float
    restore: float
    copy: float
    recompute_pair: float = 0.0
    reach: Reach = EVERYTHING

    def recompute_seconds(self, start: int, tokens: int) -> float:
        """Return the seconds to recompute `tokens` tokens behind `start` cached ones."""
        return self.recompute * tokens + self.recompute_pair * self.reach.pairs(start, tokens)


def recompute_costs(model: LatencyPredictor, beside: BatchFeatures, chunk: int) -> tuple[float, float]:
    """Return (`recompute`, `recompute_pair`) from the latency model, for chunks of `chunk` ≥ 2 tokens beside `beside`.

    The model is linear in the pairs of a chunk, so two points determine both.
    """
    at_start, pairs = model.marginal(beside, 0, chunk), model.reach.pairs(0, chunk)
    more = max(1, model.reach.pairs(chunk, chunk) - pairs)
    pair = max(0.0, model.marginal(beside, chunk, chunk) - at_start) / more
    return max(0.0, at_start - pair * pairs) / chunk, pair


def restore_costs(model: LatencyPredictor | None, config: SchedulerConfig) -> RestoreCosts:
    """Return the costs by the latency model. Without a model only recomputing has a cost."""
    if model is None:
        return RestoreCosts(recompute=1.0, restore=0.0, copy=0.0)
    recompute, pair = recompute_costs(model, BatchFeatures(model.reach), max(2, config.max_num_batched_tokens))
    copy = 2.0 * model.cache_work(transferred_bytes=config.unit_bytes)
    restore = model.cache_work(restored_tokens=1)
    return RestoreCosts(recompute, restore, copy, pair, model.reach)


class EvictedPrefixes:
    """Measures how many evicted prefix blocks are asked for again while a host of `capacity` blocks would hold them.

    Without this share, prefixes of chats that never return would be copied to the host at the cost of their successors.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._evicted: dict[bytes, None] = {}
        self._asked = self._forgotten = 0.0

    @property
    def share(self) -> float:
        """Return the share of asked blocks; 1 before the first evicted block is forgotten."""
        return (self._asked + 1.0) / (self._asked + self._forgotten + 1.0)

    def evict(self, block_hash: bytes) -> None:
        """Record an eviction. The oldest of more than `capacity` blocks is forgotten."""
        self._evicted.pop(block_hash, None)
        self._evicted[block_hash] = None
        if len(self._evicted) > self._capacity:
            del self._evicted[next(iter(self._evicted))]
            self._count(0.0, 1.0)

    def ask(self, block_hash: bytes) -> bool:
        """Record that a request asks for a block. Return whether it was evicted and not forgotten."""
        if block_hash not in self._evicted:
            return False
        del self._evicted[block_hash]
        self._count(1.0, 0.0)
        return True

    def _count(self, asked: float, forgotten: float) -> None:
        self._asked += asked
        self._forgotten += forgotten
        if self._asked + self._forgotten > self._capacity:  # so that the share follows the load
            self._asked, self._forgotten = self._asked / 2, self._forgotten / 2


@dataclass(frozen=True, slots=True)
class PastRun:
    """Consecutive unshared blocks of one request in one representation, up to its last computed token.

    Attributes:
        start: Computed tokens before them, shared or in another representation.
        tokens: Tokens in them, ≥ 1.
        can_drop: No block of the request follows them.
    """

    start: int
    tokens: int
    kind: CacheKind
    block_size: int
    can_drop: bool = True

    @property
    def num_blocks(self) -> int:
        return -(-self.tokens // self.block_size)

    @property
    def block_units(self) -> int:
        """Return the units per block."""
        return self.kind.form.units

    def drop_seconds(self, blocks: int, costs: RestoreCosts) -> float:
        """Return the seconds to recompute the last `blocks` blocks.

        Compact blocks would have to be restored anyway, so only the time beyond that counts.
        """
        tokens = self.tokens - (self.num_blocks - blocks) * self.block_size
        recompute = costs.recompute_seconds(self.start + self.tokens - tokens, tokens)
        return max(0.0, recompute - costs.restore * tokens) if self.kind.form.compact else recompute


class Move(NamedTuple):
    """Give up `blocks` blocks of run `past` by `place`. Moves of one run go from its tail, DROP before HOST."""

    past: int
    place: BlockPlace
    blocks: int


def release_units(pasts: Sequence[PastRun], units: int, host_room: int, costs: RestoreCosts) -> list[Move]:
    """Return the cheapest moves that free `units` device units, or all units of the runs, in the order of the runs.

    `host_room`: free host units. At equal cost the earlier run loses blocks first. Without need no block is moved.
    """
    kept = [past.num_blocks for past in pasts]
    moves: list[Move] = []
    for _, index, place in sorted(_ways(pasts, units, costs)) if units > 0 else ():
        size = pasts[index].block_units
        blocks = min(kept[index], max(0, -(-units // size)))
        if place is BlockPlace.HOST:
            blocks = min(blocks, host_room // size)
            host_room -= blocks * size
        if blocks:
            moves.append(Move(index, place, blocks))
            kept[index] -= blocks
            units -= blocks * size
    return sorted(moves)


def _ways(pasts: Sequence[PastRun], units: int, costs: RestoreCosts) -> Iterator[tuple[float, int, BlockPlace]]:
    """Yield (cost per unit, run, place) of all moves, each priced for the blocks at the tail that `units` units need.

    Costs are rounded to nine digits, so that equal costs compare equal and the input order decides.
    """
    copy = _rounded(costs.copy)
    for index, past in enumerate(pasts):
        yield copy, index, BlockPlace.HOST
        if past.can_drop:
            blocks = min(past.num_blocks, -(-units // past.block_units))
            yield _rounded(past.drop_seconds(blocks, costs) / (blocks * past.block_units)), index, BlockPlace.DROP


def _rounded(density: float) -> float:
    return float(f"{density:.8e}")


@dataclass(frozen=True, slots=True)
class OffloadCosts:
    """Measured seconds of one layer.

    Attributes:
        load_weights: T_w, the layer's weights over the link.
        load_kv: t_kv, one KV block over the link (an ACT block takes `ratio` times that).
        regenerate: g, K and V of one ACT block.
        forward_fixed: T_f0, the layer's forward pass without context.
        forward: t_f, added by one more block of context of either type.
        ratio: r, 0 < r < 1, room of an ACT block relative to a KV block.
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
        """Return T_PCIe: the time to load the weights and all host blocks."""
        return self.load_weights + self.load_kv * (kv_host + self.ratio * act_host)

    def device_seconds(self, kv_host: float, act_host: float, act_device: float) -> float:
        """Return T_computation: the time to regenerate every ACT block and to run the forward pass."""
        acts = act_host + act_device
        return self.regenerate * acts + self.forward_fixed + self.forward * (kv_host + acts)


class HostSplit(NamedTuple):
    """Number of host blocks of each type."""

    kv: int
    act: int


def ideal_act(costs: OffloadCosts, room: float, act_device: float) -> float:
    """Return the ACT_host that balances both pipelines over a full host of `room` KV blocks, clamped to 0 … room/r.

    Below it the link is the bottleneck and every ACT block adds context at no cost. Above it the device is, and more
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
    """Return the split in whole blocks whose pipeline times differ least, next to the ideal. `room`: in KV blocks."""
    ideal = ideal_act(costs, room, act_device)
    most = int(room / costs.ratio + 1e-9)
    splits = [
        HostSplit(int(room - costs.ratio * act + 1e-9), act)
        for act in sorted({min(math.floor(ideal), most), min(math.ceil(ideal), most)})
    ]
    return min(
        splits, key=lambda s: abs(costs.link_seconds(s.kv, s.act) - costs.device_seconds(s.kv, s.act, act_device))
    )


def host_split(model: LatencyPredictor | None, config: SchedulerConfig, act_device: int) -> HostSplit | None:
    """Return the split of this engine's host tier, or None if there is no choice.

    `act_device`: compact blocks on the device. A whole step replaces the paper's layer, since costs are proportional.
    Compact blocks are restored when they come back.
    """
    room = config.host_units // UNITS_PER_BLOCK
    if model is None or not room or not config.scratch_blocks:
        return None
    empty, size = BatchFeatures(model.reach), config.block_size
    costs = OffloadCosts(
        load_weights=0.0,
        load_kv=model.cache_work(transferred_bytes=UNITS_PER_BLOCK * config.unit_bytes),
        regenerate=model.cache_work(restored_tokens=size),
        forward_fixed=model.predict(empty),
        forward=model.marginal_decodes(empty, 0, config.block_size),
        ratio=COMPACT.form.units / UNITS_PER_BLOCK,
    )
    return split_host(costs, room, act_device)


def next_is_act(kv_blocks: int, act_blocks: int, split: HostSplit) -> bool:
    """Return whether a request's next block should be ACT: the type further below its share (Eq. 11).

    `kv_blocks`, `act_blocks`: blocks that the request has. At equal deficits, the type with more host blocks is chosen.
    """
    total = split.kv + split.act
    if total == 0:
        return False
    blocks = kv_blocks + act_blocks + 1
    # Deficits times `total`: share · blocks − held, in whole numbers.
    act_deficit = split.act * blocks - act_blocks * total
    kv_deficit = split.kv * blocks - kv_blocks * total
    return act_deficit > kv_deficit or (act_deficit == kv_deficit and split.act > split.kv)
