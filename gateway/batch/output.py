"""Rows of result files, and the files themselves, built once from a batch's journal when the batch ends.

A row is written to the journal in its final form when its line ends; building only sorts rows into two files. Blocking:
call it in a worker thread.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

import orjson

from gateway.http.json_text import load_json
from gateway.store.disk import DiskFile, UnreadableError, read_errors
from gateway.store.folder import StateFolder
from gateway.store.objects import LineRecord, LineRef

BUFFER_BYTES = 1024 * 1024
_RESULT_LOST = ("result_unavailable", "The line was executed, but its result can no longer be read.")


def response_row(custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    """The row of a line that was executed, well or not."""
    response = {"status_code": status, "request_id": f"req-{token_hex(16)}", "body": body}
    return _row(custom_id, response, None)


def unfinished_row(custom_id: str | None, code: str, message: str) -> bytes:
    """The row of a line that was not executed."""
    return _row(custom_id, None, {"code": code, "message": message})


def _row(custom_id: str | None, response: Any, error: Any) -> bytes:
    row = {"id": f"batch_req_{token_hex(16)}", "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def read_at(descriptor: int, start: int, length: int) -> bytes:
    """Exactly these bytes. Raises EOFError when they are not there."""
    data = os.pread(descriptor, length, start)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), start + len(data))
        if not more:
            raise EOFError("a stored file is shorter than its rows say")
        data += more
    return data


def read_lines_at(path: Path, refs: Iterable[LineRef]) -> list[bytes]:
    """Some lines of a stored file. Raises EOFError when the file ends before them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [read_at(descriptor, ref.start, ref.length) for ref in refs]
    finally:
        os.close(descriptor)


def read_envelopes(
    folder: StateFolder, file_id: str, refs: Iterable[LineRef], *, lenient: bool
) -> list[dict[str, Any] | None]:
    """Return lines of an input file, None for a line that is damaged or gone.

    Raises UnreadableError (None instead if `lenient`), and StorageError: the folder is at fault, not the line.
    """
    path = folder.file_path(file_id)
    found: list[dict[str, Any] | None] = []
    for ref in refs:
        try:
            with read_errors(path):
                (line,) = read_lines_at(path, [ref])
            found.append(read_envelope(line))
        except UnreadableError as error:
            if not error.gone:
                if not lenient:
                    raise
                folder.check_disk()
            found.append(None)
    return found


def read_envelope(line: bytes) -> dict[str, Any] | None:
    """Parse an input line that was valid when the batch began; None if the line is damaged."""
    try:
        found = load_json(line)
    except ValueError:
        return None
    is_whole = (
        isinstance(found, dict) and isinstance(found.get("custom_id"), str) and isinstance(found.get("body"), dict)
    )
    return found if is_whole else None


class ResultFile:
    """One of the two files in the making; it comes into being with its first row."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._buffer = bytearray()
        self.file: DiskFile | None = None

    @property
    def size(self) -> int:
        return 0 if self.file is None else self.file.size

    def add(self, row: bytes) -> None:
        if self.file is None:
            self.file = self._folder.create_temp()
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


@dataclass(slots=True)
class ResultBuilder:
    """Sorts the lines of one batch into its output and its error file. `unfinished`: code and message for lines
    without a result. What cannot be read raises UnreadableError, or counts as `lost` if `lenient`. Close it in any
    case."""

    folder: StateFolder
    batch_id: str
    input_path: Path
    unfinished: tuple[str, str]
    lenient: bool
    lost: int = 0
    output: ResultFile = field(init=False)
    errors: ResultFile = field(init=False)
    _open: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.output, self.errors = ResultFile(self.folder), ResultFile(self.folder)

    def add(self, records: Iterable[LineRecord]) -> None:
        """Raises StorageError or UnreadableError."""
        journal = self.folder.journal_path(self.batch_id)
        with self.folder.disk.storing():
            for record in records:
                if record.succeeded is None:
                    self.errors.add(unfinished_row(self._custom_id(record.ref), *self.unfinished))
                elif (row := self._read(journal, record.start, record.length)) is not None:
                    (self.output if record.succeeded else self.errors).add(row)
                else:
                    self.lost += record.succeeded
                    self.errors.add(unfinished_row(self._custom_id(record.ref), *_RESULT_LOST))

    def publish(self, output_id: str, error_id: str) -> None:
        """Let the files appear. Raises StorageError, after which neither has."""
        with self.folder.disk.storing():
            self.output.flush()
            self.errors.flush()
        results = ((self.output.file, output_id), (self.errors.file, error_id))
        self.folder.publish_files(*((file, file_id) for file, file_id in results if file is not None))

    def close(self) -> None:
        self.output.discard()
        self.errors.discard()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]

    def _read(self, path: Path, start: int, length: int) -> bytes | None:
        try:
            with read_errors(path):
                return read_at(self._descriptor(path), start, length)
        except UnreadableError:
            if not self.lenient:
                raise
            return None

    def _custom_id(self, line: LineRef) -> str | None:
        """From the input; None if that cannot be read any more: a batch must end all the same."""
        raw = self._read(self.input_path, line.start, line.length)
        return None if raw is None else str(orjson.loads(raw)["custom_id"])
