"""Server-sent events as raw bytes, and detection of client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.panics import as_error
from gateway.http.json_text import escape_line_ends

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

ResultT = TypeVar("ResultT")

DIRECT = "tidemill.direct"
"""Extension of the ASGI scope, with the `EventWriter` of the response as `writer`."""
DONE = b"data: [DONE]\n\n"
END = b"\n\n"
QUIET = b": the answer goes on\n\n"
"""Keep-alive comment, which clients ignore; it keeps proxies from closing the connection."""
QUIET_SECONDS = 10.0
"""Seconds without an event before a keep-alive comment; below common proxy timeouts."""


def event(data: Any) -> bytes:
    """Encode one event; `data` must be serializable by orjson."""
    return b"data: " + orjson.dumps(data) + END


async def run_while_connected(
    receive: Receive, work: Callable[[], Awaitable[ResultT]], abort: Callable[[], None]
) -> ResultT | None:
    """Return the result of `work`; cancel it and return None if the client disconnects. The request body must have been
    read.

    On a disconnect `abort` is called at once, because a cancellation reaches `work` only at its next wait. Exceptions
    of `work` are raised directly, not as a group.
    """
    result: ResultT | None = None
    failure: Exception | None = None

    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            abort()
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            result = await work()
        except BaseException as raised:  # raised after the task group, which would wrap it in an exception group
            failure = as_error(raised)
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


def named_event(data: dict[str, Any]) -> bytes:
    """Encode one event, named by the `type` of its data."""
    return b"event: %b\ndata: %b%b" % (data["type"].encode(), orjson.dumps(data), END)


class EventWriter:
    """Writes events of a chunked response from a callback, between the messages of the application."""

    def __init__(self, cycle: "RequestResponseCycle", loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self._loop = cycle, loop
        self._events: list[bytes] = []
        self.num_written = 0

    @property
    def is_free(self) -> bool:
        """Whether the headers are sent, the response goes on, and the client reads."""
        cycle = self._cycle
        goes_on = cycle.response_started and not (cycle.response_complete or cycle.disconnected)
        return bool(goes_on and cycle.chunked_encoding and not cycle.flow.write_paused)

    def write(self, events: bytes) -> None:
        """Write events, at least one, if `is_free`; those of one round of the event loop together."""
        self.num_written += 1
        if not self._events:
            self._loop.call_soon(self._flush)  # precedes a message of a task that is woken from now on
        self._events.append(events)

    def _flush(self) -> None:
        body = escape_line_ends(b"".join(self._events))
        self._events.clear()
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class EventStream(Response):
    """Send each item of `events` in one write. `abort` is called however the stream ends, also if the client
    disconnects before the first event. `direct` gets a writer of events that wait for no item."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        abort: Callable[[], None],
        direct: Callable[[EventWriter], None] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._abort = abort
        self._direct = direct
        self._num_sent = 0
        self._writer: EventWriter | None = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = scope.get("extensions", {}).get(DIRECT, {}).get("writer")
        if self._writer is not None and self._direct is not None:
            self._direct(self._writer)
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

    @property
    def _total(self) -> int:
        return self._num_sent + (0 if self._writer is None else self._writer.num_written)

    async def _fill_silence(self, send: Send) -> None:
        """Send keep-alive comments while a request waits in the queue or for an engine restart."""
        while True:
            before = self._total
            await asyncio.sleep(QUIET_SECONDS)
            if self._total == before:
                await send({"type": "http.response.body", "body": QUIET, "more_body": True})
