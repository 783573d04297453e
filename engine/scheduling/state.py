"""The state that steps are built from: queues, rows, units, limits, steps in flight and counters.

The core owns one instance per engine. A `StepPlan` holds the state of a single step (HyGen §4.1, Algorithm 1). This
module uses no asyncio, clock or tensor.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from engine.api import EngineRequest, RequestClass
from engine.cache.cache import Cache
from engine.limits import UNITS_PER_BLOCK, QueueTime, SchedulerConfig
from engine.request import Request, RequestStatus, due
from engine.scheduling.fair_share import OnlineShare
from engine.scheduling.objective import EASY_SHARE, StepObjective, token_costs
from engine.scheduling.output import Chunk, SchedulerOutput
from engine.scheduling.queues import OfflineQueue
from engine.scheduling.waiting import Start, WaitingQueue, insert_by_age, remove_by_age
from predictor.features import LatencyPredictor

if TYPE_CHECKING:  # the engine supplies them
    from engine.cache.snapshots import Snapshots
    from engine.scheduling.speculation import Speculation


class ReachedPoint(NamedTuple):
    """A request of a step, and the number of its tokens computed after the step."""

    request: Request
    num_tokens: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """A scheduled step that has not been updated yet.

    Attributes:
        requests: Its requests in the order of its chunks.
        epochs: Epochs of the requests when the step was scheduled; a rewound request has a newer one.
        guesses: By index of a chunk that a draft added, the drafted token that the chunk computes.
        known: Requests whose token from this step became known, and was emitted, while the step ran (forced tokens).
    """

    output: SchedulerOutput
    requests: list[Request]
    epochs: list[int]
    guesses: dict[int, int] = field(default_factory=dict)
    known: set[Request] = field(default_factory=set)

    def live(self) -> list[Request]:
        """Return the step's requests that have neither ended nor been rewound since."""
        pairs = zip(self.requests, self.epochs, strict=True)
        live = [r for r, epoch in pairs if r.status is not RequestStatus.FINISHED and r.epoch == epoch]
        return list(dict.fromkeys(live)) if self.guesses else live

    def reached(self) -> list[ReachedPoint]:
        """Return the live requests with the number of their tokens computed after the step."""
        live = set(self.live())
        chunks = enumerate(zip(self.output.chunks, self.requests, strict=True))
        return [
            ReachedPoint(request, chunk.start + chunk.length)
            for number, (chunk, request) in chunks
            if request in live and number not in self.guesses
        ]


@dataclass(slots=True)
class Counters:
    """Counters named as in `EngineStats`; they never decrease. Times in seconds."""

    steps: int = 0
    failed_steps: int = 0
    stalls: int = 0
    refused_requests: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    offline_prefill_tokens: int = 0
    offline_decode_tokens: int = 0
    probe_tokens: int = 0
    predicted_seconds: float = 0.0
    preemptions: dict[str, int] = field(default_factory=dict)
    knapsack: dict[str, int] = field(default_factory=lambda: {"kv": 0, "compact": 0, "passed_over": 0})
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0
    leftover_seconds: float = 0.0
    leftover_used_seconds: float = 0.0

    def count(self, chunk: Chunk, request: EngineRequest) -> None:
        """Count a computed chunk of a request."""
        if request.probe:
            self.probe_tokens += chunk.length
            return
        is_offline = request.request_class is RequestClass.OFFLINE
        if chunk.length == 1 and chunk.sample:
            self.decode_tokens += 1
            self.offline_decode_tokens += is_offline
        else:
            self.prefill_tokens += chunk.length
            self.offline_prefill_tokens += chunk.length * is_offline


MAX_BACK_OFF = 64.0
"""Longest time, in seconds, that a preempted offline request must wait before it starts beside online work."""


Order = Callable[["SchedulerState", float], list[Request]]
Select = Callable[["SchedulerState", float], list[Start] | None]
"""Both take the state and the time."""


def _always(*_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class OnlinePolicy:
    """One online policy.

    Attributes:
        order: Sort the waiting online requests, best first. None: by arrival.
        admits: Whether a request may start now.
        admits_late: Whether a request that has missed its TTFT objective may start.
        scans_past: Whether admission continues behind a request that could not start.
        select: Choose the requests to start, and their representation, when memory is short; None: use `order`. Returns
            None if memory suffices.
        running_order: Sort the running online requests; the last loses its memory first. None: by arrival.
        by_laxity: Prompts that can still meet the objective go first; while memory lasts they also start first.
    """

    order: "Order | None" = None
    admits: Callable[["SchedulerState", Request], bool] = _always
    admits_late: Callable[["SchedulerState", Request], bool] = _always
    scans_past: bool = False
    select: Select | None = None
    running_order: "Order | None" = None
    by_laxity: bool = False


FCFS = OnlinePolicy()


class SchedulerState:
    """Queues, rows and units of one engine.

    Attributes:
        requests: Every unfinished request by id, including the canary while it runs.
        promised: Unfinished online requests with a promise of their own, by arrival.
        in_flight: Steps that were scheduled and not updated yet, oldest first.
        arrivals: Source of arrival numbers.
        offline_share: Factor on the offline budget beside online work, 0 to 1 (set by the circuit breaker).
        strict_share: As EASY_SHARE, beside requests with a tighter TBT limit than the default (set by the keeper).
        quarantined: Requests hidden from ordinary steps, waiting or running, by arrival (`engine.scheduling.recovery`).
        not_in_runner: Running requests whose rows the runner does not have yet (see `engine.scheduling.moving`).
        mean_prompt, mean_output: Moving averages of the tokens of online requests that ended.
        num_prompts, num_answers: Number of requests in these averages.
        speculation: Source of drafted tokens; None: no drafts.
        staged: The engine leads a pipeline. Steps in flight then hold different decodes, so that no stage waits.
        num_contested: Steps without time for both the urgent prompts and those behind them; the two groups alternate.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        online_policy: OnlinePolicy,
        offline_policy: str,
        model: LatencyPredictor | None,
        objective: StepObjective,
        snapshots: "Snapshots | None",
    ) -> None:
        self.config = config
        self.online_policy = online_policy
        self.model = model
        self.objective = objective
        self.requests: dict[str, Request] = {}
        self.promised: dict[Request, None] = {}
        self.in_flight: deque[InFlight] = deque()
        self.arrivals = count()
        self.next_step_id = 0
        self.staged = False
        self.offline_share = 1.0
        self.strict_share = EASY_SHARE
        self.cache = Cache(config, model, snapshots)
        self.pool = self.cache.device
        self.running: dict[RequestClass, list[Request]] = {RequestClass.ONLINE: [], RequestClass.OFFLINE: []}
        self.waiting_online = WaitingQueue()
        self.online_share = OnlineShare(token_costs(model, config))
        self._offline_policy = offline_policy
        self.waiting_offline = self.make_offline_queue()
        self.quarantined = WaitingQueue()
        self.not_in_runner: dict[Request, None] = {}
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self.released_rows: list[int] = []
        self.num_contested = 0
        self.mean_prompt = self.mean_output = 0.0
        self.num_prompts = self.num_answers = 0
        self.queue_time = QueueTime.parse(config.max_queue_time)
        self.counters = Counters()
        self.speculation: Speculation | None = None

    def make_offline_queue(self) -> OfflineQueue:
        costs = token_costs(self.model, self.config)
        return OfflineQueue(self._offline_policy, self.config.block_size, seed=self.config.seed, costs=costs)

    @property
    def has_online(self) -> bool:
        """Return whether any online request is waiting or running."""
        return bool(self.waiting_online or self.running[RequestClass.ONLINE])

    @property
    def growth_reserve(self) -> int:
        """Return the units that offline admission must leave free: one block per running request.

        Without the reserve the pool would fill up and offline requests would preempt one another endlessly.
        """
        return UNITS_PER_BLOCK * (self.config.max_num_seqs - len(self.free_rows))

    def offline_units(self, request: Request, num_offline: int) -> int:
        """Return the units available for `request` to start as one of `num_offline` offline requests."""
        return self.cache.units_for(request, num_offline) - self.growth_reserve

    def token_deadlines(self, requests: Sequence[Request], now: float) -> list[float]:
        """Return the deadline of each request's next token."""
        found = self.objective.token_deadlines(requests)
        if self.promised:
            for index, request in enumerate(requests):
                if request.spec.promise is not None:
                    found[index] = self.objective.next_due(request, now)
        return found

    @property
    def gap_limit(self) -> float:
        """Return the tightest limit on a token gap among the objective and the running requests, in seconds."""
        if not self.promised:
            return self.objective.tbt
        gaps = [request.spec.promise.tbt for request in self.promised if request.row >= 0 and request.spec.promise]
        return min([self.objective.tbt, *gaps])

    def running_online(self, now: float) -> list[Request]:
        """Return the running online requests. Memory is taken from the end of this order."""
        order = self.online_policy.running_order
        return list(self.running[RequestClass.ONLINE]) if order is None else order(self, now)

    def running_prompts(self) -> list[Request]:
        """Return the running online requests with a prompt in progress, by arrival."""
        return due(self.running[RequestClass.ONLINE])[1]

    def prompt_reserve(self, prompts: Iterable[Request]) -> int:
        """Return the units that these prompts in progress still need. A new request must leave these units free."""
        size = self.config.block_size
        held = ((request, request.cache_map) for request in prompts if request.row >= 0)
        missing = (request.num_missing_blocks(size, len(found.blocks), found.num_gone) for request, found in held)
        return UNITS_PER_BLOCK * sum(blocks for blocks in missing if blocks > 0)

    def add(self, request: Request) -> None:
        """Queue a new request. A request resumed from another engine is queued like a preempted one."""
        if request.request_class is RequestClass.ONLINE:
            self.online_share.enter(request)
            if request.spec.promise is not None:
                self.promised[request] = None
        elif request.status is RequestStatus.PREEMPTED:
            self.waiting_offline.adopt(request)
        self.add_waiting(request)

    def add_waiting(self, request: Request) -> None:
        self._queue_of(request).add(request)

    def _queue_of(self, request: Request) -> WaitingQueue | OfflineQueue:
        """Return the queue of a waiting request."""
        if request.quarantined:
            return self.quarantined
        return self.waiting_online if request.request_class is RequestClass.ONLINE else self.waiting_offline

    def start_running(self, request: Request) -> None:
        """Move a waiting request to the running ones and give it a row. A quarantined request stays so."""
        if not request.quarantined:
            if request.request_class is RequestClass.ONLINE:
                self.waiting_online.remove(request)
            else:
                self.waiting_offline.remove(request, taken=True)
            insert_by_age(self.running[request.request_class], request)
        request.move_to(RequestStatus.RUNNING)
        request.row = self.free_rows.pop()
        self.online_share.start(request)

    def preempt(self, request: Request, cause: str, now: float) -> None:
        """Take the row and units of a running request and queue it again.

        The request keeps its tokens; the cache parks as many of its blocks as it can. `cause` is the label of the
        counter. From `max_offline_preemptions` preemptions on, the request backs off from online work, twice as long
        each time.
        """
        request.num_preemptions += 1
        if (excess := request.num_preemptions - self.config.max_offline_preemptions) >= 0:
            request.not_before = now + min(2.0 ** min(excess, 30), MAX_BACK_OFF)
        self._leave_row(request)
        request.move_to(RequestStatus.PREEMPTED)
        self.add_waiting(request)
        self.counters.preemptions[cause] = self.counters.preemptions.get(cause, 0) + 1

    def rewind(self, request: Request) -> None:
        """Queue a running request of a failed step again, without its cached blocks.

        This is not counted as a preemption, and the request may start again at once.
        """
        self._leave_row(request)
        self.cache.parked.forget(request)
        request.move_to(RequestStatus.PREEMPTED)
        self.add_waiting(request)

    def quarantine(self, request: Request) -> None:
        """Hide a waiting request from ordinary steps."""
        assert request.status is not RequestStatus.RUNNING and not request.quarantined
        self._queue_of(request).remove(request)
        request.quarantined = True
        self.add_waiting(request)

    def end_quarantine(self, request: Request) -> None:
        """Undo `quarantine`: return the waiting or running request to its queue, ordered by arrival."""
        self.quarantined.remove(request)
        request.quarantined = False
        if request.status is RequestStatus.RUNNING:
            insert_by_age(self.running[request.request_class], request)
        else:
            self.add_waiting(request)

    def _leave_row(self, request: Request) -> None:
        """Free the row of a running request. Its units are deferred while a step in flight may use them."""
        if request.quarantined:
            self.quarantined.remove(request)
        else:
            remove_by_age(self.running[request.request_class], request)
        self.drop_guesses(request)
        self.cache.vacate(request)
        self.not_in_runner.pop(request, None)
        self.free_rows.append(request.row)
        self.released_rows.append(request.row)
        request.row = -1

    def drop_guesses(self, request: Request) -> None:
        """Stop counting the drafted tokens in flight of a request as computed."""
        request.num_computed_tokens -= request.num_guessed
        request.num_guessed = 0

    def end(self, request: Request) -> None:
        """Remove an ended request from its queue or row, with its blocks, and from its tenant's account."""
        if request.status is RequestStatus.RUNNING:
            self._leave_row(request)
        else:
            self._queue_of(request).remove(request)
        self.cache.parked.forget(request)
        if request.request_class is RequestClass.OFFLINE:
            self.waiting_offline.end(request)
        else:
            self.promised.pop(request, None)
            self.online_share.end(request)
