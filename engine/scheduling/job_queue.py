"""In which order the waiting requests of one job are offered to a step: `psm` (HyGen §4.3, A.1), `deadline`, `fcfs`.

Candidates are only *looked at* here; the queue changes when one is really admitted (peek first, remove on success).
`psm` takes the head of the prefix walk with probability u < 1 and the oldest otherwise, so the oldest is admitted
within 1/(1-u) admissions on average. The draws are a function of (seed, number of admissions so far): a plan that is
discarded consumes none. Knows nothing of other jobs.
"""

from collections.abc import Iterator
from hashlib import blake2b

from engine.cache.prefix import extend_hashes
from engine.request import Request
from engine.scheduling.prefix_tree import PrefixTree

OFFLINE_POLICIES = ("psm", "deadline", "fcfs")


class JobQueue:
    """`utility` is the paper's u."""

    def __init__(self, policy: str, block_size: int, utility: float, seed: int) -> None:
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
            extend_hashes(hashes, request.token_ids, self._block_size, request.spec.prefix_root)
            self._tree.insert(request, hashes)

    def remove(self, request: Request, *, taken: bool) -> None:
        """Forget a request; `taken`: it was admitted (and not, say, aborted)."""
        del self._by_age[request.request_id]
        self._num_taken += taken
        if self._policy == "psm":
            self._tree.remove(request, taken=taken)

    def candidates(self) -> Iterator[Request]:
        """Requests in the order in which they would be admitted now; the queue must not change meanwhile."""
        if self._policy == "psm":
            yield from self._psm()
        elif self._policy == "deadline":
            yield from sorted(self._by_age.values(), key=lambda r: (r.spec.deadline, r.arrival_order))
        else:
            yield from self._by_age.values()

    def _psm(self) -> Iterator[Request]:
        walk, ages = self._tree.walk(), iter(self._by_age.values())
        given: set[str] = set()
        for index in range(len(self._by_age)):
            source = walk if self._draw(self._num_taken + index) < self._utility else ages
            request = next(r for r in source if r.request_id not in given)
            given.add(request.request_id)
            yield request

    def _draw(self, index: int) -> float:
        digest = blake2b(f"{self._seed}:{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64
