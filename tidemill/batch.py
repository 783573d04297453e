"""Run a prompt over the rows of a table as batch jobs of a server.

`Batch(...).run()` splits the rows into batches, follows them, and writes the input's rows with the answers. A run that
was interrupted continues: the second run with the same output sends only the rows without a result. It needs OpenAI's
`/v1/files` and `/v1/batches`, so it works with other servers as well.
"""

import asyncio
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from gateway.commands.batch_client import BatchClient, BatchProgress
from gateway.commands.chat import server_options
from tidemill import tables
from tidemill.journal import Journal
from tidemill.recipe import Recipe
from tidemill.run import TableRun
from tidemill.tables import Row


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
        if self.output is None or tables.scheme_of(self.output):
            return iter(self.rows)
        return tables.read_rows(Path(self.output))


@dataclass(slots=True)
class Batch:
    """A table, a prompt for its rows, and where the rows with answers go.

    source: rows as dicts, a DataFrame, or a JSONL, CSV, TSV or Parquet file as a path or an `https://`, `s3://`,
        `gs://` or `az://` URL. Without a prompt, rows are lines of OpenAI's batch files.
    output: path or URL; None returns the rows in the result and keeps nothing for a later run.
    prompt, system, schema, map_model, max_tokens, body: see `Recipe`; `schema` may be a class of pydantic.
    model: default: the model of the server. url, api_key: default: $TIDEMILL_URL and $TIDEMILL_API_KEY.
    window: completion window of the batches, e.g. "24h".
    follow: called with a batch object that sums up all batches, about once a second; None shows a progress bar.

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

    def run(self) -> BatchResult:
        """Run to the end. An interrupted run leaves its batches running.

        Raises ConfigError if an input or output cannot be used, ChatError if the server cannot be reached or refuses.
        """
        return self._run(threading.Event())

    async def run_async(self) -> BatchResult:
        """Run in a thread. After a cancellation the batches continue on the server."""
        stop = threading.Event()
        try:
            return await asyncio.to_thread(self._run, stop)
        finally:
            stop.set()

    def _run(self, stop: threading.Event) -> BatchResult:
        schema = self.schema.model_json_schema() if hasattr(self.schema, "model_json_schema") else self.schema
        recipe = Recipe(
            self.prompt, self.system, schema, self.model, self.max_tokens, self.body, self.answer, self.map_model
        )
        client = BatchClient(server_options(self.url, self.api_key))
        output = None if self.output is None else os.fspath(self.output)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-")))
            source, target = _source(self.source, folder), _target(output, folder)
            journal = Journal(_journal_folder(output) or folder / "run")
            stack.callback(journal.close)
            progress = BatchProgress()
            if self.follow is None:
                stack.callback(progress.end)
            run = TableRun(client, journal, recipe, source, self.window, self.follow or progress.show, stop, folder)
            run.check()
            run.to_the_end()
            counts = run.write(target)
            if output is not None and tables.scheme_of(output):
                tables.put(target, output)
            rows = () if output is not None else tuple(tables.read_rows(target))
            answered = counts.pop("", 0)
            return BatchResult(answered + counts.total(), counts.total(), dict(counts.most_common()), output, rows)


def _source(source: Any, folder: Path) -> Path:
    """Return a local file with the rows of `source`."""
    if isinstance(source, str) and tables.scheme_of(source):
        path = folder / f"source{tables.check_suffix(source.partition('?')[0])}"
        tables.fetch(source, path)
        return path
    if isinstance(source, str | os.PathLike):
        tables.check_suffix(os.fspath(source))
        return Path(source)
    if hasattr(source, "to_dict"):  # a DataFrame
        source = source.to_dict("records")
    if not isinstance(source, Iterable):
        raise ConfigError("the source must be a path, a URL, a DataFrame or rows as dicts")
    path = folder / "source.jsonl"
    with path.open("wb") as file:
        file.writelines(map(tables.json_line, source))
    return path


def _target(output: str | None, folder: Path) -> Path:
    """Return the local file to write."""
    if output is None:
        return folder / "output.jsonl"
    suffix = tables.check_suffix(output)
    if tables.scheme_of(output):
        tables.check_writable(output)
        return folder / f"output{suffix}"
    if not Path(output).absolute().parent.is_dir():
        raise ConfigError(f"{output}: the folder does not exist")
    return Path(output)


def _journal_folder(output: str | None) -> Path | None:
    """Return the folder that lets a run with this output continue; None if nothing is kept."""
    if output is None:
        return None
    if not tables.scheme_of(output):
        return Path(f"{output}.tidemill")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "tidemill" / "runs" / uuid.uuid5(uuid.NAMESPACE_URL, output).hex
