"""The file layer: which files appear, when, and which files a full or faulty disk leaves behind."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from recording_disk import Log, RecordingDisk
from support.tables import for_each

from gateway.store.disk import QUIET_SECONDS, Disk, DiskFile, StorageError, StorageHealth, UnreadableError, read_errors


def publish(disk: Disk, folder: Path, data: bytes = b"content") -> Path:
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "files").mkdir(exist_ok=True)
    file = disk.create(folder / "tmp" / "t")
    try:
        file.write(data)
        disk.publish((file, folder / "files" / "f"))
    except BaseException:
        file.discard()
        raise
    return folder / "files" / "f"


def test_a_file_is_written_synced_renamed_and_its_folder_synced_in_this_order(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert publish(RecordingDisk(log), tmp_path).read_bytes() == b"content"
    assert [(kind, name) for kind, name, _ in log.entries] == [
        ("create", "tmp/t"), ("write", "tmp/t"), ("sync", "tmp/t"), ("rename", "tmp/t"), ("sync_folder", "files"),
    ]  # fmt: skip


FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENOENT, errno.EACCES, errno.ESTALE)
"""No room, a broken device, a file system that became read-only, no descriptor, no file, no right, a lost server."""


@pytest.mark.parametrize("code", FAULTS)
def test_an_errno_is_a_fault_of_storage_that_is_logged_once(code: int, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    for _ in range(3):
        with pytest.raises(StorageError), disk.storing():
            raise OSError(code, os.strerror(code), "/secret/path")
    assert disk.health.fault == f"{errno.errorcode[code]}: {os.strerror(code)}"
    (message,) = caplog.messages
    assert errno.errorcode[code] in message and "/secret" not in message


@for_each("code", sorted(errno.errorcode))
def test_a_read_fails_for_the_file_or_for_the_folder(tmp_path: Path, code: int) -> None:
    """A damaged file costs its own lines; any other fault pauses the batch and costs nothing."""
    of_the_file = {errno.ENOENT, errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EISDIR}
    with pytest.raises(UnreadableError if code in of_the_file else StorageError), read_errors(tmp_path / "f"):
        raise OSError(code, os.strerror(code))
    with pytest.raises(StorageError if code == errno.ENOENT else Exception), read_errors(tmp_path / "no" / "f"):
        raise OSError(code, os.strerror(code))


def test_health_lasts_until_each_part_works_again(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    health = StorageHealth(lambda: now)
    for part, code in (("files", errno.ENOSPC), ("database", errno.EIO), ("files", errno.EIO)):
        health.failed(part, OSError(code, os.strerror(code)))
    caplog.set_level("INFO")
    assert [message.split(":")[0] for message in caplog.messages] == [
        "the state folder cannot be used (ENOSPC", "the state folder cannot be used (EIO",
    ]  # fmt: skip
    health.worked("files")
    assert health.fault == "EIO: Input/output error"
    health.worked("database")
    assert health.fault is None and caplog.messages[-1] == "the state folder can be used again"
    for _ in range(100):  # a fault that comes and goes
        health.failed("files", OSError(errno.EIO, "Input/output error"))
        health.worked("files")
    assert len(caplog.messages) == 3
    now = QUIET_SECONDS
    health.failed("files", OSError(errno.EIO, "Input/output error"))
    assert len(caplog.messages) == 4


def test_a_folder_that_is_gone_takes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError), Disk().storing():
        Disk().create(tmp_path / "no" / "such" / "folder")


def test_a_device_that_is_always_full() -> None:
    file = DiskFile(Disk(), Path("/dev/full"), os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(StorageError), file.disk.storing():
        file.write(b"x")
    file.close()
    file.close()


LIMITED = """
import sys
from pathlib import Path
from gateway.store.disk import Disk, StorageError
file = Disk().create(Path(sys.argv[1]))
with file.disk.storing():
    file.write(b"x" * 1000)
try:
    with file.disk.storing():
        file.write(b"x" * 1000)
except StorageError:
    print("full at", file.size)
"""


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    """A write that is taken in part is an error as a whole: the size that counts does not move."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "f")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "full at 1000"


def test_a_journal_is_written_in_place(tmp_path: Path) -> None:
    journal = Disk().open_journal(tmp_path / "j")
    journal.write_at(b"hello", 0)
    journal.close()
    journal = Disk().open_journal(tmp_path / "j")
    journal.write_at(b"LO!", 3)
    journal.sync()
    journal.close()
    assert (tmp_path / "j").read_bytes() == b"helLO!"
