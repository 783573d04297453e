"""The part `disk` of the chaos benchmark: faults really happen and go away, and what they break breaks a promise."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.disk import Round, promises
from benchmarks.chaos.disk_faults import CallFault, Fault, Full, Ground, Moved, Page, during, ground
from benchmarks.chaos.server import Server

CALLS = """
import os, sys
folder, calls, descriptor = sys.argv[1], sys.argv[2], int(sys.argv[3])
for call in calls.split(","):
    try:
        match call:
            case "write": os.pwrite(descriptor, b"x", 0)
            case "fsync": os.fsync(descriptor)
            case "read": os.pread(descriptor, 1, 0)
            case "create": os.close(os.open(folder + "/new", os.O_WRONLY | os.O_CREAT))
            case "rename": os.rename(folder + "/known", folder + "/known")
        print("ok")
    except OSError as error:
        print(error.errno)
"""
ALL = "write,fsync,read,create,rename"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Ground]:
    with ground(tmp_path) as found:
        yield found


def attempt(place: Ground, folder: Path) -> list[str]:
    """Results of system calls of a process with the library preloaded."""
    environment = {**os.environ, **place.environment}
    with (folder / "known").open("w+b") as file:
        known = file.fileno()
        command = [sys.executable, "-c", CALLS, str(folder), ALL, str(known)]
        done = subprocess.run(command, env=environment, pass_fds=[known], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_calls_fail_below_the_folder_while_told_to(place: Ground, tmp_path: Path) -> None:
    server = Server(tmp_path, state=place.folder / "state")
    faults = {fault.name: fault for fault in place.faults if isinstance(fault, CallFault)}
    seen = {}
    for name, fault in faults.items():
        if fault.delay_ms == 0 and fault.percent == 100:
            with during(fault, server):
                assert attempt(place, tmp_path) == ["ok"] * 5, "another folder is not touched"
                seen[name] = attempt(place, place.folder)
            assert attempt(place, place.folder) == ["ok"] * 5
    assert seen["EIO on writes"] == [str(errno.EIO), *["ok"] * 4]
    assert seen["ENXIO on fsync"] == ["ok", str(errno.ENXIO), *["ok"] * 3]
    assert seen["EIO on reads"] == ["ok", "ok", str(errno.EIO), "ok", "ok"]
    assert seen["read-only"] == [str(errno.EROFS), "ok", "ok", str(errno.EROFS), str(errno.EROFS)]


def test_without_a_compiler_and_a_mount_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with ground(tmp_path) as place:
        assert [fault.name for fault in place.faults] == ["moved away"] and len(place.skipped) == 2
        assert "C compiler" in place.skipped[1]


def test_a_full_disk_has_no_room_and_a_moved_folder_comes_back(place: Ground, tmp_path: Path) -> None:
    server = Server(tmp_path, state=place.folder / "state")
    server.state.mkdir()
    with during(Moved(), server):
        assert not server.state.exists()
    assert server.state.is_dir()
    if any(isinstance(fault, Full) for fault in place.faults):
        with during(Full(), server), pytest.raises(OSError, match="No space left"):
            (server.state / "file").write_bytes(bytes(4096))
        (server.state / "file").write_bytes(bytes(4096))


def test_harm_by_a_fault_breaks_a_promise(tmp_path: Path) -> None:
    fault: Fault = CallFault("x", Page(tmp_path / "page"), 1, errno.EIO)
    good = Round("x", waits=[0.1], told=1, status="completed")
    good.chats[200] = good.uploads[507] = 3
    assert all(promise.kept for promise in promises(good, fault, kill=False))
    bad = Round("x", waits=[4.0], unreadable=1, status="failed", miscounted=1, failed=1, tokens=8, exited=True)
    bad.chats[503] = bad.uploads[200] = 1
    found = promises(bad, fault, kill=False)
    assert found[0].value == "8" and [promise.kept for promise in found] == [False] * 3
    assert [promise.kept for promise in promises(bad, fault, kill=True)] == [False, True, True]
