"""The pasts of requests that wait: they stay on the device until the room is needed, then go block by block.

With a host tier, a request that is preempted keeps its blocks. `reclaim` frees what is asked for where bringing it back
costs least per unit (`engine.cache.placement`): a block is copied to the host, or the tail is dropped; one past may lie
in several places and representations (Apt-Serve §4.2, HybridServe §4). When the request starts again, its blocks on the
device stay where they are, its blocks on the host are copied back, and the dropped tail is computed. Hidden state
cannot be made from K and V, so the form that a block has on the host is chosen when it is stored: a request that runs
from hidden state stores the blocks of its answer by the host's split.

Parked blocks block no other request: a running online request may take all of them, offline requests take those of
offline ones, and a waiting online request takes all that are not its own. Without a host tier nothing is parked:
full blocks stay in the prefix index, where the tail is evicted first. Knows nothing of time and of
steps' limits.
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
from engine.config import SchedulerConfig
from engine.request import Request
from predictor.model import LatencyPredictor


class _Run(NamedTuple):
    """Blocks of one request in one representation that only it holds; `first`: the index of the first of them."""

    request: Request
    first: int
    past: PastRun


class ParkedPasts:
    """Waiting requests' blocks on both tiers."""

    def __init__(self, config: SchedulerConfig, tiers: Tiers, model: LatencyPredictor | None) -> None:
        self._config = config
        self._tiers = tiers
        self._device = tiers.device
        self._host = tiers.host
        self._model = model
        self._holders: dict[Request, None] = {}
        # where layers are recurrent, a past ends at a checkpoint, and nowhere else
        self._keeps = config.host_units > 0 and not config.state_slots
        self._split: HostSplit | None = None

    @property
    def num_holders(self) -> int:
        """Waiting requests that have blocks on the device."""
        return len(self._holders)

    def park(self, request: Request) -> list[CacheBlock]:
        """Decide how much of its past a request keeps when it leaves its row; return the blocks that it gives up. The
        caller may `forget` the others.

        Nothing is kept without a host tier, of a request that starts over, and of one that has given blocks back: no
        shorter past can be started from behind those.
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
        """Device units that `reclaim` could free, some of them only when the steps in flight have ended."""
        references = self.references(online=online, but=but)
        return count_units(block for block, count in references.items() if block.ref_count == count)

    def references(self, *, online: bool, but: Request | None = None) -> Counter[CacheBlock]:
        """Device blocks, and how many of those requests whose pasts `reclaim` may move hold each."""
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
        """Free `units` device units, or all there are, for a request of the step `step_id`; offline pasts lose first.

        `online`: whether online pasts may lose too. `but`: the request whose past is left alone. `spared`: blocks that
        are.
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
        """The past of a request that starts again: `hits`, which it has acquired, then its own blocks behind them.

        Blocks come back from the host in the step `step_id`. There must be room for them.
        """
        cache_map, num_hits = request.cache_map, len(hits)
        online = request.request_class is RequestClass.ONLINE
        parked, cache_map.blocks = cache_map.blocks, [*hits]
        for source in parked[num_hits:]:
            block = source if source.on_device else self._tiers.fetch(source, step_id, online=online)
            cache_map.blocks.append(block)
        for source in reversed(parked[:num_hits]):
            self._give_up(source, request.last_step if source.on_device else step_id)
        cache_map.num_parked_tokens = 0
        self._holders.pop(request, None)

    def forget(self, request: Request) -> None:
        """Give up the past of a request that will not come back for it, and copies of it not yet on their way."""
        self._truncate(request, 0)

    def forget_all(self) -> None:
        """Give up what waiting requests still hold on the device."""
        for request in list(self._holders):
            self.forget(request)

    def check_integrity(self, waiting: Request) -> None:
        """Assert that every request that waits and holds device blocks is known."""
        cache_map = waiting.cache_map
        assert bool(cache_map.blocks) == bool(cache_map.num_parked_tokens)
        assert cache_map.num_parked_tokens <= len(cache_map.blocks) * self._config.block_size
        on_device = any(block.on_device for block in cache_map.blocks)
        assert on_device <= (waiting in self._holders), "kept blocks are not known"

    def next_kind(self, request: Request) -> CacheKind:
        """What a request that stores compact blocks should store its next one as, in case it goes to the host: the kind
        of which it has less than its share (HybridServe, Eq. 11)."""
        is_act = self._split is None or next_is_act(*_count_kinds(request.cache_map.blocks), self._split)
        return COMPACT if is_act else CacheKind.KV

    def balance(self, num_compact: int) -> None:
        """Divide the host anew for the step that is being built; `num_compact`: blocks that run on the device."""
        self._split = host_split(self._model, self._config, num_compact)

    def _groups(self, online: bool, but: Request | None) -> Iterator[list[Request]]:
        """Requests that may lose, the first to lose first: offline ones, then online ones; the last to arrive first."""
        for request_class in (RequestClass.OFFLINE, RequestClass.ONLINE) if online else (RequestClass.OFFLINE,):
            group = [r for r in self._holders if r.request_class is request_class and r is not but]
            yield sorted(group, key=lambda request: -request.arrival_order)

    def _runs(self, request: Request, spared: Collection[CacheBlock]) -> list[_Run]:
        """Return the parts of a past that can be moved, from its tail; only the last part can be dropped.

        A unit of either kind costs the same way to the host and back: the kind of which the host has less than its
        share of this request comes first.
        """
        size, blocks, runs = self._config.block_size, request.cache_map.blocks, []
        first = 0

        def kind_of(block: CacheBlock) -> CacheKind | None:
            return block.entry.kind if _is_movable(block) and block not in spared else None

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
        """Free up to `units` units at the least cost; returns how many came free."""
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
        """Drop pasts of `holders` from the first block on that can come free; returns the units that did.

        Called when `_release` did not free enough: the host is full, and a past with a copied tail cannot drop what
        lies in front of it; or all requests that share a block wait.
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
        """Drop the past behind its first `num_blocks` blocks."""
        cache_map = request.cache_map
        cache_map.blocks, lost = cache_map.blocks[:num_blocks], cache_map.blocks[num_blocks:]
        cache_map.num_parked_tokens = min(cache_map.num_parked_tokens, num_blocks * self._config.block_size)
        unsent = self._tiers.cancel({b.entry for b in lost if not b.on_device})
        for block in reversed(lost):
            if block.entry in unsent:
                block.last_step = -1
            self._give_up(block, request.last_step if block.on_device else -1)
        self._check_holder(request)

    def _check_holder(self, request: Request) -> None:
        if not any(block.on_device for block in request.cache_map.blocks):
            self._holders.pop(request, None)

    def _give_up(self, block: CacheBlock, last_step: int) -> None:
        (self._device if block.on_device else self._host).release(block, last_step)


def _is_movable(block: CacheBlock) -> bool:
    """Whether moving it frees its device units: no other request holds it."""
    return block.on_device and block.ref_count == 1


def _count_kinds(blocks: Iterable[CacheBlock]) -> tuple[int, int]:
    """(KV, compact) blocks."""
    blocks = list(blocks)
    return len(blocks) - count_compact(blocks), count_compact(blocks)


def _references(holders: Iterable[Request]) -> Counter[CacheBlock]:
    return Counter(block for request in holders for block in request.cache_map.blocks if block.on_device)
