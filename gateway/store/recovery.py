"""Cleanup of a state folder at start: remove known leftovers, and move unknown files to `lost+found/<time>/`.

The database knows a body by its row, by the row of a deleted file, or by an announcement: ids are announced before
their bodies appear, which identifies bodies that a crash left without a row. Other bodies and journals belong to
another database, which was lost, emptied or replaced by a backup. They are never removed.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.store.bucket import Bucket
from gateway.store.disk import Disk, StorageError
from gateway.store.row_store import RowStore

log = logging.getLogger("tidemill.gateway")

SWEEP = 1000
LOST_AND_FOUND = ("lost+found", "tidemill-lost+found")
"""The second name is used where `lost+found` belongs to the file system and is not writable."""

Explain = Callable[[Sequence[str]], Awaitable[Mapping[str, bool]]]
"""Return whether each name must stay (True) or can be removed (False), leaving out unknown names."""


class LostAndFound:
    """Destination for unknown files, created with the first file. Blocking. Raises OSError."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self.folder: Path | None = None
        self.moved = 0

    def take(self, path: Path) -> None:
        """Move a file out of the way, durably."""
        folder = self._place()
        target = folder / path.relative_to(self._root)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        self._disk.rename(path, target)
        self.moved += 1
        for changed in (target.parent, folder, folder.parent, self._root, path.parent):
            self._disk.sync_folder(changed)

    def keep_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write damaged database rows to `batches.jsonl`."""
        file = self._disk.create(self._place() / "batches.jsonl")
        try:
            for row in rows:
                file.write(json.dumps(dict(row), default=repr).encode() + b"\n")
            file.sync()
        finally:
            file.close()

    def _place(self) -> Path:
        if self.folder is None:
            name = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            try:
                self.folder = self._make(LOST_AND_FOUND[0], name)
            except PermissionError:
                self.folder = self._make(LOST_AND_FOUND[1], name)
        return self.folder

    def _make(self, base: str, name: str) -> Path:
        (self._root / base).mkdir(mode=0o700, exist_ok=True)
        (self._root / base / name).mkdir(mode=0o700)
        return self._root / base / name


class StateRecovery:
    """Cleanup at one start. Steps that fail are left to the next start."""

    def __init__(
        self, root: Path, disk: Disk, store: RowStore, found: LostAndFound, bucket: Bucket | None = None
    ) -> None:
        self._root = root
        self._disk = disk
        self._store = store
        self._found = found
        self._bucket = bucket
        self._has_begun = False

    async def run(self, now: int) -> str | None:
        """Clean up and return the findings for the operator, if any. Raises StorageError."""
        notes: list[str] = []
        if not self._has_begun:  # later, these files can be in use
            await self._tidy("tmp", _all_can_go)
            if self._bucket is not None:  # another machine may have written more
                await self._tidy("journals", _all_can_go)
            self._has_begun = True
        damaged = await self._store.damaged_batches()
        if damaged:
            notes.append(f"the database rows of {len(damaged)} batches are damaged; these batches have failed")
            await self._try(lambda: self._found.keep_rows(damaged.values()))
        await self._tidy("journals", self._store.explain_journals)
        await self._tidy("files", self._store.explain_files)
        if self._bucket is not None:
            await self._tidy_objects(self._bucket)
        with suppress(StorageError):
            await self._store.fail_damaged(list(damaged), now)
            await self._store.forget_announced()
        if self._bucket is None and (lacking := await self._count_lacking()):
            notes.append(f"the bodies of {lacking} files are missing or incomplete; these files cannot be read")
        if self._found.folder is not None:
            where = self._found.folder.relative_to(self._root)
            notes.append(
                f"{self._found.moved} files without a database entry were moved to {where} in the state folder; if the "
                "database was lost or replaced, stop the server, restore the database and these files, and start it; "
                "otherwise delete them"
            )
        for note in notes:
            log.error("%s", note)
        return "; ".join(notes) or None

    async def _tidy(self, folder: str, explain: Explain) -> None:
        with self._disk.storing():
            names = await asyncio.to_thread(os.listdir, self._root / folder)
        for start in range(0, len(names), SWEEP):
            some = names[start : start + SWEEP]
            explained = await explain(some)
            for name in some:
                if not explained.get(name, False):
                    is_copy = self._bucket is not None and folder == "files"
                    move = self._disk.remove if name in explained or is_copy else self._found.take
                    await self._try(lambda move=move, name=name: move(self._root / folder / name))  # type: ignore[misc]

    async def remove_copies(self) -> None:
        """Remove copies of files that are not in the database. Raises StorageError."""
        await self._tidy("files", self._store.explain_files)

    async def _tidy_objects(self, bucket: Bucket) -> None:
        """Remove objects of bodies that never got a row, and of journals whose batch has ended. Raises StorageError."""
        orphans = [f"files/{file_id}" for file_id in await self._store.announced_files()]
        await asyncio.to_thread(bucket.delete, orphans)
        batches = await asyncio.to_thread(bucket.folders, "journals/")
        for start in range(0, len(batches), SWEEP):
            explained = await self._store.explain_journals(batches[start : start + SWEEP])
            for batch in (name for name, must_stay in explained.items() if not must_stay):
                await asyncio.to_thread(bucket.delete_all, f"journals/{batch}/")

    async def _try(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(work)
        except OSError as error:
            log.warning("the state folder cannot be cleaned up: %s", error.strerror)

    async def _count_lacking(self) -> int:
        """Count files whose body is missing or has another size."""

        def sizes() -> dict[str, int]:
            with self._disk.storing(), os.scandir(self._root / "files") as entries:
                return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}

        there, lacking, after = await asyncio.to_thread(sizes), 0, 0
        while rows := await self._store.bodies(after, SWEEP):
            lacking += sum(there.get(file_id) != size for _, file_id, size in rows)
            after = rows[-1][0]
        return lacking


async def _all_can_go(names: Sequence[str]) -> Mapping[str, bool]:
    return dict.fromkeys(names, False)
