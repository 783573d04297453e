"""An SSE server that answers exactly by a script, in a process of its own: what the load generator is checked against.

What it does with a request follows from the request's text alone, so that whoever measures knows the true times. Every
answer starts with a role-only chunk, chunks carry one to four tokens, and some answers are a 429, a stream that is cut
or one that hangs. With a stall, nothing is written for `STALL_SECONDS` from the arrival of one request on, as when a
server collects garbage. `/written` tells when the bytes really left.
"""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from aiohttp import web

from loadgen.workers import loop_factory

Kind = Literal["ok", "429", "cut", "hang"]
STALL_SECONDS = 2.0
STALL_TEXT = "stall now "
"""A request whose text begins with this starts the stall."""
OTHERS: tuple[Kind, ...] = ("429", "cut", "hang")


@dataclass(frozen=True, slots=True)
class Answer:
    """`chunks`: (seconds from the request's arrival, tokens in all so far) of every chunk with tokens.

    A `cut` or `hang` comes after the first of them.
    """

    kind: Kind
    chunks: tuple[tuple[float, int], ...]


def answer_to(text: str) -> Answer:
    """The script for a request: TTFT 5 to 200 ms, 4 to 20 chunks with gaps of 5 to 60 ms; 3 % are no good answers."""
    dice = random.Random(text.removeprefix(STALL_TEXT))
    kind: Kind = dice.choice(OTHERS) if dice.random() < 0.03 and not text.startswith(STALL_TEXT) else "ok"
    at, tokens, chunks = dice.uniform(0.005, 0.2), 0, []
    for _ in range(dice.randint(4, 20)):
        tokens += dice.choice((1, 1, 1, 2, 4))
        chunks.append((at, tokens))
        at += dice.uniform(0.005, 0.06)
    return Answer(kind, tuple(chunks))


def chunk(tokens: int, *, role: bool = False, last: bool = False) -> bytes:
    """One event of a chat stream with the usage so far; `role` makes it the first one, without content."""
    delta = {"role": "assistant", "content": ""} if role else {"content": "x"}
    choice = {"index": 0, "delta": delta, "finish_reason": "length" if last else None}
    usage = {"prompt_tokens": 8, "completion_tokens": tokens}
    return b"data: " + orjson.dumps({"choices": [choice], "usage": usage}) + b"\n\n"


@dataclass(slots=True)
class Script:
    """The server's state: until when it is stalled, and the times each request's chunks were written."""

    stalled_until: float = 0.0
    written: dict[str, list[float]] = field(default_factory=dict)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, when: float) -> None:
        """Not early, and late by a turn of the loop: timers alone are a millisecond too coarse."""
        while (left := max(when, self.stalled_until) - time.monotonic()) > 0:  # noqa: ASYNC110 - a time, not a state
            await asyncio.sleep(left - 0.0015 if left > 0.002 else 0)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        arrived = time.monotonic()
        text: str = orjson.loads(await request.read())["messages"][0]["content"]
        if text.startswith(STALL_TEXT):
            self.stalled_until = arrived + STALL_SECONDS
        answer = answer_to(text)
        if answer.kind == "429":
            return web.json_response({"error": {"message": "scripted"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await self.until(arrived)
        await response.prepare(request)
        await response.write(chunk(0, role=True))
        times = self.written.setdefault(text, [arrived])
        for number, (offset, tokens) in enumerate(answer.chunks):
            if number == 1 and answer.kind != "ok":
                return await self._break(request, response, answer.kind)
            await self.until(arrived + offset)
            await response.write(chunk(tokens, last=number == len(answer.chunks) - 1))
            times.append(time.monotonic())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse, kind: Kind) -> web.StreamResponse:
        if kind == "cut" and request.transport is not None:
            await asyncio.sleep(0.01)
            request.transport.abort()
        else:
            await self.release.wait()
        return response

    async def show(self, _: web.Request) -> web.Response:
        """GET /written: by text, the arrival and the time of every chunk with tokens (monotonic clock)."""
        return web.Response(body=orjson.dumps(self.written), content_type="application/json")


def application() -> web.Application:
    """The server as an aiohttp application."""
    script = Script()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", script.generate)
    app.router.add_get("/written", script.show)

    async def release(_: web.Application) -> None:
        script.release.set()

    app.on_shutdown.append(release)
    return app


@contextlib.contextmanager
def cores_apart(pid: int) -> Iterator[None]:
    """A core for that process alone, the others for this one, where the system has more than one and lets us choose.

    Both wait for their moments in turns of their loops: on one core, one would wait for the other's time slice.
    """
    if sys.platform != "linux" or len(cores := os.sched_getaffinity(0)) < 2:
        yield
        return
    apart = {max(cores)}
    os.sched_setaffinity(pid, apart)
    os.sched_setaffinity(0, cores - apart)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The server in a process of its own, on a core of its own if there are two; gives its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        command = [sys.executable, "-m", "benchmarks.scripted", str(listener.fileno())]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        try:
            with cores_apart(process.pid):
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            process.wait(30)


def main(argv: list[str]) -> None:
    """Serve on the listening socket whose file descriptor is the argument."""
    arguments: dict[str, Any] = {"print": None, "access_log": None, "shutdown_timeout": 0.1}
    arguments["loop"] = loop_factory()()
    web.run_app(application(), sock=socket.socket(fileno=int(argv[0])), **arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
