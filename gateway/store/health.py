"""Health of the state folder: the error that /ready shows, and one log line per cause."""

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable

log = logging.getLogger("tidemill.gateway")

QUIET_SECONDS = 600.0
"""Minimum seconds between two log lines with the same cause."""


def cause_of(error: BaseException) -> str:
    """Describe the system error behind an exception, without paths, e.g. `ENOSPC: No space left on device`."""
    cause = error.__cause__ or error
    if isinstance(cause, OSError) and cause.errno is not None:
        return f"{errno.errorcode.get(cause.errno, cause.errno)}: {cause.strerror or os.strerror(cause.errno)}"
    if isinstance(cause, sqlite3.Error) and (name := getattr(cause, "sqlite_errorname", None)):
        return f"{name}: {cause}"
    return type(cause).__name__


class StorageHealth:
    """The current error of each part of the folder (e.g. `files`, `database`). Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults: dict[str, str] = {}
        self._logged: dict[str, float] = {}
        self._told = False

    @property
    def fault(self) -> str | None:
        """Cause of a current error; None if the last write of each part succeeded."""
        return next(iter(tuple(self._faults.values())), None)

    def failed(self, part: str, error: BaseException) -> None:
        """Record an error; log it unless its cause was logged within QUIET_SECONDS."""
        cause, now = cause_of(error), self._clock()
        self._faults[part] = cause
        if now - self._logged.get(cause, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._logged[cause] = now
            self._told = True
            log.error("the state folder cannot be used (%s); uploads get a 507 and batches pause until then", cause)

    def worked(self, part: str) -> None:
        """Record a successful write of the part."""
        if self._faults.pop(part, None) is not None and not self._faults and self._told:
            self._told = False
            log.info("the state folder can be used again")
