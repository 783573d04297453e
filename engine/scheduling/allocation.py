"""Allocation of units within one step, and preemption when units run out.

Only a shortage of memory preempts (HyGen §4.1). `engine.scheduling.victims` chooses the victims: offline requests
first, as few as possible, preferring small, recently arrived and rarely preempted ones. The last resort is the newest
online request. Parked blocks of waiting requests are moved or dropped before a running request is preempted;
`engine.cache` decides where blocks go. Time limits and scheduling order are decided elsewhere.
"""

from engine.api import RequestClass
from engine.cache.cache import Claim
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling.output import AppendedEntries, ReplacedEntry
from engine.scheduling.state import SchedulerState
from engine.scheduling.victims import Victims


class Allocation:
    """Allocate units within step `step_id`. Requests already in the step are never victims.

    `prompts` are the online prompts in progress; units are reserved for their remainder.
    """

    def __init__(self, state: SchedulerState, step_id: int, now: float) -> None:
        self.appended: list[AppendedEntries] = []
        self.replaced: list[ReplacedEntry] = []
        self.prompts: list[Request] = []
        self._state = state
        self._cache = state.cache
        self._pool = state.cache.device
        self._block_size = state.config.block_size
        self._step_id = step_id
        self._now = now
        self._victims = Victims(state, step_id, now)
        # Deferred units that requests of this step already wait for: these need no further victim.
        self._stalled_units = 0

    def make_room(self, request: Request, claim: Claim, length: int) -> bool:
        """Return whether a row and the claim's units are available, those of its first `length` new tokens now.

        An online request may preempt others to get them.
        """
        state, pool = self._state, self._pool
        if claim.num_compact > self._cache.compact_room:
            return False
        if request.request_class is RequestClass.OFFLINE:
            return bool(state.free_rows) and self._make_offline_room(request, claim)
        if state.free_rows and self._has_units(request, claim, length, online=False):
            return True
        missing = self._needed(claim) - pool.num_available_units - pool.num_deferred_units
        if state.free_rows and missing <= 0:
            return False  # the units are still deferred: a later step admits the request
        victims = self._victims.for_start(request, claim, missing, online=False)
        for victim in victims or self._victims.for_start(request, claim, missing, online=True):
            state.preempt(victim, "online", self._now)
        return bool(state.free_rows) and self._has_units(request, claim, length, online=True)

    def _has_units(self, request: Request, claim: Claim, length: int, *, online: bool) -> bool:
        """See `Cache.make_way`; the reserve is for the prompts in progress."""
        reserve = self._state.prompt_reserve(self.prompts)
        return self._cache.make_way(request, claim, length, reserve, self._step_id, online=online)

    def _needed(self, claim: Claim) -> int:
        """Return the units that must be available to start an online request, the reserve for prompts included."""
        return claim.units + self._pool.num_idle_units(claim.hits) + self._state.prompt_reserve(self.prompts)

    def _make_offline_room(self, request: Request, claim: Claim) -> bool:
        """Return whether an offline request can start beside the running requests and the next block of each.

        Parked blocks of offline requests are moved if that is enough.
        """
        state, parked = self._state, self._cache.parked
        num_offline = len(state.running[RequestClass.OFFLINE]) + 1

        def missing() -> int:
            units = claim.units + self._pool.num_idle_units(claim.hits)
            return units - state.offline_units(request, num_offline)

        if 0 < (units := missing()) <= parked.num_units(online=False, but=request):
            parked.reclaim(units, self._step_id, online=False, but=request, spared=frozenset(claim.hits))
        return missing() <= 0

    def grow_decodes(self, requests: list[Request]) -> tuple[list[Request], list[int]]:
        """Make room for one more token of each request; all requests have the same class.

        Return the requests with room, and their numbers of tokens after the step. If the pool is too full to give all
        blocks at once, the returned requests are marked as part of the step, so that a later one cannot preempt them.
        """
        contexts = [request.num_computed_tokens + 1 for request in requests]
        size = self._block_size
        full = [request for request, tokens in zip(requests, contexts, strict=True) if not (tokens - 1) % size]
        full = [request for request in full if request.num_computed_tokens >= len(request.cache_map.blocks) * size]
        if not full or self._cache.grow_each(full):
            self.appended += [AppendedEntries(r.row, (r.cache_map.blocks[-1].entry,)) for r in full]
            return requests, contexts
        granted: list[Request] = []
        for request in requests:  # row < 0: an earlier request of the loop preempted this one
            blocks = request.cache_map.blocks
            if request.row >= 0 and (
                request.num_computed_tokens < len(blocks) * self._block_size or self.grow_decode(request)
            ):
                request.last_step = self._step_id
                granted.append(request)
        return granted, [request.num_computed_tokens + 1 for request in granted]

    def grow_decode(self, request: Request) -> bool:
        """Make room for one more token of a decode. Preempt for a block if necessary, possibly the request itself."""
        if request.num_computed_tokens < len(request.cache_map.blocks) * self._block_size:
            return True
        while not self.extend(request, 1, growing=True):
            if self._pool.num_deferred_units >= self._stalled_units + UNITS_PER_BLOCK:
                self._stalled_units += UNITS_PER_BLOCK
                return False  # a victim's units are still deferred: wait for them instead of preempting another
            victim = self._victims.for_running(request)
            if victim is None:
                return False
            self._state.preempt(victim, "memory", self._now)
            if victim is request:
                return False
        self.appended.append(AppendedEntries(request.row, (request.cache_map.blocks[-1].entry,)))
        return True

    def grow_prefill(self, request: Request, length: int) -> int:
        """Allocate blocks for up to `length` more tokens of a running prefill, preempting others.

        Return the granted tokens.
        """
        while not (granted := self.grow_alone(request, length)):
            if self._pool.num_deferred_units > self._stalled_units:
                return 0
            victim = self._victims.for_running(request)
            if victim is None or victim is request:
                return 0  # the request itself is the newest: it keeps its cache and waits
            self._state.preempt(victim, "memory", self._now)
        return granted

    def grow_alone(self, request: Request, length: int) -> int:
        """Allocate blocks for up to `length` more tokens without preempting. Return the granted tokens."""
        num_blocks = len(request.cache_map.blocks)
        granted = self.extend(request, length)
        added = request.cache_map.blocks[num_blocks:]
        if added:
            self.appended.append(AppendedEntries(request.row, tuple(block.entry for block in added)))
        return granted

    def extend(self, request: Request, length: int, *, growing: bool = False) -> int:
        """Allocate blocks for `length` more tokens. Return the number of tokens (≤ length) with room now.

        `growing`: the tokens belong to the answer and come one at a time.
        """
        is_online = request.request_class is RequestClass.ONLINE
        return self._cache.extend(
            request,
            length,
            self._step_id,
            num_offline=len(self._state.running[RequestClass.OFFLINE]),
            from_online=is_online and self._cache.parked.num_holders > 0 and self._victims.offline() is None,
            growing=growing,
        )
