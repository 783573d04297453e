"""When a process that died is started again, and when it is not any more. Pure; times are seconds on any clock."""

import sys
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

MAX_DEATHS = 6
WINDOW = 600.0
HEALTHY = 60.0
MAX_DELAY = 30.0


@dataclass(slots=True)
class RestartPolicy:
    """At once, then after 1, 2, 4 ... 30 s, and again at once after a process that worked until somebody killed it;
    given up at the `max_deaths`-th death within `window`. A process that was ready for `healthy` seconds makes up for
    all deaths before it."""

    max_deaths: int = MAX_DEATHS
    window: float = WINDOW
    healthy: float = HEALTHY
    max_delay: float = MAX_DELAY
    _deaths: deque[float] = field(default_factory=deque)
    _in_a_row: int = 0
    _ready_since: float | None = None

    @classmethod
    def without_end(cls) -> "RestartPolicy":
        """Return a policy that starts a process again at once and never gives up: for faults that are injected."""
        return cls(max_deaths=sys.maxsize, max_delay=0.0)

    def ready(self, now: float) -> None:
        """The process takes requests."""
        self._ready_since = now

    def forgive(self, times: Collection[float]) -> None:
        """Count the deaths at these times no longer: a request was their cause, or is about to be tried for it."""
        self._deaths = deque(at for at in self._deaths if at not in times)

    def died(self, now: float, *, worked: bool = False, counts: bool = True) -> float | None:
        """Return the seconds until the next start; None: never. `worked`: the process gave tokens, and was killed from
        outside for all that is known: nothing is gained by a pause. `counts`: towards `max_deaths`."""
        if self._ready_since is not None and now - self._ready_since >= self.healthy:
            self._deaths.clear()
            self._in_a_row = 0
        self._ready_since = None
        if counts:
            self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > self.window:
            self._deaths.popleft()
        self._in_a_row = 0 if worked else min(self._in_a_row + 1, len(self._deaths))
        if len(self._deaths) >= self.max_deaths:
            return None
        return 0.0 if self._in_a_row <= 1 else min(self.max_delay, 2.0 ** min(self._in_a_row - 2, 30))
