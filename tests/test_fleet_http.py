"""Clients and batches over HTTP before several engines, which die: clients see no more than a pause."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from batch_tools import eventually
from fake_engine import Served
from support.http import get
from support.lazy import openai
from test_process_http import CHILD, CONFIG, everything, served_by

from engine.client import EngineState
from engine.fleet.client import FleetClient
from engine.process.client import EngineProcess
from engine.process.launcher import ProcessOptions
from engine.process.requests import RestartPolicy
from engine.text.tokenizer import Tokenizer

DEATHS = ("before:2:1-1,frame:3:2-2,hang:5:3-3", "after:4:1-1,loop:3:2-2")


@asynccontextmanager
async def server(
    tokenizer: Tokenizer, root: Path, *faults: str
) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI, FleetClient]]:
    def make(number: int, changed: Any) -> EngineProcess:
        own = root / str(number)
        own.mkdir(parents=True)
        command = [sys.executable, "-P", str(CHILD), str(own), faults[number]]
        policy = RestartPolicy(max_deaths=99, max_delay=0.05)
        return EngineProcess(CONFIG, ProcessOptions(command=command, policy=policy, changed=changed, waits=False))

    fleet = await asyncio.to_thread(FleetClient, make, len(faults), lines=8, patience=60.0)
    async with served_by(fleet, tokenizer, root) as (served, client):
        yield served, client, fleet


@pytest.mark.slow
async def test_streams_and_a_batch_while_engines_die(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with server(tokenizer, tmp_path / "calm", "") as (_, client, _):
        expected = await everything(client, "fake-model")
    async with server(tokenizer, tmp_path / "storm", *DEATHS) as (served, client, fleet):
        assert await everything(client, "fake-model") == expected
        routed = [member.routed for member in fleet._members]
        assert min(routed) > 0 and sum(routed) >= 30 + 7
        await eventually(lambda: all(member.engine.is_up for member in fleet._members))
        page = (await get(served, "/metrics")).text
        for number, count in enumerate(routed):
            assert f'tidemill_engine_routed_requests_total{{engine="{number}"}} {count:.1f}' in page
        assert "tidemill_device_units 800.0" in page, "two pools of 400 units"


async def test_the_fleet_is_ready_while_one_engine_is(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The first engine dies again and again before it is ready."""
    async with server(tokenizer, tmp_path, "ready:1:2-99", "") as (served, client, fleet):
        ready = (await get(served, "/ready")).json()
        assert [engine["state"] for engine in ready["engines"]] == ["ready", "ready"]
        fleet._members[0].engine.kill()
        await eventually(lambda: fleet._members[0].engine.state is EngineState.DEGRADED)
        answer = await get(served, "/ready")
        assert answer.status_code == 200
        first, second = answer.json()["engines"]
        assert first["state"] == "degraded" and "started again" in first["trouble"] and second["state"] == "ready"
        page = (await get(served, "/metrics")).text
        assert 'tidemill_engine_ready{engine="0"} 0.0' in page and 'tidemill_engine_ready{engine="1"} 1.0' in page
        snapshot = (await get(served, "/dashboard/history")).json()["snapshots"][-1]
        assert len(snapshot["engines"]) == 2 and snapshot["ready"]
        answered = await client.completions.create(model="fake-model", prompt="hi", max_tokens=2)
        assert answered.usage is not None


@pytest.mark.slow
async def test_a_server_with_several_engines_drains(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with server(tokenizer, tmp_path, "", "") as (_, client, fleet):
        streams = [
            await client.completions.create(
                model="fake-model", prompt=[300, n], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            for n in range(4)
        ]
        await asyncio.gather(*[anext(stream) for stream in streams])
        stopping = asyncio.create_task(fleet.stop(30.0))
        reasons = [
            [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices][-1] for stream in streams
        ]
        await stopping
        assert reasons == ["length"] * 4
