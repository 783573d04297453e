"""Memory shortage: which requests are preempted, and whether a late request may start.

A step preempts few requests, offline ones first, and none that it contains.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from operator import not_

from engine.api import RequestClass
from engine.cache.blocks import CacheBlock, count_units
from engine.cache.cache import Claim
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling.overdue import owes
from engine.scheduling.state import SchedulerState

LATE_HEADROOM = 0.25
"""Share of the pool that a late request must leave free when it starts, under a policy with `late_last`."""


class Victims:
    """Choose the requests that step `step_id` preempts."""

    def __init__(self, state: SchedulerState, step_id: int, now: float) -> None:
        self._state = state
        self._step_id = step_id
        self._now = now

    def for_start(self, request: Request, claim: Claim, missing: int, *, online: bool) -> list[Request]:
        """Return the offline requests to preempt so that `request` gets `missing` more units and a row.

        Empty if all candidates are not enough. Requests preempted `max_offline_preemptions` times are chosen
        only if the others do not suffice. `online`: whether parked blocks of other waiting online requests may be
        moved, too.
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
        """Return the request to preempt for a running one, possibly the request itself, but none already in this step.

        Offline requests go first, then the last in order: the newest, or the last by lane and arrival for an offline
        request.
        """
        online = request.request_class is RequestClass.ONLINE
        if online and (victim := self.offline()) is not None:
            return victim
        state = self._state
        offline = state.running[RequestClass.OFFLINE]
        peers = online_order(state, self._now) if online else sorted(offline, key=lambda r: r.spec.lane)
        for candidate in reversed(peers):
            if candidate is request or candidate.last_step != self._step_id:
                return candidate
        return None

    def offline(self) -> Request | None:
        """Return the offline request to preempt first, or None if all are in this step.

        It is of the last lane, then rarely preempted, small and new.
        """
        offline = self._state.running[RequestClass.OFFLINE]
        candidates = (r for r in offline if r.last_step != self._step_id)
        key = lambda r: (-r.spec.lane, r.num_preemptions, len(r.cache_map.blocks), -r.arrival_order)  # noqa: E731
        return min(candidates, key=key, default=None)


def _smallest_victims(
    candidates: Sequence[Request], units: int, held: Mapping[CacheBlock, int], spared: Collection[CacheBlock]
) -> list[Request]:
    """Return the requests to preempt to free `units` units; empty if all candidates together hold fewer.

    If one request suffices, only one is chosen: of the last lane, then least often preempted, smallest, newest.
    Otherwise the largest go first. A shared block counts when its last holder loses it.

    Args:
        held: References by parked blocks that are given up as well.
        spared: Blocks that are never freed.
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
    """Return the units that preempting a running request frees."""
    return count_units(b for b in request.cache_map.blocks if b.ref_count == 1 and b not in spared)


def online_order(state: SchedulerState, now: float) -> list[Request]:
    """Return the running online requests by arrival; under a knapsack policy those without a limit on gaps and then the
    late ones come last.

    Memory is taken from the end of this order, and late requests are worth less to the knapsack.
    """
    running = list(state.running[RequestClass.ONLINE])
    if state.online_policy.select is not None and (math.isfinite(state.objective.ttft) or state.promised):
        if state.promised:
            running.sort(key=lambda request: request.spec.promise is not None and math.isinf(request.spec.promise.tbt))
        objective = state.objective
        late = [objective.is_late(request, now) and not owes(state, request, now) for request in running]
        if any(late):
            return [*compress(running, map(not_, late)), *compress(running, late)]
    return running


def spares(state: SchedulerState, request: Request) -> bool:
    """Return whether a late request may start: it must leave `LATE_HEADROOM` of the pool to savable requests.

    With less left, it would only be preempted again. Always true without `late_last` and while no online request runs.
    """
    if not state.online_policy.late_last or not state.running[RequestClass.ONLINE]:
        return True
    units = request.num_blocks(state.config.block_size) * UNITS_PER_BLOCK
    room = state.pool.num_available_units + state.cache.parked.num_units(online=True)
    return room - units >= LATE_HEADROOM * state.pool.num_units
