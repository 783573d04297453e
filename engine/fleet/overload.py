"""Decide when engines that are short of memory become a pipeline, and when they separate again (KunServe §4.1, §4.4).

A *group* is a set of engines that hold one copy of the model: an engine, or two that run it as a pipeline. Merging two
engines makes one copy superfluous, and its bytes become cache. The decisions use the load reports of the engines, ten
per second.

Form pipelines of two engines, each with half of the layers and more memory for K and V (KunServe §4).

A pipeline is formed and dissolved in steps, each an order to one or both engines that is answered when it is done. If a
step fails, or the pipeline breaks later, both engines become whole again and compute the requests again from the tokens
that the gateway holds. An engine that cannot become whole is restarted.
"""

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.client import DroppableLayers, LoadReport, PipelineStats
from engine.errors import EngineUnavailableError, TidemillError
from engine.fleet.routing import Member
from engine.process import frames
from engine.process.frames import FOLLOWER, LEADER, WHOLE, Layers, Order, Part, Past
from engine.process.requests import OpenRequest

log = logging.getLogger("tidemill.fleet")

ORDER_SECONDS = 300.0
"""Timeout of an order in seconds; an order may read weights from a disk."""


class Pair:
    """Two engines of a pipeline.

    Attributes:
        kept: The layers of the leader and of the follower.
        num_units: Units of the pipeline.
        num_fitting: Units of the pipeline that fit beside all layers.
        undropped: Units of both engines with all layers.
        lives: `Regrouping.life` of both engines when the pair was made.
        settled: Whether the pipeline serves and no step of forming or dissolving it is under way.
    """

    def __init__(self, leader: Member, follower: Member) -> None:
        self.leader, self.follower = leader, follower
        sizes = [_sizes(member) for member in self.members]
        half = round(sizes[0].num_layers / 2)
        self.kept: tuple[Layers, Layers] = ((0, half), (half, sizes[0].num_layers))
        parts = [(each, end - begin) for each, (begin, end) in zip(sizes, self.kept, strict=True)]
        self.num_units = 2 * min(_units_beside(each, layers) // 2 for each, layers in parts)
        self.num_fitting = 2 * min(each.num_units * each.num_layers // (2 * layers) for each, layers in parts)
        self.undropped = sum(each.num_units for each in sizes)
        self.lives = tuple(member.engine.regroup.life for member in self.members)
        self.settled = False

    @property
    def members(self) -> tuple[Member, Member]:
        return self.leader, self.follower

    @property
    def is_broken(self) -> bool:
        """Whether one of the processes has ended or has lost the other one."""
        return any(
            not member.engine.is_up or member.engine.regroup.life != life or member.engine.regroup.parted
            for member, life in zip(self.members, self.lives, strict=True)
        )

    async def tell(self, member: Member, order: Order) -> tuple[Past, ...]:
        """Send an order to an engine. Raise EngineUnavailableError if its process has ended or was restarted."""
        regroup = member.engine.regroup
        if not member.engine.is_up or regroup.life != self.lives[self.members.index(member)]:
            raise EngineUnavailableError(f"engine {member.number} is gone")
        async with asyncio.timeout(ORDER_SECONDS):
            return await regroup.order(order)

    async def tell_both(self, to_leader: Order, to_follower: Order) -> tuple[tuple[Past, ...], tuple[Past, ...]]:
        """Send an order to each engine at the same time. Wait for both answers, then raise an error if any."""
        orders = self.tell(self.leader, to_leader), self.tell(self.follower, to_follower)
        one, other = await asyncio.gather(*orders, return_exceptions=True)
        for answer in (one, other):
            if isinstance(answer, BaseException):
                raise answer
        assert isinstance(one, tuple) and isinstance(other, tuple)
        return one, other


class Pipelines:
    """The pipelines of a fleet. `changed` is called when a pair ends, which changes the routing."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.pairs: list[Pair] = []
        self.drops = self.restores = self.failures = 0
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def of(self, member: Member) -> Pair | None:
        """Return the pair of an engine; None if it has none."""
        return next((pair for pair in self.pairs if member in pair.members), None)

    async def merge(self, leader: Member, follower: Member) -> bool:
        """Make a pipeline of two engines. Return False if that failed and they are separate engines again."""
        pair = Pair(leader, follower)
        self.pairs.append(pair)
        follower.away = True
        done = await self._try(pair, self._merge)
        leader.lose_cache()
        self.drops += done
        return done

    async def split(self, pair: Pair) -> bool:
        """Dissolve a pipeline. Return False if that failed; the engines then separate and compute requests again."""
        await self._prepare(pair)
        if not pair.settled:
            return False  # the pipeline has broken in the meantime
        pair.settled = False
        done = await self._try(pair, self._split)
        self.restores += done
        if done:
            self._end(pair)
        return done

    def look(self) -> None:
        """Dissolve broken pipelines. Call it after any change of an engine."""
        for pair in self.pairs:
            if pair.settled and pair.is_broken and not self._stopped:
                pair.settled = False
                log.error("engines %d and %d are no pipeline any more", *(member.number for member in pair.members))
                task = asyncio.create_task(self._break(pair), name="tidemill-pipeline")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancel all work on pipelines. The pipelines stay, because their processes are about to end."""
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _try(self, pair: Pair, way: Callable[[Pair], Awaitable[None]]) -> bool:
        try:
            await way(pair)
        except (TidemillError, TimeoutError) as error:
            log.warning("engines %d and %d: %s", *(member.number for member in pair.members), error or "no answer")
            await self._break(pair)
            return False
        pair.settled = True
        self.look()
        return True

    async def _merge(self, pair: Pair) -> None:
        leader, follower = pair.leader.engine.regroup, pair.follower.engine.regroup
        mine, theirs = pair.kept
        await pair.tell_both(frames.Hold(closes=False), frames.Hold(closes=True))
        await self._meet(pair)
        led, followed = await pair.tell_both(frames.Stall(pair.num_units), frames.Detach())
        led = _each_unit_once(led)  # the leader's pasts keep their unit numbers, which are valid on both engines
        moved = (*_parts(followed, mine), *_parts(followed, theirs))
        await pair.tell_both(  # each engine keeps copies, and the pipeline delivers them while it serves
            frames.Reform(_parts(led, theirs), (), (), True, mine, pair.num_units),
            frames.Reform(moved, (), (), False, theirs, pair.num_units, schedules=False),
        )
        leader.join(follower.leave())
        placed = await pair.tell(pair.leader, _attach(leader.accepted(), _tokens(followed)))
        await pair.tell(pair.follower, frames.Go(FOLLOWER))
        await pair.tell(pair.leader, frames.Go(LEADER))
        lost = _tokens(followed).keys() - {past.request_id for past in placed}
        await pair.tell(pair.leader, frames.Deliver(led, (*placed, *(Past(name, 0, ()) for name in lost))))

    async def _prepare(self, pair: Pair) -> None:
        """Load the absent layers while the pipeline serves. If this fails, they are loaded during the pause."""
        try:
            if not await pair.tell(pair.leader, frames.Retire(pair.num_fitting)):
                await pair.tell_both(frames.Prepare(pair.num_fitting), frames.Prepare(pair.num_fitting))
        except (TidemillError, TimeoutError) as error:
            log.warning("engines %d and %d: %s", *(member.number for member in pair.members), error or "no answer")

    async def _split(self, pair: Pair) -> None:
        leader, follower = pair.leader.engine.regroup, pair.follower.engine.regroup
        mine, theirs = pair.kept
        await pair.tell(pair.leader, frames.Hold(closes=False))
        await pair.tell_both(frames.Dissolve(), frames.Dissolve())
        pasts = await pair.tell(pair.leader, frames.Detach())
        tokens = _tokens(pasts)
        leaving = _half(leader.accepted(), tokens)
        gone = [past for past in pasts if past.request_id in leaving]
        kept = [past for past in pasts if past.request_id not in leaving]
        first, second = (_sizes(member).num_units for member in pair.members)
        await pair.tell_both(
            frames.Reform(_parts(kept, mine), _parts(gone, mine), _parts(kept, theirs), True, None, first),
            frames.Reform(_parts(gone, theirs), _parts(kept, theirs), _parts(gone, mine), False, None, second),
        )
        follower.join(leader.leave(leaving))
        placed = await pair.tell_both(_attach(leader.accepted(), tokens), _attach(follower.accepted(), tokens))
        await pair.tell_both(*(frames.Go(WHOLE, each) for each in placed))

    async def _meet(self, pair: Pair) -> None:
        with tempfile.TemporaryDirectory(prefix="tidemill-", ignore_cleanup_errors=True) as folder:
            path = str(Path(folder) / "link")
            await pair.tell(pair.leader, frames.Meet(path, listens=True))
            await pair.tell(pair.follower, frames.Meet(path, listens=False))

    async def _break(self, pair: Pair) -> None:
        """Make both engines whole again."""
        self.failures += 1
        await asyncio.gather(*(self._reset(member) for member in pair.members))
        self._end(pair)

    async def _reset(self, member: Member) -> None:
        engine = member.engine
        life = engine.regroup.life
        if not engine.is_up:
            return
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                await engine.regroup.reset(_sizes(member).num_units)
        except (TidemillError, TimeoutError) as error:
            if engine.regroup.life == life:
                log.error("engine %d cannot be made whole (%s): it is started again", member.number, error)
                engine.kill()

    def _end(self, pair: Pair) -> None:
        for member in pair.members:
            member.lose_cache()
        pair.follower.away = False
        self.pairs.remove(pair)
        self._changed()


def _sizes(member: Member) -> DroppableLayers:
    sizes = member.engine.info.droppable
    assert sizes is not None, "the engine's layers cannot be dropped"
    return sizes


def _units_beside(sizes: DroppableLayers, layers: int) -> int:
    """Return the cache units of an engine that keeps `layers` of its layers."""
    room = sizes.num_units * sizes.num_layers * sizes.unit_layer_bytes
    return int((room + (sizes.num_layers - layers) * sizes.layer_bytes) / (layers * sizes.unit_layer_bytes))


def _each_unit_once(pasts: Iterable[Past]) -> tuple[Past, ...]:
    """Remove units that an earlier past contains: requests with equal prefixes share units."""
    seen: set[int] = set()
    found = []
    for past in pasts:
        found.append(past._replace(units=tuple(unit for unit in past.units if unit not in seen)))
        seen.update(past.units)
    return tuple(found)


def _parts(pasts: Iterable[Past], layers: Layers) -> tuple[Part, ...]:
    return tuple(Part(past.request_id, past.units, layers) for past in pasts)


def _tokens(pasts: Iterable[Past]) -> dict[str, int]:
    return {past.request_id: past.num_tokens for past in pasts}


def _attach(entries: Iterable[OpenRequest], tokens: Mapping[str, int]) -> frames.Attach:
    return frames.Attach(tuple((entry.resumed(), tokens.get(entry.request.request_id, 0)) for entry in entries))


def _half(entries: Sequence[OpenRequest], tokens: Mapping[str, int]) -> set[str]:
    """Return the ids of the requests that move to the follower, so that both engines hold about as many tokens.

    The first request stays.
    """
    load, leaving = [0, 0], set()
    for entry in entries:
        size = tokens.get(entry.request.request_id) or len(entry.request.prompt_token_ids)
        to = int(load[1] < load[0])
        load[to] += size
        if to:
            leaving.add(entry.request.request_id)
    return leaving


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
