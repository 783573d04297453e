"""The table of causes: why an engine process ended or did not start, which side is at fault, and what follows.

| origin  | example                              | restart                   | gives the server up | suspects requests |
|---------|--------------------------------------|---------------------------|---------------------|-------------------|
| SYSTEM  | no descriptor, thread, disk or memory| for ever, at most 30 s apart | never            | no                |
| OUTSIDE | SIGKILL: a step, the kernel, a person| `RestartPolicy`           | six deaths          | by comparison     |
| REQUEST | a step hung or crashed the process   | `RestartPolicy`           | six deaths          | proof             |
| ENGINE  | no start, every step fails           | `RestartPolicy`           | six deaths          | no                |
| ASKED   | SIGHUP found other weights           | at once                   | never               | no                |

A death whose origin is REQUEST or OUTSIDE counts no longer once a request is proven to be its cause (`Suspects`).
"""

import enum
import errno
import logging

from engine.errors import EngineUnavailableError, TidemillError

log = logging.getLogger("tidemill.engine")


class Origin(enum.Enum):
    """See the table of the module."""

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
    "canary": Origin.ENGINE,
    "sick": Origin.ENGINE,
    START: Origin.ENGINE,
    RENEWED: Origin.ASKED,
}

_PEER_IS_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESRCH, errno.ECHILD})
"""What a call on the socket or the number of a process says once that process has ended."""
_SYSTEM_MESSAGES = ("can't start new thread", "Cannot allocate memory", "Resource temporarily unavailable")
"""What a RuntimeError of Python or of torch says where an OSError would have ENOMEM or EAGAIN."""


LEAST_DELAY = 0.02
"""Shortest pause in seconds between two attempts."""


def origin_of(cause: str) -> Origin:
    """Return the origin of a named cause; an unknown name counts as a fault of the process."""
    return CAUSES.get(cause, Origin.REQUEST)


def is_of_system(error: BaseException | None) -> bool:
    """Return whether the machine refused something, rather than that the process is at fault.

    Every errno counts except those that only tell of the end of the peer. An error of tidemill's own counts if such a
    refusal led to it.
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
    """Return what kept a process from starting as an error that may be shown."""
    if isinstance(error, TidemillError):
        return error
    return EngineUnavailableError(f"the engine process: {str(error) or type(error).__name__}")


class Outage:
    """The time in which the system refuses a start. `why`: its last refusal, None if starts succeed.

    Logs one line for each new reason, not for each attempt.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self._attempts = 0

    def refused(self, why: str, max_delay: float) -> float:
        """Note a refused start; return the seconds until the next attempt: 1, 2, 4 ... `max_delay`."""
        delay = max(LEAST_DELAY, min(max_delay, 2.0 ** min(self._attempts, 30)))
        self._attempts += 1
        if why != self.why:
            log.error("the system does not let an engine process start: %s; retrying every %g s", why, max_delay)
        self.why = why
        return delay

    def end(self) -> None:
        """A process has started."""
        if self.why is not None:
            log.warning("an engine process has started after %d refused attempts (%s)", self._attempts, self.why)
        self.why, self._attempts = None, 0
