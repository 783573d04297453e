"""Who gets units in one step, and from whom they are taken.

Memory alone preempts (HyGen §4.1). Offline work loses first, and among it few requests, those that were evicted seldom,
are small and young; none is immune. The last resort is the online request that arrived last. Before a running request
loses its place (`engine.scheduling.victims` says which), waiting ones lose blocks that they still hold; where the past
of either goes is the cache's business (`engine.cache`). Knows nothing of time limits and of the order in which requests
are considered.
"""

from collections.abc import Sequence

from engine.api import RequestClass
from engine.cache.cache import Claim
from engine.request import Request
from engine.scheduling.output import AppendedEntries, ReplacedEntry
from engine.scheduling.state import SchedulerState
from engine.scheduling.victims import Victims
from predictor.limits import UNITS_PER_BLOCK


class Allocation:
    """Allocation within the step `step_id`; requests that are already in the step are never victims. `prompts`: online
    ones in progress, which want room for the rest of theirs."""

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
        # Units that requests of this step could not get because they are still deferred: no further victim for those.
        self._stalled_units = 0

    def make_room(self, request: Request, claim: Claim) -> bool:
        """Whether a row and the claim's units are available now, evicting offline work for an online request."""
        state, pool = self._state, self._pool
        if claim.num_compact > self._cache.compact_room:
            return False
        if request.request_class is RequestClass.OFFLINE:
            return bool(state.free_rows) and self._make_offline_room(request, claim)
        if state.free_rows and self._has_units(request, claim, online=False):
            return True
        missing = self._needed(claim) - pool.num_available_units - pool.num_deferred_units
        if state.free_rows and missing <= 0:
            return False  # the units are in flight: a later step admits the request
        victims = self._victims.for_start(request, claim, missing, online=False)
        for victim in victims or self._victims.for_start(request, claim, missing, online=True):
            state.preempt(victim, "online", self._now)
        return bool(state.free_rows) and self._has_units(request, claim, online=True)

    def _has_units(self, request: Request, claim: Claim, *, online: bool) -> bool:
        """Whether the claim's units are available for an online request, moving parked pasts if that makes it so.

        Hits that only a victim held are idle once it has lost its place: taking them takes their units out of what is
        available. `online`: whether the pasts of waiting online requests may be moved, too.
        """
        pool, parked = self._pool, self._cache.parked
        missing = self._needed(claim) - pool.num_available_units
        if 0 < missing <= parked.num_units(online=online, but=request):
            parked.reclaim(missing, self._step_id, online=online, but=request, spared=frozenset(claim.hits))
        return self._needed(claim) <= pool.num_available_units

    def _needed(self, claim: Claim) -> int:
        """Units that must be available for an online request to start: prompts in progress will want theirs."""
        return claim.units + self._pool.num_idle_units(claim.hits) + self._state.prompt_reserve(self.prompts)

    def _make_offline_room(self, request: Request, claim: Claim) -> bool:
        """Beside what runs, and beside the next block of everything that runs; parked offline pasts may be moved."""
        state, parked = self._state, self._cache.parked
        num_offline = len(state.running[RequestClass.OFFLINE]) + 1

        def missing() -> int:
            units = claim.units + self._pool.num_idle_units(claim.hits)
            return units - state.offline_units(request, num_offline)

        if 0 < (units := missing()) <= parked.num_units(online=False, but=request):
            parked.reclaim(units, self._step_id, online=False, but=request, spared=frozenset(claim.hits))
        return missing() <= 0

    def take(self, request: Request, claim: Claim) -> None:
        """Give the request what it claimed; what it has on the host comes back in this step. There must be room."""
        if request.request_class is RequestClass.ONLINE:
            self.prompts.append(request)
        self._cache.take(request, claim, self._step_id)

    def grow_decodes(self, requests: Sequence[Request]) -> list[Request]:
        """Make room for one more token of each; return the requests that have it, marked as part of the step so that
        none of the others takes their place."""
        granted: list[Request] = []
        for request in requests:  # (a row below zero: an earlier one of them took its place)
            blocks = request.cache_map.blocks
            if request.row >= 0 and (
                request.num_computed_tokens < len(blocks) * self._block_size or self.grow_decode(request)
            ):
                request.last_step = self._step_id
                granted.append(request)
        return granted

    def grow_decode(self, request: Request) -> bool:
        """Room for one more token of a decode; preempts for a block, perhaps the request itself."""
        if request.num_computed_tokens < len(request.cache_map.blocks) * self._block_size:
            return True
        while not self.extend(request, 1, growing=True):
            if self._pool.num_deferred_units >= self._stalled_units + UNITS_PER_BLOCK:
                self._stalled_units += UNITS_PER_BLOCK
                return False  # the units of a victim are still in flight: wait for them, do not take another
            victim = self._victims.for_running(request)
            if victim is None:
                return False
            self._state.preempt(victim, "memory", self._now)
            if victim is request:
                return False
        self.appended.append(AppendedEntries(request.row, (request.cache_map.blocks[-1].entry,)))
        return True

    def grow_prefill(self, request: Request, length: int) -> int:
        """Blocks for a running prefill's next `length` tokens, or for as many as there is room for."""
        while not (granted := self.grow_alone(request, length)):
            if self._pool.num_deferred_units > self._stalled_units:
                return 0
            victim = self._victims.for_running(request)
            if victim is None or victim is request:
                return 0  # it was the last to arrive: it keeps its cache and waits
            self._state.preempt(victim, "memory", self._now)
        return granted

    def grow_alone(self, request: Request, length: int) -> int:
        """The same for any running request, without taking anybody's place."""
        num_blocks = len(request.cache_map.blocks)
        granted = self.extend(request, length)
        added = request.cache_map.blocks[num_blocks:]
        if added:
            self.appended.append(AppendedEntries(request.row, tuple(block.entry for block in added)))
        return granted

    def restore(self, request: Request, max_tokens: int) -> int:
        """K and V for compact blocks of a request of this step, while units are to spare; returns how many tokens'."""
        found = self._cache.restore(request, max_tokens, self._step_id, reserve=self._state.growth_reserve)
        self.replaced.extend(ReplacedEntry(request.row, index, entry) for index, entry in found)
        return len(found) * self._block_size

    def extend(self, request: Request, length: int, *, growing: bool = False) -> int:
        """Allocate blocks for `length` more tokens; return for how many tokens (≤ length) there is room now.

        `growing`: the tokens belong to the answer and come one by one.
        """
        is_online = request.request_class is RequestClass.ONLINE
        return self._cache.extend(
            request,
            length,
            self._step_id,
            num_offline=len(self._state.running[RequestClass.OFFLINE]),
            from_online=is_online and self._cache.has_parked and self._victims.offline() is None,
            growing=growing,
        )
