"""The folder beside an output file that lets a run continue: its batches and the results that have arrived.

`batches.jsonl` has a line when a part is about to be submitted, when the server has named its batch, and when the
results of the batch have arrived. `results.jsonl` holds the lines of output and error files as the server wrote them.
Both only grow; an incomplete last line of a killed process is cut off.
"""

import fcntl
import json
import os
import shutil
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import ConfigError


@dataclass(slots=True)
class Part:
    """A batch of this run. `batch` is None until the server's answer to its creation is known."""

    name: str
    batch: str | None = None


class Journal:
    """`folder` is created if it is missing, and locked. Raises ConfigError if it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: dict[str, Part] = {}
        """Batches whose results have not arrived, by name."""
        self._offsets = array("q")  # of the newest result by row; -1: there is none
        with ExitStack() as failed:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._batches = failed.enter_context(_open(folder / "batches.jsonl"))
                self._results = failed.enter_context(_open(folder / "results.jsonl"))
                fcntl.flock(self._batches, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process writes this output; end it, or remove {folder}") from None
            except OSError as error:
                raise ConfigError(f"{folder}: {error.strerror}") from None
            failed.pop_all()
        for _, event in _lines(self._batches):
            self._apply(event)
        for offset, line in _lines(self._results):
            self._note(offset, line)

    def close(self) -> None:
        self._batches.close()
        self._results.close()

    def intend(self, name: str) -> None:
        """Record that a batch is about to be created with `name` in its metadata."""
        self._record({"part": name})

    def created(self, name: str, batch: str) -> None:
        self._record({"part": name, "batch": batch})

    def ended(self, name: str) -> None:
        """Record that the results of a part have arrived, or that its batch does not exist."""
        self._record({"part": name, "ended": True})

    def add_results(self, path: Path) -> None:
        """Append the lines of a downloaded file."""
        self._results.seek(0, os.SEEK_END)
        begin = self._results.tell()
        with path.open("rb") as file:
            shutil.copyfileobj(file, self._results, 1 << 20)
        if self._results.tell() > begin:
            self._results.seek(-1, os.SEEK_END)
            if self._results.read(1) != b"\n":
                self._results.write(b"\n")
        self._results.flush()
        os.fsync(self._results.fileno())
        for offset, line in _lines(self._results, begin):
            self._note(offset, line)

    def result(self, index: int, custom_id: str) -> Mapping[str, Any] | None:
        """Return the newest result of a row's request, or None."""
        if index >= len(self._offsets) or self._offsets[index] < 0:
            return None
        self._results.seek(self._offsets[index])
        line: Mapping[str, Any] = json.loads(self._results.readline())
        return line if line.get("custom_id") == custom_id else None

    def _record(self, event: Mapping[str, Any]) -> None:
        self._batches.seek(0, os.SEEK_END)
        self._batches.write(json.dumps(event).encode() + b"\n")
        self._batches.flush()
        os.fsync(self._batches.fileno())
        self._apply(event)

    def _apply(self, event: Mapping[str, Any]) -> None:
        name = event["part"]
        if "ended" in event:
            self.parts.pop(name, None)
        else:
            self.parts[name] = Part(name, event.get("batch"))

    def _note(self, offset: int, line: Mapping[str, Any]) -> None:
        index = int(str(line["custom_id"]).partition("-")[0])
        if index >= len(self._offsets):
            self._offsets.extend([-1] * (index + 1 - len(self._offsets)))
        self._offsets[index] = offset


def _open(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")


def _lines(file: BinaryIO, begin: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield the offset and the value of each line; cut the file at the first one that is not whole."""
    file.seek(begin)
    offset = begin
    while raw := file.readline():
        try:
            if not raw.endswith(b"\n"):
                raise ValueError
            value = json.loads(raw)
        except ValueError:
            file.truncate(offset)
            return
        yield offset, value
        offset += len(raw)
