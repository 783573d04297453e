"""Failures of batch lines: their causes, the answer to each, and the line, batch or server to blame.

| cause   | exceptions                                                  | answer                                       |
|---------|-------------------------------------------------------------|----------------------------------------------|
| REQUEST | 4xx, invalid requests, steps that the engine has proven     | error row at once                            |
| BUSY    | 408, 429, 503, every `RetryableError` of the engine         | retry after the time that the error names    |
| SYSTEM  | every OSError, memory, threads, storage, unreadable weights | pause all lines with backoff, retry forever  |
| UNKNOWN | everything else: a bug                                      | retry with backoff; error row when proven    |

A failure counts against its line unless `COMMON` lines fail with the same error and no line succeeds in between: such
lines share a cause, and none uses up an attempt. The counts are in memory only: after a restart every line has all of
its attempts again.
"""

import io
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from engine.errors import EngineStepError, InvalidRequestError, RetryableError, StreamingError
from gateway.http.errors import ApiError
from gateway.store.disk import StorageError
from gateway.store.objects import LineRef

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
        case StorageError() | MemoryError() | StreamingError():
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


COMMON = 3
"""Number of lines failing with the same error, without a success in between, from which a common cause is assumed."""


@dataclass(slots=True)
class Scope:
    """Failing lines and successes of one batch, or of all batches."""

    successes: int = 0
    lines: defaultdict[str, set[tuple[str, int]]] = field(default_factory=lambda: defaultdict(set))
    """Failing lines (batch id, rank) by the kind of their last error."""

    def discard(self, kind: str, line: tuple[str, int]) -> None:
        self.lines[kind].discard(line)
        if not self.lines[kind]:
            del self.lines[kind]

    def is_common(self, kind: str, since: int) -> bool:
        """Return whether `COMMON` lines fail with this error and no line succeeded since the count was `since`."""
        return self.successes == since and len(self.lines.get(kind, ())) >= COMMON


@dataclass(slots=True)
class FailingLine:
    """Failure counts of one line."""

    faults: int = 0
    """LineFailures of the system."""
    own: int = 0
    """Unexpected failures without a common cause; they count as attempts of the line."""
    kind: str | None = None
    """Kind of the last unexpected failure, if any."""
    batch_successes: int = 0
    """Successes in the batch at the last unexpected failure."""
    successes: int = 0
    """Successes in all batches at the last unexpected failure."""


@dataclass(slots=True)
class Trials:
    """LineFailures of the lines of one batch."""

    scope: Scope = field(default_factory=Scope)
    lines: dict[int, FailingLine] = field(default_factory=dict)
    """Failing lines by rank."""
    pauses: int = 0
    """Consecutive pauses of the batch for a common cause."""
    turn_faults: int = 0
    """Consecutive turns in which no line could be fed."""
    control: LineRef | None = None
    """A line that succeeded; it runs again beside failing lines when no new line is left that could succeed."""


class LineFailures:
    """Failure counts over all batches."""

    def __init__(self) -> None:
        self._all = Scope()

    def system_fault(self, trials: Trials, rank: int) -> int:
        """Count a system failure of a line; return how many the line has had."""
        line = trials.lines.setdefault(rank, FailingLine())
        line.faults += 1
        return line.faults

    def unknown(self, batch_id: str, trials: Trials, rank: int, kind: str) -> tuple[FailingLine, bool]:
        """Count an unexpected failure; return the line's counts and whether several lines share the cause."""
        line, key = trials.lines.setdefault(rank, FailingLine()), (batch_id, rank)
        if line.kind is None:
            line.batch_successes, line.successes = trials.scope.successes, self._all.successes
        self._drop(trials, key, line)
        line.kind = kind
        trials.scope.lines[kind].add(key)
        self._all.lines[kind].add(key)
        batch, server = trials.scope, self._all
        is_common = batch.is_common(kind, line.batch_successes) or server.is_common(kind, line.successes)
        line.own += not is_common
        line.batch_successes, line.successes = batch.successes, server.successes
        return line, is_common

    def is_new(self, kind: str) -> bool:
        """Return whether no line currently fails with this error."""
        return kind not in self._all.lines

    def ended(self, batch_id: str, trials: Trials, rank: int, succeeded: bool) -> None:
        """Forget a line that has its result row, and count it if it succeeded."""
        if (line := trials.lines.pop(rank, None)) is not None:
            self._drop(trials, (batch_id, rank), line)
        trials.scope.successes += succeeded
        self._all.successes += succeeded

    def forget(self, batch_id: str, trials: Trials) -> None:
        """Forget the failing lines of a batch that is no longer in progress."""
        for rank, line in trials.lines.items():
            self._drop(trials, (batch_id, rank), line)
        trials.lines.clear()

    def _drop(self, trials: Trials, key: tuple[str, int], line: FailingLine) -> None:
        if line.kind is not None:
            trials.scope.discard(line.kind, key)
            self._all.discard(line.kind, key)
