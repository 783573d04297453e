"""Error responses in OpenAI's format `{"error": {message, type, param, code}}`, or Anthropic's for its clients.

Messages contain no traceback, path, key or prompt. Internal errors are logged with their location, without values.
"""

import logging
import math
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import (
    EngineStepError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RetryableError,
    TidemillError,
)
from engine.panics import LibraryPanicError, as_error

log = logging.getLogger("tidemill.gateway")

MESSAGES_PATH = "/v1/messages"


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API, by its path or by the header that its clients send."""
    return scope["path"].startswith(MESSAGES_PATH) or any(name == b"anthropic-version" for name, _ in scope["headers"])


def timestamp(seconds: int) -> str:
    """Return Unix seconds as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


INTERNAL_MESSAGE = "The server had an error while processing the request."
_DEFAULTS: dict[int, tuple[str, str]] = {
    400: ("The request is not valid.", "invalid_request"),
    404: ("The resource does not exist.", "not_found"),
    405: ("The method is not allowed for this resource.", "method_not_allowed"),
    408: ("The request took too long to arrive.", "request_timeout"),
    413: ("The request body is too large.", "request_too_large"),
    414: ("The request's URL is too long.", "url_too_long"),
    415: ("The request body must be sent as application/json.", "unsupported_media_type"),
    431: ("The request's headers are too large.", "headers_too_large"),
    503: ("The server cannot accept this request at the moment; try again later.", "service_unavailable"),
}

_TEXT_ONLY = "The server generates text only; use POST /v1/responses or /v1/chat/completions."
_STATELESS = "The server stores no responses; send the whole conversation as 'input' of POST /v1/responses."
_INSTEAD = {
    "/v1/assistants": "The server has no assistants; send the whole conversation as 'input' of POST /v1/responses.",
    "/v1/audio": _TEXT_ONLY,
    "/v1/chat/completions/": "The server stores no completions; keep the answer of POST /v1/chat/completions.",
    "/v1/containers": "The server runs no code; offer a function in 'tools' and run its calls in the client.",
    "/v1/conversations": _STATELESS,
    "/v1/evals": "The server has no evaluations; run the requests as a batch and grade them in the client.",
    "/v1/fine_tuning": "The server does not train models; start it with --lora to serve trained adapters.",
    "/v1/images": _TEXT_ONLY,
    "/v1/moderations": "The server has no moderation model; ask the served model with POST /v1/chat/completions.",
    "/v1/realtime": _TEXT_ONLY,
    "/v1/responses/": _STATELESS,
    "/v1/threads": "The server has no threads; send the whole conversation as 'input' of POST /v1/responses.",
    "/v1/vector_stores": "The server has no vector stores; use POST /v1/embeddings and an index of your own.",
    "/v1/videos": _TEXT_ONLY,
}
"""Reasons why resources of OpenAI's API do not exist, by the beginning of the path."""

_MESSAGES_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """An error response: status, headers and the fields of the envelope. `message` and `code` default by status."""

    def __init__(
        self,
        status: int,
        message: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        default_message, default_code = _DEFAULTS.get(status, (INTERNAL_MESSAGE, "internal_error"))
        super().__init__(message or default_message)
        self.status = status
        self.message = message or default_message
        self.param = param
        self.code = code or default_code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """The `type` field of the envelope."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def envelope(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def to_api_error(error: BaseException) -> ApiError:
    """Convert any exception to an error response; unexpected ones become a 500 without details."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, error.message, param=error.param, code=error.code)
        case QueueFullError():
            return ApiError(429, error.message, code="rate_limit_exceeded", headers=_retry_after(error))
        case EngineUnavailableError():
            return ApiError(503, error.message, headers=_retry_after(error))
        case EngineStepError():
            # The request would fail again: keep OpenAI's clients from retrying.
            return ApiError(500, error.message, code="engine_error", headers={"x-should-retry": "false"})
        case LibraryPanicError():  # it depends on the text, and would happen again
            return ApiError(500, headers={"x-should-retry": "false"})
        case HTTPException(status_code=status) if status in _DEFAULTS:
            return ApiError(status, headers={name.lower(): value for name, value in (error.headers or {}).items()})
        case TidemillError():
            return ApiError(500, error.message)
        case _:
            return ApiError(500)


def _retry_after(error: RetryableError) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(error.retry_after)))}


def messages_envelope(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """Return the error in the format of Anthropic's API."""
    kind = _MESSAGES_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    content: dict[str, Any] = {"type": kind, "message": error.message}
    if error.param == "thread":  # the client then sends the whole conversation
        content["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": content, "request_id": request_id}


def error_response(error: BaseException, scope: Scope) -> Response:
    """Return the error response to the request of `scope`."""
    answer = to_api_error(error)
    if isinstance(error, HTTPException) and answer.status in (404, 405):
        reason = _why_missing(scope) if answer.status == 404 else None
        if answer.status == 405:
            answer.headers["allow"] = allowed = _allowed(scope)
            why = _INSTEAD.get(scope["path"] + "/", "")
            reason = f"{scope['method']} is not possible here; use {allowed}. {why}".rstrip()
        answer = ApiError(answer.status, reason, headers=answer.headers)
    envelope: dict[str, Any] = answer.envelope
    if speaks_anthropic(scope):
        envelope = messages_envelope(answer, scope.get("state", {}).get("request_id"))
    return Response(orjson.dumps(envelope), answer.status, answer.headers, media_type="application/json")


def _why_missing(scope: Scope) -> str | None:
    """Return why a path has no resource, if the reason is known: a resource of OpenAI's API that the server does not
    have, or a client's base URL without `/v1`."""
    if reason := next((_INSTEAD[start] for start in _INSTEAD if scope["path"].startswith(start)), None):
        return reason
    path, app = f"/v1{scope['path']}", scope.get("app")
    asked = {**scope, "path": path}
    found = app is not None and any(route.matches(asked)[0] is not Match.NONE for route in app.router.routes)
    return f"The resource does not exist; did you mean {path}?" if found else None


def _allowed(scope: Scope) -> str:
    """Return the methods of the path, which may have several routes, for `Allow`."""
    routes = scope["app"].router.routes
    methods = [
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    return ", ".join(methods).replace("GET", "GET, HEAD")


def handle_error(request: Request, error: Exception) -> Response:
    """Exception handler for the errors that the router raises; `ErrorBoundary` handles all others."""
    return error_response(error, request.scope)


def log_unexpected(raised: BaseException) -> Exception:
    """Log type and location of an unexpected exception, without its message, which may contain a prompt; return it as
    an error. Raises what `as_error` raises."""
    error = as_error(raised)
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    name = error.args[0] if isinstance(error, LibraryPanicError) else type(error).__name__
    log.error("unexpected %s at %s", name, places)
    return error


class ErrorBoundary:
    """Middleware that converts exceptions to error responses, or closes the connection if a response has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched if scope["type"] == "http" else send)
        except ClientDisconnect:
            return
        except BaseException as raised:  # every exception becomes an error response
            error = as_error(raised)
            if scope["type"] != "http":
                raise
            if not isinstance(error, ApiError | TidemillError):
                log_unexpected(error)
            if started:
                raise ConnectionAbortedError("the response was cut off") from None  # the server closes the connection
            await error_response(error, scope)(scope, receive, send)
