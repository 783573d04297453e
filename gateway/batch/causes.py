"""Classification of exceptions raised while a batch line runs, and the answer to each class.

| cause   | exceptions                                                  | answer                                       |
|---------|-------------------------------------------------------------|----------------------------------------------|
| REQUEST | 4xx, invalid requests, steps that the engine has proven     | error row at once                            |
| BUSY    | 408, 429, 503, every `RetryableError` of the engine         | retry after the time that the error names    |
| SYSTEM  | every OSError, memory, threads, storage, unreadable weights | pause all lines with backoff, retry forever  |
| UNKNOWN | everything else: a bug                                      | retry with backoff; error row when proven    |
"""

import io
from enum import StrEnum
from pathlib import Path

from engine.errors import EngineStepError, InvalidRequestError, RetryableError, WeightReadError
from gateway.http.errors import ApiError
from gateway.store.disk import StorageError

BUSY_STATUS = frozenset({408, 429, 503})
BUSY_SECONDS = 1.0
"""Pause in seconds after a busy answer without Retry-After."""


class Cause(StrEnum):
    REQUEST = "request"
    BUSY = "busy"
    SYSTEM = "system"
    UNKNOWN = "unknown"


_FIRST = (Cause.SYSTEM, Cause.BUSY, Cause.UNKNOWN, Cause.REQUEST)
"""Precedence of the causes within an exception group, highest first."""


def cause_of(error: BaseException) -> Cause:
    """Return the cause of an exception. A TimeoutError without errno comes from our own code: UNKNOWN, not SYSTEM."""
    match error:
        case BaseExceptionGroup():
            return min(map(cause_of, error.exceptions), key=_FIRST.index)
        case StorageError() | MemoryError() | WeightReadError():
            return Cause.SYSTEM
        case RetryableError():
            return Cause.BUSY
        case ApiError() if error.status in BUSY_STATUS:
            return Cause.BUSY
        case ApiError() if error.status < 500:
            return Cause.REQUEST
        case InvalidRequestError() | EngineStepError():
            return Cause.REQUEST
        case TimeoutError(errno=None) | io.UnsupportedOperation():
            return Cause.UNKNOWN
        case OSError():
            return Cause.SYSTEM
        case RuntimeError() if "can't start new thread" in str(error):
            return Cause.SYSTEM
        case _:
            return Cause.UNKNOWN


def retry_after(error: BaseException) -> float:
    """Return the pause in seconds before a busy line is retried."""
    if isinstance(error, RetryableError):
        return error.retry_after
    named = error.headers.get("retry-after", "") if isinstance(error, ApiError) else ""
    return float(named) if named.isascii() and named.isdigit() else BUSY_SECONDS


def kind_of(error: BaseException) -> str:
    """Return the type and source line of an exception, without its message, which may contain a prompt."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    name = type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        name += f" {error.errno}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return name if trace is None else f"{name} at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
