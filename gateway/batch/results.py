"""Makes the ends of lines durable, in groups: rows into the journal, fsync, then their places and the counts into the
store. What comes while a group is being written is the next group.

Knows nothing of engines or of how jobs are fed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from anyio import to_thread

from gateway.batch.feed import FinishedLine, Job, Window
from gateway.batch.journal import frame
from gateway.http.errors import log_unexpected
from gateway.store.disk import StorageError
from gateway.store.folder import StateFolder
from gateway.store.health import StorageHealth
from gateway.store.objects import LineResult, Usage

log = logging.getLogger("tidemill.gateway")

ResultT = TypeVar("ResultT")

MAX_PAUSE = 10.0
"""Seconds between two attempts at most: so long may a repaired folder go unnoticed."""


async def to_end(work: Awaitable[ResultT]) -> ResultT:
    """Await work that must not be left half done: a cancellation is raised only after its end."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # whatever it was, who was cancelled does not hear of it
        raise


async def in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Run blocking work to its end in a thread."""
    return await to_end(to_thread.run_sync(work))


class StorageRetry:
    """Repeats work of the state folder until no storage fault ends it, with a growing pause.

    `healthy` is false while any work waits; `changed` is called when none waits any more. When `stopping`, the fault is
    raised instead.
    """

    def __init__(self, retry_seconds: float, changed: Callable[[], None], health: StorageHealth) -> None:
        self.stopping = False
        self._retry_seconds = retry_seconds
        self._changed = changed
        self._health = health
        self._waiting = 0

    @property
    def healthy(self) -> bool:
        return not self._waiting

    async def run(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """`work` must be repeatable. Raises StorageError when stopping, and what else `work` raises."""
        try:
            return await work()
        except StorageError as error:
            if self.stopping:
                raise
            self._health.failed("jobs", error)
        self._waiting += 1
        try:
            return await self._repeat(work)
        finally:
            self._waiting -= 1
            if self.healthy:
                self._health.worked("jobs")
                self._changed()

    async def _repeat(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        pause = self._retry_seconds
        while True:
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE, 2 * pause)
            try:
                return await work()
            except StorageError as error:
                if self.stopping:
                    raise
                self._health.failed("jobs", error)


class ResultWriter:
    """One task that writes; `put` never waits, as what is not written is bounded by the window."""

    def __init__(self, folder: StateFolder, retry: StorageRetry, window: Window, changed: Callable[[], None]) -> None:
        self._folder = folder
        self._retry = retry
        self._window = window
        self._changed = changed
        self._waiting: dict[Job, list[FinishedLine]] = {}
        self._ready = asyncio.Event()

    def put(self, job: Job, line: FinishedLine) -> None:
        self._waiting.setdefault(job, []).append(line)
        job.unwritten += 1
        job.written.clear()
        self._ready.set()

    async def run(self) -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            groups, self._waiting = self._waiting, {}
            await asyncio.gather(*(self._write(job, lines) for job, lines in groups.items()))

    async def _write(self, job: Job, lines: list[FinishedLine]) -> None:
        start = job.journal_end
        try:
            await self._retry.run(lambda: self._commit(job, lines, start))
        except StorageError:
            log.warning("%d results could not be stored before the end; their lines run again", len(lines))
        except Exception as error:
            log_unexpected(error)
            job.retry.extend(line.ref for line in lines)
        finally:
            self._window.release(line.ref for line in lines)
            job.unwritten -= len(lines)
            if not job.unwritten:
                job.written.set()
        if not job.batch.remaining:
            job.settled.set()
        self._changed()

    async def _commit(self, job: Job, lines: list[FinishedLine], start: int) -> None:
        """Both steps are repeatable: the same rows go to the same place in the journal."""
        results: list[LineResult] = []
        usage, data = Usage(), bytearray()
        for line in lines:
            framed = frame(job.batch.id, line.ref.rank, line.succeeded, line.usage, line.row)
            results.append(LineResult(line.ref.rank, line.succeeded, start + len(data), len(framed)))
            data += framed
            usage = usage.plus(line.usage)
        await in_thread(lambda: self._append(job.batch.id, data, start))
        job.journal_end = start + len(data)
        job.batch = await to_end(self._folder.store.add_results(job.batch.id, results, usage))

    def _append(self, batch_id: str, data: bytearray, start: int) -> None:
        path, disk = self._folder.journal_path(batch_id), self._folder.disk
        with disk.storing():
            journal = disk.open_journal(path)
            try:
                journal.write_at(data, start)
                journal.sync()
            finally:
                journal.close()
            if start == 0:
                disk.sync_folder(path.parent)
