"""HTTP client of `tidemill batch`, and its progress bar."""

import json
import math
import re
import shutil
import sys
import tempfile
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from urllib.parse import quote

from rich.cells import cell_len, set_cell_size

from engine.errors import ConfigError
from gateway.commands.chat import ChatClient, ChatError, RefusedError

NOT_OPENAI = "the server is not OpenAI-compatible; check --url"
NOT_FOUND = 404
PIECE_BYTES = 256 * 1024
TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
RATE_SECONDS = 30.0
LINE_SECONDS = 30.0
"""Longest time between two lines of the progress on an output that is no terminal."""
POLL_SECONDS = 1.0
"""Time between two looks at a batch of a server without an event stream."""
RANGE_UNITS = ((60.0, "min"), (3600.0, "h"), (86_400.0, "d"))
"""Units of `range_text`, with their seconds."""
MAX_SEARCHED = 1000
"""Number of newest batches among which an id is completed."""
ID_LENGTH = len("batch_") + 32


def shortened(text: str, cells: int) -> str:
    """Return untrusted text as one line of at most `cells` terminal columns.

    Control, escape and direction characters become '?'.
    """
    safe = "".join("?" if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in text)
    return safe if cell_len(safe) <= cells else set_cell_size(safe, cells - 2).rstrip() + ".."


class BatchClient(ChatClient):
    """Client of the files and batches endpoints.

    Every method raises ChatError if the server cannot be reached or refuses the request.
    """

    def call(self, method: str, path: str, body: Any = None, **query: str | int) -> dict[str, Any]:
        """Send a JSON request and return the JSON object of the response."""
        arguments = {} if body is None else {"json": body}
        with self._open(method, path, NOT_OPENAI, params=query, **arguments) as response:
            try:
                answer = json.loads(response.read())
            except ValueError:
                raise ChatError(NOT_OPENAI) from None
            if not isinstance(answer, dict):
                raise ChatError(NOT_OPENAI)
            return answer

    def batch(self, batch_id: str) -> dict[str, Any]:
        batch = self.call("GET", f"/v1/batches/{quote(batch_id, safe='')}")
        if not isinstance(batch.get("status"), str):
            raise ChatError(NOT_OPENAI)
        return batch

    def changes(self, batch_id: str) -> Iterator[dict[str, Any]]:
        """Yield the batch object at once and after its changes, the last time in its final state.

        Changes come from the server's event stream. Without a stream, or after it breaks, the server is polled.
        """
        streams = True
        while True:
            yield (batch := self.batch(batch_id))
            if streams and batch["status"] not in TERMINAL:
                try:
                    for batch in self._events(batch_id):
                        yield batch
                except RefusedError:
                    streams = False  # OpenAI's API has none
                except ChatError:
                    pass  # the next look tells whether the server is there
            if batch["status"] in TERMINAL:
                return
            time.sleep(POLL_SECONDS)

    def _events(self, batch_id: str) -> Iterator[dict[str, Any]]:
        with self._open("GET", f"/v1/batches/{quote(batch_id, safe='')}/events", NOT_OPENAI) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise RefusedError(NOT_OPENAI, response.status_code)
            for line in response.iter_lines():
                if line.startswith("data:"):
                    try:
                        yield json.loads(line.removeprefix("data:"))
                    except ValueError:
                        raise ChatError(NOT_OPENAI) from None

    def find(self, prefix: str) -> str:
        """Return the id of the batch that begins with `prefix`. Raise ChatError if there is no single one."""
        if len(prefix) >= ID_LENGTH:
            return prefix
        found = [batch["id"] for batch in self.batches(MAX_SEARCHED) if str(batch["id"]).startswith(prefix)]
        if len(found) != 1:
            how_many = f"{len(found)} batches begin with" if found else "there is no batch"
            raise ChatError(f"{how_many} {prefix}; tidemill batch list shows them")
        return str(found[0])

    def file_name(self, file_id: str) -> str:
        """Return the name of a file, or "" if the file is deleted."""
        try:
            return str(self.call("GET", f"/v1/files/{quote(file_id, safe='')}").get("filename") or "")
        except RefusedError as error:
            if error.status != NOT_FOUND:
                raise
            return ""

    def causes(self, file_id: str) -> Counter[str]:
        """Return the number of lines of an error file for each error message and code."""
        causes: Counter[str] = Counter()
        with tempfile.TemporaryFile() as file:
            self.download(file_id, file)
            file.seek(0)
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    causes["the line is damaged (result_damaged)"] += 1
                    continue
                error = row.get("error") or ((row.get("response") or {}).get("body") or {}).get("error") or {}
                causes[f"{error.get('message')} ({error.get('code')})"] += 1
        return causes

    def upload(self, path: Path) -> str:
        """Upload an input file as a stream and return its id. Raise ConfigError if the file cannot be read."""
        broken = "the upload failed; run the command again"
        name = path.name.encode("utf-8", "replace").decode().replace("\\", "_").replace('"', "_")
        try:
            with path.open("rb") as file:
                files = {"file": (name, file, "application/jsonl")}
                with self._open("POST", "/v1/files", broken, data={"purpose": "batch"}, files=files) as response:
                    try:
                        return str(json.loads(response.read())["id"])
                    except (ValueError, LookupError, TypeError):
                        raise ChatError(NOT_OPENAI) from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None

    def download(self, file_id: str, target: BinaryIO) -> None:
        """Stream the content of a file into `target`."""
        broken = "the connection broke during the download; run the command again"
        with self._open("GET", f"/v1/files/{quote(file_id, safe='')}/content", broken) as response:
            target.writelines(response.iter_bytes(PIECE_BYTES))

    def metrics(self) -> str:
        """Return the text of the server's metrics."""
        with self._open("GET", "/metrics", NOT_OPENAI) as response:
            return response.read().decode("utf-8", "replace")

    def batches(self, limit: int, tenant: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield up to `limit` batches, newest first. `tenant`: a name, `*` for all, None for the API key's tenant."""
        query: dict[str, str | int] = {} if tenant is None else {"tenant": tenant}
        while limit > 0:
            page = self.call("GET", "/v1/batches", limit=min(limit, 100), **query)
            yield from page["data"]
            limit -= len(page["data"])
            if not page["has_more"]:
                return
            query["after"] = page["last_id"]


def with_model(body: Mapping[str, Any], model: str | None, models: Mapping[str, str]) -> dict[str, Any]:
    """Return a request body for `model`, or else for the model that `models` has for the body's model."""
    new = model or models.get(str(body.get("model")))
    return {**body, "model": new} if new else dict(body)


def progress_text(batch: dict[str, Any]) -> str:
    """Return finished, total and failed lines, e.g. "3/10 lines, 1 failed"."""
    counts = batch.get("request_counts") or {"total": 0, "completed": 0, "failed": 0}
    done, total = counts["completed"] + counts["failed"], counts["total"]
    failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
    return f"{done:,}/{total:,} lines{failed}" if total else "no lines yet"


def expected_end(batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the earliest and latest end in Unix seconds that the server expects; None if it does not know."""
    found = re.fullmatch("([0-9]+)-([0-9]+)", str((batch.get("metadata") or {}).get("tidemill.eta", "")))
    return None if found is None else (int(found[1]), int(found[2]))


def token_counts(batch: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the prompt and output tokens of the finished lines, and those that the server expects of the others."""
    return (batch.get("usage") or {}).get("total_tokens") or 0, _note(batch, "tidemill.remaining_tokens")


def _note(batch: Mapping[str, Any], name: str) -> int | None:
    text = str((batch.get("metadata") or {}).get(name, ""))
    return int(text) if text.isascii() and text.isdigit() else None


def eta_text(batch: Mapping[str, Any], now: float | None = None) -> str:
    """Return when the server expects the batch to end and the tokens until then, e.g. "done in about 10 to
    14 min (13:36), 81,000 tokens left"; empty if it does not know. The time of day is the latest end."""
    end = expected_end(batch)
    if end is None:
        return ""
    now = time.time() if now is None else now
    late = ", may miss its window" if batch["metadata"].get("tidemill.at_risk") == "true" else ""
    tokens = token_counts(batch)[1]
    more = "" if tokens is None else f", {tokens:,} tokens left"
    clock = time.strftime("%H:%M", time.localtime(end[1]))
    return f"done in {range_text(end[0] - now, end[1] - now)} ({clock}){more}{late}"


def range_text(least: float, most: float) -> str:
    """Format a range of durations in seconds as "about 10 to 14 min", in minutes, hours or days."""
    unit, name = next(each for each in RANGE_UNITS if most <= 100.0 * each[0] or each is RANGE_UNITS[-1])
    low, high = max(0, math.floor(least / unit)), max(1, math.ceil(most / unit))
    if low == 0:
        return f"less than {high} {name}"
    return f"about {high} {name}" if low == high else f"about {low} to {high} {name}"


def duration_text(seconds: float) -> str:
    """Format a duration as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(slots=True)
class BatchProgress:
    """Show batch progress: a bar redrawn in place on a terminal, else a line per state, percent or LINE_SECONDS."""

    out: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic
    width: int = 24
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)
    _last: tuple[str, int] = ("", 0)
    _last_time: float = 0.0

    def show(self, batch: dict[str, Any]) -> None:
        text = self.text(batch)
        if self.out.isatty():
            columns = shutil.get_terminal_size().columns
            self.out.write(f"\r\x1b[K{text[: columns - 1]}")
        else:
            self._show_line(batch)
        self.out.flush()

    def _show_line(self, batch: dict[str, Any]) -> None:
        counts = batch.get("request_counts") or {"total": 0, "completed": 0, "failed": 0}
        done = counts["completed"] + counts["failed"]
        reached = batch["status"], 100 * done // max(1, counts["total"])
        now = self.clock()
        if reached != self._last or now - self._last_time >= LINE_SECONDS:
            self._last, self._last_time = reached, now
            end = eta_text(batch) if batch["status"] not in TERMINAL else ""
            self.out.write(f"{batch['status']}: {progress_text(batch)}{end and '  '}{end}\n")

    def end(self) -> None:
        if self.out.isatty():
            self.out.write("\n")

    def text(self, batch: dict[str, Any]) -> str:
        """Return the bar, the lines, the rates of the last RATE_SECONDS and the estimated remaining time."""
        counts = batch.get("request_counts") or {"total": 0, "completed": 0, "failed": 0}
        done, total = counts["completed"] + counts["failed"], counts["total"]
        tokens = (batch.get("usage") or {}).get("output_tokens", 0)
        line_rate, token_rate = self._rates(done, tokens)
        filled = self.width * done // total if total else 0
        bar = "#" * filled + "-" * (self.width - filled)
        text = f"{batch['status']} [{bar}] {progress_text(batch)}"
        if token_rate:
            text += f"  {line_rate:,.1f} lines/s, {token_rate:,.0f} output tokens/s"
        if done < total and batch["status"] not in TERMINAL and (end := eta_text(batch)):
            text += f"  {end}"
        return text

    def _rates(self, done: int, tokens: int) -> tuple[float, float]:
        now = self.clock()
        self._samples.append((now, done, tokens))
        while len(self._samples) > 2 and self._samples[0][0] < now - RATE_SECONDS:
            self._samples.popleft()
        first, first_done, first_tokens = self._samples[0]
        seconds = now - first
        return ((done - first_done) / seconds, (tokens - first_tokens) / seconds) if seconds > 0 else (0.0, 0.0)
