"""Engines that become one pipeline and two again while they answer: nothing is lost, computed wrongly or said twice,
with either engine killed at any step. The checking fake runner in real processes."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from driver import until
from test_fleet import fleet_of, kill, undying
from test_process import CONFIG, collect, mixture, request, summed, until_idle

from engine.api import EngineRequest, FinishReason
from engine.client import EngineState
from engine.fleet.client import FleetClient
from engine.fleet.overload import Overload, Pair
from engine.fleet.routing import Member
from engine.process.frames import Deliver, Go, Order, Past, Reform

SMALL = replace(CONFIG, num_gpu_blocks_override=100)
MERGE = ("Hold", "Meet", "Stall", "Reform", "Attach", "Go", "Deliver")
SPLIT = ("Retire", "Hold", "Dissolve", "Detach", "Reform", "Attach", "Go")
"""The orders of both ways, each the first of its step."""


def overload_of(fleet: FleetClient) -> Overload:
    """By hand: its own decisions come at no certain time."""
    assert fleet._overload is not None and fleet._overload._task is not None
    fleet._overload._task.cancel()
    return fleet._overload


async def answers(fleet: FleetClient, asked: list[EngineRequest]) -> dict[str, tuple[Any, ...]]:
    found = await asyncio.gather(*[collect(fleet, each) for each in asked])  # type: ignore[arg-type]
    return {each.request_id: summed(outputs)[:4] for each, outputs in zip(asked, found, strict=True)}


def long() -> list[EngineRequest]:
    return [*mixture(), *[request(f"l{index:02}", prompt=20 + index, max_tokens=150) for index in range(6)]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    async def run() -> dict[str, tuple[Any, ...]]:
        async with fleet_of(tmp_path_factory.mktemp("calm"), "") as fleet:
            return await answers(fleet, long())

    return asyncio.run(run())


async def begun(fleet: FleetClient) -> "asyncio.Task[Any]":
    """Both engines compute the answers to `long`, which are returned."""
    asked = asyncio.create_task(answers(fleet, long()))
    await until(
        lambda: asked.done() or all(any(e.token_ids for e in m.engine._requests) for m in fleet._members)  # type: ignore[attr-defined]
    )
    assert not asked.done()
    return asked


@pytest.mark.slow
async def test_a_pipeline_goes_on_with_what_two_engines_had_and_they_with_what_it_has(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    async with fleet_of(tmp_path, "", "", drop=True) as fleet:
        overload = overload_of(fleet)
        first, second = fleet._members
        for turn in range(8):  # units with cells of earlier owners, on each engine others
            await answers(fleet, [request(f"{turn}{i}", prompt=20 + 3 * i, max_tokens=40) for i in range(6)])
        asked = await begun(fleet)
        first.prefixes.add([1, 2, 3], 3)
        told = orders_to(first), orders_to(second)
        assert await overload.merge(first, second)
        check_what_moved(*told)
        assert not first.prefixes.num_hits([1]), "its cache was laid out anew"
        stats = await fleet.stats()
        assert stats.pipelines is not None and stats.pipelines.pairs == ((0, 1),) and stats.pipelines.drops == 1
        assert [view.stats.units_total for view in stats.engines] == [950, 0]
        assert second.engine.num_online == 0 and sum(stats.preemptions.values()) == 0
        assert fleet.state is EngineState.READY
        more = asyncio.create_task(collect(fleet, request("more")))  # type: ignore[arg-type]
        (pair,) = overload.pipelines.pairs
        assert await overload.pipelines.split(pair)
        assert all((tmp_path / str(number) / "prepared").exists() for number in range(2)), "before the pause"
        assert (await more)[-1].finish_reason is FinishReason.LENGTH
        assert await asked == undisturbed
        stats = await fleet.stats()
        assert stats.pipelines is not None and stats.pipelines == ((), 1, 1, 0, False)
        assert stats.units_total == 800 and sum(stats.preemptions.values()) == 0
        assert stats.resumed_requests == 0 and not stats.restarts
        await until_idle(fleet)  # type: ignore[arg-type]


def orders_to(member: Member) -> list[Any]:
    """Orders from now on."""
    told: list[Any] = []
    tell = member.engine.regroup.order

    async def order(order: Any) -> Any:
        told.append(order)
        return await tell(order)

    member.engine.regroup.order = order  # type: ignore[method-assign]
    return told


def check_what_moved(leader: list[Any], follower: list[Any]) -> None:
    """Into a pipeline: of the leader's own pasts the layers that it gives up, each unit once, and nothing else.

    All pasts move while the pipeline serves.
    """
    mine, theirs = (next(each for each in told if isinstance(each, Reform)) for told in (leader, follower))
    kept = [unit for part in mine.keeps for unit in part.units]
    assert kept and len(set(kept)) == len(kept) and not mine.gives and not mine.gets
    assert theirs.keeps and not theirs.gives and not theirs.gets
    kinds = [type(order) for order in leader]
    assert kinds.index(Deliver) > kinds.index(Go)
    (delivered,) = (each for each in leader if isinstance(each, Deliver))
    assert {past.request_id for past in delivered.own} == {part.request_id for part in mine.keeps}
    assert {past.request_id for past in delivered.attached} == {part.request_id for part in theirs.keeps}


def each_step(steps: Sequence[str], *quick: tuple[str, int]) -> list[Any]:
    """Both engines at every step; all but a few only where there is time."""
    return [
        pytest.param(step, dies, marks=() if (step, dies) in quick else pytest.mark.slow)
        for step in steps
        for dies in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "dies"), [
    *each_step(MERGE, ("Attach", 1)), *each_step([*SPLIT, "settled"], ("settled", 0), ("Go", 1)),
])  # fmt: skip
async def test_an_engine_killed_on_the_way_into_a_pipeline_in_it_or_on_the_way_out_costs_time_only(
    step: str, dies: int, tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    async with fleet_of(tmp_path, "", "", drop=True, policy=undying) as fleet:
        overload = overload_of(fleet)
        asked = await begun(fleet)
        with killing_before(step, dies, tmp_path) if step in MERGE else contextlib.nullcontext():
            assert await overload.merge(*fleet._members) is (step not in MERGE)
        if step == "settled":
            await asyncio.to_thread(kill, tmp_path, dies)
        elif step not in MERGE:
            (pair,) = overload.pipelines.pairs
            with killing_before(step, dies, tmp_path):
                assert not await overload.pipelines.split(pair)
        await ends_whole(fleet, overload)
        assert await asked == undisturbed
        await until_idle(fleet)  # type: ignore[arg-type]


def before_order(name: str, act: Callable[[], None]) -> AbstractContextManager[Any]:
    """Call `act` once, before the first order with that name is sent."""
    tell, acts = Pair.tell, [act]

    async def watched(pair: Pair, member: Member, order: Order) -> tuple[Past, ...]:
        if acts and type(order).__name__ == name:
            acts.pop()()
        return await tell(pair, member, order)

    return patch.object(Pair, "tell", watched)


def killing_before(name: str, number: int, folder: Path) -> AbstractContextManager[Any]:
    return before_order(name, partial(kill, folder, number))


async def ends_whole(fleet: FleetClient, overload: Overload, units: int = 400) -> None:
    """There are two engines again, and both answer."""
    await until(lambda: not overload.pipelines.pairs and all(member.is_well for member in fleet._members))
    for member in fleet._members:
        (stream,) = await member.engine.submit([request(f"on{member.number}")])
        assert [output async for output in stream][-1].finish_reason is FinishReason.LENGTH
    stats = await fleet.stats()
    assert stats.pipelines is not None and stats.pipelines.failures == 1
    assert [view.stats.units_total for view in stats.engines] == [units] * 2
    assert sum(stats.restarts.values()) == 1, "only the one that was killed"
