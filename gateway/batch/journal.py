"""The journal of a batch: finished rows in the order of their ends, each with its line, its usage and a checksum.

    <CRC-32, 8 hex digits> <rank> <1 or 0: succeeded> <input>/<cached>/<output>/<reasoning tokens> <result row>

The checksum covers the batch's id and everything behind it, so bytes of another batch or line do not pass. Earlier
versions wrote the bare row; such a row must be a line of JSON. Blocking: call it in a worker thread.
"""

import os
import zlib
from typing import NamedTuple

from gateway.batch.result_rows import is_json
from gateway.store.disk import UnreadableError, read_errors
from gateway.store.folder import StateFolder
from gateway.store.objects import LineRecord, Usage

_CRC_BYTES = 9
"""With the blank."""


class JournalRow(NamedTuple):
    """A row for the result file, and its usage (None: written by an earlier version)."""

    row: bytes
    usage: Usage | None


def frame(batch_id: str, rank: int, succeeded: bool, usage: Usage, row: bytes) -> bytes:
    """Return what the journal holds of a finished line."""
    content = b"%d %d %d/%d/%d/%d %b" % (rank, succeeded, *usage, row)
    return _checksum(batch_id, content) + content


def unframe(batch_id: str, rank: int, succeeded: bool, data: bytes) -> JournalRow | None:
    """Return the row that was written for this line, None if these are not its bytes."""
    if data.startswith(b"{"):
        is_row = data.find(b"\n") == len(data) - 1 and is_json(data)
        return JournalRow(data, None) if is_row else None
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
    """Reads and verifies the rows of one journal. Close it in any case.

    `damaged`: ranks of the lines whose row is missing or changed. `counts`: of the intact rows, by outcome (0: failed).
    `usage`: of the intact rows (None: unknown, a row of an earlier version is among them). `lenient`: a row on a bad
    sector counts as damaged.
    """

    def __init__(self, folder: StateFolder, batch_id: str, lenient: bool) -> None:
        self._disk = folder.disk
        self._path = folder.journal_path(batch_id)
        self._batch_id = batch_id
        self._lenient = lenient
        self._descriptor = -1
        self.end = 0
        self.damaged: list[int] = []
        self.counts = [0, 0]
        self.usage: Usage | None = Usage()

    def read(self, record: LineRecord) -> bytes | None:
        """Return the row of a line that has ended; None if it is damaged.

        Raises UnreadableError for a bad sector unless `lenient`, StorageError for a fault of the folder.
        """
        assert record.succeeded is not None
        found = self._read(record)
        if found is None:
            self.damaged.append(record.ref.rank)
            return None
        self.counts[record.succeeded] += 1
        usage = found.usage or (None if record.succeeded else Usage())
        self.usage = None if self.usage is None or usage is None else self.usage.plus(usage)
        return found.row

    def _read(self, record: LineRecord) -> JournalRow | None:
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
