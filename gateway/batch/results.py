"""Journal of a batch (group commit of finished lines), its rows, and the result files that are built from it.

    <CRC-32, 8 hex digits> <rank> <1 or 0: succeeded> <input>/<cached>/<output>/<reasoning tokens>/<engine us> <row>

The checksum covers the batch id and the rest of the row, so bytes of another batch or line are detected.
`JournalReader` blocks: call it in a worker thread. `ResultWriter` appends the rows of a group, calls fsync, then stores
their offsets and the counts. Lines that finish while a group is being written form the next group.

A row is in its final form; building only sorts the rows into two files:

    {"id":"batch_req_<32 random hex digits><CRC-32 of these and of the rest, 8 hex digits>","custom_id":...}

The id of each row contains a checksum, so that damage is detected at every read. The builder blocks, too.
"""

import asyncio
import logging
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import orjson

from gateway.batch.input import EDGE_BYTES, envelope_of_edges, read_envelope, too_long
from gateway.batch.run import BatchRun, FinishedLine, Job, in_thread, to_end
from gateway.http.errors import log_unexpected
from gateway.http.json_text import escape_line_ends
from gateway.store.disk import FILE_FAULTS, DiskFile, StorageError, UnreadableError, read_errors
from gateway.store.folder import StateFolder
from gateway.store.objects import LineRecord, LineRef, LineResult, Usage

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


class StoredReader:
    """Read parts of a file. `find` returns its path, after copying the file to the state folder if necessary.

    With `lenient`, unreadable sectors count as damage. The caller must close it."""

    def __init__(self, folder: StateFolder, find: Callable[[], Path], lenient: bool) -> None:
        self._disk = folder.disk
        self._find = find
        self._lenient = lenient
        self._path = Path()
        self._descriptor = -1
        self._size = 0

    def part(self, start: int, length: int) -> bytes | None:
        """Return a part, or None if it is damaged or missing.

        Raises UnreadableError for an unreadable sector unless `lenient`, and StorageError if the state folder fails.
        """
        if self._descriptor < 0:
            self._path = self._find()
        try:
            with read_errors(self._path):
                if self._descriptor < 0:
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                    self._size = os.fstat(self._descriptor).st_size
                if not 0 <= start < start + length <= self._size:
                    return None
                return self._disk.read_at(self._descriptor, start, length)
        except UnreadableError as error:
            if not (self._lenient or error.gone):
                raise
            return None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class JournalReader(StoredReader):
    """Read and verify the rows of one journal.

    Attributes:
        damaged: ranks of the lines whose row is missing or changed. With `lenient` this includes unreadable sectors.
        counts: number of intact rows that failed ([0]) and succeeded ([1]).
        usage: total usage of the intact rows.
    """

    def __init__(self, folder: StateFolder, batch_id: str, lenient: bool) -> None:
        super().__init__(folder, partial(folder.copy_journal, batch_id), lenient)
        self._batch_id = batch_id
        self.damaged: list[int] = []
        self.counts = [0, 0]
        self.usage = Usage()

    def read(self, record: LineRecord) -> bytes | None:
        """Return the row of a finished line, or None if the row is damaged. Raises like `part`."""
        assert record.succeeded is not None
        data = self.part(record.start, record.length)
        found = None if data is None else unframe(self._batch_id, record.ref.rank, record.succeeded, data)
        if found is None:
            self.damaged.append(record.ref.rank)
            return None
        self.counts[record.succeeded] += 1
        self.usage = self.usage.plus(found.usage)
        return found.row


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
            log_unexpected(raised)
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


READ_BYTES = 1024 * 1024
PAGE_BYTES = 4096
RESULT_DAMAGED = "result_damaged"
_PREFIX = b'{"id":"batch_req_'
_SALT = len(_PREFIX) + 32
_SEAL = _SALT + 8


def response_row(custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    """Return the row of an executed line."""
    response = {"status_code": status, "request_id": f"req-{token_hex(16)}", "body": body}
    return _row(custom_id, response, None)


def unfinished_row(custom_id: str | None, code: str, message: str) -> bytes:
    """Return the row of a line without a response."""
    return _row(custom_id, None, {"code": code, "message": message})


def _row(custom_id: str | None, response: Any, error: Any, salt: str | None = None) -> bytes:
    content = escape_line_ends(orjson.dumps({"custom_id": custom_id, "response": response, "error": error})[1:])
    drawn = (salt or token_hex(16)).encode()
    return b'%b%b%08x",%b\n' % (_PREFIX, drawn, zlib.crc32(content, zlib.crc32(drawn)), content)


def is_sealed(row: bytes) -> bool:
    """Return whether a row has an id of this server's form, with a checksum."""
    return re.match(rb'\{"id":"batch_req_[0-9a-f]{40}",', row) is not None


def is_intact(row: bytes) -> bool:
    """Return whether a row (without its line end) is undamaged."""
    if row.startswith(_PREFIX) and row[_SALT : _SALT + 2] == b'",':
        return _is_whole(row)
    if not (row.startswith(_PREFIX) and row[_SEAL : _SEAL + 2] == b'",'):
        return False
    crc = zlib.crc32(row[_SEAL + 2 :], zlib.crc32(row[len(_PREFIX) : _SALT]))
    return row[_SALT:_SEAL] == b"%08x" % crc


def _is_whole(row: bytes) -> bool:
    """Return whether a row without a checksum, as state folders of schema 2 have, is undamaged as far as it shows."""
    try:
        return set(orjson.loads(row)) == {"id", "custom_id", "response", "error"}
    except (ValueError, TypeError):
        return False


def intact_parts(
    descriptor: int, size: int, on_damage: Callable[[], None] = lambda: None
) -> Generator[bytes, None, None]:
    """Yield the content of a result file of `size` bytes, verified as it is read, in pieces of about READ_BYTES.

    An error row takes the place of each damaged row, and `on_damage` is called for it. Blocking. Raises OSError if the
    system fails.
    """
    there, piece = min(size, os.fstat(descriptor).st_size), bytearray()
    for start, line in _lines(descriptor, there):
        if line.endswith(b"\n") and is_intact(line[:-1]):
            piece += line
        else:
            on_damage()
            piece += b"".join(_salvaged(start, line))
        if len(piece) >= READ_BYTES:
            yield bytes(piece)
            piece.clear()
    if there < size:
        on_damage()
        piece += _damaged(there, f"The file is {size - there} bytes too short: rows are missing.")
    if piece:
        yield bytes(piece)


def _salvaged(start: int, line: bytes) -> Iterator[bytes]:
    """Yield the intact rows within a damaged line: a damaged line end joins two rows."""
    bounds = [0, *_starts(line), len(line)]
    for begin, end in pairwise(bounds):
        row = line[begin:end]
        if is_intact(row):
            yield row + b"\n"
        elif is_intact(row[:-1]):
            yield row[:-1] + b"\n"
        elif row:
            yield _damaged(start + begin, f"{end - begin} bytes from byte {start + begin} on are damaged.")


def _starts(line: bytes) -> Iterator[int]:
    place = line.find(_PREFIX, 1)
    while place > 0:
        yield place
        place = line.find(_PREFIX, place + 1)


def _damaged(place: int, message: str) -> bytes:
    """Return an error row for the damage at byte `place`; its id is the same at each read."""
    message = f"{message} Resend the lines that have no row in this file or in the batch's other file."
    return _row(None, None, {"code": RESULT_DAMAGED, "message": message}, salt=f"{place:032x}")


def _lines(descriptor: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its line end, and its offset."""
    pending, start, read = bytearray(), 0, 0
    while read < size:
        pending += _read(descriptor, read, min(READ_BYTES, size - read))
        read = start + len(pending)
        *whole, rest = pending.split(b"\n")
        for line in whole:
            yield start, bytes(line) + b"\n"
            start += len(line) + 1
        pending = rest
    if pending:
        yield start, bytes(pending)


def _read(descriptor: int, start: int, length: int) -> bytes:
    """Read exactly `length` bytes; pages that the disk cannot read become zeros."""
    try:
        data = os.pread(descriptor, length, start)
    except OSError as error:
        if error.errno not in FILE_FAULTS:
            raise
        if length <= PAGE_BYTES:
            return bytes(length)
        pages = range(start, start + length, PAGE_BYTES)
        return b"".join(_read(descriptor, page, min(PAGE_BYTES, start + length - page)) for page in pages)
    return data + bytes(length - len(data))


BUFFER_BYTES = 1024 * 1024
_RESULT_LOST = ("result_unavailable", "The line was executed, but its result was damaged on the server's disk.")


class InputReader(StoredReader):
    """Read lines of an input file. `max_bytes`: of longer lines only the envelope is read."""

    def __init__(self, folder: StateFolder, file_id: str, lenient: bool, max_bytes: int) -> None:
        super().__init__(folder, partial(folder.copy_body, file_id), lenient)
        self._max_bytes = max_bytes

    def envelope(self, ref: LineRef) -> dict[str, Any] | None:
        """Return a validated line, or None if it has been damaged or removed since. See `read_envelope`. Raises like
        `part`."""
        if ref.length > self._max_bytes:
            size = min(EDGE_BYTES, ref.length)
            head, tail = self.part(ref.start, size), self.part(ref.start + ref.length - size, size)
            if head is None or tail is None:
                return None
            return envelope_of_edges(head, tail, too_long(self._max_bytes))
        line = self.part(ref.start, ref.length)
        try:
            found = None if line is None else read_envelope(line)
        except ValueError:
            return None
        if not isinstance(found, dict) or found.get("body") is None:
            return None
        return found if isinstance(found.get("custom_id"), str) else None


def read_envelopes(
    folder: StateFolder, file_id: str, refs: Iterable[LineRef], *, lenient: bool, max_bytes: int
) -> list[dict[str, Any] | None]:
    """Return the lines of an input file. See `InputReader.envelope`."""
    if lenient:  # if the disk fails every read, pause instead of dropping lines
        folder.check_disk()
    reader = InputReader(folder, file_id, lenient, max_bytes)
    try:
        return [reader.envelope(ref) for ref in refs]
    finally:
        reader.close()


class ResultFile:
    """One of the two result files while it is built. The file is created with its first row."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._buffer = bytearray()
        self.file: DiskFile | None = None
        self.rows = 0

    @property
    def size(self) -> int:
        return 0 if self.file is None else self.file.size

    def add(self, row: bytes) -> None:
        if self.file is None:
            self.file = self._folder.create_temp()
        self.rows += 1
        self._buffer += row
        if len(self._buffer) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.file is not None:
            self.file.write(bytes(self._buffer))
            self._buffer.clear()

    def discard(self) -> None:
        if self.file is not None:
            self.file.discard()


class ResultBuilder:
    """Sort the lines of one batch into its output file and its error file. The caller must close it.

    `unfinished`: code and message for lines without a result; `max_bytes`: see `InputReader`.
    A line whose journal row is damaged gets an error row;
    with `lenient`, so does a line whose row cannot be read.
    """

    def __init__(
        self,
        folder: StateFolder,
        batch_id: str,
        input_file_id: str,
        unfinished: tuple[str, str],
        lenient: bool,
        max_bytes: int,
    ) -> None:
        self._folder = folder
        self._unfinished = unfinished
        self._input = InputReader(folder, input_file_id, lenient, max_bytes)
        self.journal = JournalReader(folder, batch_id, lenient)
        self.output, self.errors = ResultFile(folder), ResultFile(folder)
        self.num_unfinished = 0

    def add(self, records: Iterable[LineRecord]) -> None:
        """Add the rows of the given lines. Raises StorageError or UnreadableError."""
        with self._folder.disk.storing():
            for record in records:
                if record.succeeded is None:
                    self.num_unfinished += 1
                    self.errors.add(unfinished_row(self._custom_id(record.ref), *self._unfinished))
                elif (row := self.journal.read(record)) is not None:
                    (self.output if record.succeeded else self.errors).add(row)
                else:
                    self.errors.add(unfinished_row(self._custom_id(record.ref), *_RESULT_LOST))

    def publish(self, output_id: str, error_id: str) -> None:
        """Publish both files. On StorageError neither is published."""
        with self._folder.disk.storing():
            self.output.flush()
            self.errors.flush()
        results = ((self.output.file, output_id), (self.errors.file, error_id))
        self._folder.publish_files(*((file, file_id) for file, file_id in results if file is not None))

    def close(self) -> None:
        for part in (self.output, self.errors):
            part.discard()
        self.journal.close()
        self._input.close()

    def _custom_id(self, line: LineRef) -> str | None:
        """Return the line's custom_id from the input, or None if the line is damaged."""
        envelope = self._input.envelope(line)
        return None if envelope is None else str(envelope["custom_id"])
