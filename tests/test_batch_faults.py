"""Faults that leave doubt: commits that are reported failed though they happened, and files that cannot be read."""

import asyncio
import contextlib
import errno
import functools
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_tools import (
    FAST,
    batch_server,
    check_ended,
    create,
    eventually,
    jsonl,
    leftovers,
    line,
    submit,
    until,
    upload,
)
from support.lazy import openai

from engine.text.tokenizer import Tokenizer
from gateway.batch import input as batch_input
from gateway.batch.run import BatchLimits
from gateway.store.disk import Disk

ONE_BY_ONE = BatchLimits(window_lines=2, retry_seconds=0.01, tick_seconds=0.05, read_attempts=3)


class Doubtful(sqlite3.Connection):
    """Chosen commits fail as a failing fsync does; `happens`: the changes are durable all the same."""

    faults: frozenset[int] = frozenset()
    happens = True
    count = 0

    written = 0
    settling = False

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        self.settling = self.settling or sql.startswith("PRAGMA user_version = ")
        if sql != "COMMIT" or not (self.settling or self.total_changes > self.written):
            return super().execute(sql, *parameters)
        self.settling, self.written = False, self.total_changes
        number, Doubtful.count = Doubtful.count, Doubtful.count + 1
        if number not in Doubtful.faults:
            return super().execute(sql)
        if Doubtful.happens:
            super().execute(sql)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error


@pytest.fixture
def doubtful(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Doubtful]]:
    monkeypatch.setattr("gateway.store.sqlite.sqlite3.connect", functools.partial(sqlite3.connect, factory=Doubtful))
    Doubtful.faults, Doubtful.happens, Doubtful.count = frozenset(), True, 0
    yield Doubtful
    Doubtful.faults = frozenset()


# ---- commits in doubt


@pytest.mark.slow
@pytest.mark.parametrize("happens", [True, False], ids=["happened", "did-not"])
async def test_any_commit_of_a_batch_may_be_in_doubt(
    tokenizer: Tokenizer, tmp_path: Path, doubtful: type[Doubtful], happens: bool
) -> None:
    """The N-th commit and the two after it are reported failed, for every N: no line is lost, none is there twice."""
    doubtful.happens = happens
    async with batch_server(tokenizer, tmp_path, limits=ONE_BY_ONE) as (_, client):
        content = jsonl([line(i) if i % 3 else line(i, temperature=9) for i in range(5)])
        file, number = await upload(client, content), 0
        while True:
            batch = await create(client, file.id)
            doubtful.count, doubtful.faults = 0, frozenset(range(number, number + 3))
            ended = await until(client, batch.id)
            seen, doubtful.faults = doubtful.count, frozenset()
            assert ended.status == "completed"
            output, errors = await check_ended(client, ended, [f"id-{i}" for i in range(5)])
            assert set(errors) == {"id-0", "id-3"}
            assert ended.usage.output_tokens == sum(
                r["response"]["body"]["usage"]["completion_tokens"] for r in output.values()
            )
            for file_id in (ended.output_file_id, ended.error_file_id):
                await client.files.delete(file_id)
            if seen <= number:
                break
            number += 1
        assert number >= 6, "index, start, results in groups, finalizing, end"
    assert leftovers(tmp_path) == {"files": [file.id], "journals": [], "tmp": []}


async def test_an_upload_in_doubt_keeps_its_body_until_it_is_decided(
    tokenizer: Tokenizer, tmp_path: Path, doubtful: type[Doubtful]
) -> None:
    """A crash may bring its row back: then the file must be whole. Once another commit succeeds, it cannot."""
    doubtful.happens = False
    async with batch_server(tokenizer, tmp_path, limits=BatchLimits(tick_seconds=3600.0)) as (served, client):
        doubtful.faults = frozenset(range(doubtful.count + 1, 10_000))  # but for the announcement
        with pytest.raises(openai.InternalServerError) as caught:
            await upload(client, b"x" * 100)
        assert caught.value.status_code == 507
        (name,) = leftovers(tmp_path)["files"]
        assert (tmp_path / "files" / name).read_bytes() == b"x" * 100
        doubtful.faults = frozenset()
        await served.app.state.batches.jobs.tick()
        assert leftovers(tmp_path)["files"] == []
        assert (await upload(client, b"x")).bytes == 1


async def test_a_batch_whose_creation_was_in_doubt_has_an_owner(
    tokenizer: Tokenizer, tmp_path: Path, doubtful: type[Doubtful]
) -> None:
    """No tick shares the commit, because works that share one are repeated one by one."""
    async with batch_server(tokenizer, tmp_path, limits=BatchLimits(tick_seconds=3600.0)) as (served, client):
        file = await upload(client, jsonl([line(1)]))
        doubtful.faults = frozenset(range(10_000))
        with pytest.raises(openai.InternalServerError):
            await create(client, file.id)
        doubtful.faults = frozenset()
        await served.app.state.batches.jobs.tick()
        (batch,) = (await client.batches.list()).data
        await check_ended(client, await until(client, batch.id), ["id-1"])


# ---- files that cannot be read


class BadSector:
    """`Disk.read_at` that fails for the files of one folder, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: str, times: int = 10**9) -> None:
        self.folder, self.times, self.failing, self.seen = folder, times, False, 0
        self._real = Disk().read_at
        monkeypatch.setattr(Disk, "read_at", lambda _, *arguments: self(*arguments))

    def __call__(self, descriptor: int, start: int, length: int) -> bytes:
        inside = f"/{self.folder}/" in os.readlink(f"/proc/self/fd/{descriptor}")
        if inside and self.failing and self.seen < self.times:
            self.seen += 1
            raise OSError(errno.EIO, "Input/output error")
        return self._real(descriptor, start, length)


async def test_an_input_that_cannot_be_read_any_more(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A few tries, ever later; then each line that is left gets an error row, and the finished ones are kept."""
    sector = BadSector(monkeypatch, "files")
    async with batch_server(tokenizer, tmp_path, "x", limits=ONE_BY_ONE, hold_after=0) as (served, client):
        batch = await submit(client, jsonl([line(i) for i in range(7)]))
        await served.engine.wait_for_event("add", 2)
        sector.failing = True
        served.engine.release()
        await eventually(lambda: sector.seen > 0)
        other = await submit(client, b"{}")
        assert (await until(client, other.id)).status == "failed", "other batches do not wait"
        ended = await until(client, batch.id)
        assert ended.status == "completed"
        (error,) = ended.errors.data
        assert error.code == "input_unavailable" and error.line is not None
        counts = ended.request_counts
        assert counts.completed >= 2 and counts.completed + counts.failed == counts.total == 7
        output = (await client.files.content(ended.output_file_id)).text.splitlines()
        lost = (await client.files.content(ended.error_file_id)).text.splitlines()
        assert (len(output), len(lost)) == (counts.completed, counts.failed)
        assert all('"code":"input_unavailable"' in row and "(line " in row for row in lost)
        assert f"batch {batch.id}: " in caplog.text and "lines of the input are damaged on the disk" in caplog.text
        assert not served.app.state.batches.jobs.paused, "the disk takes data: online and other jobs are not stopped"


async def test_a_read_that_fails_a_few_times_costs_nothing(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sector = BadSector(monkeypatch, "files", ONE_BY_ONE.read_attempts)
    sector.failing = True
    async with batch_server(tokenizer, tmp_path, limits=ONE_BY_ONE) as (_, client):
        batch = await submit(client, jsonl([line(i) for i in range(5)]))
        ended = await until(client, batch.id)
        output, _ = await check_ended(client, ended, [f"id-{i}" for i in range(5)])
        assert len(output) == 5 and ended.errors is None and sector.seen == ONE_BY_ONE.read_attempts


@pytest.mark.parametrize("times", [2, 10**9])
async def test_validation_of_an_input_that_cannot_be_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    tries, real = 0, batch_input.check_apart

    async def check(*arguments: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= times:
            raise OSError(errno.EIO, "Input/output error")
        return await real(*arguments)

    monkeypatch.setattr("gateway.batch.finish.check_apart", check)
    async with batch_server(tokenizer, tmp_path, limits=ONE_BY_ONE) as (_, client):
        ended = await until(client, (await submit(client, jsonl([line(1)]))).id)
        if times == 2:
            assert ended.status == "completed"
        else:
            assert ended.status == "failed" and tries == ONE_BY_ONE.read_attempts + 1
            assert [error.code for error in ended.errors.data] == ["input_unavailable"]
            assert ended.request_counts.total == 0 and ended.output_file_id is None


async def test_results_that_cannot_be_read_any_more(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal on a bad sector does not hold up the other batches, and every line still has one row."""
    async with batch_server(tokenizer, tmp_path, "x", limits=ONE_BY_ONE, hold_after=0) as (served, client):
        batch = await submit(client, jsonl([line(i) for i in range(2)]))
        await served.engine.wait_for_event("add", 2)
        sector = BadSector(monkeypatch, "journals")
        sector.failing = True
        served.engine.release()
        await asyncio.wait_for(eventually(lambda: sector.seen > 0), 30)
        ended = await until(client, batch.id)
        assert ended.status == "completed" and ended.output_file_id is None
        counts = ended.request_counts
        assert (counts.completed, counts.failed, counts.total) == (0, 2, 2)
        rows = (await client.files.content(ended.error_file_id)).text.splitlines()
        assert len(rows) == 2 and all('"code":"result_unavailable"' in row for row in rows)


def test_pauses_between_tries_grow_to_a_bound() -> None:
    pauses = [FAST.back_off(faults) / FAST.retry_seconds for faults in (1, 2, 3, 4)]
    assert pauses == [1, 2, 4, 8] and BatchLimits().back_off(30) == 60.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.store.sqlite.BUSY_SECONDS", 0.01)


def lock_of(root: Path) -> sqlite3.Connection:
    """Hold a write lock, as a backup tool does: no other process can write."""
    connection = sqlite3.connect(root / "tidemill.db", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection


async def test_a_lock_on_the_database_is_a_fault_of_storage(
    tokenizer: Tokenizer, tmp_path: Path, impatient: None
) -> None:
    """Uploads are refused with 507, reads go on, and no line runs twice."""
    lines = [line(i) for i in range(20)]
    async with batch_server(tokenizer, tmp_path, "x", hold_after=0) as (served, client):
        batch = await submit(client, jsonl(lines))
        await served.engine.wait_for_event("add", 20)
        with contextlib.closing(lock_of(tmp_path)) as lock:
            served.engine.release()
            for _ in range(3):
                with pytest.raises(openai.APIStatusError) as refused:
                    await upload(client, b"{}\n")
                assert (refused.value.status_code, refused.value.code) == (507, "insufficient_storage")
            found = await asyncio.gather(*(client.batches.retrieve(batch.id) for _ in range(5)))
            assert {one.status for one in found} == {"in_progress"} and served.app.state.batches.jobs.paused
            lock.rollback()
        batch = await until(client, batch.id)
        await check_ended(client, batch, [f"id-{i}" for i in range(20)])
        assert len(served.engine.requests) == 20
        await upload(client, b"{}\n")


async def test_a_short_lock_is_waited_for(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.sqlite.BUSY_SECONDS", 100.0)
    async with batch_server(tokenizer, tmp_path) as (_, client):
        with contextlib.closing(lock_of(tmp_path)) as lock:
            sent = asyncio.ensure_future(upload(client, b"{}\n"))
            await asyncio.wait([sent], timeout=0.1)
            assert not sent.done()
            lock.rollback()
        assert (await sent).bytes == 3
