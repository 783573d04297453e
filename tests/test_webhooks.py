"""Webhooks and TIDEMILL_ON_BATCH_END: which addresses are called, signatures, attempts, restarts, and the whole way."""

import asyncio
import base64
import json
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_tools import batch_server, eventually, jsonl, line, open_store, submit, until
from fixtures import http_server

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from gateway.batch.notices import COMMAND, MAX_ATTEMPTS, MAX_PAUSE, CommandRunner, Notifier
from gateway.batch.webhooks import HOSTS, SECRETS, Failure, WebhookSender, read_rules
from gateway.commands.preflight import check_start
from gateway.config import ServerConfig
from gateway.store.objects import WEBHOOK_KEY, BatchJob, BatchStatus, Channel, FileObject, Notice, new_file_id
from gateway.store.row_store import RowStore

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
BATCH = "batch_" + "0" * 32
Seen = tuple[dict[str, str], bytes]


class Receiver(BaseHTTPRequestHandler):
    """A receiver of webhooks at `url`, which answers with the next of `statuses`, then with 200."""

    seen: list[Seen]
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


def rules(hosts: str = "127.0.0.0/8") -> Any:
    return read_rules({SECRETS: SECRET, HOSTS: hosts})


def notice(url: str, attempts: int = 0) -> Notice:
    return Notice(BATCH, Channel.WEBHOOK, "t", "completed", url, 1_800_000_000, attempts, 0)


# ---- addresses

PRIVATE = [
    "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::7f00:1",
    "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::1", "2001:db8::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_name_that_resolves_to_a_private_address_is_not_called(address: str) -> None:
    """Also if only one of the addresses is private."""
    called: list[httpx.Request] = []
    transport = httpx.MockTransport(lambda request: called.append(request) or httpx.Response(200))

    async def resolve(_host: str, _port: int) -> list[str]:
        return ["93.184.216.34", address]

    sender = WebhookSender(rules(""), resolve, transport)
    failure = await sender.send(notice("https://hooks.example.com/x"))
    assert failure is not None and failure.is_final and "not public" in failure.reason and not called
    await sender.close()


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "127.1", "017700000001", "localhost", "[::1]"])
async def test_other_spellings_of_loopback_are_not_called(host: str) -> None:
    sender = WebhookSender(rules(""))
    failure = await sender.send(notice(f"https://{host}:1/x"))
    assert failure is not None and ("not public" in failure.reason or "OSError" in failure.reason), failure
    assert failure.is_final
    await sender.close()


async def test_the_request_goes_to_an_address_that_was_checked() -> None:
    """The name is resolved once per attempt; the certificate is checked for the name; attempts use all addresses."""
    called: list[httpx.Request] = []
    transport = httpx.MockTransport(lambda request: called.append(request) or httpx.Response(200))
    answers = iter([["93.184.216.34", "2606:2800:220:1::1"], ["93.184.216.34", "2606:2800:220:1::1"], ["127.0.0.1"]])

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("hooks.example.com", 8443)
        return next(answers)

    sender = WebhookSender(rules(""), resolve, transport)
    url = "https://hooks.example.com:8443/x?token=1"
    results = [await sender.send(notice(url, attempt)) for attempt in range(3)]
    assert results[:2] == [None, None] and results[2] is not None
    assert [str(each.url) for each in called] == [
        "https://93.184.216.34:8443/x?token=1",
        "https://[2606:2800:220:1::1]:8443/x?token=1",
    ]
    assert {each.headers["host"] for each in called} == {"hooks.example.com:8443"}
    assert {each.extensions["sni_hostname"] for each in called} == {"hooks.example.com"}
    await sender.close()


@pytest.mark.parametrize(
    ("hosts", "url", "words"),
    [
        ("", "https://hooks.example.com/x", None),
        ("", "https://8.8.8.8/x", None),
        ("", "http://hooks.example.com/x", "an https URL"),
        ("", "https://127.0.0.1/x", "not public"),
        ("", "https://[::ffff:169.254.169.254]/x", "not public"),
        ("", "https://user:word@example.com/x", "without user name"),
        ("", "https://example.com/x#y", "without user name"),
        ("", "ftp://example.com/x", "an https URL"),
        ("", "https:///x", "an https URL"),
        ("", "hooks", "an https URL"),
        ("", "https://[::1/x", "not a valid URL"),
        ("10.0.0.0/8", "http://10.1.2.3/x", None),
        ("10.0.0.0/8", "http://192.168.1.1/x", "not public"),
        ("10.0.0.0/8", "http://8.8.8.8/x", "an https URL"),
        ("fd00::/8", "https://[fd00::1]/x", None),
        ("hooks.example.com,*.example.org", "https://hooks.example.com/x", None),
        ("hooks.example.com,*.example.org", "https://HOOKS.example.com./x", "does not allow"),
        ("hooks.example.com,*.example.org", "https://a.b.example.org/x", None),
        ("hooks.example.com,*.example.org", "https://example.org/x", "does not allow"),
        ("hooks.example.com,*.example.org", "https://badexample.org/x", "does not allow"),
        ("hooks.example.com,*.example.org", "https://8.8.8.8/x", "does not allow"),
    ],
)
def test_which_urls_a_batch_may_name(hosts: str, url: str, words: str | None) -> None:
    if words is None:
        rules(hosts).check(url)
        return
    with pytest.raises(ValueError, match=words):
        rules(hosts).check(url)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({SECRETS: "secret"}, "whsec_ and base64"),
        ({SECRETS: "whsec_c2hvcnQ="}, "whsec_ and base64"),
        ({SECRETS: SECRET, HOSTS: "10.0.0.0/33"}, "neither a host name nor a network"),
    ],
)
def test_refused_settings(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_rules(environment)
    assert read_rules({HOSTS: "example.com"}) is None


# ---- attempts


async def end_batch(store: RowStore, url: str, batch_id: str = BATCH) -> None:
    """Add a batch that ends at the time 100."""
    file = FileObject(new_file_id(), "t", 5, 1, "a.jsonl", "batch")
    await store.add_file(file)
    metadata = {WEBHOOK_KEY: url}
    await store.create_batch(BatchJob(batch_id, "t", "/v1/completions", file.id, "24h", 1, 99_999, metadata=metadata))
    await store.move_batch(batch_id, BatchStatus.FAILED, 100)


async def attempts(path: Path, make_sender: Callable[[float], Any], url: str) -> tuple[list[int], list[str]]:
    """Start a notifier anew for each attempt of a webhook, when it is due, until none is. Return times and outcomes."""
    store = open_store(path / "s.db")
    await end_batch(store, url)
    await store.close()
    times: list[int] = []
    outcomes: list[str] = []
    while True:
        store = open_store(path / "s.db")
        if (due := await store.next_notice(0)) is None:
            await store.close()
            return times, outcomes
        times.append(due)
        sender = make_sender(due)
        notifier = Notifier(store, {Channel.WEBHOOK: sender}, lambda: due)
        await notifier.start()
        while await store.next_notice(0) == due:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await notifier.stop()
        await store.close()
        outcomes += [outcome for _, outcome in notifier.attempts.elements()]


async def test_attempts_go_on_after_restarts_until_one_succeeds(tmp_path: Path, receiver: type[Receiver]) -> None:
    receiver.statuses = [500, 302, 429]
    make_sender = lambda now: WebhookSender(rules(), clock=lambda: now)  # noqa: E731
    times, outcomes = await attempts(tmp_path, make_sender, f"{receiver.url}/x")
    assert times == [100, 105, 125, 205] and outcomes == ["retried"] * 3 + ["delivered"], "302 is a failure"
    sent = [headers for headers, _ in receiver.seen]
    assert {headers["webhook-id"] for headers in sent} == {"evt_" + "0" * 32}
    assert [headers["webhook-timestamp"] for headers in sent] == ["100", "105", "125", "205"]
    assert len({headers["webhook-signature"] for headers in sent}) == 4


@pytest.mark.parametrize(("final", "calls"), [(True, 1), (False, MAX_ATTEMPTS)])
async def test_attempts_end(tmp_path: Path, caplog: pytest.LogCaptureFixture, final: bool, calls: int) -> None:
    class Failing:
        async def send(self, _notice: Notice) -> Failure:
            return Failure("it failed", final)

        async def close(self) -> None:
            pass

    times, outcomes = await attempts(tmp_path, lambda _now: Failing(), "https://example.com/secret-token")
    assert outcomes == ["retried"] * (calls - 1) + ["failed"] and times[-1] - times[0] <= MAX_ATTEMPTS * MAX_PAUSE
    assert "there is no further attempt" in caplog.text and "secret-token" not in caplog.text


async def test_a_slow_receiver_does_not_hold_up_another(tmp_path: Path, receiver: type[Receiver]) -> None:
    store = open_store(tmp_path / "s.db")
    await end_batch(store, "https://slow.example.com/x")
    asked = asyncio.Event()

    async def resolve(host: str, _port: int) -> list[str]:
        asked.set()
        if host == "slow.example.com":
            await asyncio.Event().wait()
        return ["127.0.0.1"]

    notifier = Notifier(store, {Channel.WEBHOOK: WebhookSender(rules(), resolve)}, lambda: 100.0)
    await notifier.start()
    await asked.wait()
    await end_batch(store, receiver.url.replace("127.0.0.1", "quick.example.com"), "batch_" + "1" * 32)
    notifier.wake()
    await eventually(lambda: len(receiver.seen) == 1)
    await notifier.stop()
    left = [each.batch for each in await store.due_notices(Channel.WEBHOOK, 100, 9)]
    assert BATCH in left, "the attempt is repeated after the next start"
    await store.close()


# ---- the command

PRINTS = "import os, sys; print(sys.argv[1:], os.environ['TIDEMILL_BATCH_ID'], os.environ.get('TIDEMILL_API_KEY'))"


@pytest.mark.parametrize(
    ("words", "reason", "printed"),
    [
        (["-c", PRINTS, "$HOME; x"], None, f"['$HOME; x', '{BATCH}', 'completed'] {BATCH} None"),
        (["-c", "import sys; print('oh'); sys.exit(3)"], "exit code 3", "oh"),
        (["-c", "print('x' * 100_000)"], None, "x" * 9_000),
        (["-c", "import time; print('slow', flush=True); time.sleep(60)"], "longer than", "slow"),
    ],
)
async def test_the_command(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    words: list[str],
    reason: str | None,
    printed: str,
) -> None:
    monkeypatch.setenv("TIDEMILL_API_KEY", "secret")
    caplog.set_level(logging.INFO)
    failure = await CommandRunner([sys.executable, *words], 2.0 if reason == "longer than" else 60.0).send(notice(""))
    assert (failure is None) is (reason is None) and (failure is None or reason in failure.reason)
    assert printed in caplog.text and len(caplog.text) < 20_000


@pytest.mark.parametrize("command", ["no-such-program-here", "'open"])
def test_a_command_that_cannot_run_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv(COMMAND, command)
    with pytest.raises(ConfigError, match=COMMAND):
        check_start(EngineConfig(), ServerConfig(port=0))


# ---- the whole way


async def test_a_batch_calls_its_webhook_and_the_command(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: type[Receiver]
) -> None:
    monkeypatch.setenv(SECRETS, SECRET)
    monkeypatch.setenv(HOSTS, "127.0.0.0/8")
    marker = tmp_path / "ended"
    command = f"{sys.executable} -c 'import sys; open(sys.argv[1], \"w\").write(sys.argv[3])' {marker}"
    monkeypatch.setenv(COMMAND, command)
    async with batch_server(tokenizer, tmp_path / "state") as (served, client):
        for metadata in ({WEBHOOK_KEY: "https://10.0.0.1/x"}, {"tidemill.other": "x"}):
            with pytest.raises(openai.BadRequestError):
                await submit(client, jsonl([line(1)]), metadata=metadata)
        batch = await submit(client, jsonl([line(1)]), metadata={WEBHOOK_KEY: receiver.url})
        await until(client, batch.id, "completed")
        await eventually(lambda: bool(receiver.seen) and marker.exists() and marker.read_text() == "completed")
        headers, body = receiver.seen[0]
        event = client.webhooks.unwrap(body, headers, secret=SECRET)
        assert (event.type, event.data.id) == ("batch.completed", batch.id)  # type: ignore[union-attr]
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body.replace(b"completed", b"failed"), headers, secret=SECRET)
        assert json.loads(body)["object"] == "event" and len(receiver.seen) == 1
        value = served.app.state.context.metrics.registry.get_sample_value
        for channel in ("command", "webhook"):
            labels = {"channel": channel, "outcome": "delivered"}
            await eventually(partial(lambda labels: value("tidemill_batch_reports_total", labels) == 1.0, labels))


async def test_without_a_secret_a_webhook_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path / "state") as (_, client):
        with pytest.raises(openai.BadRequestError, match=SECRETS):
            await submit(client, jsonl([line(1)]), metadata={WEBHOOK_KEY: "https://example.com/x"})
