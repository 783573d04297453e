"""One run of `tidemill.Batch`: submit the rows without a result, follow the batches, collect their results.

A part is a file of batch lines within the limits of a batch, with one endpoint and one model.
"""

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigError
from tidemill import tables
from tidemill.client import MAX_SEARCHED, NOT_OPENAI, TERMINAL, ChatError, RefusedError, ServerClient
from tidemill.files import disk_error
from tidemill.journal import Journal
from tidemill.progress import expected_end
from tidemill.recipe import ERROR, FAILED, STATUS, Recipe, RowRequest, SourceRows, is_final
from tidemill.tables import Row, json_line

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


def batch_line(custom_id: str, url: str, body: Mapping[str, Any]) -> bytes:
    return json_line({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


class Splitter:
    """Distribute requests over parts. `first`: maximum number of lines of the first part, `most` that of the others."""

    def __init__(self, folder: Path, stem: str, first: int, most: int) -> None:
        self._folder = folder
        self._stem = stem.encode("utf-8", "replace")[:80].decode("utf-8", "ignore")
        self._limit, self._most = min(first, most), most
        self._open: dict[tuple[str, str], UnsentPart] = {}

    def add(self, custom_id: str, request: RowRequest, body: Mapping[str, Any]) -> Iterator[UnsentPart]:
        """Add a line; yield a part that is full."""
        text = batch_line(custom_id, request.url, body)
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


def write_table(
    target: Path,
    rows: SourceRows,
    result: Callable[[str], Mapping[str, Any] | None],
    refusal: str | None = None,
) -> Counter[str]:
    """Write the rows with their answers. Return the number of rows by the reason of their failure, "" for an answer.

    result: returns the line of an output or error file by id. refusal: reason why the server refused lines before it
    ran them; ChatError is raised with it if no row has an answer.
    """
    counts: Counter[str] = Counter()
    recipe = rows.recipe

    def answered() -> Iterator[Row]:
        counts.clear()
        for row, custom_id, _, problem in rows:
            added = recipe.failed(problem) if problem else recipe.result(result(custom_id))
            reason = added[recipe.prefix + ERROR]
            counts[reason if added[recipe.prefix + STATUS] == FAILED else ""] += 1
            yield {**row, **added}
        if refusal is not None and not counts[""]:
            raise ChatError(f"the server refused all rows: {refusal}")

    tables.write_rows(target, answered, rows.columns, rows.path)
    return counts


def _id_of(line: bytes) -> str:
    """Return the id of a batch line, "" for a damaged one."""
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


T = TypeVar("T")
MAX_LINES = 50_000
"""Maximum number of lines of one batch, as OpenAI's."""
MAX_OPEN = 4
"""Maximum number of batches of a run that are open at once."""
PATIENCE = 600.0
"""Maximum time in seconds for which a run waits for a server that it has reached before."""
POLL_SECONDS, MAX_PAUSE = 1.0, 10.0
PART = "tidemill_run"
"""Name in a batch's metadata that holds the part of a run. Names that begin with `tidemill.` belong to the server."""
MAX_ROUNDS, MAX_IDLE_ROUNDS = 20, 1
"""Maximum number of times that lines whose results are missing are sent in one run, in all and without a result."""
PROBE_LINES, PROBE_SECONDS = 20, 30.0
"""Lines of the first batch of a larger table, and the time for which the other lines wait for its end."""
_REFUSALS = frozenset({400, 404, 413, 422})
"""Statuses with which a server refuses the content of a part."""


@dataclass(slots=True)
class TableRun:
    """One run: submit the rows without a result, follow the batches, collect their results.

    retry_failed: send the rows that failed for good before as well. tell: called with a message for the user.
    """

    client: ServerClient
    journal: Journal
    recipe: Recipe
    rows: SourceRows
    window: str
    follow: Callable[[dict[str, Any]], None]
    tell: Callable[[str], None]
    stop: threading.Event
    retry_failed: bool = False
    _reached: bool = False
    _model: str | None = None
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Newest batch object of every part of this run."""
    _before: int = 0
    """Rows that had a final result before this run."""
    _is_cut: bool = False
    """Whether a batch was cancelled or has expired, so that its other lines are left to a later run."""
    _refusal: str | None = None
    """Why the server has refused lines before it ran them."""

    def to_the_end(self) -> None:
        """Collect the batches of an earlier run, then submit the rows without a final result and collect those."""
        if damage := self.journal.damage():
            self.tell(damage)
        for name, batch_id in list(self.journal.parts.items()):
            if batch_id is None:
                self._adopt(name)
        while self.journal.parts:
            self._poll()
        self._states.clear()  # their rows have results before the split
        idle = 0
        for number in range(MAX_ROUNDS):
            known = self.journal.added
            if not self._send(self._split(again=number > 0)) or idle == MAX_IDLE_ROUNDS or self._is_cut:
                break
            idle = idle + 1 if self.journal.added == known else 0
        self.follow(_summary(self._states.values(), self.rows.total, self._before))

    def write(self, target: Path) -> Counter[str]:
        """Write the output. Return the number of rows by the reason of their failure, "" for those with an answer."""
        return write_table(target, self.rows, self.journal.result, self._refusal)

    # Parts: rows without a final result, within the limits of a batch

    def _split(self, again: bool) -> Iterator[UnsentPart]:
        """Yield the parts of the rows to send. `again`: only of those without any result."""
        probe = PROBE_LINES if self.rows.total > 2 * PROBE_LINES and not again else MAX_LINES
        splitter = Splitter(self.journal.work, self.rows.path.stem, probe, MAX_LINES)
        for _, custom_id, request, _ in self.rows:
            line = self.journal.result(custom_id)
            if request is None or (line is not None and (again or self._is_done(line))):
                self._before += not again
                continue
            yield from splitter.add(custom_id, request, self._with_model(request))
        yield from splitter.rest()

    def _is_done(self, line: Mapping[str, Any]) -> bool:
        if self.retry_failed:
            return bool(self.recipe.result(line)[self.recipe.prefix + STATUS] != FAILED)
        return is_final(line)

    def _send(self, parts: Iterator[UnsentPart]) -> bool:
        """Submit the parts and collect their results. Return whether there were any."""
        waiting = first = next(parts, None)
        while waiting is not None or self.journal.parts:
            while waiting is not None and len(self.journal.parts) < MAX_OPEN and self._submit(waiting):
                if waiting is first and not self._before and len(waiting.ids) == PROBE_LINES:
                    self._wait_for_probe(waiting)
                waiting = next(parts, None)
            self._poll()
        return first is not None

    def _wait_for_probe(self, part: UnsentPart) -> None:
        """Raise ChatError if all lines of the first part fail alike. Wait for it no longer than PROBE_SECONDS."""
        deadline = time.monotonic() + PROBE_SECONDS
        while self.journal.parts and time.monotonic() < deadline:
            self._poll()
        lines = [self.journal.result(custom_id) for custom_id in part.ids]
        reasons = {None if line is None else self.recipe.result(line)[self.recipe.prefix + ERROR] for line in lines}
        if len(reasons) == 1 and (reason := reasons.pop()) is not None:
            raise ChatError(
                f"the first {len(lines)} rows failed alike, so no other row was sent: {reason}; change the request, "
                "or run the same command again to send the other rows"
            )

    def _with_model(self, request: RowRequest) -> dict[str, Any]:
        """Return the body, with the server's model if the row names none."""
        if "model" in request.body:
            return request.body
        if self._model is None:
            self._model = self._try(partial(_only_model, self.client))
        return {"model": self._model, **request.body}

    # The server

    def _submit(self, waiting: UnsentPart) -> bool:
        """Upload a part and create its batch. Return False if the server has no room for it now."""
        name = waiting.path.stem
        asked = False

        def create() -> str:
            nonlocal asked
            found = self._find(name) if asked else None
            asked = True  # a call whose answer is lost may have created the batch
            body = {"input_file_id": waiting.file_id, "endpoint": waiting.url, "completion_window": self.window}
            return str((found or self.client.call("POST", "/v1/batches", {**body, "metadata": {PART: name}}))["id"])

        others = bool(self.journal.parts)  # the end of an open batch makes room on the server
        try:
            if waiting.file_id is None:
                waiting.file_id = self._try(partial(self.client.upload, waiting.path), full=others)
            self.journal.intend(name)
            batch_id = self._try(create, full=others)
        except RefusedError as error:
            self.journal.ended(name)
            if error.status == 429 and others:
                return False
            if error.status not in _REFUSALS or (waiting.file_id is None and len(waiting.ids) > 1):
                raise
            problem = {"message": error.message, "code": error.status}
            self._refuse({name: {"response": None, "error": problem} for name in waiting.ids}, error.message)
            return True
        self.journal.created(name, batch_id)
        waiting.path.unlink()
        return True

    def _find(self, name: str) -> dict[str, Any] | None:
        batches = self.client.batches(MAX_SEARCHED)
        return next((batch for batch in batches if (batch.get("metadata") or {}).get(PART) == name), None)

    def _adopt(self, name: str) -> None:
        """Find the batch of a part whose creation an earlier run did not see answered."""
        batch = self._try(partial(self._find, name))
        if batch is None:
            self.journal.ended(name)
        else:
            self.journal.created(name, str(batch["id"]))

    def _poll(self) -> None:
        """Ask for every open batch, collect those that have ended, and wait until the next round."""
        for name, batch_id in list(self.journal.parts.items()):
            try:
                batch = self._try(partial(self.client.batch, str(batch_id)))
            except RefusedError as error:
                if error.status != 404:
                    raise
                self.journal.ended(name)  # the server has lost the batch; its rows are sent again
                continue
            self._states[name] = batch
            if batch["status"] in TERMINAL:
                self._collect(name, batch)
        self.follow(_summary(self._states.values(), self.rows.total, self._before))
        if self.journal.parts:
            self._pause(POLL_SECONDS)

    def _collect(self, name: str, batch: dict[str, Any]) -> None:
        odd: Counter[str] = Counter()
        missing = (batch.get("request_counts") or {}).get("total") or 0
        known = self.journal.added
        for file_id in (batch.get("output_file_id"), batch.get("error_file_id")):
            path = self._download(file_id) if file_id else None
            if path is not None:
                odd += self.journal.add_results(path)
            elif file_id:
                odd["lost"] += 1
        if batch["status"] == "completed":
            odd["missing"] = max(0, missing - (self.journal.added - known) - odd["damaged"])
        self._is_cut |= batch["status"] in ("cancelled", "expired")
        refused = self._errors(batch) if batch["status"] == "failed" else None
        self.journal.ended(name)
        for kind, count in (+odd).items():
            self.tell(f"the results of the batch {batch.get('id')}: {_ODD[kind].format(count)}")
        if refused is not None:
            raise ChatError(f"the server refused the batch {batch.get('id')}: {refused}")

    def _errors(self, batch: dict[str, Any]) -> str | None:
        """Note the lines for which the server has refused a batch. Return the reason if it names none."""
        errors = (batch.get("errors") or {}).get("data") or [{"message": "the server gives no reason"}]
        path = self._download(str(batch.get("input_file_id")))
        with nullcontext(()) if path is None else path.open("rb") as sent:
            lines = refused_lines(errors, list(map(_id_of, sent)))
        self._refuse(lines, errors[0].get("message"))
        return None if lines else str(errors[0].get("message"))

    def _refuse(self, lines: Mapping[str, Row], reason: Any) -> None:
        """Note the results of lines that the server refuses to run."""
        self._refusal = self._refusal or str(reason)
        path = self.journal.work / "refused"
        path.write_bytes(b"".join(json_line({"custom_id": name, **line}) for name, line in lines.items()))
        self.journal.add_results(path)

    def _download(self, file_id: str) -> Path | None:
        """Return a copy of a file of the server; None if the server has lost it."""
        path = self.journal.work / "download"

        def download() -> None:
            with path.open("wb") as file:
                self.client.download(file_id, file)

        try:
            self._try(download)
        except RefusedError as error:
            if error.status not in (404, 410):
                raise
            return None
        return path

    def _try(self, action: Callable[[], T], *, full: bool = False) -> T:
        """Repeat `action` while a server that was reached before is away, or has no room unless `full`."""
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
            except (LookupError, TypeError, ValueError) as error:  # a response without the fields of OpenAI's
                raise ChatError(f"{NOT_OPENAI} ({error!r})") from None
            except OSError as error:
                raise disk_error(self.journal.work, error) from None
            self._pause(pause)
            pause = min(MAX_PAUSE, 2 * pause)

    def _pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise ChatError("the run was cancelled; its batches continue on the server")


def _summary(states: Collection[dict[str, Any]], total: int, before: int) -> dict[str, Any]:
    """Return a batch object that sums up the batches of this run and the rows of earlier ones."""
    counts = {
        name: sum((state.get("request_counts") or {}).get(name) or 0 for state in states)
        for name in ("completed", "failed")
    }
    counts["completed"] = min(counts["completed"] + before, total - counts["failed"])
    ends = [end for state in states if (end := expected_end(state)) is not None]
    return {
        "status": "completed" if sum(counts.values()) >= total else "in_progress",
        "request_counts": {"total": total, **counts},
        "usage": {"output_tokens": sum((s.get("usage") or {}).get("output_tokens") or 0 for s in states)},
        "metadata": {"tidemill.eta": "{}-{}".format(*map(max, zip(*ends, strict=True)))} if ends else {},
    }


def _only_model(client: ServerClient) -> str:
    listed = client.call("GET", "/v1/models")["data"]
    names = [str(model["id"]) for model in listed]
    if len(names) == 1 or (names and listed[0].get("owned_by") == "tidemill"):
        return names[0]
    raise ConfigError(f"the server has {len(names)} models; name one: {', '.join(names[:10]) or 'there is none'}")


_ODD = {
    "damaged": "lines that are damaged: {}; their rows are sent again",
    "unknown": "lines that name no row: {}; they are left out",
    "repeated": "lines that repeat a row: {}; the last one of each row counts",
    "missing": "lines that are missing: {}; their rows are sent again",
    "lost": "files that the server has lost: {}; their rows are sent again",
}
"""How the results of a batch differ from those that a run expects."""
