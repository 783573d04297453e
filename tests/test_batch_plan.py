"""The forecast of batches: shares, paces, who is at risk, and what clients are told of it."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import hypothesis.strategies as st
import openai
import pytest
from batch_tools import batch_server, check_ended, jsonl, line, submit, until, until_counted
from hypothesis import given, settings

from engine.api import EngineStats, Lane, RequestClass, TokenCosts
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from engine.scheduling.ledger import token_costs
from engine.scheduling.report import report_stats
from engine.text.tokenizer import Tokenizer
from gateway.batch import pace as pace_module
from gateway.batch.forecast import LEAST_LINES, STEP_JOBS, Forecast
from gateway.batch.lengths import AnswerLengths, LineLengths
from gateway.batch.line import HEAD_ANSWERS, read_head
from gateway.batch.line_order import Runs
from gateway.batch.metrics import MAX_SHOWN, BatchCollector
from gateway.batch.pace import OnlineUse, Pace
from gateway.batch.shares import MAX_WORK, URGENT_SHARE, JobLoad, Shares
from gateway.store.objects import BatchJob, BatchStatus, LineRef, Usage
from predictor.model import LatencyModel
from predictor.online import OnlineModel

loads_strategy = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0.0, 1000.0), st.booleans()), min_size=1, max_size=12
)


def finish_times(loads: Sequence[JobLoad], rate: float) -> dict[str, float]:
    """Return the seconds until each job ends, by batch id, in O(n log n) for n jobs."""
    shares = Shares()
    for load in loads:
        shares.add(load)
    shares.seal()
    return {load.batch_id: shares.seconds(load, rate) for load in loads}


any_work = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([math.nan, math.inf, -math.inf, -1e308, 1e308, 1.7e308, -1e30, 5e-324, -5e-324, 0.0, -0.0]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), any_work, st.booleans()), max_size=40), any_work)
def test_every_job_has_an_end_whatever_its_work(jobs: list[tuple[str, float, bool]], rate: float) -> None:
    loads = [JobLoad(str(i), tenant, work, risk) for i, (tenant, work, risk) in enumerate(jobs)]
    ends = finish_times(loads, rate)
    assert ends.keys() == {load.batch_id for load in loads}
    assert all(end >= 0.0 for end in ends.values()), "NaN is no time"
    if 1e-200 < rate < 1e200:
        assert all(math.isfinite(end) for end in ends.values())
        assert all(ends[x.batch_id] >= min(x.work, MAX_WORK) / rate * (1 - 1e-9) for x in loads if x.work > 0.0)


def _in_steps(loads: Sequence[JobLoad], rate: float) -> dict[str, float]:
    """The definition: the machine is shared anew at the end of each job."""
    left = {load.batch_id: load for load in loads}
    remaining = {load.batch_id: load.work for load in loads}
    ends: dict[str, float] = {}
    passed = 0.0
    while left:
        lanes: dict[bool, dict[str, list[str]]] = {}
        for load in left.values():
            lanes.setdefault(load.at_risk, {}).setdefault(load.tenant, []).append(load.batch_id)
        speeds: dict[str, float] = {}
        for at_risk, tenants in lanes.items():
            share = 1.0 if len(lanes) == 1 else URGENT_SHARE if at_risk else 1.0 - URGENT_SHARE
            for names in tenants.values():
                speeds |= dict.fromkeys(names, rate * share / len(tenants) / len(names))
        first = min(left, key=lambda name: remaining[name] / speeds[name])
        step = remaining[first] / speeds[first]
        passed += step
        for name in left:
            remaining[name] = max(0.0, remaining[name] - step * speeds[name])
        ends[first] = passed
        del left[first]
    return ends


@settings(deadline=None)
@given(loads_strategy, st.floats(0.01, 100.0))
def test_ends_are_those_of_a_machine_shared_step_by_step(jobs: list[tuple[str, float, bool]], rate: float) -> None:
    loads = [JobLoad(str(i), tenant, work, risk) for i, (tenant, work, risk) in enumerate(jobs)]
    assert finish_times(loads, rate) == pytest.approx(_in_steps(loads, rate), rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(loads_strategy, st.tuples(st.sampled_from("abcd"), st.floats(0.0, 1000.0), st.booleans()))
def test_a_new_job_is_judged_as_if_it_were_one_of_them(
    jobs: list[tuple[str, float, bool]], new: tuple[str, float, bool]
) -> None:
    loads = [JobLoad(str(i), tenant, work, risk) for i, (tenant, work, risk) in enumerate(jobs)]
    shares, added = Shares(), JobLoad("new", *new)
    for load in loads:
        shares.add(load)
    shares.seal()
    found = shares.seconds(added, 2.0, is_new=True)
    assert found == pytest.approx(finish_times([*loads, added], 2.0)["new"], rel=1e-6, abs=1e-6)


def test_a_judgement_of_many_jobs_comes_in_small_steps_in_which_the_last_one_holds() -> None:
    forecast = a_forecast(rate=10.0)
    jobs = [(a_batch(f"batch_{i}", 10**6, 10 + i), LineLengths(1_000 + 100 * i, 100.0)) for i in range(500)]
    forecast.update(jobs[:1], 250.0)
    before, steps = forecast.outlooks, 0
    for steps, _ in enumerate(forecast.steps(jobs, 251.0), 1):
        assert forecast.outlooks is before
        if steps == 5:
            late = a_batch("late", 10**6, 20)
            assert forecast.add(late, LineLengths(2_000, 100.0), 251.0).eta is not None
    assert steps >= 3 * 500 // STEP_JOBS
    assert forecast.outlooks.keys() == {batch.id for batch, _ in jobs} | {"late"}


def test_the_outlook_of_a_job_beyond_all_time_has_no_end() -> None:
    forecast = a_forecast(rate=10.0)
    forecast.update([(a_batch("x", 10**6, 10**15), LineLengths(10**17, 100.0, (math.inf,)))], 250.0)
    outlook = forecast.outlooks["x"]
    assert outlook.misses and outlook.eta is None and "tidemill.warning" in outlook.notes(a_batch("x", 10**6, 1))


def test_the_pace_counts_time_with_work_and_survives_a_clock_that_jumps() -> None:
    pace = Pace()
    assert pace.rate is None and pace.output_per_line == 64.0
    pace.advance(1000.0, busy=True)
    for second in range(1, 11):
        pace.line_ended(100, Usage(30, 10, 5), 2.0)
        pace.advance(1000.0 + second, busy=True)
    assert pace.rate == pytest.approx(2.0, rel=0.01) and pace.tokens_per_second == pytest.approx(35.0, rel=0.01)
    assert pace.tokens_per_byte == pytest.approx(0.2) and pace.output_per_line == pytest.approx(5.0)
    pace.advance(90_000.0, busy=False)
    assert pace.rate == pytest.approx(2.0, rel=0.01), "an empty night is no slow one"
    pace.advance(5.0, busy=True)
    assert pace.rate == pytest.approx(2.0, rel=0.01)


def test_work_far_ahead_is_expected_at_the_pace_of_a_longer_time() -> None:
    """The load has a period of two hours, and twenty hours are left."""
    pace, work = Pace(), [60.0 + 54.0 * math.sin(2.0 * math.pi * minute / 120.0) for minute in range(3000)]
    for minute in range(1500):
        pace.advance(60.0 * minute, busy=True)
        pace.line_ended(100, Usage(), work[minute])
        if minute >= 1200:
            assert pace.seconds(sum(work[minute + 1 : minute + 1201]), None) == pytest.approx(72_000.0, rel=0.1)


def test_online_load_is_expected_by_time_of_day_from_the_third_day_on() -> None:
    """Chats take up to 90 % of the machine at noon. Batch work runs in every other hour. It is off from 6:30 to 7."""
    pace, online, used, day = Pace(), OnlineUse(), 0.0, 1440

    def load(minute: int) -> float:
        quiet = 0.3 if minute >= 4 * day else 1.0
        return quiet * (0.45 - 0.45 * math.cos(2.0 * math.pi * minute / day))

    for minute in range(4 * day + day // 2):
        if minute // 30 % 48 == 13:
            continue
        if minute % 360 == 0 and 0 < minute <= 4 * day:
            ahead = [60.0 * (1.0 - load(later % day)) for later in range(minute, minute + 12 * 60)]
            room = online.room()
            assert (room is not None) == (minute > 2.1 * day)
            if room is not None:
                assert pace.seconds(0.8 * sum(ahead), online.left, room) == pytest.approx(12 * 3600.0, rel=0.1)
                assert room.until(room.seconds(9e4)) == pytest.approx(9e4) and room.seconds(1e6) > 1e6
        used += 60.0 * load(minute)
        online.advance(60.0 * minute, (used, 0.0), TokenCosts(1.0, 1.0))
        pace.advance(60.0 * minute, minute // 60 % 2 == 0, left=online.left_last)
        if minute // 60 % 2 == 0:
            pace.line_ended(100, Usage(), 0.8 * 60.0 * (1.0 - load(minute)))
    assert online.room() is None, "a day of much less load is none of those known"


def test_a_batch_that_runs_whole_ends_with_its_longest_line() -> None:
    """50 lines of 50 tokens have ended, 50 with 100 tokens so far run at 20 ms a step, with room for all."""
    stats = EngineStats(token_costs=TokenCosts(0.0, 1e-6), running={RequestClass.OFFLINE: 50}, job_tokens={"x": 5000})
    running = [replace(stats, steps=steps, step_seconds=0.02 * steps) for steps in (0, 100, 300)]
    batch = a_batch("x", 10**9, 50, 50, usage=Usage(0, 0, 2500))
    for most, tokens in ((math.inf, 150.0 * (math.log(50) + 0.577)), (200.0, 200.0)):
        engine = iter(running)
        forecast = Forecast(lambda engine=engine: next(engine))
        for now in (0.0, 2.0, 6.0):
            forecast.update([(batch, LineLengths(10_000, 100.0, (most,)))], now)
        eta = forecast.outlooks["x"].eta
        assert eta is not None and eta - 6.0 == pytest.approx(0.02 * tokens, rel=0.01)


def test_output_of_running_lines_counts_less_its_price_as_a_prompt() -> None:
    forecast = Forecast(lambda: EngineStats(token_costs=TokenCosts(0.001, 0.003), job_tokens={"x": 1000}))
    forecast.update([(a_batch("x", 10**9, 100), LineLengths(10_000, 100.0, (64.0,)))], 0.0)
    assert forecast.pace.averages[0].work == pytest.approx(2.0)


CHATS: dict[str, Callable[[float], float]] = {
    "steady": lambda _: 0.4,
    "double": lambda _: 0.8,
    "sine": lambda now: 0.4 - 0.4 * math.cos(now / 10.0),
}
CHATS["day"] = CHATS["sine"]
PERIOD = 20.0 * math.pi


@pytest.mark.parametrize("shape", CHATS)
def test_the_end_is_known_within_15_percent_from_a_fifth_of_the_lines_on(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats take a share of 1,000 tokens/s; 64 lines share the rest. Answers have about 4, 40 or 400 tokens
    by prefix; the last lines run longest first.
    Of a sine, only averages over whole periods can be known, unless two periods were seen and each is a day."""
    if shape == "day":
        monkeypatch.setattr(pace_module, "DAY", PERIOD)
    since, least = (2.0 * PERIOD, 60.0) if shape == "day" else (0.0, 130.0)
    draw, now, used, usage, looks = Random(4), 0.0, 0.0, Usage(), list[tuple[float, float, float | None]]()
    means = [(4, 40, 400)[rank // 250 % 3] for rank in range(3000)]
    lengths = [1.0 + draw.gauss(mean, 0.3 * mean) for mean in means]
    runs, learned, held = Runs(3000, in_order=False), AnswerLengths(3000), dict[int, float]()
    order = [rank for index in range(runs.count) for rank in runs.ranks(index)]
    order[2200:] = sorted(order[2200:], key=lambda rank: -means[rank])
    costs = TokenCosts(0.0, 0.001)
    forecast = Forecast(
        lambda: EngineStats(token_costs=costs, decode_tokens=int(used), job_tokens={"x": int(sum(held.values()))})
    )
    while order or held:
        while order and len(held) < 64:
            learned.begin(LineRef(order[0], order[0], 0, 1))
            held[order.pop(0)] = 0.0
        batch = a_batch("x", 10**9, 3000 - learned.ended, learned.ended, usage=usage)
        forecast.update([(batch, LineLengths(3000, 1.0, (), learned))], now)
        looks.append((learned.ended / 3000, now, forecast.outlooks["x"].eta))
        now, taken = now + 2.0, 2000.0 * CHATS[shape](now)
        used, room = used + taken, (2000.0 - taken) / len(held)
        for rank, tokens in list(held.items()):
            held[rank] = tokens + room
            if held[rank] >= lengths[rank]:
                del held[rank]
                learned.add(LineRef(rank, rank, 0, 1), int(lengths[rank]))
                usage = usage.plus(Usage(1, 0, int(lengths[rank])))
                forecast.line_ended(1, Usage(1, 0, int(lengths[rank])))
    looks = [look for look in looks if look[0] >= 0.2 and since <= look[1] <= now - least]
    late = [((eta or 0.0) - now) / (now - at) for _, at, eta in looks]
    assert len(late) > 100 and max(map(abs, late)) <= 0.15


def a_batch(name: str, expires_at: int, remaining: int, completed: int = 0, **fields: Any) -> BatchJob:
    values = {"total": remaining + completed, "completed": completed, "status": BatchStatus.IN_PROGRESS, **fields}
    return BatchJob(name, fields.pop("tenant", ""), "e", "f", "24h", 0, expires_at, **values)


def a_forecast(rate: float = 10.0, costs: TokenCosts | None = None) -> Forecast:
    """Lines of 100 bytes, 20 computed prompt tokens, 5 output tokens; `rate` tokens of work per second."""
    forecast = Forecast(lambda: EngineStats(token_costs=costs))
    waiting = [(a_batch("seen", 10**9, 1), LineLengths(100, 100.0))]
    forecast.update(waiting, 0.0)
    for second in range(1, 101):
        forecast.line_ended(100, Usage(20, 0, 5))
        forecast.update(waiting, second * 25.0 / rate)
    return forecast


def test_who_is_at_risk_and_until_when() -> None:
    forecast = a_forecast(rate=10.0)
    now = 250.0
    calm, late = a_batch("calm", 10**6, 100), a_batch("late", 500, 50)
    lengths = [(calm, LineLengths(10_000, 100.0)), (late, LineLengths(5_000, 100.0))]
    forecast.update(lengths, now)
    # 50 lines are 1,250 tokens; at half of 10 a second they take 250 s, at 7/8 of it 143 s
    outlook = forecast.outlooks["late"]
    assert outlook.at_risk and not outlook.misses and not forecast.outlooks["calm"].at_risk
    assert outlook.eta == pytest.approx(now + 1250 / (10 * URGENT_SHARE), rel=0.05)
    assert outlook.tokens == pytest.approx(1250, rel=0.01)
    forecast.update([lengths[0], (replace(late, expires_at=540), lengths[1][1])], now)
    assert forecast.outlooks["late"].at_risk, "what helped is not taken away at once"
    forecast.update([lengths[0], (replace(late, expires_at=650), lengths[1][1])], now)
    assert not forecast.outlooks["late"].at_risk
    forecast.update([lengths[0], (replace(late, expires_at=350), lengths[1][1])], now)
    assert forecast.outlooks["late"].at_risk and forecast.outlooks["late"].misses
    notes = forecast.outlooks["late"].notes(late)
    assert notes["tidemill.at_risk"] == "true" and int(notes["tidemill.eta"]) > 350
    assert "will not finish" in notes["tidemill.warning"]


def test_each_job_says_when_it_will_end_and_the_first_hundred_are_shown() -> None:
    forecast = a_forecast(rate=10.0)
    forecast.update(
        [(a_batch(f"batch_{i}", 10**6, 10 + i), LineLengths(1_000 + 100 * i, 100.0)) for i in range(150)], 250.0
    )
    worker: Any = SimpleNamespace(
        states={},
        forecast=forecast,
        lines_ended=Counter(),
        storage_fault=lambda: None,
        feeder=SimpleNamespace(retries=Counter(), num_paused=0),
    )
    other: Any = SimpleNamespace(unreachable=[], attempts=Counter())
    samples = [sample for metric in BatchCollector(worker, other, other).collect() for sample in metric.samples]
    shown = {s.labels["batch"]: s.value for s in samples if s.name == "tidemill_batch_job_eta_timestamp_seconds"}
    etas = {batch: outlook.eta or 0.0 for batch, outlook in forecast.outlooks.items()}
    assert len(shown) == MAX_SHOWN and all(value == etas[batch] for batch, value in shown.items())
    assert max(shown.values()) <= min(eta for batch, eta in etas.items() if batch not in shown)
    assert max(etas.values()) in [s.value for s in samples if s.name == "tidemill_batch_eta_timestamp_seconds"]


def test_a_job_with_finished_lines_is_judged_by_them() -> None:
    forecast = a_forecast()
    usage = Usage(input_tokens=400 * LEAST_LINES, cached_tokens=0, output_tokens=100 * LEAST_LINES)
    batch = a_batch("long", 10**9, 10, LEAST_LINES, usage=usage)
    forecast.update([(batch, LineLengths(100 * (10 + LEAST_LINES), 100.0))], 1000.0)
    assert forecast.outlooks["long"].tokens == pytest.approx(10 * 500)


def test_without_any_experience_the_machine_is_taken_for_idle() -> None:
    assert not Forecast(EngineStats).first(a_batch("x", 10, 0), 10**9, 0.0).misses, "no cost is known yet"
    forecast = Forecast(lambda: EngineStats(token_costs=TokenCosts(0.001, 0.01)))
    hopeless, easy = a_batch("x", 60, 0), a_batch("y", 86_400, 0)
    assert forecast.first(hopeless, 10_000_000, 0.0).misses
    assert not forecast.first(easy, 100_000, 0.0).misses
    assert forecast.first(easy, 100_000, 0.0).eta is None


def test_a_fresh_server_has_what_online_work_leaves() -> None:
    tokens = [0, 0]
    costs = TokenCosts(0.001, 0.01)
    forecast = Forecast(lambda: EngineStats(token_costs=costs, prefill_tokens=tokens[0], decode_tokens=tokens[1]))
    batch = a_batch("x", 130, 0)
    head = LineLengths(1_000, 100.0, (64.0,) * 10)  # 100 lines: 2.5 s of prompts, 64 s of answers
    forecast.update([], 0.0)
    assert not forecast.first(batch, 10_000, 60.0, head).misses, "an idle machine"
    tokens[:] = [30_000, 0]  # half of 60 s
    assert forecast.first(batch, 10_000, 60.0, head).misses
    tokens[:] = [30_000, 10**6]
    forecast.update([], 120.0)
    assert not forecast.first(a_batch("y", 10**6, 0), 10_000, 120.0, head).misses, "never without hope"
    tokens[:] = [0, 0]  # the engine is another one
    for minute in range(3, 200):
        forecast.update([], 60.0 * minute)
    assert not forecast.first(replace(batch, expires_at=12_020), 10_000, 60.0 * 199, head).misses


def test_lines_answer_no_more_than_they_may() -> None:
    forecast = Forecast(lambda: EngineStats(token_costs=TokenCosts(0.001, 0.01)))
    assert forecast.first(a_batch("x", 30, 0), 10_000, 0.0, LineLengths(1_000, 100.0, (math.inf,))).misses
    assert not forecast.first(a_batch("x", 30, 0), 10_000, 0.0, LineLengths(1_000, 100.0, (4.0,))).misses
    seen = a_forecast()  # lines of others answer 5 tokens
    seen.update([(a_batch("x", 10**9, 100), LineLengths(10_000, 100.0, (2.0, 2000.0)))], 250.0)
    assert seen.outlooks["x"].tokens == pytest.approx(100 * (20 + 3.5))


def test_the_first_lines_of_a_job_count_as_many_as_they_are() -> None:
    forecast = a_forecast()  # lines of others: 20 and 5
    tokens = []
    for ended in range(LEAST_LINES + 1):
        usage = Usage(input_tokens=20 * ended, cached_tokens=0, output_tokens=805 * ended)
        job = a_batch("long", 10**9, 10, ended, usage=usage)
        forecast.update([(job, LineLengths(100 * (10 + ended), 100.0, (2000.0,)))], 250.0)
        tokens.append(forecast.outlooks["long"].tokens)
    assert tokens == pytest.approx([10 * (25 + 800 * ended / LEAST_LINES) for ended in range(LEAST_LINES + 1)])


def test_the_first_seconds_of_a_pace_are_not_believed_alone() -> None:
    """Lines of ten seconds, 50 at a time: for as long nothing ends, then two do, and all others a moment later."""
    forecast, batch = Forecast(lambda: EngineStats(token_costs=TokenCosts(0.001, 0.01))), a_batch("x", 10**9, 1000)
    jobs = [(batch, LineLengths(100_000, 100.0, (10.0,)))]
    forecast.update(jobs, 0.0)
    forecast.update(jobs, 10.0)
    forecast.line_ended(100, Usage(25, 0, 10))
    forecast.line_ended(100, Usage(25, 0, 10))
    forecast.update(jobs, 10.5)
    eta = forecast.outlooks["x"].eta
    assert eta is not None and eta - 10.5 < 3 * 1000 * 0.125, "by the two lines alone it is 5,250 s"


def head_of(path: Path, bodies: Sequence[Any], endpoint: str = "/v1/chat/completions") -> LineLengths:
    path.write_bytes(jsonl({"body": body} for body in bodies))
    head = read_head(path, endpoint)
    assert head is not None
    return head


def test_the_head_of_a_file_tells_of_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    assert read_head(path, "/v1/completions") is None
    path.write_bytes(b"")
    assert read_head(path, "/v1/completions") is None
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    limits: list[dict[str, Any]] = [{"max_tokens": 7}, {"max_completion_tokens": 9, "n": 2}, {}]
    assert head_of(path, [{**chat, **limit} for limit in limits]).answers == (7.0, 18.0, math.inf)
    response = {"model": "m", "input": "x", "max_output_tokens": 5}
    assert head_of(path, [response], "/v1/responses").answers == (5.0,)
    path.write_bytes(jsonl(line(i) for i in range(5000)))
    head = read_head(path, "/v1/completions")
    assert head is not None and set(head.answers) == {4.0} and len(head.answers) <= HEAD_ANSWERS
    assert head.pending_line == pytest.approx(len(jsonl([line(100)])), rel=0.01)
    path.write_bytes(b'{"body": {"prompt": "' + b"x" * 100_000)
    assert read_head(path, "/v1/completions") is None, "no line is whole"


WRONG_NUMBERS: list[Any] = [-1e30, -1e308, -5, 0, "-inf", "inf", "nan", "7", True, 1.5, 2**31, 10**30, [], {}]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n"])
@pytest.mark.parametrize("number", WRONG_NUMBERS, ids=repr)
def test_an_invalid_line_counts_as_no_work(tmp_path: Path, name: str, number: Any) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert head_of(tmp_path / "in.jsonl", [{**chat, name: number}, chat]).answers == (0.0, 3.0)


def test_what_is_no_line_counts_as_no_work(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'[1]\n{\nnull\n"x"\n{"body":1}\n{"body":{"max_tokens":NaN}}\n{"body":{"max_tokens":1e999}}\n')
    head = read_head(path, "/v1/chat/completions")
    assert head is not None and head.answers == (0.0,) * 7


def test_a_margin_that_guards_objectives_is_no_cost() -> None:
    model = LatencyModel(intercept=0.01, decodes=0.001)
    config = SchedulerConfig(num_units=64, max_model_len=64, max_num_seqs=8)
    core = EngineCore(config, model=OnlineModel(model, 0.25))
    assert report_stats(core.state).token_costs == token_costs(model, config)


# ---- over HTTP


SLOW = EngineStats(token_costs=TokenCosts(1.0, 1.0))


async def test_a_job_that_cannot_make_it_is_told_so_and_its_lines_go_first(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with batch_server(tokenizer, tmp_path, hold_after=0) as (served, client):
        served.engine.snapshot = SLOW
        await served.app.state.context.metrics.take_snapshot()
        created = await submit(client, jsonl(line(i) for i in range(20)), completion_window="60s", metadata={"a": "b"})
        assert created.metadata is not None and created.metadata["a"] == "b"
        assert "will not finish" in created.metadata["tidemill.warning"], "a warning, no refusal"
        await served.engine.wait_for_event("add", 20)
        assert {request.lane for request in served.engine.requests} == {Lane.AT_RISK}
        running = await client.batches.retrieve(created.id)
        assert running.metadata is not None and running.metadata["tidemill.at_risk"] == "true"
        async with httpx.AsyncClient(timeout=60) as http:
            metrics = (await http.get(f"{served.url}/metrics")).text
        assert "tidemill_batch_jobs_at_risk 1.0" in metrics
        listed = [batch async for batch in client.batches.list()]
        assert listed[0].metadata == running.metadata
        served.engine.release()
        ended = await until(client, created.id)
        assert ended.status == "completed" and ended.metadata == {"a": "b"}, "ended batches have no forecast"


async def test_absurd_numbers_of_a_line_are_an_error_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, hold_after=0) as (served, client):
        served.engine.snapshot = SLOW
        await served.app.state.context.metrics.take_snapshot()
        wrong = [number for number in WRONG_NUMBERS if number is True or number != 0]  # 0: the prompt alone
        lines = [line(0), *(line(i + 1, max_tokens=number) for i, number in enumerate(wrong))]
        created = await submit(client, jsonl(lines))
        await served.engine.wait_for_event("add", 1)
        await client.batches.retrieve(created.id)
    async with batch_server(tokenizer, tmp_path) as (served, client):  # the batch goes on after a restart
        ended = await until(client, created.id)
        output, errors = await check_ended(client, ended, [f"id-{i}" for i in range(len(lines))])
        assert output.keys() == {"id-0"}
        assert {row["response"]["status_code"] for row in errors.values()} == {400}


async def test_a_job_with_time_is_a_plain_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, hold_after=0) as (served, client):
        created = await submit(client, jsonl(line(i) for i in range(20)))
        assert created.metadata is None
        await served.engine.wait_for_event("add", 20)
        assert {request.lane for request in served.engine.requests} == {Lane.BATCH}
        running = await client.batches.retrieve(created.id)
        assert running.metadata.pop("tidemill.remaining_tokens").isdigit()
        assert running.metadata == {"tidemill.at_risk": "false"}, "no pace, no eta"
        served.engine.release()
        assert (await until(client, created.id)).metadata is None


async def test_the_eta_is_shown_while_lines_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, "some words") as (served, client):
        worker = served.app.state.batches.jobs
        first = await until(client, (await submit(client, jsonl(line(i) for i in range(30)))).id)
        assert first.status == "completed"
        worker.forecast.pace.averages[0].seconds = 10.0  # of batch work: the test has no time to wait for it
        assert worker.forecast.pace.rate is not None
        served.engine.script = lambda request, script=served.engine.script: replace(script(request), hold_after=0)
        second = await submit(client, jsonl(line(i) for i in range(30)))
        await served.engine.wait_for_event("add", 60)
        running = await client.batches.retrieve(second.id)
        while "tidemill.eta" not in (running.metadata or {}):
            await asyncio.sleep(0.01)
            running = await client.batches.retrieve(second.id)
        assert int(running.metadata["tidemill.eta"]) >= running.created_at
        served.engine.release()
        await until(client, second.id)
        await until_counted(client, second.id, 30)


async def test_the_servers_own_metadata_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path) as (_, client):
        with pytest.raises(openai.BadRequestError, match=r"'tidemill\.'"):
            await submit(client, jsonl([line(1)]), metadata={"tidemill.eta": "1"})
