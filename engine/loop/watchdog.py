"""Sees an engine that stands still: work is there, no step runs, and none has completed for some seconds.

The scheduler promises that this cannot happen (`Driver.launch` asserts it in every test), so whatever it sees is a
defect; but a server must not stand still in silence. It says so once, critically, with the state of queues and pool,
and asks for a recovery; while nothing moves it asks again, more and more seldom. A step that hangs is not its business.
Sleeps without work, and otherwise until the earliest time at which it could have something to say.
"""

import asyncio
import logging
from collections.abc import Callable

from engine.api import EngineStats, RequestClass
from engine.core import EngineCore

log = logging.getLogger("tidemill.engine")

STALL_SECONDS = 5.0
MAX_PATIENCE = 12
"""The longest time between two attempts to recover, in stall times."""


class ProgressWatchdog:
    """`recover(attempt)`, from 1 on, is called when the engine has stood still for `seconds`, and later again."""

    def __init__(
        self,
        core: EngineCore,
        clock: Callable[[], float],
        recover: Callable[[int], None],
        seconds: float = STALL_SECONDS,
    ) -> None:
        self._core = core
        self._clock = clock
        self._recover = recover
        self._seconds = seconds
        self._patience = seconds
        self._since = clock()
        self._attempts = 0
        self._suspended = False
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str | None:
        """Why the engine is not ready, from the moment it was seen to stand still until a step completes."""
        if not self._attempts:
            return None
        return f"requests wait and no step has been completed for {self._clock() - self._since:.0f} s"

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-watchdog")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def on_work(self) -> None:
        """A request is about to be queued."""
        if not self._core.has_requests:
            self._reset()
        self._work.set()

    def on_step(self) -> None:
        """A step completed."""
        if self._attempts:
            log.warning("the engine moves again after %d attempts to recover", self._attempts)
        self._reset()

    def suspend(self, suspended: bool) -> None:
        """While it is, the engine stands still since it is told to."""
        self._suspended = suspended
        self._reset()

    def _reset(self) -> None:
        self._since, self._attempts, self._patience = self._clock(), 0, self._seconds

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._core.has_requests:
                await asyncio.sleep(self._time_left())
                if self._time_left() <= 0.0:
                    self._on_stall()
            self._reset()

    def _time_left(self) -> float:
        """Seconds until the engine has stood still for too long if nothing completes; all of them while a step runs, or
        while the core rests: what waits after failed steps is tried again at a time of its own."""
        if self._suspended or self._core.num_in_flight or not self._core.has_requests:
            return self._seconds
        since = self._since if self._core.retry_at is None else max(self._since, self._core.retry_at)
        return since + self._patience - self._clock()

    def _on_stall(self) -> None:
        self._attempts += 1
        level = logging.CRITICAL if self._attempts == 1 else logging.ERROR
        log.log(level, "the engine stands still: %s; %s", self.trouble, describe(self._core.stats()))
        self._patience += self._seconds * min(2**self._attempts, MAX_PATIENCE)
        try:
            self._recover(self._attempts)
        except Exception:  # a recovery that fails must not end the watchdog: it says so, and tries again later
            log.exception("the recovery failed")


def describe(stats: EngineStats) -> str:
    """Queues and pool in one line."""
    classes = ", ".join(f"{c.value} {stats.running[c]} running and {stats.waiting[c]} waiting" for c in RequestClass)
    return (
        f"{classes}; of {stats.units_total} units {stats.units_owned} are owned, {stats.units_cached} cached, "
        f"{stats.units_free} free; {stats.steps} steps, {stats.failed_steps} failed, preemptions {stats.preemptions}"
    )
