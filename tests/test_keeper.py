"""The SLO keeper, the budget search and the tuner: judged requests, the breaker's dial, budgets that keep the SLO."""

import asyncio
import json
from typing import Any

import pytest
from driver import make_request

from engine.colocation import BUDGET_SHARE, Colocation, RecordedArrival, initial_budget
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.request import FinishReason, RequestClass, RequestOutput, RequestTimes
from engine.scheduling.output import Chunk, SchedulerOutput
from engine.search import Workload, find_budget, make_job, normal_noise, replay
from engine.tuning import MIN_RECORDED, BudgetTuner, parse_load, recorded_workloads, run_search
from engine.virtual import Arrival, PredictedRunner, VirtualDriver
from predictor.budget import BudgetParams
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.slo import SLO

MODEL = LatencyModel(
    intercept=0.008, decodes=2e-5, decode_context=4e-7, prefill_chunks=2e-4, knots=(0, 128), hinges=(2e-5, 1e-4)
)
CONFIG = SchedulerConfig(num_units=2 * 600, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=256)
LIMITS = SLO.parse("ttft_p99=500ms,tbt_p99=60ms")


def make_keeper(slo: SLO = LIMITS) -> tuple[EngineCore, Colocation]:
    model = OnlineModel(MODEL)
    core = EngineCore(CONFIG, model=model)
    return core, Colocation(core, model, slo, initial_budget(slo, MODEL, "tidemill"))


def output_of(
    name: str,
    tokens: int,
    at: float,
    *,
    reason: FinishReason | None = None,
    offline: bool = False,
    beside: bool = False,
) -> RequestOutput:
    times = RequestTimes(arrival=0.0, first_token=at if tokens else None, last_token=at)
    request_class = RequestClass.OFFLINE if offline else RequestClass.ONLINE
    return RequestOutput(
        name, [1] * tokens, None, times, 10, 0, tokens, reason, request_class=request_class, beside_offline=beside
    )


STEP = SchedulerOutput(0, (Chunk(0, 10, 1, True),))


def test_requests_are_judged_by_ttft_and_their_own_gaps() -> None:
    _, keeper = make_keeper()
    keeper.on_step(STEP, 0.0082, [output_of("good", 1, 0.1)], 0.1)
    keeper.on_step(STEP, 0.0082, [output_of("good", 1, 0.1, reason=FinishReason.STOP)], 0.15)
    keeper.on_step(STEP, 0.0082, [output_of("slow", 1, 0.6)], 0.6)
    keeper.on_step(STEP, 0.0082, [output_of("slow", 1, 0.6, reason=FinishReason.LENGTH)], 0.61)
    keeper.on_step(STEP, 0.0082, [output_of("gap", 1, 0.2)], 0.7)
    keeper.on_step(STEP, 0.0082, [output_of("gap", 1, 0.2, reason=FinishReason.LENGTH)], 0.8)
    keeper.on_step(STEP, 0.0082, [output_of("left", 1, 0.2)], 0.85)
    keeper.on_end(output_of("left", 0, 0.2, reason=FinishReason.ABORT), 0.9)
    stats = keeper.stats(1.0)
    assert (stats.good_requests, stats.bad_requests) == (1, 2)
    assert stats.attainment == pytest.approx(1 / 3)
    assert len(keeper.arrivals) == 3
    assert keeper.stats(100.0).attainment != keeper.stats(100.0).attainment, "nobody in the last minute: NaN"


def test_misses_beside_offline_work_open_the_breaker_and_time_closes_it() -> None:
    core, keeper = make_keeper()
    for index in range(30):
        at = 1.0 + index * 0.1
        late = RequestOutput(
            str(index), [1], None, RequestTimes(0.0, first_token=9.0, last_token=9.0), 10, 0, 1,
            FinishReason.LENGTH, beside_offline=True,
        )  # fmt: skip
        keeper.on_step(STEP, 0.0082, [late], at)
    assert keeper.stats(4.0).breaker == "open"
    assert core._scheduler.offline_share == 0.0
    keeper.on_step(STEP, 0.0082, [], 20.0)
    assert core._scheduler.offline_share == pytest.approx(0.1)
    keeper.on_step(STEP, 0.0082, [], 40.0)
    assert core._scheduler.offline_share == 1.0


def test_misses_that_offline_work_had_no_part_in_change_nothing() -> None:
    core, keeper = make_keeper()
    for index in range(30):
        keeper.on_step(STEP, 0.0082, [output_of(str(index), 1, 9.0, reason=FinishReason.LENGTH)], 10.0)
    assert keeper.stats(10.0).bad_requests == 30
    assert core._scheduler.offline_share == 1.0


def test_initial_budget_is_a_share_of_the_tbt_limit() -> None:
    assert initial_budget(LIMITS, MODEL, "hygen").latency_budget == pytest.approx(BUDGET_SHARE * 0.060)
    relative = initial_budget(SLO.parse("5%"), MODEL, "tidemill").latency_budget
    assert 0.01 < relative < 0.1, "no absolute limit: a few smallest steps"


@pytest.mark.parametrize("policy", ["hygen", "tidemill"])
@pytest.mark.parametrize("slo", ["ttft_p99=500ms,tbt_p99=40ms", "tbt_mean=20%"])
def test_search_finds_offline_room_that_keeps_the_slo(policy: str, slo: str) -> None:
    parsed = SLO.parse(slo)
    first, second = (Workload.poisson(2.0, 200, 40, 12.0, seed) for seed in (1, 2))
    result = find_budget(first, second, MODEL, parsed, CONFIG, policy, max_evaluations=16)
    assert result.params.latency_budget > 0 and result.confirmed
    again = replay(second, MODEL, parsed, CONFIG, result.params)
    base = replay(second, MODEL, parsed, CONFIG, BudgetParams(policy, 0.0))
    assert again["offline_throughput"] > 300 and base["offline_throughput"] == 0
    assert not parsed.violations(again, base)


def test_replays_are_deterministic_and_complete() -> None:
    workload = Workload.poisson(3.0, 100, 20, 10.0, 1)

    def run() -> Any:
        core = EngineCore(CONFIG, model=MODEL)
        driver = VirtualDriver(core, PredictedRunner(MODEL), workload.online(1024), workload.offline(1024, 1))
        return driver.run(10.0)

    one, other = run(), run()
    assert [r.token_times for r in one.online] == [r.token_times for r in other.online]
    assert one.offline_tokens == other.offline_tokens > 0
    assert len(one.online) == len(workload.arrivals)
    assert all(r.token_times[0] >= r.arrival.at for r in one.online if r.token_times)


def test_arrivals_the_core_refuses_are_recorded() -> None:
    config = SchedulerConfig(num_units=2 * 600, max_model_len=1024, max_num_waiting=1)
    requests = [Arrival(0.0, make_request(str(i), range(50), 5)) for i in range(3)]
    run = VirtualDriver(EngineCore(config), PredictedRunner(MODEL), requests).run(5.0)
    assert [r.rejected for r in run.online] == [False, True, True]


def test_the_search_sees_how_much_real_steps_vary() -> None:
    first, second = (Workload.poisson(4.0, 100, 40, 20.0, seed) for seed in (1, 2))
    slo = SLO.parse("tbt_p99=40ms")
    noise = normal_noise(0.15)
    edge = BudgetParams("hygen", 0.040)
    calm, noisy = (replay(first, MODEL, slo, CONFIG, edge, each)["tbt_p99"] for each in ((), noise))
    assert calm < noisy
    found = find_budget(first, second, MODEL, slo, CONFIG, "hygen", noise)
    assert found.best.metrics["tbt_p99"] <= 0.040 and found.best.throughput > 0
    assert normal_noise(0.15)[49] == pytest.approx(1.0)
    assert sum(abs(1 - ratio) for ratio in noise) / len(noise) == pytest.approx(0.15, rel=0.1)


def test_recorded_arrivals_become_two_windows() -> None:
    arrivals = [RecordedArrival(100.0 + i, 10 + i, 5) for i in range(10)]
    first, second = recorded_workloads(arrivals)
    assert [a[0] for a in first.arrivals] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert second.arrivals[0] == (0.0, 15, 5) and second.seconds == 4.0


def test_load_flag() -> None:
    assert parse_load("") is None
    assert parse_load("2:512:128") == (2.0, 512, 128)
    for bad in ("2", "2:512", "0:1:1", "a:b:c", "1:0:1", "1:1:1:1"):
        with pytest.raises(ConfigError, match="--expected-load"):
            parse_load(bad)


async def test_the_search_runs_in_a_process_of_its_own() -> None:
    first, second = (Workload.poisson(2.0, 100, 20, 4.0, seed) for seed in (1, 2))
    params = await run_search(json.dumps(make_job(first, second, MODEL, LIMITS, CONFIG, "tidemill")).encode())
    assert params.latency_budget > 0
    with pytest.raises(ValueError):
        await run_search(b"not a job")


async def test_the_tuner_applies_what_it_finds_and_survives_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    core, keeper = make_keeper()
    found = BudgetParams("tidemill", 0.0123)
    answers: list[Any] = [ValueError("no"), found]
    done = asyncio.Event()

    async def fake_search(job: bytes) -> BudgetParams:
        json.loads(job)
        answer = answers.pop(0)
        if not answers:
            done.set()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    monkeypatch.setattr("engine.tuning.run_search", fake_search)
    before = core._scheduler.objective.budget
    tuner = BudgetTuner(keeper, CONFIG, "tidemill", (1.0, 100, 20), 0.1)
    tuner.start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert core._scheduler.objective.budget == before, "the failed search changed nothing"
    for index in range(MIN_RECORDED):
        keeper.on_end(output_of(str(index), 1, 0.1, reason=FinishReason.STOP), float(index))
    await done.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert core._scheduler.objective.budget == found
    await tuner.stop()
