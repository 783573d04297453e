"""The causes for which an engine process ends or fails to start, and the reaction to each.

| origin  | example                               | restart                     | server gives up | suspects requests |
|---------|---------------------------------------|-----------------------------|-----------------|-------------------|
| SYSTEM  | no descriptor, thread, disk or memory | retries at least every 30 s | never           | no                |
| OUTSIDE | SIGKILL by a step, kernel or operator | `RestartPolicy`             | six deaths      | by statistics     |
| REQUEST | a step hung or crashed the process    | `RestartPolicy`             | six deaths      | yes               |
| ENGINE  | failed start, every step fails        | `RestartPolicy`             | six deaths      | no                |
| ASKED   | SIGHUP found other weights            | at once                     | never           | no                |

A death of origin REQUEST or OUTSIDE no longer counts once a request is proven to be its cause (`Suspects`).
"""

import enum
import errno
import logging

from engine.errors import EngineUnavailableError, TidemillError

log = logging.getLogger("tidemill.engine")


class Origin(enum.Enum):
    """The origin of a cause; see the table in the module docstring."""

    SYSTEM = enum.auto()
    OUTSIDE = enum.auto()
    REQUEST = enum.auto()
    ENGINE = enum.auto()
    ASKED = enum.auto()


SYSTEM, START, RENEWED = "system", "start", "renewed"

CAUSES = {
    SYSTEM: Origin.SYSTEM,
    "killed": Origin.OUTSIDE,
    "crash": Origin.REQUEST,
    "device": Origin.REQUEST,
    "hung": Origin.REQUEST,
    "loop": Origin.REQUEST,
    "protocol": Origin.REQUEST,
    "silent": Origin.REQUEST,
    "sick": Origin.ENGINE,
    START: Origin.ENGINE,
    RENEWED: Origin.ASKED,
}

_PEER_IS_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESRCH, errno.ECHILD})
"""The errno values with which calls on the socket or the process id report that the process has ended."""
_SYSTEM_MESSAGES = ("can't start new thread", "Cannot allocate memory", "Resource temporarily unavailable")
"""Messages with which Python and torch report ENOMEM or EAGAIN as a RuntimeError."""


LEAST_DELAY = 0.02
"""Minimum pause in seconds between two attempts."""


def origin_of(cause: str) -> Origin:
    """Return the origin of a named cause; REQUEST for an unknown name."""
    return CAUSES.get(cause, Origin.REQUEST)


def is_of_system(error: BaseException | None) -> bool:
    """Return whether the operating system refused a resource, so that the process is not at fault.

    Every errno counts except those that report the end of the peer. A TidemillError counts if its cause or context
    counts.
    """
    match error:
        case None:
            return False
        case OSError():
            return error.errno is not None and error.errno not in _PEER_IS_GONE
        case MemoryError():
            return True
        case RuntimeError() if any(said in str(error) for said in _SYSTEM_MESSAGES):
            return True
        case TidemillError():
            return is_of_system(error.__cause__ or error.__context__)
        case _:
            return False


def start_error(error: BaseException) -> TidemillError:
    """Convert the error of a failed start to a TidemillError with a message for the user."""
    if isinstance(error, TidemillError):
        return error
    return EngineUnavailableError(f"the engine process: {str(error) or type(error).__name__}")


class Outage:
    """A period in which the operating system refuses to start a process. `why`: the last reason; None: no outage.

    One line is logged for each new reason, not for each attempt.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self._attempts = 0

    def refused(self, why: str, max_delay: float) -> float:
        """Record a refused start. Return the seconds until the next attempt: 1, 2, 4 ... `max_delay`."""
        delay = max(LEAST_DELAY, min(max_delay, 2.0 ** min(self._attempts, 30)))
        self._attempts += 1
        if why != self.why:
            log.error("the system does not let an engine process start: %s; retrying every %g s", why, max_delay)
        self.why = why
        return delay

    def end(self) -> None:
        """End the outage: a process has started."""
        if self.why is not None:
            log.warning("an engine process has started after %d refused attempts (%s)", self._attempts, self.why)
        self.why, self._attempts = None, 0
