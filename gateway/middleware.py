"""Pure ASGI middleware that acts on the headers, before a body is read: request id, authentication, limits.

Knows nothing of routes but the two that need no key.
"""

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError, error_response
from gateway.metrics import GatewayMetrics

OPEN_PATHS = frozenset({"/health", "/ready"})
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
        name = (b"x-request-id", request_id.encode())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), name]
                self._metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, named)


class Authentication:
    """Lets a request through if its key is one of `keys`, or if there are none; its tenant is the key's digest prefix.

    Digests are compared, all of them each time: the time taken tells nothing of a key, whatever it holds.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN_PATHS:
            tenant = self._tenant(scope)
            if tenant is None:
                headers = {"www-authenticate": "Bearer"}
                error = ApiError(401, "A valid API key is needed.", code="invalid_api_key", headers=headers)
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = sent[0].partition(b" ") if len(sent) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer":
            return None
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex()[:16] if any(matches) else None


class BodyLimit:
    """Refuses bodies beyond `max_body_bytes` (413), by their announced length or as they come in, and more than
    `max_held_bytes` of bodies at a time (503), so that memory is bounded however many clients send at once."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_held_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max(max_held_bytes, max_body_bytes)
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _announced_length(scope) > self._max_body_bytes:
            await error_response(self._too_large())(scope, receive, send)
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
                    raise self._too_large()
                if self._held_bytes > self._max_held_bytes:
                    raise ApiError(503, "Too many requests are being sent at once.", headers={"retry-after": "1"})
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held_bytes -= size

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The request body is larger than {self._max_body_bytes} bytes.")


def _announced_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0
