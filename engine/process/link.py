"""The gateway's connection to the current engine process: its socket, open calls, and requests sent to it.

`Regrouping` is for a process that joins or leaves a pipeline: it sends the orders, and moves open requests between
engines without interrupting their streams.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from engine.api import EngineRequest, FinishReason, LoadReport
from engine.errors import EngineUnavailableError
from engine.process import frames
from engine.process.frames import FrameError, FrameReader, Message, Order, Past, Reset, encode
from engine.process.launcher import ProcessEndpoint
from engine.process.requests import OpenRequest, OpenRequests, take_over
from engine.process.suspects import Suspects

MessageT = TypeVar("MessageT")

FRAME_TOKENS, FRAME_REQUESTS = 1 << 16, 64
"""Tokens and resumed requests after which a frame ends; the last request may exceed the tokens."""
TURN_TOKENS = 1 << 20
"""Tokens of resumed requests sent in one turn of the event loop: about 10 ms."""
MAX_UNSENT, DRAIN_SECONDS = 1 << 26, 0.01
"""Unsent bytes from which on resumed requests wait, and the seconds until the next check."""


class Connection(asyncio.Protocol, Generic[MessageT]):
    """A socket that passes each message to `on_message`.

    `on_lost` is called once at the end, with the fault if the bytes were invalid, else None.
    """

    def __init__(
        self,
        reader: FrameReader[MessageT],
        on_message: Callable[[MessageT], None],
        on_lost: Callable[[str | None], None],
    ) -> None:
        self._reader = reader
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._fault: str | None = None

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        reader: FrameReader[MessageT],
        on_message: Callable[[MessageT], None],
        on_lost: Callable[[str | None], None],
    ) -> "Connection[MessageT]":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(lambda: cls(reader, on_message, on_lost), sock=sock)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._fault is not None:
            return
        try:
            messages = self._reader.feed(data)
        except FrameError as error:
            self._fault = str(error)
            self.close()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._on_lost(self._fault)

    def send(self, message: Message) -> None:
        """Send a message. Ignore it if the connection is lost: `on_lost` reports that."""
        if self._transport is not None:
            self._transport.write(encode(message))

    @property
    def unsent(self) -> int:
        """Bytes in the write buffer."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class GoneError(Exception):
    """The process died before it answered."""


@dataclass(slots=True)
class _Call:
    answer: "asyncio.Future[Any]"
    submitted: Sequence[EngineRequest] = ()


@dataclass(slots=True)
class Calls:
    """Open calls by number. `send` sends a message to the process."""

    send: Callable[[frames.Message], None]
    _open: dict[int, _Call] = field(default_factory=dict)
    _number: int = 0

    async def ask(self, make: Callable[[int], frames.Message], submitted: Sequence[EngineRequest] = ()) -> Any:
        """Send a call and return its answer. Raise the error of a refusal, or GoneError."""
        self._number += 1
        number = self._number
        call = self._open[number] = _Call(asyncio.get_running_loop().create_future(), submitted)
        try:
            self.send(make(number))
            return await call.answer
        finally:
            self._open.pop(number, None)

    def submitted(self, number: int) -> Sequence[EngineRequest]:
        """Return the requests that the call submits."""
        call = self._open.get(number)
        return () if call is None else call.submitted

    def settle(self, number: int, value: Any) -> None:
        """Set the answer of a call. Ignore a call whose caller was cancelled."""
        call = self._open.get(number)
        if call is not None and not call.answer.done():
            call.answer.set_result(value)

    def refuse(self, number: int, error: Exception) -> None:
        call = self._open.get(number)
        if call is not None and not call.answer.done():
            call.answer.set_exception(error)

    def end(self) -> None:
        """Fail all open calls with GoneError."""
        for number in list(self._open):
            self.refuse(number, GoneError())
        self._open.clear()


class SentRequests:
    """Requests sent to the process.

    Attributes:
        report: The last load report of the process; None before the first one.
        unreported: Requests that the report does not include, in the order sent.
    """

    def __init__(self) -> None:
        self.report: LoadReport | None = None
        self.unreported: deque[EngineRequest] = deque()
        self._num_reported = 0

    def hear(self, report: LoadReport | None) -> None:
        """Record a load report, and drop the requests that the process had received before it."""
        if report is None:
            return
        self.report = report
        for _ in range(min(report.received - self._num_reported, len(self.unreported))):
            self.unreported.popleft()
        self._num_reported = report.received


class ProcessLink:
    """The connection to the current process.

    Args:
        receive: Called with each message of the process.
        resumed: Returns a request in the form that the next process resumes, or None if the request has ended.
    """

    def __init__(
        self,
        receive: Callable[[frames.ToGateway], None],
        resumed: Callable[[OpenRequest], EngineRequest | None],
    ) -> None:
        self.calls = Calls(self.send)
        self.given = SentRequests()
        self.num_resumed = 0
        self._receive = receive
        self._resumed = resumed
        self._connection: Connection[frames.ToGateway] | None = None
        self._resuming: deque[OpenRequest] = deque()

    async def open(self, child: ProcessEndpoint, on_lost: Callable[[str | None], None]) -> None:
        """Connect to a process and receive its messages. `on_lost` is called once at the end, see `Connection`."""
        self._connection = await Connection.open(child.sock, child.reader, self._receive, on_lost)
        for message in child.read_ahead():
            self._receive(message)

    def send(self, message: frames.Message) -> None:
        """Send a message, if there is a process."""
        if self._connection is not None:
            self._connection.send(message)

    def resume(self, entries: Sequence[OpenRequest]) -> None:
        """Resume requests in the process."""
        self.num_resumed += len(entries)
        self._resuming.extend(entries)
        self._resume_some()

    def _resume_some(self) -> None:
        """Send resumed requests in bounded frames, and continue in a later turn of the event loop if some are left."""
        unsent = 0 if self._connection is None else self._connection.unsent
        left = TURN_TOKENS if unsent < MAX_UNSENT else 0
        while self._resuming and left > 0:
            requests: list[EngineRequest] = []
            size = 0
            while self._resuming and size < FRAME_TOKENS and len(requests) < FRAME_REQUESTS:
                entry = self._resuming.popleft()
                if (request := self._resumed(entry)) is not None:
                    requests.append(request)
                    size += entry.num_computed + 1
            left -= size
            if requests:
                self.given.unreported.extend(requests)
                self.send(frames.Resume(tuple(requests)))
        if self._resuming:
            pause = 0.0 if unsent < MAX_UNSENT else DRAIN_SECONDS
            asyncio.get_running_loop().call_later(pause, self._resume_some)

    def end(self) -> None:
        """Forget the sent requests and fail the open calls of a process that has ended."""
        self.given = SentRequests()
        self._resuming.clear()
        self.calls.end()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Regrouping:
    """The orders and the open requests of one engine.

    Attributes:
        life: Number of processes that have ended so far.
        parted: Whether the process has lost the other engine of its pipeline.
    """

    def __init__(
        self, calls: Calls, requests: OpenRequests, suspects: Suspects, abort: Callable[[str, FinishReason], None]
    ) -> None:
        self.life = 0
        self.parted = False
        self._calls = calls
        self._requests = requests
        self._suspects = suspects
        self._abort = abort

    @property
    def is_calm(self) -> bool:
        """Whether no open request is a suspect."""
        return not any(entry.request.request_id in self._suspects for entry in self._requests)

    def lost(self) -> None:
        """Record the end of the process. The next process is a whole engine."""
        self.life += 1
        self.parted = False

    async def order(self, order: Order) -> tuple[Past, ...]:
        """Send an order and return its answer. Raise the error with which the process refuses it."""
        try:
            pasts: tuple[Past, ...] = await self._calls.ask(lambda call: frames.Regroup(call, order))
        except GoneError:
            raise EngineUnavailableError("the engine process ended") from None
        return pasts

    async def reset(self, num_units: int) -> None:
        """Make the process a whole engine again, with the open requests. Raise the error of the order."""
        known = tuple(entry.request.request_id for entry in self._requests)
        accepted = [entry for entry in self._requests.accepted() if entry.request.request_id not in self._suspects]
        requests = tuple(entry.resumed() for entry in accepted)
        await self.order(Reset(num_units, known, requests))
        self.parted = False

    def accepted(self) -> list[OpenRequest]:
        """Return the open requests that the process has accepted, in order of arrival."""
        return sorted(self._requests.accepted(), key=lambda entry: entry.arrival)

    def leave(self, request_ids: Collection[str] | None = None) -> list[OpenRequest]:
        """Remove and return the accepted requests that another engine continues: `request_ids`, or all if None."""
        taken = self._requests.take(lambda e: request_ids is None or e.request.request_id in request_ids)
        for entry in taken:
            entry.suspicion = self._suspects.release(entry.request.request_id)
        return taken

    def join(self, entries: Sequence[OpenRequest]) -> None:
        """Add requests of another engine. An order tells the process about them."""
        for entry in entries:
            entry.stream.rebind(partial(self._abort, entry.request.request_id))
        take_over(entries, self._requests, self._suspects)
