"""Journal of a batch: result rows in the order in which the lines finished, each with rank, usage and checksum.

    <CRC-32, 8 hex digits> <rank> <1 or 0: succeeded> <input>/<cached>/<output>/<reasoning tokens>/<engine us> <row>

The checksum covers the batch id and the rest of the row, so bytes of another batch or line are detected.
Blocking: call it in a worker thread.
"""

import os
import zlib
from typing import NamedTuple

from gateway.store.disk import UnreadableError, read_errors
from gateway.store.folder import StateFolder
from gateway.store.objects import LineRecord, Usage

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
