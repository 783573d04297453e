"""Journal of a batch: group commit of finished lines, and the format and reading of their rows.

    <CRC-32, 8 hex digits> <rank> <1 or 0: succeeded> <input>/<cached>/<output>/<reasoning tokens>/<engine us> <row>

The checksum covers the batch id and the rest of the row, so bytes of another batch or line are detected.
`JournalReader` blocks: call it in a worker thread. `ResultWriter` appends the rows of a group, calls fsync, then stores
their offsets and the counts. Lines that finish while a group is being written form the next group.
"""

import asyncio
import logging
import os
import zlib
from typing import NamedTuple

from engine.panics import as_error
from gateway.batch.feed import FinishedLine, Job
from gateway.batch.run import BatchRun, in_thread, to_end
from gateway.http.errors import log_unexpected
from gateway.store.disk import StorageError, UnreadableError, read_errors
from gateway.store.folder import StateFolder
from gateway.store.objects import LineRecord, LineResult, Usage

_CRC_BYTES = 9
"""Including the space."""


class JournalRow(NamedTuple):
    """A result row and its usage."""

    row: bytes
    usage: Usage


def frame(batch_id: str, rank: int, succeeded: bool, usage: Usage, row: bytes) -> bytes:
    """Return the journal entry of a finished line."""
    content = b"%d %d %d/%d/%d/%d/%d %b" % (rank, succeeded, *usage, row)
    return _checksum(batch_id, content) + content


def unframe(batch_id: str, rank: int, succeeded: bool, data: bytes) -> JournalRow | None:
    """Return the row in a journal entry, or None if the entry is damaged or belongs to another line."""
    content = data[_CRC_BYTES:]
    if data[:_CRC_BYTES] != _checksum(batch_id, content):
        return None
    number, outcome, usage, row = content.split(b" ", 3)
    if (int(number), int(outcome)) != (rank, succeeded):
        return None
    return JournalRow(row, Usage(*map(int, usage.split(b"/"))))


def _checksum(batch_id: str, content: bytes) -> bytes:
    return b"%08x " % zlib.crc32(content, zlib.crc32(batch_id.encode()))


class JournalReader:
    """Read and verify the rows of one journal. The caller must close it.

    Attributes:
        damaged: ranks of the lines whose row is missing or changed. With `lenient` this includes unreadable sectors.
        counts: number of intact rows that failed ([0]) and succeeded ([1]).
        usage: total usage of the intact rows.
    """

    def __init__(self, folder: StateFolder, batch_id: str, lenient: bool) -> None:
        self._disk = folder.disk
        self._folder = folder
        self._path = folder.journal_path(batch_id)
        self._batch_id = batch_id
        self._lenient = lenient
        self._descriptor = -1
        self.end = 0
        self.damaged: list[int] = []
        self.counts = [0, 0]
        self.usage = Usage()

    def read(self, record: LineRecord) -> bytes | None:
        """Return the row of a finished line, or None if the row is damaged.

        Raises UnreadableError for an unreadable sector unless `lenient`, and StorageError if the state folder fails.
        """
        assert record.succeeded is not None
        found = self._read(record)
        if found is None:
            self.damaged.append(record.ref.rank)
            return None
        self.counts[record.succeeded] += 1
        self.usage = self.usage.plus(found.usage)
        return found.row

    def _read(self, record: LineRecord) -> JournalRow | None:
        if self._descriptor < 0:
            self._folder.copy_journal(self._batch_id)
        try:
            with read_errors(self._path):
                if self._descriptor < 0:
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                    self.end = os.fstat(self._descriptor).st_size
                if not 0 <= record.start < record.start + record.length <= self.end:
                    return None
                data = self._disk.read_at(self._descriptor, record.start, record.length)
        except UnreadableError as error:
            if not (self._lenient or error.gone):
                raise
            return None
        return unframe(self._batch_id, record.ref.rank, bool(record.succeeded), data)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


log = logging.getLogger("tidemill.gateway")


class ResultWriter:
    """Write result rows from one task. `put` does not wait: the window bounds the number of unwritten lines.

    After an unexpected error the job's rows stay in memory and are written again after a pause; the job gets no turn
    until then. Rows beyond half of the window are dropped, and their lines run again later. The job is
    offered a turn after each group, whether or not it was written.
    """

    def __init__(self, run: BatchRun) -> None:
        self._run = run
        self._waiting: dict[Job, list[FinishedLine]] = {}
        self._pausing: set[Job] = set()
        self._ready = asyncio.Event()

    def put(self, job: Job, line: FinishedLine) -> None:
        self._waiting.setdefault(job, []).append(line)
        job.unwritten += 1
        job.written.clear()
        if job not in self._pausing:
            self._ready.set()

    async def run(self) -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            groups = {job: lines for job, lines in self._waiting.items() if job not in self._pausing}
            for job in groups:
                del self._waiting[job]
            await asyncio.gather(*(self._write(job, lines) for job, lines in groups.items()))

    async def close(self, job: Job) -> None:
        """Write the last rows of a job; if that fails, drop them: their lines then count as unfinished."""
        job.closing = True
        if job.unwritten:
            self._write_again(job)
            await job.written.wait()

    def trouble(self) -> str | None:
        """Return why results are not stored although the disk takes data, or None."""
        if not self._pausing:
            return None
        return (
            f"the results of {len(self._pausing)} batches cannot be stored after an unexpected error and wait in memory"
        )

    async def _write(self, job: Job, lines: list[FinishedLine]) -> None:
        try:
            await self._store_group(job, lines)
        except StorageError:
            log.warning("%d results could not be stored before shutdown; their lines run again", len(lines))
        except BaseException as raised:  # a bug or a damaged database: keep the results, which cost engine time
            error = as_error(raised)
            log_unexpected(error)
            if not job.closing:
                self._keep(job, lines)
                return
            log.warning("%d results of batch %s could not be stored and are dropped", len(lines), job.batch.id)
        else:
            job.write_faults = 0
        self._let_go(job, lines)
        if not job.batch.remaining:
            job.settled.set()
        self._run.offer(job)

    async def _store_group(self, job: Job, lines: list[FinishedLine]) -> None:
        frames = [frame(job.batch.id, line.ref.rank, line.succeeded, line.usage, line.row) for line in lines]
        start: int | None = job.journal_end
        if job.leases is not None:
            size = sum(map(len, frames))
            start = await self._run.retry.run(lambda: self._run.store.reserve(job.batch.id, size))
        if start is None:
            job.settled.set()
            return
        results: list[LineResult] = []
        end = start
        for line, framed in zip(lines, frames, strict=True):
            results.append(LineResult(line.ref.rank, line.succeeded, end, len(framed), line.usage))
            end += len(framed)
        data, first = b"".join(frames), start
        await self._run.retry.run(lambda: self._commit(job, results, data, first))
        if job.leases is not None:
            job.leases.lines_ended(result.rank for result in results)

    def _keep(self, job: Job, lines: list[FinishedLine]) -> None:
        job.write_faults += 1
        held = sum(len(self._waiting.get(other, ())) for other in self._pausing)
        most = max(1, self._run.window.max_lines // 2 - held)
        self._let_go(job, lines[most:])
        job.retry.extend(line.ref for line in lines[most:])
        self._waiting[job] = [*lines[:most], *self._waiting.get(job, ())]
        self._pausing.add(job)
        seconds = self._run.limits.back_off(job.write_faults)
        log.error("%d results of batch %s are written again in %g s", len(lines[:most]), job.batch.id, seconds)
        asyncio.get_running_loop().call_later(seconds, self._write_again, job)
        self._run.offer(job)

    def _write_again(self, job: Job) -> None:
        self._pausing.discard(job)
        self._ready.set()

    def _let_go(self, job: Job, lines: list[FinishedLine]) -> None:
        self._run.window.release(line.ref for line in lines)
        job.unwritten -= len(lines)
        if not job.unwritten:
            job.written.set()

    async def _commit(self, job: Job, results: list[LineResult], data: bytes, start: int) -> None:
        """Write a group. Repeatable: the same rows go to the same offset of the journal."""
        await in_thread(lambda: self._run.folder.append_journal(job.batch.id, data, start))
        job.journal_end = start + len(data)
        job.batch = await to_end(self._run.store.add_results(job.batch.id, results))
