"""Waiting offline requests in order of admission: by lane, then tenant, then job.

- Lanes: `flex` (a client waits), then batch lines at risk of missing their completion window, then other batch lines.
  The order is strict except for a floor: a waiting lane is owed a share of the work admitted from the lanes above it
  (`LANE_FLOORS`), and it goes first as soon as it is owed its next request. Lines at risk get half of the leftover
  beside flex requests. No lane starves, and an empty lane earns no credit.
- Within a lane preempted requests go first, oldest first, since their blocks may still be cached.
- Then tenants by virtual token counters, and the jobs of a tenant likewise (`FairShare`). A request is charged when it
  is admitted, for its prompt and its job's mean output. At its end the charge is corrected to the actual cost.
- Within a job the policy decides (`JobQueue`): `psm` (HyGen §4.3, A.1), `deadline` or `fcfs`. `psm` takes the head of
  the prefix walk with probability u < 1 and otherwise the oldest request, so the oldest is admitted within 1/(1-u)
  admissions on average. The draws depend only on the seed and the number of admissions so far, so a discarded plan
  consumes none. Under `psm` a job prefers the prefix of the request that its tenant started last, so that equal
  prefixes of several jobs run together. `deadline` and `fcfs` order all jobs of a tenant together, so a tenant has a
  single job under these policies.

Candidates are only peeked at; the queue changes when a request is admitted. Running requests keep their tenant and job
active, so a job keeps its counter while its next lines are still being read from disk.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import attrgetter

from engine.api import Lane, TokenCosts
from engine.cache.blocks import extend_hashes
from engine.request import Request, RequestStatus
from engine.scheduling.fair_share import FairShare, FairWalk

OFFLINE_POLICIES = ("psm", "deadline", "fcfs")


class JobQueue:
    """Waiting requests of one job. `utility` is the paper's u; `mean_output` are tokens of its answers on average."""

    def __init__(self, policy: str, block_size: int, utility: float, seed: int, mean_output: float) -> None:
        self.mean_output = mean_output
        self._policy = policy
        self._block_size = block_size
        self._utility = utility
        self._seed = seed
        self._tree = PrefixTree()
        self._by_age: dict[str, Request] = {}
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Request]:
        yield from self._by_age.values()

    def add(self, request: Request) -> None:
        self._by_age[request.request_id] = request
        if self._policy == "psm":
            hashes = request.cache_map.hashes
            extend_hashes(hashes, request.token_ids, self._block_size, request.prefix_root)
            self._tree.insert(request, hashes)

    def remove(self, request: Request, *, taken: bool) -> None:
        """Remove a request. `taken`: it was admitted, not aborted."""
        del self._by_age[request.request_id]
        self._num_taken += taken
        if self._policy == "psm":
            self._tree.remove(request, taken=taken)

    def candidates(self, near: Sequence[bytes] = ()) -> Iterator[Request]:
        """Yield requests in the order of admission. The queue must not change meanwhile.

        `near`: block hashes of a prompt that another job has just begun; requests that share its prefix go first.
        """
        if self._policy == "psm":
            yield from self._psm(near)
        elif self._policy == "deadline":
            yield from sorted(self._by_age.values(), key=lambda r: (r.spec.deadline, r.arrival_order))
        else:
            yield from self._by_age.values()

    def _psm(self, near: Sequence[bytes]) -> Iterator[Request]:
        walk, ages = self._tree.walk(near), iter(self._by_age.values())
        given: set[str] = set()
        for index in range(len(self._by_age)):
            source = walk if self._draw(self._num_taken + index) < self._utility else ages
            request = next(r for r in source if r.request_id not in given)
            given.add(request.request_id)
            yield request

    def _draw(self, index: int) -> float:
        digest = blake2b(f"{self._seed}:{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64


@dataclass(slots=True, eq=False)
class _Node:
    """A tree node.

    Attributes:
        segment: Block hashes on the edge into the node.
        weight: Number of requests in the subtree.
    """

    segment: tuple[bytes, ...]
    parent: "_Node | None"
    children: dict[bytes, "_Node"] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    weight: int = 0


class PrefixTree:
    """Radix tree of requests by block hashes.

    Insertion and removal take O(prompt blocks); memory is O(requests) nodes.
    """

    def __init__(self) -> None:
        self._root = _Node((), None)
        self._nodes: dict[str, _Node] = {}
        self._position = self._root

    def insert(self, request: Request, hashes: Sequence[bytes]) -> None:
        """Insert a request under its prompt's block hashes; without hashes it shares no prefix."""
        assert request.request_id not in self._nodes, "a request is filed twice"
        node, depth = self._root, 0
        while depth < len(hashes):
            child = node.children.get(hashes[depth])
            if child is None:
                child = _Node(tuple(hashes[depth:]), node)
                node.children[hashes[depth]] = child
                node, depth = child, len(hashes)
                break
            common = _common_length(child.segment, hashes, depth)
            if common < len(child.segment):
                child = self._split(child, common)
            node, depth = child, depth + common
        node.requests[request.request_id] = request
        self._nodes[request.request_id] = node
        self._add_weight(node, 1)

    def remove(self, request: Request, *, taken: bool = False) -> None:
        """Remove a request. `taken`: it starts to run, so the walk continues from its node."""
        node = self._nodes.pop(request.request_id)
        del node.requests[request.request_id]
        self._add_weight(node, -1)
        if taken:
            self._position = node
        self._prune(node)

    def walk(self, near: Sequence[bytes] = ()) -> Iterator[Request]:
        """Yield all requests in depth-first order from the current position. The tree must not change meanwhile.

        If the position does not share the longest prefix of `near` in the tree, the walk starts at that prefix.
        """
        visited: _Node | None = None
        node: _Node | None = self._start(near)
        while node is not None:
            yield from self._subtree(node, visited)
            visited, node = node, node.parent

    def _start(self, near: Sequence[bytes]) -> _Node:
        node, depth = self._root, 0
        while (child := node.children.get(near[depth]) if depth < len(near) else None) is not None:
            depth += _common_length(child.segment, near, depth)
            node = child
        above: _Node | None = self._position
        while above is not None and above is not node:
            above = above.parent
        return node if above is None else self._position

    @staticmethod
    def _subtree(top: _Node, skip: _Node | None) -> Iterator[Request]:
        """Yield each node's requests by arrival, then its subtrees, heaviest first, except `skip`.

        An explicit stack avoids recursion: a chain of prompts, each one block longer, is as deep as it is long.
        """
        stack = [top]
        while stack:
            node = stack.pop()
            yield from node.requests.values()
            children = [child for child in node.children.values() if child is not skip]
            children.sort(key=lambda child: -child.weight)  # stable: equal weights keep their order of arrival
            stack.extend(reversed(children))

    def _split(self, child: _Node, common: int) -> _Node:
        """Insert a node into the edge to `child`, `common` blocks below its upper end."""
        parent = child.parent
        assert parent is not None
        middle = _Node(child.segment[:common], parent, weight=child.weight)
        parent.children[middle.segment[0]] = middle
        child.segment = child.segment[common:]
        child.parent = middle
        middle.children[child.segment[0]] = child
        return middle

    @staticmethod
    def _add_weight(node: _Node | None, change: int) -> None:
        while node is not None:
            node.weight += change
            node = node.parent

    def _prune(self, node: _Node) -> None:
        """Remove empty branches, and move the walk's position up with them."""
        while node.parent is not None and node.weight == 0:
            if self._position is node:
                self._position = node.parent
            del node.parent.children[node.segment[0]]
            node = node.parent


def _common_length(segment: Sequence[bytes], hashes: Sequence[bytes], offset: int) -> int:
    limit = min(len(segment), len(hashes) - offset)
    return next((i for i in range(limit) if segment[i] != hashes[offset + i]), limit)


LANE_FLOORS = {Lane.FLEX: 0.0, Lane.AT_RISK: 1.0, Lane.BATCH: 1 / 8}
"""Work that a waiting lane is owed, as a share of the work admitted from higher lanes."""
FORGETTING = 0.1
"""Weight of the newest answer in the mean answer length of a job."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """Waiting requests of a tenant in a lane. `last`: block hashes of the prompt that was admitted last."""

    jobs: dict[str, JobQueue] = field(default_factory=dict)
    share: FairShare = field(default_factory=FairShare)
    num_waiting: int = 0
    last: Sequence[bytes] = ()


@dataclass(slots=True, eq=False)
class _LaneQueue:
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    share: FairShare = field(default_factory=FairShare)
    preempted: dict[str, Request] = field(default_factory=dict)
    num_waiting: int = 0

    def __len__(self) -> int:
        return len(self.preempted) + self.num_waiting


def _next_lane(owed: Mapping[Lane, float], heads: Iterable[tuple[Lane, float]]) -> Lane:
    """Return the next lane.

    `owed`: service in the unit of costs. `heads`: the waiting lanes, highest first, with their next requests' costs.
    """
    first: Lane | None = None
    for lane, cost in heads:
        if first is None:
            first = lane
        elif owed.get(lane, 0.0) >= cost:
            return lane
    assert first is not None
    return first


def _pay_lane(owed: dict[Lane, float], lane: Lane, cost: float, waiting: Iterable[Lane]) -> None:
    """Record that a request of `lane` was admitted while the lanes `waiting` had more requests."""
    present = set(waiting)
    for below in present:
        if below > lane:
            owed[below] = owed.get(below, 0.0) + LANE_FLOORS[below] * cost
    owed[lane] = max(0.0, owed.get(lane, 0.0) - cost)
    for absent in [known for known in owed if known not in present]:
        del owed[absent]


class OfflineQueue:
    """Waiting offline requests. `utility` is HyGen's u (see `JobQueue`); `costs` gives the price of tokens."""

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
        self.num_started = dict.fromkeys(Lane, 0)
        self._owed: dict[Lane, float] = {}
        self._charged: dict[str, float] = {}
        self._mean_output = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    @property
    def num_waiting(self) -> dict[Lane, int]:
        """The waiting requests of each lane."""
        return {lane: len(queue) for lane, queue in self._lanes.items()}

    def is_full(self, lane: Lane, tenant: str, limit: int) -> bool:
        """Return whether a tenant must not add to a lane limited to `limit` waiting requests.

        True if all tenants together have that many and this tenant has its equal share.
        """
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
                    yield from job

    def add(self, request: Request) -> None:
        """Queue a new or a preempted request."""
        lane = self._lanes[request.spec.lane]
        if request.status is RequestStatus.PREEMPTED:
            lane.preempted[request.request_id] = request
            return
        self.adopt(request)
        tenant = lane.tenants[request.spec.tenant]
        tenant.jobs[self._job_key(request)].add(request)
        tenant.num_waiting += 1
        lane.num_waiting += 1

    def adopt(self, request: Request) -> None:
        """Open the accounts of a request that already runs or was preempted in another queue."""
        lane = self._lanes[request.spec.lane]
        tenant = lane.tenants.setdefault(request.spec.tenant, _Tenant())
        key = self._job_key(request)
        if key not in tenant.jobs:
            tenant.jobs[key] = JobQueue(self._policy, self._block_size, self._utility, self._seed, self._mean_output)
        lane.share.enter(request.spec.tenant)
        tenant.share.enter(key)

    def remove(self, request: Request, *, taken: bool = False) -> None:
        """Remove a waiting request. `taken`: it was admitted, not aborted."""
        lane, tenant, key = self._accounts(request)
        cost = self._cost(request, tenant.jobs[key])
        if lane.preempted.pop(request.request_id, None) is None:
            tenant.jobs[key].remove(request, taken=taken)
            tenant.num_waiting -= 1
            lane.num_waiting -= 1
            if taken:
                self._charged[request.request_id] = cost
                self._charge(request, cost)
                tenant.last = request.cache_map.hashes
        if taken:
            self.num_started[request.spec.lane] += 1
            _pay_lane(self._owed, request.spec.lane, cost, [name for name, queue in self._lanes.items() if len(queue)])

    def move(self, request: Request, lane: Lane, *, waits: bool) -> None:
        """Move a request and its charge to another lane. `waits`: it waits in this queue; otherwise it runs."""
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

    def _accounts(self, request: Request) -> tuple[_LaneQueue, _Tenant, str]:
        """Return the accounts of a request's lane and tenant, and the key of its job's account."""
        lane = self._lanes[request.spec.lane]
        return lane, lane.tenants[request.spec.tenant], self._job_key(request)

    def _charge(self, request: Request, service: float) -> None:
        lane, tenant, key = self._accounts(request)
        lane.share.charge(request.spec.tenant, service)
        tenant.share.charge(key, service)

    def end(self, request: Request) -> None:
        """Settle a request that ended in any state: correct its charge to the actual cost."""
        charged = self._charged.pop(request.request_id, None)
        if charged is not None:
            length = request.num_output_tokens
            if not request.spec.probe:
                _, tenant, key = self._accounts(request)
                tenant.jobs[key].mean_output += FORGETTING * (length - tenant.jobs[key].mean_output)
                self._mean_output += FORGETTING * (length - self._mean_output)
            actual = self._costs.of(request.num_prompt_tokens - request.num_cached_tokens, length)
            self._charge(request, actual - charged)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Close the accounts of a request if it was the last one of its job or tenant."""
        lane, tenant, key = self._accounts(request)
        tenant.share.leave(key)
        if not tenant.share.is_active(key):
            del tenant.jobs[key]
        lane.share.leave(request.spec.tenant)
        if not lane.share.is_active(request.spec.tenant):
            del lane.tenants[request.spec.tenant]

    def candidates(self) -> Iterator[Request]:
        """Yield requests in the order of admission. The queue must not change meanwhile."""
        owed = self._owed.copy()
        walks = {name: _LaneWalk(self, queue) for name, queue in self._lanes.items() if len(queue)}
        while walks:
            chosen = _next_lane(owed, ((name, walk.cost) for name, walk in walks.items()))
            walk = walks[chosen]
            cost = walk.cost
            yield walk.take()
            if not walk:
                del walks[chosen]
            _pay_lane(owed, chosen, cost, walks)

    def _job_key(self, request: Request) -> str:
        return request.spec.job if self._policy == "psm" else ""

    def _cost(self, request: Request, job: JobQueue) -> float:
        """Return the expected cost of a request."""
        output = min(job.mean_output, request.spec.sampling.max_tokens)
        return self._costs.of(len(request.token_ids), output)


class _LaneWalk:
    """Simulate the order of one lane. True while it has a next request; `cost` is that request's price."""

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
        """Return the next request as if it were admitted."""
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
            self._jobs[name] = FairWalk(tenant.share, (k for k, job in tenant.jobs.items() if len(job)))
        return self._jobs[name]

    def _next_of(self, name: str, key: str) -> Request | None:
        walk = self._requests.get((name, key))
        if walk is None:
            tenant = self._lane.tenants[name]
            walk = self._requests[name, key] = tenant.jobs[key].candidates(tenant.last)
        return next(walk, None)
