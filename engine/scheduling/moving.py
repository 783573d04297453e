"""Moves requests with their K and V between engines, and grows or shrinks the cache.

The caller copies the memory, which takes time. An attached request gets its row and units at once but stays quarantined
until its K and V have arrived (KunServe §4.2: the request stalls, others run).
"""

from dataclasses import replace
from typing import NamedTuple

from engine.api import EngineRequest, RequestClass, Resumption
from engine.cache.blocks import CacheKind
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request, RequestStatus
from engine.scheduling.admission import new_request
from engine.scheduling.recovery import FaultRecovery
from engine.scheduling.state import SchedulerState
from engine.scheduling.waiting import remove_by_age


class MovedRequest(NamedTuple):
    """A request in transfer. `spec` resumes it; the K and V of its first `num_tokens` tokens move with it."""

    spec: EngineRequest
    num_tokens: int


class Moves:
    """Move requests in and out of the core.

    No method may be called for a request that a step in flight contains.
    """

    def __init__(self, state: SchedulerState, recovery: FaultRecovery) -> None:
        self._state = state
        self._requests = state.requests
        self._recovery = recovery

    def open_requests(self) -> list[Request]:
        """Return every unfinished request, in order of arrival."""
        return sorted(self._requests.values(), key=lambda request: request.times.arrival)

    def units_of(self, request_id: str) -> tuple[int, ...]:
        """Return the device units of a request, in the order of its block table."""
        blocks = self._requests[request_id].cache_map.blocks
        return tuple(unit for block in blocks for unit in block.entry.units)

    def detach(self, request_id: str) -> MovedRequest:
        """Remove a request without output, to resume it in another engine. Its row and units are freed.

        A caller that copies the K and V must do so before any other request writes to these units.
        """
        assert not self._state.in_flight, "a step in flight may hold the request"
        if self._requests[request_id].quarantined:
            self._recovery.forget(self._requests[request_id])
        request = self._requests.pop(request_id)
        has_past = request.status is RequestStatus.RUNNING and not request.starts_over
        past = request.num_confirmed_tokens if has_past else 0
        resumption = Resumption(
            tuple(request.token_ids[request.num_prompt_tokens :]),
            request.times,
            request.num_cached_tokens,
            request.num_preemptions,
            num_withheld=len(request.token_ids) - request.num_emitted if request.final_only else 0,
        )
        moved = MovedRequest(replace(request.spec, resumed=resumption), past)
        self._state.end(request)
        request.move_to(RequestStatus.FINISHED)
        return moved

    def stall(self, request_id: str, num_units: int) -> tuple[int, tuple[int, ...]] | None:
        """Quarantine a running request, with its row and units, until `arrived`. No step may be in flight.

        Returns its computed tokens and their units. Returns None if it has none, or if they lie outside the first
        `num_units` units; the request then starts over.
        """
        assert not self._state.in_flight, "a step in flight may hold the request"
        request, state = self._requests[request_id], self._state
        has_past = request.status is RequestStatus.RUNNING and request.num_confirmed_tokens and not request.starts_over
        blocks = request.cache_map.blocks
        if not has_past or any(not block.on_device or max(block.entry.units) >= num_units for block in blocks):
            self.start_over(request_id)
            return None
        num_tokens = request.num_computed_tokens = request.num_confirmed_tokens
        remove_by_age(state.running[request.request_class], request)
        request.quarantined = True
        state.quarantined.add(request)
        return num_tokens, self.units_of(request_id)[: UNITS_PER_BLOCK * -(-num_tokens // state.config.block_size)]

    def put_last(self, request_id: str) -> None:
        """Move a request behind all others. A request that is not stalled starts over."""
        if self._requests[request_id].status is not RequestStatus.RUNNING:
            self.start_over(request_id)
            return
        request, quarantined = self._requests[request_id], self._state.quarantined
        quarantined.remove(request)
        request.arrival_order = next(self._state.arrivals)
        quarantined.add(request)

    def attach(self, moved: MovedRequest) -> bool:
        """Add a request of another engine behind all others, with a row and units, quarantined until `arrived`.

        Returns False if there is no room, it has no K and V, or it is offline; the request then waits and is
        recomputed.
        """
        assert moved.spec.resumed is not None
        request = new_request(self._state, moved.spec, moved.spec.resumed.times)
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
        request.quarantined = True
        state.quarantined.add(request)
        return True

    def arrived(self, request_id: str) -> None:
        """Resume an attached or stalled request from the next step on, in which it is a new request."""
        if (request := self._requests.get(request_id)) is not None:
            self._state.not_in_runner[request] = None
            self._state.end_quarantine(request)

    def start_over(self, request_id: str) -> None:
        """Discard the computed tokens of a request and queue it again. No step may be in flight."""
        self.attach(self.detach(request_id)._replace(num_tokens=0))

    def resize_cache(self, units: int) -> None:
        """Resize the cache to `units` units and empty its prefix index. No request may hold a unit that is removed."""
        pool = self._state.pool
        pool.forget()
        if units > pool.num_units:
            pool.grow(units - pool.num_units)
        else:
            pool.shrink(pool.num_units - units)
        assert not pool.num_retiring_units, "somebody holds a unit"

    def _take_room(self, request: Request, num_tokens: int) -> bool:
        state = self._state
        num_blocks = -(-num_tokens // state.config.block_size)
        has_room = UNITS_PER_BLOCK * num_blocks <= state.pool.num_available_units
        if not state.free_rows or request.request_class is not RequestClass.ONLINE or not has_room:
            return False
        found = (state.pool.allocate(CacheKind.KV, online=True) for _ in range(num_blocks))
        request.cache_map.blocks += [block for block in found if block is not None]
        return True
