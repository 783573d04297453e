"""Reading of input lines, and building of the result files from the journal when a batch ends.

The journal holds rows in their final form; building only sorts them into two files. Blocking: call it in a worker
thread.
"""

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

from gateway.batch.envelope import EDGE_BYTES, envelope_of_edges, read_envelope, too_long
from gateway.batch.journal import JournalReader
from gateway.batch.result_rows import unfinished_row
from gateway.store.disk import DiskFile, UnreadableError, read_errors
from gateway.store.folder import StateFolder
from gateway.store.objects import LineRecord, LineRef

BUFFER_BYTES = 1024 * 1024
_RESULT_LOST = ("result_unavailable", "The line was executed, but its result was damaged on the server's disk.")


class InputReader:
    """Read lines of an input file. `lenient`: an unreadable line counts as damaged; `max_bytes`: of longer lines only
    the envelope is read. The caller must close it."""

    def __init__(self, folder: StateFolder, file_id: str, lenient: bool, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._folder = folder
        self._file_id = file_id
        self._path = folder.file_path(file_id)
        self._lenient = lenient
        self._descriptor = -1
        self._size = 0
        self._disk_checked = False

    def envelope(self, ref: LineRef) -> dict[str, Any] | None:
        """Return a validated line, or None if it has been damaged or removed since. See `read_envelope`.

        Raises UnreadableError for an unreadable sector unless `lenient`, and StorageError if the state folder fails.
        """
        if self._descriptor < 0:
            self._folder.copy_body(self._file_id)
        try:
            with read_errors(self._path):
                if self._descriptor < 0:
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                    self._size = os.fstat(self._descriptor).st_size
                if not 0 <= ref.start < ref.start + ref.length <= self._size:
                    return None
                return self._read(ref)
        except UnreadableError as error:
            if not error.gone:
                if not self._lenient:
                    raise
                if not self._disk_checked:
                    self._folder.check_disk()
                    self._disk_checked = True
            return None

    def _read(self, ref: LineRef) -> dict[str, Any] | None:
        read = partial(self._folder.disk.read_at, self._descriptor)
        if ref.length > self._max_bytes:
            size = min(EDGE_BYTES, ref.length)
            tail = read(ref.start + ref.length - size, size)
            return envelope_of_edges(read(ref.start, size), tail, too_long(self._max_bytes))
        try:
            found = read_envelope(read(ref.start, ref.length))
        except ValueError:
            return None
        if not isinstance(found, dict) or found.get("body") is None:
            return None
        return found if isinstance(found.get("custom_id"), str) else None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_envelopes(
    folder: StateFolder, file_id: str, refs: Iterable[LineRef], *, lenient: bool, max_bytes: int
) -> list[dict[str, Any] | None]:
    """Return the lines of an input file. See `InputReader.envelope`."""
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
