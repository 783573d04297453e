"""When a process that died is started again, and when it is not any more. Pure; times are seconds on any clock."""

from collections import deque
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

    def ready(self, now: float) -> None:
        """The process takes requests."""
        self._ready_since = now

    def forgive(self, deaths: int) -> None:
        """The last deaths were due to one request, which has ended."""
        for _ in range(min(deaths, len(self._deaths))):
            self._deaths.pop()

    def died(self, now: float, *, worked: bool = False) -> float | None:
        """Seconds until it is to be started again; None: never. `worked`: it gave tokens, and was killed from outside
        for all that is known: nothing is gained by a pause. It counts towards `max_deaths` like any."""
        if self._ready_since is not None and now - self._ready_since >= self.healthy:
            self._deaths.clear()
            self._in_a_row = 0
        self._ready_since = None
        self._deaths.append(now)
        while now - self._deaths[0] > self.window:
            self._deaths.popleft()
        self._in_a_row = 0 if worked else min(self._in_a_row + 1, len(self._deaths))
        if len(self._deaths) >= self.max_deaths:
            return None
        return 0.0 if self._in_a_row <= 1 else min(self.max_delay, 2.0 ** min(self._in_a_row - 2, 30))
