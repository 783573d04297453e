"""Builds one step: which requests run, how many tokens of each, on which units (HyGen §4.1, Algorithm 1).

The order in which the ledger is spent: running online decodes (mandatory unless memory forces them out), online
prefills running first and then waiting in the order of the online policy; then the same for offline requests, which
get only what online work has left. Preemption happens only when *memory* (units or rows) binds; a request that merely
does not fit into this step is left out of it and keeps its cache. Knows nothing of asyncio, clocks or tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.cache.cache_map import CacheBlock, CacheEntry
from engine.cache.pool import UNITS_PER_KV_BLOCK, BlockPool
from engine.cache.prefix import extend_hashes
from engine.config import SchedulerConfig
from engine.request import Request, RequestClass, RequestStatus
from engine.scheduling.ledger import StepLedger
from engine.scheduling.output import AppendedEntries, Chunk, NewRequest, SchedulerOutput
from engine.scheduling.queues import RequestQueues


@dataclass(slots=True)
class SchedulerCounters:
    """Counters for `EngineStats`; they only grow."""

    preemptions: dict[str, int] = field(default_factory=dict)
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """The queues, rows and units that steps are built from. One instance per engine, owned by the core."""

    def __init__(self, config: SchedulerConfig, online_policy: Callable[[list[Request]], list[Request]]) -> None:
        self.config = config
        self.online_policy = online_policy
        self.pool = BlockPool(config.num_units)
        self.queues = {request_class: RequestQueues() for request_class in RequestClass}
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self.released_rows: list[int] = []
        self.counters = SchedulerCounters()

    def build_step(self, step_id: int, last_completed_step: int) -> tuple[SchedulerOutput, list[Request]] | None:
        """The next step and the requests of its chunks in order, or None when nothing can run now.

        `last_completed_step`: requests with a step in flight beyond it are not taken from the waiting queue.
        """
        step = _StepBuilder(self, step_id, last_completed_step)
        for request_class in RequestClass:
            step.add_running_decodes(request_class)
            step.add_running_prefills(request_class)
            step.admit_waiting(request_class)
        return step.finish()

    def preempt(self, request: Request, cause: str) -> None:
        """Take a running request's row and units; its tokens stay, and it goes back to its place in the queue."""
        self.give_up(request)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self.queues[request.request_class].add_waiting(request)
        self.counters.preemptions[cause] = self.counters.preemptions.get(cause, 0) + 1

    def give_up(self, request: Request) -> None:
        """Remove a request from its queue and release what it holds (units deferred while a step may touch them)."""
        queues = self.queues[request.request_class]
        if request.status is not RequestStatus.RUNNING:
            queues.remove_waiting(request)
            return
        queues.remove_running(request)
        # Tail first: the head of a prefix is the most valuable part and must be evicted last.
        for block in reversed(request.cache_map.blocks):
            self.pool.release(block, request.last_step)
        request.cache_map.blocks.clear()
        request.cache_map.num_published = 0
        request.num_computed_tokens = request.num_confirmed_tokens = 0
        self.free_rows.append(request.row)
        self.released_rows.append(request.row)
        request.row = -1

    def find_prefix(self, request: Request) -> list[CacheBlock]:
        """Published blocks that hold this request's prefix; at least one token is always left to compute."""
        if not self.config.enable_prefix_caching:
            return []
        cache_map = request.cache_map
        extend_hashes(cache_map.hashes, request.token_ids, self.config.block_size, request.spec.cache_salt)
        usable = (len(request.token_ids) - 1) // self.config.block_size
        return self.pool.lookup(cache_map.hashes[:usable])


class _StepBuilder:
    """The step under construction."""

    def __init__(self, scheduler: Scheduler, step_id: int, last_completed_step: int) -> None:
        config = scheduler.config
        self.scheduler = scheduler
        self.pool = scheduler.pool
        self.block_size = config.block_size
        self.step_id = step_id
        self.last_completed_step = last_completed_step
        self.ledger = StepLedger(config.max_num_batched_tokens, config.max_num_seqs)
        self.chunks: list[Chunk] = []
        self.requests: list[Request] = []
        self.new_requests: list[NewRequest] = []
        self.appended: list[AppendedEntries] = []
        # Units that requests of this step could not get because they are still deferred: no further victim for those.
        self.stalled_units = 0

    def add_running_decodes(self, request_class: RequestClass) -> None:
        """Every running request whose next token is due; online ones are mandatory."""
        online = request_class is RequestClass.ONLINE
        block_size = self.block_size
        for request in list(self.scheduler.queues[request_class].running):
            expected = len(request.token_ids) + request.num_placeholders
            computed = request.num_computed_tokens
            if expected - computed != 1 or expected >= request.max_total_tokens:
                continue
            if request.row < 0:
                continue  # preempted by an earlier decode of this loop
            if not online and (self.ledger.tokens_left < 1 or self.ledger.sequences_left < 1):
                return
            if computed >= len(request.cache_map.blocks) * block_size and not self._grow_decode(request):
                continue
            self._add_chunk(request, 1)

    def add_running_prefills(self, request_class: RequestClass) -> None:
        """Continue prompts that have begun, oldest first."""
        for request in list(self.scheduler.queues[request_class].running):
            remaining = len(request.token_ids) - request.num_computed_tokens
            if request.num_placeholders or remaining <= 1 or request.row < 0:
                continue
            length = min(remaining, self.ledger.tokens_left)
            if length < 1 or self.ledger.sequences_left < 1:
                return
            length = self._grow(request, length)
            if length:
                self._add_chunk(request, length)

    def admit_waiting(self, request_class: RequestClass) -> None:
        """Start waiting requests in policy order until one does not fit."""
        scheduler = self.scheduler
        waiting = scheduler.queues[request_class].waiting
        if not waiting:
            return
        ordered = scheduler.online_policy(waiting) if request_class is RequestClass.ONLINE else waiting
        for request in list(ordered):
            if self.ledger.tokens_left < 1 or self.ledger.sequences_left < 1:
                return
            # Its last chunk is still in flight: its token is unknown and its old units are not yet released.
            if request.last_step > self.last_completed_step:
                return
            if not self._admit(request):
                return

    def finish(self) -> tuple[SchedulerOutput, list[Request]] | None:
        if not self.chunks:
            return None
        released, self.scheduler.released_rows = self.scheduler.released_rows, []
        output = SchedulerOutput(
            step_id=self.step_id,
            chunks=tuple(self.chunks),
            new_requests=tuple(self.new_requests),
            appended=tuple(self.appended),
            released_rows=tuple(released),
        )
        return output, self.requests

    def _add_chunk(self, request: Request, length: int) -> None:
        self.ledger.charge(length)
        start = request.num_computed_tokens
        end = start + length
        sample = end == len(request.token_ids) + request.num_placeholders
        self.chunks.append(Chunk(request.row, start, length, sample))
        self.requests.append(request)
        request.num_computed_tokens = end
        request.last_step = self.step_id
        if sample:
            request.num_placeholders += 1

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a row, its prefix hits and the units of its first chunk, or leave it as it is.

        A request is admitted only when its whole known length fits beside what is running: half a prompt that must be
        preempted again helps nobody.
        """
        scheduler, pool = self.scheduler, self.pool
        online = request.request_class is RequestClass.ONLINE
        hits = scheduler.find_prefix(request)
        blocks_wanted = len(request.token_ids) // self.block_size + 1 - len(hits)
        units_wanted = blocks_wanted * UNITS_PER_KV_BLOCK + pool.num_idle_units(hits)
        if not self._make_room(units_wanted, online):
            return False
        for block in hits:
            pool.acquire(block, online=online)
        scheduler.queues[request.request_class].remove_waiting(request)
        scheduler.queues[request.request_class].add_running(request)
        first_time = request.status is RequestStatus.WAITING
        request.move_to(RequestStatus.RUNNING)
        request.row = scheduler.free_rows.pop()
        request.cache_map.blocks.extend(hits)
        request.cache_map.num_published = len(hits)
        hit_tokens = len(hits) * self.block_size
        request.num_computed_tokens = request.num_confirmed_tokens = hit_tokens
        if first_time:
            request.num_cached_tokens = hit_tokens
            scheduler.counters.prefix_queried_tokens += request.num_prompt_tokens
            scheduler.counters.prefix_hit_tokens += hit_tokens
        length = min(len(request.token_ids) - hit_tokens, self.ledger.tokens_left)
        length = self._extend_to(request, length)
        assert length > 0, "admitted without room"
        self.new_requests.append(_whole(request))
        self._add_chunk(request, length)
        return True

    def _make_room(self, units: int, online: bool) -> bool:
        """Whether a row and `units` units are available now, evicting offline work for an online request."""
        scheduler, pool = self.scheduler, self.pool
        while not scheduler.free_rows or pool.num_available_units < units:
            if not online:
                return False
            if scheduler.free_rows and pool.num_available_units + pool.num_deferred_units >= units:
                return False  # enough is on its way; the next step admits it
            victim = self._offline_victim()
            if victim is None:
                return False
            scheduler.preempt(victim, "online")
        return True

    def _grow_decode(self, request: Request) -> bool:
        """One more block for a decode; preempts for it, perhaps the request itself."""
        while not self._extend_to(request, 1):
            if self.pool.num_deferred_units >= self.stalled_units + UNITS_PER_KV_BLOCK:
                self.stalled_units += UNITS_PER_KV_BLOCK
                return False  # the units of a victim are still in flight: wait for them, do not take another
            victim = self._victim_for(request)
            if victim is None:
                return False
            self.scheduler.preempt(victim, "memory")
            if victim is request:
                return False
        self.appended.append(AppendedEntries(request.row, (request.cache_map.blocks[-1].entry,)))
        return True

    def _grow(self, request: Request, length: int) -> int:
        """Blocks for a running prefill's next `length` tokens, or for as many as there is room for."""
        num_blocks = len(request.cache_map.blocks)
        while not (granted := self._extend_to(request, length)):
            if self.pool.num_deferred_units > self.stalled_units:
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
        online = request.request_class is RequestClass.ONLINE
        while len(blocks) * self.block_size < start + length:
            block = self.pool.allocate_kv(online=online)
            if block is None:
                break
            blocks.append(block)
        return min(length, len(blocks) * self.block_size - start)

    def _victim_for(self, request: Request) -> Request | None:
        """Whose memory to take: offline first, then the last online arrival; never a request already in this step."""
        if request.request_class is RequestClass.ONLINE and (victim := self._offline_victim()) is not None:
            return victim
        for candidate in reversed(self.scheduler.queues[request.request_class].running):
            if candidate is request or candidate.last_step != self.step_id:
                return candidate
        return None

    def _offline_victim(self) -> Request | None:
        running = self.scheduler.queues[RequestClass.OFFLINE].running
        return next((r for r in reversed(running) if r.last_step != self.step_id), None)


def _whole(request: Request) -> NewRequest:
    entries: tuple[CacheEntry, ...] = tuple(block.entry for block in request.cache_map.blocks)
    return NewRequest(
        row=request.row,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.spec.sampling,
        entries=entries,
    )
