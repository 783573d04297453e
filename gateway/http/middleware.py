"""Pure ASGI middleware for request ids, host and origin checks, authentication and body limits.

All checks run before the body is read.
"""

import ipaddress
import re
import uuid
from collections.abc import Collection, Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.refusals import is_loopback
from gateway.http.errors import ApiError, error_response, speaks_anthropic
from gateway.http.keys import Key, KeyStore
from gateway.telemetry.metrics import GatewayMetrics

_KEY_HEADERS = (b"authorization", b"x-api-key")
_SLASHES = re.compile("/{2,}")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class RequestIds:
    """Assign request ids, count responses, normalize the path and answer HEAD like GET. Wraps the error boundary, whose
    responses are included."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        scope["path"] = _SLASHES.sub("/", scope["path"]).removesuffix("/") or "/"
        names = [(b"x-request-id", request_id.encode())]
        if speaks_anthropic(scope):
            names.append((b"request-id", request_id.encode()))  # read by Anthropic's clients

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *names]
                self._metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        if scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, _without_body(named))
        else:
            await self._app(scope, receive, named)


def _without_body(send: Send) -> Send:
    """Return a `send` for the response to HEAD. It ends the response at once; `receive` then returns a disconnect,
    which also ends a stream."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_head


def host_name(authority: str) -> str | None:
    """Return the normalized host of `name:port`, or None if the text is malformed."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return match[1].strip("[]").rstrip(".") if match else None


def origin_pattern(origins: Iterable[str]) -> str:
    """Return a regular expression of the origins of --allowed-origin. `*` alone is any origin, within one any text."""
    parts = (".*" if origin == "*" else re.escape(origin.lower()).replace(r"\*", "[^/]*") for origin in origins)
    return "|".join(f"(?:{part})" for part in parts)


class HostGuard:
    """Refuse requests under a foreign host name, against DNS rebinding, and requests that a browser sends for pages of
    another origin. Otherwise any web page could use a local server without API keys.

    With DNS rebinding a foreign web page makes its own name resolve to this machine; its requests carry that name in
    `Host`. IP addresses cannot be rebound. A server that listens beyond loopback accepts any name unless `allowed` is
    given: its names are unknown, and it requires API keys, which foreign pages do not have.

    Following a link to this server is allowed, and so are pages of `origins`.

    Args:
        bound: address that the server listens on.
        allowed: further names of the server, or `*` for any.
        origins: see `origin_pattern`.
    """

    def __init__(self, app: ASGIApp, bound: str, allowed: Iterable[str], origins: str = "") -> None:
        self._app = app
        self._allowed = {name.lower().strip("[]").rstrip(".") for name in allowed}
        self._names = {*self._allowed, bound.lower().strip("[]"), "localhost"}
        self._is_local = is_loopback(bound)
        self._any = "*" in self._allowed or not (self._is_local or self._allowed)
        self._origins = re.compile(origins) if origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, scope)(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        sent = {name: _values(scope, name) for name in ("host", "origin", "sec-fetch-site")}
        if len(sent["host"]) != 1 and (sent["host"] or scope["http_version"] != "1.0"):
            return ApiError(400, "A request must have exactly one Host header.", code="invalid_host")
        host = sent["host"][0] if sent["host"] else "localhost"
        if not self._knows(host):
            name = (host_name(host) or "")[:64]
            message = f"The host '{name}' is not allowed; to allow it, start the server with --allowed-host."
            return ApiError(400, message, code="invalid_host")
        if self._origins is not None and sent["origin"] and all(map(self._origins.fullmatch, sent["origin"])):
            return None
        foreign = any(not self._trusts(origin, host) for origin in sent["origin"])
        if foreign or ("cross-site" in sent["sec-fetch-site"] and not _follows_link(scope)):
            message = "Requests from pages of other origins are not allowed; --allowed-origin allows them."
            return ApiError(403, message, code="forbidden_origin")
        return None

    def _knows(self, authority: str) -> bool:
        """Return whether `authority` (host and port) addresses this server."""
        name = host_name(authority)
        if name is None:
            return False
        if self._any or name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_local

    def _trusts(self, origin: str, authority: str) -> bool:
        """Return whether a page of `origin` was served by this server (`authority`: the request's host) or under one of
        the allowed names."""
        scheme, found, place = origin.lower().partition("://")
        if not found or host_name(place) is None:
            return False
        default = ":" + _DEFAULT_PORTS.get(scheme, "")
        same = place.removesuffix(default) == authority.lower().removesuffix(default)
        return same or host_name(place) in self._allowed


def _follows_link(scope: Scope) -> bool:
    kinds = _values(scope, "sec-fetch-mode") + _values(scope, "sec-fetch-dest")
    return scope["method"] == "GET" and kinds == ["navigate", "document"]


def _values(scope: Scope, name: str) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name.encode()]


class Authentication:
    """Authenticate requests, and store the key in the request state. No key is required if the ring is empty
    or the path is in `open_paths`. A change of the keys does not affect running requests."""

    def __init__(self, app: ASGIApp, keys: KeyStore, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ring = self._keys.ring
        if scope["type"] == "http" and ring:
            key = self._find(scope)
            if key is not None:
                scope.setdefault("state", {}).update(key=key, sees_all=ring.sees_all(key))
            elif scope["path"] not in self._open_paths:
                sent = any(name in _KEY_HEADERS for name, _ in scope["headers"])
                message = "The API key is not valid." if sent else "An API key is required; send it as a bearer token."
                headers = {"www-authenticate": "Bearer"}
                error = ApiError(401, message, code="invalid_api_key", headers=headers)
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _find(self, scope: Scope) -> Key | None:
        """Find the first valid key in `authorization` (OpenAI) and `x-api-key` (Anthropic): one may be a dummy,
        or the `Basic` of a proxy."""
        for header in _KEY_HEADERS:
            values = [value for name, value in scope["headers"] if name == header]
            if len(values) != 1:  # two keys in one header are ambiguous
                continue
            scheme, _, key = values[0].partition(b" ") if header == b"authorization" else (b"bearer", b"", values[0])
            if scheme.lower() == b"bearer" and (found := self._keys.ring.find(key.strip())) is not None:
                return found
        return None


class BodyLimit:
    """Bound the memory of request bodies.

    Args:
        max_body_bytes: maximum size of a body, by content-length or as received (413).
        max_held_bytes: maximum size of all bodies in memory (503).
        streamed: maximum size of bodies that are not held in memory, by path; their endpoints
            count the bytes.
        larger: maximum size of a body by path, in place of `max_body_bytes`.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        max_held_bytes: int,
        streamed: Mapping[str, int] | None = None,
        larger: Mapping[str, int] | None = None,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max(max_held_bytes, max_body_bytes)
        self._held_bytes = 0
        self._streamed = streamed or {}
        self._larger = larger or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        streamed = self._streamed.get(scope["path"])
        most = self._larger.get(scope["path"], self._max_body_bytes) if streamed is None else streamed
        if _announced_length(scope) > most:
            await error_response(_too_large(most), scope)(scope, receive, send)
            return
        if streamed is not None:  # the endpoint counts the received bytes
            await self._app(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            if message["type"] == "http.request":
                length = len(message.get("body", b""))
                size += length
                self._held_bytes += length
                if size > most:
                    raise _too_large(most)
                if self._held_bytes > self._max_held_bytes:
                    text = "The server is receiving too many request bodies at once; try again later."
                    raise ApiError(503, text, headers={"retry-after": "1"})
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held_bytes -= size


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {most} bytes.")


def _announced_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0
