"""The step that is being built: its chunks, new requests and ledger, and how a request gets in; not who or how much."""

from collections.abc import Callable

from engine.cache.blocks import CacheAction, CacheOperation
from engine.cache.cache import Claim
from engine.request import Request, RequestStatus
from engine.reserve import NOTHING
from engine.scheduling.allocation import Allocation
from engine.scheduling.ledger import StepLedger
from engine.scheduling.output import CacheWork, Chunk, NewRequest, SchedulerOutput
from engine.scheduling.scheduler import Scheduler


class StepChunks:
    """What the step holds so far. Whatever is added is charged to the ledger and marked on the request."""

    def __init__(self, scheduler: Scheduler, step_id: int, now: float) -> None:
        config = scheduler.config
        self.scheduler = scheduler
        self.memory = Allocation(scheduler, step_id, now)
        self.block_size = config.block_size
        self.step_id = step_id
        self.now = now
        self.ledger = StepLedger(config.max_num_batched_tokens, config.max_num_seqs, scheduler.model)
        self.chunks: list[Chunk] = []
        self.requests: list[Request] = []
        self.new_requests: list[NewRequest] = []

    def ignore_reservation(self) -> None:
        """Nothing is kept for lines at risk in this step: it is for certain requests, come what may."""
        self.memory.reservation = NOTHING

    def output(self) -> SchedulerOutput | None:
        """The step as decided, or None when it holds nothing."""
        if not self.chunks:
            return None
        operations = self.scheduler.cache.take_operations()
        self._charge_swaps(operations)
        released, self.scheduler.released_rows = self.scheduler.released_rows, []
        return SchedulerOutput(
            step_id=self.step_id,
            chunks=tuple(self.chunks),
            new_requests=tuple(self.new_requests),
            appended=tuple(self.memory.appended),
            released_rows=tuple(released),
            replaced=tuple(self.memory.replaced),
            operations=operations,
            cache_work=CacheWork(*self.ledger.features.row()[-3:]),
            predicted_latency=self.ledger.seconds if self.ledger.model is not None else None,
        )

    def charge_and_add(self, request: Request, length: int) -> None:
        """Charge `length` tokens of a request to the ledger and add them."""
        self.ledger.charge(request.num_computed_tokens, length)
        self.add_chunk(request, length)

    def add_chunk(self, request: Request, length: int) -> None:
        """Add `length` tokens that have been charged, or will be in bulk."""
        start = request.num_computed_tokens
        end = start + length
        sample = end == len(request.token_ids) + request.num_placeholders
        if num_compact := request.cache_map.num_compact:
            self.ledger.charge_cache_work(CacheWork(compact_tokens=num_compact * self.block_size))
        self.chunks.append(Chunk(request.row, start, length, sample))
        self.requests.append(request)
        request.num_computed_tokens = end
        request.last_step = self.step_id
        if sample:
            request.num_placeholders += 1

    def admit(self, request: Request, choose_length: Callable[[int, int], int]) -> bool:
        """Give a waiting request a row, what is stored of it and the units of its first chunk, or leave it as it is.

        A request is admitted only when its whole known length fits beside what is running: half a prompt that must be
        preempted again helps nobody.
        """
        claim = self.scheduler.cache.claim(request)
        length = choose_length(claim.num_tokens, len(request.token_ids) - claim.num_tokens)
        if length == 0 or not self.memory.make_room(request, claim):
            return False
        self._start(request, claim)
        granted = self.memory.extend(request, length)
        assert granted == length, "admitted without room"
        self.new_requests.append(_whole(request))
        self.charge_and_add(request, length)
        return True

    def _start(self, request: Request, claim: Claim) -> None:
        counters = self.scheduler.counters
        first_time = request.status is RequestStatus.WAITING
        self.scheduler.start_running(request)
        self.memory.take(request, claim)
        if first_time:
            request.num_cached_tokens = claim.num_tokens
            counters.prefix_queried_tokens += request.num_prompt_tokens
            counters.prefix_hit_tokens += claim.num_tokens

    def _charge_swaps(self, operations: tuple[CacheOperation, ...]) -> None:
        moved = sum(len(op.source.units) for op in operations if op.action is not CacheAction.RESTORE)
        if moved:
            self.ledger.charge_cache_work(CacheWork(transferred_bytes=moved * self.scheduler.config.unit_bytes))


def _whole(request: Request) -> NewRequest:
    return NewRequest(
        row=request.row,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.spec.sampling,
        entries=tuple(block.entry for block in request.cache_map.blocks),
    )
