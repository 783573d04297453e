"""Requests that miss their objective: `goodput`'s evictions and order, its tail, early refusal."""

from typing import Any

import pytest
from driver import Driver, make_request
from test_hybrid_scheduling import MODEL, check_solo, make

from engine.api import FinishReason, RequestClass
from engine.errors import QueueFullError
from engine.limits import UNLIMITED_QUEUE
from engine.scheduling.objective import StepObjective

TTFT = 2.0


def objective_driver(depth: int, **options: Any) -> Driver:
    driver = make(depth, model=MODEL, **options)
    driver.core.set_objective(StepObjective(ttft=TTFT, tbt=TTFT))
    return driver


def late_and_new(depth: int, policy: str, blocks: int = 12, **options: int) -> Driver:
    """A request that missed its objective runs and holds most of the memory; then one comes that needs half of it."""
    driver = objective_driver(depth, blocks=blocks, policy=policy, max_queue_time=UNLIMITED_QUEUE, **options)
    driver.add(make_request("late", [1] * 28, 16))
    driver.now = TTFT + 1.0
    driver.step()
    driver.add(make_request("new", [2] * 22, 2))
    return driver


def test_a_late_request_gives_way_to_one_that_can_be_saved(depth: int) -> None:
    waited = {}
    for policy in ("fcfs", "apt", "goodput", "goodput-strict"):
        driver = late_and_new(depth, policy)
        arrived = driver.now
        driver.run()
        assert all(final.finish_reason is FinishReason.LENGTH for final in driver.finals.values())
        check_solo(driver, make_request("late", [1] * 28, 16), make_request("new", [2] * 22, 2))
        first = driver.finals["new"].times.first_token
        assert first is not None
        waited[policy] = first - arrived
        evicted = driver.stats().preemptions.get("late", 0)
        assert evicted == (1 if policy == "goodput-strict" else 0), policy
        assert policy != "goodput-strict" or driver.stats().knapsack["kv"] > 0
    assert waited["goodput-strict"] < min(waited["fcfs"], waited["apt"], waited["goodput"])


def test_nobody_gives_way_for_ever(depth: int) -> None:
    """After `max_offline_preemptions` a late request keeps its place, and a savable request waits."""
    driver = late_and_new(depth, "goodput-strict", max_offline_preemptions=2)
    for name in ("new", "second", "third", "fourth"):
        if name != "new":
            driver.add(make_request(name, [len(name)] * 22, 2))
        while name not in driver.finals:
            driver.step()
        for _ in range(3):
            driver.step()
    driver.run()
    assert driver.stats().preemptions == {"late": 2}


def test_savable_requests_start_first_when_time_is_short() -> None:
    """Memory for all requests: only the token limit of a step makes the queue wait."""
    started = {}
    for policy in ("fcfs", "goodput-strict"):
        driver = objective_driver(0, blocks=200, policy=policy)
        driver.add(*(make_request(f"old-{i}", [i] * 64, 2) for i in range(3)))
        driver.now = TTFT + 1.0
        driver.add(make_request("new", [9] * 64, 2))
        driver.step()
        started[policy] = [new.request_id for new in driver.steps[0].new_requests]
        driver.run()
    assert started == {"fcfs": ["old-0"], "goodput-strict": ["new"]}


@pytest.mark.parametrize(("policy", "late", "loses"), [
    ("apt", True, "old"),
    ("goodput", True, "old"),
    ("fcfs", False, "young"),
    ("apt", False, "old"),
    ("goodput", False, "old"),
])  # fmt: skip
def test_growth_takes_memory_of_a_late_request_or_of_the_least_value_per_unit(
    depth: int, policy: str, late: bool, loses: str
) -> None:
    """The late one, or else the large one, is the older: by age alone the younger would lose."""
    driver = objective_driver(depth, blocks=12 if late else 13, policy=policy)
    old = make_request("old", [1] * (18 if late else 30), 20 if late else 12)
    young = make_request("young", [2] * (18 if late else 6), 20 if late else 12)
    driver.add(old)
    if late:
        driver.now = TTFT + 1.0
        driver.step()
    driver.add(young)
    driver.run()
    check_solo(driver, old, young)
    assert [name for name, final in driver.finals.items() if final.num_preemptions] == [loses]


def test_offline_work_loses_before_late_online_work() -> None:
    driver = objective_driver(0, blocks=20, policy="goodput-strict")
    driver.add(make_request("late", [1] * 28, 16))
    driver.now = TTFT + 1.0
    driver.add(make_request("batch", [5] * 28, 16, request_class=RequestClass.OFFLINE))
    driver.step()
    driver.step()
    driver.add(make_request("new", [2] * 38, 2))
    driver.run()
    preemptions = driver.stats().preemptions
    assert preemptions["online"] == 1 and "late" not in preemptions


def test_early_refusal_can_be_switched_off() -> None:
    for refuse, limit in ((True, "1x"), (False, UNLIMITED_QUEUE)):
        driver = make(0, blocks=200, model=MODEL, max_queue_time=limit)
        driver.core.set_objective(StepObjective(ttft=0.1, tbt=1.0))
        driver.add(make_request("a", [1] * 600, 2))
        if refuse:
            with pytest.raises(QueueFullError):
                driver.add(make_request("b", [2] * 10, 2))
        else:
            driver.add(make_request("b", [2] * 10, 2))
        driver.run()


def test_late_requests_leave_room_for_those_to_come(depth: int) -> None:
    """Beside running work the last quarter of the pool is not for late requests; alone they may take all of it."""
    for policy, running in (("goodput-strict", 1), ("goodput", 2)):
        driver = objective_driver(depth, blocks=12, policy=policy, max_queue_time=UNLIMITED_QUEUE)
        driver.add(make_request("big", [1] * 22, 4), make_request("other", [2] * 18, 4))
        driver.now = TTFT + 1.0
        driver.step()
        assert driver.stats().running[RequestClass.ONLINE] == running, policy
        driver.run()


def test_late_requests_do_not_slow_the_others_by_hidden_state(depth: int) -> None:
    """KV has room for three of eight prompts; none may start from hidden state once all have missed the objective."""
    for arrived_late in (False, True):
        driver = objective_driver(depth, blocks=12, scratch=40, policy="apt")
        driver.add(*(make_request(str(i), [i] * 14, 10) for i in range(8)))
        driver.now = TTFT + 1.0 if arrived_late else 0.5
        driver.step()
        driver.step()
        assert (driver.stats().hidden_blocks > 0) != arrived_late
        driver.run()
