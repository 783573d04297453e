"""httptools' request parser without changes of the protocol.

RFC 9110 section 7.8 lets a server ignore `Upgrade`. Java's HttpClient and `curl --http2` offer HTTP/2 in every request
to an http:// address, and send the body with it.
"""

from typing import Protocol

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")


class ParserCallbacks(Protocol):
    """The callbacks of httptools."""

    headers: list[tuple[bytes, bytes]]
    """Headers of the current request, with names in lower case."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser:
    """Parse the requests of a connection. Offers of another protocol are ignored.

    httptools ends a request with `Upgrade` behind its headers and leaves the body unread. This class then gives a head
    with the same framing to a new parser, without calling back, and the body after it.
    """

    def __init__(self, callbacks: ParserCallbacks) -> None:
        self._callbacks = callbacks
        self._is_replay = False
        self.on_body = callbacks.on_body
        self._parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: answer before closing
        return parser

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """Return False, for uvicorn: no request changes the protocol."""
        return False

    def feed_data(self, data: bytes) -> None:
        """Parse received bytes. Raises httptools.HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self._replay_head()
            else:
                return

    def close(self) -> None:
        """Break the reference cycle with httptools' parser, so that a closed connection is freed at once."""
        del self._parser

    def _replay_head(self) -> None:
        framing = [b"%b: %b\r\n" % header for header in self._callbacks.headers if header[0] in _FRAMING]
        self._parser = self._new_parser()
        self._is_replay = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    # Callbacks of httptools
    def on_message_begin(self) -> None:
        if not self._is_replay:
            self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_replay:
            self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_replay:
            self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_replay:
            self._callbacks.on_headers_complete()
        self._is_replay = False

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._callbacks.on_message_complete()
