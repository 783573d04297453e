"""Engines behind actors: the transport over actors that are threads here, and (slow, with the extra `ray`) two actors
of a cluster on this machine, with one actor killed."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver import until
from test_fleet import answers, undying
from test_process import CHILD, CONFIG, children, until_idle

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.fleet.client import FleetClient
from engine.fleet.launch import Cluster, EngineActor, RemoteEngine, bundle_for
from engine.process import frames
from engine.process.client import EngineProcess
from engine.process.launcher import ProcessOptions


class ActorDiedError(Exception):
    pass


class FakeRay:
    """Actors are objects of this process; their calls take place in the thread of the caller."""

    exceptions = SimpleNamespace(RayError=ActorDiedError)

    def get(self, item: Any) -> Any:
        return item

    def kill(self, actor: "FakeActor") -> None:
        actor.kill()


class FakeCall:
    def __init__(self, call: Any) -> None:
        self.remote = call

    def options(self, **_options: Any) -> "FakeCall":
        return self


class FakeActor:
    def __init__(self, command: list[str]) -> None:
        self.inner = EngineActor(command, cpus=1)
        self.is_lost = False
        self.run, self.tell, self.dump = FakeCall(self._run), FakeCall(self.inner.tell), FakeCall(self.inner.dump)

    def _run(self, launch: bytes) -> Iterator[Any]:
        for item in self.inner.run(launch):
            if self.is_lost:
                raise ActorDiedError
            yield item

    def kill(self) -> None:
        """The engine's process ends with it."""
        self.is_lost = True
        if self.inner._child is not None:
            self.inner._child.kill()


@asynccontextmanager
async def fleet_over(spawn: Any) -> AsyncIterator[FleetClient]:
    """Two engines; `spawn` is given their number and what to launch."""

    def make(number: int, changed: Any) -> EngineProcess:
        options = ProcessOptions(policy=undying(), spawn=partial(spawn, number), changed=changed, waits=False)
        return EngineProcess(CONFIG, options)

    fleet = await asyncio.to_thread(FleetClient, make, 2, patience=60.0)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


def scripted(folder: Path, number: int, faults: str) -> list[str]:
    own = folder / str(number)
    own.mkdir(parents=True, exist_ok=True)
    return [sys.executable, "-P", str(CHILD), str(own), faults]


def near(folder: Path, faults: tuple[str, str], number: int, launch: frames.Launch) -> RemoteEngine:
    return RemoteEngine(FakeRay(), FakeActor(scripted(folder, number, faults[number])), launch)


@pytest.mark.slow
@pytest.mark.parametrize("faults", [("before:6,ready:1:2-9999", ""), ("frame:3", "hang:5")])
async def test_answers_are_those_of_an_undisturbed_run(faults: tuple[str, str], tmp_path: Path) -> None:
    before = children()
    async with fleet_over(partial(near, tmp_path / "calm", ("", ""))) as fleet:
        undisturbed = await answers(fleet)
    async with fleet_over(partial(near, tmp_path / "storm", faults)) as fleet:
        assert await answers(fleet) == undisturbed
        await until_idle(fleet)  # type: ignore[arg-type]
    assert children() <= before, "a process is left"


@pytest.mark.slow
async def test_a_lost_actor_is_replaced(tmp_path: Path) -> None:
    actors: list[FakeActor] = []

    def noted(number: int, launch: frames.Launch) -> RemoteEngine:
        actors.append(FakeActor(scripted(tmp_path, number, "")))
        return RemoteEngine(FakeRay(), actors[-1], launch)

    async with fleet_over(noted) as fleet:
        first = await said(fleet)
        asked = asyncio.create_task(said(fleet))
        await asyncio.sleep(0)
        actors[0].kill()
        assert await asked == first
        await both_run_again(fleet, actors)


async def said(fleet: FleetClient) -> dict[str, tuple[Any, ...]]:
    """All answers but for what prefixes saved them."""
    return {name: answer[:4] for name, answer in (await answers(fleet)).items()}


async def both_run_again(fleet: FleetClient, made: list[Any]) -> None:
    """One has been replaced."""
    await until(lambda: len(made) >= 3 and all(member.engine.is_up for member in fleet._members))


def test_what_an_engine_takes_of_a_cluster() -> None:
    config = EngineConfig()
    assert bundle_for({"CPU": 16.0, "GPU": 2.0}, 2, config) == {"CPU": 1.0, "GPU": 1.0}
    assert bundle_for({"CPU": 17.0, "GPU": 2.0}, 4, config) == {"CPU": 4.0}
    assert bundle_for({"CPU": 16.0, "GPU": 2.0}, 2, EngineConfig(device="cpu", threads=3)) == {"CPU": 3.0}
    with pytest.raises(ConfigError, match="the cluster has 2"):
        bundle_for({"CPU": 16.0, "GPU": 2.0}, 3, EngineConfig(device="cuda"))
    with pytest.raises(ConfigError, match="a processor for each"):
        bundle_for({"CPU": 2.0}, 3, config)


@pytest.mark.manual
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
async def test_two_actors_of_a_cluster(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    options = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = await asyncio.to_thread(partial(Cluster.connect, "local", 2, CONFIG, **options))
    made: list[RemoteEngine] = []

    def spawn(number: int, launch: frames.Launch) -> RemoteEngine:
        own = Cluster(cluster.ray, cluster.group, cluster.bundle, scripted(tmp_path, number, ""))
        made.append(own.spawn(number, launch))
        return made[-1]

    try:
        async with fleet_over(spawn) as fleet:
            first = await said(fleet)
            asked = asyncio.create_task(said(fleet))
            await asyncio.sleep(0)
            await asyncio.to_thread(ray.kill, made[0]._actor)
            assert await asked == first
            await both_run_again(fleet, made)
            assert await said(fleet) == first
    finally:
        await asyncio.to_thread(ray.shutdown)
