"""TIDEMILL_ON_BATCH_END: settings, signed events, attempts across restarts, the command, and a server with each."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from batch_tools import batch_server, eventually, jsonl, line, open_store, submit, until
from fixtures import http_server
from support.lazy import openai

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from gateway.batch.notices import (
    MAX_ATTEMPTS,
    MAX_PAUSE,
    SECRET,
    TARGET,
    Notifier,
    ReportTarget,
    read_target,
    run_command,
)
from gateway.config import ServerConfig
from gateway.store.objects import BatchJob, BatchStatus, FileObject, Notice, new_file_id
from tidemill.commands.preflight import check_start

KEY = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
BATCH = "batch_" + "0" * 32
URL = "https://hooks.example.com/x"
NOTICE = Notice(BATCH, "t", "completed", 1_800_000_000, 0, 0)


class Receiver(BaseHTTPRequestHandler):
    """A receiver of events at `url`, which answers with the next of `statuses`, then with 200."""

    seen: list[tuple[dict[str, str], bytes]]
    statuses: list[int]
    url: str

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append(({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(self.statuses.pop(0) if self.statuses else 200)
        self.send_header("location", f"{self.url}/elsewhere")
        self.end_headers()


@pytest.fixture
def receiver() -> Iterator[type[Receiver]]:
    Receiver.seen, Receiver.statuses = [], []
    with http_server(Receiver) as Receiver.url:
        yield Receiver


@pytest.mark.parametrize(
    ("target", "secret", "words"),
    [
        ("no-such-program-here", KEY, "no program"),
        ("'open", KEY, "close the quotation"),
        ("https://", KEY, "an https URL with a host"),
        ("https://[::1/x", KEY, "not valid"),
        ("http://hooks.example.com/x", KEY, "an https URL"),
        (URL, "", "needs TIDEMILL_WEBHOOK_SECRET"),
        (URL, "secret", "whsec_ and base64"),
        (URL, "whsec_c2hvcnQ=", "whsec_ and base64"),
    ],
)
def test_refused_settings(monkeypatch: pytest.MonkeyPatch, target: str, secret: str, words: str) -> None:
    monkeypatch.setenv(TARGET, target)
    monkeypatch.setenv(SECRET, secret)
    with pytest.raises(ConfigError, match=words):
        check_start(EngineConfig(), ServerConfig(port=0))


def test_accepted_settings() -> None:
    assert read_target({}) is None and read_target({SECRET: KEY}) is None
    assert read_target({TARGET: f"{sys.executable} -c 'a b'"}) == ReportTarget((sys.executable, "-c", "a b"))
    for url in (URL, "http://127.0.0.1:1/x", "http://[::1]:1/x"):
        assert read_target({TARGET: url, SECRET: KEY}) == ReportTarget(url=url, secret=b"0123456789abcdef01234567")


async def attempts(path: Path, target: ReportTarget) -> tuple[list[int], list[str]]:
    """Start a notifier anew for each attempt of a report, when it is due, until none is. Return times and outcomes."""
    store = open_store(path / "s.db")
    file = FileObject(new_file_id(), "t", 5, 1, "a.jsonl", "batch")
    await store.add_file(file)
    await store.create_batch(BatchJob(BATCH, "t", "/v1/completions", file.id, "24h", 1, 99_999))
    await store.move_batch(BATCH, BatchStatus.FAILED, 100)
    await asyncio.to_thread(store.close_now)
    times: list[int] = []
    outcomes: list[str] = []
    while True:
        store = open_store(path / "s.db")
        if (notice := await store.next_notice()) is None:
            await asyncio.to_thread(store.close_now)
            return times, outcomes
        due = notice.due_at
        times.append(due)
        notifier = Notifier(store, target, partial(float, due))
        await notifier.start()
        while (left := await store.next_notice()) is not None and left.due_at == due:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await notifier.stop()
        await asyncio.to_thread(store.close_now)
        outcomes += notifier.attempts.elements()


async def test_attempts_go_on_after_restarts_until_one_succeeds(tmp_path: Path, receiver: type[Receiver]) -> None:
    receiver.statuses = [500, 302, 429]
    times, outcomes = await attempts(tmp_path, ReportTarget(url=f"{receiver.url}/x", secret=b"x" * 24))
    assert times == [100, 105, 125, 205] and outcomes == ["retried"] * 3 + ["delivered"], "302 is a failure"
    assert {headers["webhook-id"] for headers, _ in receiver.seen} == {"evt_" + "0" * 32}
    assert {json.loads(body)["type"] for _, body in receiver.seen} == {"batch.failed"}


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        (ReportTarget(url="http://127.0.0.1:1/token", secret=b"x"), MAX_ATTEMPTS),
        (ReportTarget((sys.executable, "-c", "1/0")), 1),
    ],
)
async def test_attempts_end(tmp_path: Path, caplog: pytest.LogCaptureFixture, target: ReportTarget, calls: int) -> None:
    times, outcomes = await attempts(tmp_path, target)
    assert outcomes == ["retried"] * (calls - 1) + ["failed"] and times[-1] - times[0] <= MAX_ATTEMPTS * MAX_PAUSE
    assert f"attempt {calls} to report its end failed" in caplog.text and "token" not in caplog.text


PRINTS = "import os, sys; print(sys.argv[1:], os.environ['TIDEMILL_BATCH_ID'], os.environ.get('TIDEMILL_API_KEY'))"


@pytest.mark.parametrize(
    ("words", "reason", "printed"),
    [
        (["-c", PRINTS, "$HOME; x"], None, f"['$HOME; x', '{BATCH}', 'completed'] {BATCH} None"),
        (["-c", "import sys; print('oh'); sys.exit(3)"], "exit code 3", "oh"),
        (["-c", "import time; print('slow', flush=True); time.sleep(60)"], "longer than", "slow"),
    ],
)
async def test_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], reason: str | None, printed: str
) -> None:
    monkeypatch.setenv("TIDEMILL_API_KEY", "secret")
    seconds = 2.0 if reason == "longer than" else 60.0
    with (tmp_path / "errors").open("w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        failure = await run_command(ReportTarget((sys.executable, *words)), NOTICE, seconds)
    assert (failure is None) is (reason is None) and (failure is None or reason in failure)
    assert printed in (tmp_path / "errors").read_text()


async def end_one_batch(client: openai.AsyncOpenAI) -> Any:
    batch = await submit(client, jsonl([line(1)]))
    return await until(client, batch.id, "completed")


async def delivered(served: Any) -> None:
    value = served.app.state.context.metrics.registry.get_sample_value
    await eventually(lambda: value("tidemill_batch_reports_total", {"outcome": "delivered"}) == 1.0)


async def test_the_end_of_a_batch_calls_the_url(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: type[Receiver]
) -> None:
    monkeypatch.setenv(SECRET, KEY)
    monkeypatch.setenv(TARGET, receiver.url)
    async with batch_server(tokenizer, tmp_path / "state") as (served, client):
        with pytest.raises(openai.BadRequestError, match="reserved"):
            await submit(client, jsonl([line(1)]), metadata={"tidemill.webhook": URL})
        batch = await end_one_batch(client)
        await delivered(served)
        headers, body = receiver.seen[0]
        event = client.webhooks.unwrap(body, headers, secret=KEY)
        assert (event.type, event.data.id) == ("batch.completed", batch.id)  # type: ignore[union-attr]
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body.replace(b"completed", b"failed"), headers, secret=KEY)
        assert json.loads(body)["object"] == "event" and len(receiver.seen) == 1


async def test_a_batch_at_risk_is_reported_once_and_not_again(receiver: type[Receiver]) -> None:
    secret = b"0123456789abcdef01234567"
    notifier = Notifier(None, ReportTarget(url=receiver.url, secret=secret))  # type: ignore[arg-type]  # no end comes
    batch = BatchJob(BATCH, "t", "/v1/completions", "file-a", "24h", 0, 1)
    for _ in range(3):
        notifier.warn(batch)
    await eventually(lambda: notifier.attempts["delivered"] == 1)
    ((headers, body),) = receiver.seen
    event = json.loads(body)
    assert (event["type"], event["data"]["id"]) == ("batch.at_risk", BATCH)
    assert headers["webhook-id"] == event["id"] != BATCH.replace("batch_", "evt_"), (
        "the event of the end has another id"
    )
    receiver.statuses = [500]
    notifier.warn(BatchJob("batch_" + "1" * 32, "t", "/v1/completions", "file-a", "24h", 0, 1))
    await eventually(lambda: notifier.attempts["failed"] == 1)
    Notifier(None, None).warn(batch)  # type: ignore[arg-type]


async def test_the_end_of_a_batch_runs_the_command(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ended"
    command = f"{sys.executable} -c 'import sys; open(sys.argv[1], \"w\").write(sys.argv[3])' {marker}"
    monkeypatch.setenv(TARGET, command)
    async with batch_server(tokenizer, tmp_path / "state") as (served, client):
        await end_one_batch(client)
        await delivered(served)
        assert marker.read_text() == "completed"
