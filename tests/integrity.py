"""Invariants of the core: every unit, row and account is in one place (reliability E1, E3)."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from engine.api import RequestClass
from engine.cache.blocks import BlockPool, CacheBlock, count_compact, count_gone, count_units
from engine.cache.cache import Cache
from engine.cache.parked import ParkedPasts
from engine.cache.snapshots import Snapshots
from engine.cache.tiers import Tiers
from engine.core import EngineCore
from engine.request import Request, RequestStatus
from engine.scheduling.fair_share import OnlineShare


def check_core(core: EngineCore) -> None:
    """Assert that every unit and row is in one place and that the queues contain exactly the requests (E1, E3)."""
    state = core.state
    rows, queued = list(state.free_rows), [*chain(*state.running.values()), *state.waiting_online]
    queued += [*state.waiting_offline, *state.quarantined]
    for request in queued:
        assert state.requests.get(request.request_id) is request, "a queued request is unknown"
        assert request.quarantined == (request in state.quarantined), "quarantined on one side only"
        if request.status is RequestStatus.RUNNING:
            capacity = len(request.cache_map.blocks) * state.config.block_size
            assert request.num_confirmed_tokens <= request.num_computed_tokens <= capacity
            assert request.num_computed_tokens - request.num_guessed <= request.num_expected_tokens
            assert not request.num_guessed or any(request in step.requests for step in state.in_flight)
            rows.append(request.row)
        else:
            assert request.status in {RequestStatus.WAITING, RequestStatus.PREEMPTED}
            assert request.row < 0, "a waiting request holds a row"
    assert sorted(rows) == list(range(state.config.max_num_seqs)), "a row is lost or owned twice"
    assert len(state.requests) == len(queued), "a request is in no queue"
    online = [r.request_id for r in queued if r.request_class is RequestClass.ONLINE]
    _check_accounts(state.online_share, online)
    promised = {r for r in queued if r.request_class is RequestClass.ONLINE and r.spec.promise is not None}
    assert state.promised.keys() == promised, "a promise is lost, or outlives its request"
    check_cache(state.cache, queued)


def _check_accounts(share: OnlineShare, online: Iterable[str]) -> None:
    """Assert that accounts are open only for these requests. The canary may be among them without an account."""
    assert share._charged.keys() <= set(online), "an account is open of a request that has ended"
    assert share._num_requests.total() == len(share._charged), "a request was counted twice"


def check_cache(cache: Cache, requests: Iterable[Request]) -> None:
    """Assert unit conservation on both tiers, given every unfinished request."""
    held: list[CacheBlock] = []
    compact: Counter[CacheBlock] = Counter()
    for request in requests:
        cache_map = request.cache_map
        held.extend(cache_map.blocks)
        if request.status is RequestStatus.RUNNING:
            assert not cache_map.num_parked_tokens, "a running request has a parked past"
            assert cache_map.num_compact == count_compact(cache_map.blocks), "compact blocks are miscounted"
            assert all(block.on_device for block in cache_map.blocks), "a running request has blocks on the host"
            assert cache_map.num_running_units == count_units(cache_map.blocks), "units are miscounted"
            assert cache_map.num_gone == count_gone(cache_map.blocks), "blocks that were given back are miscounted"
            seen = cache_map.blocks[cache._num_unseen(request.num_confirmed_tokens) :]
            assert all(block.entry.units for block in seen), "a block that is seen was given back"
            compact.update(block for block in cache_map.blocks if block.entry.kind.form.compact)
        else:
            _check_parked(cache.parked, request)
    assert compact == cache._compact, "compact blocks that run are miscounted"
    assert cache.num_compact <= cache._config.scratch_blocks, "scratch is overdrawn"
    _check_tiers(cache.tiers, held)
    if cache.snapshots is not None:
        assert isinstance(cache.snapshots, Snapshots)
        _check_states(cache.snapshots)


def _check_parked(parked: ParkedPasts, waiting: Request) -> None:
    """Assert that a waiting request with device blocks is registered."""
    cache_map = waiting.cache_map
    assert bool(cache_map.blocks) == bool(cache_map.num_parked_tokens)
    assert cache_map.num_parked_tokens <= len(cache_map.blocks) * parked._config.block_size
    on_device = any(block.on_device for block in cache_map.blocks)
    assert on_device <= (waiting in parked._holders), "kept blocks are not known"


def _check_tiers(tiers: Tiers, held: Iterable[CacheBlock]) -> None:
    """Assert unit conservation on every tier, given every reference that requests hold."""
    held = [*held, *tiers._saving]
    for tier, pool in tiers._pools.items():
        check_pool(pool, (block for block in held if block.entry.tier is tier))


def _check_states(snapshots: Snapshots) -> None:
    """Assert that every slot is in one place and that only running requests save states."""
    check_pool(snapshots.pool, (each.block for saving in snapshots._saving.values() for each in saving))
    check_pool(snapshots.host, snapshots._copies)
    held = (*snapshots._saving, *snapshots._followers)
    assert all(request.status is RequestStatus.RUNNING for request in held), "a request that waits saves states"
    assert snapshots._followers.issuperset(snapshots._passing), "a state that passes is not counted"
    assert 2 * len(snapshots._followers) <= snapshots.pool.num_units, "more than half of the slots"


def check_pool(pool: BlockPool, held: Iterable[CacheBlock]) -> None:
    """Assert unit conservation, given every reference that requests hold (one item per reference)."""
    counts: dict[CacheBlock, int] = {}
    for block in held:
        counts[block] = counts.get(block, 0) + 1
    assert all(block.ref_count == count for block, count in counts.items()), "reference counts differ"
    cached = [*pool._cached_offline, *pool._cached_online]
    idle = [*cached, *pool._deferred]
    assert all(block.ref_count == 0 for block in idle), "an idle block is referred to"
    assert all(block.block_hash is not None for block in cached), "an unpublished block is cached"
    assert all(block.entry.tier is pool._tier for block in (*counts, *idle)), "a block of another tier"
    units = list(pool._free)
    for block in [*counts, *idle]:
        units.extend(block.entry.units)
    assert sorted(units) == [*range(pool.num_units), *sorted(pool._retiring)], "a unit is lost or owned twice"
    assert min(pool._retiring, default=pool.num_units) >= pool.num_units, "a unit of the pool retires"
    assert pool._retiring.isdisjoint(u for b in cached for u in b.entry.units), "a unit that retires is cached"
    assert pool.num_owned_units == count_units(counts)
    assert pool.num_cached_units == count_units(cached)
    assert pool.num_cached_online_units == count_units(pool._cached_online)
    assert pool.num_deferred_units == count_units(pool._deferred)
    if pool._paired:
        free = pool._free[::-1]
        pairs = [*zip(free[::2], free[1::2], strict=False), *(b.entry.units for b in (*counts, *idle))]
        assert all(units[1:] == (units[0] + 1,) for units in pairs if units), "V does not lie behind its K"
    alive = {*counts, *idle}
    assert all(b in alive and b.block_hash == h for h, b in pool._index.items()), "the index holds a dead block"
