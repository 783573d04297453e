"""What chats have computed is found on the disk by the process that takes over on purpose; real processes, a real disk
tier, a tiny decoder."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk_child import DISK_UNITS
from test_disk_tier import turn_request
from test_process import CONFIG, children, collect, until

from engine.api import EngineRequest, FinishReason
from engine.fleet.client import FleetClient
from engine.process.client import EngineProcess
from engine.process.policy import RestartPolicy

CHILD = Path(__file__).parent / "disk_child.py"
HISTORY = 32
"""Tokens of a chat's prompt in full blocks."""


def disk_engine(folder: Path, fault: str = "", disk_space: float = 1.0, **options: Any) -> EngineProcess:
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    config = replace(CONFIG, model=str(model), disk_space=disk_space)
    command = [sys.executable, "-P", str(CHILD), str(folder), fault]
    return EngineProcess(config, command=command, policy=RestartPolicy(max_delay=0.05), **options)


@asynccontextmanager
async def running(engine: EngineProcess | FleetClient) -> AsyncIterator[Any]:
    """Loaded and started; at the end no process is left."""
    before = children()
    await asyncio.to_thread(engine.load, lambda _planned: None)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
    assert children() <= before


async def answer(engine: Any, request: EngineRequest) -> list[int]:
    outputs = await collect(engine, request)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    return [token for output in outputs for token in output.token_ids]


async def hits(engine: Any) -> int:
    return (await engine.stats()).prefix_disk_hit_tokens  # type: ignore[no-any-return]


@pytest.mark.parametrize("disk_space", [1.0, 0.0])
async def test_a_turn_after_a_planned_restart_finds_its_history(tmp_path: Path, disk_space: float) -> None:
    async with running(disk_engine(tmp_path, disk_space=disk_space)) as engine:
        expected = await answer(engine, turn_request("first"))
        assert "another engine process" in await engine.renew(anyway=True)
        assert await answer(engine, turn_request("second")) == expected
        assert await hits(engine) == (HISTORY if disk_space else 0)
        assert (await engine.stats()).restarts == {"renewed": 1}


async def test_streams_go_on_from_what_was_written_of_them(tmp_path: Path) -> None:
    """Of requests that run and that wait for the engine nobody is told anything."""
    asked = [replace(turn_request(f"chat{number}", 3 + 7 * number), sampling=LONG) for number in range(3)]
    async with running(disk_engine(tmp_path / "calm")) as engine:
        expected = [await answer(engine, request) for request in asked]
    async with running(disk_engine(tmp_path / "renewed", "steps")) as engine:
        engine._launcher.hold = nothing
        streams = [(await engine.submit([request]))[0] for request in asked]
        firsts = [(await anext(stream)).token_ids for stream in streams]
        renewed = asyncio.create_task(engine.renew(anyway=True))
        late = asyncio.create_task(answer(engine, turn_request("late", 50)))
        rests = [[token for output in [o async for o in stream] for token in output.token_ids] for stream in streams]
        assert [[*first, *rest] for first, rest in zip(firsts, rests, strict=True)] == expected
        assert len(await late) == 4 and "another engine process" in await renewed
        read = (await engine.stats()).cache_units["disk_read"]
        assert read >= 2 * 3 * HISTORY // 4, "K and V of their prompts"


async def nothing() -> None:
    """The next process is started when the one before has ended: answers would have ended till it is ready."""


LONG = replace(turn_request("any").sampling, max_tokens=24)


@pytest.mark.parametrize(("fault", "found"), [("slow", HISTORY), ("never", 0), ("full", 0)])
async def test_what_is_still_being_written_is_waited_for_but_not_for_long(
    tmp_path: Path, fault: str, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have ended long before a slow disk has; a child that does not end in time is killed."""
    async with running(disk_engine(tmp_path, fault)) as engine:
        expected = await answer(engine, turn_request("first"))
        child, killed = engine._child, []
        assert child is not None
        kill = child.kill

        def watched() -> None:
            killed.append(child.process.poll())
            kill()

        monkeypatch.setattr(child, "kill", watched)
        await engine.renew(anyway=True)
        assert (None in killed) == (fault == "never"), "one that has written all ends by itself"
        assert (await engine.stats()).restarts == {"renewed": 1} and not engine._policy._deaths
        assert await answer(engine, turn_request("second")) == expected
        assert await hits(engine) == found and (await engine.stats()).failed_steps == 0


@pytest.mark.parametrize("number", [1, 4, 7])
async def test_a_kill_amid_the_writing_corrupts_nothing(tmp_path: Path, number: int) -> None:
    async with running(disk_engine(tmp_path, f"kill-{number}")) as engine:
        expected = await answer(engine, turn_request("first"))
        await engine.renew(anyway=True)
        assert (await engine.stats()).restarts == {"renewed": 1}
        assert await answer(engine, turn_request("second")) == expected
        assert await hits(engine) == 4 * (number // 2), "blocks whose parts are all there, if perhaps not whole"
        assert (await engine.stats()).failed_steps == (number % 2 == 0), "half of V is as none"
        assert not engine._policy._deaths


async def test_a_damaged_slot_is_a_miss(tmp_path: Path) -> None:
    engine = disk_engine(tmp_path)
    path = tmp_path / "disk" / "units-0"
    async with running(engine):
        expected = await answer(engine, turn_request("first"))
        start, damaged = engine._launcher.start, []

        async def damage() -> Any:
            data = bytearray(path.read_bytes())
            slot = (len(data) - 4096) // (DISK_UNITS + 1)
            for at in range(4096, len(data), slot):
                damaged.append(any(data[at : at + 24]))
                data[at + 100] ^= 1
            path.write_bytes(data)
            return await start()

        engine._launcher.start = damage  # type: ignore[method-assign]
        await engine.renew(anyway=True)
        assert sum(damaged) >= 2 * HISTORY // 4, "that much was written"
        assert await answer(engine, turn_request("second")) == expected
        assert (await engine.stats()).failed_steps >= 1


async def test_a_shutdown_amid_the_writing_ends_all(tmp_path: Path) -> None:
    async with running(disk_engine(tmp_path, "slow")) as engine:
        await answer(engine, turn_request("first"))
        renewed = asyncio.create_task(engine.renew(anyway=True))
        await until(lambda: engine._keep_until is not None)
        await engine.stop()
        await renewed


async def test_others_of_a_fleet_go_on_while_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its requests, at once."""
    monkeypatch.setattr("engine.fleet.client.LEAVE_SECONDS", 0.0)
    faults = ("slow", "")

    def make(number: int, changed: Any) -> EngineProcess:
        return disk_engine(tmp_path / str(number), faults[number], changed=changed, waits=False)

    async with running(await asyncio.to_thread(FleetClient, make, 2, router="prefix")) as fleet:
        first, second = (member.engine for member in fleet._members)
        fleet._members[1].away = True
        stream = (await fleet.submit([replace(turn_request("chat"), sampling=LONG)]))[0]
        tokens = list((await anext(stream)).token_ids)
        fleet._members[1].away = False
        assert first.num_online == 1
        child = first._child
        renewed = asyncio.create_task(fleet._renew(fleet._members[0], anyway=True))
        tokens += [token for output in [output async for output in stream] for token in output.token_ids]
        assert child.process.poll() is None, "the answer has ended, and the process still writes"
        assert len(tokens) == LONG.max_tokens and fleet._members[0].moved == 1
        await renewed
        assert second.is_up
