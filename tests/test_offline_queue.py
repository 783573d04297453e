"""Offline order inside a job: the prefix tree against a brute-force walk, fairness of PSM, the other policies.

Lanes, tenants and jobs: test_lanes.py."""

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from driver import make_request
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fuzz import machine_test

from engine.api import EngineRequest, RequestTimes
from engine.cache.blocks import extend_hashes
from engine.request import Request, RequestStatus
from engine.scheduling.queues import OfflineQueue, PrefixTree

BLOCK = 2


def waiting(request_id: str, prompt: list[int], order: int, deadline: float = math.inf) -> Request:
    spec = make_request(request_id, prompt)
    spec = EngineRequest(spec.request_id, spec.prompt_token_ids, spec.sampling, deadline=deadline)
    return Request(spec, RequestTimes(arrival=float(order)), order)


def hashes_of(prompt: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, prompt, BLOCK, b"")
    return hashes


def brute_force_walk(prompts: list[list[int]]) -> list[int]:
    """Depth first over whole blocks from the root, heaviest subtree first, ties by arrival."""

    def visit(members: list[int], depth: int) -> list[int]:
        here = [m for m in members if len(prompts[m]) // BLOCK == depth]
        groups: dict[tuple[int, ...], list[int]] = {}
        for m in members:
            if len(prompts[m]) // BLOCK > depth:
                groups.setdefault(tuple(prompts[m][depth * BLOCK : (depth + 1) * BLOCK]), []).append(m)
        ordered = sorted(groups.values(), key=lambda g: -len(g))
        return here + [m for group in ordered for m in visit(group, depth + 1)]

    return visit(list(range(len(prompts))), 0)


prompt_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=10)


@given(st.lists(prompt_strategy, max_size=14))
def test_walk_groups_prefixes_like_brute_force(prompts: list[list[int]]) -> None:
    tree = PrefixTree()
    for index, prompt in enumerate(prompts):
        tree.insert(waiting(str(index), prompt, index), hashes_of(prompt))
    walked = [int(r.request_id) for r in tree.walk()]
    expected = brute_force_walk(prompts)
    assert sorted(walked) == sorted(expected)
    # Where subtrees weigh the same their order is free (splitting an edge may reorder ties): compare the sharing.
    assert shared_blocks(prompts, walked) >= shared_blocks(prompts, expected)


def shared_blocks(prompts: list[list[int]], order: list[int]) -> int:
    """Blocks that each request shares with the one walked just before it."""
    total = 0
    for left, right in pairwise(order):
        a, b = hashes_of(prompts[left]), hashes_of(prompts[right])
        total += sum(x == y for x, y in zip(a, b, strict=False))
    return total


def test_heaviest_subtree_first_and_resumed_from_the_position() -> None:
    tree = PrefixTree()
    prompts = {"a1": [1, 1, 5, 5], "b1": [2, 2, 5, 5], "b2": [2, 2, 6, 6], "b3": [2, 2, 6, 6, 7, 7], "lone": [3]}
    requests = {name: waiting(name, p, i) for i, (name, p) in enumerate(prompts.items())}
    for name, request in requests.items():
        tree.insert(request, hashes_of(prompts[name]))
    assert [r.request_id for r in tree.walk()] == ["lone", "b2", "b3", "b1", "a1"]
    tree.remove(requests["b2"], taken=True)
    assert [r.request_id for r in tree.walk()][:2] == ["b3", "b1"]
    late = waiting("late", [1, 1, 5, 5], 9)
    tree.insert(late, hashes_of([1, 1, 5, 5]))
    tree.insert(waiting("late2", [1, 1, 5, 6], 10), hashes_of([1, 1, 5, 6]))
    assert [r.request_id for r in tree.walk()][:2] == ["b3", "b1"], "the current prefix is finished first"


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.filed: dict[str, Request] = {}
        self.count = 0

    @rule(prompt=prompt_strategy)
    def insert(self, prompt: list[int]) -> None:
        request = waiting(str(self.count), prompt, self.count)
        self.count += 1
        self.filed[request.request_id] = request
        self.tree.insert(request, hashes_of(prompt))

    @precondition(lambda self: self.filed)
    @rule(data=st.data(), taken=st.booleans())
    def remove(self, data: st.DataObject, taken: bool) -> None:
        request = self.filed.pop(data.draw(st.sampled_from(sorted(self.filed))))
        self.tree.remove(request, taken=taken)
        assert request.request_id not in self.tree._nodes

    @invariant()
    def everything_is_walked_once(self) -> None:
        walked = [r.request_id for r in self.tree.walk()]
        assert len(walked) == len(set(walked)) == self.tree._root.weight == len(self.filed)
        assert set(walked) == set(self.filed)


TestTreeMachine = machine_test(TreeMachine, 60, 40)


def make_queue(policy: str, count: int = 40, utility: float = 0.75) -> tuple[OfflineQueue, list[Request]]:
    queue = OfflineQueue(policy, BLOCK, utility=utility, seed=3)
    requests = [waiting(str(i), [i % 4] * 8 + [i], i, deadline=1000.0 - i) for i in range(count)]
    for request in requests:
        queue.add(request)
    return queue, requests


def drain(queue: OfflineQueue) -> list[int]:
    taken = []
    while len(queue):
        request = next(queue.candidates())
        queue.remove(request, taken=True)
        taken.append(int(request.request_id))
    return taken


def test_orders() -> None:
    assert drain(make_queue("fcfs")[0]) == list(range(40))
    assert drain(make_queue("deadline")[0]) == list(reversed(range(40)))


def test_psm_keeps_sharers_together_and_takes_the_oldest_now_and_then() -> None:
    order = drain(make_queue("psm", 200, utility=0.9)[0])
    together = sum(a % 4 == b % 4 for a, b in pairwise(order))
    assert together > 150, "most neighbours share their prefix"
    queue, _ = make_queue("psm", 200, utility=0.5)
    ages = drain(queue)
    worst = max(ages.index(i) - i for i in range(100))
    assert worst < 60, "no request is passed over for ever"


def test_preempted_requests_go_first_oldest_first() -> None:
    queue, requests = make_queue("psm")
    for index in (30, 20):
        queue.remove(requests[index], taken=True)
        requests[index].move_to(RequestStatus.RUNNING)
        requests[index].move_to(RequestStatus.PREEMPTED)
        queue.add(requests[index])
    assert [r.request_id for r in queue.candidates()][:2] == ["20", "30"]


@pytest.mark.slow
def test_a_very_deep_chain_of_prompts_is_walked() -> None:
    tree = PrefixTree()
    for index in range(1200):
        prompt = [1] * (BLOCK * (index + 1))
        tree.insert(waiting(str(index), prompt, index), [bytes([i % 256, i // 256]) for i in range(index + 1)])
    assert [int(r.request_id) for r in tree.walk()] == list(range(1200))
