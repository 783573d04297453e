"""Detect a stalled engine: requests exist, no step runs, and no step has completed for some seconds.

A stall is always a defect of the scheduler (`Driver.launch` asserts in every test that none occurs). The watchdog logs
it once as critical, with the state of the queues and the pool, and starts a recovery. It repeats the recovery at
growing intervals while the engine stays stalled. `step_watch` handles hung steps. Without requests the watchdog sleeps.
"""

import asyncio
import logging
from collections.abc import Callable

from engine.api import EngineStats, RequestClass
from engine.core import EngineCore
from engine.scheduling.report import report_stats

log = logging.getLogger("tidemill.engine")

STALL_SECONDS = 5.0
MAX_PATIENCE = 12
"""Maximum increase of the interval between two recoveries, in stall times."""


class ProgressWatchdog:
    """Calls `recover(attempt)`, from 1 on, when the engine has been stalled for `seconds`, and later again."""

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
        """Why the engine is not ready; None unless it is stalled."""
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
        """Record that a request is about to be queued."""
        if not self._core.has_requests:
            self._reset()
        self._work.set()

    def on_step(self) -> None:
        """Record that a step has completed."""
        if self._attempts:
            log.warning("the engine moves again after %d attempts to recover", self._attempts)
        self._reset()

    def suspend(self, suspended: bool) -> None:
        """Suspend or resume the watchdog, for an engine that is held on purpose."""
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
        """Return the seconds until the next recovery is due if no step completes.

        The time does not run while a step runs, while the watchdog is suspended, or before the core's retry time.
        """
        if self._suspended or self._core.state.in_flight or not self._core.has_requests:
            return self._seconds
        since = self._since if self._core.retry_at is None else max(self._since, self._core.retry_at)
        return since + self._patience - self._clock()

    def _on_stall(self) -> None:
        self._attempts += 1
        level = logging.CRITICAL if self._attempts == 1 else logging.ERROR
        log.log(level, "the engine stands still: %s; %s", self.trouble, describe(report_stats(self._core.state)))
        self._patience += self._seconds * min(2**self._attempts, MAX_PATIENCE)
        try:
            self._recover(self._attempts)
        except Exception:  # a failed recovery must not end the watchdog, which tries again later
            log.exception("the recovery failed")


def describe(stats: EngineStats) -> str:
    """Return the state of the queues and the pool in one line."""
    classes = ", ".join(f"{c.value} {stats.running[c]} running and {stats.waiting[c]} waiting" for c in RequestClass)
    return (
        f"{classes}; of {stats.units_total} units {stats.units_owned} are owned, {stats.units_cached} cached, "
        f"{stats.units_free} free; {stats.steps} steps, {stats.failed_steps} failed, preemptions {stats.preemptions}"
    )
