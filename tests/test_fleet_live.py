"""Two engines of the demo model behind `tidemill serve`, as a user starts it, killed at random moments. Slow.

`FLEET_KILLS` says how often, beside how many lines `FLEET_LINES`; `FLEET_SEED` makes other moments.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_tools import check_ended, jsonl, line, submit
from support.lazy import openai
from test_soak import ended, ready_url

from benchmarks.chaos.child import VARIABLE

MODEL = "tidemill-demo"
KILLS = int(os.environ.get("FLEET_KILLS", "4"))
SEED = int(os.environ.get("FLEET_SEED", "0"))
LINES = int(os.environ.get("FLEET_LINES", "500"))


@contextmanager
def fleet_server(folder: Path) -> Iterator[str]:
    """Its URL. It may die as often as the test wants."""
    log = folder / "log"
    command = [
        sys.executable,
        "-m",
        "benchmarks.chaos.serve",
        "serve",
        "--port",
        "0",
        "--state-dir",
        str(folder / "state"),
    ]
    command += ["--engines", "2", "--profile-seconds", "0", "--dtype", "float32"]
    command += ["--num-gpu-blocks-override", "600", "--slo", "ttft_p99=100s,tbt_p99=100s"]
    with log.open("wb") as output:
        environment = {**os.environ, VARIABLE: str(folder), "PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield ready_url(process, log)
            assert process.poll() is None, log.read_text()[-4000:]
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


async def chats(client: openai.AsyncOpenAI, stop: asyncio.Event, number: int) -> list[str]:
    """One chat after the other; how each ended."""
    ends = []
    while not stop.is_set():
        reason = ""
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Count from {number} to 20"}],
            max_tokens=60,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            reason = (chunk.choices[0].finish_reason if chunk.choices else None) or reason
        ends.append(reason)
    return ends


async def kill_one(state: Path, number: int, dead: dict[int, str]) -> None:
    """Its process of now, once there is one that was not killed yet."""
    path = state / f"engine-{number}.pid"
    while (text := await asyncio.to_thread(path.read_text)) == dead.get(number):  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.05)
    dead[number] = text
    os.kill(int(text), signal.SIGKILL)


@pytest.mark.manual
@pytest.mark.timeout(1800)
async def test_nothing_is_lost_or_doubled_while_engines_are_killed(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    with fleet_server(tmp_path) as url:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client,
            httpx.AsyncClient(base_url=url, timeout=60) as http,
        ):
            assert [engine["state"] for engine in (await http.get("/ready")).json()["engines"]] == ["ready"] * 2
            lines = (
                line(i, model=MODEL, prompt=f"Line {i} says", max_tokens=40, ignore_eos=True) for i in range(LINES)
            )
            batch = await submit(client, jsonl(lines))
            stop = asyncio.Event()
            running = [asyncio.create_task(chats(client, stop, number)) for number in range(3)]
            dead: dict[int, str] = {}
            for _ in range(KILLS):
                await asyncio.sleep(dice.uniform(0.0, 3.0))
                await kill_one(tmp_path / "state", dice.randrange(2), dead)
            last = await ended(client, batch.id)
            stop.set()
            ends = [reason for found in await asyncio.gather(*running) for reason in found]
            rows, errors = await check_ended(client, last, [f"id-{i}" for i in range(LINES)])
            assert len(rows) == LINES and not errors
            assert ends and set(ends) == {"length"}, "every chat ended with its whole answer"
            page: Any = (await http.get("/metrics")).text
            assert f'tidemill_engine_restarts_total{{cause="killed"}} {KILLS}.0' in page
            for number in range(2):
                assert f'tidemill_engine_routed_requests_total{{engine="{number}"}} 0.0' not in page
