"""The exception hierarchy. Errors that a user can cause have their own class; `assert` only checks invariants.

TidemillError
├── ConfigError                 start-up: a flag, file or folder is invalid; one line, exit code 2
│   └── ModelLoadError          the checkpoint cannot be served (architecture, missing tensor, .bin only, ...)
├── InvalidRequestError         400: the request can never run; carries OpenAI's `param` and `code`
│   └── ContextLengthError      400 `context_length_exceeded`
├── RetryableError              the same request may succeed later
│   ├── QueueFullError          429 + Retry-After: the queue is full, or the TTFT objective is out of reach
│   └── EngineUnavailableError  503 + Retry-After: the engine is starting, draining or down
├── EngineStepError             500: a step with this request failed
└── StreamingError              streamed weights, or a streamed cache, could not be read or written

`ErrorInfo` holds an error as data that can be stored or sent to another process.
"""

from dataclasses import dataclass


class TidemillError(Exception):
    """Base class of all errors of tidemill. `message` is safe to show to a client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(TidemillError):
    """The configuration is invalid; the server prints the message as one line and exits."""


class ModelLoadError(ConfigError):
    """A checkpoint cannot be loaded; the message states the reason."""


class InvalidRequestError(TidemillError):
    """The request can never run. `param` is the invalid field, `code` OpenAI's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """The prompt plus the requested output exceed the context length. Prompts are never truncated."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class RetryableError(TidemillError):
    """The same request may succeed after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(RetryableError):
    """The queue is full; the request was not queued."""


class EngineUnavailableError(RetryableError):
    """The engine is starting, draining or down; the request was not queued."""


class EngineStepError(TidemillError):
    """A model step that contained this request failed or returned NaN logits."""


class StreamingError(TidemillError):
    """Streamed weights, or a streamed cache, could not be read or written."""


_KINDS = {kind.__name__: kind for kind in (ConfigError, ModelLoadError, EngineStepError)}
_RETRYABLE_KINDS = {kind.__name__: kind for kind in (QueueFullError, EngineUnavailableError)}


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as plain data."""

    kind: str  # class name
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, error: TidemillError) -> "ErrorInfo":
        kind = type(error).__name__
        match error:
            case InvalidRequestError():
                return cls(kind, error.message, error.param, error.code)
            case RetryableError():
                return cls(kind, error.message, retry_after=error.retry_after)
            case _:
                return cls(kind, error.message)

    def to_error(self) -> TidemillError:
        """Return the error as an exception."""
        if self.kind == ContextLengthError.__name__:
            return ContextLengthError(self.message, param=self.param or "messages")
        if self.kind == InvalidRequestError.__name__:
            return InvalidRequestError(self.message, param=self.param, code=self.code or "invalid_value")
        if self.kind in _RETRYABLE_KINDS:
            return _RETRYABLE_KINDS[self.kind](self.message, retry_after=self.retry_after or 1.0)
        return _KINDS.get(self.kind, TidemillError)(self.message)


def first_line(error: BaseException) -> str:
    """Return the first line of an error of a library, or its type."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
