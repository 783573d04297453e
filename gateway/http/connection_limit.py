"""Limit on concurrent connections, which keeps file descriptors free for engine processes and files.

A new connection beyond the limit closes the connection that has been idle for longest. If all connections have a
request in progress, the new one is only served health checks; other requests get a 503. A refused connection lingers
until the client has read that, or until another one needs its place.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("tidemill.gateway")

RESERVE = 192
"""Descriptors reserved for other uses: sockets and pipes of the engine process, database, journals, uploads, and
connections that have been accepted but not counted yet."""
STANDING = 32
"""Connections beyond the limit whose request is read; further ones are refused at once."""
ALWAYS_SERVED = frozenset({b"/health", b"/ready"})
LOG_SECONDS = 60.0


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit of open files to the hard limit and return it; None if unlimited or unknown."""
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS reports a hard limit that it does not grant
        return soft
    return None if hard == resource.RLIM_INFINITY else hard


def connections_within(descriptors: int | None) -> int | None:
    """Return the connection limit for a number of descriptors: all but the reserve, at least a third."""
    return None if descriptors is None else max(descriptors // 3, descriptors - RESERVE - STANDING)


class Holder(Protocol):
    """A connection that is counted by `ConnectionLimit`."""

    def give_way(self) -> None:
        """Close this idle or refused connection in favour of a new one."""


class ConnectionLimit:
    """Count connections up to `limit` (None: unlimited), and track the idle ones."""

    def __init__(self, limit: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._inside: set[Holder] = set()
        self._standing: set[Holder] = set()
        self._refused: dict[Holder, None] = {}  # part of `_standing`, in the order of refusal
        self._waiting: dict[Holder, None] = {}  # ordered by idle time, longest first
        self._log_at = -LOG_SECONDS

    def enter(self, holder: Holder) -> bool:
        """Count a new, idle connection; return False if it exceeds the limit and no idle connection can be closed."""
        if self._limit is not None and len(self._inside) >= self._limit:
            self._log()
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                if len(self._standing) >= STANDING:
                    self._close(next(iter(self._refused), None))
                self._standing.add(holder)
                return False
            self._close(oldest)
        self._inside.add(holder)
        self._waiting[holder] = None
        return True

    @property
    def may_stand(self) -> bool:
        """Whether a connection beyond the limit may send its request."""
        return len(self._standing) <= STANDING

    def begin(self, holder: Holder) -> None:
        """Mark a connection as busy: the headers of a request are complete."""
        self._waiting.pop(holder, None)

    def end(self, holder: Holder) -> None:
        """Mark a connection as idle: all its requests are answered."""
        if holder in self._inside:
            self._waiting.pop(holder, None)
            self._waiting[holder] = None

    def refuse(self, holder: Holder) -> None:
        """Mark a connection beyond the limit as refused: its response was sent."""
        if holder in self._standing:
            self._refused[holder] = None

    def _close(self, holder: Holder | None) -> None:
        if holder is not None:
            self.leave(holder)
            holder.give_way()

    def leave(self, holder: Holder) -> None:
        """Forget a closed connection."""
        self._refused.pop(holder, None)
        self._inside.discard(holder)
        self._standing.discard(holder)
        self._waiting.pop(holder, None)

    def _log(self) -> None:
        now = self._clock()
        if now - self._log_at >= LOG_SECONDS:
            self._log_at = now
            log.warning("all %s connections are in use; raise the limit of open files (ulimit -n)", self._limit)
