"""The state folder at a start: which folders are taken, the modes of all files, and disks that refuse the start."""

import errno
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_tools import (
    batch_server,
    check_ended,
    eventually,
    jsonl,
    leftovers,
    line,
    open_folder,
    submit,
    until,
    upload,
)
from fake_engine import MODEL
from recording_disk import IO_ERROR, NO_SPACE, FaultyDisk
from support.http import get
from support.lazy import openai

from engine.errors import ConfigError
from engine.process import launcher
from engine.text.tokenizer import Tokenizer
from gateway.store.folder import MISTAKES, check_free, open_state
from gateway.telemetry.request_log import RequestLog
from tidemill.commands.preflight import check_folder


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, str]:
    """Files and folders of a folder that others may use."""
    return {
        str(path.relative_to(root)): oct(path.lstat().st_mode & 0o777)
        for path in root.rglob("*")
        if path.lstat().st_mode & 0o077
    }


# ---- modes


async def test_everything_in_the_folder_is_for_its_owner_alone(
    tokenizer: Tokenizer, tmp_path: Path, no_umask: None
) -> None:
    root = tmp_path / "new" / "state"
    async with batch_server(tokenizer, root) as (served, client):
        folder = served.app.state.batches.folder
        batch = await submit(client, jsonl([line(i) for i in range(3)]))
        assert (await until(client, batch.id)).status == "completed"
        folder.disk.open_journal(folder.journal_path(batch.id)).close()
        (root / "files" / "unknown").touch(mode=0o600)
        await folder.recover()
        launcher._write(root / "engine.pid", "1\n")
        assert {"tidemill.db", "tidemill.db-wal", "engine.pid", "lost+found", "lock"} <= {
            path.name for path in root.iterdir()
        }
        assert modes(tmp_path / "new") == {}
    log = RequestLog(str(tmp_path / "requests.jsonl"), lambda: None, lambda _: None)  # type: ignore[arg-type, return-value]
    log._close()
    assert stat.S_IMODE((tmp_path / "requests.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o1777])
async def test_the_mode_of_a_folder_that_exists_stays(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "state"
    root.mkdir()
    root.chmod(mode)
    for _ in range(2):
        await (await open_folder(root)).close()
        assert stat.S_IMODE(root.stat().st_mode) == mode
    assert modes(root) == {}


@pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, True), (0o1777, True), (0o770, True)])
async def test_a_shared_folder_with_other_files_is_refused(tmp_path: Path, mode: int, refused: bool) -> None:
    root = tmp_path / "tmp"
    (root / "of somebody").mkdir(parents=True)
    root.chmod(mode)
    if not refused:
        check_free(root)
        await (await open_folder(root)).close()
        return
    for attempt in (check_free, open_state):
        with pytest.raises(ConfigError) as caught:
            attempt(root)
        assert "of somebody" in caught.value.message and f"e.g. {root}/tidemill" in caught.value.message
    assert [path.name for path in root.iterdir()] == ["of somebody"]
    assert stat.S_IMODE(root.stat().st_mode) == mode


def test_a_fresh_volume_is_taken(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    tmp_path.chmod(0o755)
    open_state(tmp_path).close_now()


# ---- disks that refuse the start


@pytest.mark.parametrize("code", [NO_SPACE, IO_ERROR, errno.EROFS, errno.ESTALE])
async def test_a_start_on_a_disk_that_refuses_it_serves_chats_and_opens_the_folder_later(
    tokenizer: Tokenizer, tmp_path: Path, code: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "state"
    async with batch_server(tokenizer, root, "x", hold_after=0) as (served, client):
        batch = await submit(client, jsonl([line(i) for i in range(4)]))
        await served.engine.wait_for_event("add", 4)
    disk = FaultyDisk(dict.fromkeys(range(10_000), code))
    async with batch_server(tokenizer, root, disk=disk) as (served, client):
        assert (await client.completions.create(model=MODEL, prompt="x", max_tokens=1)).choices
        ready = await get(served, "/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
        assert errno.errorcode[code] in ready.json()["storage"]
        for refused in (
            upload(client, b"x"),
            client.batches.list(),
            client.batches.retrieve(batch.id),
            client.files.list(),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                await refused
            assert caught.value.status_code == 507
        assert "tidemill_storage_fault 1.0" in (await get(served, "/metrics")).text
        disk.faults = {}
        jobs = served.app.state.batches.jobs
        await eventually(lambda: jobs.storage_fault() is None)
        await check_ended(client, await until(client, batch.id), [f"id-{i}" for i in range(4)])
    assert len([text for text in caplog.messages if errno.errorcode[code] in text]) == 1
    assert not [text for text in caplog.messages if "unexpected" in text] and not leftovers(root)["journals"]
    assert "Traceback" not in capfd.readouterr().err


async def test_a_start_that_is_refused_holds_no_lock(tmp_path: Path) -> None:
    disk = FaultyDisk({0: NO_SPACE})
    folder = await open_folder(tmp_path, disk)
    other = await open_folder(tmp_path)
    with pytest.raises(Exception, match="try again later"):
        await folder.store.settle()
    assert folder.disk.health.fault is not None
    await other.close()
    await folder.store.settle()
    assert folder.disk.health.fault is None
    await folder.close()


async def test_a_database_that_another_program_holds_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await open_folder(tmp_path)).close()
    lock = sqlite3.connect(tmp_path / "tidemill.db", isolation_level=None)
    lock.execute("PRAGMA locking_mode = EXCLUSIVE")
    lock.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr("gateway.store.sqlite.sqlite3.connect", lambda *a, **k: _impatient(*a, **k))
    folder = await open_folder(tmp_path)
    assert "SQLITE_BUSY" in str(folder.disk.health.fault)
    lock.close()
    await folder.store.settle()
    await folder.close()


_connect = sqlite3.connect


def _impatient(*arguments: Any, **options: Any) -> sqlite3.Connection:
    return _connect(*arguments, timeout=0.0, **options)


@pytest.mark.parametrize("code", sorted(MISTAKES))
async def test_a_wrong_path_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("gateway.store.folder.fcntl.flock", flock)
    with pytest.raises(ConfigError) as caught:
        await open_folder(tmp_path / "state")
    assert caught.value.message == f"--state-dir {tmp_path / 'state'} cannot be used: {os.strerror(code)}"


@pytest.mark.parametrize("name", ["tidemill.db", "lock", "files", "journals", "tmp"])
async def test_a_file_in_the_place_of_a_folder_or_the_reverse_is_refused(tmp_path: Path, name: str) -> None:
    if name in ("tidemill.db", "lock"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        await open_folder(tmp_path)


def test_a_read_only_file_system_is_no_wrong_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="Permission denied"):
        check_folder("--state-dir", tmp_path, faults_pass=True)
    real = os.statvfs(tmp_path)

    class ReadOnly:
        f_flag = real.f_flag | os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda _: ReadOnly)
    assert check_folder("--state-dir", tmp_path / "x", faults_pass=True) == tmp_path
    with pytest.raises(ConfigError, match="Read-only file system"):
        check_folder("--offload-dir", tmp_path)
