"""The part `oracle` of the chaos benchmark: answers are compared token by token, and every harm breaks a promise."""

import json
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.chaos import load, oracle, oracle_part
from benchmarks.chaos.gateway_kills import Killed
from benchmarks.chaos.oracle import Answer, Difference, Tally
from benchmarks.chaos.oracle_part import Holdings
from benchmarks.chaos.server import Server
from gateway.store.schema import SCHEMA

GREEDY, SAMPLED, THREE = 0, 1, 2
"""Numbers of requests of these kinds."""


@asynccontextmanager
async def serving(answers: dict[str, Any]) -> AsyncIterator[aiohttp.ClientSession]:
    """A server that answers a path with JSON, or with text or a status as it is."""

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        answer = answers[request.path]
        if isinstance(answer, int):
            return web.Response(status=answer)
        return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
            yield session
    finally:
        await runner.cleanup()


def event(tokens: list[int], index: int = 0, reason: str | None = None, used: int | None = None) -> dict[str, Any]:
    choice = {"index": index, "token_ids": tokens, "finish_reason": reason, "text": "a"}
    return {"choices": [choice]} | ({} if used is None else {"usage": {"completion_tokens": used}})


def answer(*events: dict[str, Any]) -> Answer:
    found = Answer()
    for each in events:
        found.take(each)
    return found


def test_every_kind_of_request_is_the_same_each_time() -> None:
    assert {oracle.request_of(number)[0] for number in range(oracle.NUMBERS)} == set(oracle.KINDS)
    for number in range(oracle.NUMBERS):
        kind, path, body = oracle.request_of(number)
        assert (kind, path, body) == oracle.request_of(number) and ("messages" in body) == ("chat" in path)


def test_a_difference_tells_choice_and_place() -> None:
    expected = answer(event([1, 2]), event([3], reason="length"), event([7, 8], 1, "stop"))
    assert not oracle.compare(THREE, expected, answer(event([1, 2, 3], reason="length"), event([7, 8], 1, "stop")))
    (found,) = oracle.compare(THREE, expected, answer(event([1, 2, 3], reason="length"), event([7, 9], 1, "stop")))
    assert (found.choice, found.place) == (1, 1) and "choice 1, token 1 of 2: [8] became [9]" in str(found)
    (short,) = oracle.compare(THREE, expected, answer(event([1, 2], reason="length"), event([7, 8], 1, "stop")))
    assert short.place == 2
    (reason,) = oracle.compare(THREE, expected, answer(event([1, 2, 3], reason="stop"), event([7, 8], 1, "stop")))
    assert reason.reasons == ("length", "stop")


@pytest.mark.parametrize(
    ("number", "second", "tie"), [(GREEDY, -1.00001, True), (GREEDY, -1.1, False), (SAMPLED, -1.0, False)]
)
async def test_only_greedy_tokens_of_equal_probability_are_a_tie(number: int, second: float, tie: bool) -> None:
    top = {"choices": [{"logprobs": {"top_logprobs": [{"a": second, "b": -1.0, "c": -5.0}]}}]}
    difference = Difference(number, 0, 1, [4, 5], [4, 6], ("length", "length"))
    async with serving({"/v1/completions": top}) as session:
        assert await oracle.is_tie(session, difference) == tie
        cut_short = Difference(number, 0, 1, [4, 5], [4], ("length", "length"))
        assert not await oracle.is_tie(session, cut_short)


async def test_a_stream_without_its_end_and_a_refusal_are_errors() -> None:
    whole = f"data: {json.dumps(event([1], reason='length', used=1))}\n\n"
    for text, error in ((whole + "data: [DONE]\n\n", False), (whole, True)):
        async with serving({"/v1/completions": text}) as session:
            found = await oracle.ask(session, GREEDY, stream=True)
            assert found.choices == {0: ([1], "length")} and (found.error is not None) == error
            assert (await oracle.ask(session, GREEDY, stream=True, most=1)).cut
    async with serving({"/v1/completions": {"error": {"code": "x"}}}) as session:
        assert (await oracle.ask(session, GREEDY, stream=False)).error


def test_a_tally_counts_each_answer_once() -> None:
    expected, tally = answer(event([1, 2], reason="length", used=2)), Tally()
    tally.add(GREEDY, expected, answer(event([1, 2], reason="length", used=2)))
    tally.add(GREEDY, expected, answer(event([1, 3], reason="length", used=2)))
    tally.add(GREEDY, expected, answer(event([1, 2], reason="length", used=3)))
    tally.add(GREEDY, expected, Answer(error="503"))
    tally.add(GREEDY, expected, Answer(cut=True))
    assert (tally.asked, tally.choices, tally.same, tally.cut, len(tally.differences)) == (5, 5, 1, 1, 1)
    assert {kind: count for kind, count in tally.errors.items() if count} == {"503": 1, "wrong usage": 1}
    kept = [promise.kept for promise in oracle_part.of_answers(tally, ties=0)]
    assert kept == [None, None, False, True, False]
    assert oracle_part.of_answers(tally, ties=1)[2].kept
    tally.differences *= 0
    for allowed in (True, False):
        tally.add(SAMPLED, expected, answer(event([1, 3], reason="length", used=2)))
        promises = oracle_part.of_answers(tally, ties=0)
        assert promises[2].kept and promises[3].kept == allowed, "one draw at a boundary is no harm"


def test_everything_that_is_still_held_breaks_a_promise() -> None:
    before, tally = Holdings(10, 0, 0, 100, 20), Tally(choices=3)
    assert all(promise.kept for promise in oracle_part.of_holdings(before, Holdings(13, 0, 0, 100, 20), tally))
    after = Holdings(14, 1, 2, 100_000_100, 60)
    assert not any(promise.kept for promise in oracle_part.of_holdings(before, after, tally))


async def test_a_batch_that_lost_a_line_or_an_answer_is_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, text: str) -> dict[str, Any]:
        return {"custom_id": name, "response": {"body": event([1], used=1) | {"choices": [{"text": text}]}}}

    async def count(rows: list[dict[str, Any]], **state: Any) -> set[str]:
        killed = Killed(Server(tmp_path), random.Random(1), [], ["a", "b"])
        known = {"id": "x", "status": "completed", "output_file_id": "o", "usage": {"output_tokens": 2}, **state}
        known["request_counts"] = {"total": 2, "completed": 2, "failed": 0}
        text = "".join(json.dumps(each) + "\n" for each in rows)
        async with serving({"/v1/batches/x": known, "/v1/files/o/content": text, "/v1/batches/gone": 404}) as session:
            await killed._count(session, "p", "x")
            await killed._count(session, "p", "gone")
        return {kind.removeprefix("p: ") for kind, number in killed.harm.items() if number}

    monkeypatch.setattr("benchmarks.chaos.gateway_kills.WAIT_SECONDS", 0.0)
    lost = {"acknowledged batches lost"}
    assert await count([row("0", "a"), row("1", "b")]) == lost
    assert await count([row("0", "a"), row("1", "a")]) == lost | {"rows with differing text"}
    assert await count([row("0", "a")]) == lost | {"lines without one row", "wrong counts", "wrong usage"}
    assert await count([row("0", "a"), row("1", "b")], status="failed") == lost | {"batches that are failed"}


def test_what_nothing_explains_is_left_over(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for name in ("files", "tmp", "journals"):
        (server.state / name).mkdir(parents=True)
    connection = sqlite3.connect(server.state / "tidemill.db")
    connection.executescript(SCHEMA)
    connection.close()
    killed = Killed(server, random.Random(1), [], [])
    killed.left_over()
    assert not any(killed.harm.values())
    for name in ("files", "tmp", "journals"):
        (server.state / name / "x").touch()
    killed.left_over()
    assert {kind for kind, count in killed.harm.items() if count} == {
        "temporary files left over", "journals left over", "bodies left over",
    }  # fmt: skip


def test_a_line_of_the_batch_repeats_a_completion() -> None:
    assert all(oracle.request_of(oracle_part.number_of(line))[1] == "/v1/completions" for line in range(100))
    assert {"completed"} <= load.TERMINAL
