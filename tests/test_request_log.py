"""The request log: the line of each kind of end, causes of missed SLOs, full disks, full buffers, logrotate."""

import asyncio
import errno
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_tools import client_of, eventually, keys_of
from fake_engine import MODEL, colocation_stats
from fixtures import StartServer
from support.lazy import openai

from engine.api import (
    EngineRequest,
    FinishReason,
    RequestClass,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    TokenCosts,
)
from engine.client import EngineStats
from engine.errors import ConfigError
from gateway.batch.line import LineOrigin, LineRunner
from gateway.telemetry import request_log
from gateway.telemetry.account import CLIENT_LEFT, Account
from gateway.telemetry.request_log import RequestLog, judge, line_of

SECRET = "a-prompt-that-nobody-may-read"
SLO = "ttft_p99=1s,tbt_p99=100ms"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def lines_of(path: Path, count: int) -> list[dict[str, Any]]:
    """The lines, as soon as there are so many."""
    await eventually(lambda: path.read_bytes().count(b"\n") >= count)
    return read(path)


# ---- contents of a line


async def test_a_line_per_choice_that_ended(start_server: StartServer, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    keys = keys_of(tmp_path, "sesame acme")
    served = await start_server("hello world", request_log=str(log), api_key_file=keys)
    async with client_of(served, api_key="sesame") as api:
        whole = await api.completions.create(model=MODEL, prompt=SECRET, n=2)
        flex = await api.completions.create(model=MODEL, prompt=SECRET, extra_body={"service_tier": "flex"})
    lines = await lines_of(log, 3)
    assert [(line["id"], line["choice"], line["tier"]) for line in lines] == [
        (whole.id, 0, "default"),
        (whole.id, 1, "default"),
        (flex.id, 0, "flex"),
    ]
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert {line["tenant"] for line in lines} == {"acme"}
    assert {(line["status"], line["finish"]) for line in lines} == {(200, "stop")}
    assert [line["prompt_tokens"] for line in lines] == [whole.usage.prompt_tokens] * 3
    assert [line["cached_tokens"] for line in lines] == [whole.usage.prompt_tokens_details.cached_tokens] * 3
    assert sum(line["output_tokens"] for line in lines[:2]) == whole.usage.completion_tokens
    for line in lines:  # the scripted engine's clock: a hundredth of a second from each event to the next
        assert 0 < line["queue"] == line["ttft"]
        assert line["slo_met"] is None and line["why"] is None, "this engine promises nothing"
    text = log.read_text()
    assert SECRET not in text and "sesame" not in text and "hello" not in text


async def test_an_error_and_a_client_that_left(start_server: StartServer, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    served = await start_server("hello world again", fail_after=2, request_log=str(log))
    async with client_of(served) as api:
        with pytest.raises(openai.APIError):
            await api.completions.create(model=MODEL, prompt="x")
    failed = (await lines_of(log, 1))[0]
    assert (failed["status"], failed["finish"], failed["output_tokens"]) == (500, "error", 2)
    assert (failed["slo_met"], failed["why"]) == (False, "engine_fault")

    log = tmp_path / "left.jsonl"
    served = await start_server("hello world again", hold_after=1, request_log=str(log))
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with (
        httpx.AsyncClient() as http,
        http.stream("POST", f"{served.url}/v1/completions", json=body) as answer,
    ):
        await anext(answer.aiter_bytes())
    left = (await lines_of(log, 1))[0]
    assert (left["status"], left["finish"], left["slo_met"]) == (499, "abort", None)


async def test_batch_lines_are_in_it(start_server: StartServer, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    served = await start_server("hello world", request_log=str(log))
    runner = LineRunner(served.app.state.context)
    body = {"model": MODEL, "prompt": SECRET}
    answer = await runner.run("/v1/completions", body, LineOrigin("acme", "batch_1", 1e12))
    assert answer.status == 200
    line = (await lines_of(log, 1))[0]
    assert (line["tier"], line["tenant"], line["batch"]) == ("batch", "acme", "batch_1")
    assert (line["ttft"], line["tbt_max"], line["slo_met"]) == (pytest.approx(0.01), None, None)


# ---- why the SLO was missed


def account(
    tokens: list[float],
    *,
    scheduled: float | None = 0.0,
    evicted: dict[int, int] | None = None,
    prompt: int = 100,
    request_class: RequestClass = RequestClass.ONLINE,
    finish: FinishReason = FinishReason.STOP,
    left_at: float = 0.0,
) -> Account:
    """A request that arrived at 0 and got a token at each of these times; `evicted`: preemptions in all at token i."""
    now = [0.0]
    request = EngineRequest("r", (1,) * prompt, SamplingParams(64), request_class)
    made = Account(request, "cmpl-1", 0, clock=lambda: now[0])
    preemptions = 0
    for number, at in enumerate(tokens):
        now[0] = at
        times = RequestTimes(0.0, scheduled, tokens[0], at)
        preemptions = (evicted or {}).get(number, preemptions)
        made.observe(RequestOutput("r", [7], None, times, prompt, 0, number + 1, num_preemptions=preemptions))
        made.num_tokens += 1
    now[0] = max(left_at, now[0])
    made.end(finish, CLIENT_LEFT if finish is FinishReason.ABORT else 200)
    return made


COSTS = TokenCosts(prefill=0.001, decode=0.01)


@pytest.mark.parametrize(
    ("made", "met", "why"),
    [
        (account([0.5, 0.55]), True, None),
        (account([1.5], scheduled=1.4), False, "queue"),
        (account([1.5], scheduled=0.1), False, "prefill_beside_others"),
        (account([1.5], scheduled=0.1, prompt=1300), False, "own_prompt"),
        (account([1.5], scheduled=0.1, evicted={0: 1}), False, "preemption"),
        (account([0.5, 0.6, 0.9]), False, "step_time"),
        (account([0.5, 0.6, 0.9], evicted={2: 1}), False, "preemption"),
        (account([0.5, 0.6, 0.9, 1.6], evicted={2: 1}), False, "step_time"),
        (account([0.5, 0.55], finish=FinishReason.ERROR), False, "engine_fault"),
        (account([], scheduled=None, finish=FinishReason.ABORT, left_at=0.9), None, None),
        (account([], scheduled=None, finish=FinishReason.ABORT, left_at=1.1), False, "queue"),
        (account([0.5], finish=FinishReason.ABORT, left_at=0.55), None, None),
        (account([0.5], finish=FinishReason.ABORT, left_at=2.0), False, "step_time"),
        (account([9.0], request_class=RequestClass.OFFLINE), None, None),
    ],
)
def test_why(made: Account, met: bool | None, why: str | None) -> None:
    verdict = judge(made, SLO, COSTS)
    assert (verdict.met, verdict.why) == (met, why)


def test_each_objective_has_its_own_cause() -> None:
    verdict = judge(account([1.5, 1.9], scheduled=1.4), SLO, COSTS)
    assert verdict.missed == {"ttft_p99=1s": "queue", "tbt_p99=100ms": "step_time"}


def test_without_costs_a_prompt_is_not_blamed() -> None:
    assert judge(account([1.5], scheduled=0.1, prompt=1300), SLO, None).why == "prefill"


@pytest.mark.parametrize("slo", ["tbt_mean=50ms", "5%", ""])
def test_a_promise_about_many_requests_says_nothing_of_one(slo: str) -> None:
    assert judge(account([9.0, 19.0]), slo, COSTS).met is None


def test_the_line_names_the_cause() -> None:
    stats = EngineStats(colocation=colocation_stats(slo=SLO), token_costs=COSTS)
    line = line_of(account([1.5, 1.9, 1.95], scheduled=1.4), stats)
    assert (line["queue"], line["ttft"], line["tbt_max"]) == (1.4, 1.5, pytest.approx(0.4))
    assert line["tbt_mean"] == pytest.approx(0.225)
    assert (line["slo_met"], line["why"]) == (False, "queue")


# ---- the file


class Disk:
    """`os.write` of a disk with so much room left; `blocked` holds every write until it is set."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.blocked = threading.Event()
        self.blocked.set()

    def write(self, file: int, data: bytes) -> int:
        self.blocked.wait()
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = os.write(file, data[: self.room])
        self.room -= done
        return done


class Dropped:
    def __init__(self) -> None:
        self.lines = 0

    def add(self, count: int) -> None:
        self.lines += count


def open_log(path: Path, disk: Disk, dropped: Dropped, **options: Any) -> RequestLog:
    return RequestLog(str(path), EngineStats, dropped.add, write=disk.write, **options)


async def test_a_full_disk_costs_lines_and_spoils_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path, disk, dropped = tmp_path / "log", Disk(), Dropped()
    log = open_log(path, disk, dropped)
    async with log:
        log.add(account([0.1]))
        whole = (await lines_of(path, 1))[0]
        disk.room = 10  # the next line is torn after ten bytes
        for _ in range(3):
            log.add(account([0.1]))
        await eventually(lambda: dropped.lines == 3)
        disk.room = 1 << 30
        log.add(account([0.2]))
    first, torn, last = path.read_bytes().splitlines()
    assert json.loads(first) == whole and len(torn) == 10
    assert json.loads(last)["ttft"] == 0.2
    assert dropped.lines == 3
    assert [record.levelname for record in caplog.records if "--request-log" in record.message] == ["ERROR", "INFO"]


async def test_what_is_not_written_yet_is_bounded(tmp_path: Path) -> None:
    path, disk, dropped = tmp_path / "log", Disk(), Dropped()
    disk.blocked.clear()
    log = open_log(path, disk, dropped, max_lines=3)
    async with log:
        log.add(account([0.1]))
        await eventually(lambda: not log._pending)  # the thread has it, and hangs
        for _ in range(5):
            log.add(account([0.1]))
        assert dropped.lines == 2
        disk.blocked.set()
    assert len(read(path)) == 4


async def test_logrotate_moves_the_file_and_sends_sighup(start_server: StartServer, tmp_path: Path) -> None:
    path, moved = tmp_path / "requests.jsonl", tmp_path / "requests.jsonl.1"
    served = await start_server(request_log=str(path), owns_process=True)
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL, "the signal would end this process"
    async with client_of(served) as api:
        await api.completions.create(model=MODEL, prompt="x")
        await lines_of(path, 1)
        await asyncio.to_thread(path.rename, moved)
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(path.exists)
        await api.completions.create(model=MODEL, prompt="x")
        await lines_of(path, 1)
    assert len(read(moved)) == 1


def test_a_file_that_cannot_be_had_is_told_of_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--request-log .*: No such file or directory"):
        RequestLog(str(tmp_path / "no" / "log"), EngineStats, lambda _: None)


def refuse_file(_log: RequestLog) -> int:
    raise OSError(errno.EROFS, "Read-only file system")


def refuse_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("owner", "name", "refuse"), [(RequestLog, "_open", refuse_file), (asyncio, "to_thread", refuse_thread)]
)
async def test_lines_are_dropped_while_no_file_or_thread_is_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, refuse: Any
) -> None:
    """A disk that takes no file at the start does not keep the server from starting."""
    monkeypatch.setattr(request_log, "RETRY_SECONDS", 0.0)
    path, disk, dropped = tmp_path / "log", Disk(), Dropped()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, refuse)
        log = open_log(path, disk, dropped)
        async with log:
            log.add(account([0.1]))
            await eventually(lambda: dropped.lines == 1)
            patched.undo()
            log.add(account([0.2]))
    assert [line["ttft"] for line in read(path)] == [0.2] and dropped.lines == 1
