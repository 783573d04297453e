"""Co-location: the room of a step beside online work, at no cost for online requests."""

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from driver import Driver, make_request
from fakes.runner import FakeRunner, features_of, solo, solo_tokens
from hypothesis import HealthCheck, given
from support.fuzz import fuzz

from engine.api import EngineRequest, RequestClass
from engine.errors import QueueFullError
from engine.limits import SchedulerConfig
from engine.request import RequestStatus
from engine.scheduling.objective import StepObjective
from engine.scheduling.offline import whole
from engine.scheduling.output import SchedulerOutput
from engine.scheduling.urgency import FLOOR_SHARE, floor_chunk
from predictor.budget import BudgetParams
from predictor.features import BatchFeatures
from predictor.model import LatencyModel
from predictor.online import OnlineModel

VOCAB = 40
BLOCK = 4
# 10 ms for any step, then 1 ms a token beyond 8 tokens: a memory-bound floor with a knee.
MODEL = LatencyModel(intercept=0.010, decode_context=1e-6, knots=(8,), hinges=(0.001,), token_limit=256)
ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


def flat(budget: float, **limits: float) -> StepObjective:
    return StepObjective(budget=BudgetParams("hygen", budget), **limits)


CONFIG = SchedulerConfig(2 * 60, 120, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=64, min_prefill_chunk=8)


def make_driver(objective: StepObjective, *, depth: int = 0, **changes: Any) -> Driver:
    config = replace(CONFIG, pipeline_depth=depth, **changes)
    return Driver(FakeRunner(block_size=BLOCK, vocab_size=VOCAB), config, model=MODEL, objective=objective)


def chunks_of(driver: Driver, step: SchedulerOutput, prefix: str) -> list[int]:
    """Lengths of the step's chunks of requests whose id starts with `prefix`; call before the step is updated."""
    flight = next(f for f in driver.core.state.in_flight if f.output is step)
    pairs = zip(flight.requests, step.chunks, strict=True)
    return [chunk.length for request, chunk in pairs if request.request_id.startswith(prefix)]


def launched(driver: Driver, prefix: str) -> int:
    """Launch a step; return its tokens of requests whose id starts with `prefix`."""
    assert driver.launch()
    return sum(chunks_of(driver, driver.steps[-1], prefix))


def decoding_driver(objective: StepObjective, **changes: Any) -> Driver:
    """One online request in the middle of its output."""
    driver = make_driver(objective, **changes)
    driver.add(make_request("on", range(6), 60))
    for _ in range(3):
        driver.step()
    return driver


def test_adapters_of_decodes_leave_less_to_offline_work() -> None:
    """Each is charged once, and tokens under any, before prompts are sized."""
    model = replace(MODEL, adapters=0.003, adapted_tokens=0.0005)
    config = make_driver(flat(0.020)).core.config
    driver = Driver(FakeRunner(block_size=BLOCK, vocab_size=VOCAB), config, model=model, objective=flat(0.020))
    for index, adapter in enumerate((7, 7)):
        driver.add(replace(make_request(f"on{index}", range(6), 60), adapter=adapter))
    for _ in range(3):
        driver.step()
    driver.add(make_request("off", range(100), 5, request_class=OFFLINE))
    assert launched(driver, "off") == 11, "of 15: 3 ms for the adapter, 1 ms for its tokens"
    step = driver.steps[-1]
    assert (step.features.adapters, step.features.adapted_tokens) == (1, 2)
    assert step.predicted_latency == pytest.approx(model.predict(features_of(step)))
    assert step.predicted_latency is not None and step.predicted_latency <= 0.020


def test_offline_fills_up_to_the_budget_and_not_beyond() -> None:
    driver = decoding_driver(flat(0.020))
    driver.add(make_request("off", range(100), 5, request_class=OFFLINE))
    assert launched(driver, "off") == 16, "8 free tokens with the decode, then 1 ms each"
    step = driver.steps[-1]
    assert chunks_of(driver, step, "on") == [1]
    assert step.predicted_latency == pytest.approx(MODEL.predict(features_of(step)))
    assert step.predicted_latency is not None and step.predicted_latency <= 0.020


def test_without_a_plan_a_step_is_online_only() -> None:
    driver = decoding_driver(flat(0.020))
    driver.add(make_request("off", range(50), 5, request_class=OFFLINE))
    output = driver.core.schedule(driver.now, None)
    assert output is not None and len(output.chunks) == 1


def test_a_prompt_that_is_cut_for_the_decodes_leaves_room_for_offline_work() -> None:
    """The plan expects the part of a prompt that the step will take, not all missing tokens."""
    driver = decoding_driver(flat(0.020, tbt=0.020))
    lines = [make_request(f"off-{i}", [i, i], 5, request_class=OFFLINE) for i in range(9)]
    driver.add(make_request("chat", range(70), 5), *lines)
    assert launched(driver, "chat") == 12, "what fits into 0.8 of the TBT limit beside the decode"
    assert sum(chunks_of(driver, driver.steps[-1], "off")) == 4, "up to the limit"


def test_banked_slack_may_delay_the_mean_but_not_one_gap() -> None:
    driver = decoding_driver(StepObjective(tbt=0.1))
    request = driver.core.state.requests["on"]
    assert request.times.first_token is not None and request.times.last_token is not None
    (gap,) = StepObjective(tbt=0.1).token_deadlines([request])
    (mean,) = StepObjective(tbt=0.1, gap_limited=False).token_deadlines([request])
    assert gap == pytest.approx(request.times.last_token + 0.1)
    assert mean == pytest.approx(request.times.first_token + 0.1 * request.num_output_tokens)
    assert mean > gap, "it has been faster than it had to be"


@pytest.mark.parametrize(("limit", "tokens"), [(math.inf, 64), (0.130, 64), (0.100, 44), (0.060, 12), (0.001, BLOCK)])
def test_the_floor_chunk_follows_the_time_that_steps_are_expected_to_take(limit: float, tokens: int) -> None:
    """34 decodes take 36 ms, and every token of a prompt 1 ms. The margin of the model for steps that vary
    is not kept free of it, or prompts would stand still on a machine whose speed changes: only a fifth of the limit."""
    model = OnlineModel(MODEL, 0.25)
    beside = BatchFeatures()
    beside.add_decodes(34, 0)
    config = SchedulerConfig(num_units=8, max_model_len=8, block_size=BLOCK)
    assert floor_chunk(model, beside, limit, config) == tokens
    assert model.expected_prefill(beside, 0.0, 64, 0) == 0
    if BLOCK < tokens < config.min_prefill_chunk:
        assert model.max_prefill(beside, limit - model.predict(beside), 64, 0) < tokens, "with the margin"
        beside.add_chunk(0, tokens)
        assert model.expected(beside) <= FLOOR_SHARE * limit < model.expected(beside) + 0.001


def test_decodes_slow_down_prompts_but_never_stop_the_oldest() -> None:
    """The decode beside it leaves hardly any time: the oldest prompt still gets a block in every step."""
    driver = decoding_driver(flat(0.001, tbt=0.0105))
    prompt = make_request("prompt", range(80), 2)
    driver.add(prompt)
    assert launched(driver, "prompt") == BLOCK
    driver.complete()
    driver.run()
    assert driver.outputs["prompt"] == solo_tokens(list(range(80)), prompt.sampling, VOCAB)


@pytest.mark.parametrize(
    ("ttft", "least", "most"),
    [
        (math.inf, 0.022, 0.024),
        (10.0, 0.022, 0.024),
        (0.13, 0.025, 0.027),
        (0.12, 0.028, 0.030),
        (0.05, 0.022, 0.024),
    ],
)
def test_prompts_are_sized_by_the_slack_of_the_decodes_beside_them(ttft: float, least: float, most: float) -> None:
    """A step takes the least share of the TBT limit with which the prompt is on time; a lost prompt needs no more."""
    driver = decoding_driver(StepObjective(ttft=ttft, tbt=0.030))
    driver.add(make_request("prompt", range(100), 2))
    assert driver.launch()
    step = driver.steps[-1]
    assert step.predicted_latency is not None and least < step.predicted_latency <= most


def test_a_late_decode_does_not_shrink_prompts() -> None:
    driver = decoding_driver(StepObjective(tbt=0.030))
    driver.now += 10.0
    driver.add(make_request("prompt", range(100), 2))
    assert launched(driver, "prompt") == 63, "nothing can be saved: the prompt takes the step"


def test_a_waiting_prompt_with_no_ttft_slack_keeps_offline_out() -> None:
    driver = make_driver(flat(1.0, ttft=0.001), max_num_batched_tokens=32)
    driver.add(make_request("off", range(90), 5, request_class=OFFLINE))
    driver.step()
    driver.add(make_request("on", range(90), 5))
    assert launched(driver, "off") == 0


def test_weight_limits_interference_by_the_number_of_decodes() -> None:
    def offline_tokens(num_online: int, weight: float) -> int:
        objective = StepObjective(budget=BudgetParams("tidemill", 0.060, weight, 1.0, "tbt_mean"))
        driver = make_driver(objective, max_num_seqs=16)
        driver.add(*[make_request(f"on{i}", [i, 1, 2], 40) for i in range(num_online)])
        for _ in range(4):
            driver.step()
        driver.add(make_request("off", range(100), 5, request_class=OFFLINE))
        return launched(driver, "off")

    assert offline_tokens(1, math.inf) > 40
    assert offline_tokens(1, 1.0) > 40, "one decode: a second of it is worth a second of offline work"
    few = offline_tokens(4, 1.0)
    assert 0 < few < 10, "four decodes: the free part of the memory-bound floor only"
    assert offline_tokens(4, 0.0) <= 5


@pytest.mark.parametrize(("share", "tokens"), [(0.5, 11), (0.25, 9), (0.1, 7)])
def test_a_share_is_one_of_the_room_above_the_online_work(share: float, tokens: int) -> None:
    """Of L itself a small share would be less than any step takes: nothing, on a slow device."""
    driver = decoding_driver(flat(0.0182))
    driver.add(make_request("off", range(100), 5, request_class=OFFLINE))
    driver.core.set_offline_share(share)
    assert launched(driver, "off") == tokens


def test_a_share_of_a_budget_beyond_the_tbt_limit_is_one_of_what_the_limit_leaves() -> None:
    """Half of 100 ms was more than the limit itself: a breaker that took a half took nothing."""

    def offline_tokens(share: float) -> int:
        driver = decoding_driver(StepObjective(tbt=0.0182, budget=BudgetParams("hygen", 0.1)))
        driver.add(make_request("off", range(100), 5, request_class=OFFLINE))
        driver.core.set_offline_share(share)
        return launched(driver, "off")

    assert 0 < offline_tokens(0.25) < offline_tokens(0.5) < offline_tokens(1.0)


def test_alone_the_oldest_offline_request_moves_whatever_the_budget() -> None:
    driver = make_driver(flat(0.0001))
    driver.core.set_offline_share(0.0)
    job = make_request("off", range(50), 6, request_class=OFFLINE)
    driver.add(job)
    driver.run()
    assert driver.outputs["off"] == solo_tokens(list(range(50)), job.sampling, VOCAB)


def test_smallest_victim_set() -> None:
    driver = make_driver(StepObjective(), num_units=2 * 30, max_model_len=118, max_num_batched_tokens=200)
    sizes = {"small": 10, "large": 50, "middle": 30}
    driver.add(
        *[make_request(name, [7 + i] * n, 20, request_class=OFFLINE) for i, (name, n) in enumerate(sizes.items())]
    )
    driver.step()
    driver.step()
    driver.add(make_request("on", [3] * 48, 4))
    driver.launch()
    preempted = {r.request_id for r in driver.core.state.requests.values() if r.status is RequestStatus.PREEMPTED}
    assert preempted == {"middle"}, "one victim that is just large enough"


mix = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([ONLINE, OFFLINE]),
        st.lists(st.integers(0, 5), min_size=1, max_size=60),
        st.integers(1, 25),
    ),
    min_size=1,
    max_size=16,
)
objectives = st.builds(
    StepObjective,
    ttft=st.sampled_from([0.001, 0.1, 10.0, math.inf]),
    tbt=st.sampled_from([0.001, 0.012, 0.05, math.inf]),
    gap_limited=st.booleans(),
    budget=st.builds(
        BudgetParams,
        policy=st.just("tidemill"),
        latency_budget=st.sampled_from([0.001, 0.015, 0.05, math.inf]),
        lam=st.sampled_from([0.0, 0.5, 4.0, math.inf]),
        delta=st.sampled_from([1.0, 4.0]),
        rule=st.sampled_from(["flat", "tbt_mean", "tbt_p99", "ttft_mean", "ttft_p99"]),
    ),
)


class Watcher:
    """Checks every step against the promises while it is built."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.scheduler = driver.core.state

    def launch(self) -> None:
        driver, scheduler = self.driver, self.scheduler
        due = [r for r in scheduler.running[ONLINE] if r.num_pending_tokens == 1]
        prompts = [r for r in scheduler.running[ONLINE] if r.num_pending_tokens > 1]
        before = {r.request_id: r.num_preemptions for r in due}
        had_online = scheduler.has_online
        oldest = scheduler.running[OFFLINE][:1] or list(scheduler.waiting_offline)[:1]
        plan = whole(driver.core.plan_offline(driver.now))
        if not driver.launch():
            return
        step = driver.steps[-1]
        in_step = {r.request_id for r in driver.core.state.in_flight[-1].requests}
        config = driver.core.config
        assert step.features.num_tokens <= config.max_num_batched_tokens
        assert len(step.chunks) <= config.max_num_seqs
        waits_for_units = driver.core.state.pool.num_deferred_units > 0
        for request in due:
            assert (
                request.request_id in in_step or request.num_preemptions > before[request.request_id] or waits_for_units
            ), "an online decode was left out"
        if prompts and scheduler.pool.num_available_units > 2 * len(prompts):
            assert any(p.request_id in in_step for p in prompts if p.status is RequestStatus.RUNNING) or not any(
                p.status is RequestStatus.RUNNING for p in prompts
            ), "no prompt moved"
        if not had_online and oldest and not len(driver.core.state.in_flight) > 1:
            assert any(r.request_class is OFFLINE for r in driver.core.state.in_flight[-1].requests)
        assert plan is not None


@pytest.mark.parametrize("depth", [0, 1])
@fuzz(80, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals=mix, objective=objectives, num_blocks=st.integers(22, 40), share=st.sampled_from([0.0, 0.1, 1.0]))
def test_promises_hold_and_outputs_equal_the_solo_run(
    depth: int, arrivals: list[Any], objective: StepObjective, num_blocks: int, share: float
) -> None:
    driver = make_driver(objective, depth=depth, num_units=2 * num_blocks, max_model_len=88, max_num_seqs=5)
    driver.core.set_offline_share(share)
    watcher = Watcher(driver)
    requests: list[EngineRequest] = []
    for index, (steps, request_class, prompt, max_tokens) in enumerate(arrivals):
        request = make_request(str(index), prompt, max_tokens, request_class=request_class)
        try:
            driver.add(request)
        except QueueFullError:
            assert request_class is ONLINE, "offline work is never refused for an objective"
        else:
            requests.append(request)
        for _ in range(steps):
            watcher.launch()
            if driver.in_flight:
                driver.complete()
    for _ in range(5000):
        watcher.launch()
        if not driver.in_flight:
            break
        driver.complete()
    driver.run()
    for request in requests:
        expected = solo(request, VOCAB)
        assert driver.outputs[request.request_id] == expected


def test_online_is_refused_when_its_ttft_is_out_of_reach_and_offline_never_causes_it() -> None:
    driver = make_driver(StepObjective(ttft=0.2), num_units=2 * 400, max_queue_time="1x")
    driver.add(*[make_request(f"off{i}", range(100), 10, request_class=OFFLINE) for i in range(50)])
    accepted = 0
    with pytest.raises(QueueFullError) as refused:
        for index in range(50):
            driver.add(make_request(f"on{index}", range(100), 10))
            accepted += 1
    assert 1 < accepted < 10, "about 100 ms of prompt each: the work ahead counts, its own does not"
    assert refused.value.retry_after > 0
    driver.run()
    driver.add(make_request("later", range(110), 10))
    driver.run()


def test_answers_in_the_way_of_rows_count_as_waiting() -> None:
    driver = make_driver(StepObjective(ttft=0.1), max_num_seqs=1, max_queue_time="1x")
    driver.add(make_request("long", range(4), 100))
    driver.run()
    driver.core.state.mean_output = 100.0
    driver.add(make_request("a", range(4), 100))
    driver.step()
    with pytest.raises(QueueFullError):
        driver.add(make_request("b", range(4), 100))


def taken(driver: Driver) -> SchedulerOutput:
    """The next step."""
    assert driver.step()
    return driver.steps[-1]


def test_a_step_says_how_much_longer_it_may_take() -> None:
    driver = decoding_driver(flat(0.030, ttft=1.0, tbt=0.050, idle=0.025))
    alone = taken(driver)
    assert alone.predicted_latency is not None and alone.spare == pytest.approx(0.030 - alone.predicted_latency)
    driver.now += 0.035  # the gap has begun
    late = taken(driver)
    assert late.predicted_latency is not None and late.spare == pytest.approx(0.015 - late.predicted_latency)
    driver.add(make_request("off", range(10), 30, request_class=OFFLINE))
    full = taken(driver)
    assert full.predicted_latency is not None and full.spare < alone.spare
    assert full.spare == pytest.approx(0.030 - full.predicted_latency)
    driver.abort("on")
    offline = taken(driver)
    assert offline.predicted_latency is not None and offline.spare == pytest.approx(0.025 - offline.predicted_latency)


def test_a_step_with_a_prompt_in_it_or_behind_it_may_take_no_longer() -> None:
    driver = decoding_driver(flat(0.030, ttft=1.0, tbt=0.050))
    driver.add(make_request("next", range(12), 4))
    assert taken(driver).spare == 0.0
    crowded = decoding_driver(flat(0.030, ttft=1.0, tbt=0.050), max_num_seqs=1)
    crowded.add(make_request("waits", range(12), 4))
    assert taken(crowded).spare == 0.0
