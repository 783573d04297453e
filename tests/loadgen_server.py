"""A scripted OpenAI-style server for the load generator's tests: it answers as scripted and records what it got."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

TEMPLATE_TOKENS = 7


def count_tokens(body: dict[str, Any]) -> int:
    """Token ids count themselves; text costs one token a word, but "world" costs two; a chat adds its template."""
    if "messages" in body:
        return TEMPLATE_TOKENS + sum(_words(message["content"]) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else 1 + _words(prompt)


def _words(text: str) -> int:
    return sum(2 if word == "world" else 1 for word in text.split())


@dataclass
class Script:
    """What the server does. `answer(number, body)` names a behaviour for each request; see `ScriptedServer._stream`."""

    answer: Callable[[int, dict[str, Any]], str] = lambda number, body: "ok"
    delay: float = 0.0
    polls_until_done: int = 2
    fail_every: int = 0
    job_usage: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    hung: asyncio.Event | None = None


class ScriptedServer:
    """The application; `start` it in a running loop."""

    def __init__(self, script: Script) -> None:
        self.script = script
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/files", self._upload)
        app.router.add_get("/v1/files/{id}/content", self._content)
        app.router.add_post("/v1/batches", self._create)
        app.router.add_get("/v1/batches/{id}", self._poll)
        app.router.add_post("/v1/batches/{id}/cancel", self._cancel)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        self.url = ""

    async def start(self) -> None:
        self.script.hung = asyncio.Event()
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        if self.script.hung is not None:
            self.script.hung.set()
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "9.9", "device": "paper"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        number = len(self.script.bodies)
        self.script.bodies.append(body)
        self.script.headers.append(dict(request.headers))
        kind = self.script.answer(number, body)
        if kind == "429":
            error = {"message": "the queue is full", "type": "rate_limit", "param": None, "code": "queue_full"}
            return web.json_response({"error": error}, status=429, headers={"Retry-After": "1"})
        if kind == "404":
            return web.json_response({"error": {"message": "no such model", "code": "model_not_found"}}, status=404)
        if not body.get("stream"):
            usage = {"prompt_tokens": count_tokens(body), "completion_tokens": body["max_tokens"]}
            choice = {"index": 0, "text": "x", "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": usage})
        return await self._stream(request, body, kind)

    async def _stream(self, request: web.Request, body: dict[str, Any], kind: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens, chat = body["max_tokens"], "messages" in body
        for number in range(tokens):
            if self.script.delay:
                await asyncio.sleep(self.script.delay)
            if kind == "hang" and number == 1:
                assert self.script.hung is not None
                await self.script.hung.wait()
                return response
            if kind == "cut" and number == 1:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(_chunk(body, number, last=number == tokens - 1, chat=chat))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        upload = form["file"]
        assert isinstance(upload, web.FileField) and form["purpose"] == "batch"
        name = f"file-{len(self.script.files)}"
        self.script.files[name] = upload.file.read()
        upload.file.close()
        return web.json_response({"id": name, "object": "file"})

    async def _content(self, request: web.Request) -> web.Response:
        return web.Response(body=self.script.files[request.match_info["id"]])

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        lines = [orjson.loads(line) for line in self.script.files[body["input_file_id"]].splitlines()]
        name = f"batch_{len(self.script.jobs)}"
        self.script.jobs[name] = {
            "id": name,
            "object": "batch",
            "status": "validating",
            "request_counts": {"total": len(lines), "completed": 0, "failed": 0},
            "polls": 0,
            "lines": lines,
        }
        return self._show(self.script.jobs[name])

    async def _poll(self, request: web.Request) -> web.Response:
        job = self.script.jobs[request.match_info["id"]]
        job["polls"] += 1
        if job["status"] == "cancelling":
            self._finish(job, "cancelled", job["request_counts"]["completed"])
        elif job["polls"] > self.script.polls_until_done:
            self._finish(job, "completed", len(job["lines"]))
        else:
            job["status"] = "in_progress"
            done = len(job["lines"]) * job["polls"] // (self.script.polls_until_done + 1)
            job["request_counts"]["completed"] = done
            if self.script.job_usage:
                job["usage"] = {"total_tokens": sum(_line_tokens(line) for line in job["lines"][:done])}
        return self._show(job)

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self.script.jobs[request.match_info["id"]]
        job["status"] = "cancelling"
        return self._show(job)

    def _show(self, job: dict[str, Any]) -> web.Response:
        return web.json_response({key: value for key, value in job.items() if key not in ("polls", "lines")})

    def _finish(self, job: dict[str, Any], status: str, count: int) -> None:
        good, bad = [], []
        for number, line in enumerate(job["lines"][:count]):
            failed = self.script.fail_every and (number + 1) % self.script.fail_every == 0
            (bad if failed else good).append(_result(line, failed=bool(failed)))
        for line in job["lines"][count:]:
            error = {"code": f"batch_{status}", "message": "not executed"}
            bad.append({"id": "batch_req_2", "custom_id": line["custom_id"], "response": None, "error": error})
        job["status"] = status
        job["request_counts"] |= {"completed": len(good), "failed": len(bad)}
        for key, rows in (("output_file_id", good), ("error_file_id", bad)):
            job[key] = f"{job['id']}-{key}" if rows else None
            self.script.files[f"{job['id']}-{key}"] = b"".join(orjson.dumps(row) + b"\n" for row in rows)


def _line_tokens(line: dict[str, Any]) -> int:
    return count_tokens(line["body"]) + int(line["body"]["max_tokens"])


def _result(line: dict[str, Any], *, failed: bool) -> dict[str, Any]:
    usage = {"prompt_tokens": count_tokens(line["body"]), "completion_tokens": line["body"]["max_tokens"]}
    body: dict[str, Any] = {"error": {"message": "no"}} if failed else {"usage": usage}
    response = {"status_code": 400 if failed else 200, "request_id": "r", "body": body}
    return {"id": "batch_req_1", "custom_id": line["custom_id"], "response": response, "error": None}


def _chunk(body: dict[str, Any], number: int, *, last: bool, chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    choice |= {"delta": {"content": "x"}} if chat else {"text": "x"}
    usage = {
        "prompt_tokens": count_tokens(body),
        "completion_tokens": number + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    return b"data: " + orjson.dumps({"choices": [choice], "usage": usage}) + b"\n\n"


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    """The server in the running loop; gives its address."""
    server = ScriptedServer(script)
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


@contextmanager
def serving_in_thread(script: Script) -> Iterator[str]:
    """The server in a thread with its own loop, for commands that run a loop themselves."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = ScriptedServer(script)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
