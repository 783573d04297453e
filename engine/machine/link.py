"""The framing of messages between our processes: each message is preceded by its length in 8 bytes.

`Link` is a blocking connection that carries whole messages, such as pasts and activations, between threads of two
processes. The transport (currently a socket) is hidden from users. `framed` and `read_frame` are the same for asyncio.
"""

import asyncio
import contextlib
import socket
import struct

HEADER = struct.Struct("<Q")
"""Length of the message that follows, in bytes."""


def framed(data: bytes) -> bytes:
    """Return a message with its header."""
    return HEADER.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next message. Raise asyncio.IncompleteReadError at the end of the stream, OSError if it is lost."""
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(length)


class LinkLostError(Exception):
    """The other side has closed the link, or this side has."""


class Link:
    """One end of a link. One thread may send while another receives; `close` wakes both, and the other side."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock

    def send(self, data: "bytes | bytearray | memoryview") -> None:
        """Send a message. Raises LinkLostError."""
        view = memoryview(data).cast("B")
        try:
            self._sock.sendall(HEADER.pack(len(view)))
            self._sock.sendall(view)
        except OSError as error:
            raise LinkLostError(str(error)) from None

    def receive(self) -> bytearray:
        """Return the next message. Raises LinkLostError."""
        (length,) = HEADER.unpack(self._read(HEADER.size))
        return self._read(length)

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            try:
                count = self._sock.recv_into(view[done:])
            except OSError as error:
                raise LinkLostError(str(error)) from None
            if not count:
                raise LinkLostError("the other side has closed the link")
            done += count
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
