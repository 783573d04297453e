"""A real `tidemill serve` under mixed lengths, bursts, disconnects and two tenants' batches for half an hour. Slow.

`SOAK_MINUTES` says how long the load lasts; `SOAK_SEED` makes another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
from batch_tools import check_ended, jsonl, line, submit
from support.lazy import openai

from benchmarks.live import num_open

MODEL = "tidemill-demo"
MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
LINES_PER_MINUTE = 5000 / 30
TENANTS = ("shop", "research")
LONGEST = 1900
MAX_OPEN = 24
NUM_BLOCKS = 2000
"""A small cache: its memory counts from when it is first written, and that should be before the first third ends."""
CONNECTS = 4
TERMINAL = {"completed", "failed", "expired", "cancelled"}


@dataclass(slots=True)
class Watched:
    """`memory`: resident kB of the server and its children, once a second. `done`: lines of each tenant's batch that
    are done, while both have some left. `ends`: how chats ended."""

    memory: list[int] = field(default_factory=list)
    done: list[tuple[int, ...]] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


@contextmanager
def child(folder: Path) -> Iterator[tuple[str, int]]:
    """A server as a user would start it; its URL and process id."""
    keys, log = folder / "keys", folder / "log"
    rows = [f"{hashlib.sha256(key_of(t).encode()).hexdigest()} {t} metrics requests=200 queued=400\n" for t in TENANTS]
    keys.write_text("".join(rows))
    keys.chmod(0o600)
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--state-dir", str(folder / "state")]
    command += ["--api-key-file", str(keys), "--profile-seconds", "5"]
    command += ["--num-gpu-blocks-override", str(NUM_BLOCKS)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield ready_url(process, log), process.pid
            assert process.poll() is None, log.read_text()[-4000:]
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Its address, from the log, once it takes requests."""
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        found = [word for word in log.read_text().split() if word.startswith("http://127.0.0.1:")]
        if found:
            url = found[0].rstrip("/.,")
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    return url
        time.sleep(0.2)


def resident(pid: int) -> int:
    """kB of a process and its children."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            fields = dict(row.split(":", 1) for row in entry.read_text().splitlines() if ":" in row)
            if pid in (int(fields["Pid"]), int(fields["PPid"])) and "VmRSS" in fields:
                total += int(fields["VmRSS"].split()[0])
    return total


async def chat(client: openai.AsyncOpenAI, dice: random.Random, ends: Counter[str]) -> None:
    """One online request to its end, or to where its client leaves. Nothing but a refusal may go wrong."""
    length = min(LONGEST, 8 + int(dice.expovariate(1 / 250)) if dice.random() < 0.95 else dice.randint(8, LONGEST))
    output, leaves = dice.randint(1, 60), dice.random() < 0.25
    patience, reason = dice.randint(0, 20), None
    prompt = [dice.randrange(10, 400) for _ in range(length)]
    try:
        async with await opened(client, prompt, output, ends) as stream:
            async for event in stream:
                reason = event.choices[0].finish_reason if event.choices else reason
                patience -= 1
                if leaves and patience < 0:
                    ends["left"] += reason is None
                    break
    except openai.RateLimitError as error:
        assert float(error.response.headers["retry-after"]) >= 0.0
        ends["refused"] += 1
        return
    if reason is not None:
        ends[reason] += 1
    else:
        assert leaves, "a stream ended without a reason"


async def opened(
    client: openai.AsyncOpenAI, prompt: list[int], output: int, ends: Counter[str]
) -> openai.AsyncStream[Any]:
    """A stream whose headers have come. As every client does, it connects again when a connection ended before them: a
    starved client may be silent for longer than a server waits for its first byte. Refusals are not tried again."""
    for _ in range(CONNECTS - 1):
        try:
            return await client.completions.create(model=MODEL, prompt=prompt, max_tokens=output, stream=True)
        except openai.APIConnectionError:
            ends["connected again"] += 1
    return await client.completions.create(model=MODEL, prompt=prompt, max_tokens=output, stream=True)


async def online(clients: list[openai.AsyncOpenAI], until: float, ends: Counter[str]) -> None:
    """Chats of both tenants, singly and in bursts, until then; returns when all have ended."""
    dice, room = random.Random(SEED), asyncio.Semaphore(MAX_OPEN)

    async def one(client: openai.AsyncOpenAI, own: random.Random) -> None:
        async with room:
            await chat(client, own, ends)

    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until:
            for _ in range(dice.randint(4, 12) if dice.random() < 0.1 else 1):
                group.create_task(one(dice.choice(clients), random.Random(dice.random())))
            await asyncio.sleep(dice.expovariate(1.0))


async def watch(pid: int, clients: list[openai.AsyncOpenAI], batches: list[str], watched: Watched) -> None:
    """Until cancelled."""
    while True:
        watched.memory.append(await asyncio.to_thread(resident, pid))
        patient = [client.with_options(max_retries=CONNECTS) for client in clients]
        states = [await client.batches.retrieve(name) for client, name in zip(patient, batches, strict=True)]
        if all(state.status == "in_progress" for state in states):
            watched.done.append(tuple(state.request_counts.completed for state in states if state.request_counts))
        await asyncio.sleep(1.0)


async def ended(client: openai.AsyncOpenAI, name: str) -> Any:
    while True:
        batch = await client.with_options(max_retries=CONNECTS).batches.retrieve(name)
        if batch.status in TERMINAL:
            return batch
        await asyncio.sleep(1.0)


@pytest.mark.manual
@pytest.mark.timeout(MINUTES * 60 * 4 + 600)
async def test_half_an_hour_of_everything(tmp_path: Path) -> None:
    watched, dice = Watched(), random.Random(SEED)
    lengths = [min(LONGEST, 8 + int(dice.expovariate(1 / 150))) for _ in range(int(LINES_PER_MINUTE * MINUTES / 2))]
    async with AsyncExitStack() as stack:
        url, pid = stack.enter_context(child(tmp_path))
        clients = [
            await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key_of(tenant), max_retries=0, timeout=600)
            )
            for tenant in TENANTS
        ]
        ids = [f"id-{number}" for number in range(len(lengths))]
        batches = []
        for client in clients:
            dice.shuffle(lengths)
            lines = [
                line(number, model=MODEL, prompt=[dice.randrange(10, 400) for _ in range(length)], max_tokens=20)
                for number, length in enumerate(lengths)
            ]
            batches.append((await submit(client, jsonl(lines))).id)
        watching = asyncio.create_task(watch(pid, clients, batches, watched))
        await online(clients, time.monotonic() + 60 * MINUTES, watched.ends)
        ends = [await ended(client, name) for client, name in zip(clients, batches, strict=True)]
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        print("chats", dict(watched.ends), "lines of both", watched.done[-1:], "kB by minute", watched.memory[::60])
        for client, batch in zip(clients, ends, strict=True):
            output, errors = await check_ended(client, batch, ids)
            assert len(output) == len(ids) and not errors
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key_of(TENANTS[0])}"}) as reader:
            assert num_open((await reader.get(f"{url}/metrics")).text) == 0
    assert watched.ends["length"] + watched.ends["stop"] > 0
    shop, research = watched.done[-1]
    assert abs(shop - research) <= 0.1 * max(shop, research, 50), watched.done[-1]
    third = len(watched.memory) // 3
    early, late = median(watched.memory[third : 2 * third]), median(watched.memory[2 * third :])
    assert late <= 1.05 * early, watched.memory
