"""Rows in PostgreSQL: lost connections and commits, one server per database, values that PostgreSQL refuses."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_tools import (
    batch_server,
    bucket_of_moto,
    check_ended,
    client_of,
    jsonl,
    line,
    open_remote,
    submit,
    until,
    until_counted,
    upload,
)
from fake_engine import MODEL
from obstore.store import MemoryStore
from postgres_server import PostgresServer
from support.lazy import openai
from test_store import NOW, a_batch, a_file

from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from gateway.store.disk import Bucket, Disk, StorageError
from gateway.store.folder import Place, find_state, open_state
from gateway.store.objects import BatchStatus, LineRef, LineResult, Usage, new_file_id
from gateway.store.row_store import RowStore
from gateway.store.schema import VERSION
from tidemill.cli import main
from tidemill.commands.state import migrate

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


async def test_a_batch_survives_the_database(postgres: PostgresServer, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """While PostgreSQL is away, chats are answered, and files and batches get a 503."""
    place = Place(tmp_path, postgres.address)
    lines = [line(i) for i in range(300)]
    async with batch_server(tokenizer, place) as (served, client):
        batch = await submit(client, jsonl(lines))
        await until_counted(client, batch.id, 5)
        await asyncio.to_thread(postgres.kill)
        chat = await client.completions.create(model=MODEL, prompt="hello", max_tokens=2)
        assert chat.choices[0].text
        with pytest.raises(openai.InternalServerError) as refused:
            await upload(client, jsonl(lines))
        assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "10")
        await asyncio.to_thread(postgres.start)
        async with client_of(served, max_retries=9) as patient:
            await patient.batches.list()
        batch = await until(client, batch.id)
        assert batch.status == "completed"
        await check_ended(client, batch, [f"id-{i}" for i in range(300)])
    async with batch_server(tokenizer, place) as (_, client):
        await check_ended(client, await client.batches.retrieve(batch.id), [f"id-{i}" for i in range(300)])


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.clients)])
async def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Return the URL of an empty object store: in memory, or of moto's server (`pip install 'moto[server]'`)."""
    if request.param == "memory":
        store = MemoryStore()
        monkeypatch.setattr("obstore.store.from_url", lambda url, **_: {"s3://bucket/p": store}[url])
        yield "s3://bucket/p"
        return
    async with bucket_of_moto(monkeypatch) as url:
        yield f"{url}/{new_file_id()}"  # moto keeps its objects


@pytest.mark.parametrize("is_migrated", [False, True])
async def test_another_machine_goes_on(
    postgres: PostgresServer, tokenizer: Tokenizer, tmp_path: Path, bucket: str, is_migrated: bool
) -> None:
    """Bodies and finished lines are in the object store: no line runs twice on a machine with an empty disk."""
    lines, places = [line(i) for i in range(60)], [Place(tmp_path / name, postgres.address, bucket) for name in "abc"]
    async with batch_server(tokenizer, tmp_path / "a" if is_migrated else places[0]) as (served, client):
        whole = await submit(client, jsonl(lines[:3]))
        await until(client, whole.id)
        script, held = served.engine.script, iter([None] * 59)
        served.engine.script = lambda request: replace(script(request), hold_after=next(held, 0))
        batch = await submit(client, jsonl(lines))
        await until_counted(client, batch.id, 59)
    served.engine.release()
    if is_migrated:
        await asyncio.to_thread(migrate, Place(tmp_path / "a"), places[1])
    async with batch_server(tokenizer, places[1]) as (served, client):
        ended = await until(client, batch.id)
        assert served.engine._counts["add"] == 1
        await check_ended(client, ended, [f"id-{i}" for i in range(60)])
        await client.files.delete((await client.batches.retrieve(whole.id)).output_file_id)
    stored = Bucket(bucket, Disk())
    assert stored.names("journals/") == []
    assert len(stored.names("files/")) == 3, "two inputs and an output"
    stored.put("files/file-" + 32 * "0", b"of another database")
    folder = await asyncio.to_thread(open_state, places[2])
    await folder.recover()
    await folder.store.announce_files(["file-" + 32 * "1"])
    stored.put("files/file-" + 32 * "1", b"without a row")
    await folder.close()
    async with batch_server(tokenizer, places[2]) as (_, client):
        await check_ended(client, await client.batches.retrieve(batch.id), [f"id-{i}" for i in range(60)])
    assert len(stored.names("files/")) == 4


async def test_a_folder_is_migrated_where_it_is(
    postgres: PostgresServer, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{postgres.address}&objects=file://{tmp_path}"
    words = ["migrate", "--state-dir", str(tmp_path / "a"), f"{address}/a"]
    assert main(words) == 2 and "has no tidemill.db" in capsys.readouterr().err
    async with batch_server(tokenizer, tmp_path / "a") as (_, client):
        batch = await submit(client, jsonl([line(0)]))
        await until(client, batch.id)
    for target in ("b", "a"):  # a copy, then the folder itself
        postgres.clear()
        assert await asyncio.to_thread(main, [*words[:3], f"{address}/{target}"]) == 0
        assert await asyncio.to_thread(main, [*words[:3], f"{address}/c"]) == 2
        async with batch_server(tokenizer, find_state(f"{address}/{target}")) as (_, client):
            await check_ended(client, await client.batches.retrieve(batch.id), ["id-0"])
            newer = await submit(client, jsonl([line(1)]))
            await until(client, newer.id)
            assert [each.id for each in (await client.batches.list()).data] == [newer.id, batch.id]
    assert (tmp_path / "a" / "tidemill.db.moved").exists()


def break_commit(store: RowStore, lose: Callable[[Any], None], is_sent: bool) -> Any:
    """Lose the connection when, or before, the database gets the next commit. Return the connection."""
    connection = store._writer._opened
    execute: Callable[..., Any] = connection.execute

    def break_it(query: str, values: Any = (), /) -> Any:
        if query == "COMMIT":
            if is_sent:
                execute(query)
            lose(connection)
        return execute(query, values)

    connection.execute = break_it
    return connection


@pytest.mark.parametrize("is_sent", [False, True])
async def test_a_commit_without_an_answer_happens_once(postgres: PostgresServer, is_sent: bool) -> None:
    store = open_remote(postgres.address)
    batch = await a_batch(store)
    await store.add_lines(batch.id, [LineRef(0, 1, 0, 9)], first=True)
    await store.start_batch(batch.id, 1, None, NOW)
    connection = break_commit(store, lambda raw: raw.pgconn.finish(), is_sent)
    results = store.add_results(batch.id, [LineResult(0, True, 0, 7, Usage(4, 1, 2, 1))])
    moved = store.move_batch(batch.id, BatchStatus.FINALIZING, NOW)
    counted, ended = await asyncio.gather(results, moved)
    assert (counted.completed, ended.completed, ended.status) == (1, 1, BatchStatus.FINALIZING)
    assert store._writer._opened is not connection and (await store.load_batch(batch.id)).usage == Usage(4, 1, 2, 1)
    await asyncio.to_thread(store.close_now)


async def test_a_commit_in_doubt_is_settled_by_the_next_connection(postgres: PostgresServer) -> None:
    store = open_remote(postgres.address)
    await store.add_file(a_file())
    files = [a_file(), a_file()]
    break_commit(store, lambda _: postgres.kill(), is_sent=True)
    for lost in await asyncio.gather(*map(store.add_file, files), return_exceptions=True):
        assert isinstance(lost, StorageError) and lost.in_doubt and lost.status == 503
    postgres.start()
    store._writer._refused = None
    await store.settle()
    ids = [file.id for file in files]
    assert await store.known_files(ids) == set(ids)
    await asyncio.to_thread(store.close_now)


async def test_a_server_that_does_not_answer(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store, file = open_remote(postgres.address), a_file()
    await store.add_file(file)
    row = await store._writer.run(lambda c: c.execute("SELECT pg_backend_pid() AS backend").fetchone())
    for name, value in {"ANSWER_SECONDS": 0.3, "LOCK_SECONDS": 0.1, "RETRY_SECONDS": 0.0}.items():
        monkeypatch.setattr(f"gateway.store.postgres.{name}", value)
    os.kill(row["backend"], signal.SIGSTOP)
    with pytest.raises(StorageError) as refused:
        await store.get_file("t", file.id, NOW)
    assert refused.value.status == 503
    os.kill(row["backend"], signal.SIGCONT)
    monkeypatch.setattr("gateway.store.postgres.LOCK_SECONDS", 60.0)
    assert await store.get_file("t", file.id, NOW) == file
    await asyncio.to_thread(store.close_now)


async def test_values_come_back_unchanged(postgres: PostgresServer) -> None:
    store = open_remote(postgres.address)
    names = ["\0", "\ufffe", "\ufffe0", "a\0b\ufffe1", "%s ? :id", "é\U0001f30a", ""]
    files = [a_file(filename=name, bytes=2**62, tenant=f"{i}{name}") for i, name in enumerate(names)]
    for file in files:
        await store.add_file(file)
        assert await store.get_file(file.tenant, file.id, NOW) == file
    assert await store.get_file(None, "file-\0", NOW) is None
    for tenant in ("b", "B", "a-b", "a b"):
        await store.add_file(a_file(tenant=tenant))
    held = [each.tenant for each in await store.holdings(NOW)]
    assert held == sorted(held) and len(held) == 11, "the order is SQLite's"
    assert await store.stored_bytes(files[0].tenant, NOW) == 2**62
    await asyncio.to_thread(store.close_now)


async def test_one_server_per_database(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.postgres.LOCK_SECONDS", 0.1)
    folder = await asyncio.to_thread(open_state, Place(tmp_path / "a", postgres.address))
    with pytest.raises(ConfigError, match=r"in use by another server \(tidemill on .+\); use another database"):
        await asyncio.to_thread(open_state, Place(tmp_path / "b", postgres.address))
    await folder.store._writer.run(lambda c: c.execute(f"UPDATE schema_version SET version = {VERSION + 1}"))
    await folder.close()
    with pytest.raises(ConfigError, match="written by a newer version"):
        await asyncio.to_thread(open_state, Place(tmp_path / "b", postgres.address))
    (tmp_path / "b" / "tidemill.db").touch()
    with pytest.raises(ConfigError, match="holds the batches of a server without PostgreSQL"):
        await asyncio.to_thread(open_state, Place(tmp_path / "b", postgres.address))
    with pytest.raises(ConfigError, match='database "none" does not exist'):
        await asyncio.to_thread(open_state, Place(tmp_path / "a", postgres.address.replace("/postgres?", "/none?")))


def test_addresses() -> None:
    place = find_state("postgresql://u@h:5/d?sslmode=require&objects=file:///a%20b")
    assert place == Place(Path("/a b"), "postgresql://u@h:5/d?sslmode=require")
    for wrong in ("postgresql://h/d", "postgresql://h/d?objects=file://h/a", "postgresql://u:p@h/d?objects=file:///a"):
        with pytest.raises(ConfigError, match="--state-dir"):
            find_state(wrong)
