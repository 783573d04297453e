"""The state folder: what lies where in it, who holds it, and what a crash may have left behind.

    lock                    held by the one server that uses the folder; its process's number
    tidemill.db             rows
    files/<file id>         bodies of uploads and results; each has a row or an announcement, see `recovery`
    journals/<batch id>     results of a running batch in the order of their ends
    tmp/                    files that are being written; emptied at start
    lost+found/<time>/      files that the database did not know at a start

Names are ids that this server drew itself; nothing of a client's becomes a part of a path.
"""

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from gateway.store.disk import Disk, DiskFile, StorageError
from gateway.store.objects import BATCH_ID, FILE_ID
from gateway.store.opening import DATABASE, Opening
from gateway.store.recovery import Recovery
from gateway.store.sqlite import SqliteStore

PROBE = b"tidemill" * 512


class StateFolder:
    """An open state folder. Use `open_state`."""

    def __init__(self, root: Path, disk: Disk, store: SqliteStore, opening: Opening) -> None:
        self.root = root
        self.disk = disk
        self.store = store
        self.notice: str | None = None
        """Findings of the last start that the operator has to know."""
        self._opening = opening
        self._in_doubt: set[str] = set()

    def file_path(self, file_id: str) -> Path:
        assert FILE_ID.fullmatch(file_id)
        return self.root / "files" / file_id

    def journal_path(self, batch_id: str) -> Path:
        assert BATCH_ID.fullmatch(batch_id)
        return self.root / "journals" / batch_id

    def create_temp(self) -> DiskFile:
        """A file for something that will be published. Raises StorageError."""
        with self.disk.storing():
            return self.disk.create(self.root / "tmp" / token_hex(16))

    def publish_files(self, *files: tuple[DiskFile, str]) -> None:
        """Let files appear under their ids. Raises StorageError, after which nothing is left of any."""
        with self.disk.storing():
            self.disk.publish(*((file, self.file_path(file_id)) for file, file_id in files))

    def remove_body(self, file_id: str) -> None:
        """Best effort: what stays goes at the next start."""
        with self.disk.storing():
            self.disk.remove(self.file_path(file_id))

    def check_disk(self) -> None:
        """Write, sync, read back and remove a small file. Blocks. Raises StorageError."""
        file = self.create_temp()
        try:
            with self.disk.storing():
                file.write(PROBE)
                file.sync()
                if file.path.read_bytes() != PROBE:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        finally:
            file.discard()

    async def check_recovery(self) -> None:
        """After a fault: note whether the folder takes data again, also when there is nothing to store."""
        if self.disk.health.fault is not None:
            with suppress(StorageError):
                await asyncio.to_thread(self.check_disk)
            await self.store.settle()
            self.disk.health.worked("database")

    async def withdraw(self, error: Exception, *file_ids: str) -> None:
        """Remove bodies that could not be given rows; while a commit is in doubt they stay until it is settled."""
        if isinstance(error, StorageError) and error.in_doubt:
            self._in_doubt.update(file_ids)
            with suppress(StorageError):
                await self.settle()
            return
        with suppress(Exception):  # bodies that stay go at the next start
            for file_id in file_ids:
                await asyncio.to_thread(self.remove_body, file_id)
            await self.store.forget_announced(file_ids)

    async def settle(self) -> None:
        """Decide what was in doubt: bodies without a row go. Raises StorageError, and then it is still in doubt."""
        if self._in_doubt:
            doubted = list(self._in_doubt)
            await self.store.settle()
            known = await self.store.known_files(doubted)
            lost = [name for name in doubted if name not in known]
            for name in lost:
                await asyncio.to_thread(self.remove_body, name)
            self._in_doubt.difference_update(doubted)
            await self.store.forget_announced(lost)

    async def recover(self) -> None:
        """Tidy up after the last process, before anything else is done with the folder. Raises StorageError."""
        self.notice = await Recovery(self.root, self.disk, self.store, self._opening.found).run(int(time.time()))

    async def remove_expired(self, now: int, limit: int) -> None:
        """Delete expired files. Raises StorageError.

        The row of a deleted file is removed when its body certainly is: without the row nothing would explain the body.
        """
        old = await self.store.old_tombstones(now, limit)
        for file_id in [*await self.store.expire_files(now, limit), *old]:
            await asyncio.to_thread(self.remove_body, file_id)
        if old:
            await self.store.purge_files(old)

    async def close(self) -> None:
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Finish what was begun and let another server have the folder. Blocks. Idempotent."""
        self.store.close_now()
        self._opening.close()


def open_state(
    root: Path, disk: Disk | None = None, on_commit: Callable[[sqlite3.Connection], None] | None = None
) -> StateFolder:
    """Take hold of a folder, making it if there is none. Blocks.

    A folder that the system refuses now (a full or read-only disk) is opened later, with the first use that succeeds;
    until then everything raises StorageError. Raises ConfigError, with nothing changed in the folder, when another
    server holds it, the database cannot be used, or the path is wrong.
    """
    disk = disk or Disk()
    opening = Opening(root, disk)
    connection = None
    with suppress(StorageError):
        connection = opening.open()
    try:
        store = SqliteStore(root / DATABASE, on_commit, disk.health, connection, opening.open)
        return StateFolder(root, disk, store, opening)
    except BaseException:  # also a Ctrl-C must not leave the folder locked
        if connection is not None:
            connection.close()
        opening.close()
        raise
