"""The time of files and batches, and which of it may delete and expire.

Servers that share a database use its clock. A server alone uses the system's, which may jump: an hour of grace precedes
every deletion by a clock that differs by more than a day from the newest time in the database, or from the time that
has passed since.
"""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

log = logging.getLogger("tidemill.gateway")

JUMP_SECONDS = 86_400
"""Smaller differences are followed at once."""
GRACE_SECONDS = 3600


class StoreClock:
    """Args:

    wall: the system's clock in Unix seconds.
    elapsed: a clock in seconds that no one sets.
    """

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._database: float | None = None  # its time at `elapsed` 0
        self._trusted: float | None = None  # a time that was right at `elapsed` 0
        self._doubted_since: float | None = None

    def now(self) -> int:
        """Return the time for new objects and records."""
        return int(self._wall() if self._database is None else self._database + self._elapsed())

    def follow(self, database_now: float) -> None:
        """Use the clock of the database, which shows `database_now`, from now on."""
        self._database = database_now - self._elapsed()

    def begin(self, newest: int | None) -> None:
        """Compare the clock with the newest time in the database; None: it is empty."""
        self._trusted = (self.now() if newest is None else newest) - self._elapsed()
        self.expiry_now()

    def expiry_now(self) -> int:
        """Return the time that decides which files and batches have expired; 0, at which none has, before `begin`."""
        if self._trusted is None:
            return 0
        now, elapsed = self.now(), self._elapsed()
        expected = self._trusted + elapsed
        if abs(now - expected) > JUMP_SECONDS:
            if self._doubted_since is None:
                self._doubted_since = elapsed
                text = "the clock shows %s, not about %s: nothing expires by it for an hour; correct it if it is wrong"
                log.error(text, _text(now), _text(expected))
            if elapsed - self._doubted_since < GRACE_SECONDS:
                return int(min(now, expected))
            log.warning("the clock has shown the time around %s for an hour and is used from now on", _text(now))
        self._trusted, self._doubted_since = now - elapsed, None
        return now


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
