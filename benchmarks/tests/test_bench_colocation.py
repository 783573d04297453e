"""The benchmark of co-location on the load generator's records: plans, jobs, rates and the plot."""

import asyncio
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_tools import FAST, open_folder
from fake_engine import serve

from benchmarks import colocation, live
from benchmarks.colocation import JOB, Run, check_job, delivered, draw, output_of, plan_arm, poisson
from benchmarks.colocation_plot import rate
from engine.build import build_engine, plan_launch
from engine.config import EngineConfig
from engine.text.tokenizer import Tokenizer
from loadgen.arrivals import constant_rate
from loadgen.client import seconds_of
from loadgen.records import JobRecord, Records, RequestRecord, from_line, to_line


def record(at: float, tokens: tuple[float, ...], service_class: str = "online", outcome: str = "ok") -> RequestRecord:
    made = RequestRecord(0, service_class, at, 256, len(tokens), outcome=outcome)  # type: ignore[arg-type]
    made.chunk_at, made.chunk_tokens, made.output_tokens = list(tokens), [1] * len(tokens), len(tokens)
    made.first_token_at = tokens[0] if tokens else None
    made.ended_at = tokens[-1] if tokens else None
    return made


def test_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        colocation.main(["--help"])
    assert "some of tbt_p99, tbt_mean, 5% (default: all)" in " ".join(capsys.readouterr().out.split())


def test_a_job_without_lines_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        colocation.main(["--job-rate", "0"])
    assert "--job-rate must be positive" in capsys.readouterr().err


def test_every_arm_is_a_plan_of_the_load_generator() -> None:
    arrivals = poisson(constant_rate(2.0), 20.0, 1)
    assert arrivals == poisson(constant_rate(2.0), 20.0, 1) != poisson(constant_rate(2.0), 20.0, 2)
    for name, tier in colocation.TIERS.items():
        plan = plan_arm("http://x", [] if name == "offline only" else arrivals, 20.0, tier, 1)
        assert (plan.online is None) == (name == "offline only")
        assert plan.offline_mode == {None: "none", JOB: "batch"}.get(tier, "flex")
        assert plan.offline_tier == tier and plan.windows.horizon == 20.0
        assert bool(plan.jobs) == (tier is not None)
        if plan.online is not None:
            assert plan.body(plan.maker(), plan.online, 0, 0)["max_tokens"] == colocation.ONLINE_OUTPUT


def test_growth_between_two_looks_is_even() -> None:
    assert [live.look_interval(seconds) for seconds in (1.0, 40.0, 600.0)] == [0.05, 2.0, 5.0]
    watch = live.Watch(("tokens",), 2.0, {"tokens": [(0.5, 10.0), (2.5, 18.0), (3.0, 18.0)]})
    assert watch.grown("tokens") == [(1.0, 2.0), (1.5, 2.0), (2.0, 2.0), (2.5, 2.0), (3.0, 0.0)]
    assert not watch.grown("other")


async def test_a_watch_looks_once_more_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, looked = iter(["tokens 1", "tokens 4"]), asyncio.Event()

    async def read_page(_client: object) -> str:
        looked.set()
        return next(pages)

    monkeypatch.setattr(live, "read_page", read_page)
    watch = live.Watch(("tokens",), 60.0)
    follower = asyncio.create_task(watch.follow("http://127.0.0.1:1", time.monotonic()))
    await looked.wait()
    follower.cancel()
    await asyncio.wait([follower])
    assert [total for _, total in watch.seen["tokens"]] == [1.0, 4.0]


def test_offline_tokens_count_when_they_come_and_a_prompt_with_its_first_token() -> None:
    records = Records([record(0.0, (6.0, 6.5, 11.0), "offline"), record(1.0, (1.5,))])
    found = delivered(records)
    assert [item for item in found if item[1]] == [(6.0, 257.0), (6.5, 1.0), (11.0, 1.0)]
    assert Run([], found, 10.0).offline_rate == 258 / 5.0, "from the warm-up to the end"


def test_attainment_is_paired_by_request() -> None:
    fast, late = record(6.0, (6.1, 6.2)), record(6.0, (9.0, 9.1))
    warm = record(1.0, (9.0, 9.1))
    alone, beside = Run([warm, fast, fast], [], 10.0), Run([warm, fast, late], [], 10.0)
    change, lower = colocation.paired_bound([beside], [alone], 1.0, 0.2)
    assert change == -0.5 and lower < change


def test_a_job_must_outlast_its_arm_and_lose_nothing() -> None:
    whole = JobRecord(0, 10, status="cancelled", output_lines=6, error_lines=1, unexecuted=3)
    check_job(whole)
    for wrong in (
        replace(whole, status="completed"),
        replace(whole, output_lines=5),
        replace(whole, duplicated=1),
        replace(whole, error="POST /v1/files answered 500"),
    ):
        with pytest.raises(SystemExit, match="job"):
            check_job(wrong)


def test_the_plot_shows_every_chat_against_its_limits_above_and_output_tokens_below() -> None:
    chats = [record(at, (at + 0.5, at + 0.6, at + 1.0)) for at in (1.0, 5.0)]
    run = Run(chats, [(0.5, 900.0)], 12.0, offline_output=[(0.5, 90.0), (4.0, 30.0)])
    drawn = draw(run, 1.0, 0.2)
    name = "{http://www.w3.org/2000/svg}"
    above, below = ElementTree.fromstring(drawn).findall(f"{name}svg")
    assert (above.get("y"), below.get("y")) == ("0", "260")
    (limit,) = above.findall(f"{name}line[@class='mark']")
    first, gaps = (group.findall(f"{name}circle") for group in above.findall(f"{name}g"))
    assert len(first) == len(gaps) == len(chats)
    assert all(float(dot.get("cy", "")) > float(limit.get("y1", "")) for dot in first), "0.5 s of 1 s"
    assert all(float(dot.get("cy", "")) < float(limit.get("y1", "")) for dot in gaps), "a P99 gap of 0.4 s of 0.2 s"
    assert {each.text for each in above.iter(f"{name}text")} >= {"limit", "TTFT (limit 1 s)", "TBT (200 ms)"}
    assert {each.text for each in below.iter(f"{name}text")} >= {"batch work", "chats", "output tokens/s", "seconds"}
    assert "prefers-color-scheme: dark" in drawn
    assert len(ElementTree.fromstring(draw(Run([], [], 12.0), 1.0, 0.1)).findall(f"{name}svg")) == 1


def test_the_lower_panel_counts_only_output_tokens() -> None:
    middles, tokens = rate([(0.5, 90.0), (4.0, 30.0)], 10.0)
    assert middles.tolist() == [1.5, 4.5, 7.5] and tokens.tolist() == [30.0, 10.0, 0.0]
    records = Records([record(0.0, (6.0, 6.5), "offline"), record(1.0, (1.5,))])
    assert [item for item in output_of(records) if item[1]] == [(6.0, 1.0), (6.5, 1.0)]


def test_a_refused_client_knows_when_to_come_again() -> None:
    assert [seconds_of(text) for text in ("2", "0.5", "", "Wed, 21 Oct 2026 07:28:00 GMT")] == [2.0, 0.5, 0.0, 0.0]
    refused = record(0.0, (), outcome="http_error")
    refused.retry_after = 3.0
    assert b"retry_after" not in to_line(refused) and from_line(to_line(refused)).retry_after == 0.0


@pytest.mark.filterwarnings("ignore:Sending a large body")  # the job of an arm
@pytest.mark.parametrize("tier", ["flex", JOB])
async def test_an_arm_against_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    """Online requests beside flex requests, and beside a batch job that is cut short and loses no line."""
    monkeypatch.setattr(colocation, "WARM_UP", 0.0)
    monkeypatch.setattr(colocation, "OFFLINE_PROMPT", 32)
    monkeypatch.setattr(colocation, "OFFLINE_OUTPUT", 8)
    monkeypatch.setattr(colocation, "ONLINE_OUTPUT", 8)
    monkeypatch.setattr(colocation, "JOB_TOKENS_PER_SECOND", 40_000)  # the job must outlast its arm on any machine
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=200,
        max_model_len=256,
        profile_seconds=0.0,
        slo="ttft_p99=100s,tbt_p99=10s",
    )
    plan = plan_launch(config)
    engine = build_engine(config, plan)
    folder = await open_folder(tmp_path / "state")
    options: dict[str, Any] = {"served_model_name": ("model",), "folder": folder, "batch_limits": FAST}
    async with serve(engine, Tokenizer.load(plan.folder, probe=False), None, **options) as served:
        for seconds in (4.0, 8.0, 32.0):  # a busy machine may not come to the job in four
            run = await colocation.run_arm(served.url, [0.0, 0.1], seconds, tier, 1)
            if run.offline:
                break
    assert [record.ok for record in run.online] == [True, True]
    assert all(sum(record.chunk_tokens) == colocation.ONLINE_OUTPUT for record in run.online)
    assert sum(tokens for _, tokens in run.offline) > 0
