"""Recordings of the last steps: how they are kept, read and shown, and when."""

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from driver import submit_one, until
from test_process import engine_process

from engine import flight
from engine.api import EngineRequest, SamplingParams
from engine.client import EngineInfo
from engine.errors import ConfigError
from engine.flight import Completed, Facts, FailedStep, Flights, Idle, Launched
from engine.process.client import EngineProcess
from engine.scheduling.output import Chunk
from tidemill.cli import main
from tidemill.commands.state import table

ENTRIES = [
    Launched(96.0, 7, ["a", "b"], (Chunk(0, 9, 1, True), Chunk(1, 0, 64, False)), (("b", 100),), 0, 0.02, 1),
    Completed(97.0, 7, 1, 0.025),
    Idle(97.5),
    Launched(98.0, 8, ["a"], (Chunk(0, 10, 1, True),)),
    FailedStep(98.5, 8, "RuntimeError"),
    Launched(99.0, 9, ["b"], (Chunk(1, 64, 36, True),), (), 2),
]


def facts(at: float = 1e9, cause: str = "killed") -> Facts:
    return Facts(cause, at, 100.0, "demo", "float32", "cpu")


def test_a_recording_is_read_as_it_was_kept_and_only_its_owner_may(tmp_path: Path) -> None:
    path = flight.save(tmp_path / "flights", facts(), ENTRIES)
    assert flight.load(path) == flight.Recording(facts(), list(ENTRIES))
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_the_last_recordings_are_kept(tmp_path: Path) -> None:
    paths = [flight.save(tmp_path, facts(1e9 + 0.5 * n), ENTRIES) for n in range(flight.KEEP + 3)]
    assert sorted(tmp_path.iterdir()) == paths[3:]


def test_what_is_no_recording_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad"
    for content in (b"", b"{}", b"[1]", b'{"type":"Facts"}\n[', b"\xff"):
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match="not a flight recording"):
            flight.load(bad)
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_table_says_what_each_step_held_and_who_was_in_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = flight.save(tmp_path, facts(), ENTRIES)
    assert main(["replay", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == list(table(flight.load(path)))
    assert lines[0] == "killed: demo, float32 on cpu; 6 entries"
    rows = [line.split() for line in lines[2:6]]
    assert rows[0] == ["7", "-4.000", "s", "2", "1", "1", "65", "20.0", "ms", "25.0", "ms"]
    assert rows[1] == ["idle", "-2.500", "s"]
    assert rows[2][-1] == "RuntimeError" and rows[3][-2:] == ["no", "end"]
    assert lines[6:] == ["in the last steps: b, up to token 100"]


def recorded_process(folder: Path, faults: str) -> AbstractAsyncContextManager[EngineProcess]:
    return engine_process(folder / "children", faults, flights=Flights(folder / "flights", "scripted"))


async def kept(folder: Path, number: int) -> list[flight.Recording]:
    """So many recordings, once they are there."""
    while True:
        names = await asyncio.to_thread(lambda: sorted(folder.glob(f"flights/*{flight.SUFFIX}")))
        if len(names) >= number:
            return [flight.load(name) for name in names]
        await asyncio.sleep(0.01)


async def test_what_ran_when_the_process_was_killed_is_kept(tmp_path: Path) -> None:
    prompt = (201, 202, 203)
    async with recorded_process(tmp_path, "") as engine:
        asked = EngineRequest("asked", prompt, SamplingParams(max_tokens=300), adapter=1)
        stream = await submit_one(engine, asked)
        for _ in range(3):
            await anext(stream)
        os.kill(int((tmp_path / "engine.pid").read_text()), signal.SIGKILL)
        (recording,) = await kept(tmp_path, 1)
        assert recording.facts.cause == "killed" and recording.facts.model == "scripted"
        steps = [entry for entry in recording.entries if isinstance(entry, Launched)]
        assert steps[-1].request_ids == ["asked"] and steps[-1].chunks[0].start >= len(prompt)
        assert steps[-1].adapted == 1 and not steps[0].adapted, "the first one is of the warm-up"


async def test_a_failed_step_is_kept_although_the_process_lives(tmp_path: Path) -> None:
    async with recorded_process(tmp_path, "oom:3") as engine:
        stream = await submit_one(engine, EngineRequest("asked", (1, 2, 3), SamplingParams(max_tokens=9)))
        assert len([output async for output in stream]) == 9
        (recording,) = await kept(tmp_path, 1)
        assert recording.facts.cause == "failed_step"
        assert any(isinstance(entry, FailedStep) and entry.error == "MemoryError" for entry in recording.entries)


async def test_a_disk_that_is_full_costs_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flights").write_text("no folder")
    flights = Flights(tmp_path / "flights", "demo")
    info = EngineInfo(512, 405, frozenset(), "scripted", "none", "none", 0)
    flights.keep("killed", info, ENTRIES)
    await until(lambda: "could not be written" in caplog.text)
