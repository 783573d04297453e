"""The state that steps are built from: queues, rows, units, limits. One instance per engine, owned by the core.

Each step is one `StepDraft` (HyGen §4.1, Algorithm 1); this module keeps what outlives it. Knows nothing of asyncio,
clocks or tensors.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, compress
from operator import not_

from engine.api import RequestClass
from engine.cache.cache import Cache
from engine.config import SchedulerConfig
from engine.queue_time import QueueTime
from engine.request import Request, RequestStatus, due
from engine.scheduling.counters import SchedulerCounters
from engine.scheduling.objective import StepObjective
from engine.scheduling.offline_queue import OfflineQueue
from engine.scheduling.online_share import OnlineShare
from engine.scheduling.policies import OnlinePolicy, QueueContext
from engine.scheduling.service_cost import token_costs
from engine.scheduling.waiting import WaitingQueue, insert_by_age, remove_by_age
from predictor.limits import UNITS_PER_BLOCK
from predictor.model import LatencyPredictor

MAX_BACK_OFF = 64.0
"""The longest time in seconds for which an evicted offline request keeps away from online work."""


class SchedulerState:
    """Queues, rows and units. `offline_share` scales the offline budget beside online work (the circuit breaker).

    `aside`: requests that ordinary steps do not see, waiting or running, by age; see `engine.scheduling.recovery`.
    `unwritten`: running requests whose rows the runner does not know yet (`engine.scheduling.moving`).
    `num_contested`: steps without room for both urgent prompts and those that they leave behind; they take turns.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        online_policy: OnlinePolicy,
        offline_policy: str,
        model: LatencyPredictor | None,
        objective: StepObjective,
    ) -> None:
        self.config = config
        self.online_policy = online_policy
        self.model = model
        self.objective = objective
        self.offline_share = 1.0
        self.cache = Cache(config, model)
        self.pool = self.cache.device
        self.running: dict[RequestClass, list[Request]] = {RequestClass.ONLINE: [], RequestClass.OFFLINE: []}
        self.waiting_online = WaitingQueue()
        self.online_share = OnlineShare(token_costs(model, config))
        self._offline_policy = offline_policy
        self.waiting_offline = self._make_offline_queue()
        self.aside: list[Request] = []
        self.unwritten: dict[Request, None] = {}
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self.released_rows: list[int] = []
        self.num_contested = 0
        self.queue_time = QueueTime.parse(config.max_queue_time)
        self.counters = SchedulerCounters()

    def _make_offline_queue(self) -> OfflineQueue:
        costs = token_costs(self.model, self.config)
        return OfflineQueue(self._offline_policy, self.config.block_size, seed=self.config.seed, costs=costs)

    @property
    def has_online(self) -> bool:
        """Whether any online request is waiting or running."""
        return bool(self.waiting_online or self.running[RequestClass.ONLINE])

    def num_running(self, request_class: RequestClass) -> int:
        """Requests that hold a row, those aside included."""
        aside = sum(r.request_class is request_class and r.status is RequestStatus.RUNNING for r in self.aside)
        return len(self.running[request_class]) + aside

    def num_waiting(self, request_class: RequestClass) -> int:
        """Requests that wait for a row, those aside included."""
        online = request_class is RequestClass.ONLINE
        aside = sum(r.request_class is request_class and r.status is not RequestStatus.RUNNING for r in self.aside)
        return len(self.waiting_online if online else self.waiting_offline) + aside

    @property
    def growth_reserve(self) -> int:
        """Units that offline admission leaves alone: the next block of everything that runs. Without it the pool fills
        to the brim and offline requests preempt one another for ever."""
        return UNITS_PER_BLOCK * (self.config.max_num_seqs - len(self.free_rows))

    def offline_units(self, request: Request, num_offline: int) -> int:
        """Return the units that `request` could start with as one of `num_offline` offline requests."""
        return self.cache.units_for(request, num_offline) - self.growth_reserve

    def running_prompts(self) -> list[Request]:
        """Return the running online requests with a prompt in progress, by age."""
        return due(self.running[RequestClass.ONLINE])[1]

    def prompt_reserve(self, prompts: Iterable[Request]) -> int:
        """Units that these prompts in progress have still to get: a request that starts leaves them alone."""
        size = self.config.block_size
        missing = (_missing_blocks(r, size) for r in prompts if r.row >= 0)
        return UNITS_PER_BLOCK * sum(blocks for blocks in missing if blocks > 0)

    def is_late(self, request: Request, now: float) -> bool:
        """Whether its first token came after the TTFT objective, or can only come after it."""
        times = request.times
        return (now if times.first_token is None else times.first_token) - times.arrival > self.objective.ttft

    def online_order(self, now: float) -> list[Request]:
        """Running online requests by age; where a knapsack chooses, late ones behind the others, which are worth more.
        Memory is taken from the end."""
        running, ttft = list(self.running[RequestClass.ONLINE]), self.objective.ttft
        if self.online_policy.select is not None and math.isfinite(ttft):
            known = [request.times for request in running]
            late = [(now if t.first_token is None else t.first_token) - t.arrival > ttft for t in known]  # (`is_late`)
            if any(late):
                return [*compress(running, map(not_, late)), *compress(running, late)]
        return running

    def evictable(self, now: float) -> list[Request]:
        """Late running requests that must give way to savable ones, the first to lose first; none of them for ever."""
        if not self.online_policy.late_last:
            return []
        limit = self.config.max_offline_preemptions
        running = reversed(self.running[RequestClass.ONLINE])
        return [r for r in running if r.num_preemptions < limit and self.is_late(r, now)]

    def queue_context(self, now: float) -> QueueContext:
        """What the online policy may look at, for a step that is decided at `now`."""
        return QueueContext(
            now=now,
            num_waiting=len(self.waiting_online),
            running=self.running[RequestClass.ONLINE],
            num_units=self.pool.num_units,
            block_size=self.config.block_size,
            ttft=self.objective.ttft,
            seed=self.config.seed,
            most_blocks=self.config.most_blocks,
        )

    def add(self, request: Request) -> None:
        """A new request waits; one that began in another engine like one that was preempted in this one."""
        if request.request_class is RequestClass.ONLINE:
            self.online_share.enter(request)
        elif request.status is RequestStatus.PREEMPTED:
            self.waiting_offline.adopt(request)
        self.add_waiting(request)

    def add_waiting(self, request: Request) -> None:
        if request.aside:
            insert_by_age(self.aside, request)
        elif request.request_class is RequestClass.ONLINE:
            self.waiting_online.add(request)
        else:
            self.waiting_offline.add(request)

    def start_running(self, request: Request) -> int:
        """Move a waiting request to the running ones (one aside stays there); returns its row."""
        if not request.aside:
            if request.request_class is RequestClass.ONLINE:
                self.waiting_online.remove(request)
            else:
                self.waiting_offline.remove(request, taken=True)
            insert_by_age(self.running[request.request_class], request)
        request.move_to(RequestStatus.RUNNING)
        request.row = self.free_rows.pop()
        self.online_share.start(request)
        return request.row

    def preempt(self, request: Request, cause: str, now: float, step_id: int | None = None) -> None:
        """Take a running request's row and units; its tokens stay, and it goes back to its place in the queue.

        With a `step_id` and a host tier it keeps what was computed until somebody needs the room. Otherwise its full
        blocks stay in the prefix index while nobody needs the room, so what it lost is recomputed only then.
        """
        request.num_preemptions += 1
        if (excess := request.num_preemptions - self.config.max_offline_preemptions) >= 0:
            request.not_before = now + min(2.0 ** min(excess, 30), MAX_BACK_OFF)
        self._put_back(request, keep=step_id is not None)
        self.counters.preemptions[cause] = self.counters.preemptions.get(cause, 0) + 1

    def rewind(self, request: Request) -> None:
        """The same for a request whose step failed. Nobody took its room, so it is no eviction: it is not counted, and
        nothing keeps it from starting again."""
        self._put_back(request, keep=False)

    def _put_back(self, request: Request, *, keep: bool) -> None:
        self.give_up(request, keep=keep)
        request.move_to(RequestStatus.PREEMPTED)
        self.add_waiting(request)

    def rebuild(self, requests: Iterable[Request]) -> None:
        """Derive queues and rows anew from the requests themselves, all that have not ended."""
        self.running = {request_class: [] for request_class in RequestClass}
        self.waiting_online, self.waiting_offline, self.aside = WaitingQueue(), self._make_offline_queue(), []
        for request in sorted(requests, key=lambda request: request.arrival_order):
            if request.request_class is RequestClass.OFFLINE and request.status is not RequestStatus.WAITING:
                self.waiting_offline.adopt(request)
            if request.status is RequestStatus.RUNNING:
                (self.aside if request.aside else self.running[request.request_class]).append(request)
            else:
                self.add_waiting(request)
        self.cache.recount(chain(*self.running.values(), (r for r in self.aside if r.status is RequestStatus.RUNNING)))
        held = {request.row for group in (*self.running.values(), self.aside) for request in group}
        self.free_rows = [row for row in range(self.config.max_num_seqs - 1, -1, -1) if row not in held]

    def set_aside(self, request: Request) -> None:
        """Hide a waiting request from ordinary steps."""
        assert request.status is not RequestStatus.RUNNING and not request.aside
        self._leave_queue(request)
        request.aside = True
        self.add_waiting(request)

    def bring_back(self, request: Request) -> None:
        """The opposite, for one that waits or runs: it takes its place by age again."""
        remove_by_age(self.aside, request)
        request.aside = False
        if request.status is RequestStatus.RUNNING:
            insert_by_age(self.running[request.request_class], request)
        else:
            self.add_waiting(request)

    def _leave_queue(self, request: Request) -> None:
        """Remove a waiting request from where it waits."""
        if request.aside:
            remove_by_age(self.aside, request)
        elif request.request_class is RequestClass.ONLINE:
            self.waiting_online.remove(request)
        else:
            self.waiting_offline.remove(request)

    def give_up(self, request: Request, *, keep: bool = False) -> None:
        """Remove a request from its queue and release what it holds (units deferred while a step may touch them).

        `keep`: of what a running one has computed, the cache may keep what it can.
        """
        if request.status is not RequestStatus.RUNNING:
            self.cache.parked.forget(request)
            self._leave_queue(request)
            return
        remove_by_age(self.aside if request.aside else self.running[request.request_class], request)
        self.cache.vacate(request, keep=keep)
        self.unwritten.pop(request, None)
        self.free_rows.append(request.row)
        self.released_rows.append(request.row)
        request.row = -1

    def end(self, request: Request) -> None:
        """A request has ended: it leaves its queue, what it holds, and the accounts of its tenant."""
        self.give_up(request)
        if request.request_class is RequestClass.OFFLINE:
            self.waiting_offline.end(request)
        else:
            self.online_share.end(request)

    def all_requests(self) -> Iterator[Request]:
        """Every request in a queue, running ones first."""
        for running in self.running.values():
            yield from running
        yield from self.waiting_online
        yield from self.waiting_offline
        yield from self.aside

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that every unit and row is in one place, that ended requests hold nothing, and that the queues agree
        with `requests`, all that have not ended (E1, E3): for tests after every move, and an engine that is idle."""
        rows, queued = list(self.free_rows), list(self.all_requests())
        for request in queued:
            assert requests.get(request.request_id) is request, "a queued request is unknown"
            assert request.aside == (request in self.aside), "a request is aside, or it is not"
            if request.status is RequestStatus.RUNNING:
                capacity = len(request.cache_map.blocks) * self.config.block_size
                assert request.num_confirmed_tokens <= request.num_computed_tokens <= capacity
                assert request.num_computed_tokens <= request.num_expected_tokens
                rows.append(request.row)
            else:
                assert request.status in {RequestStatus.WAITING, RequestStatus.PREEMPTED}
                assert request.row < 0, "a waiting request holds a row"
        assert sorted(rows) == list(range(self.config.max_num_seqs)), "a row is lost or owned twice"
        assert len(requests) == len(queued), "a request is in no queue"
        online = [r.request_id for r in queued if r.request_class is RequestClass.ONLINE]
        self.online_share.check_integrity(online)
        self.cache.check_integrity(queued)


def _missing_blocks(request: Request, block_size: int) -> int:
    cache_map = request.cache_map
    return request.num_missing_blocks(block_size, len(cache_map.blocks), cache_map.num_gone)
