"""Batches in front of another server: a stub with vLLM's answers, whole servers on both sides, real HTTP between."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import batch_tools
import httpx
import pytest
import uvicorn
from batch_tools import jsonl, results_of, submit
from driver import until
from fake_engine import running
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from support.lazy import openai

from engine.api import Lane
from engine.errors import ConfigError, EngineUnavailableError
from gateway import upstream as upstream_module
from gateway.app import create_front
from gateway.batch.failures import Cause, cause_of
from gateway.batch.line import LineOrigin
from gateway.config import ServerConfig
from gateway.http.errors import ApiError
from gateway.server import bind
from gateway.store.folder import find_state, open_state
from gateway.upstream import Upstream
from tidemill.cli import main

ORIGIN = LineOrigin("default", "batch_1", 2e9)
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


class Stub:
    """vLLM as its clients see it. `answer` decides about a request by its body; `slo` is the plugin's status."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.open = self.most = self.closed = 0
        self.answer: Callable[[dict[str, Any]], Response] = _echo
        self.gate = asyncio.Event()
        self.gate.set()
        self.slo: dict[str, Any] | None = {"offline_running": 2, "offline_waiting": 1}
        self.app = FastAPI()
        self.app.add_api_route("/v1/models", self._models, methods=["GET"])
        self.app.add_api_route("/tidemill/slo", self._slo, methods=["GET"])
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings"):
            self.app.add_api_route(path, self._generate, methods=["POST"])

    async def _models(self) -> Response:
        return JSONResponse({"data": [{"id": "m", "max_model_len": 4096}, {"id": "lora", "max_model_len": 4096}]})

    async def _slo(self) -> Response:
        return JSONResponse(self.slo or {}, 200 if self.slo else 503)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append((body, dict(request.headers)))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            gate = asyncio.ensure_future(self.gate.wait())
            while not gate.done():
                if await request.is_disconnected():
                    self.closed += 1
                    return Response()
                await asyncio.wait([gate], timeout=0.01)
            return self.answer(body)
        finally:
            self.open -= 1

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        listener = await asyncio.to_thread(bind, "127.0.0.1", port)
        server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, ws="none", timeout_graceful_shutdown=1))
        task = asyncio.ensure_future(server._serve([listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
            listener.close()


async def trouble_of(client: httpx.AsyncClient) -> str:
    """Wait until the server is not ready, and return why."""
    while (ready := await client.get("/ready")).status_code == 200:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return str(ready.json()["error"]["message"])


def _echo(body: dict[str, Any]) -> Response:
    text = body["messages"][-1]["content"]
    return JSONResponse({"choices": [{"message": {"content": text}}], "usage": USAGE})


def refusing(status: int, message: str, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "code": status}}, status, headers)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(upstream_module, "RETRY_SECONDS", 0.1)


@pytest.fixture
async def stub() -> Stub:
    return Stub()


@asynccontextmanager
async def front(url: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    other = Upstream(url)
    await asyncio.to_thread(other.await_server, print)
    settings = ServerConfig(port=0)
    app = await asyncio.to_thread(create_front, other, settings, open_state(find_state(str(folder))))
    async with (
        running(app, settings) as (_, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
    ):
        yield client


def api_of(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)


async def create(client: httpx.AsyncClient, *bodies: Any) -> str:
    path = "/v1/chat/completions"
    lines = [{"custom_id": str(i), "method": "POST", "url": path, "body": body} for i, body in enumerate(bodies)]
    async with api_of(client) as api:
        return str((await submit(api, jsonl(lines), path)).id)


async def ended(client: httpx.AsyncClient, batch_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the batch in its final state, and its rows by custom id."""
    async with api_of(client) as api:
        batch = await batch_tools.until(api, batch_id)
        output, errors = await results_of(api, batch)
    return batch.model_dump(), output | errors


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def test_lines_run_on_the_other_server_behind_its_chats(stub: Stub, tmp_path: Path) -> None:
    async with stub.listening() as url, front(url, tmp_path) as client:
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
        bodies = [chat("0"), chat("1", model="m", guided_choice=["a"])]
        batch, rows = await ended(client, await create(client, *bodies, {"messages": [image], "model": "m"}))
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert [rows[str(n)]["response"]["body"]["choices"][0]["message"]["content"] for n in range(2)] == ["0", "1"]
    assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (21, 9)
    sent = [body for body, _ in stub.seen]
    assert {body["model"] for body in sent} == {"m"}, "a line without a model gets the server's"
    assert any(body.get("guided_choice") == ["a"] for body in sent), "a field of the server's own passes on"
    assert any(body["messages"] == [image] for body in sent)
    assert {(body["priority"], headers["x-vllm-priority"]) for body, headers in stub.seen} == {(30, "30")}


async def test_each_failure_gets_its_answer(stub: Stub, tmp_path: Path) -> None:
    tries: Counter[str] = Counter()

    def answer(body: dict[str, Any]) -> Response:
        text = body["messages"][-1]["content"]
        tries[text] += 1
        first = tries[text] == 1
        match text:
            case "long":
                return refusing(400, "maximum context length is 4096 tokens")
            case "busy" if first:
                return refusing(429, "full", **{"retry-after": "0"})
            case "broken" if first:
                return refusing(500, "EngineCore encountered an issue")
            case "page" if first:
                return PlainTextResponse("<html>")
            case "key" if first:
                return refusing(401, "Unauthorized")
        return _echo(body)

    stub.answer = answer
    texts = ["long", "busy", "broken", "page", "key", "well"]
    async with stub.listening() as url, front(url, tmp_path) as client:
        batch, rows = await ended(client, await create(client, *map(chat, texts)))
    assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
    assert rows["0"]["response"]["body"]["error"]["message"] == "maximum context length is 4096 tokens"
    assert tries == {"long": 1, "busy": 2, "broken": 2, "page": 2, "key": 2, "well": 1}


async def test_a_server_that_goes_away_keeps_its_lines_waiting(stub: Stub, tmp_path: Path) -> None:
    async with AsyncExitStack() as first:
        url = await first.enter_async_context(stub.listening())
        async with front(url, tmp_path) as client:
            stub.gate.clear()
            batch_id = await create(client, chat("0"), chat("1"))
            await until(lambda: stub.open == 2)
            await first.aclose()
            assert f"{url} cannot be reached" in await trouble_of(client)
            assert (await client.get(f"/v1/batches/{batch_id}")).json()["status"] == "in_progress"
            stub.gate.set()
            async with stub.listening(int(url.rpartition(":")[2])):
                batch, rows = await ended(client, batch_id)
                assert (await client.get("/ready")).status_code == 200
    assert batch["request_counts"]["completed"] == 2 and len(rows) == 2


async def test_a_server_without_priorities_gets_no_line_beside_its_chats(stub: Stub, tmp_path: Path) -> None:
    text = "Got priority 30 but Priority scheduling is not enabled."
    stub.answer = lambda body: refusing(400, text) if body.get("priority") else _echo(body)
    async with stub.listening() as url, front(url, tmp_path) as client:
        batch_id = await create(client, chat("0"))
        assert "--scheduling-policy priority" in await trouble_of(client)
        stub.answer = _echo
        batch, _ = await ended(client, batch_id)
        assert (await client.get("/ready")).status_code == 200
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


@pytest.mark.parametrize("status", [{"offline_running": 3, "offline_waiting": 0}, None], ids=["plugin", "without"])
async def test_no_more_lines_are_sent_than_the_server_can_use(
    stub: Stub, tmp_path: Path, status: dict[str, Any] | None
) -> None:
    stub.slo = status
    stub.gate.clear()
    expected = 35 if status else 64  # those that run and 32 that wait; at most 32 are taken to run
    async with stub.listening() as url, front(url, tmp_path) as client:
        batch_id = await create(client, *(chat(str(n)) for n in range(100)))
        await until(lambda: stub.open >= expected)
        await asyncio.sleep(0.7)  # more than the time between two changes of the window
        assert stub.most == expected
        stub.gate.set()
        batch, _ = await ended(client, batch_id)
    assert batch["request_counts"]["completed"] == 100


async def test_a_cancelled_batch_ends_its_requests(stub: Stub, tmp_path: Path) -> None:
    stub.gate.clear()
    async with stub.listening() as url, front(url, tmp_path) as client:
        batch_id = await create(client, chat("0"), chat("1"))
        await until(lambda: stub.open == 2)
        await client.post(f"/v1/batches/{batch_id}/cancel")
        await until(lambda: stub.closed == 2)
        batch, _ = await ended(client, batch_id)
    assert batch["status"] == "cancelled"


async def test_other_requests_are_sent_to_the_other_server(stub: Stub, tmp_path: Path) -> None:
    async with stub.listening() as url, front(url, tmp_path) as client:
        refused = await client.post("/v1/chat/completions", json=chat("0"))
        assert refused.status_code == 404 and url in refused.json()["error"]["message"]
        models = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["max_model_len"]) for each in models] == [("m", 4096), ("lora", 4096)]
        assert (await client.get("/metrics")).status_code == 200 == (await client.get("/")).status_code


async def test_the_lane_of_a_line_is_its_priority(stub: Stub) -> None:
    stub.answer = lambda body: JSONResponse({"usage": {"input_tokens": 5, "output_tokens": 2}})
    async with stub.listening() as url:
        other = Upstream(url)
        await asyncio.to_thread(other.await_server, print)
        await other.start()
        for lane in (Lane.BATCH, Lane.AT_RISK):
            answer = await other.run_line("/v1/messages", {"model": "m"}, ORIGIN._replace(lane=lane))
        await other.stop()
    assert [headers["x-vllm-priority"] for _, headers in stub.seen] == ["30", "20"]
    assert "priority" not in stub.seen[0][0], "Anthropic's messages have no such field"
    assert answer.usage[:3] == (5, 0, 2)


async def test_an_error_names_its_cause(stub: Stub) -> None:
    other = Upstream("http://127.0.0.1:1/v1/")
    assert other.url == "http://127.0.0.1:1"
    other.models = ("m",)
    await other.start()
    with pytest.raises(EngineUnavailableError, match=r"http://127.0.0.1:1 cannot be reached"):
        await other.run_line("/v1/chat/completions", chat("0"), ORIGIN)
    assert cause_of(ApiError(500)) is Cause.UNKNOWN, "a line that the server fails is tried a few times"
    await other.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "4"], "--max-num-seqs cannot be combined with a server's address"),
        (["--served-model-name", "x"], "--served-model-name cannot be combined"),
        (["--dry-run"], "--dry-run cannot be combined"),
        (["--host", "0.0.0.0"], "--api-key"),
    ],
)
def test_a_setting_of_the_model_is_refused_before_a_server_is_asked(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "http://127.0.0.1:1", *arguments]) == 2
    assert message in capsys.readouterr().err


async def test_a_server_that_is_none_is_refused_at_the_start(stub: Stub, tmp_path: Path) -> None:
    stub.app.router.routes[:] = []
    async with stub.listening() as url:
        with pytest.raises(ConfigError, match="lists no model"):
            await asyncio.to_thread(Upstream(url).await_server, print)
    async with Stub().listening() as url, front(url, tmp_path) as client:
        with pytest.raises(ConfigError, match="is a tidemill server, which runs batches itself"):
            await asyncio.to_thread(Upstream(str(client.base_url)).await_server, print)
    for url in ("http://[", "http://a:b", "http://a:99999"):
        with pytest.raises(ConfigError, match="no address of a server"):
            Upstream(url).await_server(print)
