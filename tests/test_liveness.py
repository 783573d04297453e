"""The engine never stands still: in every state a request can run, and no request is immune or barred for ever."""

from dataclasses import replace

import pytest
from driver import Driver, make_request
from fakes.runner import FakeRunner, solo_tokens
from integrity import check_core

from engine.api import Lane, RequestClass
from engine.limits import UNLIMITED_QUEUE, SchedulerConfig
from engine.request import RequestStatus
from engine.scheduling.objective import StepObjective
from engine.scheduling.offline import OfflinePlan, PlannedChunk, whole
from engine.scheduling.plan import StepPlan
from engine.scheduling.step import last_resort
from predictor.budget import BudgetParams
from predictor.model import LatencyModel

VOCAB = 40
BLOCK = 4
MODEL = LatencyModel(intercept=0.010, decode_context=1e-6, knots=(8,), hinges=(0.001,), token_limit=256)
OFFLINE = RequestClass.OFFLINE


CONFIG = SchedulerConfig(
    2 * 20, 80, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=64, min_prefill_chunk=8,
    max_offline_preemptions=1,
)  # fmt: skip


def make_driver(model: LatencyModel | None = None, **changes: object) -> Driver:
    """A pool of 20 blocks, deadlines that leave no time beside a prompt."""
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    objective = StepObjective(ttft=0.1, tbt=0.05, budget=BudgetParams("hygen", 0.020))
    return Driver(FakeRunner(block_size=BLOCK, vocab_size=VOCAB), config, model=model or MODEL, objective=objective)


def with_an_evicted_line() -> Driver:
    """A chat has ended that took the room of the line `job`."""
    driver = make_driver()
    driver.add(make_request("job", [5] * 40, 30, request_class=OFFLINE))
    for _ in range(3):
        driver.step()
    driver.add(make_request("on0", [1] * 50, 2))
    while "on0" not in driver.finals:
        driver.step()
    return driver


def test_an_offline_line_evicted_often_does_not_stop_the_engine() -> None:
    """It comes back in a quiet moment, and the next chat does not fit beside it."""
    driver = with_an_evicted_line()
    for _ in range(2):
        driver.step()
    driver.add(make_request("on1", [2] * 50, 2))
    driver.run()
    assert driver.finals["job"].num_preemptions == 2
    assert driver.outputs["job"] == solo_tokens([5] * 40, make_request("job", [5] * 40, 30).sampling, VOCAB)


def test_a_prompt_that_fills_the_expected_step_does_not_hide_the_lines_behind_it() -> None:
    """It does not fit in memory, and all tokens of the step are expected to be its own."""
    driver = make_driver(max_num_batched_tokens=16)
    driver.add(make_request("job", [5] * 40, 30, request_class=OFFLINE))
    driver.step()
    driver.add(make_request("on", [1] * 50, 2))
    assert [chunk.request_id for chunk in whole(driver.core.plan_offline(driver.now)).chunks] == ["job"]


def test_lines_that_share_a_prefix_give_way_together() -> None:
    """No line frees the prefix by itself; a prompt of the whole pool needs it."""
    driver = make_driver()
    for name, last in (("a", 1), ("b", 2)):
        driver.add(make_request(name, [5] * 40 + [last] * 4, 20, request_class=OFFLINE))
        for _ in range(6):
            driver.step()
    assert len(driver.core.state.running[OFFLINE]) == 2
    driver.add(make_request("on", [1] * 78, 2))
    driver.launch()
    assert driver.steps[-1].new_requests[0].request_id == "on"
    driver.run()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3])
def test_evictions_beside_online_work_are_bounded_by_time(limit: int) -> None:
    """Chats never stop, and every second prompt takes the room of the only line: it keeps away longer and longer."""
    driver = make_driver(
        num_units=2 * 60, max_model_len=200, max_offline_preemptions=limit, max_queue_time=UNLIMITED_QUEUE
    )
    driver.add(make_request("job", [5] * 40, 120, request_class=OFFLINE))
    num_chats = num_prompts = 0
    while driver.now < 30.0:
        if f"chat{num_chats}" not in driver.core.state.requests:
            num_chats += 1
            driver.add(make_request(f"chat{num_chats}", [num_chats % 30] * 8, 40))
        if f"prompt{num_prompts}" not in driver.core.state.requests and driver.now > 0.5 * num_prompts:
            num_prompts += 1
            driver.add(make_request(f"prompt{num_prompts}", [num_prompts % 30] * 160, 2))
        assert driver.step()
    driver.run()
    evicted = driver.finals["job"].num_preemptions
    assert num_prompts > 40
    assert limit < evicted <= limit + 5, "after 1 + 2 + 4 + 8 + 16 seconds 30 have passed"


def test_in_a_quiet_moment_nobody_keeps_away() -> None:
    driver = with_an_evicted_line()
    job = driver.core.state.requests["job"]
    assert job.not_before > driver.now and job.num_preemptions == 1
    driver.step()
    assert job.status is RequestStatus.RUNNING


def test_of_equals_whoever_was_evicted_seldom_loses_first() -> None:
    driver = make_driver(max_num_seqs=3, num_units=2 * 60, max_offline_preemptions=8)
    driver.add(*[make_request(f"line{i}", [i] * 8, 60, request_class=OFFLINE) for i in range(3)])
    for index in range(6):
        driver.step()
        driver.add(make_request(f"on{index}", [9 + index] * 8, 1))
        while f"on{index}" not in driver.finals:
            driver.step()
    assert [driver.core.state.requests[f"line{i}"].num_preemptions for i in range(3)] == [2, 2, 2]


# ---- the last resort


def test_a_line_at_risk_takes_the_memory_of_another_line_however_young_it_is() -> None:
    """The plan holds the line at risk alone, for there is time for one, and the pool is full: by age it would give way
    to the other, which is not in the plan, and nothing would run."""
    driver = make_driver()
    driver.core.set_objective(StepObjective(budget=BudgetParams("hygen", 1.0)))
    driver.add(make_request("calm", [5] * 28, 40, request_class=OFFLINE))
    driver.step()
    driver.add(make_request("risk", [6] * 30, 40, request_class=OFFLINE, lane=Lane.AT_RISK))
    risk = driver.core.state.requests["risk"]
    while driver.core.state.pool.num_available_units or risk.num_computed_tokens % BLOCK:
        assert driver.step() and not driver.finals
    driver.core.set_objective(StepObjective(budget=BudgetParams("hygen", 0.001)))
    assert driver.launch()
    assert driver.core.state.requests["calm"].status is RequestStatus.PREEMPTED
    driver.run()


@pytest.mark.parametrize("host_units", [0, 200])
def test_a_prompt_that_nobody_lets_start_starts_all_the_same(host_units: int) -> None:
    """For any reason: here a policy that admits no request, beside lines that hold the whole pool."""
    driver = make_driver(host_units=host_units, unit_bytes=1)
    for name, token in (("a", 5), ("b", 6)):
        driver.add(make_request(name, [token] * 24, 40, request_class=OFFLINE))
        driver.step()
    scheduler = driver.core.state
    scheduler.online_policy = replace(scheduler.online_policy, admits=lambda state, request: False)
    driver.add(make_request("on", [1] * 78, 2))
    step = driver.core.schedule(driver.now, None)
    assert step is not None and [new.request_id for new in step.new_requests] == ["on"]
    assert not scheduler.running[OFFLINE]


@pytest.mark.parametrize("host_units", [0, 200])
def test_whoever_is_in_the_way_of_the_last_resort_loses_its_place(host_units: int) -> None:
    """Even an online request that runs; it comes back with all that it had."""
    driver = make_driver(host_units=host_units, unit_bytes=1)
    driver.add(make_request("old", [5] * 36, 9))
    driver.step()
    driver.add(make_request("young", [6] * 37, 9))
    scheduler = driver.core.state
    old = driver.core.state.requests["old"]
    while old.num_computed_tokens < 40:
        assert driver.step()
    assert not scheduler.pool.num_available_units
    step = last_resort(StepPlan(scheduler, driver.now), with_offline=False)
    assert step is not None and step.requests == [old] and step.output.chunks[0].length == 1
    assert scheduler.running[RequestClass.ONLINE] == [old]
    assert driver.stats().preemptions["stall"] == 1


def test_a_plan_that_is_out_of_date_does_not_stop_the_lines() -> None:
    driver = make_driver()
    driver.add(make_request("job", [5] * 40, 3, request_class=OFFLINE))
    gone = OfflinePlan((PlannedChunk("gone", 8, running=True),))
    for _ in range(8):
        step = driver.core.schedule(driver.now, gone)
        assert step is not None
        result = driver.runner.launch(step)()
        driver.now += 0.01
        driver.core.update(step, result, driver.now)
        check_core(driver.core)
        if not driver.core.has_requests:
            return
    pytest.fail("the line has not ended")


# ---- failed steps


def test_a_failed_step_is_no_eviction() -> None:
    """No request took the room of its requests: nothing is counted, and no line keeps away from online work for it."""
    driver = make_driver()
    driver.add(make_request("job", [5] * 8, 10, request_class=OFFLINE))
    runner = driver.runner
    assert isinstance(runner, FakeRunner)
    driver.step()
    runner.fail_steps = frozenset({1})
    driver.step()
    job = driver.core.state.requests["job"]
    assert driver.stats().failed_steps == 1 and job.status is RequestStatus.PREEMPTED
    assert job.num_preemptions == 0 and job.not_before < 0.0 and not driver.stats().preemptions
    driver.run()


@pytest.mark.parametrize(("limit", "together"), [(0.2, 2), (0.1, 8), (0.5, 8)])
def test_a_limit_that_no_step_keeps_does_not_cut_offline_work_into_steps_of_one_request(
    limit: float, together: int
) -> None:
    """The smallest step takes 0.15 s, and every decode 0.04 s: 0.2 s are kept by two, 0.5 s by eight."""
    model = LatencyModel(intercept=0.11, decodes=0.04, prefill_tokens=1e-4)
    driver = make_driver(model=model)
    driver.core.set_objective(StepObjective(tbt=limit, budget=BudgetParams("hygen", limit)))
    for index in range(8):
        driver.add(make_request(f"line {index}", [5, 6, 7], 12, request_class=OFFLINE))
    driver.run()
    decodes = [len(step.chunks) for step in driver.steps if all(chunk.length == 1 for chunk in step.chunks)]
    assert max(decodes) == together
