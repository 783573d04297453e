"""Lanes, tenants and jobs in the offline queue: their order, their fairness, and that no tenant starves."""

import math
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from driver import Driver, fake_driver, make_request, small_config
from hypothesis import example, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from integrity import check_core
from support.fuzz import examples, machine_test

from engine.api import EngineRequest, Lane, RequestClass, RequestTimes, SamplingParams, TokenCosts
from engine.errors import QueueFullError
from engine.limits import SchedulerConfig
from engine.loop.watchdog import clear_stall
from engine.request import Request, RequestStatus
from engine.scheduling.fair_share import FairShare
from engine.scheduling.objective import token_costs
from engine.scheduling.offline import whole
from engine.scheduling.queues import LANE_FLOORS, OFFLINE_POLICIES, OfflineQueue
from predictor.model import LatencyModel

BLOCK = 4
WINDOW = 256


def spec(request_id: str, prompt: tuple[int, ...] = (1,) * 8, max_tokens: int = 4, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(request_id, prompt, sampling, RequestClass.OFFLINE, **fields)


def waiting(request: EngineRequest, order: int) -> Request:
    return Request(request, RequestTimes(float(order)), order)


class Feed:
    """A queue with a counter of arrivals; `take` admits the next one, as a step would."""

    def __init__(self, policy: str = "psm", **options: object) -> None:
        self.queue = OfflineQueue(policy, BLOCK, **options)  # type: ignore[arg-type]
        self.count = 0

    def add(self, request: EngineRequest) -> Request:
        made = waiting(request, self.count)
        self.count += 1
        self.queue.add(made)
        return made

    def take(self) -> Request:
        request = next(self.queue.candidates())
        self.queue.remove(request, taken=True)
        request.move_to(RequestStatus.RUNNING)
        return request

    def end(self, request: Request, output: int = 0) -> None:
        request.token_ids.extend([7] * output)
        self.queue.end(request)

    def job_of(self, name: str, lines: int, groups: int = 1, **fields: object) -> None:
        """Lines in groups of equal prefixes."""
        for i in range(lines):
            prompt = (2 + i % groups,) * (2 * BLOCK) + (i,)
            self.add(spec(f"{name}-{i}", job=name, prompt=prompt, **fields))  # type: ignore[arg-type]


# ---- lanes


@pytest.mark.parametrize("policy", OFFLINE_POLICIES)
@pytest.mark.parametrize("groups", [1, 64])
def test_a_flex_request_is_next_beside_a_batch(policy: str, groups: int) -> None:
    """It has no deadline and no sharers: by deadline it was never taken in 5,000 admissions, by prefixes after a
    window of lines."""
    feed = Feed(policy)
    feed.job_of("batch", WINDOW, groups, deadline=1000.0)
    for _ in range(10):
        feed.take()
    feed.add(spec("flex", lane=Lane.FLEX, prompt=(9,) * 9))
    assert feed.take().request_id == "flex"
    assert feed.queue.num_started == {Lane.FLEX: 1, Lane.AT_RISK: 0, Lane.BATCH: 10}
    assert feed.queue.num_waiting[Lane.FLEX] == 0 < feed.queue.num_waiting[Lane.BATCH]


@pytest.mark.parametrize("policy", OFFLINE_POLICIES)
def test_lines_at_risk_go_before_other_lines_and_after_flex(policy: str) -> None:
    feed = Feed(policy)
    feed.job_of("calm", 20, deadline=10.0)
    feed.job_of("late", 3, lane=Lane.AT_RISK, deadline=900.0)
    feed.add(spec("flex", lane=Lane.FLEX))
    assert [feed.take().spec.job for _ in range(4)] == ["", "late", "late", "late"]


def test_lines_at_risk_get_half_of_the_work_beside_endless_flex() -> None:
    """Without a part of their own, a batch would miss its deadline because clients send flex requests."""
    feed = Feed()
    feed.job_of("late", 100, lane=Lane.AT_RISK)
    work: Counter[Lane] = Counter()
    for i in range(150):
        feed.add(spec(f"flex-{i}", lane=Lane.FLEX, prompt=(5,) * 16))
        request = feed.take()
        work[request.spec.lane] += len(request.token_ids) + 4
    assert work[Lane.AT_RISK] == pytest.approx(work[Lane.FLEX], rel=0.2)


def test_batches_keep_their_floor_beside_endless_flex() -> None:
    feed = Feed()
    feed.job_of("late", 50, lane=Lane.AT_RISK)
    feed.job_of("batch", 50)
    taken: Counter[Lane] = Counter()
    for i in range(400):
        feed.add(spec(f"flex-{i}", lane=Lane.FLEX, prompt=(5,) * (2 * BLOCK + 1)))
        taken[feed.take().spec.lane] += 1
    assert taken[Lane.AT_RISK] == 50, "until none is at risk any more"
    floor = LANE_FLOORS[Lane.BATCH]
    assert taken[Lane.BATCH] >= math.floor(400 * floor * (1 - 2 * floor)) - 1
    assert taken[Lane.FLEX] > 2 * (taken[Lane.AT_RISK] + taken[Lane.BATCH])


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_no_lane_starves(data: st.DataObject) -> None:
    """Whatever arrives above it, a request that waits is admitted before 8 times its price, and that of the dearest
    other, was spent on the lanes above."""
    feed = Feed(data.draw(st.sampled_from(OFFLINE_POLICIES)))
    lengths = st.integers(1, 60)
    victim = feed.add(spec("victim", lane=Lane.BATCH, prompt=(3,) * data.draw(lengths)))
    spent, dearest = 0, len(victim.token_ids)
    for i in range(400):
        length = data.draw(lengths) if i < 40 else 1 + i % 60
        lane = Lane.AT_RISK if (i * 7) % 3 == 0 else Lane.FLEX
        feed.add(spec(str(i), lane=lane, prompt=(4,) * length, tenant=str(i % 3)))
        request = feed.take()
        if request is victim:
            break
        spent += len(request.token_ids)
        dearest = max(dearest, len(request.token_ids))
        assert spent <= len(victim.token_ids) / LANE_FLOORS[Lane.BATCH] + dearest
    else:
        pytest.fail("a line was never admitted")


# ---- tenants and jobs


@given(
    charges=st.lists(st.tuples(st.booleans(), st.floats(0.1, 10.0)), min_size=1, max_size=200),
    keys=st.integers(2, 5),
)
def test_counters_of_those_who_have_work_stay_together(charges: list[tuple[bool, float]], keys: int) -> None:
    share = FairShare()
    names = [str(i) for i in range(keys)]
    for name in names:
        share.enter(name)
    for _, cost in charges:
        share.charge(min(names, key=share.standing), cost)
        services = [share.service(name) for name in names]
        assert max(services) - min(services) <= max(c for _, c in charges) + 1e-9


def test_nobody_saves_service_up_or_sheds_a_debt() -> None:
    share = FairShare()
    share.enter("a")
    share.charge("a", 100.0)
    share.enter("b")
    assert share.service("b") == 100.0, "a tenant that arrives is lifted to the least counter of the present tenants"
    share.charge("b", 50.0)
    share.leave("b")
    share.enter("b")
    assert share.service("b") == 150.0, "leaving and coming back pays no debt"
    share.leave("a")
    share.leave("b")
    share.enter("c")
    assert share.service("c") == 0.0, "without tenants there is no debt"


@pytest.mark.slow
@given(
    policy=st.sampled_from(OFFLINE_POLICIES),
    backlog=st.integers(30, 200),
    seed=st.integers(0, 2**32 - 1),
    concurrency=st.integers(1, 16),
)
@example("psm", 200, 1, 16)
@settings(max_examples=examples(50), deadline=None)
def test_two_tenants_with_unequal_backlogs_get_equal_service(
    policy: str, backlog: int, seed: int, concurrency: int
) -> None:
    """Measured in what requests really cost, while both have work waiting, in any order of ends. The bound: a charge is
    a guess until its request ends, so each request that runs may be wrong by its price, and the last choice by one."""
    generator = random.Random(seed)
    feed = Feed(policy, costs=TokenCosts(1.0, 3.0))
    outputs: dict[str, int] = {}
    for tenant, lines in (("heavy", 5 * backlog), ("light", backlog)):
        longest = 60 if tenant == "light" else 30
        for i in range(lines):
            name = f"{tenant}-{i}"
            outputs[name] = generator.randrange(1, 12 if tenant == "heavy" else 30)
            prompt = tuple(generator.randrange(3) for _ in range(generator.randrange(1, longest)))
            feed.add(spec(name, tenant=tenant, job=f"{tenant}{i % 3}", prompt=prompt, max_tokens=40))
    left = {"heavy": 5 * backlog, "light": backlog}
    service = Counter[str]()
    running: list[Request] = []
    dearest = 60.0 + 3.0 * 30
    while all(left.values()):
        while len(running) < concurrency and all(left.values()):
            request = feed.take()
            left[request.spec.tenant] -= 1
            running.append(request)
        request = running.pop(generator.randrange(len(running)))
        service[request.spec.tenant] += request.num_prompt_tokens + 3 * outputs[request.request_id]
        feed.end(request, outputs[request.request_id])
        assert abs(service["heavy"] - service["light"]) <= dearest * (2 * concurrency + 1)


def test_jobs_of_a_tenant_share_and_each_keeps_its_prefix_order() -> None:
    feed = Feed(utility=0.99)
    feed.job_of("a", 60, groups=4)
    feed.job_of("b", 60, groups=4)
    order = [feed.take() for _ in range(80)]
    taken = Counter(request.spec.job for request in order)
    assert abs(taken["a"] - taken["b"]) <= 1
    for job in "ab":
        prefixes = [request.token_ids[0] for request in order if request.spec.job == job]
        same = sum(x == y for x, y in pairwise(prefixes))
        assert same >= len(prefixes) - 8, "neighbours of a job share their prefix"


def test_by_deadline_a_tenants_most_urgent_job_goes_first_but_tenants_share() -> None:
    feed = Feed("deadline")
    feed.job_of("a-late", 10, tenant="a", deadline=100.0)
    feed.job_of("a-soon", 10, tenant="a", deadline=50.0)
    feed.job_of("b-last", 20, tenant="b", deadline=999.0)
    order = [feed.take().spec.job for _ in range(20)]
    assert order.count("b-last") == 10
    assert [job for job in order if job != "b-last"] == ["a-soon"] * 10


def test_costs_come_from_the_latency_model() -> None:
    config = SchedulerConfig(num_units=64, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128)
    model = LatencyModel(intercept=0.01, decode_context=1e-6, knots=(0,), hinges=(1e-4,))
    costs = token_costs(model, config)
    assert costs.prefill == pytest.approx((0.01 + 128e-4) / 128)
    assert costs.decode == pytest.approx((0.01 + 8e-4 + 8 * 512e-6) / 8)
    assert costs.of(10, 2) == pytest.approx(10 * costs.prefill + 2 * costs.decode)
    assert token_costs(None, config) == (1.0, 1.0)


class QueueMachine(RuleBasedStateMachine):
    """Arrivals, admissions, preemptions, aborts and ends in any order; a dictionary per state is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.feed: Feed | None = None
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}

    @precondition(lambda self: self.feed is None)
    @rule(policy=st.sampled_from(OFFLINE_POLICIES))
    def begin(self, policy: str) -> None:
        self.feed = Feed(policy)

    @precondition(lambda self: self.feed is not None)
    @rule(
        lane=st.sampled_from(Lane),
        tenant=st.sampled_from("abc"),
        job=st.sampled_from("xy"),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    )
    def arrive(self, lane: Lane, tenant: str, job: str, prompt: list[int]) -> None:
        assert self.feed is not None
        name = str(self.feed.count)
        self.waiting[name] = self.feed.add(spec(name, lane=lane, tenant=tenant, job=job, prompt=tuple(prompt)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        """Not always the first: a step may pass over some."""
        assert self.feed is not None
        order = list(self.feed.queue.candidates())
        request = order[data.draw(st.integers(0, min(3, len(order) - 1)))]
        self.feed.queue.remove(request, taken=True)
        request.move_to(RequestStatus.RUNNING)
        self.running[request.request_id] = self.waiting.pop(request.request_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        assert self.feed is not None
        request = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        request.move_to(RequestStatus.PREEMPTED)
        self.feed.queue.add(request)
        self.waiting[request.request_id] = request

    @precondition(lambda self: self.running)
    @rule(data=st.data(), output=st.integers(0, 4))
    def finish(self, data: st.DataObject, output: int) -> None:
        assert self.feed is not None
        self.feed.end(self.running.pop(data.draw(st.sampled_from(sorted(self.running)))), output)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.feed is not None
        request = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.feed.queue.remove(request)
        self.feed.queue.end(request)

    @invariant()
    def everything_is_offered_once_and_looking_changes_nothing(self) -> None:
        if self.feed is None:
            return
        queue = self.feed.queue
        order = [request.request_id for request in queue.candidates()]
        assert sorted(order) == sorted(self.waiting) and len(queue) == len(self.waiting)
        assert order == [request.request_id for request in queue.candidates()]
        assert sorted(request.request_id for request in queue) == sorted(self.waiting)
        lanes = Counter(request.spec.lane for request in self.waiting.values())
        assert all(len(queue._lanes[lane]) == lanes[lane] for lane in Lane)

    @invariant()
    def nothing_is_kept_of_what_has_ended(self) -> None:
        if self.feed is None or self.waiting or self.running:
            return
        queue = self.feed.queue
        assert not queue._charged and not any(lane.tenants or lane.preempted for lane in queue._lanes.values())


TestQueueMachine = machine_test(QueueMachine, 60, 50)


# ---- in the engine


def make_driver(policy: str, rows: int = 8) -> Driver:
    limits = {"max_num_seqs": rows, "max_num_batched_tokens": 64, "max_num_waiting": 12}
    return fake_driver(small_config(200, max_model_len=256, **limits), 64, offline_policy=policy)


def test_running_flex_gets_its_share_of_a_step_before_batch_lines() -> None:
    driver = make_driver("psm")
    driver.add(*[spec(f"line-{i}", job="batch", max_tokens=20) for i in range(6)])
    for _ in range(3):
        driver.step()
    driver.add(spec("flex", lane=Lane.FLEX))
    driver.step()
    plan = whole(driver.core.plan_offline(driver.now))
    assert plan.chunks[0].request_id == "flex" and len(plan.chunks) > 5
    driver.run()


def test_flex_keeps_its_room_longer_than_batch_lines() -> None:
    """Online work evicts batch lines first, however seldom flex was evicted and however small it is."""
    driver = make_driver("psm", rows=4)
    driver.add(spec("flex", lane=Lane.FLEX, prompt=(9,) * 4, max_tokens=30))
    driver.add(*[spec(f"line-{i}", job="batch", prompt=(i,) * 40, max_tokens=30) for i in range(3)])
    while not all(driver.outputs[f"line-{i}"] for i in range(3)):
        driver.step()
    driver.add(make_request("chat", [7] * 8, max_tokens=2))
    while not driver.outputs["chat"]:
        driver.step()
    assert driver.stats().preemptions == {"online": 1}
    assert driver.stats().job_tokens == {"batch": sum(len(driver.outputs[f"line-{i}"]) for i in range(3))}
    assert {r.request_id for r in driver.core.state.waiting_offline} < {f"line-{i}" for i in range(3)}
    driver.run()


def test_accounts_survive_that_the_queues_are_built_anew() -> None:
    driver = make_driver("psm", rows=4)
    driver.add(*[spec(f"line-{i}", job=f"job{i % 2}", tenant=f"t{i % 3}", max_tokens=6) for i in range(12)])
    for _ in range(4):
        driver.step()
    driver.add(make_request("chat", [7] * 200, max_tokens=40))
    driver.step()
    assert not driver.in_flight
    clear_stall(driver.core, driver.now, 1)
    check_core(driver.core)
    driver.run()
    assert len(driver.finals) == 13
    assert not any(lane.tenants for lane in driver.core.state.waiting_offline._lanes.values())


def test_flex_requests_that_wait_are_bounded_and_no_tenant_takes_anothers_part() -> None:
    driver = make_driver("psm")

    def add(tenant: str, most: int) -> int:
        for i in range(most):
            try:
                driver.add(spec(f"{tenant}-{i}", lane=Lane.FLEX, tenant=tenant))
            except QueueFullError as error:
                assert error.retry_after > 0
                return i
        return most

    assert add("heavy", 1500) == 12
    assert add("light", 1500) == 6, "a half is the other's, though the queue is full"
    assert add("third", 1500) == 4
    driver.add(*[spec(f"line-{i}", job="batch") for i in range(40)])
    driver.run()
    assert add("heavy2", 3) == 3
    driver.run()


def test_equal_prefixes_of_different_jobs_of_a_tenant_meet_in_the_cache() -> None:
    """Three jobs hold the same 16 prefixes, two lines each, in different orders; the cache holds four prefixes."""

    def hit_tokens(tenants: str) -> int:
        config = small_config(60, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64)
        driver, rng = fake_driver(config, 64), random.Random(1)
        for job, tenant in enumerate(tenants):
            for prefix in rng.sample(range(16), 16):
                for line in range(2):
                    prompt = (2 + prefix,) * (12 * BLOCK) + (100 + line, 200 + job)
                    driver.add(spec(f"{job} {prefix} {line}", prompt=prompt, job=str(job), tenant=tenant))
        driver.run()
        return driver.stats().prefix_hit_tokens

    assert hit_tokens("aaa") > 1.15 * hit_tokens("abc") > 0
