"""Requests that leave for another engine, or come from one, with the K and V that were computed of them, and the room
that the cache gains or loses by it.

What moves between the engines' memories is the caller's business, and takes time: a request that comes has its row and
units from the first moment on, but stays aside until its past is there (KunServe §4.2: it is stalled, others run).
"""

from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import replace
from typing import NamedTuple

from engine.api import EngineRequest, RequestClass, Resumption
from engine.cache.blocks import CacheKind, count_units
from engine.request import Request, RequestStatus
from engine.scheduling.recovery import FaultRecovery
from engine.scheduling.results import InFlight
from engine.scheduling.state import SchedulerState
from engine.scheduling.waiting import insert_by_age, remove_by_age
from predictor.limits import UNITS_PER_BLOCK


class MovedRequest(NamedTuple):
    """A request on its way. `spec` goes on where it stood; K and V of its first `num_tokens` tokens go with it."""

    spec: EngineRequest
    num_tokens: int

    @property
    def arrival(self) -> float:
        """When it came to the first engine."""
        assert self.spec.resumed is not None
        return self.spec.resumed.times.arrival


class HeldRequest(NamedTuple):
    """A request that has not ended. `units`: of the device that it holds; `running`: whether it has a row."""

    request_id: str
    arrival: float
    units: int
    running: bool


class Moves:
    """`requests`: the core's own, by id; `arrivals` numbers them. Nothing here may be called for a request that a step
    in flight holds."""

    def __init__(
        self,
        state: SchedulerState,
        requests: MutableMapping[str, Request],
        in_flight: Collection[InFlight],
        recovery: FaultRecovery,
        arrivals: Iterator[int],
    ) -> None:
        self._state = state
        self._requests = requests
        self._in_flight = in_flight
        self._recovery = recovery
        self._arrivals = arrivals

    def open_requests(self) -> Iterator[HeldRequest]:
        """Every request that has not ended, and the units that it holds."""
        for request in self._requests.values():
            held = count_units(block for block in request.cache_map.blocks if block.on_device)
            yield HeldRequest(request.request_id, request.times.arrival, held, request.row >= 0)

    def units_of(self, request_id: str) -> tuple[int, ...]:
        """Where a request's past lies on the device, in the order of its block table."""
        blocks = self._requests[request_id].cache_map.blocks
        return tuple(unit for block in blocks for unit in block.entry.units)

    def detach(self, request_id: str) -> MovedRequest:
        """Take a request out, with nobody told, so that another engine goes on with it. What it holds is free: whoever
        takes its past along must have read it, or be the only one to write here until then."""
        assert not self._in_flight, "a step in flight may hold the request"
        if self._requests[request_id].aside:
            self._recovery.forget(self._requests[request_id])
        request = self._requests.pop(request_id)
        has_past = request.status is RequestStatus.RUNNING and not request.starts_over
        past = request.num_confirmed_tokens if has_past else 0
        resumption = Resumption(
            tuple(request.token_ids[request.num_prompt_tokens :]),
            request.times,
            request.num_cached_tokens,
            request.num_preemptions,
            num_withheld=len(request.token_ids) - request.num_told if request.withholds else 0,
        )
        moved = MovedRequest(replace(request.spec, resumed=resumption), past)
        self._state.end(request)
        request.move_to(RequestStatus.FINISHED)
        return moved

    def stall(self, request_id: str, num_units: int) -> tuple[int, tuple[int, ...]] | None:
        """Have a request stand still with what it holds until `arrived`: the number of tokens whose past it has, and
        where that lies. None: it has none, or not in the first `num_units` units, and starts over. No step may be in
        flight."""
        assert not self._in_flight, "a step in flight may hold the request"
        if not self._stand_still(request_id, num_units):
            self.start_over(request_id)
            return None
        num_tokens = self._requests[request_id].num_confirmed_tokens
        num_units = UNITS_PER_BLOCK * -(-num_tokens // self._state.config.block_size)
        return num_tokens, self.units_of(request_id)[:num_units]

    def put_last(self, request_id: str) -> None:
        """A request that is here is behind all others from now on; unless it stands still it starts over."""
        if self._requests[request_id].status is not RequestStatus.RUNNING:
            self.start_over(request_id)
            return
        request, aside = self._requests[request_id], self._state.aside
        remove_by_age(aside, request)
        request.arrival_order = next(self._arrivals)
        insert_by_age(aside, request)

    def attach(self, moved: MovedRequest) -> bool:
        """Take a request of another engine in, behind all that are here, with row and units for its past, aside until
        `arrived` says that the past is there. False: there is no room for it, there is no past, or it is offline; it
        waits its turn to be computed again."""
        assert moved.spec.resumed is not None
        request = Request(moved.spec, moved.spec.resumed.times, next(self._arrivals))
        request.most_blocks = self._state.config.most_blocks
        self._requests[request.request_id] = request
        if not moved.num_tokens or not self._take_room(request, moved.num_tokens):
            self._state.add(request)
            return False
        state = self._state
        state.online_share.enter(request)
        state.online_share.start(request)
        request.num_computed_tokens = request.num_confirmed_tokens = moved.num_tokens
        request.move_to(RequestStatus.RUNNING)
        request.row = state.free_rows.pop()
        request.aside = True
        insert_by_age(state.aside, request)
        return True

    def arrived(self, request_id: str) -> None:
        """A request that was attached, whose past is there now, or that was stalled, runs from the next step on, in
        which it is new."""
        if (request := self._requests.get(request_id)) is not None:
            self._state.unwritten[request] = None
            self._state.bring_back(request)

    def start_over(self, request_id: str) -> None:
        """What was computed of a request is lost; it waits its turn. No step may be in flight."""
        self.attach(self.detach(request_id)._replace(num_tokens=0))

    def grow_cache(self, units: int) -> None:
        """There are so many more units of cache from now on."""
        self._state.pool.grow(units)

    def shrink_cache(self, units: int) -> None:
        """The last units of the cache are given out no more; see `num_retiring_units`."""
        self._state.pool.shrink(units)

    def resize_cache(self, units: int) -> None:
        """The cache has so many units now, and offers nothing of what was in it. No request may hold any of those that
        it loses."""
        pool = self._state.pool
        pool.forget()
        if units > pool.num_units:
            pool.grow(units - pool.num_units)
        else:
            pool.shrink(pool.num_units - units)
        assert not pool.num_retiring_units, "somebody holds a unit"

    @property
    def num_retiring_units(self) -> int:
        """Units that the cache has lost and that blocks still hold: their memory is not free yet."""
        return self._state.pool.num_retiring_units

    def _stand_still(self, request_id: str, num_units: int) -> bool:
        """Have a request stand still, with row and units. False: it has no past, or not all of it in the
        first `num_units` units on the device."""
        request, state = self._requests[request_id], self._state
        blocks = request.cache_map.blocks
        has_past = request.status is RequestStatus.RUNNING and request.num_confirmed_tokens and not request.starts_over
        if not has_past or any(not block.on_device or max(block.entry.units) >= num_units for block in blocks):
            return False
        request.num_computed_tokens = request.num_confirmed_tokens
        remove_by_age(state.running[request.request_class], request)
        request.aside = True
        insert_by_age(state.aside, request)
        return True

    def _take_room(self, request: Request, num_tokens: int) -> bool:
        state = self._state
        num_blocks = -(-num_tokens // state.config.block_size)
        if not state.free_rows or request.request_class is not RequestClass.ONLINE:
            return False
        blocks = request.cache_map.blocks
        while len(blocks) < num_blocks:
            block = state.pool.allocate(CacheKind.KV, online=True)
            if block is None:
                for taken in blocks:
                    state.pool.release(taken, -1)
                blocks.clear()
                return False
            blocks.append(block)
        return True
