"""Which requests lose their place to others in one step: few, of offline work first, and none that the step holds."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from engine.api import RequestClass
from engine.cache.blocks import CacheBlock, count_units
from engine.cache.cache import Claim
from engine.request import Request
from engine.scheduling.state import SchedulerState


class Victims:
    """Choose the requests that lose their place in the step `step_id`."""

    def __init__(self, state: SchedulerState, step_id: int, now: float) -> None:
        self._state = state
        self._step_id = step_id
        self._now = now

    def for_start(self, request: Request, claim: Claim, missing: int, *, online: bool) -> list[Request]:
        """The offline requests to evict so that `missing` more units and a row come free for `request`.

        None is immune: one that was evicted often loses last, but loses. Empty when even all of them would not do.
        `online`: whether the pasts of other online requests, which wait, may be moved too.
        """
        state = self._state
        limit, spared = state.config.max_offline_preemptions, frozenset(claim.hits)
        held = state.cache.parked.references(online=online, but=request)
        movable = (block for block, count in held.items() if count == block.ref_count and block not in spared)
        missing -= count_units(movable)
        offline = state.running[RequestClass.OFFLINE]
        victims = [r for r in offline if r.last_step != self._step_id]
        seldom = [victim for victim in victims if victim.num_preemptions < limit]
        chosen = _smallest_victims(seldom, missing, held, spared)
        if not chosen and len(seldom) < len(victims):
            chosen = _smallest_victims(victims, missing, held, spared)
        return chosen

    def for_running(self, request: Request) -> Request | None:
        """Which request gives way to a running one: offline first, then the last in the order (of lanes and age, if it
        is offline itself); none of this step's."""
        online = request.request_class is RequestClass.ONLINE
        if online and (victim := self.offline()) is not None:
            return victim
        state = self._state
        offline = state.running[RequestClass.OFFLINE]
        peers = state.online_order(self._now) if online else sorted(offline, key=lambda r: r.spec.lane)
        for candidate in reversed(peers):
            if candidate is request or candidate.last_step != self._step_id:
                return candidate
        return None

    def offline(self) -> Request | None:
        """Of the running offline requests that are not in this step: of the last lane, seldom evicted, small, young."""
        offline = self._state.running[RequestClass.OFFLINE]
        candidates = (r for r in offline if r.last_step != self._step_id)
        key = lambda r: (-r.spec.lane, r.num_preemptions, len(r.cache_map.blocks), -r.arrival_order)  # noqa: E731
        return min(candidates, key=key, default=None)


def _smallest_victims(
    candidates: Sequence[Request], units: int, held: Mapping[CacheBlock, int], spared: Collection[CacheBlock]
) -> list[Request]:
    """The requests to evict so that `units` units come free; empty when all candidates together hold fewer.

    Where one request is enough, it is one: of the last lane, then the least often evicted, the smallest, the youngest.
    Otherwise the largest go first, and a block that several share counts when the last of them has lost it.
    `held`: references that parked pasts give up as well. `spared`: blocks that never come free.
    """
    sizes = [(freed_units(request, spared), request) for request in candidates]
    enough = [((-r.spec.lane, r.num_preemptions, freed, -r.arrival_order), r) for freed, r in sizes if freed >= units]
    if enough:
        return [min(enough, key=lambda item: item[0])[1]]
    sizes.sort(key=lambda item: (-item[1].spec.lane, item[1].num_preemptions, -item[0], -item[1].arrival_order))
    lost, chosen = Counter(held), []
    for _, request in sizes:
        chosen.append(request)
        for block in request.cache_map.blocks:
            lost[block] += 1
            if lost[block] == block.ref_count and block not in spared:
                units -= len(block.entry.units)
        if units <= 0:
            return chosen
    return []


def freed_units(request: Request, spared: Collection[CacheBlock] = frozenset()) -> int:
    """Units that come free when a running request loses its place."""
    return count_units(b for b in request.cache_map.blocks if b.ref_count == 1 and b not in spared)
