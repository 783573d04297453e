"""The part `gateway`: SIGKILL of the gateway in every phase of a batch, and the state after the next start."""

import asyncio
import json
import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import aiohttp

from benchmarks.chaos import load
from benchmarks.chaos.promises import Promise, Scale, none_of
from benchmarks.chaos.server import Server, start

UPLOAD_BYTES, WAIT_SECONDS = 20_000_000, 180.0


@dataclass(slots=True)
class Killed:
    """One server that is killed again and again. `prompts` and `texts`: of the lines; `harm`: by kind."""

    server: Server
    dice: random.Random
    prompts: Sequence[list[int]]
    texts: Sequence[str]
    lines: int
    harm: Counter[str] = field(default_factory=Counter)

    async def in_phase(self, phase: str) -> None:
        """Kill the gateway in this phase, start it again, and count."""
        async with self.server.session(seconds=WAIT_SECONDS) as session:
            batches, files = await PHASES[phase](self, session)
        await asyncio.to_thread(self.server.begin)
        async with self.server.session(seconds=WAIT_SECONDS) as session:
            for file in files:
                async with session.get(f"/v1/files/{file}/content") as response:
                    self.harm[f"{phase}: acknowledged files lost"] += response.status != 200
            for batch in batches:
                await self._count(session, phase, batch)

    def kill(self) -> None:
        self.server.kill()

    async def _count(self, session: aiohttp.ClientSession, phase: str, batch: str) -> None:
        async with session.get(f"/v1/batches/{batch}") as response:
            if response.status != 200:
                self.harm[f"{phase}: acknowledged batches lost"] += 1
                return
        state = await load.wait_batch(session, batch, time.monotonic() + WAIT_SECONDS)
        rows, errors = await load.read_rows(session, state)
        counts, used = (
            state["request_counts"],
            sum(row["response"]["body"]["usage"]["completion_tokens"] for row in rows),
        )
        total = counts["total"]
        names = [str(i) for i in range(total)]
        texts = [row["response"]["body"]["choices"][0]["text"] for row in rows]
        wrong = sum(
            text != self.texts[int(row["custom_id"]) % len(self.texts)] for row, text in zip(rows, texts, strict=True)
        )
        wanted = {"completed", "cancelled"} if phase == "cancelling" else {"completed"}
        self.harm[f"{phase}: batches that are {state['status']}"] += state["status"] not in wanted
        self.harm[f"{phase}: lines without one row"] += load.miscounted(names, rows + errors)
        self.harm[f"{phase}: error rows"] += len(errors) if state["status"] == "completed" else 0
        self.harm[f"{phase}: rows with differing text"] += wrong
        failed = [row for row in errors if (row["error"] or {}).get("code") != "batch_cancelled"]
        self.harm[f"{phase}: wrong counts"] += (counts["completed"], counts["failed"]) != (len(rows), len(failed))
        self.harm[f"{phase}: wrong usage"] += state["usage"]["output_tokens"] != used

    async def submit(self, session: aiohttp.ClientSession) -> str:
        return await load.submit_batch(session, self.prompts, self.lines)

    async def until(self, session: aiohttp.ClientSession, batch: str, statuses: set[str], completed: int = 0) -> None:
        """Wait for one of `statuses` or a later one, and for `completed` lines."""
        while True:
            async with session.get(f"/v1/batches/{batch}") as response:
                state = await response.json()
            done = state["request_counts"]["completed"]
            if state["status"] in load.TERMINAL or (state["status"] in statuses and done >= completed):
                return
            await asyncio.sleep(0.001)

    def left_over(self) -> None:
        """Count unexplained files and rows once all batches have ended. The server has stopped."""
        state = self.server.state
        with closing(sqlite3.connect(state / "tidemill.db")) as known:
            files = {row[0] for row in known.execute("SELECT id FROM files WHERE deleted_at IS NULL")}
            lines = known.execute("SELECT count(*) FROM lines").fetchone()[0]
            check = known.execute("PRAGMA integrity_check").fetchone()[0]
        bodies = set(os.listdir(state / "files"))
        self.harm["temporary files left over"] += len(os.listdir(state / "tmp"))
        self.harm["journals left over"] += len(os.listdir(state / "journals"))
        self.harm["bodies left over"] += len(bodies - files)
        self.harm["bodies missing"] += len(files - bodies)
        self.harm["rows of lines left over"] += lines
        self.harm[f"database: {check}"] += check != "ok"


Work = tuple[Sequence[str], Sequence[str]]
"""Acknowledged batches and files."""


async def _validating(killed: Killed, session: aiohttp.ClientSession) -> Work:
    batch = await killed.submit(session)
    await asyncio.sleep(killed.dice.uniform(0.0, 0.05))
    killed.kill()
    return [batch], []


async def _in_progress(killed: Killed, session: aiohttp.ClientSession) -> Work:
    batch = await killed.submit(session)
    await killed.until(session, batch, {"in_progress", "finalizing"}, killed.dice.randrange(killed.lines // 2))
    killed.kill()
    return [batch], []


async def _finalizing(killed: Killed, session: aiohttp.ClientSession) -> Work:
    batch = await killed.submit(session)
    await killed.until(session, batch, {"finalizing"})
    await asyncio.sleep(killed.dice.uniform(0.0, 0.01))
    killed.kill()
    return [batch], []


async def _cancelling(killed: Killed, session: aiohttp.ClientSession) -> Work:
    batch = await killed.submit(session)
    await killed.until(session, batch, {"in_progress", "finalizing"}, killed.lines // 8)
    async with session.post(f"/v1/batches/{batch}/cancel") as response:
        await response.read()
    await asyncio.sleep(killed.dice.uniform(0.0, 0.05))
    killed.kill()
    return [batch], []


async def _uploading(killed: Killed, session: aiohttp.ClientSession) -> Work:
    text = load.line("0", "{}").encode()
    task = asyncio.create_task(load.upload(session, text * (UPLOAD_BYTES // len(text))))
    await asyncio.sleep(killed.dice.uniform(0.02, 0.3))
    killed.kill()
    with suppress(aiohttp.ClientError):
        response = await task
        if response.status == 200:
            return [], [(await response.json())["id"]]
    return [], []


async def _creating(killed: Killed, session: aiohttp.ClientSession) -> Work:
    lines = (load.line(str(i), json.dumps(load.body_of(killed.prompts[i], load.LINE_TOKENS))) for i in range(3))
    uploaded = await load.upload(session, "".join(lines).encode())
    file, created = (await uploaded.json())["id"], list[str]()

    async def create() -> None:
        with suppress(aiohttp.ClientError, KeyError):
            while True:
                created.append(await load.create(session, file))

    task = asyncio.create_task(create())
    await asyncio.sleep(killed.dice.uniform(0.02, 0.2))
    killed.kill()
    await task
    return created, [file]


PHASES: Mapping[str, Callable[[Killed, aiohttp.ClientSession], Awaitable[Work]]] = {
    "validating": _validating, "in_progress": _in_progress, "finalizing": _finalizing, "cancelling": _cancelling,
    "uploading": _uploading, "creating": _creating,
}  # fmt: skip


async def gateway(scale: Scale) -> list[Promise]:
    """SIGKILLs of the gateway in every phase of a batch, for a third of the time."""
    with start() as server:
        prompts = load.make_prompts(scale.dice(), load.LINE_PROMPTS, 12)
        async with server.session() as session:
            texts = [await load.text_of(session, prompt) for prompt in prompts]
        killed, times = Killed(server, scale.dice(), prompts, texts, scale.of(1000, 60)), Counter[str]()
        until = time.monotonic() + scale.seconds / 3
        while not times or time.monotonic() < until:
            for phase in PHASES:
                times[phase] += 1
                await killed.in_phase(phase)
        await asyncio.to_thread(server.end)
        killed.left_over()
    print(f"  killed: {dict(times)}", flush=True)
    return [none_of("harm", killed.harm)]
