"""How many connections the server holds at once: descriptors are left for the engine's next process and for files.

A new connection beyond the limit takes the place of the one that has waited longest for a request. If every connection
has a request, the new one may only ask whether the server lives; anything else is 503.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("tidemill.gateway")

RESERVE = 192
"""Descriptors for everything but connections: the socketpair, pipes and recorder of a process, database, journals,
uploads, and connections that are accepted before the limit is applied to them."""
STANDING = 32
"""Connections beyond the limit that may say what they want; further ones are refused at once."""
ALWAYS_SERVED = frozenset({b"/health", b"/ready"})
LOG_SECONDS = 60.0


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit of open files to the hard one; return it, or None where there is none or it is not known."""
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS names a hard limit that it does not grant
        return soft
    return None if hard == resource.RLIM_INFINITY else hard


def connections_within(descriptors: int | None) -> int | None:
    """Return how many connections fit beside the reserve, at least a third of all descriptors; None: any number."""
    return None if descriptors is None else max(descriptors // 3, descriptors - RESERVE - STANDING)


class Holder(Protocol):
    """A connection, as the limit sees it."""

    def give_way(self) -> None:
        """Close: a newer connection takes the place."""


class ConnectionLimit:
    """Counts connections up to `limit` (None: any number), and knows which of them wait for a request."""

    def __init__(self, limit: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._inside: set[Holder] = set()
        self._standing: set[Holder] = set()
        self._waiting: dict[Holder, None] = {}  # the longest first
        self._log_at = -LOG_SECONDS

    def enter(self, holder: Holder) -> bool:
        """Count a new connection, which waits for its first request; return False if there is no place for it."""
        if self._limit is not None and len(self._inside) >= self._limit:
            self._log()
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                self._standing.add(holder)
                return False
            self.leave(oldest)
            oldest.give_way()
        self._inside.add(holder)
        self._waiting[holder] = None
        return True

    @property
    def may_stand(self) -> bool:
        """Whether a connection without a place may still say what it wants."""
        return len(self._standing) <= STANDING

    def begin(self, holder: Holder) -> None:
        """The headers of a request are complete: the connection keeps its place until it is answered."""
        self._waiting.pop(holder, None)

    def end(self, holder: Holder) -> None:
        """All requests are answered: the connection waits for the next one."""
        if holder in self._inside:
            self._waiting.pop(holder, None)
            self._waiting[holder] = None

    def leave(self, holder: Holder) -> None:
        """The connection is closed."""
        self._inside.discard(holder)
        self._standing.discard(holder)
        self._waiting.pop(holder, None)

    def _log(self) -> None:
        now = self._clock()
        if now - self._log_at >= LOG_SECONDS:
            self._log_at = now
            log.warning("all %s connections are taken: raise the limit of open files (ulimit -n)", self._limit)
