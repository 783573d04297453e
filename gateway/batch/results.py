"""Result files of a batch: their rows, and the builder that makes them from the journal.

{"id":"batch_req_<32 random hex digits><CRC-32 of these and of the rest, 8 hex digits>","custom_id":...}

The id of each row contains a checksum, so that damage is detected at every read.

The journal holds rows in their final form; building only sorts them into two files. Blocking: call it in a worker
thread.
"""

import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import pairwise
from secrets import token_hex
from typing import Any

import orjson

from gateway.batch.input import EDGE_BYTES, envelope_of_edges, read_envelope, too_long
from gateway.batch.journal import JournalReader
from gateway.http.json_text import escape_line_ends
from gateway.store.disk import FILE_FAULTS, DiskFile, UnreadableError, read_errors
from gateway.store.folder import StateFolder
from gateway.store.objects import LineRecord, LineRef

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
