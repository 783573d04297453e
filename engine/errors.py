"""The one error tree. What a user can cause is typed; `assert` is for invariants only.

TidemillError
├── ConfigError                 start-up: a flag, file or folder is wrong; one clear line, exit code 2
│   └── ModelLoadError          the checkpoint cannot be served (architecture, missing tensor, .bin only, ...)
├── InvalidRequestError         400: the request can never run; carries OpenAI's `param` and `code`
│   └── ContextLengthError      400 `context_length_exceeded`
├── QueueFullError              429 + Retry-After: bounded queue, or the TTFT objective is out of reach
├── EngineUnavailableError      503 + Retry-After: starting, draining or down
├── EngineStepError             500: a step failed under this request
└── WeightReadError             a step failed since weights that stream could not be read

`ErrorInfo` is one of them as a value, for what is kept or sent elsewhere.
"""

from dataclasses import dataclass


class TidemillError(Exception):
    """Base of everything that tidemill raises on purpose. `message` is safe to show to a client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(TidemillError):
    """The configuration cannot be served; shown as one line at start."""


class ModelLoadError(ConfigError):
    """A checkpoint that cannot be loaded, and why."""


class InvalidRequestError(TidemillError):
    """A request that can never run. `param` names the offending field, `code` is OpenAI's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output exceed the context; prompts are never truncated."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class RetryableError(TidemillError):
    """The same request may succeed after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(RetryableError):
    """No room in the queue; nothing was queued."""


class EngineUnavailableError(RetryableError):
    """The engine is starting, draining or down; nothing was queued."""


class EngineStepError(TidemillError):
    """A model step failed (or gave NaN logits) under this request."""


class WeightReadError(TidemillError):
    """Weights that stream could not be read, or not as many as there are."""


_KINDS = {kind.__name__: kind for kind in (ConfigError, ModelLoadError, EngineStepError)}
_RETRYABLE_KINDS = {kind.__name__: kind for kind in (QueueFullError, EngineUnavailableError)}


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error of the tree as a value; `kind` is the name of its class."""

    kind: str
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
        """The error, to be raised."""
        if self.kind == ContextLengthError.__name__:
            return ContextLengthError(self.message, param=self.param or "messages")
        if self.kind == InvalidRequestError.__name__:
            return InvalidRequestError(self.message, param=self.param, code=self.code)
        if self.kind in _RETRYABLE_KINDS:
            return _RETRYABLE_KINDS[self.kind](self.message, retry_after=self.retry_after or 1.0)
        return _KINDS.get(self.kind, TidemillError)(self.message)
