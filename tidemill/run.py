"""One run of `tidemill.Batch`: submit the rows without a result, follow the batches, collect their results."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigError
from gateway.commands.batch_client import TERMINAL, BatchClient, expected_end
from gateway.commands.chat import ChatError, RefusedError
from tidemill import tables
from tidemill.journal import Journal, Part
from tidemill.recipe import ERROR, FAILED, STATUS, Recipe, Request, is_final
from tidemill.tables import Row

T = TypeVar("T")
MAX_LINES, MAX_BYTES = 50_000, 190_000_000
"""Limits of one batch: OpenAI's, with room for the envelope of an upload."""
MAX_OPEN = 4
"""Maximum number of batches of a run that are open at once."""
PATIENCE = 600.0
"""Maximum time in seconds for which a run waits for a server that it has reached before."""
POLL_SECONDS, MAX_PAUSE = 1.0, 10.0
PART = "tidemill_run"
"""Name in a batch's metadata that holds the part of a run. Names that begin with `tidemill.` belong to the server."""


@dataclass(slots=True)
class TableRun:
    """One run: submit the rows without a result, follow the batches, collect their results."""

    client: BatchClient
    journal: Journal
    recipe: Recipe
    source: Path
    window: str
    follow: Callable[[dict[str, Any]], None]
    stop: threading.Event
    folder: Path
    _reached: bool = False
    _model: str | None = None
    _total: int = 0
    _columns: dict[str, str] = field(default_factory=dict)
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Newest batch object of every part of this run."""
    _before: int = 0
    """Rows that had a final result before this run."""

    def check(self) -> None:
        """Read all rows, so that a bad row is refused before anything is sent. Raise ConfigError."""
        added = self.recipe.columns()
        for index, row in enumerate(tables.read_rows(self.source)):
            self._request(index, row)
            self._columns |= dict.fromkeys(self.recipe.kept(row), "")
            self._total += 1
        if not self._total:
            raise ConfigError(f"{self.source}: the table has no rows")
        if taken := [name for name in added if name in self._columns]:
            raise ConfigError(f"the input already has a column {taken[0]!r}, which the answers need; rename it")
        self._columns |= added

    def to_the_end(self) -> None:
        """Collect the batches of an earlier run, then submit the rows without a final result and collect those."""
        for part in list(self.journal.parts.values()):
            if part.batch is None:
                self._adopt(part)
        while self.journal.parts:
            self._poll()
        parts = self._split()
        waiting = next(parts, None)
        while waiting is not None or self.journal.parts:
            while waiting is not None and len(self.journal.parts) < MAX_OPEN and self._submit(waiting):
                waiting = next(parts, None)
            self._poll()

    def write(self, target: Path) -> Counter[str]:
        """Write the output. Return the number of rows by the reason of their failure, "" for those with an answer."""
        counts: Counter[str] = Counter()

        def rows() -> Iterator[Row]:
            counts.clear()
            for index, row in enumerate(tables.read_rows(self.source)):
                line = self.journal.result(index, self._request(index, row).custom_id(index))
                added = self.recipe.result(line)
                counts[added[ERROR] if added[STATUS] == FAILED else ""] += 1
                yield {**self.recipe.kept(row), **added}

        tables.write_rows(target, rows, self._columns, self.source)
        return counts

    def _request(self, index: int, row: Row) -> Request:
        try:
            return self.recipe.request(row)
        except ConfigError as error:
            raise ConfigError(f"row {index + 1}: {error.message}") from None

    # Parts: rows without a final result, within the limits of a batch

    def _split(self) -> Iterator["UnsentPart"]:
        waiting = None
        for index, row in enumerate(tables.read_rows(self.source)):
            request = self._request(index, row)
            custom_id = request.custom_id(index)
            line = self.journal.result(index, custom_id)
            if line is not None and is_final(line):
                self._before += 1
                continue
            text = tables.json_line(
                {"custom_id": custom_id, "method": "POST", "url": request.url, "body": self._with_model(request)}
            )
            if waiting is not None and not waiting.has_room(request.url, len(text)):
                yield waiting.whole()
                waiting = None
            if waiting is None:
                name = f"{self.source.stem[:80]}-{uuid.uuid4().hex[:12]}.jsonl"  # as the page and `batch list` show it
                waiting = UnsentPart(self.folder / name, request.url)
            waiting.add(text)
        if waiting is not None:
            yield waiting.whole()

    def _with_model(self, request: Request) -> dict[str, Any]:
        """Return the body, with the server's model if the row names none."""
        if "model" in request.body:
            return request.body
        if self._model is None:
            self._model = self._try(self._only_model)
        return {"model": self._model, **request.body}

    def _only_model(self) -> str:
        listed = self.client.call("GET", "/v1/models")["data"]
        names = [str(model["id"]) for model in listed]
        if len(names) == 1 or (names and listed[0].get("owned_by") == "tidemill"):
            return names[0]
        raise ConfigError(f"the server has {len(names)} models; name one: {', '.join(names[:10]) or 'there is none'}")

    # The server

    def _submit(self, waiting: "UnsentPart") -> bool:
        """Upload a part and create its batch. Return False if the server has no room for it now."""
        name = waiting.path.stem
        asked = False

        def create() -> dict[str, Any]:
            nonlocal asked
            found = self._find(name) if asked else None
            asked = True  # a call whose answer is lost may have created the batch
            body = {"input_file_id": waiting.file_id, "endpoint": waiting.url, "completion_window": self.window}
            return found or self.client.call("POST", "/v1/batches", {**body, "metadata": {PART: name}})

        others = bool(self.journal.parts)  # the end of an open batch makes room on the server
        try:
            if waiting.file_id is None:
                waiting.file_id = self._try(partial(self.client.upload, waiting.path), full=others)
            self.journal.intend(name)
            batch = self._try(create, full=others)
        except RefusedError as error:
            self.journal.ended(name)
            if error.status == 429 and others:
                return False
            raise
        self.journal.created(name, batch["id"])
        waiting.path.unlink()
        return True

    def _find(self, name: str) -> dict[str, Any] | None:
        batches = self.client.batches(1000)
        return next((batch for batch in batches if (batch.get("metadata") or {}).get(PART) == name), None)

    def _adopt(self, part: Part) -> None:
        """Find the batch of a part whose creation an earlier run did not see answered."""
        batch = self._try(lambda: self._find(part.name))
        if batch is None:
            self.journal.ended(part.name)
        else:
            self.journal.created(part.name, batch["id"])

    def _poll(self) -> None:
        """Ask for every open batch, collect those that have ended, and wait until the next round."""
        for part in list(self.journal.parts.values()):
            try:
                batch = self._try(partial(self.client.batch, str(part.batch)))
            except RefusedError as error:
                if error.status != 404:
                    raise
                self.journal.ended(part.name)  # the server has lost the batch; its rows are sent again
                continue
            self._states[part.name] = batch
            if batch["status"] in TERMINAL:
                self._collect(part, batch)
        self.follow(self._summary())
        if self.journal.parts:
            self._pause(POLL_SECONDS)

    def _collect(self, part: Part, batch: dict[str, Any]) -> None:
        if batch["status"] == "failed":
            errors = (batch.get("errors") or {}).get("data") or [{"message": "the server gives no reason"}]
            self.journal.ended(part.name)
            raise ChatError(f"the server refused the batch {batch['id']}: {errors[0]['message']}")
        for file_id in (batch.get("output_file_id"), batch.get("error_file_id")):
            if file_id:
                path = self.folder / "download"
                self._try(partial(self._download, file_id, path))
                self.journal.add_results(path)
                path.unlink()
        self.journal.ended(part.name)

    def _download(self, file_id: str, path: Path) -> None:
        with path.open("wb") as file:
            self.client.download(file_id, file)

    def _summary(self) -> dict[str, Any]:
        """Return a batch object that sums up the parts of this run and the rows of earlier ones."""
        states = self._states.values()
        counts = {
            name: sum((state.get("request_counts") or {}).get(name) or 0 for state in states)
            for name in ("total", "completed", "failed")
        }
        counts["total"] = self._total
        counts["completed"] += self._before
        ends = [end for state in states if (end := expected_end(state)) is not None]
        return {
            "status": "in_progress" if self.journal.parts else "completed",
            "request_counts": counts,
            "usage": {"output_tokens": sum((s.get("usage") or {}).get("output_tokens") or 0 for s in states)},
            "metadata": {"tidemill.eta": str(max(ends))} if ends else {},
        }

    def _try(self, action: Callable[[], T], *, full: bool = False) -> T:
        """Return the result of `action`; repeat it while a server that was reached before is away or has no room.

        `full`: raise RefusedError at once if it has no room.
        """
        deadline = time.monotonic() + PATIENCE
        pause = POLL_SECONDS
        while True:
            try:
                result = action()
                self._reached = True
                return result
            except ChatError as error:
                status = error.status if isinstance(error, RefusedError) else 500
                passing = status >= 500 or (status == 429 and not full)
                if not (passing and self._reached) or time.monotonic() > deadline:
                    raise
            self._pause(pause)
            pause = min(MAX_PAUSE, 2 * pause)

    def _pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise ChatError("the run was cancelled; its batches continue on the server")


@dataclass(slots=True)
class UnsentPart:
    """A part that is not submitted yet: a file of batch lines of one endpoint."""

    path: Path
    url: str
    lines: int = 0
    size: int = 0
    file_id: str | None = None
    _buffer: bytearray = field(default_factory=bytearray)

    def has_room(self, url: str, size: int) -> bool:
        return url == self.url and self.lines < MAX_LINES and self.size + size <= MAX_BYTES

    def add(self, text: bytes) -> None:
        self.lines += 1
        self.size += len(text)
        self._buffer += text
        if len(self._buffer) > 1 << 20:
            self.whole()

    def whole(self) -> "UnsentPart":
        """Write the buffered lines to the file."""
        with self.path.open("ab") as file:
            file.write(self._buffer)
        self._buffer.clear()
        return self
