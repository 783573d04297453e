"""Waiting offline requests, in the order in which they would be admitted: by lane, then tenant, then job.

- Lanes: `flex` (a client waits), then batch lines at risk of missing their completion window, then other batch lines.
  Strict, but for a floor: while a lane waits, `LANE_FLOOR` of what is admitted from the lanes above it is owed to it,
  and it goes first as soon as it is owed its next request. So no lane starves, and none saves up while it is empty.
- Within a lane requests that were preempted go first, the oldest first: their cache may still be there.
- Then tenants by virtual token counters, and the jobs of a tenant likewise (`FairShare`). A request is charged when it
  is taken, for its prompt and as many output tokens as its job's recent ones gave; what it really was is settled at its
  end.
- Within a job the policy decides (`JobQueue`). `deadline` and `fcfs` are orders over all of a tenant's jobs, so for
  them a tenant is one job.

Candidates are only looked at; the queue changes when one is admitted. Work that runs counts for its tenant, too: a job
whose next lines are still being read from the disk does not lose its place.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

from engine.api import Lane, TokenCosts
from engine.request import Request, RequestStatus
from engine.scheduling.fair_share import FairShare, FairWalk
from engine.scheduling.job_queue import OFFLINE_POLICIES, JobQueue

LANE_FLOOR = 1 / 8
"""Of the work admitted from the lanes above one that waits, the share that the waiting lane is owed."""
FORGETTING = 0.1
"""Weight of the newest answer in the mean length of a job's answers."""


@dataclass(slots=True, eq=False)
class _Job:
    queue: JobQueue
    mean_output: float


@dataclass(slots=True, eq=False)
class _Tenant:
    jobs: dict[str, _Job] = field(default_factory=dict)
    share: FairShare = field(default_factory=FairShare)
    num_waiting: int = 0


@dataclass(slots=True, eq=False)
class _LaneQueue:
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    share: FairShare = field(default_factory=FairShare)
    preempted: dict[str, Request] = field(default_factory=dict)
    num_waiting: int = 0

    def __len__(self) -> int:
        return len(self.preempted) + self.num_waiting


class LaneFloors:
    """What lanes are owed: seconds or tokens of service, as costs are."""

    def __init__(self, owed: dict[Lane, float] | None = None) -> None:
        self._owed = dict(owed or {})

    def copy(self) -> "LaneFloors":
        return LaneFloors(self._owed)

    def choose(self, heads: Iterable[tuple[Lane, float]]) -> Lane:
        """The lane that goes next, of those with their next costs, the first lane first."""
        first: Lane | None = None
        for lane, cost in heads:
            if first is None:
                first = lane
            elif self._owed.get(lane, 0.0) >= cost:
                return lane
        assert first is not None
        return first

    def charge(self, lane: Lane, cost: float, waiting: Iterable[Lane]) -> None:
        """A request of `lane` was admitted while the lanes `waiting` had more."""
        present = set(waiting)
        for below in present:
            if below > lane:
                self._owed[below] = self._owed.get(below, 0.0) + LANE_FLOOR * cost
        self._owed[lane] = max(0.0, self._owed.get(lane, 0.0) - cost)
        for absent in [known for known in self._owed if known not in present]:
            del self._owed[absent]


class OfflineQueue:
    """`utility` is HyGen's u (see `JobQueue`); `costs` prices requests."""

    def __init__(
        self,
        policy: str,
        block_size: int,
        *,
        utility: float = 0.9,
        seed: int = 0,
        costs: TokenCosts | None = None,
    ) -> None:
        assert policy in OFFLINE_POLICIES and 0.0 <= utility < 1.0
        self._policy = policy
        self._block_size = block_size
        self._utility = utility
        self._seed = seed
        self._costs = costs or TokenCosts()
        self._lanes = {lane: _LaneQueue() for lane in Lane}
        self._floors = LaneFloors()
        self._charged: dict[str, float] = {}
        self._mean_output = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def num_waiting(self, lane: Lane) -> int:
        """Requests of a lane that wait, preempted ones included."""
        return len(self._lanes[lane])

    def is_full(self, lane: Lane, tenant: str, limit: int) -> bool:
        """Whether a tenant must not add to a lane of which at most `limit` requests should wait: all tenants together
        have as many, and it has its equal part of them."""
        queue = self._lanes[lane]
        if queue.num_waiting < limit:
            return False
        waiting = [entry for name, entry in queue.tenants.items() if entry.num_waiting and name != tenant]
        own = queue.tenants[tenant].num_waiting if tenant in queue.tenants else 0
        return own >= limit // (len(waiting) + 1)

    def __iter__(self) -> Iterator[Request]:
        for lane in self._lanes.values():
            yield from lane.preempted.values()
            for tenant in lane.tenants.values():
                for job in tenant.jobs.values():
                    yield from job.queue

    def add(self, request: Request) -> None:
        """A new request, or one that was preempted."""
        lane = self._lanes[request.spec.lane]
        if request.status is RequestStatus.PREEMPTED:
            lane.preempted[request.request_id] = request
            return
        self.adopt(request)
        tenant = lane.tenants[request.spec.tenant]
        tenant.jobs[self._job_key(request)].queue.add(request)
        tenant.num_waiting += 1
        lane.num_waiting += 1

    def adopt(self, request: Request) -> None:
        """Open the accounts that a request is charged to, of one that began in another queue: it runs already, or was
        preempted."""
        lane = self._lanes[request.spec.lane]
        tenant = lane.tenants.setdefault(request.spec.tenant, _Tenant())
        key = self._job_key(request)
        if key not in tenant.jobs:
            queue = JobQueue(self._policy, self._block_size, self._utility, self._seed)
            tenant.jobs[key] = _Job(queue, self._mean_output)
        lane.share.enter(request.spec.tenant)
        tenant.share.enter(key)

    def remove(self, request: Request, *, taken: bool = False) -> None:
        """A request waits no longer; `taken`: it was admitted (and not, say, aborted)."""
        spec = request.spec
        lane = self._lanes[spec.lane]
        tenant, key = lane.tenants[spec.tenant], self._job_key(request)
        cost = self._cost(request, tenant.jobs[key])
        if lane.preempted.pop(request.request_id, None) is None:
            tenant.jobs[key].queue.remove(request, taken=taken)
            tenant.num_waiting -= 1
            lane.num_waiting -= 1
            if taken:
                self._charged[request.request_id] = cost
                lane.share.charge(spec.tenant, cost)
                tenant.share.charge(key, cost)
        if taken:
            self._floors.charge(spec.lane, cost, [name for name, queue in self._lanes.items() if len(queue)])

    def move(self, request: Request, lane: Lane, *, waits: bool) -> None:
        """A request, which waits here or (`waits` false) runs, belongs to another lane from now on; what it was charged
        goes with it."""
        if waits:
            self.remove(request)
        charged = self._charged.get(request.request_id, 0.0)
        self._charge(request, -charged)
        self._leave(request)
        request.spec = replace(request.spec, lane=lane)
        if waits and request.status is RequestStatus.WAITING:
            self.add(request)
            return
        self.adopt(request)
        self._charge(request, charged)
        if waits:
            self.add(request)

    def _charge(self, request: Request, service: float) -> None:
        lane = self._lanes[request.spec.lane]
        lane.share.charge(request.spec.tenant, service)
        lane.tenants[request.spec.tenant].share.charge(self._job_key(request), service)

    def end(self, request: Request) -> None:
        """A request has ended, wherever it was: what it was charged is corrected by what it really cost."""
        spec = request.spec
        lane = self._lanes[spec.lane]
        tenant, key = lane.tenants[spec.tenant], self._job_key(request)
        charged = self._charged.pop(request.request_id, None)
        if charged is not None:
            job, length = tenant.jobs[key], request.num_output_tokens
            if not spec.probe:
                job.mean_output += FORGETTING * (length - job.mean_output)
                self._mean_output += FORGETTING * (length - self._mean_output)
            actual = self._costs.of(request.num_prompt_tokens - request.num_cached_tokens, length)
            lane.share.charge(spec.tenant, actual - charged)
            tenant.share.charge(key, actual - charged)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Close the accounts of a request, if it was the last of its job or tenant."""
        spec = request.spec
        lane = self._lanes[spec.lane]
        tenant, key = lane.tenants[spec.tenant], self._job_key(request)
        tenant.share.leave(key)
        if not tenant.share.is_active(key):
            del tenant.jobs[key]
        lane.share.leave(spec.tenant)
        if not lane.share.is_active(spec.tenant):
            del lane.tenants[spec.tenant]

    def candidates(self) -> Iterator[Request]:
        """Yield requests in the order in which they would be admitted now; the queue must not change meanwhile."""
        floors = self._floors.copy()
        walks = {name: _LaneWalk(self, queue) for name, queue in self._lanes.items() if len(queue)}
        while walks:
            chosen = floors.choose((name, walk.cost) for name, walk in walks.items())
            walk = walks[chosen]
            cost = walk.cost
            yield walk.take()
            if not walk:
                del walks[chosen]
            floors.charge(chosen, cost, walks)

    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        return min(self, key=attrgetter("arrival_order"), default=None)

    def _job_key(self, request: Request) -> str:
        return request.spec.job if self._policy == "psm" else ""

    def _cost(self, request: Request, job: _Job) -> float:
        """What a request will cost, as far as that can be told."""
        output = min(job.mean_output, request.spec.sampling.max_tokens)
        return self._costs.of(len(request.token_ids), output)


class _LaneWalk:
    """The order of one lane, as it would go on from here. True while it has a next request, whose price is `cost`."""

    def __init__(self, owner: OfflineQueue, lane: _LaneQueue) -> None:
        self._owner = owner
        self._lane = lane
        self._preempted = iter(sorted(lane.preempted.values(), key=attrgetter("arrival_order")))
        self._tenants = FairWalk(lane.share, (n for n, tenant in lane.tenants.items() if tenant.num_waiting))
        self._jobs: dict[str, FairWalk] = {}
        self._requests: dict[tuple[str, str], Iterator[Request]] = {}
        self._next: Request | None = None
        self._is_charged = False
        self.cost = 0.0
        self._find()

    def __bool__(self) -> bool:
        return self._next is not None

    def take(self) -> Request:
        """The next request, as if it were admitted."""
        request = self._next
        assert request is not None
        if self._is_charged:
            self._tenants.charge(self.cost)
            self._jobs[request.spec.tenant].charge(self.cost)
        self._find()
        return request

    def _find(self) -> None:
        self._next, self._is_charged = next(self._preempted, None), False
        while self._next is None and self._tenants:
            name = self._tenants.head
            jobs = self._jobs_of(name)
            if not jobs:
                self._tenants.drop()
                continue
            self._next, self._is_charged = self._next_of(name, jobs.head), True
            if self._next is None:
                jobs.drop()
        if self._next is not None:
            spec = self._next.spec
            job = self._lane.tenants[spec.tenant].jobs[self._owner._job_key(self._next)]
            self.cost = self._owner._cost(self._next, job)

    def _jobs_of(self, name: str) -> FairWalk:
        if name not in self._jobs:
            tenant = self._lane.tenants[name]
            self._jobs[name] = FairWalk(tenant.share, (k for k, job in tenant.jobs.items() if len(job.queue)))
        return self._jobs[name]

    def _next_of(self, name: str, key: str) -> Request | None:
        walk = self._requests.get((name, key))
        if walk is None:
            walk = self._requests[name, key] = self._lane.tenants[name].jobs[key].queue.candidates()
        return next(walk, None)
