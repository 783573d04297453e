"""Several engines as one: the router, and no request lost or doubled when an engine dies, hangs or drains."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import is_error, submit_one, until
from test_process import CHILD, CONFIG, POISON, answers, children, collect, mixture, request, until_idle

from engine.api import EngineRequest, FinishReason, RequestClass, SamplingParams
from engine.client import EngineState
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineStepError, EngineUnavailableError, InvalidRequestError
from engine.fleet.client import FleetClient
from engine.loop.watchdog import StepLimits
from engine.process.client import EngineProcess
from engine.process.launcher import SILENCE, ProcessOptions
from engine.process.requests import RestartPolicy
from engine.process.suspects import LONE_DEATHS, SUSPECT_AFTER
from gateway.store.folder import open_state
from tidemill.commands.state import RESTART, restart


@asynccontextmanager
async def fleet_of(
    folder: Path,
    *faults: str,
    policy: Any = None,
    silence: StepLimits = SILENCE,
    config: EngineConfig = CONFIG,
    loaded: bool = False,
    **options: Any,
) -> AsyncIterator[FleetClient]:
    """One engine for each script of faults; at the end no process and no descriptor is left."""
    before = children()

    def make(number: int, changed: Any) -> EngineProcess:
        own = folder / str(number)
        own.mkdir(parents=True)
        return EngineProcess(
            config,
            ProcessOptions(
                command=[sys.executable, "-P", str(CHILD), str(own), faults[number]],
                pid_file=folder / f"engine-{number}.pid",
                policy=(policy or (lambda: RestartPolicy(max_delay=0.05)))(),
                silence=silence,
                changed=changed,
                waits=False,
            ),
        )

    fleet = await asyncio.to_thread(FleetClient, make, len(faults), patience=20.0, **options)
    if loaded:
        await asyncio.to_thread(fleet.load, lambda _planned: None)
    await fleet.start()
    tasks = asyncio.all_tasks()
    try:
        yield fleet
    finally:
        await fleet.stop()
    assert children() <= before, "a process is left"
    assert not [task for task in asyncio.all_tasks() - tasks if not task.done()], "a task is left"


def held(fleet: FleetClient) -> list[int]:
    return [member.routed for member in fleet._members]


def kill(folder: Path, number: int) -> None:
    os.kill(int((folder / f"engine-{number}.pid").read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    async def run() -> dict[str, tuple[Any, ...]]:
        async with fleet_of(tmp_path_factory.mktemp("calm"), "") as fleet:
            return await answers(fleet)

    return asyncio.run(run())


@pytest.mark.slow
async def test_requests_are_shared_out_and_answered_as_by_one_engine(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    async with fleet_of(tmp_path, "", "") as fleet:
        assert await answers(fleet) == undisturbed
        assert sum(held(fleet)) == len(undisturbed) and min(held(fleet)) > 0
        stats = await fleet.stats()
        assert stats.steps == sum(view.stats.steps for view in stats.engines) and len(stats.engines) == 2
        assert stats.units_total == 800 and fleet.info.cache_tokens == 1600
        assert [view.state for view in stats.engines] == [EngineState.READY] * 2
        await until_idle(fleet)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_begun_answers_go_on_at_a_living_engine(tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]) -> None:
    """Greedy, seeded and those with more of a state, and the line of a batch: at the same token. The engine never comes
    back, and is never given up."""
    async with fleet_of(tmp_path, "before:6,ready:1:2-9999", "", policy=undying) as fleet:
        other, begun = fleet._members[1].engine, 0
        adopt = other.adopt

        def watched(entries: Any) -> None:
            nonlocal begun
            begun += sum(bool(entry.token_ids) for entry in entries)
            adopt(entries)

        other.adopt = watched  # type: ignore[method-assign]
        assert await answers(fleet) == undisturbed
        assert begun > 1, "some had been given tokens"
        await until_idle(fleet)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_what_kills_two_engines_is_tried_alone_and_the_others_go_on(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    """It moves once; then it is suspected, and stays where it is until it has ended the process alone."""
    poison = f"poison:{POISON}:1-99"
    async with fleet_of(tmp_path, poison, poison) as fleet:
        deadly = EngineRequest("deadly", (7, POISON, 9), SamplingParams(max_tokens=24))
        found = asyncio.create_task(collect(fleet, deadly))  # type: ignore[arg-type]
        assert await answers(fleet) == undisturbed
        assert is_error((await found)[-1], EngineStepError)
        assert sum((await fleet.stats()).restarts.values()) in range(SUSPECT_AFTER + LONE_DEATHS, 12)
        assert await ended(fleet, "later") is FinishReason.LENGTH
        await until_idle(fleet)  # type: ignore[arg-type]


def undying() -> RestartPolicy:
    return RestartPolicy(max_deaths=9999, max_delay=0.05)


async def ended(fleet: FleetClient, name: str, **options: Any) -> FinishReason | None:
    outputs = await collect(fleet, request(name, **options))  # type: ignore[arg-type]
    assert [output.finish_reason for output in outputs].count(None) == len(outputs) - 1
    return outputs[-1].finish_reason


@pytest.mark.slow
async def test_without_any_engine_requests_wait_and_lines_longer(tmp_path: Path) -> None:
    now = 0.0
    async with fleet_of(
        tmp_path, "ready:1:2-99", "ready:1:2-99", clock=lambda: now, policy=lambda: RestartPolicy(max_deaths=9999)
    ) as fleet:
        fleet.kill()
        await until(lambda: fleet.state is EngineState.DEGRADED)
        await until(lambda: not any(member.engine.is_up for member in fleet._members))
        assert fleet.trouble is not None and "engine 1" in fleet.trouble
        waiting = asyncio.create_task(collect(fleet, request("waiting")))  # type: ignore[arg-type]
        line = asyncio.create_task(collect(fleet, mixture()[-1]))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        now = 30.0
        fleet._on_change()
        with pytest.raises(EngineUnavailableError):
            await waiting
        assert not line.done(), "the line of a batch waits"
        line.cancel()
        await asyncio.wait([line])


@pytest.mark.slow
async def test_a_fleet_whose_engines_are_all_dead_says_so(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, "ready:1:2-99", "ready:1:2-99") as fleet:
        fleet.kill()
        assert "engine 0: the engine process ended too often" in await fleet.wait_dead()
        assert fleet.state is EngineState.DEAD
        with pytest.raises(EngineUnavailableError):
            await submit_one(fleet, request("late"))


async def test_an_engine_takes_as_many_lines_as_its_window_holds(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, "", "", lines=3) as fleet:
        lines = [request(f"l{index}", max_tokens=8) for index in range(20)]
        offline = [_as_line(each) for each in lines]
        most = 0

        def look() -> None:
            nonlocal most
            most = max(most, *[member.engine.num_offline for member in fleet._members])

        for member in fleet._members:
            submit = member.engine.submit

            async def watched(requests: Any, submit: Any = submit) -> Any:
                streams = await submit(requests)
                look()
                return streams

            member.engine.submit = watched  # type: ignore[method-assign]
        found = await asyncio.gather(*[collect(fleet, each) for each in offline])  # type: ignore[arg-type]
        assert all(outputs[-1].finish_reason is FinishReason.LENGTH for outputs in found)
        assert most <= 4, "half of six lines each, and a little more for the faster one"
        assert sum(held(fleet)) == 20 and min(held(fleet)) >= 2  # by their pace, which a busy machine changes


def _as_line(asked: Any) -> Any:
    return replace(asked, request_class=RequestClass.OFFLINE, final_only=True)


async def test_what_no_engine_takes_is_raised_here(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, "", "") as fleet:
        with pytest.raises(InvalidRequestError):
            await fleet.submit([request("a"), request("too long", prompt=500)])
        stream = await submit_one(fleet, request("a", max_tokens=400))
        with pytest.raises(InvalidRequestError, match="already running"):
            await submit_one(fleet, request("a"))
        await anext(stream)
        fleet.abort("a", FinishReason.STOP)
        fleet.abort("nobody")
        assert [output async for output in stream][-1].finish_reason is FinishReason.STOP


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 10.0])
async def test_engines_are_renewed_in_turn_and_nothing_is_refused(
    seconds: float, tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether chats end before or go on elsewhere; there is always an engine that takes more."""
    monkeypatch.setattr("engine.fleet.client.LEAVE_SECONDS", seconds)
    model = tmp_path / "model"
    await asyncio.to_thread(model.mkdir)
    async with fleet_of(tmp_path, "", "", config=replace(CONFIG, model=str(model)), loaded=True) as fleet:
        numbers = [(tmp_path / f"engine-{number}.pid").read_text() for number in range(2)]
        asked = asyncio.create_task(answers(fleet))
        await asyncio.sleep(0)
        renewed = asyncio.create_task(fleet.renew(anyway=True))
        more = 0
        while not renewed.done():
            assert fleet.state is EngineState.READY
            assert await ended(fleet, f"m{more:03}", max_tokens=3) is FinishReason.LENGTH
            more += 1
        assert (await renewed).count("another engine process runs") == 2
        assert await asked == undisturbed
        assert (await fleet.stats()).restarts == {"renewed": 2}
        assert not {(tmp_path / f"engine-{number}.pid").read_text() for number in range(2)} & set(numbers)
        assert "have not changed" in await fleet.renew(), "nothing has changed on disk"


async def test_the_command_tells_the_server_that_holds_the_folder(tmp_path: Path) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(RESTART, told.set)
    with pytest.raises(ConfigError, match="no server"):
        restart(str(tmp_path))
    folder = await asyncio.to_thread(open_state, tmp_path)
    try:
        assert str(os.getpid()) in restart(str(tmp_path))
        await told.wait()
    finally:
        folder.close_now()
        asyncio.get_running_loop().remove_signal_handler(RESTART)
    with pytest.raises(ConfigError, match="no server"):
        restart(str(tmp_path))


async def test_a_fleet_starts_whole_or_not_at_all(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(EngineUnavailableError):
        async with fleet_of(tmp_path, "", "ready:1:1-9"):
            pass
    assert children() <= before


@pytest.mark.slow
async def test_the_cache_of_an_engine_that_was_started_again_is_forgotten(tmp_path: Path) -> None:
    model = tmp_path / "model"
    await asyncio.to_thread(model.mkdir)
    config = replace(CONFIG, model=str(model))
    async with fleet_of(tmp_path, "", "", config=config, loaded=True) as fleet:
        home, known = fleet._members[0], [1, 2, 3]
        home.prefixes.add(known, 3)
        await fleet.renew(anyway=True)
        assert home.prefixes.num_hits(known) == 0
        home.prefixes.add(known, 3)
        before = (tmp_path / f"engine-{home.number}.pid").read_text()
        os.kill(int(before), signal.SIGKILL)
        await until(lambda: home.engine.is_up and (tmp_path / f"engine-{home.number}.pid").read_text() != before)
        assert home.prefixes.num_hits(known) == 0
