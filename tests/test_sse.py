"""Events as they are sent: silence is filled with comments, which no reader of events takes for one."""

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.http import sse


async def bodies_of(events: AsyncGenerator[bytes, None], heard: asyncio.Event | None = None) -> list[bytes]:
    """Send a stream to a client that stays; `heard` is set once it gets a comment."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))
        if bodies[-1] == sse.QUIET and heard is not None:
            heard.set()

    async def receive() -> Any:
        await asyncio.get_running_loop().create_future()

    await sse.EventStream(events, lambda: None)({}, receive, send)
    return bodies


async def test_a_silent_stream_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "QUIET_SECONDS", 0.0)
    heard = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        yield sse.event(1)
        await heard.wait()
        yield sse.event(2)

    tasks = asyncio.all_tasks()
    bodies = await bodies_of(events(), heard)
    assert [body for body in bodies if body not in (b"", sse.QUIET)] == [sse.event(1), sse.event(2)]
    assert sse.QUIET in bodies and sse.QUIET.startswith(b":") and sse.QUIET.endswith(sse.END)
    assert asyncio.all_tasks() == tasks, "nothing is sent once it has ended"


async def test_a_stream_that_is_not_silent_says_nothing_else() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(100):
            yield sse.event(number)
            await asyncio.sleep(0)

    bodies = await bodies_of(events())
    assert sse.QUIET not in bodies and len(bodies) == 102


async def test_lines_of_a_stream_survive_readers_that_cut_at_unicode_line_ends() -> None:
    """httpx's `iter_lines` cuts where `str.splitlines` does."""
    text = "a\x85\u2028\u2029\x1c\x0bb"

    async def events() -> AsyncGenerator[bytes, None]:
        yield sse.event({"text": text})
        yield sse.named_event({"type": "x", "text": text})

    bodies = await bodies_of(events())
    found = [line for line in b"".join(bodies).decode().splitlines() if line.startswith("data: ")]
    assert [json.loads(line.removeprefix("data: "))["text"] for line in found] == [text, text]
    assert len(b"".join(bodies).decode().splitlines()) == 5


async def test_direct_events_of_one_round_leave_in_one_chunk_while_the_client_reads() -> None:
    written: list[bytes] = []
    cycle: Any = SimpleNamespace(
        response_started=True, response_complete=False, disconnected=False, chunked_encoding=True,
        flow=SimpleNamespace(write_paused=False), transport=SimpleNamespace(write=written.append),
    )  # fmt: skip
    writer = sse.EventWriter(cycle, asyncio.get_running_loop())
    for events in ((sse.event(1), sse.event("\u2028")), (sse.event(3),)):
        for each in events:
            writer.write(each)
        assert writer.is_free
        await asyncio.sleep(0)
    body = sse.event(1) + b'data: "\\u2028"\n\n'
    assert written == [b"%x\r\n%b\r\n" % (len(body), body), b"9\r\ndata: 3\n\n\r\n"] and writer.num_written == 3
    writer.write(sse.event(4))
    cycle.disconnected = True
    await asyncio.sleep(0)
    assert len(written) == 2 and not writer.is_free
    cycle.disconnected, cycle.flow.write_paused = False, True
    assert not writer.is_free
