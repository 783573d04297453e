"""Clients and batches over HTTP while the engine process dies: clients see no more than a pause."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from batch_tools import FAST, check_ended, client_of, eventually, jsonl, line, open_folder, results_of, submit, until
from fake_engine import Served, serve
from fixtures import refuse_blocking
from support.http import get
from support.lazy import openai
from test_process import until_idle

from engine.client import EngineState
from engine.config import EngineConfig
from engine.process.client import EngineProcess
from engine.process.launcher import ProcessOptions
from engine.process.requests import RestartPolicy
from engine.text.tokenizer import Tokenizer

CHILD = Path(__file__).parent / "scripted_child.py"
CONFIG = EngineConfig(slo="ttft_p99=60s", max_queue_time="none")
LINES = 30
POISON = 399
WITHOUT_DEATH = ("short", "token", "oom", "learner", "planner")
EVERY_POINT = ("before", "after", "frame", "hang", "loop", "device", "ready", *WITHOUT_DEATH)
NO_DEATHS, DEATHS = "", "before:2:1-1,frame:3:2-2,after:4:3-3,hang:5:4-4"


@asynccontextmanager
async def served_by(engine: Any, tokenizer: Tokenizer, root: Path) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    await asyncio.to_thread(engine.load, lambda _planned: None)  # as `serve` does before there is an app
    folder = await open_folder(root / "state")
    with refuse_blocking():
        async with (
            serve(engine, tokenizer, None, folder=folder, batch_limits=FAST) as served,
            client_of(served, timeout=120) as client,
        ):
            yield served, client


@asynccontextmanager
async def server(
    tokenizer: Tokenizer, root: Path, faults: str, config: EngineConfig = CONFIG
) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    await asyncio.to_thread((root / "children").mkdir, parents=True)
    command = [sys.executable, "-P", str(CHILD), str(root / "children"), faults]
    policy = RestartPolicy(max_deaths=99, max_delay=0.05)
    options = ProcessOptions(command=command, pid_file=root / "engine.pid", policy=policy)
    async with served_by(EngineProcess(config, options), tokenizer, root) as (served, client):
        yield served, client


async def everything(client: openai.AsyncOpenAI, model: str) -> tuple[list[Any], dict[str, Any]]:
    """Streams of every kind beside a batch: what each client got, and every row of the batch."""
    batch = await submit(client, jsonl(line(i, prompt=[200, i, 7], max_tokens=5, seed=i) for i in range(LINES)))

    async def stream(number: int, **options: Any) -> list[Any]:
        got: dict[int, list[Any]] = {}
        usage = None
        chunks = await client.completions.create(
            model=model, prompt=[300, number, 9, 9], max_tokens=20, stream=True, stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True}, **options,
        )  # fmt: skip
        async for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                ids = (choice.model_extra or {}).get("token_ids") or []
                entry = got.setdefault(choice.index, [[], "", None])
                entry[0] += ids
                entry[1] += choice.text
                entry[2] = choice.finish_reason or entry[2]
        assert usage is not None
        return [sorted(got.items()), usage.completion_tokens, usage.prompt_tokens]

    found = await asyncio.gather(
        stream(1, temperature=0),
        stream(2, seed=7, n=3),
        stream(3, seed=1, logprobs=2),
        stream(4, frequency_penalty=1.0, presence_penalty=0.5, seed=4),
        stream(5, seed=5, stop=["e", "a"]),
    )
    ended = await until(client, batch.id)
    await check_ended(client, ended, [f"id-{i}" for i in range(LINES)])
    rows, errors = await results_of(client, ended)
    assert not errors
    return list(found), {name: row["response"]["body"]["choices"] for name, row in rows.items()}


@pytest.mark.slow
async def test_streams_and_a_batch_while_the_engine_dies_four_times(
    tokenizer: Tokenizer, tmp_path: Path, calm: tuple[list[Any], dict[str, Any]]
) -> None:
    async with server(tokenizer, tmp_path / "storm", DEATHS) as (served, client):
        assert await everything(client, "fake-model") == calm
        page = (await get(served, "/metrics")).text
        assert 'tidemill_engine_restarts_total{cause="killed"} 3.0' in page
        assert 'tidemill_engine_restarts_total{cause="hung"} 1.0' in page
        assert "tidemill_loop_lag_seconds_count" in page
        assert (await get(served, "/ready")).status_code == 200


@pytest.fixture(scope="module")
def calm(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Any]]:
    async def run() -> tuple[list[Any], dict[str, Any]]:
        async with server(tokenizer, tmp_path_factory.mktemp("calm"), NO_DEATHS) as (_, client):
            return await everything(client, "fake-model")

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("point", EVERY_POINT)
async def test_streams_and_every_row_at_every_point(
    point: str, number: int, tokenizer: Tokenizer, tmp_path: Path, calm: tuple[list[Any], dict[str, Any]]
) -> None:
    """Stop strings and several choices included, and each row of the batch once."""
    faults = {"ready": f"after:4:1-1,ready:1:2-{number + 1}"}.get(point, f"{point}:{number}")
    async with server(tokenizer, tmp_path / "faulty", faults) as (served, client):
        assert await everything(client, "fake-model") == calm
        await until_idle(served.engine)
        assert any((await served.engine.stats()).restarts.values()) is (point not in WITHOUT_DEATH)


@pytest.mark.slow
async def test_a_poisoned_chat_and_a_poisoned_line_end_alone(
    tokenizer: Tokenizer, tmp_path: Path, calm: tuple[list[Any], dict[str, Any]]
) -> None:
    """They kill the engine whenever they run: more often than it may die."""
    async with server(tokenizer, tmp_path / "poison", f"poison:{POISON}:1-99") as (served, client):
        lines = jsonl(
            [
                line(0, prompt=[POISON, 5], max_tokens=9, ignore_eos=True),
                line(1, prompt=[200, 1, 7], max_tokens=5, seed=1),
            ]
        )
        batch = await submit(client, lines)
        chunks = await client.completions.create(
            model="fake-model", prompt=[POISON, 3], max_tokens=20, stream=True, extra_body={"ignore_eos": True}
        )
        everybody = asyncio.create_task(everything(client, "fake-model"))
        with pytest.raises(openai.APIError) as refused:
            async for _ in chunks:
                pass
        assert refused.value.code == "engine_error"
        assert await everybody == calm
        rows, errors = await results_of(client, await until(client, batch.id))
        assert list(rows) == ["id-1"] and list(errors) == ["id-0"]
        assert errors["id-0"]["response"]["body"]["error"]["code"] == "engine_error"
        await eventually(lambda: served.engine.state is EngineState.READY)


async def test_without_an_engine_the_server_lives_and_is_not_ready(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The next processes die before they are ready, for as long as the test wants."""
    config = EngineConfig(slo="ttft_p99=100ms")
    async with server(tokenizer, tmp_path / "down", "ready:1:2-99", config) as (served, client):
        os.kill(int((tmp_path / "down" / "engine.pid").read_text()), signal.SIGKILL)
        await eventually(lambda: served.engine.state is EngineState.DEGRADED)
        ready = await get(served, "/ready")
        assert ready.status_code == 503 and "started again" in ready.json()["error"]["message"]
        assert (await get(served, "/health")).status_code == 200
        assert (await get(served, "/metrics")).status_code == 200
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model="fake-model", prompt="hi", max_tokens=1)
        assert refused.value.status_code == 503 and "retry-after" in refused.value.response.headers
