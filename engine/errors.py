"""The one error tree. What a user can cause is typed; `assert` is for invariants only.

TidemillError
├── ConfigError                 start-up: a flag, file or folder is wrong; one clear line, exit code 2
│   └── ModelLoadError          the checkpoint cannot be served (architecture, missing tensor, .bin only, ...)
├── InvalidRequestError         400: the request can never run; carries OpenAI's `param` and `code`
│   └── ContextLengthError      400 `context_length_exceeded`
├── QueueFullError              429 + Retry-After: bounded queue, or the TTFT objective is out of reach
├── EngineUnavailableError      503 + Retry-After: starting, draining or down
└── EngineStepError             500: a step failed under this request
"""


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
