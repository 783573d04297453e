"""The part `inputs` of the chaos benchmark: sizes of its inputs, and that every wrong answer breaks a promise."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import orjson
import pytest
from aiohttp import web

from benchmarks.bombs import MAX_BYTES, Bomb, joined
from benchmarks.chaos import beside, inputs
from benchmarks.chaos.grammars import grammars
from benchmarks.chaos.prober import Probes, probing
from benchmarks.chaos.promises import Scale

Handler = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """A server whose every answer is the handler's."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(url) as session:
            yield url, session
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("size", inputs.SIZES[:3])
def test_a_grammar_keeps_to_its_size_and_differs_from_the_others(size: int) -> None:
    made = {grammar.name: grammar.make(size) for grammar in grammars()}
    assert len(made) >= 105
    assert {name for name, text in made.items() if len(text.encode("utf-8", "surrogatepass")) > size} <= {
        "json: 8,000 integer properties"
    }
    largest = {name for name, text in made.items() if len(text.encode("utf-8", "surrogatepass")) > 0.6 * size}
    assert len(largest) >= 40, "a grammar that grows fills its size"


def test_bodies_are_json_unless_the_grammar_is_not() -> None:
    broken = set()
    for request in inputs.requests_of_grammars():
        if " of 2,000 " in request.name:
            try:
                orjson.loads(request.make())
            except orjson.JSONDecodeError:
                broken.add(request.name.split(" of 2,000")[0])
    assert broken <= {"json: half a schema", "json: maxLength 1e400", "json: a lone surrogate", "lark: a deep schema"}


@pytest.mark.parametrize("bomb", list(joined("m")), ids=lambda bomb: bomb.name)
def test_a_prompt_in_pieces_fills_its_size(bomb: Bomb) -> None:
    for size in (inputs.SIZES[0], MAX_BYTES):
        body = bomb.make(size)
        assert 0.8 * size < len(body) <= size and orjson.loads(body)


@pytest.mark.parametrize(("status", "wrong"), [(200, 0), (400, 0), (500, 6), (0, 6)])
async def test_every_request_must_be_answered(status: int, wrong: int) -> None:
    async def handle(request: web.Request) -> web.Response:
        if not status and request.transport is not None:
            request.transport.abort()
        return web.Response(status=status or 200)

    async with serving(handle) as (_, session):
        attack = inputs.Attack(session, Scale(1, 1.0, 1), random.Random(1))
        await attack.send([inputs.Request(str(i), "/v1/x", lambda: "{}") for i in range(6)])
    assert attack.answers.total() == 6 and len(attack.wrong) == wrong


async def test_a_batch_that_fails_or_an_innocent_line_that_fails_is_wrong() -> None:
    rows = [{"custom_id": name} for name in ("hostile-0", "innocent-0")]

    async def judge(**state: object) -> int:
        known = {"id": "b", "request_counts": {}, **state}
        answers = {"GET /v1/batches/b": known, "POST /v1/batches": known, "POST /v1/files": known}
        files = {"/v1/files/ok/content": rows, "/v1/files/one/content": rows[:1], "/v1/files/other/content": rows[1:]}

        async def handle(request: web.Request) -> web.Response:
            if found := files.get(request.path):
                return web.Response(text="".join(json.dumps(row) + "\n" for row in found))
            await request.read()
            return web.json_response(answers[f"{request.method} {request.path}"])

        async with serving(handle) as (_, session):
            attack = inputs.Attack(session, Scale(1, 1.0, 1), random.Random(1))
            await attack.run_batch("x", ["{}"], ["{}"])
        return len(attack.wrong)

    assert await judge(status="completed", output_file_id="ok") == 0
    assert await judge(status="completed", output_file_id="one", error_file_id="other") == 1
    assert await judge(status="completed", output_file_id="one") == 1
    assert await judge(status="failed") == 1


async def test_harm_to_bystanders_breaks_a_promise() -> None:
    found = beside.Bystanders(structured=[0.1], probes=Probes([0.01]))
    assert all(promise.kept is not False for promise in beside.promises("x", found, Probes()))
    found.refused, found.deaths, found.gone = ["400"], ['{cause="killed"} 1.0'], True
    found.probes.failed = found.outcome.broken = found.outcome.differing = 1
    found.probes.own, found.lag, found.grown, found.structured = [0.3], 0.1, 300_000_000, [11.0]
    broken = beside.promises("x", found, Probes())
    assert broken[0].value == "6"
    assert [promise.kept for promise in broken] == [False, None, False, None, False, False, False]
    busy = beside.promises("x", found, Probes([0.3]))
    assert [promise.kept for promise in busy] == [False, None, True, None, True, True, False], "a busy machine is late"


async def test_the_prober_counts_requests_that_are_not_answered() -> None:
    for status in (200, 503):
        asked = asyncio.Event()

        async def handle(_: web.Request, asked: asyncio.Event = asked, status: int = status) -> web.Response:
            asked.set()
            return web.Response(status=status)

        async with serving(handle) as (url, _), probing(url) as probes:
            await asked.wait()
        assert len(probes.own) == len(probes.waits) and probes.worst_own() <= probes.worst()
        assert probes.waits and probes.failed == (len(probes.waits) if status == 503 else 0)
