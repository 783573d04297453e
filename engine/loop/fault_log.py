"""Log repeated faults: one traceback per cause, then a count at most once a second."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

QUIET_SECONDS = 60.0
MAX_CAUSES = 64


@dataclass(slots=True)
class _Cause:
    last: float
    last_line: float
    untold: int = 0


class FaultLog:
    """A log that groups faults by cause: the type of the exception and the line that raised it.

    A cause that has been quiet for `QUIET_SECONDS` is logged with a traceback again.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._causes: dict[tuple[str, ...], _Cause] = {}

    def report(self, what: str, error: BaseException) -> None:
        """Log the fault `what` with its exception, or count it."""
        now, key = self._clock(), (what, type(error).__qualname__, *_place(error))
        cause = self._causes.get(key)
        if cause is None or now - cause.last > QUIET_SECONDS:
            if len(self._causes) >= MAX_CAUSES:
                del self._causes[min(self._causes, key=lambda each: self._causes[each].last)]
            self._causes[key] = _Cause(now, now)
            self._log.error("%s", what, exc_info=error)
            return
        cause.last = now
        cause.untold += 1
        if now - cause.last_line >= 1.0:
            self._tell(what, type(error).__name__, cause, now)

    def flush(self) -> None:
        """Log the counts that have not been logged yet. Call it when the faults are over."""
        now = self._clock()
        for (what, kind, *_), cause in self._causes.items():
            if cause.untold:
                self._tell(what, kind, cause, now)

    def _tell(self, what: str, kind: str, cause: _Cause, now: float) -> None:
        self._log.error("%s %d times more in %.1f s (%s)", what, cause.untold, now - cause.last_line, kind)
        cause.untold, cause.last_line = 0, now


def _place(error: BaseException) -> tuple[str, str]:
    """Return the file and line that raised an exception."""
    trace = error.__traceback__
    if trace is None:
        return "", ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, str(trace.tb_lineno)
