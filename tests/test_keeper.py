"""The SLO keeper, the budget search and the tuner: judged requests, the breaker's dial, budgets that keep the SLO."""

import asyncio
import json
import random
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
from driver import make_request

from engine.colocation import BUDGET_SHARE, MIN_OFFLINE, Colocation, initial_budget
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.queue_time import UNLIMITED_QUEUE
from engine.replay import ReplayedServer, Workload, metrics_of, normal_noise, replay
from engine.request import FinishReason, RequestClass, RequestOutput, RequestTimes
from engine.scheduling.output import Chunk, Collect, SchedulerOutput
from engine.search import find_budget, make_job
from engine.tuning import MIN_RECORDED, BudgetTuner, parse_load, run_search
from engine.virtual import Arrival, PredictedRunner, VirtualDriver, VirtualRecord, VirtualRun
from predictor.budget import BudgetParams
from predictor.load import Lengths, OnlineArrival, observed_rate, resample
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.slo import SLO

MODEL = LatencyModel(
    intercept=0.008, decodes=2e-5, decode_context=4e-7, prefill_chunks=2e-4, knots=(0, 128), hinges=(2e-5, 1e-4)
)
CONFIG = SchedulerConfig(num_units=2 * 600, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=256)
LIMITS = SLO.parse("ttft_p99=500ms,tbt_p99=60ms")
SERVER = ReplayedServer(MODEL, LIMITS, CONFIG)


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
    arrival: float = 0.0,
) -> RequestOutput:
    times = RequestTimes(arrival=arrival, first_token=at if tokens else None, last_token=at)
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
    assert len(keeper.arrivals) == 4, "the one that left was load all the same"
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
    server = replace(SERVER, slo=SLO.parse(slo), fill_policy=policy)
    first, second = (Workload.poisson(2.0, 200, 40, 12.0, seed) for seed in (1, 2))
    result = find_budget(first, second, server, max_evaluations=16)
    assert result.params.latency_budget > 0 and result.confirmed
    again = replay(second, server, result.params)
    base = replay(second, server, BudgetParams(policy, 0.0))
    assert again["offline_throughput"] > 300 and base["offline_throughput"] == 0
    assert not server.slo.violations(again, base)


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
    noise = normal_noise(0.15)
    calm = replace(SERVER, slo=SLO.parse("tbt_p99=40ms"), fill_policy="hygen")
    noisy = replace(calm, noise=noise)
    edge = BudgetParams("hygen", 0.040)
    assert replay(first, calm, edge)["tbt_p99"] < replay(first, noisy, edge)["tbt_p99"]
    found = find_budget(first, second, noisy)
    assert found.best.metrics["tbt_p99"] <= 0.040 and found.best.throughput > 0
    assert normal_noise(0.15)[49] == pytest.approx(1.0)
    assert sum(abs(1 - ratio) for ratio in noise) / len(noise) == pytest.approx(0.15, rel=0.1)


def recorded(count: int, rate: float = 2.0, seed: int = 1) -> list[OnlineArrival]:
    """A Poisson record; every request has lengths of its own."""
    generator, at, found = random.Random(seed), 1000.0, []
    for index in range(count):
        at += generator.expovariate(rate)
        found.append(OnlineArrival(at, Lengths(100 + index % 50, 20)))
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_trivial_load_keeps_its_slo_in_the_replay(seed: int) -> None:
    """The last arrival of a window lies on its very end: it is followed to its own end, not counted as a miss."""
    window = Workload.recorded(recorded(100, seed=seed), (), 2.0, 100, seed)
    assert window.arrivals[-1].at == window.seconds
    for budget in (0.0, 0.04):
        assert replay(window, SERVER, BudgetParams("tidemill", budget))["slo_attainment"] == 1.0
    assert find_budget(window, None, SERVER, max_evaluations=6).slo_in_reach


def test_offline_tokens_count_inside_the_window_alone() -> None:
    window = Workload((OnlineArrival(1.0, Lengths(10, 900)),), 1.0, (Lengths(64, 8),))
    short = replay(window, SERVER, BudgetParams("tidemill", 0.04))["offline_throughput"]
    quiet = replay(replace(window, arrivals=()), SERVER, BudgetParams("tidemill", 0.04))["offline_throughput"]
    assert short == pytest.approx(quiet, rel=0.1), "the drain behind the window takes 900 steps"


def test_replays_hold_the_offline_lengths_that_they_are_given() -> None:
    lengths = (Lengths(100, 7, 32), Lengths(333, 9))
    window = Workload((), 1.0, lengths)
    offline = list(islice(window.offline(1024, seed=1), 50))
    assert {(len(r.prompt_token_ids), r.sampling.max_tokens) for r in offline} == {(100, 7), (333, 9)}
    short, long = (
        replay(replace(window, seconds=10.0, offline_lengths=(one,)), SERVER, BudgetParams("hygen", 0.02))
        for one in (Lengths(16, 256), Lengths(900, 2))
    )
    assert long["offline_throughput"] > 1.5 * short["offline_throughput"], "prompts are cheaper than decodes"


def test_cached_prompts_are_cheaper_in_the_replay() -> None:
    arrivals = tuple(OnlineArrival(i / 2, Lengths(800, 4)) for i in range(20))
    cached = tuple(OnlineArrival(a.at, Lengths(800, 4, 720)) for a in arrivals)
    server = replace(SERVER, slo=SLO.parse("ttft_mean=1s"))
    cold, warm = (
        replay(Workload(each, 10.0), server, BudgetParams("hygen", 0.0))["ttft_mean"] for each in (arrivals, cached)
    )
    assert warm < 0.5 * cold


def test_replays_run_the_policies_of_the_server() -> None:
    window = Workload.poisson(6.0, 300, 200, 10.0, 1)
    tight = replace(CONFIG, num_units=2 * 120, max_queue_time=UNLIMITED_QUEUE)
    means = {
        policy: replay(
            window,
            ReplayedServer(MODEL, SLO.parse("ttft_mean=1s"), tight, online_policy=policy),
            BudgetParams("hygen", 0.0),
        )["ttft_mean"]
        for policy in ("fcfs", "no-preempt", "srpt-oracle")
    }
    assert len(set(means.values())) == 3
    with pytest.raises(ConfigError, match="unknown online policy"):
        replay(window, replace(SERVER, online_policy="none"), BudgetParams("hygen", 0.0))
    with pytest.raises(AssertionError):
        replay(window, replace(SERVER, offline_policy="none"), BudgetParams("hygen", 0.0))


def test_windows_have_as_many_arrivals_as_the_percentile_needs() -> None:
    needed = {"ttft_p99=1s": 1000, "tbt_p50=1s,ttft_p95=1s": 200, "tbt_mean=50ms": 200, "5%": 1000, "ttft_p97=1s": 333}
    for text, count in needed.items():
        assert SLO.parse(text).arrivals_needed == count
    record = recorded(250, rate=0.5)
    window = Workload.recorded(record, [Lengths(5, 6)], observed_rate(record), 1000, seed=2)
    assert len(window.arrivals) == 1000 and window.offline_lengths == (Lengths(5, 6),)
    assert len(window.arrivals) / window.seconds == pytest.approx(0.5, rel=0.1)
    assert {a.lengths for a in window.arrivals} <= {a.lengths for a in record}
    assert list(window.arrivals) == sorted(window.arrivals, key=lambda a: a.at)
    assert window == Workload.recorded(record, [Lengths(5, 6)], observed_rate(record), 1000, seed=2)


def test_windows_keep_bursts_and_can_be_made_for_another_rate() -> None:
    bursts = [OnlineArrival(60.0 * minute + 0.1 * i, Lengths(10, 5)) for minute in range(30) for i in range(10)]
    window = resample(bursts, 1.0, 2000, seed=3)
    gaps = [b.at - a.at for a, b in pairwise(window)]
    assert sorted(gaps)[len(gaps) // 2] < 0.05, "most of them come in bursts"
    assert len(gaps) / sum(gaps) == pytest.approx(1.0, rel=0.25)
    with pytest.raises(ValueError, match="at least two"):
        resample(bursts[:1], 1.0, 10, seed=3)


def test_refused_and_abandoned_requests_are_part_of_the_load() -> None:
    _, keeper = make_keeper()
    keeper.on_refused(RequestClass.ONLINE, 70, 5.0)
    keeper.on_refused(RequestClass.OFFLINE, 70, 6.0)
    keeper.on_step(STEP, 0.0082, [output_of("left", 1, 0.2)], 7.0)
    keeper.on_end(output_of("left", 0, 0.2, reason=FinishReason.ABORT), 7.5)
    assert list(keeper.arrivals) == [OnlineArrival(5.0, Lengths(70, 0)), OnlineArrival(0.0, Lengths(10, 0))]
    keeper.on_step(STEP, 0.0082, [output_of("good", 1, 0.1, reason=FinishReason.STOP)], 8.0)
    known = {a.lengths for a in resample(tuple(keeper.arrivals), 1.0, 100, seed=1)}
    assert known == {Lengths(70, 1), Lengths(10, 1)}, "an output nobody knows is that of another request"


def test_the_offline_lengths_are_those_of_the_jobs() -> None:
    core, keeper = make_keeper()
    assert keeper.offline_work() == []
    core.add_request(make_request("queued", range(80), 12, request_class=RequestClass.OFFLINE), 0.0)
    assert keeper.offline_work() == [Lengths(80, 12)]
    for index in range(MIN_OFFLINE):
        keeper.on_step(STEP, 0.0082, [output_of(f"{index}", 3, 1.0, reason=FinishReason.STOP, offline=True)], 1.0)
    assert keeper.offline_work() == [Lengths(10, 3)] * MIN_OFFLINE, "what they turned out to be"


def test_what_had_no_end_is_no_good_answer() -> None:
    request = make_request("x", range(8), 4)
    started = VirtualRecord(Arrival(1.0, request), [1.5, 1.6])
    unstarted, refused = VirtualRecord(Arrival(2.0, request)), VirtualRecord(Arrival(3.0, request), rejected=True)
    refused.retry_after = 4.0
    run = VirtualRun([started, unstarted, refused], end=10.0)
    found = metrics_of(run, SLO.parse("ttft_p99=2s,ttft_mean=1s"), 5.0)
    assert found["slo_attainment"] == 0.0
    assert found["ttft_mean"] == pytest.approx((0.5 + 8.0 + 5.0) / 3)


def test_load_flag() -> None:
    assert parse_load("") is None
    assert parse_load("2:512:128") == (2.0, 512, 128)
    for bad in ("2", "2:512", "0:1:1", "a:b:c", "1:0:1", "1:1:1:1"):
        with pytest.raises(ConfigError, match="--expected-load"):
            parse_load(bad)


def test_no_budget_that_keeps_the_slo_is_obeyed() -> None:
    """A real search on a load whose SLO is out of reach: nothing offline may make it worse."""
    hopeless = replace(SERVER, slo=SLO.parse("tbt_mean=8.02ms"))
    window = Workload.poisson(2.0, 100, 40, 12.0, 1)
    found = find_budget(window, None, hopeless, max_evaluations=8)
    assert found.params.latency_budget == 0.0 and not found.slo_in_reach
    core, keeper = make_keeper(hopeless.slo)
    before = keeper.stats(0.0)
    keeper.set_budget(found.params, "searched for a test")
    held = keeper.stats(1.0)
    assert core._scheduler.offline_share == held.offline_share == 0.0
    assert held.held == "no offline budget keeps the SLO (searched for a test)"
    assert held.latency_budget == before.latency_budget > 0.0, "what runs when nobody is there"
    keeper.on_step(STEP, 0.0082, [], 100.0)
    assert core._scheduler.offline_share == 0.0, "no breaker lets it through"
    keeper.set_budget(BudgetParams("tidemill", 0.02), "searched for another load")
    assert core._scheduler.offline_share == 1.0 and not keeper.stats(101.0).held


def test_a_held_budget_keeps_offline_work_from_online_steps_and_lets_it_run_alone() -> None:
    core, keeper = make_keeper()
    keeper.set_budget(BudgetParams("tidemill", 0.0), "a test")
    offline = iter(Workload((), 1.0, (Lengths(100, 20),)).offline(1024, seed=1))
    arrivals = [Arrival(1.0, make_request("on", range(100), 50))]
    together: list[set[RequestClass]] = []

    class Watch(PredictedRunner):
        def launch(self, output: SchedulerOutput) -> Collect:
            together.append({request.request_class for request in core._in_flight[-1].requests})
            return super().launch(output)

    VirtualDriver(core, Watch(MODEL), arrivals, offline).run(3.0)
    assert {RequestClass.ONLINE} in together and {RequestClass.OFFLINE} in together
    assert {RequestClass.ONLINE, RequestClass.OFFLINE} not in together


async def test_the_search_runs_in_a_process_of_its_own() -> None:
    first, second = (Workload.poisson(2.0, 100, 20, 4.0, seed) for seed in (1, 2))
    params = await run_search(json.dumps(make_job(first, second, SERVER)).encode())
    assert params.latency_budget > 0
    with pytest.raises(ValueError):
        await run_search(b"not a job")


async def test_the_tuner_applies_what_it_finds_and_survives_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    core, keeper = make_keeper()
    found = BudgetParams("tidemill", 0.0)
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
    tuner = BudgetTuner(keeper, SERVER, (1.0, 100, 20))
    tuner.start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert core._scheduler.objective.budget == before, "the failed search changed nothing"
    for index in range(MIN_RECORDED):
        keeper.on_end(output_of(str(index), 1, 0.1, reason=FinishReason.STOP, arrival=float(index)), float(index))
    await done.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert core._scheduler.offline_share == 0.0
    assert keeper.stats(0.0).held == "no offline budget keeps the SLO (searched for the load served so far)"
    await tuner.stop()
