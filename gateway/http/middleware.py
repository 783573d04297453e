"""Pure ASGI middleware that acts on the headers, before a body is read: request id, host and origin, key, limits.

Knows nothing of routes.
"""

import re
import uuid
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import ApiError, error_response
from gateway.http.hosts import HostNames, host_name
from gateway.http.keys import Key, KeyStore
from gateway.telemetry.metrics import GatewayMetrics

_KEY_HEADERS = (b"authorization", b"x-api-key")
_SLASHES = re.compile("/{2,}")


class RequestIds:
    """Outermost but for the error boundary: names each request, counts each response, collapses doubled slashes."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        if "//" in scope["path"]:
            scope["path"] = _SLASHES.sub("/", scope["path"])
        names = [(b"x-request-id", request_id.encode())]
        if scope["path"].startswith("/v1/messages"):
            names.append((b"request-id", request_id.encode()))  # what Anthropic's clients look for

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *names]
                self._metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, named)


class HostGuard:
    """Lets only requests through that are meant for this server, and none that a browser sends for a page of another
    origin: such a page could use a server that asks for no key, and upload files to it, without ever being asked.
    Following a link to here is allowed."""

    def __init__(self, app: ASGIApp, hosts: HostNames) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error, scope)(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        sent = {name: _values(scope, name) for name in ("host", "origin", "sec-fetch-site")}
        if len(sent["host"]) != 1 and (sent["host"] or scope["http_version"] != "1.0"):
            return ApiError(400, "A request must name exactly one host.", code="invalid_host")
        host = sent["host"][0] if sent["host"] else "localhost"
        if not self._hosts.know(host):
            name = (host_name(host) or "")[:64]
            message = f"This server does not answer for the host '{name}'. If it should, start it with --allowed-host."
            return ApiError(400, message, code="invalid_host")
        foreign = any(not self._hosts.trust(origin, host) for origin in sent["origin"])
        if foreign or ("cross-site" in sent["sec-fetch-site"] and not _follows_link(scope)):
            return ApiError(403, "Pages of another origin may not use this server.", code="forbidden_origin")
        return None


def _follows_link(scope: Scope) -> bool:
    kinds = _values(scope, "sec-fetch-mode") + _values(scope, "sec-fetch-dest")
    return scope["method"] == "GET" and kinds == ["navigate", "document"]


def _values(scope: Scope, name: str) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name.encode()]


class Authentication:
    """Pass a request on if its key is one of `keys`, if there are no keys, or if its path is in `open_paths`; note its
    tenant and roles. A change of the keys does not touch requests that run already."""

    def __init__(self, app: ASGIApp, keys: KeyStore, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ring = self._keys.ring
        if scope["type"] == "http" and ring:
            key = self._find(scope)
            if key is not None:
                scope.setdefault("state", {}).update(
                    tenant=key.tenant,
                    service_tier=key.service_tier,
                    sees_all=ring.sees_all(key),
                    is_operator=key.is_operator,
                )
            elif scope["path"] not in self._open_paths:
                headers = {"www-authenticate": "Bearer"}
                error = ApiError(401, "A valid API key is needed.", code="invalid_api_key", headers=headers)
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _find(self, scope: Scope) -> Key | None:
        """OpenAI's clients send `authorization`, Anthropic's may send `x-api-key`; the first counts where both come."""
        sent = {name: [value for key, value in scope["headers"] if key == name] for name in _KEY_HEADERS}
        values = sent[b"authorization"] or [b"Bearer " + value for value in sent[b"x-api-key"]]
        scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        return self._keys.ring.find(key.strip()) if scheme.lower() == b"bearer" else None


class BodyLimit:
    """Refuses bodies beyond `max_body_bytes` (413), by their announced length or as they come in, and more than
    `max_held_bytes` of bodies at a time (503), so that memory is bounded however many clients send at once.

    `streamed`: paths whose bodies are not held but pass through, and how long they may be."""

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, max_held_bytes: int, streamed: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max(max_held_bytes, max_body_bytes)
        self._held_bytes = 0
        self._streamed = streamed or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._streamed.get(scope["path"], self._max_body_bytes)
        if _announced_length(scope) > most:
            await error_response(_too_large(most), scope)(scope, receive, send)
            return
        if scope["path"] in self._streamed:  # its resource counts what comes
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
                if size > self._max_body_bytes:
                    raise _too_large(most)
                if self._held_bytes > self._max_held_bytes:
                    raise ApiError(503, "Too many requests are being sent at once.", headers={"retry-after": "1"})
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
