"""The state that steps are built from: queues, rows, units, limits. One instance per engine, owned by the core.

Each step is one `StepBuilder` (HyGen §4.1, Algorithm 1); this module keeps what outlives it. Knows nothing of asyncio,
clocks or tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.cache.cache_map import CacheBlock
from engine.cache.pool import UNITS_PER_KV_BLOCK, BlockPool
from engine.cache.prefix import extend_hashes
from engine.config import SchedulerConfig
from engine.request import Request, RequestClass, RequestStatus
from engine.scheduling.objective import StepObjective
from engine.scheduling.offline_queue import OfflineQueue
from engine.scheduling.policies import OnlinePolicy, QueueContext
from engine.scheduling.queues import insert_by_age, remove_by_age
from predictor.model import LatencyPredictor


@dataclass(slots=True)
class SchedulerCounters:
    """Counters for `EngineStats`; they only grow. Seconds are predicted ones."""

    preemptions: dict[str, int] = field(default_factory=dict)
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    leftover_seconds: float = 0.0
    leftover_used_seconds: float = 0.0


class Scheduler:
    """Queues, rows and units. `offline_share` scales the offline budget beside online work (the circuit breaker)."""

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
        self.pool = BlockPool(config.num_units)
        self.running: dict[RequestClass, list[Request]] = {RequestClass.ONLINE: [], RequestClass.OFFLINE: []}
        self.waiting_online: list[Request] = []
        self.waiting_offline = OfflineQueue(offline_policy, config.block_size, seed=config.seed)
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self.released_rows: list[int] = []
        self.counters = SchedulerCounters()

    @property
    def has_online(self) -> bool:
        """Whether any online request is waiting or running."""
        return bool(self.waiting_online or self.running[RequestClass.ONLINE])

    @property
    def growth_reserve(self) -> int:
        """Units that offline admission leaves alone: the next block of everything that runs. Without it the pool fills
        to the brim and offline requests preempt one another for ever."""
        return UNITS_PER_KV_BLOCK * sum(len(running) for running in self.running.values())

    def units_for(self, request_class: RequestClass, num_offline: int) -> int:
        """Units that a request could get now. `num_offline` offline requests leave the online prefixes used last alone,
        up to a quarter of the pool: the next turn of a chat comes minutes later. One alone must be able to end (E4)."""
        if request_class is RequestClass.ONLINE or num_offline <= 1:
            return self.pool.num_available_units
        return self.pool.num_available_units - min(self.pool.num_cached_online_units, self.pool.num_units // 4)

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
        )

    def add_waiting(self, request: Request) -> None:
        if request.request_class is RequestClass.ONLINE:
            insert_by_age(self.waiting_online, request)
        else:
            self.waiting_offline.add(request)

    def start_running(self, request: Request) -> int:
        """Move a waiting request to the running ones; returns its row."""
        if request.request_class is RequestClass.ONLINE:
            remove_by_age(self.waiting_online, request)
        else:
            self.waiting_offline.remove(request, taken=True)
        insert_by_age(self.running[request.request_class], request)
        request.move_to(RequestStatus.RUNNING)
        request.row = self.free_rows.pop()
        return request.row

    def preempt(self, request: Request, cause: str) -> None:
        """Take a running request's row and units; its tokens stay, and it goes back to its place in the queue.

        Its full blocks stay in the prefix index while nobody needs the room, so what it lost is recomputed only then.
        """
        self.give_up(request)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self.add_waiting(request)
        self.counters.preemptions[cause] = self.counters.preemptions.get(cause, 0) + 1

    def give_up(self, request: Request) -> None:
        """Remove a request from its queue and release what it holds (units deferred while a step may touch them)."""
        if request.status is not RequestStatus.RUNNING:
            if request.request_class is RequestClass.ONLINE:
                remove_by_age(self.waiting_online, request)
            else:
                self.waiting_offline.remove(request)
            return
        remove_by_age(self.running[request.request_class], request)
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

    def all_requests(self) -> Iterator[Request]:
        """Every request in a queue, running ones first."""
        for running in self.running.values():
            yield from running
        yield from self.waiting_online
        yield from self.waiting_offline
