"""Server-sent events as raw bytes, and detection of client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.json_text import escape_line_ends

DONE = b"data: [DONE]\n\n"
END = b"\n\n"
QUIET = b": the answer goes on\n\n"
"""Keep-alive comment, which clients ignore; it keeps proxies from closing the connection."""
QUIET_SECONDS = 10.0
"""Seconds without an event before a keep-alive comment; below common proxy timeouts."""


def event(data: Any) -> bytes:
    """Encode one event; `data` must be serializable by orjson."""
    return b"data: " + orjson.dumps(data) + END


async def run_while_connected(receive: Receive, work: Callable[[], Awaitable[None]], abort: Callable[[], None]) -> bool:
    """Run `work`; cancel it and return False if the client disconnects. The request body must have been read.

    On a disconnect `abort` is called at once, because a cancellation reaches `work` only at its next wait. Exceptions
    of `work` are raised directly, not as a group.
    """
    finished = False
    failure: Exception | None = None

    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            abort()
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            await work()
            finished = True
        except Exception as error:  # raised after the task group, which would wrap it in an exception group
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return finished


def named_event(data: dict[str, Any]) -> bytes:
    """Encode one event, named by the `type` of its data."""
    return b"event: %b\ndata: %b%b" % (data["type"].encode(), orjson.dumps(data), END)


class EventStream(Response):
    """Send each item of `events` in one write. `abort` is called however the stream ends, also if the client
    disconnects before the first event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], abort: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._abort = abort
        self._num_sent = 0
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, lambda: self._send(send), self._abort)
        finally:
            self._abort()
            with anyio.CancelScope(shield=True):
                await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        quiet = asyncio.create_task(self._fill_silence(send), name="tidemill-quiet")
        try:
            async for chunk in self._events:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": escape_line_ends(chunk), "more_body": True})
        finally:
            quiet.cancel()
            await asyncio.wait([quiet])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fill_silence(self, send: Send) -> None:
        """Send keep-alive comments while a request waits in the queue or for an engine restart."""
        while True:
            before = self._num_sent
            await asyncio.sleep(QUIET_SECONDS)
            if self._num_sent == before:
                await send({"type": "http.response.body", "body": QUIET, "more_body": True})
