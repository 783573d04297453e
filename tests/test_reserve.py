"""--reserve: lines at risk get their share of the steps beside online work, and online work loses no more than that."""

import pytest
from driver import Driver, make_request
from fakes.runner import FakeRunner

from engine.api import EngineRequest, Lane, RequestClass, RequestTimes, SamplingParams
from engine.colocation.virtual import Arrival, PredictedRunner, VirtualDriver
from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.queue_time import UNLIMITED_QUEUE
from engine.request import Request
from engine.reserve import parse_reserve
from engine.scheduling.admission import expected_wait
from engine.scheduling.laxity import prefill_pace
from engine.scheduling.objective import StepObjective
from engine.scheduling.planner import whole
from predictor.budget import BudgetParams
from predictor.model import LatencyModel

MODEL = LatencyModel(intercept=0.004, decode_context=1e-6, knots=(0,), hinges=(0.0001,), token_limit=2048)
NO_BUDGET = StepObjective(ttft=1.0, tbt=0.1, budget=BudgetParams("hygen", 0.0))
OFFLINE = RequestClass.OFFLINE
SECONDS = 30.0
LINES = 15


def config(reserve: str, **changes: object) -> SchedulerConfig:
    settings: dict[str, object] = {
        "num_units": 2 * 1000,
        "max_model_len": 4000,
        "block_size": 16,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_queue_time": UNLIMITED_QUEUE,
        "reserve": reserve,
    }
    return SchedulerConfig(**{**settings, **changes})  # type: ignore[arg-type]


def line(index: int, lane: Lane) -> EngineRequest:
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    return EngineRequest(f"line{index}", (1 + index,) * 200, sampling, OFFLINE, lane=lane, job="job")


def saturate(reserve: str, policy: str = "goodput", lane: Lane = Lane.AT_RISK) -> tuple[int, int]:
    """(lines that ended, online tokens computed) in half a minute of twice as many prompts as the machine can serve.

    The search has found that no offline budget keeps the SLO, and the circuit breaker is open."""
    core = EngineCore(config(reserve), online_policy=policy, model=MODEL, objective=NO_BUDGET)
    core.set_offline_share(0.0)
    prompts = [
        Arrival(i / 30.0, make_request(f"on{i}", (1000 + i,) * (100 + 137 * i % 900), 8))
        for i in range(int(30 * SECONDS))
    ]
    lines = iter([line(i, lane) for i in range(LINES)])
    run = VirtualDriver(core, PredictedRunner(MODEL), prompts, lines).run(SECONDS)
    stats = core.stats()
    core.check_integrity()
    return run.offline_ended, stats.prefill_tokens + stats.decode_tokens - stats.offline_computed_tokens


@pytest.mark.parametrize("policy", ["fcfs", "goodput", "goodput-strict", "apt"])
def test_lines_at_risk_end_beside_saturating_prompts_for_no_more_than_the_share(policy: str) -> None:
    without, online_without = saturate("0%", policy)
    ended, online = saturate("10%", policy)
    assert without == 0, "they starve"
    assert ended == LINES
    assert online >= 0.9 * 0.99 * online_without


def test_other_lines_have_no_part_of_it() -> None:
    assert saturate("10%", lane=Lane.BATCH)[0] == 0


def test_a_share_that_is_shorter_than_a_token_is_saved_up() -> None:
    """1 % of a step of 20 ms is less than a chunk takes."""
    assert saturate("1%")[0] > 0


def test_a_prompt_of_the_whole_pool_need_not_wait_until_nobody_is_at_risk() -> None:
    driver = Driver(
        FakeRunner(block_size=4, vocab_size=40),
        config("20%", num_units=40, max_model_len=80, block_size=4, max_num_seqs=4, max_num_batched_tokens=32),
        model=MODEL,
        objective=NO_BUDGET,
    )
    driver.add(*[line_of_16(i) for i in range(30)])
    for _ in range(3):
        driver.step()
    driver.add(make_request("on", [1] * 76, 4))
    while "on" not in driver.finals:
        assert driver.step()
    assert len(driver.finals) < 30
    driver.run()


def line_of_16(index: int) -> EngineRequest:
    return make_request(f"line{index}", [2 + index] * 16, 8, request_class=OFFLINE, lane=Lane.AT_RISK)


def test_a_line_at_risk_keeps_its_place_beside_prompts_that_want_rows() -> None:
    """All rows but the reserved one are full of chats, and more wait."""
    driver = Driver(
        FakeRunner(block_size=4, vocab_size=40),
        config("10%", num_units=400, max_model_len=80, block_size=4, max_num_seqs=4, max_num_batched_tokens=32),
        model=MODEL,
        objective=NO_BUDGET,
    )
    driver.add(line_of_16(0))
    driver.step()
    driver.add(*[make_request(f"on{i}", [20 + i] * 8, 30) for i in range(12)])
    while "line0" not in driver.finals:
        assert driver.step()
    assert driver.finals["line0"].num_preemptions == 0
    assert not any(name.startswith("on") for name in driver.finals), "it did not wait for a row of theirs"
    driver.run()


def test_what_is_reserved_is_counted_in_where_waiting_times_are_predicted() -> None:
    waits, paces = [], []
    for reserve in ("0%", "25%"):
        core = EngineCore(config(reserve), model=MODEL, objective=NO_BUDGET)
        scheduler = core._state
        core.add_request(line(0, Lane.AT_RISK), 0.0)
        for i in range(4):
            core.add_request(make_request(f"on{i}", (50 + i,) * 400, 4), 0.0)
        pace = prefill_pace(scheduler)
        assert pace is not None
        paces.append(pace.per_token)
        arrival = Request(make_request("new", (9,) * 100, 4), RequestTimes(0.0), 99)
        waits.append(expected_wait(scheduler, arrival, 10.0, 0.0))
    assert paces[1] / paces[0] == pytest.approx(4 / 3, rel=0.05)
    assert waits[1] > 1.2 * waits[0]


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0", 0.0), ("0.25", 0.25), (" 5 % ", 0.05)])
def test_the_share_is_a_percentage_or_a_fraction(text: str, share: float) -> None:
    assert parse_reserve(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "ten", "51%", "-1%", "10", "nan"])
def test_other_shares_are_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--reserve"):
        EngineConfig(reserve=text)


def test_whole_prompts_have_no_part_to_reserve() -> None:
    with pytest.raises(ConfigError, match="chunked prefill"):
        config("10%", chunked_prefill=False, max_num_batched_tokens=4000)


def test_lines_that_the_engine_holds_already_move_to_the_lane_of_those_at_risk() -> None:
    """The window is full of them, so no other line of the job would come."""
    core = EngineCore(config("10%"), model=MODEL, objective=NO_BUDGET)
    for i in range(6):
        core.add_request(line(i, Lane.BATCH), 0.0)
    step = core.schedule(0.0, whole(core.plan_offline(0.0)))
    assert step is not None
    core.update(step, PredictedRunner(MODEL).launch(step)(), 0.01)
    core.set_lane("another", Lane.AT_RISK)
    assert not core._state.waiting_offline.num_waiting(Lane.AT_RISK)
    core.set_lane("job", Lane.AT_RISK)
    core.check_integrity()
    running = core._state.running[OFFLINE]
    assert running and all(request.spec.lane is Lane.AT_RISK for request in running)
    assert core._state.waiting_offline.num_waiting(Lane.AT_RISK) == 6 - len(running)
    assert not core._state.waiting_offline.num_waiting(Lane.BATCH)
    core.set_lane("job", Lane.BATCH)
    run = VirtualDriver(core, PredictedRunner(MODEL), [])
    for i in range(6):
        run._prompts[f"line{i}"], run._num_offline = 200, i + 1
    assert run.run(SECONDS).offline_ended == 6
    assert not core.has_requests
