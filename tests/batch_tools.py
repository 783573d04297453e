"""Shared parts of the tests of files and batches: input lines, a client, waiting, and invariants."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import MODEL, FakeEngine, Served, say, serve
from support.lazy import openai

from engine.client import EngineStats
from engine.text.tokenizer import Tokenizer
from gateway.batch import finish as batch_finish
from gateway.batch import input as batch_input
from gateway.batch.feeder import RunLine
from gateway.batch.line import LineAnswer, LineOrigin
from gateway.batch.run import BatchLimits
from gateway.batch.worker import BatchWorker
from gateway.store.disk import Disk
from gateway.store.folder import Place, StateFolder, find_postgres, open_state
from gateway.store.objects import BatchJob, FileObject, new_batch_id, new_file_id
from gateway.store.row_store import RowStore, StoreClock
from gateway.store.sqlite import SqliteWriter, open_database

TERMINAL = {"completed", "failed", "expired", "cancelled"}
FAST = BatchLimits(retry_seconds=0.01, tick_seconds=0.05)


def line(number: int | str, endpoint: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """An input line with custom_id `id-<number>`."""
    prompt: dict[str, Any] = {"prompt": f"number {number}"}
    if endpoint == "/v1/chat/completions":
        prompt = {"messages": [{"role": "user", "content": f"number {number}"}]}
    fields = {"model": MODEL, "max_tokens": 4, **prompt, **body}
    return {"custom_id": f"id-{number}", "method": "POST", "url": endpoint, "body": fields}


def open_store(path: Path) -> RowStore:
    return RowStore(SqliteWriter(path, open_database(path), lambda: open_database(path)))


def open_remote(address: str, objects: str | None = None) -> RowStore:
    """Open the rows in PostgreSQL, for one server or for those that share `objects`."""
    writer = find_postgres().PostgresWriter(None, lambda: find_postgres().open_database(address, objects))
    return RowStore(writer, is_shared=objects is not None)


@asynccontextmanager
async def bucket_of_moto(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Run moto's S3 server; the block gets the URL of a bucket. Needs `pip install 'moto[server]'`."""
    moto = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        settings = {"ENDPOINT_URL": address, "ALLOW_HTTP": "true", "REGION": "us-east-1"}
        for name, value in {**settings, "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.put(f"{address}/bucket")).status_code == 200
        yield "s3://bucket"
    finally:
        moto.stop()


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def key_file(folder: Path, *lines: str, mode: int = 0o600) -> str:
    """Write a key file and return its path. Lines are as in the file, see `keys_of` for lines that begin with a key."""
    path = folder / "keys"
    path.write_text("\n".join(lines))
    path.chmod(mode)
    return str(path)


def keys_of(folder: Path, *lines: str) -> str:
    """Write a key file from lines like `KEY tenant operator` and return its path."""
    return key_file(folder, *(f"{digest(text.split()[0])} {text.partition(' ')[2]}" for text in lines))


def client_of(served: Served, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0, **options})


async def upload(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    return await client.files.create(file=("in.jsonl", content), purpose="batch", **fields)


async def create(client: openai.AsyncOpenAI, file_id: str, **fields: Any) -> Any:
    """Create a batch of text completions, unless `fields` say otherwise."""
    values: Any = {"endpoint": "/v1/completions", "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file_id, **values)


async def submit(client: openai.AsyncOpenAI, content: bytes, endpoint: str = "/v1/completions", **fields: Any) -> Any:
    return await create(client, (await upload(client, content)).id, endpoint=endpoint, **fields)


async def until(client: openai.AsyncOpenAI, batch_id: str, *statuses: str) -> Any:
    """Return the batch in one of these states, or at its end."""
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in (statuses or TERMINAL):
            return batch
        assert batch.status not in TERMINAL, batch
        await asyncio.sleep(0.01)


async def eventually(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.005)


async def until_counted(client: openai.AsyncOpenAI, batch_id: str, completed: int) -> None:
    """Until so many lines are durably done."""
    batch = await client.batches.retrieve(batch_id)
    while batch.request_counts is None or batch.request_counts.completed < completed:
        assert batch.status not in ("failed", "expired", "cancelled"), batch
        await asyncio.sleep(0.01)
        batch = await client.batches.retrieve(batch_id)


async def rows_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(row) for row in content.text.splitlines()]


async def results_of(client: openai.AsyncOpenAI, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows of the output and of the error file by custom_id; no id is twice in them."""
    output, errors = [await rows_of(client, i) for i in (batch.output_file_id, batch.error_file_id)]
    ids = [row["custom_id"] for row in output + errors]
    assert len(ids) == len(set(ids)), "a line has two rows"
    names = [row["id"] for row in output + errors]
    assert len(names) == len(set(names)) and all(name.startswith("batch_req_") for name in names)
    return {row["custom_id"]: row for row in output}, {row["custom_id"]: row for row in errors}


def never_ran(row: dict[str, Any]) -> bool:
    return row["error"] is not None and row["error"]["code"] in ("batch_expired", "batch_cancelled")


async def check_ended(
    client: openai.AsyncOpenAI, batch: Any, ids: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every line has exactly one row, and the counts are those of the rows; lines that never ran are not failed."""
    output, errors = await results_of(client, batch)
    assert output.keys() | errors.keys() == set(ids)
    counts = batch.request_counts
    failed = [row for row in errors.values() if not never_ran(row)]
    assert (counts.completed, counts.failed, counts.total) == (len(output), len(failed), len(output) + len(errors))
    return output, errors


async def open_folder(root: Path | Place, disk: Disk | None = None, on_commit: Any = None) -> StateFolder:
    folder = await asyncio.to_thread(open_state, root, disk)
    folder.store._writer.on_commit = on_commit or folder.store._writer.on_commit
    return folder


async def answer(endpoint: str, body: dict[str, Any], origin: LineOrigin) -> LineAnswer:
    """Answer a line without an engine; refuse a bad one."""
    if "bad" in str(body.get("prompt")):
        return LineAnswer(400, {"error": {"message": "bad", "type": "t", "param": None, "code": None}})
    return LineAnswer(200, {"echo": body.get("prompt")})


async def add_file(folder: StateFolder, content: bytes, tenant: str = "") -> FileObject:
    """Store an upload without HTTP."""
    temp = folder.create_temp()
    temp.write(content)
    file = FileObject(new_file_id(), tenant, len(content), 1, "in.jsonl", "batch")
    await folder.store.announce_files([file.id])
    await asyncio.to_thread(folder.publish_files, (temp, file.id))
    await folder.store.add_file(file)
    return file


async def add_batch(folder: StateFolder, content: bytes, now: int = 1_000_000, window: int = 86_400) -> BatchJob:
    """Store a batch and its input without HTTP; `now` and `window` in seconds."""
    file = await add_file(folder, content)
    batch = BatchJob(new_batch_id(), "", "/v1/completions", file.id, "24h", now, now + window)
    return await folder.store.create_batch(batch)


async def check_here(path: str, *limits: Any) -> batch_input.InputReport:
    """`check_apart` in a thread."""

    def check() -> batch_input.InputReport:
        with open(path, "rb") as file:
            return batch_input.check_input(file, *limits, str(Path(path).parent.parent / "tmp"))

    return await asyncio.to_thread(check)


@contextmanager
def inputs_checked_here() -> Iterator[None]:
    """Validate inputs in this process, unless the test has its own way: another one takes 0.4 s to start."""
    with pytest.MonkeyPatch.context() as patch:
        if batch_finish.check_apart is batch_input.check_apart:
            patch.setattr(batch_finish, "check_apart", check_here)
        yield


@asynccontextmanager
async def batch_worker(
    root: Path,
    run: Any = answer,
    limits: BatchLimits = FAST,
    clock: Callable[[], float] = time.time,
    apart: bool = False,
) -> AsyncIterator[BatchWorker]:
    """A worker on a state folder, without a server, that is still to be started. It stops with the block. `apart`:
    inputs are validated in a process of their own, as by `tidemill serve`."""
    folder = await open_folder(root)
    worker = make_worker(folder, limits, run, clock)
    try:
        with nullcontext() if apart else inputs_checked_here():
            yield worker
    finally:
        await worker.stop()
        await folder.close()


@asynccontextmanager
async def batch_server(
    tokenizer: Tokenizer,
    root: Path | Place,
    script: Any = "done",
    *,
    disk: Disk | None = None,
    on_commit: Any = None,
    limits: BatchLimits = FAST,
    prepare: Callable[[StateFolder], None] | None = None,
    **config: Any,
) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    """A server on a state folder, and a client of it. Leaving it is an orderly stop."""
    folder = await open_folder(root, disk, on_commit)
    if prepare is not None:
        prepare(folder)
    assert tokenizer.eos_token_id is not None
    options = {name: config.pop(name) for name in ("burst", "hold_after", "fail_after") if name in config}
    chosen = say(tokenizer, script, **options) if isinstance(script, str) else script
    engine = FakeEngine(chosen, eos_token_ids=frozenset({tokenizer.eos_token_id}))
    server = serve(engine, tokenizer, folder=folder, batch_limits=limits, **config)
    with inputs_checked_here():
        async with server as served, client_of(served) as client:
            yield served, client


def leftovers(root: Path) -> dict[str, list[str]]:
    """What lies in the state folder, by sub-folder."""
    return {name: sorted(path.name for path in (root / name).iterdir()) for name in ("files", "journals", "tmp")}


def make_worker(
    folder: StateFolder, limits: BatchLimits, run_line: RunLine, clock: Callable[[], float] = time.time
) -> BatchWorker:
    """A worker without quotas, latency model and online requests."""
    return BatchWorker(
        folder,
        limits,
        run_line,
        max_lines=lambda _tenant: None,
        stats=EngineStats,
        set_lane=lambda _batch, _lane: None,
        clock=StoreClock(clock),
    )
