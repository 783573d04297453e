"""Requests that leave for another engine, or come from one, with the K and V that were computed of them.

What moves between the engines' memories is the caller's business, and takes time: a request that comes has its row and
units from the first moment on, but stays aside until its past is there (KunServe §4.2: it is stalled, others run).
"""

from collections.abc import MutableMapping
from dataclasses import replace
from typing import NamedTuple

from engine.api import EngineRequest, RequestClass, Resumption
from engine.cache.blocks import CacheKind
from engine.request import Request, RequestStatus
from engine.scheduling.state import SchedulerState, insert_by_age, remove_by_age


class MovedRequest(NamedTuple):
    """A request on its way. `spec` goes on where it stood; K and V of its first `num_tokens` tokens go with it."""

    spec: EngineRequest
    num_tokens: int

    @property
    def arrival(self) -> float:
        """When it came to the first engine."""
        assert self.spec.resumed is not None
        return self.spec.resumed.times.arrival


class Moves:
    """`requests`: the core's own, by id. Nothing here may be called for a request that a step in flight holds."""

    def __init__(self, state: SchedulerState, requests: MutableMapping[str, Request]) -> None:
        self._state = state
        self._requests = requests

    def detach(self, request_id: str) -> MovedRequest:
        """Take a request out of this engine, with nobody told. What it holds is free; who takes the past with him must
        have read it, or be the only one to write here until he has."""
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

    def stall(self, request_id: str, num_units: int) -> bool:
        """Have a request stand still, with row and units, until `arrived`. False: it has no past, or not all of it in
        the first `num_units` units on the device."""
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

    def put_last(self, request_id: str, order: int) -> None:
        """One that stands still is behind all that have come."""
        request, aside = self._requests[request_id], self._state.aside
        remove_by_age(aside, request)
        request.arrival_order = order
        insert_by_age(aside, request)

    def attach(self, moved: MovedRequest, order: int) -> bool:
        """Take a request in, with row and units for its past, aside until `arrived` says that the past is there. False:
        there is no room for it, there is no past, or it is offline; it waits its turn to be computed again."""
        assert moved.spec.resumed is not None
        request = Request(moved.spec, moved.spec.resumed.times, order)
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
        request = self._requests[request_id]
        self._state.unwritten[request] = None
        self._state.bring_back(request)

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
