"""The forecast of batches: ranges of ends, the measured rate, batches at risk, and the notes for clients."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from batch_tools import batch_server, check_ended, jsonl, line, submit, until
from hypothesis import given, settings
from support.fuzz import fuzz
from support.http import get

from engine.api import Lane, TokenCosts
from engine.client import EngineStats
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from engine.scheduling.objective import token_costs
from engine.scheduling.report import report_stats
from engine.text.tokenizer import Tokenizer
from gateway.batch.forecast import ENTER_MARGIN, LEAST_LINES, SPREAD, STEP_JOBS, EndRange, Forecast, Pace
from gateway.batch.line import HEAD_ANSWERS, read_head
from gateway.batch.metrics import MAX_SHOWN, BatchCollector
from gateway.batch.run import RUN_LINES, LineSizes, Runs, by_deadline
from gateway.store.objects import BatchJob, BatchStatus, Usage
from predictor.model import LatencyModel
from predictor.online import OnlineModel

# ---- the range of an end


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 1000.0), st.floats(0.0, 1e6)), min_size=1, max_size=60))
def test_a_range_lies_ahead_and_meets_the_range_before(looks: list[tuple[float, float]]) -> None:
    """A look: seconds since the last one, and the estimated seconds left."""
    shown, now, before = EndRange(), 1e9, None
    for step, left in looks:
        now += step
        low, high = shown.update(now + left, now)
        assert now <= low <= high, "never negative"
        assert before is None or (low <= max(now, before[1]) and high >= before[0])
        before = (low, high)


@fuzz(100)
@given(st.lists(st.floats(1e3, 1e6), min_size=1, max_size=60))
def test_a_range_moves_by_at_most_its_width_and_only_if_the_estimate_leaves_it(ends: list[float]) -> None:
    shown = EndRange()
    low, high = shown.update(ends[0], 0.0)
    for end in ends[1:]:
        new_low, new_high = shown.update(end, 0.0)
        assert max(new_high - high, low - new_low) <= high - low + 1e-3
        if low <= end <= high:
            assert low <= new_low <= end <= new_high <= high, "it can only shrink"
            assert (new_low, new_high) == (low, high) or high - low > 2.0 * 2.0 * SPREAD * end
        low, high = new_low, new_high


@fuzz(100)
@given(st.floats(100.0, 1e6))
def test_a_range_around_a_steady_end_shrinks_within_itself(left: float) -> None:
    shown, ranges = EndRange(), list[tuple[float, float]]()
    for passed in range(100):
        low, high = shown.update(1e9 + left, 1e9 + left * passed / 100)
        assert low <= 1e9 + left <= high
        ranges.append((low, high))
    assert all(a[0] <= b[0] and b[1] <= a[1] for a, b in pairwise(ranges))
    assert len(set(ranges)) < 60, "most updates change nothing"


# ---- the rate


def test_the_pace_counts_time_with_work_and_survives_a_clock_that_jumps() -> None:
    pace = Pace()
    assert pace.rate is None and pace.output_per_line == 64.0
    pace.advance(1000.0, busy=True)
    for second in range(1, 11):
        pace.line_ended(100, Usage(30, 10, 5), 2.0)
        pace.advance(1000.0 + second, busy=True)
    assert pace.rate == pytest.approx(2.0, rel=0.01) and pace.tokens_per_second == pytest.approx(35.0, rel=0.01)
    assert pace.prompt_tokens_per_byte == pytest.approx(0.2) and pace.output_per_line == pytest.approx(5.0)
    pace.advance(90_000.0, busy=False)
    assert pace.rate == pytest.approx(2.0, rel=0.01), "an empty night is no slow one"
    pace.advance(5.0, busy=True)
    assert pace.rate == pytest.approx(2.0, rel=0.01)


# ---- outlooks


def a_batch(name: str, expires_at: int, remaining: int, completed: int = 0, **fields: Any) -> BatchJob:
    values = {"total": remaining + completed, "completed": completed, "status": BatchStatus.IN_PROGRESS, **fields}
    return BatchJob(name, values.pop("tenant", ""), "e", "f", "24h", 0, expires_at, **values)


SIZES = LineSizes(100.0)


def update(forecast: Forecast, jobs: Sequence[tuple[BatchJob, LineSizes]], now: float) -> None:
    for _ in forecast.update(jobs, now):
        pass


def a_forecast(rate: float = 10.0, costs: TokenCosts | None = None) -> Forecast:
    """Lines of 100 bytes, 20 computed prompt tokens, 5 output tokens; `rate` tokens of work per second."""
    forecast = Forecast(lambda: EngineStats(token_costs=costs))
    waiting = [(a_batch("seen", 10**9, 1), SIZES)]
    update(forecast, waiting, 0.0)
    for second in range(1, 101):
        forecast.line_ended(100, Usage(20, 0, 5))
        update(forecast, waiting, second * 25.0 / rate)
    return forecast


def middle(forecast: Forecast, name: str) -> float:
    eta = forecast.outlooks[name].eta
    assert eta is not None
    return sum(eta) / 2


def test_nothing_is_expected_before_a_rate_is_measured() -> None:
    forecast = Forecast(lambda: EngineStats(token_costs=TokenCosts(1.0, 1.0)))
    batch = a_batch("x", 10, 100)
    update(forecast, [(batch, SIZES)], 0.0)
    for outlook in (forecast.outlooks["x"], forecast.first(replace(batch, id="y"), 10**9, 0.0)):
        assert (outlook.eta, outlook.at_risk, outlook.misses) == (None, False, False) and outlook.tokens > 0
        assert "tidemill.eta" not in outlook.notes(batch)


def test_batches_end_by_deadline_and_tenants_alike() -> None:
    """Lines of 25 tokens at 10 tokens a second."""
    forecast = a_forecast(rate=10.0)
    jobs = [
        (a_batch("late", 10**6 + 2, 40), SIZES),
        (a_batch("early", 10**6 + 1, 20), SIZES),
        (a_batch("other", 10**6, 100, tenant="b"), SIZES),
        (a_batch("small", 10**6, 4, tenant="c"), SIZES),
    ]
    update(forecast, jobs, 250.0)
    work = {"early": 2 * 20 + 4, "late": 2 * 60 + 4, "other": 60 + 100 + 4, "small": 3 * 4}
    for name, lines in work.items():
        assert middle(forecast, name) == pytest.approx(250.0 + lines * 2.5, rel=0.01)


@fuzz(100)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 10**6), st.integers(0, 10**9)), min_size=1, max_size=30)
)
def test_every_batch_ends_and_the_last_one_when_all_work_is_done(jobs: list[tuple[str, int, int]]) -> None:
    forecast = a_forecast(rate=10.0)
    batches = [
        a_batch(f"{number}", 10**9 + deadline, lines, tenant=tenant)
        for number, (tenant, lines, deadline) in enumerate(jobs)
    ]
    update(forecast, [(batch, SIZES) for batch in batches], 250.0)
    etas = {name: outlook.eta or (0.0, 0.0) for name, outlook in forecast.outlooks.items()}
    low, high = max(etas.values())
    assert low <= 250.0 + 2.5 * sum(lines for _, lines, _ in jobs) <= high
    for tenant in "abc":
        own = [etas[batch.id] for batch in sorted(batches, key=by_deadline) if batch.tenant == tenant]
        assert own == sorted(own)


def test_an_update_of_many_batches_comes_in_small_steps_in_which_the_last_one_holds() -> None:
    forecast = a_forecast()
    jobs = [(a_batch(f"batch_{i}", 10**6, 10 + i), SIZES) for i in range(500)]
    update(forecast, jobs[:1], 250.0)
    before, steps = forecast.outlooks, 0
    for _ in forecast.update(jobs, 251.0):
        steps += 1
        assert forecast.outlooks is before
    assert steps >= 2 * 500 // STEP_JOBS
    assert forecast.outlooks.keys() == {batch.id for batch, _ in jobs}


def test_a_batch_beyond_all_time_has_no_end() -> None:
    forecast = a_forecast()
    batch = a_batch("x", 10**6, 10**15)
    update(forecast, [(batch, SIZES)], 250.0)
    outlook = forecast.outlooks["x"]
    assert outlook.misses and outlook.eta is None and "tidemill.warning" in outlook.notes(batch)


def test_who_is_at_risk_and_until_when() -> None:
    """50 lines of 25 tokens at 10 a second take 125 s beside another tenant's batch twice as long."""
    forecast, now, needed = a_forecast(rate=10.0), 250.0, 250.0
    calm = a_batch("calm", 10**6, 100, tenant="b")

    def outlook_of(seconds: float) -> Any:
        late = a_batch("late", round(now + seconds), 50)
        update(forecast, [(calm, SIZES), (late, SIZES)], now)
        return forecast.outlooks["late"]

    assert not outlook_of(ENTER_MARGIN * needed + 9).at_risk and not forecast.outlooks["calm"].at_risk
    outlook = outlook_of(ENTER_MARGIN * needed - 9)
    assert outlook.at_risk and not outlook.misses and outlook.tokens == pytest.approx(1250, rel=0.01)
    assert outlook_of(ENTER_MARGIN * needed + 9).at_risk, "what helped is not taken away at once"
    assert not outlook_of(1.3 * needed).at_risk
    outlook = outlook_of(0.4 * needed)
    assert outlook.at_risk and outlook.misses, "too late even alone"
    notes = outlook.notes(a_batch("late", 1, 50))
    low, high = map(int, notes["tidemill.eta"].split("-"))
    assert notes["tidemill.at_risk"] == "true" and now < low < now + needed < high
    assert "will not finish" in notes["tidemill.warning"]


def test_metrics_show_the_ends_of_all_batches_and_of_the_first_hundred() -> None:
    forecast = a_forecast(rate=10.0)
    update(forecast, [(a_batch(f"batch_{i}", 10**6 + i, 100 + i), SIZES) for i in range(150)], 250.0)
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
    etas = {batch: outlook.eta or (0.0, 0.0) for batch, outlook in forecast.outlooks.items()}
    assert len(shown) == MAX_SHOWN and all(value == etas[batch][1] for batch, value in shown.items())
    assert max(shown.values()) <= min(eta[1] for batch, eta in etas.items() if batch not in shown)
    last = {s.labels["bound"]: s.value for s in samples if s.name == "tidemill_batch_eta_timestamp_seconds"}
    assert (last["earliest"], last["latest"]) == etas["batch_149"]


def test_a_batch_with_finished_lines_is_judged_by_them_as_far_as_it_has_some() -> None:
    forecast = a_forecast()  # lines of others: 20 and 5
    tokens = []
    for ended in range(LEAST_LINES + 1):
        usage = Usage(input_tokens=20 * ended, cached_tokens=0, output_tokens=805 * ended)
        update(forecast, [(a_batch("long", 10**9, 10, ended, usage=usage), LineSizes(100.0, (2000.0,)))], 250.0)
        tokens.append(forecast.outlooks["long"].tokens)
    assert tokens == pytest.approx([10 * (25 + 800 * ended / LEAST_LINES) for ended in range(LEAST_LINES + 1)])


def test_lines_answer_no_more_than_they_may_and_output_of_running_lines_counts() -> None:
    forecast = a_forecast()  # lines of others answer 5 tokens
    update(forecast, [(a_batch("x", 10**9, 100), LineSizes(100.0, (2.0, 2000.0)))], 250.0)
    assert forecast.outlooks["x"].tokens == pytest.approx(100 * (20 + 3.5))
    forecast = Forecast(lambda: EngineStats(job_tokens={"x": 1000}))
    update(forecast, [(a_batch("x", 10**9, 100), LineSizes(0.0, (64.0,)))], 0.0)
    assert forecast.outlooks["x"].tokens == pytest.approx(100 * 64 - 1000)
    update(forecast, [(a_batch("x", 10**9, 100), LineSizes(0.0, (64.0,)))], 10.0)
    assert forecast.pace.rate == pytest.approx(100.0, rel=0.02)


def test_a_new_batch_is_warned_of_if_it_would_be_late_even_alone() -> None:
    forecast = a_forecast(rate=10.0)  # 25 tokens for 100 bytes: 2.5 s
    assert forecast.first(a_batch("x", 450, 0), 10_000, 250.0).misses
    assert not forecast.first(a_batch("x", 550, 0), 10_000, 250.0).misses
    assert not forecast.first(a_batch("x", 480, 0), 10_000, 250.0, LineSizes(100.0, (1.0,))).misses


def test_a_new_batch_has_the_end_that_it_will_have_behind_those_in_progress() -> None:
    """The first outlook is that of an update with the batch among the others, and says how much faster it must go."""
    forecast = a_forecast(rate=10.0)
    others = [
        (a_batch("before", 700, 40), SIZES),
        (a_batch("behind", 10**6, 500), SIZES),
        (a_batch("other", 10**6, 30, tenant="b"), SIZES),
    ]
    update(forecast, others, 250.0)
    new = a_batch("new", 850, 100)
    first = forecast.first(new, 10_000, 250.0)
    update(forecast, [*others, (new, SIZES)], 250.0)
    then = forecast.outlooks["new"]
    assert first.eta == pytest.approx(then.eta) and first.pace == pytest.approx(then.pace)
    assert first.pace == pytest.approx((40 + 100 + 30) * 2.5 / 600, rel=0.02)
    assert (first.at_risk, first.misses) == (then.at_risk, then.misses) == (False, False)
    late = forecast.first(a_batch("late", 350, 0), 10_000, 250.0)
    assert late.misses and late.pace == pytest.approx((100 + 30) * 2.5 / 100, rel=0.02)
    assert f"{late.pace:.1f} times the pace" in late.notes(a_batch("late", 350, 0))["tidemill.warning"]


@fuzz(100)
@given(st.integers(0, 20_000))
def test_runs_cover_each_rank_once_and_every_part_is_a_sample(lines: int) -> None:
    runs = Runs(lines)
    ranks = [rank for index in range(runs.count) for rank in runs.ranks(index)]
    assert sorted(ranks) == list(range(lines))
    if lines > 64 * RUN_LINES[1]:
        for part in (lines // 5, lines // 2):
            low = sum(rank < lines / 2 for rank in ranks[:part])
            assert 0.4 < low / part < 0.6


def head_of(path: Path, bodies: Sequence[Any], endpoint: str = "/v1/chat/completions") -> LineSizes:
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
    assert head.line_bytes == pytest.approx(len(jsonl([line(100)])), rel=0.01)
    path.write_bytes(b'{"body": {"prompt": "' + b"x" * 100_000)
    assert read_head(path, "/v1/completions") is None, "no line is whole"


WRONG_NUMBERS: list[Any] = [-1e30, -1e308, -5, 0, "-inf", "inf", "nan", "7", True, 1.5, 2**31, 10**30, [], {}]


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


def measured(worker: Any) -> None:
    """Pretend that the worker has measured a rate of one token per second."""
    worker.forecast.line_ended(100, Usage(5, 0, 5))
    worker.forecast.pace.seconds = 10.0


async def test_a_job_that_cannot_make_it_is_told_so_and_its_lines_go_first(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with batch_server(tokenizer, tmp_path, hold_after=0) as (served, client):
        measured(served.app.state.batches.jobs)
        warned: list[BatchJob] = []
        served.app.state.batches.jobs.lanes.on_risk = warned.append
        created = await submit(client, jsonl(line(i) for i in range(20)), completion_window="60s", metadata={"a": "b"})
        assert created.metadata is not None and created.metadata["a"] == "b"
        assert "will not finish" in created.metadata["tidemill.warning"], "a warning, no refusal"
        await served.engine.wait_for_event("add", 20)
        running = await client.batches.retrieve(created.id)
        while (running.metadata or {}).get("tidemill.at_risk") != "true":
            await asyncio.sleep(0.01)
            running = await client.batches.retrieve(created.id)
        assert served.engine.lanes == {created.id: Lane.AT_RISK} and [batch.id for batch in warned] == [created.id]
        metrics = (await get(served, "/metrics")).text
        assert "tidemill_batch_jobs_at_risk 1.0" in metrics
        listed = [batch async for batch in client.batches.list()]
        assert listed[0].metadata == running.metadata
        served.engine.release()
        ended = await until(client, created.id)
        assert ended.status == "completed" and ended.metadata == {"a": "b"}, "ended batches have no forecast"


async def test_absurd_numbers_of_a_line_are_an_error_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, hold_after=0) as (served, client):
        measured(served.app.state.batches.jobs)
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
        while (running := await client.batches.retrieve(created.id)).metadata is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert running.metadata.pop("tidemill.remaining_tokens").isdigit()
        assert running.metadata == {"tidemill.at_risk": "false"}, "no pace, no eta"
        served.engine.release()
        assert (await until(client, created.id)).metadata is None
