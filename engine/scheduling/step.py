"""Builds one step: which requests run, how many tokens of each, on which units (HyGen §4.1, Algorithm 1).

The order in which the ledger is spent: running online decodes (mandatory unless memory forces them out); online
prefills, running ones first and then waiting ones in the order of the online policy, sized by the slack that the
decodes beside them have; then the offline plan, as far as it still fits. Preemption happens only when *memory* (units
or rows) binds; a request that merely does not fit into this step is left out of it and keeps its cache.
"""

import math
from collections.abc import Callable

from engine.cache.cache_map import CacheBlock
from engine.cache.pool import UNITS_PER_KV_BLOCK
from engine.request import Request, RequestClass, RequestStatus
from engine.scheduling.ledger import StepLedger
from engine.scheduling.objective import OfflineAllowance
from engine.scheduling.output import AppendedEntries, Chunk, NewRequest, SchedulerOutput
from engine.scheduling.planner import OfflinePlan, offline_allowance
from engine.scheduling.scheduler import Scheduler


class StepBuilder:
    """The step under construction. `last_completed_step`: requests with a newer step in flight are not admitted."""

    def __init__(self, scheduler: Scheduler, step_id: int, last_completed_step: int, now: float) -> None:
        config = scheduler.config
        self.scheduler = scheduler
        self.pool = scheduler.pool
        self.block_size = config.block_size
        self.step_id = step_id
        self.last_completed_step = last_completed_step
        self.now = now
        self.ledger = StepLedger(config.max_num_batched_tokens, config.max_num_seqs, scheduler.model)
        self.chunks: list[Chunk] = []
        self.requests: list[Request] = []
        self.new_requests: list[NewRequest] = []
        self.appended: list[AppendedEntries] = []
        self.num_online_decodes = 0
        self.has_online_prefill = False
        self._floor_given = False
        self._time_limit = math.inf
        # Units that requests of this step could not get because they are still deferred: no further victim for those.
        self._stalled_units = 0

    def build(self, plan: OfflinePlan | None, lookup: Callable[[str], Request | None]) -> SchedulerOutput | None:
        """The step, or None when nothing can run now. Without a plan the step is online-only."""
        self._add_online_decodes()
        self._add_online_prefills()
        self._admit_online()
        if plan is not None:
            self._fill_offline(plan, lookup)
        if not self.chunks:
            return None
        released, self.scheduler.released_rows = self.scheduler.released_rows, []
        return SchedulerOutput(
            step_id=self.step_id,
            chunks=tuple(self.chunks),
            new_requests=tuple(self.new_requests),
            appended=tuple(self.appended),
            released_rows=tuple(released),
            predicted_latency=self.ledger.seconds if self.ledger.model is not None else None,
        )

    def _add_online_decodes(self) -> None:
        """Every running online request whose next token is due; then the time that the tightest of them leaves."""
        block_size, objective = self.block_size, self.scheduler.objective
        timed = self.ledger.model is not None and not math.isinf(objective.tbt)
        slacks: list[float] = []
        context_sum = 0
        for request in list(self.scheduler.running[RequestClass.ONLINE]):
            computed = request.num_computed_tokens
            if request.row < 0 or not decode_is_due(request):
                continue  # (a row below zero: preempted by an earlier decode of this loop)
            if computed >= len(request.cache_map.blocks) * block_size and not self._grow_decode(request):
                continue
            if timed:
                slacks.append(objective.next_token_deadline(request) - self.now)
            context_sum += computed + 1
            self._add_chunk(request, 1)
        self.num_online_decodes = len(self.chunks)
        self.ledger.charge_decodes(self.num_online_decodes, context_sum)
        if timed and slacks:
            # A decode that would be late even in a decode-only step cannot be saved by starving the prompts.
            reachable = [min(slack, objective.tbt) for slack in slacks if slack >= self.ledger.seconds]
            self._time_limit = min(reachable, default=math.inf)

    def _add_online_prefills(self) -> None:
        """Continue prompts that have begun, oldest first."""
        for request in list(self.scheduler.running[RequestClass.ONLINE]):
            if request.row < 0 or not prefill_is_due(request):
                continue
            if not self.ledger.open:
                return
            start = request.num_computed_tokens
            length = self._online_length(start, len(request.token_ids) - start)
            if length and (length := self._grow_prefill(request, length)):
                self._charge_and_add(request, length)
                self.has_online_prefill = self._floor_given = True

    def _admit_online(self) -> None:
        """Start waiting requests in policy order until one does not fit; past a misfit only if the policy says so."""
        scheduler, policy = self.scheduler, self.scheduler.online_policy
        if not scheduler.waiting_online:
            return
        context = scheduler.queue_context(self.now)
        for request in list(policy.order(scheduler.waiting_online, context)):
            # Its last chunk may still be in flight: its token is unknown and its old units are not yet released.
            if not self.ledger.open or request.last_step > self.last_completed_step:
                return
            if policy.admits(request, context) and self._admit(request, self._online_length):
                self.has_online_prefill = self._floor_given = True
            elif not policy.scans_past(request, context) or not scheduler.free_rows:
                return

    def _fill_offline(self, plan: OfflinePlan, lookup: Callable[[str], Request | None]) -> None:
        """Re-validate the plan against what the online work of this step has left, and take what still fits."""
        scheduler, ledger = self.scheduler, self.ledger
        allowance = offline_allowance(scheduler, ledger, self.num_online_decodes, self.has_online_prefill, self.now)
        before, num_online = ledger.seconds, len(self.requests)
        for planned in plan.chunks:
            if not ledger.open:
                break
            request = lookup(planned.request_id)
            if request is None or (request.status is RequestStatus.RUNNING) != planned.running:
                continue  # it has ended, or was preempted for this step's online work
            if planned.running:
                fitted = self._add_offline_running(request, allowance)
            else:
                fitted = self._admit_offline(request, allowance)
            if not fitted:
                break
        if len(self.requests) > num_online:
            for request in (*self.requests[:num_online], *scheduler.waiting_online):
                request.beside_offline = True
        if scheduler.has_online and not math.isinf(allowance.limit):
            scheduler.counters.leftover_seconds += max(0.0, allowance.limit - before)
            scheduler.counters.leftover_used_seconds += ledger.seconds - before

    def _add_offline_running(self, request: Request, allowance: OfflineAllowance) -> bool:
        """Whether the tail of the plan should still be tried."""
        if request.last_step == self.step_id or not (decode_is_due(request) or prefill_is_due(request)):
            return True
        start = request.num_computed_tokens
        wanted = request.num_expected_tokens - start
        length = self._offline_length(allowance, start, wanted)
        if length == 0:
            return False
        if wanted == 1:
            if start >= len(request.cache_map.blocks) * self.block_size and not self._grow_decode(request):
                return True
        elif not (length := self._grow_prefill(request, length)):
            return True
        self._charge_and_add(request, length)
        return True

    def _admit_offline(self, request: Request, allowance: OfflineAllowance) -> bool:
        if request.last_step > self.last_completed_step:
            return True
        return self._admit(request, lambda start, wanted: self._offline_length(allowance, start, wanted))

    def _offline_length(self, allowance: OfflineAllowance, start: int, wanted: int) -> int:
        wanted = min(wanted, self.ledger.tokens_left)
        length = allowance.largest(self.ledger.features, self.ledger.seconds, start, wanted)
        if not self.chunks and not self.scheduler.has_online:
            # Alone on the machine, the first request always moves on, whatever the budget says (E4).
            length = max(length, min(wanted, self.scheduler.config.min_prefill_chunk))
        return length

    def _online_length(self, start: int, wanted: int) -> int:
        """The chunk that the decodes beside it can bear; the oldest prompt always gets a floor."""
        wanted = min(wanted, self.ledger.tokens_left)
        length = wanted
        if self.ledger.model is not None and not math.isinf(self._time_limit):
            room = self._time_limit - self.ledger.seconds
            length = self.ledger.model.max_prefill(self.ledger.features, room, wanted, start) if room > 0.0 else 0
        if not self._floor_given:
            length = max(length, min(wanted, self.scheduler.config.min_prefill_chunk))
        return length

    def _charge_and_add(self, request: Request, length: int) -> None:
        self.ledger.charge(request.num_computed_tokens, length)
        self._add_chunk(request, length)

    def _add_chunk(self, request: Request, length: int) -> None:
        start = request.num_computed_tokens
        end = start + length
        sample = end == len(request.token_ids) + request.num_placeholders
        self.chunks.append(Chunk(request.row, start, length, sample))
        self.requests.append(request)
        request.num_computed_tokens = end
        request.last_step = self.step_id
        if sample:
            request.num_placeholders += 1

    def _admit(self, request: Request, choose_length: Callable[[int, int], int]) -> bool:
        """Give a waiting request a row, its prefix hits and the units of its first chunk, or leave it as it is.

        A request is admitted only when its whole known length fits beside what is running: half a prompt that must be
        preempted again helps nobody.
        """
        scheduler, pool = self.scheduler, self.pool
        online = request.request_class is RequestClass.ONLINE
        hits = scheduler.find_prefix(request)
        hit_tokens = len(hits) * self.block_size
        length = choose_length(hit_tokens, len(request.token_ids) - hit_tokens)
        units_wanted = (len(request.token_ids) // self.block_size + 1 - len(hits)) * UNITS_PER_KV_BLOCK
        if length == 0 or not self._make_room(units_wanted + pool.num_idle_units(hits), online):
            return False
        # A victim may have shared the hits: idle now, they are no room any more.
        if pool.num_available_units < units_wanted + pool.num_idle_units(hits):
            return False
        for block in hits:
            pool.acquire(block, online=online)
        self._start(request, hits)
        granted = self._extend_to(request, length)
        assert granted == length, "admitted without room"
        self.new_requests.append(_whole(request))
        self._charge_and_add(request, length)
        return True

    def _start(self, request: Request, hits: list[CacheBlock]) -> None:
        counters = self.scheduler.counters
        first_time = request.status is RequestStatus.WAITING
        self.scheduler.start_running(request)
        request.cache_map.blocks.extend(hits)
        request.cache_map.num_published = len(hits)
        hit_tokens = len(hits) * self.block_size
        request.num_computed_tokens = request.num_confirmed_tokens = hit_tokens
        if first_time:
            request.num_cached_tokens = hit_tokens
            counters.prefix_queried_tokens += request.num_prompt_tokens
            counters.prefix_hit_tokens += hit_tokens

    def _make_room(self, units: int, online: bool) -> bool:
        """Whether a row and `units` units are available now, evicting offline work for an online request."""
        scheduler, pool = self.scheduler, self.pool
        if not online:
            room = scheduler.units_for(RequestClass.OFFLINE, len(scheduler.running[RequestClass.OFFLINE]) + 1)
            return bool(scheduler.free_rows) and room >= units + scheduler.growth_reserve
        if scheduler.free_rows and pool.num_available_units >= units:
            return True
        if scheduler.free_rows and pool.num_available_units + pool.num_deferred_units >= units:
            return False  # enough is on its way; a later step admits it
        for victim in self._smallest_victims(units - pool.num_available_units - pool.num_deferred_units):
            scheduler.preempt(victim, "online")
        return bool(scheduler.free_rows) and pool.num_available_units >= units

    def _smallest_victims(self, units: int) -> list[Request]:
        """The offline requests to evict so that `units` more units and a row come free: few, small and young.

        One request that frees enough by itself, the one that loses least; otherwise the largest first. Nothing at all
        when even all of them would not do. A block that others share frees nothing.
        """
        limit = self.scheduler.config.max_offline_preemptions
        victims = [
            (_freed_units(request), request)
            for request in self.scheduler.running[RequestClass.OFFLINE]
            if request.last_step != self.step_id and request.num_preemptions < limit
        ]
        enough = [(freed, -request.arrival_order, request) for freed, request in victims if freed >= units]
        if enough:
            return [min(enough, key=lambda item: item[:2])[2]]
        victims.sort(key=lambda item: (-item[0], -item[1].arrival_order))
        chosen = []
        for freed, request in victims:
            chosen.append(request)
            units -= freed
            if units <= 0:
                return chosen
        return []

    def _grow_decode(self, request: Request) -> bool:
        """One more block for a decode; preempts for it, perhaps the request itself."""
        while not self._extend_to(request, 1):
            if self.pool.num_deferred_units >= self._stalled_units + UNITS_PER_KV_BLOCK:
                self._stalled_units += UNITS_PER_KV_BLOCK
                return False  # the units of a victim are still in flight: wait for them, do not take another
            victim = self._victim_for(request)
            if victim is None:
                return False
            self.scheduler.preempt(victim, "memory")
            if victim is request:
                return False
        self.appended.append(AppendedEntries(request.row, (request.cache_map.blocks[-1].entry,)))
        return True

    def _grow_prefill(self, request: Request, length: int) -> int:
        """Blocks for a running prefill's next `length` tokens, or for as many as there is room for."""
        num_blocks = len(request.cache_map.blocks)
        while not (granted := self._extend_to(request, length)):
            if self.pool.num_deferred_units > self._stalled_units:
                return 0
            victim = self._victim_for(request)
            if victim is None or victim is request:
                return 0  # it was the last to arrive: it keeps its cache and waits
            self.scheduler.preempt(victim, "memory")
        added = request.cache_map.blocks[num_blocks:]
        if added:
            self.appended.append(AppendedEntries(request.row, tuple(block.entry for block in added)))
        return granted

    def _extend_to(self, request: Request, length: int) -> int:
        """Allocate what `length` more tokens need; returns for how many tokens (≤ length) there is room now."""
        blocks = request.cache_map.blocks
        start = request.num_computed_tokens
        kind, num_offline = request.request_class, len(self.scheduler.running[RequestClass.OFFLINE])
        while len(blocks) * self.block_size < start + length:
            room = self.scheduler.units_for(kind, num_offline)
            block = self.pool.allocate_kv(online=kind is RequestClass.ONLINE) if room >= UNITS_PER_KV_BLOCK else None
            if block is None:
                break
            blocks.append(block)
        return min(length, len(blocks) * self.block_size - start)

    def _victim_for(self, request: Request) -> Request | None:
        """Whose memory a running request takes: offline first, then the last online arrival; none of this step's."""
        running = self.scheduler.running
        offline = (r for r in reversed(running[RequestClass.OFFLINE]) if r.last_step != self.step_id)
        if request.request_class is RequestClass.ONLINE and (victim := next(offline, None)) is not None:
            return victim
        for candidate in reversed(running[request.request_class]):
            if candidate is request or candidate.last_step != self.step_id:
                return candidate
        return None


def decode_is_due(request: Request) -> bool:
    """Whether a running request's next token can be computed now; tokens in flight count as known."""
    expected = len(request.token_ids) + request.num_placeholders
    return expected - request.num_computed_tokens == 1 and expected < request.max_total_tokens


def prefill_is_due(request: Request) -> bool:
    """Whether more than one known token of a running request is still to be computed."""
    return request.num_placeholders == 0 and len(request.token_ids) - request.num_computed_tokens > 1


def _freed_units(request: Request) -> int:
    return sum(len(block.entry.units) for block in request.cache_map.blocks if block.ref_count == 1)


def _whole(request: Request) -> NewRequest:
    return NewRequest(
        row=request.row,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.spec.sampling,
        entries=tuple(block.entry for block in request.cache_map.blocks),
    )
