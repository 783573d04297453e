"""The order of prompts, and which prompts are refused: as many as possible in time, none for ever, an honest 429."""

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import hypothesis.strategies as st
import pytest
from driver import fake_driver, make_request, small_config
from hypothesis import given

from engine.api import EngineRequest, RequestTimes, SamplingParams
from engine.core import EngineCore
from engine.errors import ConfigError, QueueFullError
from engine.limits import UNLIMITED_QUEUE, QueueTime, SchedulerConfig
from engine.request import Request
from engine.scheduling import urgency
from engine.scheduling.admission import expected_wait, longest_wait
from engine.scheduling.objective import StepLedger, StepObjective
from engine.scheduling.offline import offline_allowance
from engine.scheduling.report import report_stats
from engine.scheduling.urgency import on_time, prefill_pace
from engine.virtual import Arrival, PredictedRunner, VirtualDriver, VirtualRecord
from loadgen.simulation.policies import find_policy
from predictor.budget import BudgetParams
from predictor.features import LatencyPredictor
from predictor.model import LatencyModel
from predictor.online import OnlineModel

# 8 ms a step, a knee at 128 tokens, 20 to 220 us a token: 12,000 tokens take 2.3 s in steps of 512.
MODEL = LatencyModel(
    intercept=0.008,
    decodes=2e-5,
    decode_context=4e-7,
    prefill_chunks=2e-4,
    knots=(0, 128),
    hinges=(2e-5, 2e-4),
    token_limit=600,
)
LAPTOP = LatencyModel(intercept=0.05, decodes=1e-3, decode_context=1e-6, prefill_tokens=2e-3)
"""500 prompt tokens a second."""
URGENT_POLICIES = ("goodput", "goodput-strict", "apt")
OBJECTIVE = StepObjective(1.0, 0.1, budget=BudgetParams("tidemill", 0.08))


def make_core(
    policy: str, model: LatencyPredictor = MODEL, objective: StepObjective = OBJECTIVE, **changes: Any
) -> EngineCore:
    config = replace(SchedulerConfig(2 * 4000, 16384), **changes)
    return EngineCore(config, online_policy=find_policy(policy), model=model, objective=objective)


def chat(name: str, length: int, first: int, output: int = 5) -> EngineRequest:
    return EngineRequest(name, (first, *([1] * (length - 1))), SamplingParams(max_tokens=output))


def replay(core: EngineCore, arrivals: list[Arrival], model: LatencyModel = MODEL) -> dict[str, VirtualRecord]:
    run = VirtualDriver(core, PredictedRunner(model), arrivals).run(1000.0)
    return {record.arrival.request.request_id: record for record in run.online}


class Clock:
    """Runs a core step by step; `now` in seconds."""

    def __init__(self, core: EngineCore) -> None:
        self.now = 0.0
        self._core = core
        self._runner = PredictedRunner(MODEL)

    def is_past(self, at: float) -> bool:
        return self.now >= at

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            output = self._core.schedule(self.now)
            assert output is not None
            result = self._runner.launch(output)()
            self.now += result.latency
            self._core.update(output, result, self.now)


def long_and_short() -> list[Arrival]:
    """12,000 tokens, then ten chats a second for four seconds."""
    shorts = [Arrival(0.1 * (index + 1), chat(f"short{index}", 60, 2 + index)) for index in range(40)]
    return [Arrival(0.0, chat("long", 12_000, 1)), *shorts]


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.01, 4.0)), max_size=8), st.sampled_from([0.0, 1.0]))
def test_on_time_leaves_out_as_few_as_possible(jobs: list[tuple[float, float]], begin: float) -> None:
    jobs.sort(key=lambda job: job[0])

    def feasible(chosen: tuple[tuple[float, float], ...]) -> bool:
        end = begin
        for due, work in chosen:
            end += work
            if end > due:
                return False
        return True

    best = next(size for size in range(len(jobs), -1, -1) if any(map(feasible, combinations(jobs, size))))
    taken = on_time(jobs, begin)
    assert sum(taken) == best
    assert feasible(tuple(job for job, kept in zip(jobs, taken, strict=True) if kept))


@pytest.mark.parametrize("policy", URGENT_POLICIES)
def test_a_long_prompt_makes_nobody_late_and_nobody_refused(policy: str) -> None:
    alone = replay(make_core(policy), long_and_short()[:1])["long"].ttft
    records = replay(make_core(policy), long_and_short())
    long = records.pop("long")
    assert not any(record.rejected for record in records.values())
    assert all(record.ttft is not None and record.ttft < 0.5 for record in records.values())
    assert alone is not None and long.ttft is not None and long.ttft < 1.2 * alone


def test_in_order_of_arrival_the_short_ones_wait_and_only_the_objective_itself_refuses_them() -> None:
    waited = replay(make_core("fcfs"), long_and_short())
    assert not any(record.rejected for record in waited.values())
    late = [record for record in waited.values() if record.ttft is not None and record.ttft > 1.0]
    assert len(late) > 10
    strict = make_core("fcfs", max_queue_time="1x")
    refused = [record for record in replay(strict, long_and_short()).values() if record.rejected]
    assert len(refused) > 5
    assert strict.state.counters.refused_requests == len(refused)


@pytest.mark.parametrize("policy", URGENT_POLICIES)
@pytest.mark.parametrize("tokens", [64, 512])
def test_urgent_prompts_without_end_never_stop_the_long_one(policy: str, tokens: int) -> None:
    """Short ones come as fast as they are computed. A step of 64 tokens has room for one floor chunk only."""
    core = make_core(policy, max_num_batched_tokens=tokens, max_queue_time=UNLIMITED_QUEUE)
    core.add_request(chat("long", 4_000, 1), 0.0)
    runner, now, index = PredictedRunner(MODEL), 0.0, 0
    longest = since = 0
    while "long" in core.state.requests and core.state.requests["long"].num_output_tokens == 0:
        while len(core.state.waiting_online) < 20:
            index += 1
            core.add_request(chat(f"short{index}", 100, index, output=1), now)
        output = core.schedule(now)
        assert output is not None
        progress = core.state.requests["long"].num_computed_tokens
        result = runner.launch(output)()
        now += result.latency
        core.update(output, result, now)
        since = 0 if progress and core.state.requests["long"].last_step == output.step_id else since + 1
        longest = max(longest, since)
    assert longest <= (12 if tokens == 64 else 2), "it had a chunk in nearly every step, or every eighth"


def test_who_starts_first_leaves_the_memory_of_a_prompt_in_progress_alone() -> None:
    """The long prompt holds its first blocks only; urgent ones may not take the room of the others."""
    config = small_config(50, max_model_len=200, max_num_seqs=64, max_num_batched_tokens=40, min_prefill_chunk=8)
    model = LatencyModel(intercept=0.01, prefill_tokens=1e-3)
    driver = fake_driver(config, 40, online_policy="goodput", model=model, objective=StepObjective(0.1, 1.0))
    driver.add(make_request("long", [1] * 120, 4))
    driver.step()
    index = 0
    while "long" not in driver.finals:
        if len(driver.core.state.waiting_online) < 4:
            driver.add(make_request(f"short{index}", [2 + index % 30] * 30, 4))
            index += 1
        driver.step()
    assert driver.finals["long"].num_preemptions == 0
    driver.run()


def test_a_burst_of_16_prompts_waits_on_a_laptop_instead_of_being_refused() -> None:
    core = make_core("goodput", model=LAPTOP, num_units=2 * 600, max_model_len=2048)
    burst = [Arrival(0.0, chat(f"{index}", 256, 1 + index)) for index in range(16)]
    records = replay(core, burst, LAPTOP)
    assert not any(record.rejected for record in records.values())
    assert core.state.counters.refused_requests == 0


@pytest.mark.parametrize(("policy", "rate"), [("fcfs", 3.0), ("larry", 1.0), ("goodput", 3.0), ("apt", 1.0)])
def test_accepted_requests_start_within_the_maximum_wait_when_memory_is_short(policy: str, rate: float) -> None:
    """A burst of 60 on a pool of 2,048 tokens while further chats arrive: waits, and gaps of preempted answers."""
    generator = random.Random(1)
    model = replace(MODEL, intercept=0.015, decodes=1e-3)
    times = [10.0] * 60 + [index / rate for index in range(round(60 * rate))]
    arrivals = [
        Arrival(at, chat(f"{index}", generator.randint(40, 200), index, output=generator.randint(60, 150)))
        for index, at in enumerate(sorted(times))
    ]
    core = make_core(policy, model=model, num_units=2 * 128, max_model_len=1024, max_queue_time="10s")
    served = [record for record in replay(core, arrivals, model).values() if not record.rejected]
    assert len(served) > 0.6 * len(arrivals) and all(record.ended is not None for record in served)
    assert max(record.ttft or math.inf for record in served) < 1.25 * 10.0
    assert max(max(record.gaps) for record in served) < 1.25 * 10.0


@pytest.mark.parametrize("slower", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("first", [1900, 0])
def test_a_short_burst_on_a_fresh_server_is_served_whatever_its_profile_says(slower: float, first: int) -> None:
    """A profile measured beside other work is several times too slow, and has a large error."""
    true = LAPTOP.scaled(0.5)
    believed = OnlineModel(true.scaled(slower), 0.4)
    lengths = [first] * (first > 0) + [60] * (31 if first else 16)
    burst = [Arrival(0.01 * index, chat(f"{index}", length, index, 64)) for index, length in enumerate(lengths)]
    core = make_core("goodput", model=believed, max_queue_time="10x")
    run = VirtualDriver(core, PredictedRunner(true, ((0.7, 1.0, 1.5),), believed.observe), burst).run(1000.0)
    assert not any(record.rejected for record in run.online)
    assert max(record.ttft or math.inf for record in run.online) < 10.0


def test_what_the_prefix_cache_holds_is_no_work() -> None:
    """Eight turns of long chats whose pasts are cached are a few tokens each, and one that comes then is taken."""

    def refused(cached: bool) -> int:
        core = make_core("goodput", max_queue_time="1x", num_units=2 * 8000)
        turns = [EngineRequest(f"{i}", (i,) * 4_000, SamplingParams(max_tokens=2)) for i in range(12)]
        at = 0.0
        if cached:
            for index, turn in enumerate(turns):
                core.add_request(EngineRequest(f"past{index}", turn.prompt_token_ids, turn.sampling), at)
                while core.has_requests:
                    output = core.schedule(at)
                    assert output is not None
                    result = PredictedRunner(MODEL).launch(output)()
                    at += result.latency
                    core.update(output, result, at)
        for turn in turns:
            with contextlib.suppress(QueueFullError):
                core.add_request(turn, at)
        return core.state.counters.refused_requests

    assert refused(cached=False) > 5
    assert refused(cached=True) == 0


def test_after_the_time_to_retry_it_fits() -> None:
    core = make_core("goodput", max_queue_time="2s")
    clock = Clock(core)
    with pytest.raises(QueueFullError) as refused:
        for index in range(100):
            core.add_request(chat(f"{index}", 4_000, index), clock.now)
    retry = refused.value.retry_after
    assert 0.0 < retry < 2.0, "each takes 0.8 s"
    assert "the longest time to wait is 2 s" in refused.value.message
    clock.run_until(partial(clock.is_past, retry))
    core.add_request(chat("again", 4_000, 999), clock.now)


@pytest.mark.parametrize("rows", [2, 64])
def test_a_full_queue_says_when_it_has_a_place(rows: int) -> None:
    """The first that waits starts once the prompts before it are done, or a row comes free."""
    core = make_core("goodput", max_num_waiting=6, max_num_seqs=rows)
    clock = Clock(core)
    for index in range(20):
        core.add_request(chat(f"past{index}", 60, index, output=20), clock.now)
        clock.run_until(lambda: not core.has_requests)
    with pytest.raises(QueueFullError, match="are waiting already") as refused:
        for index in range(100):
            core.add_request(chat(f"{index}", 2_000, 100 + index, output=20), clock.now)
    retry, at = refused.value.retry_after, clock.now
    clock.run_until(lambda: sum(report_stats(core.state).waiting.values()) < 6)
    assert clock.now - at == pytest.approx(retry, rel=0.5, abs=0.1)
    assert retry != 1.0, "that is the default"


def test_an_urgent_arrival_waits_only_for_those_before_it() -> None:
    """Ten seconds of late work are behind a chat that can be served at once; another long prompt is refused."""
    core = make_core("goodput", max_queue_time="5s")
    for index in range(3):
        core.add_request(chat(f"long{index}", 12_000, index), 0.0)
    clock = Clock(core)
    clock.run_until(partial(clock.is_past, 1.5))
    core.add_request(chat("short", 60, 50), clock.now)
    with pytest.raises(QueueFullError):
        core.add_request(chat("long3", 12_000, 51), clock.now)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*URGENT_POLICIES, "fcfs"])
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 40), st.sampled_from("ab"), st.integers(0, 3)), max_size=12
    ),
    rows=st.integers(1, 6),
)
def test_no_wait_is_longer_than_behind_everybody(
    policy: str, arrivals: list[tuple[int, int, str, int]], rows: int
) -> None:
    """A request admitted without an order would be admitted with one; first come first served both waits are equal."""
    core = make_core(policy, num_units=2 * 500, max_num_seqs=rows, max_queue_time=UNLIMITED_QUEUE)
    runner, at = PredictedRunner(MODEL), 0.0
    for index, (length, output, tenant, steps) in enumerate(arrivals):
        core.add_request(replace(chat(f"{index}", length, index, output), tenant=tenant), at)
        for _ in range(steps):
            if (step := core.schedule(at)) is not None:
                result = runner.launch(step)()
                at += result.latency
                core.update(step, result, at)
    arrival = Request(replace(chat("new", 100, 99), tenant="a"), RequestTimes(at), 99)
    core.state.mean_output = 10.0
    wait, longest = expected_wait(core.state, arrival, at), longest_wait(core.state, arrival)
    assert wait <= longest * (1.0 + 1e-9)
    if policy == "fcfs":
        contested = any(request.spec.tenant != "a" for request in core.state.requests.values())
        assert contested or wait == pytest.approx(longest)


@pytest.mark.parametrize(
    ("text", "ttft", "limit"),
    [
        ("10x", 2.0, 20.0),
        ("1x", 0.5, 0.5),
        ("5s", 0.1, 5.0),
        ("500ms", 9.0, 0.5),
        ("2m", 1.0, 120.0),
        ("none", 1.0, math.inf),
        *((text, 1.0, None) for text in ("", "x", "5", "0x", "-1s", "1h", "inf", "nan s")),
    ],
)
def test_the_longest_time_to_wait_is_stated_in_time_or_objectives(text: str, ttft: float, limit: float | None) -> None:
    with pytest.raises(ConfigError, match="max-queue-time") if limit is None else contextlib.nullcontext():
        assert QueueTime.parse(text).longest(ttft) == pytest.approx(limit)


@pytest.mark.parametrize("ttft", [3.0, 300.0])
def test_the_slack_of_a_long_queue_is_that_of_its_requests(ttft: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By columns and one by one, with prompts in progress and prompts of many chunks."""
    objective = StepObjective(ttft, 0.1, budget=BudgetParams("tidemill", 0.08))
    core = make_core("goodput", objective=objective, max_num_seqs=4, num_units=2 * 300, max_queue_time=UNLIMITED_QUEUE)
    clock, spare = Clock(core), set()
    for index in range(150):
        core.add_request(chat(f"{index}", 1 + index * 37 % 900, index, output=40), 0.0)
    for _ in range(30):
        end = clock.now + 0.02
        clock.run_until(partial(clock.is_past, end))
        both = []
        for few in (0, 10_000):
            monkeypatch.setattr(urgency, "FEW", few)
            both.append(urgency.prompt_slack(core.state, partial(prefill_pace, core.state), clock.now))
        assert both[0] == pytest.approx(both[1], abs=1e-9)
        spare.add(both[0] > 0.0)
    assert len(core.state.waiting_online) > 64 and spare == {ttft > 30.0}


def test_offline_work_leaves_the_last_prompt_its_time_too() -> None:
    """Ten prompts wait, in all for 0.9 s of work: the first can lose nearly its whole objective, the last next to
    none of it."""
    model = LatencyModel(intercept=0.0, knots=(0,), hinges=(0.001,), token_limit=256)
    config = SchedulerConfig(num_units=2000, max_model_len=1000, max_num_batched_tokens=256)
    objective = StepObjective(ttft=1.0, tbt=math.inf)
    limits = []
    for count in (1, 10):
        core = EngineCore(config, model=model, objective=objective)
        for i in range(count):
            core.add_request(make_request(f"p{i}", [i + 1] * 90, 4), 0.0)
        pace = partial(prefill_pace, core.state)
        limits.append(offline_allowance(core.state, StepLedger(256, 64, model), 0, True, 0.0, pace).limit)
    assert limits[0] == pytest.approx((1.0 - 0.09) / 2, abs=0.01)
    assert limits[1] == pytest.approx((1.0 - 0.90) / 2, abs=0.01)
