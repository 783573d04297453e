"""The pasts of requests that wait: they stay on the device until somebody needs the room, then go block by block.

With a host tier, whoever is preempted keeps its blocks. `reclaim` frees what is asked for where bringing it back costs
least per unit (`engine.scheduling.parking`): a block is copied to the host, or the tail is dropped; one past may lie in
several places and in both representations (Apt-Serve §4.2, HybridServe §4). When the request starts again, what is on
the device stays where it is, what is on the host is copied back, and the dropped tail is computed. Hidden state cannot
be made from K and V, so the form that a block has on the host is chosen when it is stored: who runs from hidden state
stores the blocks of its answer by the host's split.

No block that is kept here can stop anybody for ever: a running online request may have all of them, offline ones those
of offline requests, and who waits online may have all that are not its own. Without a host tier nothing is parked: what
was computed stays in the prefix index, where its tail is evicted first. Knows nothing of time and of steps' limits.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from engine.cache.cache_map import UNITS_PER_BLOCK, CacheBlock, CacheKind, Tier
from engine.cache.pool import UNITS_PER_KV_BLOCK, BlockPool
from engine.config import SchedulerConfig
from engine.request import Request, RequestClass
from engine.scheduling.host_split import HostSplit, OffloadCosts, next_is_act, split_host
from engine.scheduling.output import CacheAction, CacheOperation
from engine.scheduling.parking import Parked, Past, Place, RestoreCosts, recompute_costs, release_units
from predictor.features import BatchFeatures
from predictor.model import LatencyPredictor


def restore_costs(model: LatencyPredictor | None, config: SchedulerConfig) -> RestoreCosts:
    """What the latency model says; without one only recomputing costs anything."""
    if model is None:
        return RestoreCosts(recompute=1.0, restore_hidden=0.0, unit_to_host=0.0, unit_from_host=0.0)
    recompute, pair = recompute_costs(model, BatchFeatures(), max(2, config.max_num_batched_tokens))
    unit = model.cache_work(transferred_bytes=config.unit_bytes)
    return RestoreCosts(recompute, model.cache_work(restored_tokens=1), unit, unit, config.rho, pair)


def host_split(model: LatencyPredictor | None, config: SchedulerConfig, hidden_blocks: int) -> HostSplit | None:
    """KV and hidden blocks of a full host, so that bringing pasts back keeps link and device busy alike (HybridServe
    §4.3); None where there is nothing to choose. `hidden_blocks`: those on the device.

    Weights stay on the device here, and a whole step takes the place of the paper's layer: costs are in proportion.
    """
    room = config.host_units // UNITS_PER_KV_BLOCK
    if model is None or not room or not config.scratch_blocks:
        return None
    empty = BatchFeatures()
    costs = OffloadCosts(
        load_weights=0.0,
        load_kv=model.cache_work(transferred_bytes=UNITS_PER_KV_BLOCK * config.unit_bytes),
        regenerate=model.cache_work(restored_tokens=config.block_size),
        forward_fixed=model.predict(empty),
        forward=model.marginal_decodes(empty, 0, config.block_size),
        ratio=UNITS_PER_BLOCK[CacheKind.HIDDEN] / UNITS_PER_KV_BLOCK,
    )
    return split_host(costs, room, hidden_blocks)


class _Run(NamedTuple):
    """Blocks of one request in one representation that only it holds; `first`: the index of the first of them."""

    request: Request
    first: int
    past: Past


class ParkedCache:
    """Waiting requests' blocks on both tiers, and the cache operations of the step that is being built."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, model: LatencyPredictor | None) -> None:
        self.operations: list[CacheOperation] = []
        self._config = config
        self._pool = pool
        self._model = model
        self._holders: dict[Request, None] = {}
        self._split: HostSplit | None = None

    def park(self, request: Request) -> None:
        """Keep what a request that leaves its row has computed, where it lies; the rest stays in its cache map."""
        num_blocks = -(-request.num_computed_tokens // self._config.block_size)
        if not self._pool.host.num_units or not num_blocks:
            return
        blocks = request.cache_map.blocks
        request.parked_blocks, blocks[:] = blocks[:num_blocks], blocks[num_blocks:]
        request.num_parked_tokens, request.parked_in_step = request.num_computed_tokens, -1
        self._holders[request] = None

    def num_units(self, *, online: bool, but: Request | None = None) -> int:
        """Device units that `reclaim` could free, some of them only when the steps in flight have ended."""
        references = self.references(online=online, but=but)
        return sum(len(block.entry.units) for block, count in references.items() if block.ref_count == count)

    def references(self, *, online: bool, but: Request | None = None) -> Counter[CacheBlock]:
        """Device blocks, and how many of those whose pasts `reclaim` may move hold each."""
        if not self._holders:
            return Counter()
        return _references([request for group in self._groups(online, but) for request in group])

    def reclaim(
        self,
        units: int,
        step_id: int,
        *,
        online: bool,
        but: Request | None = None,
        spared: Collection[CacheBlock] = frozenset(),
    ) -> None:
        """Free `units` device units, or all there are, for somebody in the step `step_id`; offline pasts lose first.

        `online`: whether online pasts may lose too. `but`: whose past is left alone. `spared`: blocks that are.
        """
        holders: list[Request] = []
        for group in self._groups(online, but):
            holders += group
            if units > 0:
                runs = [run for request in group for run in self._runs(request, spared)]
                units -= self._release(runs, units, step_id)
            if units > 0:
                units -= self._cut(holders, units, spared)

    def resume(self, request: Request, num_hits: int, step_id: int) -> list[CacheBlock]:
        """The device blocks of a request that starts again, behind `num_hits` that it has found in the prefix index.

        Blocks come back from the host in the step `step_id`. There must be room for them.
        """
        pool, blocks = self._pool, []
        for source in request.parked_blocks[num_hits:]:
            if source.entry.tier is Tier.DEVICE:
                blocks.append(source)
                continue
            target = pool.allocate(source.entry.kind, online=request.request_class is RequestClass.ONLINE)
            assert target is not None, "admitted without room"
            self.operations.append(CacheOperation(CacheAction.SWAP_IN, source.entry, target.entry))
            blocks.append(target)
            pool.release(source, step_id)
        for source in reversed(request.parked_blocks[:num_hits]):
            pool.release(source, step_id if source.entry.tier is Tier.HOST else request.last_step)
        request.parked_blocks.clear()
        request.num_parked_tokens = 0
        self._holders.pop(request, None)
        return blocks

    def forget(self, request: Request) -> None:
        """Give up the past of a request that will not come back for it, and copies of it not yet on their way."""
        self._truncate(request, 0)

    def forget_all(self) -> None:
        """Give up what waiting requests still hold on the device."""
        for request in list(self._holders):
            self.forget(request)

    def take_operations(self) -> tuple[CacheOperation, ...]:
        """What the step that is being launched must do to the cache: swaps out first, for others may get the units."""
        operations, self.operations = self.operations, []
        return tuple(sorted(operations, key=_action_order))

    def check_integrity(self, waiting: Request) -> None:
        """Assert that whoever waits and holds device blocks is known."""
        on_device = any(block.entry.tier is Tier.DEVICE for block in waiting.parked_blocks)
        assert on_device <= (waiting in self._holders), "kept blocks are not known"

    def _groups(self, online: bool, but: Request | None) -> Iterator[list[Request]]:
        """Who may lose, the first to lose first: offline requests, then online ones; the last to arrive first."""
        for request_class in (RequestClass.OFFLINE, RequestClass.ONLINE) if online else (RequestClass.OFFLINE,):
            group = [r for r in self._holders if r.request_class is request_class and r is not but]
            yield sorted(group, key=lambda request: -request.arrival_order)

    def _runs(self, request: Request, spared: Collection[CacheBlock]) -> list[_Run]:
        """The parts of a past that can be moved, from its tail; only what nothing lies behind can be dropped.

        A unit of either kind costs the same way to the host and back: the kind of which the host has less than its
        share of this request comes first.
        """
        size, blocks, runs = self._config.block_size, request.parked_blocks, []
        first = 0
        for kind, group in groupby(blocks, lambda b: b.entry.kind if _is_movable(b) and b not in spared else None):
            end = first + len(list(group))
            if kind is not None:
                tokens = min(request.num_parked_tokens, end * size) - first * size
                kv, hidden = (UNITS_PER_BLOCK[kind] if kind is each else 0 for each in CacheKind)
                past = Past(first * size, tokens, kv, hidden, size, can_drop=end == len(blocks))
                runs.append(_Run(request, first, past))
            first = end
        runs.reverse()
        if len({run.past.kv_units for run in runs}) == 2 and self._split is not None:
            act = next_is_act(*_count_kinds(b for b in blocks if b.entry.tier is Tier.HOST), self._split)
            runs.sort(key=lambda run: bool(run.past.hidden_units) is not act)
        return runs

    def next_kind(self, request: Request) -> CacheKind:
        """What a request that stores hidden state should store its next block as, in case it goes to the host: the kind
        of which it has less than its share (HybridServe, Eq. 11)."""
        is_act = self._split is None or next_is_act(*_count_kinds(request.cache_map.blocks), self._split)
        return CacheKind.HIDDEN if is_act else CacheKind.KV

    def balance(self, hidden_blocks: int) -> None:
        """Divide the host anew for the step that is being built; `hidden_blocks`: those that run on the device."""
        self._split = host_split(self._model, self._config, hidden_blocks)

    def _release(self, runs: Sequence[_Run], units: int, step_id: int) -> int:
        """Free up to `units` units at the least cost; returns how many came free."""
        pasts = [run.past for run in runs]
        units = min(units, sum(past.units for past in pasts))
        plan = release_units(pasts, units, self._pool.host.num_free_units, restore_costs(self._model, self._config))
        assert plan is not None, "more was asked for than there is"
        for index, group in groupby(plan.moves, lambda move: move.past):
            self._move(runs[index], list(group), step_id)
        return plan.units

    def _move(self, run: _Run, moves: Sequence[Parked], step_id: int) -> None:
        end = run.first + run.past.num_blocks
        for _, place, blocks in moves:
            begin = end - blocks
            if place is Place.DROP:
                self._truncate(run.request, begin)
            else:
                assert place in {Place.HOST_KV, Place.HOST_HIDDEN}, "no block holds both representations"
                # Tail first: the head of a prefix is the most valuable part and must be evicted last.
                for index in reversed(range(begin, end)):
                    self._swap_out(run.request, index, step_id)
            end = begin
        if all(block.entry.tier is Tier.HOST for block in run.request.parked_blocks):
            self._holders.pop(run.request, None)

    def _swap_out(self, request: Request, index: int, step_id: int) -> None:
        source = request.parked_blocks[index]
        target = self._pool.host.allocate(source.entry.kind)
        assert target is not None, "planned without room on the host"
        target.last_step = request.parked_in_step = step_id
        self.operations.append(CacheOperation(CacheAction.SWAP_OUT, source.entry, target.entry))
        request.parked_blocks[index] = target
        self._pool.release(source, request.last_step)

    def _cut(self, holders: Sequence[Request], units: int, spared: Collection[CacheBlock]) -> int:
        """Drop pasts of `holders` from the first block on that can come free; returns the units that did.

        The host is full, and what lies there already keeps the rest of its past from being dropped by itself; or all
        that share a block wait.
        """
        pool, found = self._pool, _held_by(holders) - set(spared)
        before, gained = pool.num_available_units + pool.num_deferred_units, 0
        for request in holders:
            first = next((i for i, block in enumerate(request.parked_blocks) if block in found), None)
            if first is not None and gained < units:
                self._truncate(request, first)
                gained = pool.num_available_units + pool.num_deferred_units - before
        return gained

    def _truncate(self, request: Request, num_blocks: int) -> None:
        """Drop the past behind its first `num_blocks` blocks."""
        lost = request.parked_blocks[num_blocks:]
        del request.parked_blocks[num_blocks:]
        request.num_parked_tokens = min(request.num_parked_tokens, num_blocks * self._config.block_size)
        targets = {block.entry for block in lost if block.entry.tier is Tier.HOST}
        unsent = {operation.target for operation in self.operations if operation.target in targets}
        self.operations = [operation for operation in self.operations if operation.target not in unsent]
        for block in reversed(lost):
            if block.entry in unsent:
                block.last_step = -1
            self._pool.release(block, -1 if block.entry.tier is Tier.HOST else request.last_step)
        if not any(block.entry.tier is Tier.DEVICE for block in request.parked_blocks):
            self._holders.pop(request, None)


def _is_movable(block: CacheBlock) -> bool:
    """Whether moving it frees its device units: nobody else holds it."""
    return block.entry.tier is Tier.DEVICE and block.ref_count == 1


def _count_kinds(blocks: Iterable[CacheBlock]) -> tuple[int, int]:
    """(KV, hidden) blocks."""
    counts = Counter(block.entry.kind for block in blocks)
    return counts[CacheKind.KV], counts[CacheKind.HIDDEN]


def _held_by(holders: Sequence[Request]) -> set[CacheBlock]:
    """Device blocks that nobody but these waiting requests holds."""
    return {block for block, count in _references(holders).items() if block.ref_count == count}


def _references(holders: Sequence[Request]) -> Counter[CacheBlock]:
    return Counter(b for request in holders for b in request.parked_blocks if b.entry.tier is Tier.DEVICE)


def _action_order(operation: CacheOperation) -> int:
    return list(CacheAction).index(operation.action)
