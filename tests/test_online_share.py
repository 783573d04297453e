"""Tenants with online requests get the same service: a thousand chats of one are not in the way of another's."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.tables import mostly_slow
from test_laxity import MODEL, OBJECTIVE

from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.core import EngineCore
from engine.errors import QueueFullError
from engine.limits import UNLIMITED_QUEUE, SchedulerConfig
from engine.request import Request
from engine.scheduling.report import report_stats
from engine.virtual import Arrival, PredictedRunner, VirtualDriver, VirtualRecord
from loadgen.simulation.policies import find_policy

AMPLE, SHORT = 2 * 8000, 2 * 300
CONFIG = SchedulerConfig(AMPLE, 4096, max_num_waiting=2000, max_queue_time=UNLIMITED_QUEUE)
POLICIES = ("goodput", "goodput-strict", "apt", "fcfs", "no-preempt", "larry")


def make_core(policy: str = "goodput", **changes: Any) -> EngineCore:
    config = replace(CONFIG, **changes)
    return EngineCore(config, online_policy=find_policy(policy), model=MODEL, objective=OBJECTIVE)


def chat(name: str, length: int, tenant: str, output: int = 10) -> EngineRequest:
    prompt = (hash(name) % 1009, *([1] * (length - 1)))
    return EngineRequest(name, prompt, SamplingParams(max_tokens=output), cache_salt=name.encode(), tenant=tenant)


def replay(core: EngineCore, arrivals: list[Arrival], seconds: float = 1000.0) -> dict[str, VirtualRecord]:
    run = VirtualDriver(core, PredictedRunner(MODEL), arrivals).run(seconds)
    return {record.arrival.request.request_id: record for record in run.online}


def heavy(count: int, length: int = 200) -> list[Arrival]:
    return [Arrival(0.0, chat(f"heavy{index}", length, "heavy")) for index in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("units", [AMPLE, SHORT])
def test_a_thousand_waiting_chats_of_one_tenant_are_not_in_the_way_of_another(policy: str, units: int) -> None:
    light = [Arrival(1.0 + 2.03 * index, chat(f"light{index}", 2000, "light")) for index in range(5)]
    alone = [record.ttft for record in replay(make_core(policy, num_units=units), light).values()]
    records = replay(make_core(policy, num_units=units), heavy(1000) + light)
    assert all(record.ended is not None for record in records.values()), "no request waits for ever"
    assert (records["heavy999"].ttft or 0.0) > 20.0, "there was a queue all the while"
    for index, own in enumerate(alone):
        ttft = records[f"light{index}"].ttft
        assert own is not None and ttft is not None
        assert ttft < 2 * own, (index, ttft, own)


@pytest.mark.parametrize(
    ("policy", "units"),
    mostly_slow([("goodput", AMPLE), ("goodput", SHORT), ("apt", SHORT), ("fcfs", AMPLE)], [("goodput", SHORT)]),
)
def test_long_answers_that_hold_every_row_are_not_in_the_way_of_another_tenant(policy: str, units: int) -> None:
    """No answer ends for ten seconds; with few units memory is their share of the pool."""
    light = [Arrival(2.0 + 2.0 * index, chat(f"light{index}", 300, "light")) for index in range(3)]
    alone = [record.ttft for record in replay(make_core(policy, num_units=units, max_num_seqs=16), light).values()]
    crowd = [Arrival(0.0, chat(f"heavy{index}", 40, "heavy", output=900)) for index in range(24)]
    core = make_core(policy, num_units=units, max_num_seqs=16)
    records = replay(core, crowd + light)
    assert all(record.ended is not None for record in records.values())
    for index, own in enumerate(alone):
        ttft = records[f"light{index}"].ttft
        assert own is not None and ttft is not None
        assert ttft < 3 * own, (index, ttft, own)  # (without a row: tens of seconds)
    if units == AMPLE:
        assert core.state.counters.preemptions["tenant"] == len(light), "one row each time"


@pytest.mark.parametrize("policy", ["goodput", "fcfs"])
def test_all_chats_of_a_tenant_within_its_share_get_a_row_at_once(policy: str) -> None:
    """Not only its first: eight rows of sixteen are its own, beside long answers that hold all rows."""
    crowd = [Arrival(0.0, chat(f"heavy{index}", 40, "heavy", output=900)) for index in range(24)]
    light = [Arrival(2.0, chat(f"light{index}", 60, "light", output=300)) for index in range(12)]
    alone = replay(make_core(policy, max_num_seqs=16), light)
    core = make_core(policy, max_num_seqs=16)
    records = replay(core, crowd + light)
    assert all(record.ended is not None for record in records.values())
    waits = sorted(records[name].ttft or 0.0 for name in alone)
    assert waits[7] < 1.0 < waits[8], "half of the rows, and the rest behind its own"
    assert 8 <= core.state.counters.preemptions["tenant"] <= len(light), "one row each time"


@pytest.mark.parametrize("units", mostly_slow([AMPLE, SHORT], [AMPLE]))
def test_rows_that_changed_hands_do_not_go_to_and_fro(units: int) -> None:
    """Tenants take turns at having many requests; each request is let in and moved away at most once."""
    core = make_core(max_num_seqs=12, num_units=units)
    arrivals = [
        Arrival(3.0 * wave + 0.01 * i, chat(f"{tenant}{wave}-{i}", 40, tenant, output=300))
        for wave in range(4)
        for i in range(16)
        for tenant in ("ab" if wave % 2 else "cd")
    ]
    moved = Counter[str]()
    real = core.state.preempt

    def preempt(victim: Request, cause: str, *rest: Any) -> None:
        if cause == "tenant":
            moved[victim.request_id] += 1
            rows = Counter(r.spec.tenant for r in core.state.running[RequestClass.ONLINE])
            assert rows[victim.spec.tenant] >= 2
        real(victim, cause, *rest)

    core.state.preempt = preempt  # type: ignore[method-assign]
    records = replay(core, arrivals)
    assert all(record.ended is not None for record in records.values())
    assert moved and max(moved.values()) == 1


def test_a_tenant_gives_up_a_row_once_for_each_request_and_never_its_last() -> None:
    """More tenants than rows, all with long answers: places do not change hands again and again."""
    core = make_core(max_num_seqs=4)
    arrivals = [Arrival(0.1 * i, chat(f"{name}{i}", 40, name, output=500)) for i in range(6) for name in "abcdef"]
    records = replay(core, arrivals)
    assert all(record.ended is not None for record in records.values())
    assert 0 < core.state.counters.preemptions["tenant"] < len(arrivals), "at most once for each"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["goodput", "fcfs"])
def test_while_both_have_work_they_get_the_same_time_of_the_machine(policy: str) -> None:
    """Many short prompts and long answers against few long prompts."""
    core = make_core(policy, max_num_seqs=16)
    arrivals = [Arrival(0.0, chat(f"a{index}", 40, "a", output=40)) for index in range(600)]
    arrivals += [Arrival(0.0, chat(f"b{index}", 1500, "b", output=4)) for index in range(200)]
    records = replay(core, arrivals, seconds=20.0)
    costs = report_stats(core.state).token_costs
    assert costs is not None
    served = {"a": 0.0, "b": 0.0}
    for record in records.values():
        request = record.arrival.request
        if record.token_times:
            served[request.tenant] += costs.of(len(request.prompt_token_ids), len(record.token_times))
    assert sum(record.ended is None for record in records.values()) > 100, "neither is done"
    assert served["a"] == pytest.approx(served["b"], rel=0.15)


def test_an_arrival_waits_for_its_own_tenant_only() -> None:
    """Eleven seconds of one tenant's prompts: its next request is refused, the first of another tenant is not."""
    core = make_core(max_queue_time="5s")
    with pytest.raises(QueueFullError):
        for arrival in heavy(1000, length=1000):
            core.add_request(arrival.request, 0.0)
    core.add_request(chat("light", 200, "light"), 0.0)
    with pytest.raises(QueueFullError):
        core.add_request(chat("again", 1000, "heavy"), 0.0)


@pytest.mark.parametrize("policy", ["goodput", "fcfs"])
def test_a_queue_that_one_tenant_fills_has_room_for_another(policy: str) -> None:
    core = make_core(policy, max_num_waiting=10)
    for index in range(10):
        core.add_request(chat(f"heavy{index}", 10, "heavy"), 0.0)
    with pytest.raises(QueueFullError):
        core.add_request(chat("heavy10", 10, "heavy"), 0.0)
    for index in range(5):
        core.add_request(chat(f"light{index}", 10, "light"), 0.0)
    with pytest.raises(QueueFullError):
        core.add_request(chat("light5", 10, "light"), 0.0)


def test_a_tenant_that_was_away_neither_saves_up_nor_sheds_a_debt() -> None:
    core = make_core()
    for index in range(3):
        core.add_request(chat(f"a{index}", 100, "a"), 0.0)
    share = core.state.online_share
    assert not share.is_contested
    core.schedule(0.0)
    core.add_request(chat("b", 100, "b"), 0.1)
    assert share.is_contested
    assert share.by_standing(["a", "b"]) == ["a", "b"], "lifted to the counter of the present tenants"
    core.abort("b", 0.2)
    assert not share.is_contested
