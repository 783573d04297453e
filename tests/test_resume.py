"""Open requests go to the next process in frames of bounded size, however many and long they are."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from driver import until
from test_process import answers, engine_process, request, undisturbed, until_idle

from engine.api import EngineRequest, SamplingParams
from engine.errors import InvalidRequestError
from engine.process import client, frames, life
from engine.process.client import EngineProcess
from engine.process.launcher import ProcessOptions
from engine.process.requests import OpenRequest
from engine.stream import RequestStream

__all__ = ["undisturbed"]


class Wire:
    """In the place of the connection: the requests to send."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.names: list[str] = []
        self.unsent = 0

    def send(self, message: frames.Message) -> None:
        frame = frames.encode(message)
        self.sizes.append(len(frame))
        if isinstance(message, frames.Resume):
            self.names += [each.request_id for each in message.requests]


def resumable(engine: EngineProcess, name: str, tokens: int) -> OpenRequest:
    asked = EngineRequest(name, (127_999,) * tokens, SamplingParams(max_tokens=1))
    entry = OpenRequest(asked, RequestStream.of(asked, lambda: None), 0.0, accepted=True)
    engine._requests.add(entry)
    return entry


async def test_what_is_open_may_be_more_than_a_frame_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 500_000)
    monkeypatch.setattr(life, "TURN_TOKENS", 200_000)
    engine, wire = EngineProcess(client.EngineConfig(), ProcessOptions()), Wire()
    engine._link._connection = wire  # type: ignore[assignment]
    entries = [resumable(engine, f"r{n}", 90_000 if n % 4 == 0 else 700) for n in range(40)]
    with pytest.raises(frames.FrameError):
        wire.send(frames.Resume(tuple(entry.resumed() for entry in entries)))
    engine._link.resume(entries)
    first = len(wire.names)
    assert 0 < first < 40, "the event loop goes on in between"
    engine.abort("r39")
    wire.unsent = life.MAX_UNSENT
    await asyncio.sleep(0.02)
    assert len(wire.names) == first, "nor is more kept than the process reads"
    wire.unsent = 0
    await until(lambda: len(wire.names) >= 39)
    assert wire.names == [f"r{n}" for n in range(39)], "in order, each once, but the one that was given up"
    assert max(wire.sizes) < 500_000 and len(list(engine.unreported)) == 39


async def test_nothing_more_is_sent_to_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "TURN_TOKENS", 100)
    engine, wire = EngineProcess(client.EngineConfig(), ProcessOptions()), Wire()
    engine._link._connection = wire  # type: ignore[assignment]
    engine._link.resume([resumable(engine, f"r{n}", 101) for n in range(200)])
    sent = len(wire.names)
    engine.down()
    await asyncio.sleep(0.01)
    assert 0 < sent == len(wire.names) < 200


@pytest.mark.slow
async def test_answers_are_the_same_however_the_frames_are_cut(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "FRAME_REQUESTS", 2)
    monkeypatch.setattr(life, "TURN_TOKENS", 30)
    async with engine_process(tmp_path / "children", "after:4,before:9") as engine:
        assert await answers(engine) == undisturbed
        await until_idle(engine)


async def test_a_request_that_fits_no_frame_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_process(tmp_path / "children") as engine:
        monkeypatch.setattr(frames, "MAX_FRAME", 1000)
        with pytest.raises(InvalidRequestError, match="too large"):
            await engine.submit([request("a", prompt=400)])
        monkeypatch.undo()
        await until_idle(engine)


def test_a_frame_ends_in_time_for_the_largest_request() -> None:
    """A body of 4 MiB names two million token ids at most."""
    largest = EngineRequest("a", (200_000,) * (life.FRAME_TOKENS + (1 << 21)), SamplingParams(max_tokens=1))
    assert len(msgspec.msgpack.encode(largest)) < frames.MAX_FRAME // 8
