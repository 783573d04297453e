"""A connection between two engine processes that carries whole messages of bytes, such as pasts and activations.

Blocking, for threads. The transport (currently a socket) is hidden from users.
"""

import contextlib
import socket
import struct

_LENGTH = struct.Struct("<Q")


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
            self._sock.sendall(_LENGTH.pack(len(view)))
            self._sock.sendall(view)
        except OSError as error:
            raise LinkLostError(str(error)) from None

    def receive(self) -> bytearray:
        """Return the next message. Raises LinkLostError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
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
