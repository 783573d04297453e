"""A start beside a database that is missing, empty, new, older or damaged: nothing unexplained is deleted."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from batch_tools import batch_server, check_ended, jsonl, leftovers, line, open_folder, submit, until
from recording_disk import NO_SPACE, FaultyDisk
from support.http import get
from test_journal import sql

from engine.text.tokenizer import Tokenizer
from gateway.batch.run import BatchLimits
from gateway.store.disk import Disk, StorageError
from gateway.store.folder import StateFolder
from gateway.store.objects import BatchJob, BatchStatus, FileObject, Page, new_batch_id, new_file_id
from gateway.store.rows import TOMBSTONE_SECONDS

NOW = 1_800_000_000
SLOW_TICKS = BatchLimits(tick_seconds=3600.0)


async def put(folder: StateFolder, *, announced: bool = True, row: bool = True) -> FileObject:
    temp = folder.create_temp()
    temp.write(b"hello")
    file = FileObject(new_file_id(), "t", 5, NOW, "a.jsonl", "batch")
    if announced:
        await folder.store.announce_files([file.id])
    await asyncio.to_thread(folder.publish_files, (temp, file.id))
    if row:
        await folder.store.add_file(file)
    return file


async def begin(folder: StateFolder, status: str = "in_progress") -> BatchJob:
    """A batch with a journal."""
    file = await put(folder)
    batch = BatchJob(new_batch_id(), "t", "/v1/completions", file.id, "24h", NOW, NOW + 86_400)
    await folder.store.create_batch(batch)
    journal = folder.disk.open_journal(folder.journal_path(batch.id))
    journal.write(b"rows")
    journal.close()
    sql(folder.root, "UPDATE batches SET status = ? WHERE id = ?", status, batch.id)
    return batch


def found(root: Path) -> set[str]:
    """Return the files in lost+found by their former place."""
    places = (root / "lost+found").glob("*/**/*")
    return {str(Path(*path.relative_to(root).parts[2:])) for path in places if path.is_file()}


async def reopen(folder: StateFolder, disk: Disk | None = None) -> StateFolder:
    await folder.close()
    return await open_folder(folder.root, disk)


async def test_a_repeated_recovery_spares_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = await open_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(folder.store, "damaged_batches", AsyncMock(side_effect=StorageError))
        with pytest.raises(StorageError):
            await folder.recover()
    temp = folder.create_temp()
    await folder.recover()
    assert temp.path.exists()
    temp.discard()
    await folder.close()


# ---- garbage that the database explains


async def test_a_start_removes_leftovers_that_the_database_explains(tmp_path: Path) -> None:
    folder = await open_folder(tmp_path)
    kept, running = await put(folder), await begin(folder)
    deleted, unfinished, ended = await put(folder), await put(folder, row=False), await begin(folder, "completed")
    await folder.store.delete_file("t", deleted.id, NOW)
    (tmp_path / "tmp" / "part").write_text("x")
    folder = await reopen(folder)
    await folder.recover()
    left = leftovers(tmp_path)
    assert left["files"] == sorted([kept.id, running.input_file_id, ended.input_file_id])
    assert left["journals"] == [running.id] and not left["tmp"]
    assert unfinished.id not in left["files"] and folder.notice is None and not (tmp_path / "lost+found").exists()
    assert sql(tmp_path, "SELECT * FROM announced") == []
    await folder.close()


@pytest.mark.parametrize("announced", [True, False], ids=["is being published", "cannot be moved on a full disk"])
async def test_a_body_without_a_row_stays(tmp_path: Path, announced: bool) -> None:
    disk = FaultyDisk({})
    folder = await open_folder(tmp_path, disk)
    file = await put(folder, announced=announced, row=False)
    if not announced:
        disk.faults = dict.fromkeys(range(disk.count, 1000), NO_SPACE)
    await folder.recover()
    assert leftovers(tmp_path)["files"] == [file.id]
    if announced:
        await folder.store.add_file(file)
    await folder.close()


async def test_a_deleted_file_is_remembered_until_its_body_is_gone(tmp_path: Path) -> None:
    class Stubborn(Disk):
        stubborn = True

        def remove(self, path: Path) -> None:
            if self.stubborn and path.parent.name == "files":
                raise OSError(NO_SPACE, os.strerror(NO_SPACE))
            super().remove(path)

    disk = Stubborn()
    folder = await open_folder(tmp_path, disk)
    file, later = await put(folder), NOW + TOMBSTONE_SECONDS + 1
    await folder.store.delete_file("t", file.id, NOW)
    with pytest.raises(Exception, match="try again later"):
        await folder.remove_expired(later, 10)
    assert leftovers(tmp_path)["files"] == [file.id] and len(sql(tmp_path, "SELECT * FROM files")) == 1
    disk.stubborn = False
    await folder.remove_expired(later, 10)
    assert leftovers(tmp_path)["files"] == [] == sql(tmp_path, "SELECT * FROM files")
    await folder.close()


# ---- another database


def lose(root: Path) -> None:
    for path in root.glob("tidemill.db*"):
        path.unlink()


def empty(root: Path) -> None:
    lose(root)
    (root / "tidemill.db").touch()


def replace(root: Path) -> None:
    lose(root)
    other = root.parent / "other"
    asyncio.run(_make(other))
    shutil.copy(other / "tidemill.db", root / "tidemill.db")


async def _make(root: Path) -> None:
    folder = await open_folder(root)
    await put(folder)
    await folder.close()


@pytest.mark.parametrize("damage", [lose, empty, replace])
def test_another_database_deletes_nothing(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "state"

    async def before() -> set[str]:
        folder = await open_folder(root)
        await put(folder)
        await put(folder, announced=False, row=False)
        batch = await begin(folder)
        await begin(folder, "completed")
        assert (root / "journals" / batch.id).exists()
        await folder.close()
        return {str(path.relative_to(root)) for name in ("files", "journals") for path in (root / name).iterdir()}

    async def after() -> StateFolder:
        folder = await open_folder(root)
        await folder.recover()
        await put(folder)
        await folder.close()
        return folder

    bodies = asyncio.run(before())
    assert len(bodies) == 6
    damage(root)
    folder = asyncio.run(after())
    assert found(root) == bodies and len(leftovers(root)["files"]) == 1 and not leftovers(root)["journals"]
    for path in (root / "lost+found").glob("*/files/*"):
        assert path.read_bytes() == b"hello"
    (message,) = [text for text in caplog.messages if "lost+found" in text]
    assert "6 files" in message and "restore the database" in message and str(tmp_path) not in message
    assert folder.notice is not None and message in folder.notice
    again = asyncio.run(after())
    assert "lost+found" not in str(again.notice) and found(root) == bodies, "said once"


async def test_an_older_database_goes_on_with_its_own_and_keeps_the_rest(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The database of the morning is put back: later files are set aside, files that it knows are served."""
    state, backup = tmp_path / "state", tmp_path / "backup.db"
    async with batch_server(tokenizer, state) as (_, client):
        first = await until(client, (await submit(client, jsonl([line(1)]))).id)
    shutil.copy(state / "tidemill.db", backup)
    async with batch_server(tokenizer, state) as (_, client):
        second = await until(client, (await submit(client, jsonl([line(2)]))).id)
    lose(state)
    shutil.copy(backup, state / "tidemill.db")
    async with batch_server(tokenizer, state) as (served, client):
        assert [batch.id async for batch in client.batches.list()] == [first.id]
        await check_ended(client, await client.batches.retrieve(first.id), ["id-1"])
        assert found(state) == {f"files/{second.input_file_id}", f"files/{second.output_file_id}"}
        ready = (await get(served, "/ready")).json()
        assert ready["status"] == "ok" and "2 files" in ready["storage_notice"]
        assert "lost+found/" in ready["storage_notice"] and str(state) not in ready["storage_notice"]
    for path in (state / "lost+found").glob("*/files/*"):  # the command of the message brings it back
        path.rename(state / "files" / path.name)
    lose(state)


async def test_the_log_of_a_database_that_is_gone_is_kept(tmp_path: Path) -> None:
    folder = await open_folder(tmp_path)
    await put(folder)
    wal = (tmp_path / "tidemill.db-wal").read_bytes()
    assert wal
    await folder.close()
    (tmp_path / "tidemill.db").unlink()
    (tmp_path / "tidemill.db-wal").write_bytes(wal)
    folder = await open_folder(tmp_path)
    await folder.recover()
    (kept,) = (tmp_path / "lost+found").glob("*/tidemill.db-wal")
    assert kept.read_bytes() == wal and folder.notice is not None
    await folder.close()


async def test_a_folder_of_lost_files_that_belongs_to_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await open_folder(tmp_path)
    file = await put(folder, announced=False, row=False)
    real = Path.mkdir

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if path.parent.name == "lost+found":
            raise PermissionError
        real(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    await folder.recover()
    (kept,) = (tmp_path / "tidemill-lost+found").glob("*/files/*")
    assert kept.name == file.id and not leftovers(tmp_path)["files"]
    await folder.close()


async def test_files_without_a_whole_body_are_counted(tmp_path: Path) -> None:
    folder = await open_folder(tmp_path)
    files = [await put(folder) for _ in range(3)]
    folder.file_path(files[0].id).unlink()
    folder.file_path(files[1].id).write_bytes(b"hell")
    await folder.recover()
    assert folder.notice is not None and folder.notice.startswith("the bodies of 2 files are missing")
    await folder.close()


# ---- a row that cannot be read

BROKEN = [
    ("times", "{bad"), ("times", "[]"), ("times", '{"in_progress_at": "x"}'), ("errors", "null"), ("errors", '[["a"]]'),
    ("errors", "{"), ("metadata", "]"), ("metadata", '{"a": 1}'), ("status", "frog"), ("status", ""), ("total", -1),
    ("completed", -(2**63)), ("created_at", -5), ("output_tokens", -1), ("output_file_id", "../etc/passwd"),
    ("input_file_id", "x"), ("times", b"\xff\xfe".decode("latin-1")), ("id", "batch_x"),
]  # fmt: skip


@pytest.mark.parametrize("status", ["in_progress", "cancelling", "completed", "validating"])
@pytest.mark.parametrize(("column", "value"), BROKEN)
async def test_a_batch_whose_row_is_damaged_fails_alone(tmp_path: Path, column: str, value: Any, status: str) -> None:
    folder = await open_folder(tmp_path)
    good, bad = await begin(folder, "validating"), await begin(folder, status)
    sql(tmp_path, f"UPDATE batches SET {column} = ? WHERE id = ?", value, bad.id)
    for _ in range(2):  # before and after a start
        batches, _ = await folder.store.list_batches("t", Page(10))
        shown, other = batches
        assert other == good and await folder.store.load_batch(good.id) == good
        assert shown.status is BatchStatus.FAILED and shown.errors[0].code == "record_damaged"
        name = "usage" if column == "output_tokens" else column
        assert name in shown.errors[0].message or column == "completed"
        assert json.dumps(shown.as_json())
        assert [batch.id for batch in await folder.store.unfinished_batches() if not batch.is_damaged] == [good.id]
        folder = await reopen(folder)
        await folder.recover()
    (raw,) = (tmp_path / "lost+found").glob("*/batches.jsonl")
    assert json.loads(raw.read_text())[column] == value
    assert found(tmp_path) == {"batches.jsonl", f"journals/{bad.id}"}, "its finished rows are kept"
    assert leftovers(tmp_path)["journals"] == [good.id] and folder.notice is None, "said at one start"
    assert sql(tmp_path, "SELECT count(*) FROM lines") == [(0,)]
    await folder.close()


async def test_a_running_batch_whose_row_is_damaged_keeps_its_journal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Other batches go on, lists and ticks do not raise."""
    async with batch_server(tokenizer, tmp_path, "x", hold_after=0) as (served, client):
        bad = await submit(client, jsonl([line(i) for i in range(3)]))
        await served.engine.wait_for_event("add", 3)
        (tmp_path / "journals" / bad.id).write_text("rows")
        sql(tmp_path, "UPDATE batches SET times = '{bad' WHERE id = ?", bad.id)
        served.engine.release()
        other = await submit(client, jsonl([line(7)]))
        await check_ended(client, await until(client, other.id), ["id-7"])
        await served.app.state.batches.jobs.tick()
        listed = [batch async for batch in client.batches.list()]
        assert [batch.status for batch in listed] == ["completed", "failed"]
        assert (await client.batches.cancel(bad.id)).status == "failed"
        assert (tmp_path / "journals" / bad.id).exists()


@pytest.mark.parametrize(("column", "value"), [("bytes", -1), ("created_at", -7), ("expires_at", -1)])
async def test_a_file_whose_row_is_damaged_shows_as_an_error(tmp_path: Path, column: str, value: Any) -> None:
    folder = await open_folder(tmp_path)
    good, bad = await put(folder), await put(folder)
    sql(tmp_path, f"UPDATE files SET {column} = ? WHERE id = ?", value, bad.id)
    files, _ = await folder.store.list_files("t", Page(10), None, -10)
    shown = {file.id: file.as_json() for file in files}
    assert shown[good.id]["status"] == "processed" and shown[bad.id]["status"] == "error"
    assert column in shown[bad.id]["status_details"]
    await folder.recover()
    assert (tmp_path / "files" / bad.id).exists()
    await folder.close()
