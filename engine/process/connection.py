"""One end of the socket between gateway and engine, on an event loop."""

import asyncio
import socket
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from engine.process.frames import FrameError, FrameReader, Message, encode

MessageT = TypeVar("MessageT")


class Connection(asyncio.Protocol, Generic[MessageT]):
    """Hands each message to `on_message`; `on_lost` is called once, at the end, with what was wrong with the bytes."""

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
        """Nothing is sent once the connection is lost: the other side is gone, and who waits for it is told."""
        if self._transport is not None:
            self._transport.write(encode(message))

    @property
    def unsent(self) -> int:
        """Bytes that the other side has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
