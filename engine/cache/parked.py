"""Parked blocks: with a host tier, a preempted request keeps its blocks until the memory is needed.

`reclaim` frees units where restoring costs least per unit (`engine.cache.placement`): it copies a block to the host or
drops the tail. The blocks of one request may lie on both tiers and mix representations (Apt-Serve §4, HybridServe §4).
When the request starts again, device blocks stay in place, host blocks are copied back, and the dropped tail is
recomputed. Hidden state cannot be derived from K and V, so a block gets its form on the host when it is first stored.

Parked blocks never hold up another request. A running online request may take all of them, an offline request those of
offline requests, and a waiting online request all but its own. Without a host tier, full blocks stay in the prefix
index instead, where the tail is evicted first.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from engine.api import RequestClass
from engine.cache.blocks import (
    COMPACT,
    CacheAction,
    CacheBlock,
    CacheKind,
    CacheOperation,
    Tier,
    count_compact,
    count_units,
)
from engine.cache.placement import (
    BlockPlace,
    HostSplit,
    Move,
    PastRun,
    host_split,
    next_is_act,
    release_units,
    restore_costs,
)
from engine.cache.tiers import Tiers
from engine.limits import SchedulerConfig
from engine.request import Request
from predictor.features import LatencyPredictor


class _Run(NamedTuple):
    """Consecutive unshared blocks of one request in one representation. `first`: index of the first block."""

    request: Request
    first: int
    past: PastRun


class ParkedPasts:
    """Blocks of waiting requests on both tiers."""

    def __init__(self, config: SchedulerConfig, tiers: Tiers, model: LatencyPredictor | None) -> None:
        self._config = config
        self._tiers = tiers
        self._device = tiers.device
        self._host = tiers.host
        self._model = model
        self._holders: dict[Request, None] = {}
        # with recurrent layers a request can only resume at a snapshot, so its blocks are not parked
        self._keeps = config.host_units > 0 and not config.state_slots
        self._split: HostSplit | None = None

    @property
    def num_holders(self) -> int:
        """Return the number of waiting requests with blocks on the device."""
        return len(self._holders)

    def park(self, request: Request) -> list[CacheBlock]:
        """Park the blocks of a request that leaves its row. Return the blocks that it gives up.

        All blocks are given up without a host tier, if the request starts over, and if it has freed blocks behind its
        window: no shorter prefix can be resumed behind those. The caller may `forget` the parked blocks.
        """
        cache_map = request.cache_map
        keeps = self._keeps and not cache_map.num_gone and not request.starts_over
        num_kept = -(-request.num_computed_tokens // self._config.block_size) if keeps else 0
        cache_map.blocks, given_up = cache_map.blocks[:num_kept], cache_map.blocks[num_kept:]
        if num_kept:
            cache_map.num_parked_tokens = request.num_computed_tokens
            cache_map.parked_in_step = -1
            self._holders[request] = None
        return given_up

    def num_units(self, *, online: bool, but: Request | None = None) -> int:
        """Return the device units that `reclaim` could free, some only when the steps in flight have ended."""
        references = self.references(online=online, but=but)
        return count_units(block for block, count in references.items() if block.ref_count == count)

    def references(self, *, online: bool, but: Request | None = None) -> Counter[CacheBlock]:
        """Return the device blocks that `reclaim` may move, with the number of waiting requests that hold each."""
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
        """Free `units` device units, or as many as possible, for a request of step `step_id`.

        Offline requests lose blocks first.

        Args:
            online: Whether online requests may lose blocks, too.
            but: Request whose blocks are left alone.
            spared: Blocks that are left alone.
        """
        holders: list[Request] = []
        for group in self._groups(online, but):
            holders += group
            if units > 0:
                runs = [run for request in group for run in self._runs(request, spared)]
                units -= self._release(runs, units, step_id)
            if units > 0:
                units -= self._cut(holders, units, spared)

    def resume(self, request: Request, hits: Sequence[CacheBlock], step_id: int) -> None:
        """Set the blocks of a starting request: the acquired `hits`, then its own parked blocks behind them.

        Host blocks are copied back in step `step_id`. Room must exist.
        """
        cache_map, num_hits = request.cache_map, len(hits)
        online = request.request_class is RequestClass.ONLINE
        parked, cache_map.blocks = cache_map.blocks, [*hits]
        for source in parked[num_hits:]:
            block = source if source.on_device else self._tiers.fetch(source, step_id, online=online)
            cache_map.blocks.append(block)
        for source in reversed(parked[:num_hits]):
            self._tiers.pool(source).release(source, request.last_step if source.on_device else step_id)
        cache_map.num_parked_tokens = 0
        self._holders.pop(request, None)

    def forget(self, request: Request) -> None:
        """Drop the parked blocks of a request, and cancel their copies that are not launched yet."""
        self._truncate(request, 0)

    def forget_all(self) -> None:
        """Drop all parked blocks of waiting requests with blocks on the device."""
        for request in list(self._holders):
            self.forget(request)

    def next_kind(self, request: Request) -> CacheKind:
        """Return the kind of the next block of a request that stores compact blocks.

        The block may go to the host later, so this is the kind of which the request has less than its share
        (HybridServe, Eq. 11).
        """
        is_act = self._split is None or next_is_act(*_count_kinds(request.cache_map.blocks), self._split)
        return COMPACT if is_act else CacheKind.KV

    def balance(self, num_compact: int) -> None:
        """Compute the host's split between kinds for the step being built.

        `num_compact`: compact blocks running on the device.
        """
        self._split = host_split(self._model, self._config, num_compact)

    def _groups(self, online: bool, but: Request | None) -> Iterator[list[Request]]:
        """Yield requests that may lose blocks, first to lose first: offline before online, newest first."""
        for request_class in (RequestClass.OFFLINE, RequestClass.ONLINE) if online else (RequestClass.OFFLINE,):
            group = [r for r in self._holders if r.request_class is request_class and r is not but]
            yield sorted(group, key=lambda request: -request.arrival_order)

    def _runs(self, request: Request, spared: Collection[CacheBlock]) -> list[_Run]:
        """Return the movable parts of a request's blocks, tail first. Only the last part can be dropped.

        A unit of either kind costs the same to copy. The kind of which the host has less than its share of this request
        comes first.
        """
        size, blocks, runs = self._config.block_size, request.cache_map.blocks, []
        first = 0

        def kind_of(block: CacheBlock) -> CacheKind | None:
            movable = block.on_device and block.ref_count == 1  # no other request holds it: moving it frees its units
            return block.entry.kind if movable and block not in spared else None

        for kind, group in groupby(blocks, kind_of):
            end = first + len(list(group))
            if kind is not None:
                tokens = min(request.cache_map.num_parked_tokens, end * size) - first * size
                past = PastRun(first * size, tokens, kind, size, can_drop=end == len(blocks))
                runs.append(_Run(request, first, past))
            first = end
        runs.reverse()
        if self._split is not None and len({run.past.kind for run in runs}) == 2:
            act = next_is_act(*_count_kinds(b for b in blocks if not b.on_device), self._split)
            runs.sort(key=lambda run: (run.past.kind is COMPACT) is not act)
        return runs

    def _release(self, runs: Sequence[_Run], units: int, step_id: int) -> int:
        """Free up to `units` units at the least cost. Return the number freed."""
        costs = restore_costs(self._model, self._config)
        moves = release_units([run.past for run in runs], units, self._host.num_available_units, costs)
        for index, group in groupby(moves, lambda move: move.past):
            self._move(runs[index], list(group), step_id)
        return sum(move.blocks * runs[move.past].past.block_units for move in moves)

    def _move(self, run: _Run, moves: Sequence[Move], step_id: int) -> None:
        end = run.first + run.past.num_blocks
        for _, place, blocks in moves:
            begin = end - blocks
            if place is BlockPlace.DROP:
                self._truncate(run.request, begin)
            else:
                # Tail first: the head of a prefix is the most valuable part and must be evicted last.
                for index in reversed(range(begin, end)):
                    self._swap_out(run.request, index, step_id)
            end = begin
        self._check_holder(run.request)

    def _swap_out(self, request: Request, index: int, step_id: int) -> None:
        cache_map = request.cache_map
        source = cache_map.blocks[index]
        target = self._tiers.allocate(source.entry.kind, step_id, online=False, tier=Tier.HOST)
        assert target is not None, "planned without room on the host"
        target.last_step = cache_map.parked_in_step = step_id
        self._tiers.operations.append(CacheOperation(CacheAction.SWAP_OUT, source.entry, target.entry))
        cache_map.blocks[index] = target
        self._device.release(source, request.last_step)

    def _cut(self, holders: Sequence[Request], units: int, spared: Collection[CacheBlock]) -> int:
        """Drop blocks of `holders` from the first block on that can be freed. Return the units freed.

        Used if `_release` did not free enough: the host is full and a request with a copied tail cannot drop the blocks
        before it, or all requests that share a block wait.
        """
        device = self._device
        found = {b for b, count in _references(holders).items() if b.ref_count == count} - set(spared)
        before, gained = device.num_available_units + device.num_deferred_units, 0
        for request in holders:
            first = next((i for i, block in enumerate(request.cache_map.blocks) if block in found), None)
            if first is not None and gained < units:
                self._truncate(request, first)
                gained = device.num_available_units + device.num_deferred_units - before
        return gained

    def _truncate(self, request: Request, num_blocks: int) -> None:
        """Drop the blocks of a request behind the first `num_blocks`."""
        cache_map = request.cache_map
        cache_map.blocks, lost = cache_map.blocks[:num_blocks], cache_map.blocks[num_blocks:]
        cache_map.num_parked_tokens = min(cache_map.num_parked_tokens, num_blocks * self._config.block_size)
        unsent = self._tiers.cancel({b.entry for b in lost if not b.on_device})
        for block in reversed(lost):
            if block.entry in unsent:
                block.last_step = -1
            self._tiers.pool(block).release(block, request.last_step if block.on_device else -1)
        self._check_holder(request)

    def _check_holder(self, request: Request) -> None:
        if not any(block.on_device for block in request.cache_map.blocks):
            self._holders.pop(request, None)


def _count_kinds(blocks: Iterable[CacheBlock]) -> tuple[int, int]:
    """Return the numbers of KV and of compact blocks."""
    blocks = list(blocks)
    return len(blocks) - count_compact(blocks), count_compact(blocks)


def _references(holders: Iterable[Request]) -> Counter[CacheBlock]:
    return Counter(block for request in holders for block in request.cache_map.blocks if block.on_device)
