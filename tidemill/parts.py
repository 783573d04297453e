"""Parts of a run: files of batch lines, within the limits of a batch and with one endpoint and one model each."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.commands.outputs import disk_error
from tidemill.cells import Row, json_line
from tidemill.recipe import Request

MAX_BYTES = 190_000_000
"""Limit of one batch: OpenAI's, with room for the envelope of an upload."""
BUFFER_BYTES = 1 << 20


@dataclass(slots=True)
class UnsentPart:
    """A part that is not submitted yet."""

    path: Path
    url: str
    max_lines: int
    ids: list[str] = field(default_factory=list)
    size: int = 0
    file_id: str | None = None
    _buffer: bytearray = field(default_factory=bytearray)

    def has_room(self, size: int) -> bool:
        return len(self.ids) < self.max_lines and self.size + size <= MAX_BYTES

    def add(self, custom_id: str, text: bytes) -> None:
        self.ids.append(custom_id)
        self.size += len(text)
        self._buffer += text
        if len(self._buffer) > BUFFER_BYTES:
            self.whole()

    def whole(self) -> "UnsentPart":
        """Write the buffered lines to the file."""
        try:
            with self.path.open("ab") as file:
                file.write(self._buffer)
        except OSError as error:
            raise disk_error(self.path, error) from None
        self._buffer.clear()
        return self


class Splitter:
    """Distribute requests over parts. `first`: maximum number of lines of the first part, `most` that of the others."""

    def __init__(self, folder: Path, stem: str, first: int, most: int) -> None:
        self._folder = folder
        self._stem = stem.encode("utf-8", "replace")[:80].decode("utf-8", "ignore")
        self._limit, self._most = min(first, most), most
        self._open: dict[tuple[str, str], UnsentPart] = {}

    def add(self, custom_id: str, request: Request, body: Mapping[str, Any]) -> Iterator[UnsentPart]:
        """Add a line; yield a part that is full."""
        text = json_line({"custom_id": custom_id, "method": "POST", "url": request.url, "body": body})
        key = (request.url, str(body.get("model")))
        part = self._open.get(key)
        if part is not None and not part.has_room(len(text)):
            yield self._open.pop(key).whole()
            part = None
        if part is None:
            name = f"{self._stem}-{uuid.uuid4().hex[:12]}.jsonl"  # as the page and `batch list` show it
            part = self._open[key] = UnsentPart(self._folder / name, request.url, self._limit)
            self._limit = self._most
        part.add(custom_id, text)

    def rest(self) -> Iterator[UnsentPart]:
        for part in self._open.values():
            yield part.whole()


def ids_of(lines: Path) -> list[str]:
    """Return the ids of a file of batch lines, "" for a damaged line."""
    with lines.open("rb") as file:
        return [_id_of(line) for line in file]


def _id_of(line: bytes) -> str:
    try:
        return str(json.loads(line)["custom_id"])
    except (ValueError, LookupError, TypeError):
        return ""


def refused_lines(errors: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> dict[str, Row]:
    """Return a result for each line that a server has refused before it ran the batch, by id.

    The refusal of a line is final. A model that the server lacks now refuses all lines of a part.
    """
    for error in errors:
        if error.get("code") == "model_not_found":
            return {name: {"response": None, "error": error} for name in ids}
    numbered = ((error.get("line"), {"response": {"status_code": 400, "body": {"error": error}}}) for error in errors)
    return {ids[n - 1]: result for n, result in numbered if isinstance(n, int) and 1 <= n <= len(ids)}
