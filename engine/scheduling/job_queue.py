"""The order in which waiting requests of one job are admitted: `psm` (HyGen §4.3, A.1), `deadline` or `fcfs`.

Candidates are only peeked at; the queue changes when a request is admitted. `psm` takes the head of the prefix walk
with probability u < 1 and otherwise the oldest request, so the oldest is admitted within 1/(1-u) admissions on average.
The draws depend only on the seed and the number of admissions so far, so a discarded plan consumes none. Other jobs are
not considered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.cache.blocks import extend_hashes
from engine.request import Request

OFFLINE_POLICIES = ("psm", "deadline", "fcfs")


class JobQueue:
    """Waiting requests of one job. `utility` is the paper's u."""

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
