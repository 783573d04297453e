"""uvicorn's HTTP protocol with limits against slow and abusive clients.

It adds a deadline and size limits for headers, a minimum rate for bodies, a timeout for clients that stop reading, and
a limit on pipelined requests. The limits act on the transport, where stalls are visible. Responses to HTTP/1.0 clients
are not chunked. `Upgrade` is ignored, as RFC 9110 section 7.8 allows: Java's HttpClient and `curl --http2` offer HTTP/2
in every request to an http:// address, and send the body with it.

A limit on concurrent connections keeps file descriptors free for engine processes and files.

A new connection beyond the limit closes the connection that has been idle for longest. If all connections have a
request in progress, the new one is only served health checks; other requests get a 503. A refused connection lingers
until the client has read that, or until another one needs its place.
"""

import asyncio
import contextlib
import logging
import socket
import time
from asyncio import TimerHandle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Protocol

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.http.errors import ApiError
from gateway.http.sse import DIRECT, EventWriter

log = logging.getLogger("tidemill.gateway")

RESERVE = 192
"""Descriptors reserved for other uses: sockets and pipes of the engine process, database, journals, uploads, and
connections that have been accepted but not counted yet."""
STANDING = 32
"""Connections beyond the limit whose request is read; further ones are refused at once."""
ALWAYS_SERVED = frozenset({b"/health", b"/ready"})
LOG_SECONDS = 60.0


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit of open files to the hard limit and return it; None if unlimited or unknown."""
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS reports a hard limit that it does not grant
        return soft
    return None if hard == resource.RLIM_INFINITY else hard


def connections_within(descriptors: int | None) -> int | None:
    """Return the connection limit for a number of descriptors: all but the reserve, at least a third."""
    return None if descriptors is None else max(descriptors // 3, descriptors - RESERVE - STANDING)


class Holder(Protocol):
    """A connection that is counted by `ConnectionLimit`."""

    def give_way(self) -> None:
        """Close this idle or refused connection in favour of a new one."""


class ConnectionLimit:
    """Count connections up to `limit` (None: unlimited), and track the idle ones."""

    def __init__(self, limit: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._inside: set[Holder] = set()
        self._standing: set[Holder] = set()
        self._refused: dict[Holder, None] = {}  # part of `_standing`, in the order of refusal
        self._waiting: dict[Holder, None] = {}  # ordered by idle time, longest first
        self._log_at = -LOG_SECONDS

    def enter(self, holder: Holder) -> bool:
        """Count a new, idle connection; return False if it exceeds the limit and no idle connection can be closed."""
        if self._limit is not None and len(self._inside) >= self._limit:
            self._log()
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                if len(self._standing) >= STANDING:
                    self._close(next(iter(self._refused), None))
                self._standing.add(holder)
                return False
            self._close(oldest)
        self._inside.add(holder)
        self._waiting[holder] = None
        return True

    @property
    def may_stand(self) -> bool:
        """Whether a connection beyond the limit may send its request."""
        return len(self._standing) <= STANDING

    def begin(self, holder: Holder) -> None:
        """Mark a connection as busy: the headers of a request are complete."""
        self._waiting.pop(holder, None)

    def end(self, holder: Holder) -> None:
        """Mark a connection as idle: all its requests are answered."""
        if holder in self._inside:
            self._waiting.pop(holder, None)
            self._waiting[holder] = None

    def refuse(self, holder: Holder) -> None:
        """Mark a connection beyond the limit as refused: its response was sent."""
        if holder in self._standing:
            self._refused[holder] = None

    def _close(self, holder: Holder | None) -> None:
        if holder is not None:
            self.leave(holder)
            holder.give_way()

    def leave(self, holder: Holder) -> None:
        """Forget a closed connection."""
        self._refused.pop(holder, None)
        self._inside.discard(holder)
        self._standing.discard(holder)
        self._waiting.pop(holder, None)

    def _log(self) -> None:
        now = self._clock()
        if now - self._log_at >= LOG_SECONDS:
            self._log_at = now
            log.warning("all %s connections are in use; raise the limit of open files (ulimit -n)", self._limit)


_FRAMING = (b"content-length", b"transfer-encoding")
_WRITE_BUFFER = 32 * 1024
_MAX_PIPELINED = 8
_MAX_DROPPED = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ProtocolLimits:
    """Limits of one connection."""

    silent_seconds: float = 30.0
    """Maximum time before the first byte: idle connections are cheap, and clients on busy machines connect early."""
    header_seconds: float = 10.0
    """Maximum time from the first byte to the end of the headers."""
    max_header_bytes: int = 3 * 512 * 1024
    """Large enough to answer an API key of 1 MiB with 401."""
    max_headers: int = 256
    max_url_bytes: int = 64 * 1024
    body_seconds: float = 30.0
    """Maximum time for the body, plus one second per `min_body_rate` bytes received."""
    min_body_rate: int = 16 * 1024
    max_framing_bytes: int = 64 * 1024
    """Maximum excess of chunk framing over content: chunk extensions and leading zeros have no limit of their own."""
    write_stall_seconds: float = 10.0
    """Abort a connection whose client has read nothing for this time."""
    linger_seconds: float = 5.0
    """After a refusal, read and discard data for this time, so that the client can read the response."""
    max_connections: int | None = None
    """See `ConnectionLimit`."""
    standing_seconds: float = 2.0
    """Maximum time for the headers on a connection beyond the limit."""


class HeadersTooLarge(Exception):
    """Stop the parser from a callback: the headers or the URL are too large."""


class NoPlace(Exception):
    """Stop the parser: the connection is beyond the limit, and the request is not a health check."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. uvicorn creates the instances: use `with_limits` to set the limits on a subclass."""

    limits: ClassVar[ProtocolLimits] = ProtocolLimits()
    places: ClassVar[ConnectionLimit] = ConnectionLimit(None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_replay = False
        self._has_place = self.places.enter(self)
        self._read_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []
        self._refused = False
        self._dropped_bytes = 0
        self._stalled_size = 0
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        _limit_unsent(transport)
        self._begin_head(self.limits.silent_seconds if self._has_place else self.limits.standing_seconds)
        if not self._has_place and not self.places.may_stand:
            self._refuse(_no_place())
            transport.close()

    def give_way(self) -> None:
        """See Holder. The response to a refused request may still be in the write buffer."""
        if self._refused:
            self.transport.close()
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.leave(self)
        self._cancel_timers()
        for cycle in self._cycles:  # uvicorn notifies only the newest of several pipelined requests
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._drop(len(data))
            return
        reading = self.cycle if self._in_body else None
        self._parse(data)
        if reading is not None and self._in_body and self.cycle is reading:
            self._check_framing(len(data))
        if self._in_head and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_header_bytes:
                self._refuse(ApiError(431))

    def _parse(self, data: bytes) -> None:
        """Parse received bytes like uvicorn, but ignore offers of another protocol.

        httptools ends a request with `Upgrade` behind its headers and leaves the body unread. A new parser then gets a
        head with the same framing, whose callbacks return at once, and the body after it.
        """
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as offer:
                    data = data[offer.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    self._is_replay = True
                    framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def _check_framing(self, size: int) -> None:
        """Count `size` bytes received for the current body, excluding bytes that arrived together with the headers."""
        self._wire_bytes += size
        framing = self._wire_bytes - self._body_bytes
        if framing > self._body_bytes + self.limits.max_framing_bytes and not self._refused:
            self._refuse(ApiError(400, "The chunked request body has more framing than content."))

    def _drop(self, size: int) -> None:
        """Count discarded data of a refused client, and abort beyond the limit."""
        self._dropped_bytes += size
        if self._dropped_bytes > _MAX_DROPPED:
            self.transport.abort()

    # Parser callbacks
    def on_message_begin(self) -> None:
        if self._is_replay:
            return
        super().on_message_begin()
        self._begin_head(self.limits.header_seconds if self._has_place else self.limits.standing_seconds)

    def on_url(self, url: bytes) -> None:
        if self._is_replay:
            return
        super().on_url(url)
        self._url_size += len(url)
        if self._url_size > self.limits.max_url_bytes:
            raise HeadersTooLarge
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignore trailers, which must not be treated as headers (RFC 9110 §6.5.1): proxies check the headers only."""
        if self._is_replay:
            return
        if self._in_head:
            super().on_header(name, value)
        self._count_header(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._is_replay:
            self._is_replay = False
            return
        self._in_head = False
        self._in_body = True
        self._body_started = self.loop.time()
        self._body_bytes = self._wire_bytes = 0
        if not self._has_place and self.url.partition(b"?")[0] not in ALWAYS_SERVED:
            raise NoPlace
        self._arm_read(self.limits.body_seconds, self._check_body)
        self.places.begin(self)
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and self._has_place
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _ended_by_closing(self.cycle)  # type: ignore[method-assign, assignment]
        if self.scope["method"] != "HEAD":
            self.scope["extensions"] = {DIRECT: {"writer": EventWriter(self.cycle, self.loop)}}
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        if len(self.pipeline) > _MAX_PIPELINED:
            self.transport.abort()
        elif self.pipeline:
            self.flow.resume_reading()  # otherwise a disconnect would go unnoticed

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the body is still to come
            return
        self._in_body = False
        self._cancel_read()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if all(cycle.response_complete for cycle in self._cycles):
            self.places.end(self)
        if self._in_body and not self.pipeline:  # answered before the body was read
            self._arm_read(self.limits.linger_seconds, self.transport.close)
        if self.transport.get_write_buffer_size() > 0:
            self._watch_writing()

    # Reading
    def _begin_head(self, seconds: float) -> None:
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0
        self._num_headers = 0
        self._header_size = self._url_size = 0
        self._arm_read(seconds, self._end_head)

    def _count_header(self, size: int) -> None:
        self._num_headers += 1
        self._header_size += size
        if self._header_size > self.limits.max_header_bytes or self._num_headers > self.limits.max_headers:
            raise HeadersTooLarge

    def _end_head(self) -> None:
        if self._head_bytes:
            self._refuse(ApiError(408))
        else:
            self.transport.close()

    def _check_body(self) -> None:
        """Refuse a body that is too slow. Time during which the server itself has paused reading does not count."""
        allowed = self.limits.body_seconds + self._body_bytes / self.limits.min_body_rate
        remaining = self._body_started + allowed - self.loop.time()
        if self.flow.read_paused or remaining > 0:
            self._arm_read(max(remaining, 1.0), self._check_body)
        else:
            self._refuse(ApiError(408))

    def send_400_response(self, msg: str) -> None:
        """Respond to a parser error; called by uvicorn."""
        if not self._has_place and self._in_body:
            self._refuse(_no_place())
            return
        too_large = self._header_size > self.limits.max_header_bytes or self._num_headers > self.limits.max_headers
        too_long = self._url_size > self.limits.max_url_bytes
        self._refuse(ApiError(414) if too_long else ApiError(431) if too_large else ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Respond without the application, and accept no further requests on this connection."""
        self._refused = True
        self.places.refuse(self)
        self._cancel_read()
        unfinished = [cycle for cycle in self._cycles if not cycle.response_complete]
        if any(cycle.response_started for cycle in unfinished) or len(unfinished) > 1:
            self.transport.abort()  # another response is in progress and cannot be interleaved
            return
        for cycle in unfinished:
            cycle.disconnected = True
            cycle.message_event.set()
        body = orjson.dumps(error.envelope)
        headers = b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in error.headers.items())
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b"
            % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), headers, body)
        )
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._arm_read(
            self.limits.linger_seconds if self._has_place else self.limits.standing_seconds, self.transport.abort
        )

    # Writing
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_writing(self) -> None:
        if self._write_timer is None:
            self._stalled_size = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self.limits.write_stall_seconds, self._check_writing)

    def _check_writing(self) -> None:
        """Abort a connection whose client has read nothing since the last check."""
        self._write_timer = None
        size = self.transport.get_write_buffer_size()
        if size >= self._stalled_size > 0:
            self.transport.abort()
        elif size > 0:
            self._watch_writing()

    # Timers
    def _arm_read(self, seconds: float, action: Callable[[], None]) -> None:
        self._cancel_read()
        self._read_timer = self.loop.call_later(seconds, action)

    def _cancel_read(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _cancel_timers(self) -> None:
        self._cancel_read()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _ended_by_closing(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return `cycle.send` without chunks, which HTTP/1.0 does not have (RFC 9112 section 6.1): a body of unknown length
    ends with the connection."""
    send, has_length = cycle.send, True

    async def send_plainly(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plainly


def _no_place() -> ApiError:
    message = "The server has reached its maximum number of connections; try again later."
    return ApiError(503, message, code="too_many_connections", headers={"retry-after": "1"})


def _limit_unsent(transport: asyncio.Transport) -> None:
    """Limit the kernel's send buffer, which may hold megabytes: stalls are only visible in our own buffer."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    connection = transport.get_extra_info("socket")
    if option is not None and connection is not None:
        with contextlib.suppress(OSError, AttributeError):  # a Unix socket, or not supported here
            connection.setsockopt(socket.IPPROTO_TCP, option, _WRITE_BUFFER)


def with_limits(limits: ProtocolLimits) -> type[GuardedProtocol]:
    """Return a protocol class with these limits, for uvicorn's `http=`."""
    places = ConnectionLimit(limits.max_connections)
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": limits, "places": places})
