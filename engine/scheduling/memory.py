"""The units of one step: what requests get, whom it is taken from, and where a victim's past goes.

Memory alone preempts (HyGen §4.1). Offline work loses first, and among it few requests, those that were evicted seldom,
are small and young; none is immune. The last resort is the online request that arrived last. Before anybody running
loses its place, those that wait lose blocks that they still hold; where the past of either goes is decided block by
block in `engine.scheduling.parked`. Knows nothing of time limits and of the order in which requests are considered.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from engine.cache.cache_map import UNITS_PER_BLOCK, CacheBlock, CacheKind, Tier
from engine.cache.pool import UNITS_PER_KV_BLOCK
from engine.request import Request, RequestClass
from engine.scheduling.output import AppendedEntries, CacheAction, CacheOperation, ReplacedEntry
from engine.scheduling.pressure import Start
from engine.scheduling.scheduler import Scheduler

LATE_HEADROOM = 0.25
"""Share of the pool that late requests leave free when they start, under a policy that runs them last."""


class Claim(NamedTuple):
    """What a waiting request would start from: `hits` in the prefix index, then `parked` blocks of its own on either
    tier, which together hold its first `num_tokens` tokens; `units`: device units that it needs besides both."""

    hits: list[CacheBlock]
    parked: list[CacheBlock]
    num_tokens: int
    units: int


class StepMemory:
    """Allocation within the step `step_id`; requests that are already in the step are never victims. `prompts`: online
    ones in progress, which want room for the rest of theirs."""

    def __init__(self, scheduler: Scheduler, step_id: int, now: float) -> None:
        self.appended: list[AppendedEntries] = []
        self.replaced: list[ReplacedEntry] = []
        self.prompts: list[Request] = []
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._block_size = scheduler.config.block_size
        self._step_id = step_id
        self._now = now
        # Units that requests of this step could not get because they are still deferred: no further victim for those.
        self._stalled_units = 0

    def claim(self, request: Request) -> Claim:
        """What `request` could start from now. A prefix on the device is better than the same tokens on the host."""
        hits = self._usable(self._scheduler.find_prefix(request))
        hidden = _num_hidden(hits) + _num_hidden(request.parked_blocks[len(hits) :])
        if request.parked_blocks and hidden > self._scheduler.config.scratch_blocks:
            hits = []  # never both: its own past alone has run before
        parked, num_tokens = request.parked_blocks[len(hits) :], len(hits) * self._block_size
        num_blocks = len(request.token_ids) // self._block_size + 1 - len(hits) - len(parked)
        room = self._scheduler.hidden_room - _num_hidden(hits) - _num_hidden(parked)
        num_hidden = max(0, min(num_blocks, room)) if request.cache_kind is CacheKind.HIDDEN else 0
        units = num_hidden * UNITS_PER_BLOCK[CacheKind.HIDDEN] + (num_blocks - num_hidden) * UNITS_PER_KV_BLOCK
        if parked:
            num_tokens = request.num_parked_tokens
            units += sum(len(block.entry.units) for block in parked if block.entry.tier is Tier.HOST)
        return Claim(hits, parked, num_tokens, units)

    def _usable(self, hits: list[CacheBlock]) -> list[CacheBlock]:
        """The hits in front of the first hidden one for which the scratch area has no room."""
        room = self._scheduler.hidden_room
        for index, block in enumerate(hits):
            room -= block.entry.kind is CacheKind.HIDDEN
            if room < 0:
                return hits[:index]
        return hits

    def make_room(self, request: Request, claim: Claim) -> bool:
        """Whether a row and the claim's units are available now, evicting offline work for an online request."""
        scheduler, pool = self._scheduler, self._pool
        if _num_hidden(claim.hits) + _num_hidden(claim.parked) > scheduler.hidden_room:
            return False
        if request.request_class is RequestClass.OFFLINE:
            return bool(scheduler.free_rows) and self._make_offline_room(request, claim)
        if scheduler.free_rows and self._has_units(request, claim, online=False):
            return True
        missing = self._needed(claim) - pool.num_available_units - pool.num_deferred_units
        if scheduler.free_rows and missing <= 0:
            return False  # enough is on its way; a later step admits it
        for victim in self._victims(request, claim, missing, online=False) or self._victims(
            request, claim, missing, online=True
        ):
            scheduler.preempt(victim, "online", self._now, self._step_id)
        return bool(scheduler.free_rows) and self._has_units(request, claim, online=True)

    def _has_units(self, request: Request, claim: Claim, *, online: bool) -> bool:
        """Whether the claim's units are available for an online request, moving parked pasts if that makes it so.

        A victim may have shared the hits: idle now, they are no room any more. `online`: whether those lose, too.
        """
        pool, parked = self._pool, self._scheduler.parked
        missing = self._needed(claim) - pool.num_available_units
        if 0 < missing <= parked.num_units(online=online, but=request):
            parked.reclaim(missing, self._step_id, online=online, but=request, spared=frozenset(claim.hits))
        return self._needed(claim) <= pool.num_available_units

    def _needed(self, claim: Claim) -> int:
        """Units that must be available for an online request to start: prompts in progress will want theirs."""
        return claim.units + self._pool.num_idle_units(claim.hits) + self._scheduler.prompt_reserve(self.prompts)

    def _make_offline_room(self, request: Request, claim: Claim) -> bool:
        """Beside what runs, and beside the next block of everything that runs; parked offline pasts may be moved."""
        scheduler, parked = self._scheduler, self._scheduler.parked
        num_offline = len(scheduler.running[RequestClass.OFFLINE]) + 1

        def missing() -> int:
            units = claim.units + self._pool.num_idle_units(claim.hits) + scheduler.growth_reserve
            return units - scheduler.units_for(RequestClass.OFFLINE, num_offline)

        if 0 < (units := missing()) <= parked.num_units(online=False, but=request):
            parked.reclaim(units, self._step_id, online=False, but=request, spared=frozenset(claim.hits))
        return missing() <= 0

    def evict_late(self, starts: Sequence[Start]) -> None:
        """Before anything is in the step: room for the savable requests that it can begin, from late running ones."""
        scheduler, units, tokens = self._scheduler, 0, 0
        for request, kind, savable in starts:
            if savable and tokens < scheduler.config.max_num_batched_tokens:
                units += (len(request.token_ids) // self._block_size + 1) * UNITS_PER_BLOCK[kind]
                tokens += len(request.token_ids)
        missing = units - self._pool.num_available_units - self._pool.num_deferred_units
        missing -= scheduler.parked.num_units(online=True)
        missing -= sum(_freed_units(request) for request in scheduler.running[RequestClass.OFFLINE])
        for victim in scheduler.evictable(self._now):
            if missing <= 0:
                return
            missing -= _freed_units(victim)
            scheduler.preempt(victim, "late", self._now, self._step_id)

    def spares(self, request: Request) -> bool:
        """Whether a late request may start: where they run last, those that can be saved will want the last of the
        memory, and it would only be evicted again. With nobody running it always may."""
        scheduler = self._scheduler
        if not scheduler.online_policy.late_last or not scheduler.running[RequestClass.ONLINE]:
            return True
        units = (len(request.token_ids) // self._block_size + 1) * UNITS_PER_KV_BLOCK
        room = self._pool.num_available_units + scheduler.parked.num_units(online=True)
        return room - units >= LATE_HEADROOM * self._pool.num_units

    def take(self, request: Request, claim: Claim) -> None:
        """Give the request what it claimed; what it has on the host comes back in this step. There must be room."""
        online = request.request_class is RequestClass.ONLINE
        if online:
            self.prompts.append(request)
        blocks = request.cache_map.blocks
        for block in claim.hits:
            self._pool.acquire(block, online=online)
            blocks.append(block)
        blocks.extend(self._scheduler.parked.resume(request, len(claim.hits), self._step_id))
        self._scheduler.count_hidden(request, _num_hidden(blocks))
        request.cache_map.num_published = len(claim.hits)
        request.num_computed_tokens = request.num_confirmed_tokens = claim.num_tokens

    def grow_decode(self, request: Request) -> bool:
        """One more block for a decode; preempts for it, perhaps the request itself."""
        while not self.extend(request, 1, growing=True):
            if self._pool.num_deferred_units >= self._stalled_units + UNITS_PER_KV_BLOCK:
                self._stalled_units += UNITS_PER_KV_BLOCK
                return False  # the units of a victim are still in flight: wait for them, do not take another
            victim = self._victim_for(request)
            if victim is None:
                return False
            self._scheduler.preempt(victim, "memory", self._now, self._step_id)
            if victim is request:
                return False
        self.appended.append(AppendedEntries(request.row, (request.cache_map.blocks[-1].entry,)))
        return True

    def grow_prefill(self, request: Request, length: int) -> int:
        """Blocks for a running prefill's next `length` tokens, or for as many as there is room for."""
        while not (granted := self.grow_alone(request, length)):
            if self._pool.num_deferred_units > self._stalled_units:
                return 0
            victim = self._victim_for(request)
            if victim is None or victim is request:
                return 0  # it was the last to arrive: it keeps its cache and waits
            self._scheduler.preempt(victim, "memory", self._now, self._step_id)
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
        """Give a request of this step K and V for hidden blocks, while units are to spare; returns for how many tokens.

        They are projected once, instead of in every step. Blocks to come are KV too.
        """
        restored, online = 0, request.request_class is RequestClass.ONLINE
        for index, source in enumerate(request.cache_map.blocks):
            if restored + self._block_size > max_tokens:
                break
            if source.entry.kind is not CacheKind.HIDDEN:
                continue
            if self._pool.num_available_units < UNITS_PER_KV_BLOCK + self._scheduler.growth_reserve:
                break
            target = self._pool.allocate(CacheKind.KV, online=online)
            assert target is not None, "available units could not be had"
            start = index * self._block_size
            operation = CacheOperation(CacheAction.RESTORE, source.entry, target.entry, start)
            self._scheduler.parked.operations.append(operation)
            self.replaced.append(ReplacedEntry(request.row, index, target.entry))
            request.cache_map.blocks[index] = target
            self._pool.release(source, self._step_id)
            self._scheduler.count_hidden(request, -1)
            restored += self._block_size
            request.cache_kind = CacheKind.KV
        return restored

    def extend(self, request: Request, length: int, *, growing: bool = False) -> int:
        """Allocate what `length` more tokens need; returns for how many tokens (≤ length) there is room now.

        `growing`: tokens of the answer, one by one.
        """
        blocks = request.cache_map.blocks
        start = request.num_computed_tokens
        scheduler, request_class = self._scheduler, request.request_class
        online = request_class is RequestClass.ONLINE
        num_offline = len(scheduler.running[RequestClass.OFFLINE])
        while len(blocks) * self._block_size < start + length:
            kind = scheduler.kind_for(request, growing)
            wanted = -(-(start + length) // self._block_size) - len(blocks)
            room = scheduler.units_for(request_class, num_offline)
            if (missing := wanted * UNITS_PER_BLOCK[kind] - room) > 0:
                scheduler.parked.reclaim(missing, self._step_id, online=online and self._offline_victim() is None)
                room = scheduler.units_for(request_class, num_offline)
            if room < UNITS_PER_BLOCK[kind]:
                break
            block = self._pool.allocate(kind, online=online)
            if block is None:
                break
            scheduler.count_hidden(request, kind is CacheKind.HIDDEN)
            blocks.append(block)
        return min(length, len(blocks) * self._block_size - start)

    def _victims(self, request: Request, claim: Claim, missing: int, *, online: bool) -> list[Request]:
        """The offline requests to evict so that `missing` more units and a row come free for `request`.

        Nobody is immune: whoever was evicted often loses last, but loses. Nothing at all when even all of them would
        not do. `online`: whether the pasts of other online requests, which wait, may be moved too.
        """
        scheduler = self._scheduler
        limit, spared = scheduler.config.max_offline_preemptions, frozenset(claim.hits)
        held = scheduler.parked.references(online=online, but=request)
        movable = (block for block, count in held.items() if count == block.ref_count and block not in spared)
        missing -= sum(len(block.entry.units) for block in movable)
        victims = [r for r in scheduler.running[RequestClass.OFFLINE] if r.last_step != self._step_id]
        seldom = [victim for victim in victims if victim.num_preemptions < limit]
        chosen = _smallest_victims(seldom, missing, held, spared)
        if not chosen and len(seldom) < len(victims):
            chosen = _smallest_victims(victims, missing, held, spared)
        return chosen

    def _victim_for(self, request: Request) -> Request | None:
        """Whose memory a running request takes: offline first, then the last in the order (of lanes and age, if it is
        offline itself); none of this step's."""
        online = request.request_class is RequestClass.ONLINE
        if online and (victim := self._offline_victim()) is not None:
            return victim
        scheduler = self._scheduler
        offline = scheduler.running[RequestClass.OFFLINE]
        peers = scheduler.online_order(self._now) if online else sorted(offline, key=lambda r: r.spec.lane)
        for candidate in reversed(peers):
            if candidate is request or candidate.last_step != self._step_id:
                return candidate
        return None

    def _offline_victim(self) -> Request | None:
        """Of the running offline requests that are not in this step: of the last lane, seldom evicted, small, young."""
        offline = self._scheduler.running[RequestClass.OFFLINE]
        candidates = (request for request in offline if request.last_step != self._step_id)
        key = lambda r: (-r.spec.lane, r.num_preemptions, len(r.cache_map.blocks), -r.arrival_order)  # noqa: E731
        return min(candidates, key=key, default=None)


def _smallest_victims(
    candidates: Sequence[Request], units: int, held: Mapping[CacheBlock, int], spared: Collection[CacheBlock]
) -> list[Request]:
    """One request that frees `units` units by itself: of the last lane, seldom evicted, small and young. Otherwise
    several, the largest of those first; what they share counts once all that hold it have lost it. Empty: all are too
    few.

    `held`: references that go as well. `spared`: blocks that stay whoever loses them.
    """
    sizes = [(_freed_units(request, spared), request) for request in candidates]
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


def _freed_units(request: Request, spared: Collection[CacheBlock] = frozenset()) -> int:
    blocks = request.cache_map.blocks
    return sum(len(block.entry.units) for block in blocks if block.ref_count == 1 and block not in spared)


def _num_hidden(blocks: list[CacheBlock]) -> int:
    return sum(block.entry.kind is CacheKind.HIDDEN for block in blocks)
