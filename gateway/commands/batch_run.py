"""`tidemill batch run`: run a prompt over the rows of a table, and write the rows with the answers."""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

MAX_CAUSES = 5
"""Maximum number of reasons of failed rows that are printed."""
MAX_CAUSE = 500
"""Length of a printed reason, characters."""
_DESCRIPTION = """\
Run a prompt over the rows of a JSONL, JSON, CSV, TSV or Parquet file, or of an https://, s3://, gs:// or az:// URL, as
batch jobs of a server, and write the rows with their answers. Ctrl-C leaves the batches running; the same command
continues, and sends only the rows without an answer."""


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the flags of `tidemill batch run`."""
    command.description = _DESCRIPTION
    command.add_argument("source", metavar="IN", help="table of rows, or a JSONL file of ready-made batch lines")
    command.add_argument(
        "-o", "--output", required=True, metavar="OUT", help="table to write; its suffix is the format"
    )
    command.add_argument("--prompt", metavar="TEXT", help="user message; {column} is replaced by the row's value")
    command.add_argument("--system", metavar="TEXT", help="system message")
    command.add_argument("--schema", type=Path, metavar="FILE", help="JSON Schema of the answer; a column per property")
    command.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, tokens (default: the server's)")
    command.add_argument("--body", metavar="JSON", help="further fields of the request, e.g. '{\"temperature\": 0}'")
    command.add_argument("--answer", default="answer", metavar="COLUMN", help="column of the answer (default: answer)")
    command.add_argument("--window", default="24h", help="completion window, e.g. 90m, 24h or 7d (default: 24h)")
    _add_table_flags(command)


def _add_table_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prefix", default="", metavar="TEXT", help="prefix of all added columns, e.g. llm_ (default: none)"
    )
    command.add_argument("--limit", type=int, metavar="N", help="number of rows that are read (default: all)")
    command.add_argument(
        "--dry-run", action="store_true", help="show the first request and the expected work; send nothing"
    )
    command.add_argument("--price-in", type=float, metavar="P", help="with --dry-run: price of a million prompt tokens")
    command.add_argument(
        "--price-out", type=float, metavar="P", help="with --dry-run: price of a million output tokens"
    )
    command.add_argument(
        "--retry-failed", action="store_true", help="send the rows again that the server has refused or answered badly"
    )
    command.add_argument("--force", action="store_true", help="replace an output that this command has not written")
    command.add_argument(
        "--encoding", metavar="NAME", help="of IN, e.g. latin-1 or cp1252 (default: UTF-8, or as its byte order mark)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code: 1 if a row has no answer."""
    batch = importlib.import_module("tidemill.batch").Batch(
        arguments.source,
        arguments.output,
        prompt=arguments.prompt,
        system=arguments.system,
        schema=None
        if arguments.schema is None
        else _object(arguments.schema.read_text, f"--schema {arguments.schema}"),
        model=arguments.model,
        map_model=importlib.import_module("gateway.commands.batch").pairs_of(arguments.map_model, "--map-model"),
        max_tokens=arguments.max_tokens,
        body={} if arguments.body is None else _object(lambda: arguments.body, "--body"),
        answer=arguments.answer,
        window=arguments.window,
        url=arguments.url,
        api_key=arguments.api_key,
        prefix=arguments.prefix,
        limit=arguments.limit,
        encoding=arguments.encoding,
        force=arguments.force,
        retry_failed=arguments.retry_failed,
    )
    if arguments.dry_run:
        _show(batch.estimate(), arguments)
        return 0
    try:
        result = batch.run()
    except KeyboardInterrupt:
        print("tidemill: the batches continue on the server; the same command collects the answers", file=sys.stderr)
        raise
    print_causes(result.causes, "row")
    failed = f", {result.failed:,} without an answer" if result.failed else ""
    print(f"{result.output}: {result.total:,} rows{failed}")
    return 1 if result.failed else 0


def _show(estimate: Any, arguments: argparse.Namespace) -> None:
    """Print the first request and the expected work."""
    print(json.dumps(estimate.request.body, ensure_ascii=False, indent=2))
    print(estimate.text(arguments.price_in, arguments.price_out))


def print_causes(causes: Mapping[str, int], noun: str) -> None:
    """Print how many rows or lines failed for each reason, in the order given. `noun`: "row" or "line"."""
    for cause, count in islice(causes.items(), MAX_CAUSES):
        print(f"tidemill: {count:,} {noun if count == 1 else f'{noun}s'}: {cause[:MAX_CAUSE]}", file=sys.stderr)


def _object(read: Any, name: str) -> dict[str, Any]:
    try:
        value = json.loads(read())
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is not a JSON object")
    return value
