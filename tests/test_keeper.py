"""The SLO keeper, the budget search and the tuner: judged requests, the breaker's dial, budgets that keep the SLO."""

import math
import random
from dataclasses import replace
from itertools import islice

import pytest
from driver import Driver, make_request
from fakes.runner import features_of
from windows import poisson_window

from engine.api import FinishReason, RequestClass, RequestOutput, RequestTimes
from engine.colocation.keeper import MIN_OFFLINE, Colocation, replay_alone, workload_of
from engine.colocation.replay import (
    TOLERANCE_SHARE,
    ReplayedServer,
    ReplayWindow,
    baseline_noise,
    find_budget,
    metrics_of,
    normal_noise,
    replay,
)
from engine.colocation.waits import BUDGET_SHARE, SHORTEST_AWAITED, ArrivalWaits, initial_budget, slo_warning
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.limits import UNLIMITED_QUEUE, SchedulerConfig
from engine.profiling.calibration import StepShape
from engine.scheduling.objective import LONGEST_REST, StepObjective
from engine.scheduling.output import Chunk, Collect, SchedulerOutput
from engine.speculation.drafts import DraftSource
from engine.speculation.trace import DraftTrace, DraftTraces, Outcome
from engine.virtual import Arrival, PredictedRunner, VirtualDriver, VirtualRecord, VirtualRun
from predictor.breaker import FIRST_SHARE, OPEN_SECONDS, SMALLEST_SHARE
from predictor.budget import BudgetParams
from predictor.load import Lengths, OnlineArrival, resample
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
    return core, Colocation(core, model, slo, initial_budget(slo, MODEL))


def output_of(
    name: str, tokens: int, at: float, reason: FinishReason | None = None, offline: bool = False,
    beside: bool = False, arrival: float = 0.0,
) -> RequestOutput:  # fmt: skip
    times = RequestTimes(arrival=arrival, first_token=at if tokens else None, last_token=at)
    request_class = RequestClass.OFFLINE if offline else RequestClass.ONLINE
    return RequestOutput(
        name, [1] * tokens, None, times, 10, 0, tokens, reason, request_class=request_class, beside_offline=beside
    )


STEP = SchedulerOutput(0, (Chunk(0, 10, 1, True),))
STEP = replace(STEP, features=features_of(STEP))


def live(
    keeper: Colocation, name: str, ttft: float, gaps: list[float], arrival: float, *, beside: bool = True
) -> float:
    """One online request from its first token to its end; when it ends. Steps take the predicted time."""
    now = arrival + ttft
    times = RequestTimes(arrival=arrival, first_token=now)
    for count, gap in enumerate((0.0, *gaps), 1):
        now += gap
        output = output_of(name, 1, now, FinishReason.LENGTH if count > len(gaps) else None, beside=beside)
        keeper.on_step(STEP, 0.0082, [output._replace(times=times, num_output_tokens=count)], now)
    return now


def test_requests_are_judged_by_ttft_and_their_own_gaps() -> None:
    _, keeper = make_keeper()
    live(keeper, "good", 0.1, [0.05], 0.0)
    live(keeper, "slow", 0.6, [0.01], 0.2)
    live(keeper, "gap", 0.2, [0.1], 1.0)
    keeper.on_step(STEP, 0.0082, [output_of("left", 1, 0.2, arrival=1.0)], 1.2)
    keeper.on_end(output_of("left", 0, 0.2, reason=FinishReason.ABORT, arrival=1.0), 1.22)
    keeper.on_step(STEP, 0.0082, [output_of("hung up", 1, 1.5, arrival=1.2)], 1.5)
    keeper.on_end(output_of("hung up", 0, 1.5, reason=FinishReason.ABORT, arrival=1.2), 1.7)
    stats = keeper.stats(2.0)
    assert (stats.good_requests, stats.bad_requests) == (1, 3), "one left after 200 ms without a token: a miss"
    assert stats.attainment == pytest.approx(1 / 4)
    assert {s.objective: s.attainment for s in stats.objectives} == {"ttft_p99=500ms": 0.75, "tbt_p99=60ms": 0.5}
    assert len(keeper.load.arrivals) == 5, "the one that left was load all the same"
    assert math.isnan(keeper.stats(1000.0).attainment), "no recent request"


@pytest.mark.parametrize("rate", [0.1, 0.3, 2.0])
def test_misses_beside_offline_work_open_the_breaker_at_any_rate_and_time_closes_it(rate: float) -> None:
    core, keeper = make_keeper()
    ends = [live(keeper, str(index), 0.9, [0.01], index / rate) for index in range(4)]
    assert keeper.stats(ends[-1]).breaker == "open"
    assert core.state.offline_share == 0.0
    keeper.on_arrival(RequestClass.ONLINE, ends[-1] + OPEN_SECONDS)
    share = core.state.offline_share
    assert share == pytest.approx(SMALLEST_SHARE, rel=0.05), "no step is needed: an arrival tells the time"
    keeper.on_end(output_of("x", 0, 1.0, reason=FinishReason.ABORT), ends[-1] + 1000.0)
    assert core.state.offline_share > SMALLEST_SHARE, "nor is one here"


def test_one_stall_is_one_miss_however_many_requests_it_hits() -> None:
    _, keeper = make_keeper()
    names = [str(index) for index in range(30)]
    for now in (0.1, 0.15, 1.2, 1.25):
        reason = FinishReason.LENGTH if now == 1.25 else None
        outputs = [
            output_of(name, 1, now, reason=reason, beside=True)._replace(times=RequestTimes(0.0, first_token=0.1))
            for name in names
        ]
        keeper.on_step(STEP, 0.0082, outputs, now)
    assert keeper.stats(2.0).bad_requests == 30 and keeper.stats(2.0).breaker_openings == 0


def test_misses_that_offline_work_had_no_part_in_change_nothing() -> None:
    core, keeper = make_keeper()
    for index in range(30):
        live(keeper, str(index), 9.0, [], float(index), beside=False)
    assert keeper.stats(40.0).bad_requests == 30
    assert core.state.offline_share >= FIRST_SHARE


def test_a_tolerance_is_judged_against_the_same_requests_alone() -> None:
    """The base line is a real replay of the arrivals; the measured times are 40 % slower for every token."""
    _, keeper = make_keeper(SLO.parse("tbt_mean=20%,ttft_mean=50%"))
    server = replace(SERVER, slo=keeper.slo)
    for index in range(60):
        live(keeper, str(index), 0.0095, [0.0082 * 1.4] * 20, index * 1.0)
    window, counted = keeper.window(61.0)
    assert len(window) == 60 and all(counted)
    aggregates, own = replay_alone(workload_of(window), server, counted)
    assert aggregates["tbt_mean"] == pytest.approx(0.0081, rel=0.02)
    assert keeper.recent.num_new(61.0) == 60 and keeper.stats(61.0).breaker_openings == 0
    keeper.set_baseline(aggregates, own, 61.0)
    stats = keeper.stats(61.0)
    assert stats.breaker == "open" and stats.breaker_cause == "tbt_mean"
    shown = {s.objective: s for s in stats.objectives}
    assert shown["tbt_mean=20%"].bound == pytest.approx(1.2 * aggregates["tbt_mean"])
    assert shown["tbt_mean=20%"].value > shown["tbt_mean=20%"].bound
    assert shown["ttft_mean=50%"].value < shown["ttft_mean=50%"].bound
    assert keeper.recent.num_new(61.0) == 0, "no request is compared twice"


def test_chats_alone_calibrate_a_baseline_that_is_too_slow() -> None:
    """The model predicts gaps that are 40 % longer than measured ones, so that batch work that adds 36 % seems free."""
    _, keeper = make_keeper(SLO.parse("tbt_mean=5%"))
    server, gap = replace(SERVER, slo=keeper.slo), 0.0081 / 1.4
    for index in range(120):
        beside = index >= 60
        live(keeper, str(index), 0.0095, [1.36 * gap if beside else gap] * 20, index * 1.0, beside=beside)
    window, counted = keeper.window(121.0)
    aggregates, own = replay_alone(workload_of(window), server, counted)
    keeper.set_baseline(aggregates, own, 121.0)
    stats = keeper.stats(121.0)
    assert stats.objectives[0].bound == pytest.approx(1.05 * gap, rel=0.02)
    assert stats.breaker == "open" and stats.breaker_cause == "tbt_mean"
    assert keeper.recent.num_new(121.0) == 0, "the chats of the lead-in need no baseline of their own"
    live(keeper, "later", 0.0095, [gap], 130.0)
    assert keeper.recent.num_new(131.0) == 1
    assert keeper.recent.num_new(1000.0) == 0, "too old for a window"


def test_what_a_tolerance_allows_opens_nothing() -> None:
    _, keeper = make_keeper(SLO.parse("5%"))
    for index in range(200):
        live(keeper, str(index), 0.0085, [0.0083] * 10, index * 1.0)
    window, counted = keeper.window(201.0)
    aggregates, own = replay_alone(workload_of(window), replace(SERVER, slo=keeper.slo), counted)
    keeper.set_baseline(aggregates, own, 201.0)
    assert keeper.stats(201.0).breaker_openings == 0
    live(keeper, "after", 0.0085, [0.0083] * 10, 202.0)
    assert keeper.stats(203.0).attainment == 1.0


def test_the_window_for_a_base_line_has_who_still_runs_and_who_was_refused() -> None:
    _, keeper = make_keeper(SLO.parse("5%"))
    live(keeper, "done", 0.1, [0.01], 0.0)
    keeper.on_refused(RequestClass.ONLINE, 70, 0.5)
    keeper.on_step(STEP, 0.0082, [output_of("runs", 1, 1.0, arrival=0.7)], 1.0)
    window, counted = keeper.window(1.0)
    assert [arrival.at for arrival in window] == [0.0, 0.5, 0.7] and counted == [True, False, False]
    workload = workload_of(window)
    assert [a.lengths.output for a in workload.arrivals] == [2, 64, 1]


def test_initial_budget_is_a_share_of_what_the_tbt_limit_leaves() -> None:
    smallest = 0.0080404
    room = BUDGET_SHARE * (0.060 - smallest)
    assert initial_budget(LIMITS, MODEL).latency_budget == pytest.approx(smallest + room, rel=1e-3)
    relative = initial_budget(SLO.parse("5%"), MODEL).latency_budget
    assert relative == pytest.approx(1.05 * smallest, rel=1e-3), "the part of the tolerance above the smallest step"
    assert 0.03 < initial_budget(SLO.parse("ttft_p99=1s"), MODEL).latency_budget < 0.04, "nothing said"
    out_of_reach = initial_budget(SLO.parse("tbt_p99=7ms"), MODEL).latency_budget
    assert 0.03 < out_of_reach < 0.04, "no step keeps it"
    tight = initial_budget(SLO.parse("tbt_p99=9ms"), MODEL).latency_budget
    assert smallest < tight < 0.009, "an online step keeps it, and a little more"


@pytest.mark.parametrize(
    ("slo", "lost", "advice"),
    [
        ("ttft_p99=1s,tbt_p99=100ms", None, None),
        ("5%", None, None),
        ("tbt_p99=9ms", None, None),
        ("ttft_p99=1s,tbt_p99=1ms", "tbt_p99=1ms cannot", "--slo tbt_p99=50ms"),
        ("5%;premium:tbt_p99=5ms", "premium:tbt_p99=5ms cannot", "--slo premium:tbt_p99=50ms"),
        ("ttft_p95=5ms,tpot_mean=2ms", "ttft_p95=5ms, tpot_mean=2ms cannot", "--slo ttft_p95=50ms,tpot_mean=50ms"),
    ],
)
def test_a_limit_below_the_smallest_step_is_named(slo: str, lost: str | None, advice: str | None) -> None:
    warning = slo_warning(SLO.parse(slo), MODEL)
    if lost is None or advice is None:
        assert warning is None
        return
    assert warning is not None and f"warning: {lost} be met: " in warning and warning.endswith(advice)
    assert "takes 8 ms" in warning
    better = advice.removeprefix("--slo ")
    assert slo_warning(SLO.parse(better if ":" not in better else f"5%;{better}"), MODEL) is None


@pytest.mark.parametrize("online", [0, 2])
def test_offline_work_gathers_rows_where_no_step_keeps_the_promise(online: int) -> None:
    """Weights that stream: every step takes at least 300 ms, the promise is 100."""
    model = replace(MODEL, intercept=0.3)
    core = EngineCore(CONFIG, model=OnlineModel(model))
    slo = SLO.parse("ttft_p99=1s,tbt_p99=100ms")
    Colocation(core, OnlineModel(model), slo, initial_budget(slo, model))
    driver = Driver(PredictedRunner(model), CONFIG)
    driver.core = core
    chats = [make_request(f"chat-{i}", [5, 6, i], 200) for i in range(online)]
    lines = [make_request(f"line-{i}", [7, 8, i], 20, request_class=RequestClass.OFFLINE) for i in range(40)]
    driver.add(*chats, *lines)
    for _ in range(6):
        driver.step()
    assert len(driver.steps[-1].chunks) == 40 + online


@pytest.mark.slow
@pytest.mark.parametrize("slo", ["ttft_p99=500ms,tbt_p99=40ms", "tbt_mean=20%"])
def test_search_finds_offline_room_that_keeps_the_slo(slo: str) -> None:
    server = replace(SERVER, slo=SLO.parse(slo))
    first, second = (poisson_window(2.0, 200, 40, 8.0, seed) for seed in (1, 2))
    result = find_budget(first, [second], server, max_evaluations=12)
    assert result.params.latency_budget > 0 and result.confirmed
    again = replay(second, server, result.params)
    base = replay(second, server, BudgetParams("tidemill", 0.0))
    assert again["offline_throughput"] > 300 and base["offline_throughput"] == 0
    assert not server.slo.violations(again, base)


@pytest.mark.slow
def test_the_search_sees_how_much_real_steps_vary() -> None:
    first, second = (poisson_window(4.0, 100, 40, 10.0, seed) for seed in (1, 2))
    noise = normal_noise(0.15)
    calm = replace(SERVER, slo=SLO.parse("tbt_p99=40ms"))
    noisy = replace(calm, noise=noise)
    edge = BudgetParams("hygen", 0.040)
    assert replay(first, calm, edge)["tbt_p99"] < replay(first, noisy, edge)["tbt_p99"]
    found = find_budget(first, [second], noisy, max_evaluations=10)
    assert found.best.metrics["tbt_p99"] <= 0.040 and found.best.throughput > 0
    assert noise[0][49] == pytest.approx(1.0)
    assert sum(abs(1 - ratio) for ratio in noise[0]) / len(noise[0]) == pytest.approx(0.15, rel=0.1)


@pytest.mark.slow
def test_a_search_uses_half_of_a_tolerance() -> None:
    """Live chats lose more than a replay shows."""
    first, second = (poisson_window(4.0, 100, 40, 10.0, seed) for seed in (1, 2))
    server = replace(SERVER, slo=SLO.parse("tbt_mean=40%"))
    found = find_budget(first, [second], server, max_evaluations=12)
    longer = found.best.metrics["tbt_mean"] / found.baseline.metrics["tbt_mean"] - 1.0
    assert found.best.throughput > 0 and 0.05 < longer <= 0.8 * TOLERANCE_SHARE * 0.4
    assert replay(second, server, found.params)["offline_throughput"] > 0


def test_steps_draw_the_noise_of_their_regime() -> None:
    """Large steps that vary widely neither slow the chats down nor widen the margins of small steps."""
    window = poisson_window(2.0, 40, 40, 8.0, 1)
    slo = SLO.parse("tbt_mean=5%")
    calm = replay(window, replace(SERVER, slo=slo), BudgetParams("tidemill", 0.0))
    noise = ((1.0,),) * 5 + ((0.5, 8.0),)  # chats alone decode fewer than 16 rows and send prompts of 40 tokens
    noisy = replay(window, replace(SERVER, slo=slo, noise=noise), BudgetParams("tidemill", 0.0))
    mixed = replay(window, replace(SERVER, slo=slo, noise=((1.0, 0.5, 8.0),)), BudgetParams("tidemill", 0.0))
    assert calm["tbt_mean"] < noisy["tbt_mean"] < 2.0 * calm["tbt_mean"] < mixed["tbt_mean"]


def test_the_noise_of_a_baseline_is_found_and_told() -> None:
    """The same chats alone vary with the step times; a tolerance below that can hardly be proven."""
    window = poisson_window(2.0, 40, 40, 8.0, 1)
    found = {}
    for error in (0.02, 0.3):
        server = replace(SERVER, slo=SLO.parse("tbt_p99=5%,ttft_mean=20%"), noise=normal_noise(error))
        means, found[error] = baseline_noise(window, server)
        assert found[error].keys() == {"tbt_p99", "ttft_mean"} and means["offline_throughput"] == 0.0
        shares = [replay(window, server, BudgetParams("tidemill", 0.0), seed)["tbt_p99"] for seed in range(20, 26)]
        inside = [abs(share / means["tbt_p99"] - 1.0) <= 1.5 * found[error]["tbt_p99"] for share in shares]
        assert sum(inside) >= 4
    assert found[0.02]["tbt_p99"] < 0.05 < found[0.3]["tbt_p99"]
    search = find_budget(window, [], server, max_evaluations=4)
    assert search.noise == found[0.3] and search.baseline.metrics == means
    _, keeper = make_keeper(server.slo)
    assert keeper.doubt == "" and keeper.stats(0.0).baseline_noise == {}
    keeper.noise = {"tbt_p99": 0.07, "ttft_mean": 0.1}
    keeper.set_budget(BudgetParams("tidemill", 0.0), "searched")
    held = keeper.stats(0.0).held
    assert "(searched); without batch work tbt_p99 by ± 7%: a tolerance below" in held and "ttft_mean" not in held


def test_the_search_counts_the_drafts_that_a_server_recorded() -> None:
    source = DraftSource("job", 8)
    drafts = DraftTraces(jobs=DraftTrace(100.0, {source: 90.0}, {source: {Outcome(4, 4): 90.0}}))
    window, budget = poisson_window(1.0, 100, 20, 10.0, 1), BudgetParams("hygen", 0.03)
    plain, drafted = (replay(window, replace(SERVER, drafts=each), budget) for each in (None, drafts))
    assert drafted["offline_throughput"] > 1.05 * plain["offline_throughput"]


def recorded(count: int, rate: float = 2.0, seed: int = 1) -> list[OnlineArrival]:
    """A Poisson record; every request has lengths of its own."""
    generator, at, found = random.Random(seed), 1000.0, []
    for index in range(count):
        at += generator.expovariate(rate)
        found.append(OnlineArrival(at, Lengths(100 + index % 50, 20)))
    return found


@pytest.mark.slow
def test_a_trivial_load_keeps_its_slo_in_the_replay() -> None:
    """The last arrival of a window lies on its very end: it is followed to its own end, not counted as a miss."""
    window = ReplayWindow.recorded(recorded(40, seed=2), (), 2.0, 40, 2)
    assert window.arrivals[-1].at == window.seconds
    for budget in (0.0, 0.04):
        assert replay(window, SERVER, BudgetParams("tidemill", budget))["slo_attainment"] == 1.0
    assert find_budget(window, [], SERVER, max_evaluations=6).slo_in_reach


def test_replays_hold_the_offline_lengths_that_they_are_given() -> None:
    lengths = (Lengths(100, 7, 32), Lengths(333, 9))
    window = ReplayWindow((), 1.0, lengths)
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
        replay(ReplayWindow(each, 10.0), server, BudgetParams("hygen", 0.0))["ttft_mean"] for each in (arrivals, cached)
    )
    assert warm < 0.5 * cold


@pytest.mark.slow
def test_replays_run_the_policies_of_the_server() -> None:
    window = poisson_window(6.0, 300, 200, 10.0, 1)
    tight = replace(CONFIG, num_units=2 * 120, max_queue_time=UNLIMITED_QUEUE)
    server = ReplayedServer(MODEL, SLO.parse("ttft_mean=1s"), tight)
    servers = [replace(server, online_policy=policy) for policy in ("fcfs", "larry", "apt")]
    assert len({replay(window, each, BudgetParams("hygen", 0.0))["ttft_mean"] for each in servers}) == 3
    with pytest.raises(ConfigError, match="unknown online policy"):
        replay(window, replace(SERVER, online_policy="none"), BudgetParams("hygen", 0.0))


def test_refused_and_abandoned_requests_are_part_of_the_load() -> None:
    _, keeper = make_keeper()
    keeper.on_refused(RequestClass.ONLINE, 70, 5.0)
    keeper.on_refused(RequestClass.OFFLINE, 70, 6.0)
    keeper.on_step(STEP, 0.0082, [output_of("left", 1, 0.2)], 7.0)
    for offline in (False, True):
        keeper.on_end(output_of("left", 0, 0.2, reason=FinishReason.ABORT, offline=offline), 7.5)
    assert list(keeper.load.arrivals) == [OnlineArrival(5.0, Lengths(70, 0)), OnlineArrival(0.0, Lengths(10, 0))]
    keeper.on_step(STEP, 0.0082, [output_of("good", 1, 0.1, reason=FinishReason.STOP)], 8.0)
    known = {a.lengths for a in resample(tuple(keeper.load.arrivals), 1.0, 100, seed=1)}
    assert known == {Lengths(70, 1), Lengths(10, 1)}, "an unknown output is that of another request"
    assert keeper.stats(8.0).offline_tokens == 0, "a line that was cancelled in the queue has computed nothing"


def test_what_the_engine_asks_of_itself_is_no_work_and_is_not_judged() -> None:
    _, keeper = make_keeper()
    probes = [
        output_of(f"{n}", 3, 9.0, reason=FinishReason.STOP, offline=offline)._replace(probe=True)
        for n in range(MIN_OFFLINE)
        for offline in (True, False)
    ]
    keeper.on_step(STEP, 0.0082, probes, 9.0)
    stats = keeper.stats(9.0)
    assert (stats.offline_tokens, stats.good_requests, stats.bad_requests) == (0, 0, 0)
    assert not keeper.offline_work() and not keeper.load.arrivals


def test_the_offline_lengths_are_those_of_the_jobs() -> None:
    core, keeper = make_keeper()
    assert keeper.offline_work() == []
    core.add_request(make_request("queued", range(80), 12, request_class=RequestClass.OFFLINE), 0.0)
    assert keeper.offline_work() == [Lengths(80, 12)]
    for index in range(MIN_OFFLINE):
        keeper.on_step(STEP, 0.0082, [output_of(f"{index}", 3, 1.0, reason=FinishReason.STOP, offline=True)], 1.0)
    assert keeper.offline_work() == [Lengths(10, 3)] * MIN_OFFLINE, "their measured values"


def test_what_had_no_end_is_no_good_answer() -> None:
    request = make_request("x", range(8), 4)
    started = VirtualRecord(Arrival(1.0, request), [1.5, 1.6])
    unstarted, refused = VirtualRecord(Arrival(2.0, request)), VirtualRecord(Arrival(3.0, request), rejected=True)
    refused.retry_after = 4.0
    run = VirtualRun([started, unstarted, refused], end=10.0)
    found = metrics_of(run, SLO.parse("ttft_p99=2s,ttft_mean=1s"), 5.0)
    assert found["slo_attainment"] == 0.0
    assert found["ttft_mean"] == pytest.approx((0.5 + 8.0 + 5.0) / 3)


@pytest.mark.slow
def test_no_budget_that_keeps_the_slo_is_obeyed() -> None:
    """A real search on a load whose SLO is out of reach: nothing offline may make it worse."""
    hopeless = replace(SERVER, slo=SLO.parse("tbt_mean=8.02ms"))
    window = poisson_window(2.0, 100, 40, 12.0, 1)
    found = find_budget(window, [], hopeless, max_evaluations=8)
    assert found.params.latency_budget == 0.0 and not found.slo_in_reach
    core, keeper = make_keeper(hopeless.slo)
    before = keeper.stats(0.0)
    keeper.set_budget(found.params, "searched for a test")
    held = keeper.stats(1.0)
    assert core.state.offline_share == held.offline_share == 0.0
    assert held.held == "no offline budget keeps the SLO (searched for a test)"
    assert held.latency_budget == before.latency_budget > 0.0, "a job without chats"
    keeper.on_step(STEP, 0.0082, [], 100.0)
    assert core.state.offline_share == 0.0, "no breaker lets it through"
    keeper.set_budget(BudgetParams("tidemill", 0.02), "searched for another load", replayed=True)
    assert core.state.offline_share == 1.0 and not keeper.stats(101.0).held


def test_what_is_proven_is_seconds_whatever_share_of_another_budget_they_are() -> None:
    _, keeper = make_keeper()
    initial = keeper.initial.latency_budget
    before = keeper.stats(0.0).offline_share
    assert before == 0.25
    for factor, share in ((0.5, 0.5), (2.0, 0.125), (0.125, 1.0)):
        keeper.set_budget(BudgetParams("tidemill", factor * initial), "less of it, or more")
        assert keeper.stats(0.0).offline_share == pytest.approx(share)
    keeper.set_budget(keeper.initial, "nothing is known")
    assert keeper.stats(0.0).offline_share == pytest.approx(0.125), "the rest is not proven"
    keeper.set_budget(BudgetParams("tidemill", initial), "searched", replayed=True)
    assert keeper.stats(0.0).offline_share == 1.0


def test_a_held_budget_keeps_offline_work_from_online_steps_and_lets_it_run_alone() -> None:
    core, keeper = make_keeper()
    keeper.set_budget(BudgetParams("tidemill", 0.0), "a test")
    offline = iter(ReplayWindow((), 1.0, (Lengths(100, 20),)).offline(1024, seed=1))
    arrivals = [Arrival(1.0, make_request("on", range(100), 50))]
    together: list[set[RequestClass]] = []

    class Watch(PredictedRunner):
        def launch(self, output: SchedulerOutput) -> Collect:
            together.append({request.request_class for request in core.state.in_flight[-1].requests})
            return super().launch(output)

    VirtualDriver(core, Watch(MODEL), arrivals, offline).run(3.0)
    assert {RequestClass.ONLINE} in together and {RequestClass.OFFLINE} in together
    assert {RequestClass.ONLINE, RequestClass.OFFLINE} not in together


def test_windows_have_as_many_arrivals_as_the_percentile_needs() -> None:
    needed = {"ttft_p99=1s": 1000, "tbt_p50=1s,ttft_p95=1s": 200, "tbt_mean=50ms": 200, "5%": 1000, "ttft_p97=1s": 333}
    for text, count in needed.items():
        assert SLO.parse(text).arrivals_needed == count
    record = recorded(250, rate=0.5)
    window = ReplayWindow.recorded(record, [Lengths(5, 6)], 0.5, 1000, seed=2)
    assert len(window.arrivals) == 1000 and window.offline_lengths == (Lengths(5, 6),)
    assert len(window.arrivals) / window.seconds == pytest.approx(0.5, rel=0.1)
    assert {a.lengths for a in window.arrivals} <= {a.lengths for a in record}
    assert list(window.arrivals) == sorted(window.arrivals, key=lambda a: a.at)
    assert window == ReplayWindow.recorded(record, [Lengths(5, 6)], 0.5, 1000, seed=2)


def busy_steps(slo: str, device: list[float], host: list[float], count: int = 300) -> Colocation:
    """Steps beside an online request whose device takes a share `device` of the predicted time, and the host its own
    time; both in turn. Every token is in time."""
    core, keeper = make_keeper(SLO.parse(slo))
    core.add_request(make_request("chat", [1] * 10, max_tokens=1000), 0.0)
    for index in range(count):
        took = MODEL.predict(features_of(STEP)) * device[index % len(device)]
        between = host[index % len(host)]
        keeper.on_step(STEP, took + between, [], index * 0.02, took)
    return keeper


@pytest.mark.parametrize("slo", ["tbt_p99=100ms", "ttft_p99=1s", "tbt_mean=50ms"])
def test_errors_that_endanger_nothing_do_not_open_the_breaker(slo: str) -> None:
    """Steps of 8 ms that the host makes twice as long or not: far off as a share, and nothing to 50 ms."""
    keeper = busy_steps(slo, [0.7, 1.3, 1.0], [0.0005, 0.012, 0.001, 0.0005, 0.009])
    assert keeper.stats(6.0).predictor_mape > 0.3
    assert keeper.num_openings == 0 and keeper.stats(6.0).breaker == "closed"


def test_steps_that_nobody_can_plan_open_the_breaker() -> None:
    """The same steps take 8 or 100 ms by turns: no scale puts that right, and every other gap is at its limit."""
    keeper = busy_steps("tbt_p99=100ms", [1.0, 12.0], [0.0])
    assert keeper.num_openings >= 1
    assert keeper.stats(0.0).breaker_cause == "predictor"


@pytest.mark.slow
def test_at_no_budget_idle_steps_are_short_enough_for_who_arrives_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """L = 0 on an idle machine: a chat that arrives in the middle of a large offline step waits for its end."""
    slo = SLO.parse("ttft_mean=20%")
    core, keeper = make_keeper(slo)
    for index in range(64):
        keeper.load.remember(OnlineArrival(float(index), Lengths(200, 8)))
    objectives: list[StepObjective] = []
    monkeypatch.setattr(core, "set_objective", objectives.append)
    keeper.set_budget(BudgetParams("tidemill", 0.0), "searched")
    bounded = objectives[-1]
    alone = MODEL.predict(StepShape(0, 0, ((0, 200),)).features())
    smallest = MODEL.predict(StepShape(1, 1).features())
    assert bounded.idle == pytest.approx(max(0.4 * alone, 2 * smallest), rel=0.2)
    ttfts = {}
    for name, objective in {"bounded": bounded, "as before": replace(bounded, idle=None, wait=math.inf)}.items():
        run = idle_run(replace(objective, budget=replace(objective.budget, latency_budget=0.2)))
        chats = [record.ttft for record in run.online if record.ttft is not None]
        assert len(chats) == len(run.online) == 60 and run.offline_tokens > 0
        ttfts[name] = sum(chats) / len(chats)
    unhindered = idle_run(bounded, offline=False)
    base = sum(record.ttft or 0.0 for record in unhindered.online) / 60
    assert ttfts["as before"] > 1.5 * base
    assert ttfts["bounded"] - base < 0.6 * bounded.idle, "half of such a step on average"
    keeper.set_budget(BudgetParams("tidemill", 0.2), "searched")
    assert objectives[-1].idle == bounded.idle, "a replay shows its effect on chats"
    for limit in ("ttft_p99=500ms", "ttft_mean=500ms"):
        waits = ArrivalWaits.of(SLO.parse(limit), MODEL, [("default", 200)], 2.0)
        objective = waits.objective(LIMITS, BudgetParams("tidemill", 0.2), searched="p99" in limit)
        assert objective.idle == waits.idle, "the limit itself bounds it"
        assert 0.1 < waits.idle < 0.5 and math.isinf(waits.mean)
    slo = SLO.parse("tbt_p99=60ms")
    waits = ArrivalWaits.of(slo, MODEL, [("default", 200)], 2.0)
    assert waits.objective(slo, BudgetParams("tidemill", 0.2), searched=True).idle_limit == 0.2, "as it was replayed"
    small, initial = (BudgetParams("tidemill", seconds) for seconds in (0.009, 0.1))
    rates = []
    for each in (small, initial):
        objective = waits.objective(slo, small, searched=False, initial=each)
        assert objective.budget == small and objective.idle == each.latency_budget
        rates.append(idle_run(objective, chats=1).offline_tokens)
    assert rates[1] > 1.5 * rates[0], "a budget derived from another load does not slow down a job without chats"


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [200, 40])
def test_a_tolerance_is_kept_where_chats_meet_nothing_but_offline_work(prompt: int) -> None:
    """5 % of a short prompt are less than half of the smallest step: offline steps take turns with rests."""
    slo = SLO.parse("ttft_mean=5%")
    waits = ArrivalWaits.of(slo, MODEL, [("default", prompt)], 2.0)
    budget = BudgetParams("tidemill", 0.05)
    base = mean_ttft(idle_run(waits.objective(slo, budget, searched=True), offline=False, prompt=prompt))
    for searched in (True, False):
        objective = waits.objective(slo, budget, searched=searched)
        run = idle_run(objective, prompt=prompt)
        assert mean_ttft(run) <= 1.05 * base and run.offline_tokens > 0
        without = idle_run(replace(objective, wait=math.inf), prompt=prompt)
        assert mean_ttft(without) > 1.05 * base
        assert run.offline_tokens > 0.5 * waits.mean / (waits.idle / 2) * without.offline_tokens, "it rests no longer"


@pytest.mark.slow
def test_who_has_not_come_for_long_is_not_waited_for() -> None:
    """At night nothing rests; with one chat in ten minutes it does not rest long after each."""
    slo = SLO.parse("ttft_mean=5%")
    for rate, awaited in ((2.0, SHORTEST_AWAITED), (0.05, 60.0), (1 / 900, 600.0), (0.0, 600.0)):
        assert ArrivalWaits.of(slo, MODEL, [("default", 40)], rate).awaited == pytest.approx(awaited)
    waits = ArrivalWaits.of(slo, MODEL, [("default", 40)], 2.0)
    objective = waits.objective(slo, BudgetParams("tidemill", 0.05), searched=True)
    always = idle_run(replace(objective, wait=math.inf), prompt=40, chats=1)
    never = idle_run(replace(objective, awaited=math.inf), prompt=40, chats=1)
    run = idle_run(objective, prompt=40, chats=1)  # one at the beginning of 32 s
    assert never.offline_tokens < 0.7 * always.offline_tokens
    share = (run.offline_tokens - never.offline_tokens) / (always.offline_tokens - never.offline_tokens)
    assert share == pytest.approx(1.0 - (0.5 + SHORTEST_AWAITED) / 32.0, abs=0.05) or share > 0.6


def test_the_first_chats_say_how_long_others_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before them prompts are taken for 256 tokens long, and 5 % of that is more than 5 % of the real length."""
    core, keeper = make_keeper(SLO.parse("5%"))
    objectives: list[StepObjective] = []
    monkeypatch.setattr(core, "set_objective", objectives.append)
    for index in range(4):
        times = RequestTimes(float(index), first_token=index + 0.1, last_token=index + 0.1)
        output = RequestOutput(str(index), [1], None, times, 40, 0, 1, FinishReason.LENGTH)
        keeper.on_arrival(RequestClass.ONLINE, float(index))
        keeper.on_step(STEP, 0.01, [output], index + 0.1)
    assert len(objectives) == 3, "after 1, 2 and 4"
    assert objectives[-1].wait == pytest.approx(ArrivalWaits.of(keeper.slo, keeper.model, [("default", 40)], 1.0).mean)
    assert objectives[-1].wait < ArrivalWaits.of(keeper.slo, keeper.model, [], 1.0).mean / 2


def test_rests_are_as_long_as_steps_were() -> None:
    objective = StepObjective(wait=0.002)
    assert objective.rest_after(0.004) == 0.0, "half is the allowed wait"
    assert objective.rest_after(0.008) == pytest.approx(0.008), "half of the time"
    assert objective.rest_after(0.016) == pytest.approx(3 * 0.016), "a quarter of it"
    assert objective.rest_after(30.0) == LONGEST_REST and StepObjective().rest_after(30.0) == 0.0


def mean_ttft(run: VirtualRun) -> float:
    ttfts = [record.ttft for record in run.online if record.ttft is not None]
    assert len(ttfts) == len(run.online)
    return sum(ttfts) / len(ttfts)


def idle_run(objective: StepObjective, offline: bool = True, prompt: int = 200, chats: int = 60) -> VirtualRun:
    """Chats of one token, so far apart that each meets a machine with offline work alone."""
    core = EngineCore(CONFIG, model=OnlineModel(MODEL), objective=objective)
    core.set_offline_share(0.0)
    arrivals = tuple(OnlineArrival(0.503 * (index + 1), Lengths(prompt, 1)) for index in range(chats))
    workload = ReplayWindow(arrivals, 32.0, (Lengths(400, 16),))
    requests = workload.offline(CONFIG.max_model_len, seed=1) if offline else None
    driver = VirtualDriver(core, PredictedRunner(MODEL), workload.online(CONFIG.max_model_len), requests)
    return driver.run(32.0, drain=5.0)


def test_a_trial_teaches_nothing_but_its_tokens_count() -> None:
    _core, keeper = make_keeper()
    before, scale = keeper.model.num_observed, keeper.model.scale
    keeper.on_step(STEP, 0.5, [output_of("a", 1, 0.2, FinishReason.LENGTH, beside=True)], 0.2, None, True)
    assert (keeper.model.num_observed, keeper.model.scale) == (before, scale)
    assert keeper.stats(0.2).attainment == 1.0
