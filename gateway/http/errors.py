"""Every error as OpenAI's envelope `{"error": {message, type, param, code}}`, whatever its status and origin; under
/v1/messages in the form of that API.

Messages hold no traceback, path, key or prompt; what went wrong inside is logged by place, not by value. Knows nothing
of routes.
"""

import logging
import math
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import (
    EngineStepError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RetryableError,
    TidemillError,
)

log = logging.getLogger("tidemill.gateway")

INTERNAL_MESSAGE = "The server had an error while processing the request."
_DEFAULTS: dict[int, tuple[str, str]] = {
    400: ("The request is not valid.", "invalid_request"),
    404: ("There is no such resource.", "not_found"),
    405: ("This method is not allowed here.", "method_not_allowed"),
    408: ("The request took too long to arrive.", "request_timeout"),
    413: ("The request body is too large.", "request_too_large"),
    414: ("The request's URL is too long.", "url_too_long"),
    415: ("The request body must be sent as application/json.", "unsupported_media_type"),
    431: ("The request's headers are too large.", "headers_too_large"),
    503: ("The server cannot take this request now.", "service_unavailable"),
}


MESSAGES_PATH = "/v1/messages"
_MESSAGES_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """An answer that is decided: status, and the envelope's fields. `code` and `message` default by status."""

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
        """The envelope's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def envelope(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def to_api_error(error: BaseException) -> ApiError:
    """The answer to any exception; what is not ours becomes a 500 that says nothing of it."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, error.message, param=error.param, code=error.code or "invalid_value")
        case QueueFullError():
            return ApiError(429, error.message, code="rate_limit_exceeded", headers=_retry_after(error))
        case EngineUnavailableError():
            return ApiError(503, error.message, headers=_retry_after(error))
        case EngineStepError():
            # It failed by itself and would fail again: OpenAI's clients are told not to try twice more.
            return ApiError(500, error.message, code="engine_error", headers={"x-should-retry": "false"})
        case HTTPException(status_code=status) if status in _DEFAULTS:
            return ApiError(status, headers=error.headers)
        case TidemillError():
            return ApiError(500, error.message)
        case _:
            return ApiError(500)


def _retry_after(error: RetryableError) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(error.retry_after)))}


def messages_envelope(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """The error as Anthropic's API has it."""
    kind = _MESSAGES_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def error_response(error: BaseException, scope: Scope) -> Response:
    """The answer to the request of `scope`."""
    answer = to_api_error(error)
    envelope: dict[str, Any] = answer.envelope
    if scope["path"].startswith(MESSAGES_PATH):
        envelope = messages_envelope(answer, scope.get("state", {}).get("request_id"))
    return Response(orjson.dumps(envelope), answer.status, answer.headers, media_type="application/json")


def handle_error(request: Request, error: Exception) -> Response:
    """The exception handler for everything that a route raises on purpose."""
    return error_response(error, request.scope)


def log_unexpected(error: BaseException) -> None:
    """Log type and place of a bug: an exception's text may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    log.error("unexpected %s at %s", type(error).__name__, places)


class ErrorBoundary:
    """Middleware: whatever escapes the application becomes a 500, or a closed connection in mid-answer."""

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
        except Exception as error:  # every error of an application is an answer in OpenAI's form
            if scope["type"] != "http":
                raise
            if not isinstance(error, ApiError | TidemillError):
                log_unexpected(error)
            if started:
                raise ConnectionAbortedError("the answer broke off") from None  # the server closes the connection
            await error_response(error, scope)(scope, receive, send)
