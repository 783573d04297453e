"""Whether the state folder takes data: one log line per cause of a fault, and the cause that /ready shows."""

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable

log = logging.getLogger("tidemill.gateway")

QUIET_SECONDS = 600.0
"""A cause that comes and goes is logged again after this time."""


def cause_of(error: BaseException) -> str:
    """Describe the fault of the system behind an error, e.g. `ENOSPC: No space left on device`; never a path."""
    cause = error.__cause__ or error
    if isinstance(cause, OSError) and cause.errno is not None:
        return f"{errno.errorcode.get(cause.errno, cause.errno)}: {cause.strerror or os.strerror(cause.errno)}"
    if isinstance(cause, sqlite3.Error) and (name := getattr(cause, "sqlite_errorname", None)):
        return f"{name}: {cause}"
    return type(cause).__name__


class StorageHealth:
    """The last fault of each part of the folder (`files`, `database`) that no success has followed. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults: dict[str, str] = {}
        self._logged: dict[str, float] = {}
        self._told = False

    @property
    def fault(self) -> str | None:
        """The cause of a fault that lasts; None: the last write of each part succeeded."""
        return next(iter(tuple(self._faults.values())), None)

    def failed(self, part: str, error: BaseException) -> None:
        """Note a fault; log it unless the same cause was logged a short time ago."""
        cause, now = cause_of(error), self._clock()
        self._faults[part] = cause
        if now - self._logged.get(cause, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._logged[cause] = now
            self._told = True
            log.error("the state folder cannot be used (%s): uploads get a 507 and batches pause until it can", cause)

    def worked(self, part: str) -> None:
        """Note that the part took data."""
        if self._faults.pop(part, None) is not None and not self._faults and self._told:
            self._told = False
            log.info("the state folder takes data again")
