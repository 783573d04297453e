"""Run a prompt over the rows of a table as batch jobs of a server.

`Batch(...).run()` splits the rows into batches, follows them, and writes the input's rows with the answers. A run that
was interrupted continues: the second run with the same output sends only the rows without a result. It needs OpenAI's
`/v1/files` and `/v1/batches`, so it works with other servers as well.
"""

import asyncio
import os
import re
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from tidemill import files, tables
from tidemill.client import ChatError, ServerClient, server_options
from tidemill.files import disk_error, same_file
from tidemill.journal import Journal
from tidemill.progress import BatchProgress, duration_text
from tidemill.recipe import Recipe, RowRequest, SourceRows
from tidemill.run import TableRun
from tidemill.tables import Row, json_line

SAMPLE_ROWS = 20
CHARS_PER_TOKEN = 4.0
"""Of English text, for a server that does not count tokens."""
_SPEED = re.compile(r"^tidemill_batch_tokens_per_second(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Rows with a request, the first request, and expected tokens. None: unknown."""

    rows: int
    request: RowRequest
    prompt_tokens: int
    output_tokens: int | None
    """Longest answers; None: the requests have no limit."""
    tokens_per_second: float | None

    def text(self, price_in: float | None = None, price_out: float | None = None) -> str:
        """Describe the work. Prices are those of a million tokens."""
        output = "" if self.output_tokens is None else f" and at most {self.output_tokens:,} output tokens"
        lines = [f"{self.rows:,} rows, about {self.prompt_tokens:,} prompt tokens{output}"]
        if self.tokens_per_second:
            seconds = (self.prompt_tokens + (self.output_tokens or 0)) / self.tokens_per_second
            lines.append(f"about {duration_text(seconds)} at the server's recent speed of batch work")
        if price_in is not None or price_out is not None:
            cost = self.prompt_tokens * (price_in or 0.0) + (self.output_tokens or 0) * (price_out or 0.0)
            lines.append(f"price: about {cost / 1e6:,.2f}")
        return "\n".join(lines)


def estimate(client: ServerClient, rows: SourceRows) -> Estimate:
    """Return the work of checked rows. A server is asked for its count of tokens and its speed if it is there."""
    assert rows.first is not None
    chars, count, limits = 0, 0, list[Any]()
    sample: list[RowRequest] = []
    for _, _, request, _ in rows:
        if request is not None:
            count += 1
            chars += prompt_chars(request)
            limits.append(request.body.get("max_tokens") or request.body.get("max_completion_tokens"))
            if len(sample) < SAMPLE_ROWS:
                sample.append(request)
    try:
        tokens = sum(int(client.call("POST", "/tokenize", _asked(each))["count"]) for each in sample)
        found = _SPEED.search(client.metrics())
    except (ChatError, LookupError, TypeError, ValueError):
        tokens, found = 0, None
    ratio = sum(map(prompt_chars, sample)) / tokens if tokens else CHARS_PER_TOKEN
    outputs = sum(limits) if all(isinstance(each, int) for each in limits) else None
    return Estimate(count, rows.first, round(chars / ratio), outputs, float(found[1]) if found else None)


def _asked(request: RowRequest) -> dict[str, Any]:
    return {name: request.body[name] for name in ("model", "messages", "prompt") if name in request.body}


def prompt_chars(request: RowRequest) -> int:
    texts = [each.get("content") for each in request.body.get("messages") or () if isinstance(each, dict)]
    return sum(len(str(text)) for text in (*texts, request.body.get("prompt") or request.body.get("input") or ""))


def _tell(message: str) -> None:
    print(f"tidemill: {message}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Counts of a run. `causes`: failed rows by reason. `rows` holds the output if there is no output file."""

    total: int
    failed: int
    causes: Mapping[str, int]
    output: str | None
    rows: tuple[Row, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows of the output."""
        if self.output is None or files.scheme_of(self.output):
            return iter(self.rows)
        return tables.read_rows(Path(self.output))


@dataclass(slots=True)
class Batch:
    """A table, a prompt for its rows, and where the rows with answers go.

    source: rows as dicts, a DataFrame, or a JSONL, JSON, CSV, TSV or Parquet file as a path or an `https://`, `s3://`,
        `gs://` or `az://` URL. Without a prompt, rows are lines of OpenAI's batch files.
    output: path or URL; None returns the rows in the result and keeps nothing for a later run.
    prompt, system, schema, map_model, max_tokens, body, answer, prefix: see `Recipe`; `schema` may be a class of
        pydantic.
    limit: number of rows that are read. encoding: of a text file. force: replace an output that no run has written.
    retry_failed: send the rows again that have failed for good.
    model: default: the model of the server. url, api_key: default: $TIDEMILL_URL and $TIDEMILL_API_KEY.
    window: completion window of the batches, e.g. "24h".
    follow: called with a batch object that sums up all batches, about once a second; None shows a progress bar.
    tell: called with a warning; default: standard error.

    Raises ConfigError if an argument is invalid.
    """

    source: Any
    output: str | os.PathLike[str] | None = None
    prompt: str | None = None
    system: str | None = None
    schema: Any = None
    model: str | None = None
    map_model: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    answer: str = "answer"
    window: str = "24h"
    url: str | None = None
    api_key: str | None = None
    follow: Callable[[dict[str, Any]], None] | None = None
    prefix: str = ""
    limit: int | None = None
    encoding: str | None = None
    force: bool = False
    retry_failed: bool = False
    tell: Callable[[str], None] = _tell

    def run(self) -> BatchResult:
        """Run to the end. An interrupted run leaves its batches running.

        Raises ConfigError if an input or output cannot be used, ChatError if the server cannot be reached or refuses.
        """
        return self._checked_run(threading.Event())

    async def run_async(self) -> BatchResult:
        """Run in a thread. After a cancellation the batches continue on the server."""
        stop = threading.Event()
        try:
            return await asyncio.to_thread(self._checked_run, stop)
        finally:
            stop.set()

    def _checked_run(self, stop: threading.Event) -> BatchResult:
        try:
            return self._run(stop)
        except OSError as error:
            raise disk_error(Path(self._output or tempfile.gettempdir()), error) from None

    def estimate(self) -> Estimate:
        """Check the table, and return the first request and the expected amount of work. No row is sent."""
        with _folder() as folder:
            rows = self._rows(folder)
            _target(self._output, folder)
            return estimate(ServerClient(server_options(self.url, self.api_key)), rows)

    @property
    def _output(self) -> str | None:
        return None if self.output is None else os.fspath(self.output)

    def _rows(self, folder: Path) -> SourceRows:
        """Return the rows of the source after a check of all."""
        if self.limit is not None and self.limit < 1:
            raise ConfigError("--limit must be at least 1")
        schema = self.schema.model_json_schema() if hasattr(self.schema, "model_json_schema") else self.schema
        recipe = Recipe(
            self.prompt, self.system, schema, self.model, self.max_tokens, self.body, self.answer, self.map_model,
            self.prefix,
        )  # fmt: skip
        rows = SourceRows(_source(self.source, folder), recipe, self.limit, self.encoding)
        rows.check()
        for warning in rows.warnings:
            self.tell(warning)
        return rows

    def _run(self, stop: threading.Event) -> BatchResult:
        client = ServerClient(server_options(self.url, self.api_key))
        output = self._output
        with ExitStack() as stack:
            folder = stack.enter_context(_folder())
            target = _target(output, folder)
            if isinstance(self.source, str | os.PathLike) and (
                os.fspath(self.source) == output or same_file(Path(self.source), target)
            ):
                raise ConfigError(f"{output}: the output is the input; choose another file")
            rows = self._rows(folder)
            tables.check_output(target, rows.columns)
            journal = Journal(_journal_folder(output) or folder / "run", target)
            stack.callback(journal.close)
            self._check_owned(journal, output)
            progress = BatchProgress()
            if self.follow is None:
                stack.callback(progress.end)
            follow = self.follow or progress.show
            run = TableRun(client, journal, rows.recipe, rows, self.window, follow, self.tell, stop, self.retry_failed)
            run.to_the_end()
            counts = run.write(target)
            if output is not None and files.scheme_of(output):
                files.put(target, output)
            found = () if output is not None else tuple(tables.read_rows(target))
            answered = counts.pop("", 0)
            return BatchResult(answered + counts.total(), counts.total(), dict(counts.most_common()), output, found)

    def _check_owned(self, journal: Journal, output: str | None) -> None:
        """Raise ConfigError if the output exists and no run has begun to write it."""
        if output is None or self.force or not journal.is_empty:
            return
        if files.exists(output) if files.scheme_of(output) else os.path.lexists(output):
            raise ConfigError(f"{output}: the file exists and is not the work of this command; --force replaces it")


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a folder for temporary files."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="tidemill-")
    except OSError as error:
        raise ConfigError(f"no folder for temporary files: {error.strerror or error}; set TMPDIR") from None
    with folder:
        yield Path(folder.name)


def _source(source: Any, folder: Path) -> Path:
    """Return a local file with the rows of `source`."""
    if isinstance(source, str) and files.scheme_of(source):
        path = folder / f"source{tables.check_suffix(source.partition('?')[0])}"
        files.fetch(source, path)
        return path
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        tables.check_suffix(path.name)
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: the source must be a plain file, because it is read more than once")
        return path
    if hasattr(source, "to_dict"):  # a DataFrame
        source = source.to_dict("records")
    if not isinstance(source, Iterable):
        raise ConfigError("the source must be a path, a URL, a DataFrame or rows as dicts")
    path = folder / "source.jsonl"
    try:
        with path.open("wb") as file:
            file.writelines(map(json_line, source))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the rows cannot be written as JSON: {error}") from None
    except OSError as error:
        raise disk_error(folder, error) from None
    return path


def _target(output: str | None, folder: Path) -> Path:
    """Return the local file to write."""
    if output is None:
        return folder / "output.jsonl"
    suffix = tables.check_suffix(output)
    if files.scheme_of(output):
        files.check_writable(output)
        return folder / f"output{suffix}"
    if not Path(output).absolute().parent.is_dir():
        raise ConfigError(f"{output}: the folder does not exist")
    return Path(output)


def _journal_folder(output: str | None) -> Path | None:
    """Return the folder that lets a run with this output continue; None if nothing is kept."""
    if output is None:
        return None
    if not files.scheme_of(output):
        return Path(f"{os.path.realpath(output)}.tidemill")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "tidemill" / "runs" / uuid.uuid5(uuid.NAMESPACE_URL, output).hex
