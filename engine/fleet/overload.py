"""Decide when engines that are short of memory become a pipeline, and when they separate again (KunServe §4.1, §4.4).

The decisions use the load reports of the engines, ten per second.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.api import LoadReport, PipelineStats
from engine.fleet.drop import Group, plan_drop, should_restore
from engine.fleet.member import Member
from engine.fleet.pipelines import Pair, Pipelines

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


@dataclass(slots=True)
class _Use:
    """The used units of a pipeline at a time."""

    at: float
    units: int


class Watch:
    """Decides about merges and restores, with hysteresis. It has no clock; times are arguments."""

    def __init__(self) -> None:
        self.too_little = False
        self._uses: dict[tuple[int, ...], _Use] = {}
        self._not_before: dict[int, float] = {}
        self._expected: dict[tuple[int, ...], float] = {}

    def note(self, engines: Sequence[int], until: float) -> None:
        """Record a change of these engines, and allow no further one before `until`."""
        self._uses.pop(tuple(engines), None)
        self._not_before.update(dict.fromkeys(engines, until))

    def merges(self, groups: Sequence[Group], copy_units: int, now: float) -> list[tuple[int, int]]:
        """Return the pairs of engines to merge. `copy_units`: units that one copy of the layers frees."""
        groups = [self._checked(group, now) for group in groups]
        plan = plan_drop(groups, copy_units, most=2)
        self.too_little = not plan.enough and any(group.is_short for group in groups)
        pairs = []
        for members in plan.merges:
            one, other = (groups[index].engines[0] for index in members)
            if now >= max(self._not_before.get(one, now), self._not_before.get(other, now)):
                pairs.append((one, other))
        return pairs

    def restores(self, group: Group, undropped: int, now: float) -> bool:
        """Return whether a pipeline should be dissolved. `undropped`: units of its engines with all layers."""
        use = self._uses.setdefault(group.engines, _Use(now, group.used))
        if now - use.at < FALLING or now < self._not_before.get(group.engines[0], now):
            return False
        self._uses[group.engines] = _Use(now, group.used)
        return should_restore(group.used, use.units, undropped, group.queued, group.growth)

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
