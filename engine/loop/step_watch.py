"""Detect a hung step, or a hung process by its pulse: it takes far longer than its limit.

A slow step is not hung. Time counts in full only while the threads of the step sleep. Time on a core or waiting for a
disk counts less, and time waiting for a core least. So a step on a busy machine may take long, and a step that never
ends is found on any machine. Time in which the watching event loop did not run (a stopped process, a suspended machine)
does not count.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from engine.machine.activity import Activity, ThreadActivity

LOOKS = 4
"""Number of checks of a step within its limit."""
ON_A_CORE = 0.25
"""Weight of a second in which a thread computes or waits for a disk (state D)."""
WAITING = 0.05
"""Weight of a second in which a runnable thread waits for a core."""
_NEW = ThreadActivity(0.0, 0.0, "")


class StepLimits(NamedTuple):
    """Seconds after which a step is hung: `factor` x its predicted time, at least `floor`; else `unknown`."""

    floor: float = 2.0
    factor: float = 20.0
    unknown: float = 60.0

    def limit(self, predicted: float | None) -> float:
        return self.unknown if predicted is None else max(self.floor, self.factor * predicted)


def charged(before: Activity, after: Activity, interval: float) -> float:
    """Return the weighted seconds between two samples, which are taken every `interval` seconds.

    Threads of a step wait for each other, so the longest computing time and the longest waiting time of any thread
    count. The kernel adds a wait when it ends, so the remaining time of a runnable thread (state R) counts as a wait.
    """
    passed = after.at - before.at
    wall = min(passed, 2.0 * interval)
    if wall <= 0.0:
        return 0.0
    on_core = waiting = 0.0
    in_line = on_disk = False
    for number, now in after.threads.items():
        was = before.threads.get(number, _NEW)
        on_core = max(on_core, now.cpu - was.cpu)
        waiting = max(waiting, (now.waited or 0.0) - (was.waited or 0.0))
        in_line = in_line or now.state == "R"
        on_disk = on_disk or now.state == "D"
    share = wall / passed
    waiting = min(waiting * share, wall)
    on_core = min(on_core * share, wall - waiting)
    asleep = wall - waiting - on_core
    rate = WAITING if in_line else ON_A_CORE if on_disk else 1.0
    return asleep * rate + on_core * ON_A_CORE + waiting * WAITING


class StepWatch:
    """The hang timer of a step.

    Args:
        on_hung: Called once, with the limit in seconds, if the step has not ended in time.
        read: Samples the processes that compute the step; if it returns None, all time counts in full.
    """

    def __init__(
        self,
        limits: StepLimits,
        on_hung: Callable[[float], None],
        read: Callable[[], Activity | None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._on_hung = on_hung
        self._read = read
        self._timer: asyncio.TimerHandle | None = None
        self._last: Activity | None = None
        self._charged = 0.0

    def begin(self, predicted: float | None) -> None:
        """Start the timer of a step. `predicted`: its predicted seconds; None if unknown."""
        self.end()
        self._look_after(self._limits.limit(predicted))

    def end(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._last, self._charged = None, 0.0

    def _look_after(self, limit: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(limit / LOOKS, self._look, limit)

    def _look(self, limit: float) -> None:
        before, self._last = self._last, self._read()
        interval = limit / LOOKS
        if before is None or self._last is None:
            self._charged += interval
        else:
            self._charged += charged(before, self._last, interval)
        if self._charged < 0.999 * limit:
            self._look_after(limit)
            return
        self._timer = None
        self._on_hung(limit)
