"""The part `descriptors` of the chaos benchmark: its connections stay, and harm breaks a promise."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.chaos import descriptors
from benchmarks.chaos.descriptors import Crowd, Seen, connect, promises

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[tuple[str, int]]:
    """A server whose connections have all ended at the end of the block."""
    open_ones: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_ones.add(task)
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()
        await asyncio.gather(*open_ones)


async def test_a_crowd_opens_again_a_connection_that_the_server_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "IDLE", 5)
    opened = asyncio.Semaphore(0)
    first: list[asyncio.StreamWriter] = []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first.append(writer)
        opened.release()
        await reader.read()

    async with listening(hold) as (host, port):
        crowd = Crowd(host, port)
        await asyncio.to_thread(crowd.fill)
        for _ in range(5):
            await opened.acquire()
        first[0].close()
        await first[0].wait_closed()
        await asyncio.to_thread(crowd.fill)
        await opened.acquire()
        assert len(crowd.sockets) == 5
        crowd.close()


@pytest.mark.parametrize(("answer", "result"), [(b"HTTP/1.1 503 x\r\n\r\n", 503), (b"", "refused"), (None, "silence")])
async def test_a_new_connection_is_answered_refused_or_left(
    answer: bytes | None, result: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "PROMPT_SECONDS", 0.2 if answer is None else 5.0)

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        writer.write(answer or b"")

    async with listening(reply) as (host, port):
        assert await asyncio.to_thread(connect, host, port) == result


def test_harm_breaks_a_promise() -> None:
    good = Seen(recovered=0.1)
    assert all(promise.kept is not False for promise in promises(good))
    bad = Seen(exited=True)
    bad.outcome.broken = bad.outcome.differing = bad.new["silence"] = 1
    bad.outcome.gaps = [(0.0, 60.0)]
    found = [promise for promise in promises(bad) if promise.kept is not None]
    assert found[0].value == "5" and [promise.kept for promise in found] == [False, False, False]
