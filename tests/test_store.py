"""The SQLite store: pages, tenants, counts, group commit, faults, versions, locks."""

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from batch_tools import open_remote, open_store

from engine.errors import ConfigError
from gateway.store.disk import StorageError
from gateway.store.folder import StateFolder, open_state
from gateway.store.objects import (
    BatchJob,
    BatchStatus,
    FileObject,
    LineRef,
    LineResult,
    Page,
    UnknownCursor,
    Usage,
    new_batch_id,
    new_file_id,
)
from gateway.store.row_store import RowStore
from gateway.store.rows import TOMBSTONE_SECONDS
from gateway.store.schema import OLDEST, VERSION
from gateway.store.sqlite import SqliteWriter, open_database

NOW = 1_800_000_000


POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)


@pytest.fixture(params=["sqlite", POSTGRES])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RowStore]:
    if request.param == "sqlite":
        opened = open_store(tmp_path / "s.db")
    else:
        opened = open_remote(request.getfixturevalue("postgres").address)
    yield opened
    await asyncio.to_thread(opened.close_now)


def a_file(tenant: str = "t", **fields: Any) -> FileObject:
    values: dict[str, Any] = {"bytes": 5, "created_at": NOW, "filename": "a.jsonl", "purpose": "batch"}
    return FileObject(**{"id": new_file_id(), "tenant": tenant, **values, **fields})


async def a_batch(store: RowStore, tenant: str = "t", **fields: Any) -> BatchJob:
    file = a_file(tenant)
    await store.add_file(file)
    values: dict[str, Any] = {"completion_window": "24h", "created_at": NOW, "expires_at": NOW + 86400}
    batch = BatchJob(new_batch_id(), tenant, "/v1/completions", file.id, **{**values, **fields})
    return await store.create_batch(batch)


# ---- files


async def test_pages_of_files_in_both_orders(store: RowStore) -> None:
    files = [a_file(purpose="batch" if i % 2 else "batch_output") for i in range(7)]
    for file in files:
        await store.add_file(file)
    await store.add_file(a_file("other"))
    for ascending, expected in ((True, files), (False, files[::-1])):
        seen: list[FileObject] = []
        while True:
            page = Page(3, seen[-1].id if seen else None, ascending)
            found, more = await store.list_files("t", page, None, NOW)
            seen += found
            if not more:
                break
        assert seen == expected
    found, more = await store.list_files("t", Page(3, ascending=True), "batch", NOW)
    assert found == files[1::2] and not more


async def test_a_list_goes_on_after_a_file_that_was_deleted_meanwhile(store: RowStore) -> None:
    files = [a_file() for _ in range(4)]
    for file in files:
        await store.add_file(file)
    assert await store.delete_file("t", files[1].id, NOW)
    found, _ = await store.list_files("t", Page(10, files[1].id, True), None, NOW)
    assert found == files[2:]
    await store.purge_files(await store.old_tombstones(NOW + TOMBSTONE_SECONDS + 1, 10))
    with pytest.raises(UnknownCursor):
        await store.list_files("t", Page(10, files[1].id, True), None, NOW)


async def test_expired_files_are_missing_at_once_and_their_bodies_go_later(store: RowStore) -> None:
    file = a_file(expires_at=NOW + 10)
    await store.add_file(file)
    assert await store.get_file("t", file.id, NOW + 9) == file
    assert await store.get_file("t", file.id, NOW + 10) is None
    assert await store.list_files("t", Page(10), None, NOW + 10) == ([], False)
    assert await store.known_files([file.id, "other"]) == {file.id}
    assert await store.expire_files(NOW + 9, 10) == []
    assert await store.expire_files(NOW + 10, 10) == [file.id]
    assert await store.known_files([file.id]) == set()


# ---- batches


async def test_a_batch_through_its_life(store: RowStore) -> None:
    batch = await a_batch(store, metadata={"a": "b"})
    assert await store.load_batch(batch.id) == batch
    await store.add_lines(batch.id, [LineRef(9, 9, 9, 9)], first=True)  # an attempt that was cut off
    await store.add_lines(batch.id, [LineRef(0, 3, 20, 10), LineRef(1, 1, 0, 10)], first=True)
    await store.add_lines(batch.id, [LineRef(2, 2, 10, 10)], first=False)
    started = await store.start_batch(batch.id, 3, "m", NOW + 1)
    assert (started.status, started.times, started.model) == (BatchStatus.IN_PROGRESS, {"in_progress_at": NOW + 1}, "m")
    lines = await store.lines_at(batch.id, range(2))
    assert lines == [LineRef(0, 3, 20, 10), LineRef(1, 1, 0, 10)]
    counted = await store.add_results(batch.id, [LineResult(1, True, 0, 7, Usage(4, 1, 2, 1))])
    assert (counted.completed, counted.failed, counted.remaining) == (1, 0, 2)
    late = [LineResult(1, False, 7, 5, Usage(9, 9, 9, 9)), LineResult(2, False, 7, 5)]
    again = await store.add_results(batch.id, late)
    assert (again.completed, again.failed) == (1, 1), "a row once readable never changes"
    assert again.usage == Usage(4, 1, 2, 1), "nor does its usage count twice"
    assert [line.rank for line in await store.lines_at(batch.id, range(9))] == [0]
    records = await store.line_records(batch.id, -1, 9)
    assert [(r.ref.rank, r.succeeded, r.start, r.length) for r in records] == [
        (0, None, 0, 0), (1, True, 0, 7), (2, False, 7, 5),
    ]  # fmt: skip
    output, errors = a_file(purpose="batch_output"), a_file(purpose="batch_output")
    ended = await store.finish_batch(batch.id, BatchStatus.EXPIRED, NOW + 5, output, errors)
    assert (ended.output_file_id, ended.error_file_id) == (output.id, errors.id)
    assert (ended.total, ended.completed, ended.failed) == (3, 1, 1) and ended.usage == Usage(4, 1, 2, 1)
    assert await store.get_file("t", output.id, NOW) == output
    assert await store.line_records(batch.id, -1, 9) == [] and await store.unfinished_batches() == []


# ---- the writer


async def test_what_waits_together_is_committed_together(tmp_path: Path) -> None:
    commits: list[int] = []
    path = tmp_path / "s.db"
    writer = SqliteWriter(path, open_database(path), lambda: open_database(path))
    writer.on_commit = lambda _: commits.append(1)
    entered, gate = threading.Event(), threading.Event()

    def wait(_: sqlite3.Connection) -> None:
        entered.set()
        gate.wait()

    def insert(number: int) -> Any:
        return lambda c: c.execute(
            "INSERT INTO lines (batch, rank, number, start, length) VALUES (1, ?, 0, 0, 0)", (number,)
        )

    blocked = asyncio.ensure_future(writer.run(wait))
    await asyncio.to_thread(entered.wait)
    tasks = [asyncio.ensure_future(writer.run(insert(i // 2))) for i in range(40)]
    await asyncio.sleep(0)
    gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await blocked
    assert len(commits) == 1, "one commit for forty pieces of work"
    assert sum(isinstance(o, sqlite3.IntegrityError) for o in outcomes) == 20, "a piece that fails is undone alone"
    count = await writer.run(lambda c: c.execute("SELECT count(*) FROM lines").fetchone()[0])
    assert count == 20
    await asyncio.to_thread(writer.close)


async def test_a_full_database_refuses_and_recovers(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s.db")
    batch = await a_batch(store)

    def limit(connection: sqlite3.Connection) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")

    await store._writer.run(limit)
    lines = [LineRef(i, i, i, i) for i in range(5000)]
    write, read = store.add_lines(batch.id, lines, first=True), store.get_batch("t", batch.id)
    refused, found = await asyncio.gather(write, read, return_exceptions=True)
    assert isinstance(refused, StorageError) and found == batch, "a neighbour that only reads is answered"
    assert await store.lines_at(batch.id, range(10)) == []
    await store._writer.run(lambda c: c.execute("PRAGMA max_page_count = 100000"))
    await store.add_lines(batch.id, lines, first=True)
    assert len(await store.lines_at(batch.id, range(9999))) == 5000
    await asyncio.to_thread(store.close_now)


@pytest.mark.parametrize(
    "name", ["FULL", "IOERR", "CANTOPEN", "READONLY", "CORRUPT", "NOTADB", "BUSY", "LOCKED", "PERM", "PROTOCOL"]
)
async def test_a_fault_of_the_database_is_a_fault_of_storage(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "s.db")

    def fail(_: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("words of SQLite")
        error.sqlite_errorcode, error.sqlite_errorname = getattr(sqlite3, f"SQLITE_{name}"), f"SQLITE_{name}"
        raise error

    for _ in range(3):
        with pytest.raises(StorageError) as caught:
            await store._writer.run(fail)
        assert not caught.value.in_doubt, "it came before the commit: an upload's body goes at once"
    assert store._writer._health.fault == f"SQLITE_{name}: words of SQLite"
    assert len(caplog.messages) == 1 and f"SQLITE_{name}" in caplog.messages[0]
    await store.add_file(a_file())
    assert store._writer._health.fault is None
    await asyncio.to_thread(store.close_now)


async def test_what_is_written_to_a_deleted_database_is_refused_until_it_is_back(tmp_path: Path) -> None:
    """SQLite would go on in a file without a name: a 200 for a file that is lost at the end."""
    place, away = tmp_path / "state", tmp_path / "away"
    place.mkdir()
    store = open_store(place / "s.db")
    first, second = a_file(), a_file()
    await store.add_file(first)
    place.rename(away)
    outcomes = await asyncio.gather(
        store.add_file(second), store.get_file("t", first.id, NOW), store.add_file(a_file()), return_exceptions=True
    )
    assert isinstance(outcomes[0], StorageError) and isinstance(outcomes[2], StorageError)
    assert outcomes[1] == first, "what only reads goes on"
    place.mkdir()
    (place / "s.db").touch()  # another file of that name
    with pytest.raises(StorageError):
        await store.add_file(second)
    (place / "s.db").unlink()
    place.rmdir()
    away.rename(place)
    await store.add_file(second)
    assert await store.get_file("t", second.id, NOW) == second
    await asyncio.to_thread(store.close_now)


async def test_settings_that_durability_rests_on(tmp_path: Path) -> None:
    connection = open_database(tmp_path / "s.db")
    for name, value in {"journal_mode": "wal", "synchronous": 2, "user_version": VERSION}.items():
        assert connection.execute(f"PRAGMA {name}").fetchone()[0] == value
    connection.close()


# ---- the folder


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


async def test_one_server_per_folder(tmp_path: Path) -> None:
    first = await asyncio.to_thread(open_state, tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    before = digests(tmp_path)
    with pytest.raises(ConfigError, match=rf"in use by another server \(pid {os.getpid()}\); use another folder"):
        await asyncio.to_thread(open_state, tmp_path / "state")
    assert digests(tmp_path) == before
    await first.close()
    await (await asyncio.to_thread(open_state, tmp_path / "state")).close()


@pytest.mark.parametrize(("version", "place"), [
    (OLDEST - 1, None), (VERSION + 1, None), (None, 0), (None, 40), (None, 4096), (None, 8192 + 8),
])  # fmt: skip
async def test_another_schema_or_a_damaged_database_is_refused_and_left_alone(
    tmp_path: Path, version: int | None, place: int | None
) -> None:
    folder, path = await asyncio.to_thread(open_state, tmp_path), tmp_path / "tidemill.db"
    for _ in range(50):
        await folder.store.add_file(a_file())
    await folder.close()
    if place is None:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
    else:
        content = bytearray(path.read_bytes())
        content[place : place + 64] = b"\xff" * 64
        path.write_bytes(content)
    before = digests(tmp_path)
    expected = r"restore|too old" if version is None else r"written by a (newer|version)"
    with pytest.raises(ConfigError, match=expected) as caught:
        await asyncio.to_thread(open_state, tmp_path)
    assert "\n" not in caught.value.message and digests(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "file-" + "0" * 31, "file-" + "g" * 32, "file-" + "0" * 32 + "\n"]
)
async def test_no_path_is_made_of_anything_but_an_id(tmp_path: Path, name: str) -> None:
    folder = StateFolder(tmp_path, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        folder.file_path(name)
    with pytest.raises(AssertionError):
        folder.journal_path(name.replace("file-", "batch_"))
