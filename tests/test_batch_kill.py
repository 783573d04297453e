"""SIGKILL at any moment of a batch's life: nothing that was acknowledged is lost, and no line has two rows."""

import asyncio
import os
import random
import secrets
import signal
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tokenizer_folders
from batch_tools import check_ended, jsonl, leftovers, line
from support.lazy import openai

ResultT = TypeVar("ResultT")
LINES = 2000
SERVER = Path(__file__).parent / "batch_kill_server.py"
# Activities at the time of the kill: twice as often as each operation happens in a whole run, roughly, as odd
# numbers mean after an operation, even ones before it.
DEATHS = {"write": 70, "sync": 70, "rename": 4, "sync_folder": 10, "commit": 76}


class Server:
    """One incarnation of the server process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=20.0
        )

    @classmethod
    async def start(cls, folder: str, state: Path, death: str) -> "Server":
        environment = {**os.environ, "PYTHONPATH": f"{SERVER.parent}{os.pathsep}{SERVER.parent.parent}"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SERVER), folder, str(state), death,
            stderr=asyncio.subprocess.PIPE, env=environment,
        )  # fmt: skip
        assert process.stderr is not None
        seen = b""
        while text := await process.stderr.readline():
            seen += text
            if b"listening on http://127.0.0.1:" in text:
                return cls(process, int(text.rpartition(b":")[2]))
        await process.wait()
        if process.returncode == -signal.SIGKILL:
            raise Died
        raise AssertionError(seen.decode())

    async def end(self, kind: signal.Signals = signal.SIGKILL) -> int:
        if self.process.returncode is None:
            self.process.send_signal(kind)
        await self.client.close()
        assert self.process.stderr is not None
        log = await self.process.stderr.read()
        assert b"Traceback" not in log and b"unexpected" not in log, log.decode()
        return await self.process.wait()


class Died(Exception):
    """The server is gone."""


@dataclass
class Job:
    """Acknowledged lines so far."""

    content: bytes
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    file_ids: list[str] = field(default_factory=list)
    batch_id: str | None = None
    counted: int = 0
    ended: Any = None

    async def advance(self, server: Server) -> None:
        """As far as this server lives; raises Died."""
        client = server.client
        if not self.file_ids:
            file = await alive(lambda: client.files.create(file=("in.jsonl", self.content), purpose="batch"))
            self.file_ids.append(file.id)
        else:
            assert (await alive(lambda: client.files.retrieve(self.file_ids[0]))).bytes == len(self.content)
        if self.batch_id is None:
            batch = await alive(
                lambda: client.batches.create(
                    input_file_id=self.file_ids[0],
                    endpoint="/v1/completions",
                    completion_window="24h",
                    extra_headers={"Idempotency-Key": self.key},
                )
            )
            self.batch_id = batch.id
        while self.ended is None:
            batch = await alive(lambda: client.batches.retrieve(str(self.batch_id)))
            counts = batch.request_counts
            assert batch.status in ("validating", "in_progress", "finalizing", "completed") and counts is not None
            assert counts.completed >= self.counted, "counted lines are lost"
            self.counted = counts.completed
            if batch.status == "completed":
                self.ended = batch
            await asyncio.sleep(0.02)
        assert await alive(lambda: client.batches.retrieve(str(self.batch_id))) == self.ended, "the end has changed"


async def alive(call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    try:
        return await call()
    except openai.APIConnectionError:
        raise Died from None


async def live_and_die(folder: str, state: Path, job: Job, death: str, seconds: float | None) -> bool:
    """One incarnation; whether it was killed before the job's end."""
    try:
        server = await Server.start(folder, state, death)
    except Died:
        return True
    killer = asyncio.ensure_future(asyncio.sleep(3600 if seconds is None else seconds))
    killer.add_done_callback(lambda _: server.process.returncode is None and server.process.kill())
    try:
        await job.advance(server)
        return False
    except Died:
        return True
    finally:
        killer.cancel()
        await server.end()


async def check_everything(folder: str, state: Path, job: Job, ids: list[str]) -> None:
    """A last start: every line once, nothing left behind, and an orderly end."""
    server = await Server.start(folder, state, "none:0")
    await job.advance(server)
    output, errors = await check_ended(server.client, job.ended, ids)
    assert len(output) == len(ids) and not errors
    listed = {file.id async for file in server.client.files.list()}
    assert set(job.file_ids) | {job.ended.output_file_id} <= listed
    assert [batch.id async for batch in server.client.batches.list()] == [job.batch_id]
    assert await server.end(signal.SIGTERM) == 0
    left = leftovers(state)
    assert set(left["files"]) == listed, "orphan files"
    assert not left["tmp"] and not left["journals"]
    connection = sqlite3.connect(state / "tidemill.db")
    assert connection.execute("SELECT count(*) FROM lines").fetchone() == (0,)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


async def kill_loop(tmp_path: Path, kills: int, seed: int) -> None:
    print(f"\nseed {seed}")
    draw = random.Random(seed)
    folder = str(tokenizer_folders.byte_level(tmp_path / "tokenizer"))
    names = [str(number) for number in range(LINES)]
    content = jsonl([line(name, max_tokens=2) for name in names])
    done = job_number = 0
    while done < kills:
        job, state = Job(content), tmp_path / f"state-{job_number}"
        job_number += 1
        while done < kills:
            kind = draw.choice(["time", *DEATHS])
            seconds = draw.uniform(0.0, 2.5) if kind == "time" else None
            death = "none:0" if kind == "time" else f"{kind}:{draw.randint(1, DEATHS[kind])}"
            killed = await live_and_die(folder, state, job, death, seconds)
            print(f"{kind} {seconds or death}: {job.counted} lines counted, {'killed' if killed else 'ended'}")
            done += killed
            if job.ended is not None:
                break
        await check_everything(folder, state, job, [f"id-{name}" for name in names])


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_few_kills(tmp_path: Path) -> None:
    await kill_loop(tmp_path, 2, seed=7)


@pytest.mark.manual
@pytest.mark.timeout(3600)
async def test_a_hundred_kills(tmp_path: Path) -> None:
    await kill_loop(tmp_path, 100, seed=int(os.environ.get("TIDEMILL_KILL_SEED", secrets.randbelow(2**32))))


@pytest.mark.slow
@pytest.mark.parametrize("death", ["commit:5", "rename:3"])
async def test_a_kill_at_a_chosen_moment(tmp_path: Path, death: str) -> None:
    """In validation (its lines have just been indexed), and after the rename of the results."""
    folder = str(tokenizer_folders.byte_level(tmp_path / "tokenizer"))
    names = [str(number) for number in range(300)]
    job = Job(jsonl([line(name, max_tokens=2) for name in names]))
    assert await live_and_die(folder, tmp_path / "state", job, death, None)
    await check_everything(folder, tmp_path / "state", job, [f"id-{name}" for name in names])
