"""The folder beside an output file that lets a run continue: its batches and the results that have arrived.

`batches.jsonl` has a line when a part is about to be submitted, when the server has named its batch, and when the
results of the batch have arrived. `results.jsonl` holds the lines of output and error files. Both only grow. The first
field of a line is the CRC-32 of the others: a damaged line is skipped and counted, an incomplete last line of a killed
process is cut off.
"""

import fcntl
import json
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import ConfigError
from gateway.batch.results import is_intact, is_sealed
from tidemill.files import disk_error
from tidemill.recipe import is_answer, is_id
from tidemill.tables import parse_json

BUFFER_BYTES = 1 << 20
_SEAL = b'{"crc":"%08x",%b\n'
_SEALED = re.compile(rb'\{"crc":"([0-9a-f]{8})",(.*)\n', re.DOTALL)


class Log:
    """A file of JSON lines with checksums. Raises ConfigError if the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = path.open("rb")
        self.damaged = 0
        """Number of lines that were skipped."""

    def close(self) -> None:
        self._file.close()
        os.close(self._descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def lines(self) -> Iterator[tuple[int, Any]]:
        """Yield the offset and the value of each line; cut off an incomplete last one."""
        offset = 0
        self._file.seek(0)
        while raw := self._file.readline():
            value = _value(raw)
            if value is None:
                self.damaged += 1
            else:
                yield offset, value
            if not raw.endswith(b"\n"):
                os.ftruncate(self._descriptor, offset)
                return
            offset += len(raw)

    def append(self, contents: Iterable[bytes]) -> Iterator[int]:
        """Add JSON objects and yield their offsets; they are on the disk at the end. An error of the disk adds none."""
        begin = offset = self.size()
        buffer = bytearray()
        try:
            for content in contents:
                line = _SEAL % (zlib.crc32(content[1:]), content[1:])
                buffer += line
                yield offset
                offset += len(line)
                if len(buffer) > BUFFER_BYTES:
                    self._write(buffer)
            self._write(buffer)
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, begin)
            raise disk_error(self.path.parent, error) from None

    def _write(self, buffer: bytearray) -> None:
        while buffer:
            del buffer[: os.write(self._descriptor, buffer)]

    def read(self, offset: int) -> Any:
        """Return the value of the line at an offset, None if it is damaged by now."""
        self._file.seek(offset)
        return _value(self._file.readline())


def _value(raw: bytes) -> Any:
    """Return the value of a complete line, None if it is damaged."""
    found = _SEALED.fullmatch(raw)
    return parse_json(raw) if found is not None and int(found[1], 16) == zlib.crc32(found[2]) else None


class Journal:
    """`folder` is created if it is missing, and locked; `output` is locked if it exists. Raises ConfigError."""

    def __init__(self, folder: Path, output: Path | None = None) -> None:
        self.folder = folder
        self.work = folder / "work"
        """Folder for temporary files, without those of a killed run."""
        self.parts: dict[str, str | None] = {}
        """Batches whose results have not arrived, by name; None until the answer to a batch's creation is known."""
        self.added = 0
        """Number of results that have arrived since this object was made."""
        self._answers: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        """Offset of the newest result by id."""
        self._size = 0
        """Size that the results had when a batch ended."""
        with ExitStack() as failed:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._batches = Log(folder / "batches.jsonl")
                failed.callback(self._batches.close)
                self._output = failed.enter_context(_lock(self._batches.path, output))
                self._results = Log(folder / "results.jsonl")
                failed.callback(self._results.close)
                shutil.rmtree(self.work, ignore_errors=True)
                self.work.mkdir()
                for _, event in self._batches.lines():
                    self._apply(event)
                for offset, line in self._results.lines():
                    self._note(offset, line)
            except BlockingIOError:
                raise ConfigError(f"another process writes this output; end it, or remove {folder}") from None
            except OSError as error:
                raise disk_error(folder, error) from None
            failed.pop_all()

    @property
    def is_empty(self) -> bool:
        """Whether no run has sent a row."""
        return not self._batches.size() and not self._results.size()

    def close(self) -> None:
        """Remove temporary files, and the folder if nothing was recorded. Release the lock."""
        shutil.rmtree(self.work, ignore_errors=True)
        logs = (self._batches, self._results)
        with suppress(OSError):
            if self.is_empty:
                for log in logs:
                    log.path.unlink()
                self.folder.rmdir()
        for log in logs:
            log.close()
        self._output.close()

    def damage(self) -> str | None:
        """Describe the lines that this journal has lost."""
        missing = self._size - self._results.size()
        if self._batches.damaged or self._results.damaged or missing > 0:
            lines = self._batches.damaged + self._results.damaged
            lost = f"{lines} damaged or incomplete lines" if lines else f"{missing} bytes are missing"
            return f"{self.folder}: {lost}; rows whose answer is lost are sent again"
        return None

    def intend(self, name: str) -> None:
        """Record that a batch is about to be created with `name` in its metadata."""
        self._record({"part": name})

    def created(self, name: str, batch: str) -> None:
        self._record({"part": name, "batch": batch})

    def ended(self, name: str) -> None:
        """Record that the results of a part have arrived, or that its batch does not exist."""
        self._record({"part": name, "ended": True, "size": self._results.size()})

    def add_results(self, path: Path) -> Counter[str]:
        """Append the lines of a downloaded file. Return the numbers of "damaged", "unknown" and "repeated" ones."""
        odd: Counter[str] = Counter()
        found: list[Mapping[str, Any]] = []
        with path.open("rb") as lines:
            for offset in self._results.append(_contents(lines, odd, found)):
                self._note(offset, found.pop())
                self.added += 1
        return odd

    def result(self, custom_id: str) -> Mapping[str, Any] | None:
        """Return the newest result of a request, or None. An error replaces no answer."""
        offset = self._answers.get(custom_id, self._failures.get(custom_id))
        line: Mapping[str, Any] | None = None if offset is None else self._results.read(offset)
        return line

    def _record(self, event: Mapping[str, Any]) -> None:
        for _ in self._batches.append([json.dumps(event).encode()]):
            pass
        self._apply(event)

    def _apply(self, event: Mapping[str, Any]) -> None:
        if "ended" in event:
            self.parts.pop(event["part"], None)
            self._size = max(self._size, event["size"])
        else:
            self.parts[event["part"]] = event.get("batch")

    def _note(self, offset: int, line: Mapping[str, Any]) -> None:
        (self._answers if is_answer(line) else self._failures)[line["custom_id"]] = offset


class ResultFiles:
    """Results in output and error files, each in one line. Damaged lines are left out."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = [path.open("rb") for path in paths]
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        for file in self._files:
            offset = 0
            for raw in file:
                line = _result(raw.strip())
                if line is not None:
                    self._places[line["custom_id"]] = file, offset
                offset += len(raw)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def result(self, custom_id: str) -> Mapping[str, Any] | None:
        """Return the result of a request, or None."""
        if custom_id not in self._places:
            return None
        file, offset = self._places[custom_id]
        file.seek(offset)
        return _result(file.readline().strip())


def _lock(log: Path, output: Path | None) -> ExitStack:
    """Lock the log, and the output if it exists, because it may be the output of another run by another name.

    Raises BlockingIOError if another run holds one.
    """
    with ExitStack() as stack:
        for path in (log, output):
            try:
                if path is not None:
                    file = stack.enter_context(path.open("rb"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                        raise BlockingIOError  # another run has just replaced it
            except (FileNotFoundError, PermissionError, IsADirectoryError):
                if path is log:
                    raise BlockingIOError from None  # another run has just removed it
        return stack.pop_all()


def _contents(lines: Iterable[bytes], odd: Counter[str], found: list[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield the lines that hold a result, and put their values into `found`."""
    seen: set[str] = set()
    for raw in lines:
        content = raw.strip()
        line = _result(content)
        if not content:
            continue
        if line is None:
            odd["damaged"] += 1
        elif not is_id(line["custom_id"]):
            odd["damaged" if line["custom_id"] is None else "unknown"] += 1
        else:
            odd["repeated"] += line["custom_id"] in seen
            seen.add(line["custom_id"])
            found.append(line)
            yield content


def _result(content: bytes) -> Mapping[str, Any] | None:
    """Return the value of a line of an output or error file, None if it is damaged."""
    if is_sealed(content) and not is_intact(content):
        return None
    try:
        line = parse_json(content)
    except ValueError:
        return None
    if not isinstance(line, dict) or "custom_id" not in line:
        return None
    parts = line.get("response"), line.get("error")
    return line if all(part is None or isinstance(part, dict) for part in parts) and any(parts) else None
