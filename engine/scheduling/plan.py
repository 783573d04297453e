"""The step under construction: its chunks, new requests and cost, the admission of a request, and the units it gets.

`engine.scheduling.step` and its fills decide which requests run and how many tokens of each.

Only a shortage of memory preempts (HyGen §4.1). `engine.scheduling.urgency` chooses the victims: offline requests
first, as few as possible, preferring small, recently arrived and rarely preempted ones. The last resort is the newest
online request. Parked blocks of waiting requests are moved or dropped before a running request is preempted;
`engine.cache` decides where blocks go.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import repeat

from engine.api import RequestClass, quick_rows
from engine.cache.blocks import CacheKind, Tier
from engine.cache.cache import Claim
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request, RequestStatus
from engine.scheduling.objective import StepLedger
from engine.scheduling.output import (
    AppendedEntries,
    Chunk,
    Draft,
    NewRequest,
    ReplacedEntry,
    SavedState,
    SchedulerOutput,
)
from engine.scheduling.state import InFlight, SchedulerState
from engine.scheduling.urgency import PrefillPace, offline_victim, prefill_pace, victim_for_running, victims_for_start
from predictor.features import CacheWork


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
        # Deferred units that requests of this step already wait for: these need no further victim.
        self._stalled_units = 0

    def make_room(self, request: Request, claim: Claim, length: int) -> bool:
        """Return whether a row and the claim's units are available, those of its first `length` new tokens now.

        An online request may preempt others to get them.
        """
        state, pool, step_id = self._state, self._pool, self._step_id
        if claim.num_compact > self._cache.compact_room:
            return False
        if request.request_class is RequestClass.OFFLINE:
            return bool(state.free_rows) and self._make_offline_room(request, claim)
        reserve = state.prompt_reserve(self.prompts)
        if state.free_rows and self._cache.make_way(request, claim, length, reserve, step_id, online=False):
            return True
        missing = claim.units + pool.num_idle_units(claim.hits) + reserve
        missing -= pool.num_available_units + pool.num_deferred_units
        if state.free_rows and missing <= 0:
            return False  # the units are still deferred: a later step admits the request
        victims = victims_for_start(state, step_id, request, claim, missing, online=False)
        for victim in victims or victims_for_start(state, step_id, request, claim, missing, online=True):
            state.preempt(victim, "online", self._now)
        return bool(state.free_rows) and self._cache.make_way(request, claim, length, reserve, step_id, online=True)

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
            victim = victim_for_running(self._state, self._step_id, request, self._now)
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
            victim = victim_for_running(self._state, self._step_id, request, self._now)
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
        from_online = request.request_class is RequestClass.ONLINE and self._cache.parked.num_holders > 0
        return self._cache.extend(
            request,
            length,
            self._step_id,
            num_offline=len(self._state.running[RequestClass.OFFLINE]),
            from_online=from_online and offline_victim(self._state, self._step_id) is None,
            growing=growing,
        )


class StepPlan:
    """The content of the step so far. Each addition is charged to the ledger and recorded on the request."""

    def __init__(self, state: SchedulerState, now: float) -> None:
        config = state.config
        self.state = state
        self.step_id = step_id = state.next_step_id
        self.now = now
        self.allocation = Allocation(state, step_id, now)
        self.ledger = StepLedger(config.max_num_batched_tokens, config.max_num_seqs, state.model)
        self.chunks: list[Chunk] = []
        self.requests: list[Request] = []
        self._drafts: list[Draft] = []
        self._guesses: dict[int, int] = {}
        self._new_requests: dict[int, NewRequest] = {}  # by row
        self._saved_states: list[SavedState] = []
        oldest = state.in_flight[0].output.step_id if state.in_flight else step_id
        self._last_completed_step = oldest - 1

    @cached_property
    def pace(self) -> PrefillPace | None:
        """Return the prefill speed, measured when the step first needs it."""
        return prefill_pace(self.state)

    def may_start(self, request: Request) -> bool:
        """Return whether no step in flight contains this request: its last token and old units would be unsettled."""
        return request.last_step <= self._last_completed_step

    def finish(self, spare: float = 0.0) -> InFlight | None:
        """Return the decided step, or None if it has no chunk. `spare`: see `SchedulerOutput`."""
        if not self.chunks:
            return None
        operations = self.state.cache.tiers.take_operations()
        snapshots = self.state.cache.snapshots
        parked_states = () if snapshots is None else snapshots.take_parked()
        slots = self.state.config.state_slots
        brought = sum(new.state >= slots for new in self._new_requests.values()) if slots else 0
        moved = self.state.cache.tiers.moved_bytes(operations)
        moved += (len(parked_states) + brought) * self.state.config.state_bytes
        self.ledger.charge_moves(moved - self.ledger.features.transferred_bytes)
        released, self.state.released_rows = self.state.released_rows, []
        output = SchedulerOutput(
            step_id=self.step_id,
            chunks=tuple(self.chunks),
            new_requests=tuple(self._new_requests.values()),
            appended=tuple(entry for entry in self.allocation.appended if entry.row not in self._new_requests),
            released_rows=tuple(released),
            replaced=tuple(self.allocation.replaced),
            operations=operations,
            saved_states=tuple(self._saved_states),
            parked_states=parked_states,
            drafts=tuple(self._drafts),
            features=self.ledger.features,
            predicted_latency=self.ledger.seconds if self.ledger.model is not None else None,
            spare=spare,
        )
        return InFlight(output, self.requests, [request.epoch for request in self.requests], self._guesses)

    def add_chunk(self, request: Request, length: int) -> None:
        """Add `length` tokens of a request; the caller charges these tokens."""
        start = request.num_computed_tokens
        end = start + length
        sample = request.spec.pooling is None and end == len(request.token_ids) + request.num_placeholders
        if compact := request.cache_map.num_compact:
            self.ledger.charge_cache_work(CacheWork(compact_tokens=compact * self.state.config.block_size))
        if request.spec.adapter:
            self.ledger.charge_adapter(request.spec.adapter, length)
        if self.state.not_in_runner and request in self.state.not_in_runner:
            del self.state.not_in_runner[request]
            self._new_requests[request.row] = _whole(request)
        self.chunks.append(Chunk(request.row, start, length, sample))
        self.requests.append(request)
        request.num_computed_tokens = end
        request.last_step = self.step_id
        if (snapshots := self.state.cache.snapshots) is not None:
            saved = snapshots.save(request, start, self.step_id)
            self._saved_states += [SavedState(request.row, *each) for each in saved]
        if sample:
            request.num_placeholders += 1
            if end >= request.masked_from:
                self.ledger.charge_masks(1)

    def add_decodes(self, requests: Sequence[Request], contexts: Sequence[int]) -> None:
        """Add one token of each request; the caller charges these tokens. `contexts`: number of their tokens then.

        Same as `add_chunk` per request, but faster for the hundreds of decodes of a step.
        """
        cache, step_id = self.state.cache, self.step_id
        special = [request for request, end in zip(requests, contexts, strict=True) if end >= request.plain_to]
        by_chunk = cache.num_compact or cache.snapshots is not None or self.state.not_in_runner
        if by_chunk or not all(request.plain_to for request in special):
            for request in requests:
                self.add_chunk(request, 1)
            return
        self.ledger.charge_masks(len(special))
        rows, starts = [request.row for request in requests], [end - 1 for end in contexts]
        self.chunks += quick_rows(Chunk, rows, starts, repeat(1), repeat(True))
        self.requests += requests
        for request, end in zip(requests, contexts, strict=True):
            request.num_computed_tokens = end
            request.num_placeholders += 1
            request.last_step = step_id

    def add_guesses(self, request: Request, token_ids: Sequence[int]) -> int:
        """Verify drafted tokens behind the decode of a request in this step, as many as its blocks have room for.

        Charge them and return their number.
        """
        start, row, count = request.num_computed_tokens, request.row, len(token_ids)
        room = len(request.cache_map.blocks) * self.state.config.block_size - start
        if count > room:
            plenty = self.state.pool.num_free_units > 2 * self.state.growth_reserve
            count = self.allocation.grow_alone(request, count) if plenty else room
            if (new := self._new_requests.get(row)) is not None:
                self._new_requests[row] = new._replace(entries=_whole(request).entries)
        if not count:
            return 0
        self.ledger.charge_more_decodes(count, self.ledger.read(range(start + 1, start + count + 1)))
        if start + 1 >= request.masked_from:
            self.ledger.charge_masks(count)
        first = len(self.chunks)
        self.chunks += [Chunk(row, start + place, 1, True) for place in range(count)]
        self.requests += [request] * count
        self._guesses.update(enumerate(token_ids[:count], first))
        self._drafts.append(Draft(row, start, tuple(token_ids[:count])))
        request.num_computed_tokens += count
        request.num_guessed = count
        return count

    def charge_and_add(self, request: Request, length: int) -> None:
        """Charge and add `length` tokens of a request."""
        self.ledger.charge(request.num_computed_tokens, length)
        self.add_chunk(request, length)

    def advance(self, request: Request, length: int) -> bool:
        """Add up to `length` tokens of a running request, preempting others for memory. Return whether any fitted."""
        if request.num_pending_tokens == 1:
            length = int(self.allocation.grow_decode(request))
        else:
            length = self.allocation.grow_prefill(request, length)
        if length:
            self.charge_and_add(request, length)
        return length > 0

    def admit(self, request: Request, choose_length: Callable[[int, int], int], kind: CacheKind | None = None) -> bool:
        """Start a waiting request with a row, its cached blocks and the units of its first chunk.

        Return whether it started. A request starts only if all its known tokens fit beside the running requests;
        otherwise it would be preempted again half way. An online request waits for a step in flight, or for this one,
        if that step extends its cached prefix.

        Args:
            choose_length: Return the length of the first chunk, given the numbers of cached and of missing tokens.
            kind: Block kind to store from now on, if no block is stored yet.
        """
        cache = self.state.cache
        if kind is not None and not request.cache_map.blocks:
            request.cache_map.kind = kind
        claim = cache.claim(request)
        waits = claim.goes_on is not None and request.request_class is RequestClass.ONLINE
        if waits and (self.chunks or claim.goes_on != self.step_id):  # (a step without chunks is not launched)
            return False
        self.ledger.charge_moves(claim.copied_bytes)
        length = choose_length(claim.num_tokens, len(request.token_ids) - claim.num_tokens)
        with cache.holding(claim):
            if length == 0 or not self.allocation.make_room(request, claim, length):
                self.ledger.charge_moves(-claim.copied_bytes)
                return False
            self._start(request, claim)
        granted = self.allocation.extend(request, length)
        assert granted == length, "admitted without room"
        self._new_requests[request.row] = _whole(request)
        self.charge_and_add(request, length)
        return True

    def _start(self, request: Request, claim: Claim) -> None:
        counters = self.state.counters
        first_time = request.status is RequestStatus.WAITING
        self.state.start_running(request)
        if request.request_class is RequestClass.ONLINE:
            self.allocation.prompts.append(request)
        self.state.cache.take(request, claim, self.step_id)
        if first_time:
            request.num_cached_tokens = claim.num_tokens
            if request.spec.probe:
                return
            counters.prefix_queried_tokens += request.num_prompt_tokens
            counters.prefix_hit_tokens += claim.num_tokens
            on_host = sum(block.entry.tier is Tier.HOST for block in claim.hits)
            counters.prefix_host_hit_tokens += on_host * self.state.config.block_size


def _whole(request: Request) -> NewRequest:
    return NewRequest(
        row=request.row,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.spec.sampling,
        entries=tuple(block.entry for block in request.cache_map.blocks),
        pooling=request.spec.pooling,
        adapter=request.spec.adapter,
        state=request.cache_map.snapshot,
        is_long=request.is_long,
    )
