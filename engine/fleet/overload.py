"""Decide when engines that are short of memory become a pipeline, and when they separate again (KunServe §4.1, §4.4).

A *group* is a set of engines that hold one copy of the model: an engine, or two that run it as a pipeline. Merging two
engines makes one copy superfluous, and its bytes become cache. The decisions use the load reports of the engines, ten
per second.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.api import LoadReport, PipelineStats
from engine.fleet.pipelines import Pair, Pipelines
from engine.fleet.routing import Member

log = logging.getLogger("tidemill.fleet")

LOOK_SECONDS = 0.1
FALLING = 1.0
"""Interval in seconds over which the used units must not rise before layers are restored."""
SETTLE = 5.0
"""Minimum time in seconds between two changes of an engine; each pauses the engine and copies K and V."""
EXPECTED = 0.5
"""Time in seconds for which a shortage must have been expected before it counts."""
BACK_OFF = 30.0
"""Minimum time in seconds between a failed change of an engine and the next change."""
DROP_AT = 0.95
"""Share of the cache in use from which waiting requests trigger a drop."""
EXPECT_AT, LEAST = 0.7, 0.05
"""Shares of the cache in use, and missing, from which expected demand triggers a drop."""
RESTORE_AT = 0.5
"""Share of the undropped cache into which the used units must fit before layers are restored."""


class Group(NamedTuple):
    """Engines that together hold one copy of the model. All amounts are cache units."""

    engines: tuple[int, ...]
    units: int
    used: int
    queued: int  # units that waiting requests need
    growth: int = 0  # units that all requests are expected to need beyond that

    @property
    def missing(self) -> int:
        """Units needed beyond the free ones."""
        return max(0, self.queued + self.growth - (self.units - self.used))

    @property
    def is_expected(self) -> bool:
        """Whether the memory is expected to run out and much of it is already in use."""
        return self.growth > 0 and self.used >= EXPECT_AT * self.units and self.missing >= LEAST * self.units

    @property
    def is_short(self) -> bool:
        """Whether the memory is (almost) full and the queue needs more than is free, or this is expected."""
        return (self.queued > self.units - self.used and self.used >= DROP_AT * self.units) or self.is_expected


def plan_pairs(groups: Sequence[Group], copy_units: int) -> tuple[list[tuple[int, int]], bool]:
    """Pair single engines until the missing units of all groups are freed (Figure 6), without a short group none.

    The engines with the most missing units are paired first. Return the pairs, and whether they free enough units.
    `copy_units`: units that one copy of the droppable layers frees.
    """
    needed = sum(group.missing for group in groups)
    if copy_units <= 0 or not any(group.is_short for group in groups):
        return [], needed == 0
    singles = sorted((group for group in groups if len(group.engines) == 1), key=lambda group: -group.missing)
    number = min(len(singles) // 2, -(-needed // copy_units))
    pairs = zip(singles[: 2 * number : 2], singles[1 : 2 * number : 2], strict=True)
    return sorted((one.engines[0], other.engines[0]) for one, other in pairs), number * copy_units >= needed


def should_restore(group: Group, before: int, undropped: int) -> bool:
    """Return whether a group can restore its layers (§4.4).

    Its use must not have risen since `before` units were used, no request may wait for memory, and the used units must
    take at most `RESTORE_AT` of `undropped`, the cache with all layers. The expected growth must fit, too.
    """
    fits = group.used <= RESTORE_AT * undropped and group.used + group.growth <= undropped
    return group.queued == 0 and group.used <= before and fits


class Watch:
    """Decides about merges and restores, with hysteresis. It has no clock; times are arguments."""

    def __init__(self) -> None:
        self.too_little = False
        self._uses: dict[tuple[int, ...], tuple[float, int]] = {}  # by engines: a time, and the units used then
        self._not_before: dict[int, float] = {}
        self._expected: dict[tuple[int, ...], float] = {}

    def note(self, engines: Sequence[int], until: float) -> None:
        """Record a change of these engines, and allow no further one before `until`."""
        self._uses.pop(tuple(engines), None)
        self._not_before.update(dict.fromkeys(engines, until))

    def merges(self, groups: Sequence[Group], copy_units: int, now: float) -> list[tuple[int, int]]:
        """Return the pairs of engines to merge. `copy_units`: units that one copy of the layers frees."""
        groups = [self._checked(group, now) for group in groups]
        pairs, enough = plan_pairs(groups, copy_units)
        self.too_little = not enough and any(group.is_short for group in groups)
        return [pair for pair in pairs if all(now >= self._not_before.get(engine, now) for engine in pair)]

    def restores(self, group: Group, undropped: int, now: float) -> bool:
        """Return whether a pipeline should be dissolved. `undropped`: units of its engines with all layers."""
        at, before = self._uses.setdefault(group.engines, (now, group.used))
        if now - at < FALLING or now < self._not_before.get(group.engines[0], now):
            return False
        self._uses[group.engines] = (now, group.used)
        return should_restore(group, before, undropped)

    def _checked(self, group: Group, now: float) -> Group:
        """Return the group without its growth unless a shortage has been expected for `EXPECTED` seconds."""
        if not group.is_expected:
            self._expected.pop(group.engines, None)
        elif now - self._expected.setdefault(group.engines, now) >= EXPECTED:
            return group
        return group._replace(growth=0)


class Overload:
    """Watches the memory of a fleet's engines. `changed` is called when a pipeline ends, which changes the routing."""

    def __init__(self, members: Sequence[Member], changed: Callable[[], None], clock: Callable[[], float]) -> None:
        self.pipelines = Pipelines(changed)
        self._members = members
        self._clock = clock
        self._watch = Watch()
        self._task: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-overload")

    async def stop(self) -> None:
        """Stop watching. Pipelines stay, because their processes are about to end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.pipelines.stop()

    def stats(self) -> PipelineStats:
        done = self.pipelines
        pairs = tuple((pair.leader.number, pair.follower.number) for pair in done.pairs)
        return PipelineStats(pairs, done.drops, done.restores, done.failures, self._watch.too_little)

    async def part(self, member: Member) -> None:
        """Dissolve the pipeline of an engine, which is about to be renewed."""
        async with self._changing:
            pair = self.pipelines.of(member)
            if pair is not None and pair.settled:
                await self._split(pair)
            self._watch.note([member.number], self._clock() + BACK_OFF)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                async with self._changing:
                    await self.look()
            except Exception:  # the next check may succeed
                log.exception("the watch over the engines' memory failed")

    async def look(self) -> None:
        """Check all engines once, and make at most one change."""
        now = self._clock()
        groups = []
        for pair in self.pipelines.pairs:
            group = _group((pair.leader.number, pair.follower.number), pair.leader.engine.report)
            groups.append(group)
            if pair.settled and self._watch.restores(group, pair.undropped, now):
                await self._split(pair)
                return
        singles = {m.number: m for m in self._members if m.is_well and not m.leaves and self.pipelines.of(m) is None}
        groups += [_group((number,), member.engine.report) for number, member in singles.items()]
        for one, other in self._watch.merges(groups, self._copy_units(), now):
            await self.merge(singles[one], singles[other])
            return

    async def merge(self, leader: Member, follower: Member) -> bool:
        """Make a pipeline of two engines unless either has a suspect; see `Pipelines.merge`."""
        if not (leader.engine.regroup.is_calm and follower.engine.regroup.is_calm):
            return False
        done = await self.pipelines.merge(leader, follower)
        self._note((leader.number, follower.number), done)
        log.warning(
            "memory is short: engines %d and %d %s", leader.number, follower.number,
            "compute as one pipeline, and the layers that each dropped are room for requests" if done else "stay",
        )  # fmt: skip
        return done

    async def _split(self, pair: Pair) -> None:
        numbers = (pair.leader.number, pair.follower.number)
        self._note(numbers, await self.pipelines.split(pair))
        log.warning("engines %d and %d have all layers again", *numbers)

    def _note(self, numbers: tuple[int, int], done: bool) -> None:
        self._watch.note(numbers, self._clock() + (SETTLE if done else BACK_OFF))

    def _copy_units(self) -> int:
        sizes = self._members[0].engine.info.droppable
        assert sizes is not None, "the engine's layers cannot be dropped"
        return int(sizes.layer_bytes / sizes.unit_layer_bytes)


def _group(engines: tuple[int, ...], report: LoadReport | None) -> Group:
    """Return the group with the units of online work; units of offline work count as free."""
    if report is None:
        return Group(engines, 0, 0, 0)
    used = report.num_units - report.available_units
    return Group(engines, report.num_units, used, report.queued_units, report.growth_units)
