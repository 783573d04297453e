"""Which engine of several computes much slower than it should: it is drained and started again.

An engine reports what its steps took, and what the latency profile that it began with says of them. Where that is
several times as much for a while, and not so with its siblings at the same time, something is wrong with it alone: a
device that throttles, a bad link, a process that leaks. A machine that is slow as a whole is nobody's fault.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median

from engine.api import LoadReport
from engine.fleet.member import Member

log = logging.getLogger("tidemill.fleet")

LOOK_SECONDS = 1.0
SPAN = 2.0
"""Seconds between two reports whose difference is measured."""
BUSY = 0.25
"""The least part of it that steps must have run."""
FRESH = 10.0
"""Seconds for which a measurement holds."""
SLOW = 3.0
"""Times what the profile says, and what it says times the siblings' own slowness."""
PATIENCE = 20.0
"""Seconds for which an engine must have been slow."""
BACK_OFF, MOST = 600.0, 6
"""Seconds until the same engine may be started again; doubled each time, at most so often."""


@dataclass(slots=True)
class _Slowness:
    """Of one engine, measured at `at`; slow since `since`, if it is. `start`: the report that is measured from."""

    start: LoadReport | None = None
    ratio: float = 0.0
    at: float = 0.0
    since: float | None = None

    def hear(self, report: LoadReport | None, now: float) -> None:
        start = self.start
        if report is None or start is None or report.profile_seconds < start.profile_seconds:  # another process
            self.start, self.ratio, self.since = report, 0.0, None
            return
        seconds, device = report.time - start.time, report.device_seconds - start.device_seconds
        if seconds < SPAN:
            return
        self.start = report
        expected = report.profile_seconds - start.profile_seconds
        if device >= BUSY * seconds and expected > 0.0:
            self.ratio, self.at = device / expected, now

    def is_known(self, now: float) -> bool:
        return self.ratio > 0.0 and now - self.at <= FRESH


class SlowWatch:
    """Decides. Pure; time is an argument."""

    def __init__(self) -> None:
        self._found: dict[int, _Slowness] = {}
        self._not_before: dict[int, float] = {}
        self._times: Counter[int] = Counter()

    def hear(self, engine: int, report: LoadReport | None, now: float) -> None:
        """What an engine said last."""
        self._found.setdefault(engine, _Slowness()).hear(report, now)

    def forget(self, engine: int) -> None:
        """Its steps are no measure: it is in a pipeline, or on its way out."""
        self._found.pop(engine, None)

    def slowness(self, engine: int, now: float) -> float:
        """How many times what its profile says its steps took of late; 0: not known."""
        found = self._found.get(engine)
        return found.ratio if found is not None and found.is_known(now) else 0.0

    def find(self, now: float) -> int | None:
        """An engine that has been slow for long enough, beside others that have not."""
        known = {engine: each.ratio for engine, each in self._found.items() if each.is_known(now)}
        for engine, each in self._found.items():
            others = [ratio for other, ratio in known.items() if other != engine]
            if engine not in known or not others or known[engine] < SLOW * max(1.0, median(others)):
                each.since = None
                continue
            each.since = now if each.since is None else each.since
            if now - each.since >= PATIENCE and now >= self._not_before.get(engine, now):
                return engine
        return None

    def restarted(self, engine: int, now: float) -> None:
        """If it did not help, it is not done again soon."""
        self._not_before[engine] = now + BACK_OFF * 2 ** min(self._times[engine], MOST)
        self._times[engine] += 1


class SlowEngines:
    """Watches the members of a fleet. `is_alone`: whether an engine computes by itself; `restart` has one drained and
    started again, and tells whether that was done."""

    def __init__(
        self,
        members: Sequence[Member],
        is_alone: Callable[[Member], bool],
        restart: Callable[[Member], Awaitable[bool]],
        clock: Callable[[], float],
    ) -> None:
        self._members = members
        self._is_alone = is_alone
        self._restart = restart
        self._clock = clock
        self._watch = SlowWatch()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-slow-engines")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except Exception:  # whatever one look met, the next one may do without
                log.exception("the watch over slow engines failed")

    async def look(self) -> None:
        """Once: at most one engine is started again."""
        now = self._clock()
        for member in self._members:
            if member.is_well and not (member.leaves or member.away) and self._is_alone(member):
                self._watch.hear(member.number, member.engine.report, now)
            else:
                self._watch.forget(member.number)
            member.slowness = self._watch.slowness(member.number, now)
        found = self._watch.find(now)
        if found is None:
            return
        member = self._members[found]
        member.slow = f"its steps take {member.slowness:.1f} times what its latency profile says: it is started again"
        log.error("engine %d: %s, and its requests go on at the others", found, member.slow)
        try:
            done = await self._restart(member)
        finally:
            member.slow = None
            self._watch.forget(found)
        if done:
            self._watch.restarted(found, self._clock())
            member.slow_restarts += 1
