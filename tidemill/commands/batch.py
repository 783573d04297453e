"""`tidemill batch run|submit|list|watch|cancel|results`: manage batch jobs of a running server from a terminal.

Exit codes: 0 success; 1 the server refused the request or the batch did not complete; 2 invalid command line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, TidemillError
from tidemill.files import replacing, same_file

if TYPE_CHECKING:
    from tidemill.client import ChatOptions, ServerClient


MAX_FIRST_LINE = 8 * 1024 * 1024
FILE_COLUMNS = 30
MAX_CAUSES = 5
"""Maximum number of reasons of failed rows that are printed."""
MAX_CAUSE = 500
"""Length of a printed reason, characters."""
_DESCRIPTION = """\
Run a prompt over the rows of a JSONL, JSON, CSV, TSV or Parquet file, or of an https://, s3://, gs:// or az:// URL, as
batch jobs of a server, and write the rows with their answers. Ctrl-C leaves the batches running; the same command
continues, and sends only the rows without an answer."""
_PLAIN = (
    "prompt", "system", "model", "max_tokens", "answer", "window", "url", "api_key", "prefix", "limit", "encoding",
    "force", "retry_failed",
)  # fmt: skip
"""Flags of `run` that `Batch` takes as they are."""
_EXAMPLE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": '
    '[{"role": "user", "content": "Hello"}]}}'
)


def add_batch(commands: Any, parser_class: type[argparse.ArgumentParser]) -> None:
    """Add `batch` and its subcommands to the parser of `tidemill`."""
    parser = commands.add_parser("batch", help="manage batch jobs of a running server", allow_abbrev=False)
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=parser_class)

    def add_plain(name: str, action: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = actions.add_parser(name, help=text, allow_abbrev=False)
        add_server(command)
        command.set_defaults(run=action)
        return command

    def add(
        name: str, action: "Callable[[ServerClient, argparse.Namespace], int]", text: str
    ) -> argparse.ArgumentParser:
        return add_plain(name, lambda arguments: action(_client(arguments), arguments), text)

    command = add_plain("run", run, "run a prompt over the rows of a table")
    add_run(command)
    add_models(command)
    submit = add("submit", _submit, "upload a JSONL file, start a batch and print its id")
    submit.add_argument("file", type=Path, metavar="FILE")
    submit.add_argument("--endpoint", help="endpoint of every line (default: url of the first line)")
    submit.add_argument("--window", default="24h", help="completion window, e.g. 90m, 24h or 7d (default: 24h)")
    submit.add_argument(
        "--metadata", action="append", default=[], metavar="KEY=VALUE", help="metadata of the batch; repeatable"
    )
    add_models(submit)
    submit.add_argument("--watch", action="store_true", help="show the progress until the batch ends")
    listing = add("list", _list, "list batches, newest first")
    listing.add_argument("--limit", type=positive, default=20, metavar="N", help="number of batches (default: 20)")
    listing.add_argument("--tenant", metavar="NAME", help="tenant whose batches are listed; * for all (operators only)")
    for name, action, text in (
        ("watch", _watch, "show the progress of a batch until it ends"),
        ("cancel", _cancel, "cancel a batch; results of finished lines remain available"),
        ("results", _results, "write the result lines of a batch that has ended"),
    ):
        command = add(name, action, text)
        command.add_argument("batch_id", metavar="BATCH")
    command.add_argument("--output", type=Path, metavar="FILE", help="output file (default: standard output)")
    command.add_argument("--errors", type=Path, metavar="FILE", help="output file for failed lines")
    command.add_argument("--force", action="store_true", help="replace files that exist")


def add_models(command: argparse.ArgumentParser) -> None:
    """Add the flags that replace the models of ready-made lines."""
    command.add_argument("--model", help="model of every line (default: as in the line, else the server's)")
    command.add_argument(
        "--map-model", action="append", default=[], metavar="OLD=NEW", help="replacement of a model; repeatable"
    )


def pairs_of(words: Sequence[str], flag: str) -> dict[str, str]:
    """Parse the values of a repeatable flag. Raise ConfigError for one that is not KEY=VALUE."""
    pairs = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key:
            raise ConfigError(f"{flag} must look like KEY=VALUE, not {word!r}")
        pairs[key] = value
    return pairs


def add_server(command: argparse.ArgumentParser) -> None:
    """Add the flags for the server's URL and API key."""
    command.add_argument("--url", help="URL of the server (default: $TIDEMILL_URL or http://127.0.0.1:8000)")
    command.add_argument("--api-key", metavar="KEY", help="API key (default: $TIDEMILL_API_KEY)")


def server_of(arguments: argparse.Namespace) -> "ChatOptions":
    """Return the options set by the flags of `add_server`."""
    from tidemill.client import server_options

    return server_options(arguments.url, arguments.api_key)


def positive(text: str) -> int:
    """Parse the value of a flag that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _client(arguments: argparse.Namespace) -> "ServerClient":
    from tidemill.client import ServerClient

    return ServerClient(server_of(arguments))


def _submit(client: "ServerClient", arguments: argparse.Namespace) -> int:
    metadata = pairs_of(arguments.metadata, "--metadata")
    models = pairs_of(arguments.map_model, "--map-model")
    endpoint = arguments.endpoint or _first_url(arguments.file)
    body: dict[str, Any] = {"endpoint": endpoint, "completion_window": arguments.window}
    if metadata:
        body["metadata"] = metadata
    with ExitStack() as stack:
        path = arguments.file
        if arguments.model or models:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="tidemill-")))
            path = _with_models(path, folder, arguments.model, models)
        body["input_file_id"] = client.upload(path)
    batch = client.call("POST", "/v1/batches", body)
    try:
        print(batch["id"], flush=True)
    except OSError:
        print(f"tidemill: the batch was created as {batch['id']}", file=sys.stderr)
        raise
    if warning := (batch.get("metadata") or {}).get("tidemill.warning"):
        print(f"tidemill: {warning}", file=sys.stderr)
    return _follow(client, batch["id"]) if arguments.watch else 0


def _with_models(path: Path, folder: Path, model: str | None, models: Mapping[str, str]) -> Path:
    """Copy a file of lines to `folder` with other models. The server reports lines that are not requests."""
    from tidemill.recipe import with_model

    copy = folder / path.name
    try:
        with path.open("rb") as lines, copy.open("wb") as file:
            for line in lines:
                with suppress(ValueError, TypeError, LookupError):
                    row = json.loads(line)
                    line = json.dumps({**row, "body": with_model(row["body"], model, models)}).encode() + b"\n"
                file.write(line)
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror}") from None
    return copy


def _first_url(path: Path) -> str:
    """Return the endpoint of the first line. Raise ConfigError if the file or its first line cannot be read."""
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_FIRST_LINE)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        return str(json.loads(line)["url"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{path}: {_why_no_request(line)}; a line looks like {_EXAMPLE}") from None


def _why_no_request(line: bytes) -> str:
    """Describe the first line of a file that is not a batch request."""
    if not line:
        return "the file is empty"
    if b"\0" in line:
        return "the file is binary"
    if not line.lstrip().startswith((b"{", b"[")) and (b"," in line or b"\t" in line):
        return "the file looks like CSV"
    return "the first line is not a batch request"


def _list(client: "ServerClient", arguments: argparse.Namespace) -> int:
    from tidemill.progress import eta_text, progress_text, shortened

    batches = list(client.batches(arguments.limit, arguments.tenant))
    ids = {batch["input_file_id"] for batch in batches}
    names = {file_id: shortened(client.file_name(file_id), FILE_COLUMNS) or "(deleted)" for file_id in ids}
    width = max([len("file"), *map(len, names.values())])
    if not batches:
        print("no batches yet", file=sys.stderr)
    else:
        print(f"{'batch':<38}  {'created':<19}  {'status':<11}  {'file':<{width}}  lines")
    for batch in batches:
        name = names[batch["input_file_id"]]
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(batch["created_at"]))
        owner = f"  {batch['tenant']}" if "tenant" in batch else ""
        end = f", {eta}" if (eta := eta_text(batch)) else ""
        print(f"{batch['id']}  {created}  {batch['status']:<11}  {name:<{width}}  {progress_text(batch)}{end}{owner}")
    return 0


def _watch(client: "ServerClient", arguments: argparse.Namespace) -> int:
    return _follow(client, client.find(arguments.batch_id))


def _follow(client: "ServerClient", batch_id: str) -> int:
    """Show the progress until the batch ends and return the exit code. Ctrl-C does not affect the batch."""
    from tidemill.progress import BatchProgress

    progress, batch = BatchProgress(), dict[str, Any]()
    try:
        for batch in client.changes(batch_id):
            progress.show(batch)
    finally:
        progress.end()
    for error in (batch.get("errors") or {}).get("data", [])[:10]:
        place = "" if error["line"] is None else f"line {error['line']}: "
        print(f"{place}{error['message']} ({error['code']})", file=sys.stderr)
    if batch.get("output_file_id"):
        print(f"tidemill: write the results with: tidemill batch results {batch['id']} --output FILE", file=sys.stderr)
    failed = _tell_causes(client, batch)
    return 0 if batch["status"] == "completed" and not failed else 1


def _tell_causes(client: "ServerClient", batch: dict[str, Any]) -> bool:
    """Print how many lines failed for each cause, the most frequent first. Return whether a line failed."""
    if not batch.get("error_file_id"):
        return False
    causes = client.causes(batch["error_file_id"])
    print_causes(dict(causes.most_common()), "line")
    return bool(causes)


def _cancel(client: "ServerClient", arguments: argparse.Namespace) -> int:
    from urllib.parse import quote

    batch = client.call("POST", f"/v1/batches/{quote(client.find(arguments.batch_id), safe='')}/cancel")
    print(batch["status"])
    return 0


def _results(client: "ServerClient", arguments: argparse.Namespace) -> int:
    from tidemill.client import TERMINAL
    from tidemill.progress import progress_text

    batch = client.batch(client.find(arguments.batch_id))
    if batch["status"] not in TERMINAL:
        print(
            f"tidemill: the batch is {batch['status']} ({progress_text(batch)}); results are available after it ends",
            file=sys.stderr,
        )
        return 1
    _check_files(arguments)
    if output := batch.get("output_file_id"):
        _write(client, output, arguments.output)
    errors = batch.get("error_file_id")
    if errors and arguments.errors:
        _write(client, errors, arguments.errors)
    elif errors:
        lines = batch["request_counts"]["total"] - batch["request_counts"]["completed"]
        print(f"tidemill: lines without an answer: {lines:,}; --errors FILE writes their rows", file=sys.stderr)
    return 0 if batch["status"] == "completed" else 1


def _check_files(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if two outputs are one file, or if one exists."""
    output, errors = arguments.output, arguments.errors
    if output is not None and errors is not None and same_file(output, errors):
        raise ConfigError(f"--output and --errors name one file, {errors}; choose two")
    for path in (output, errors):
        if path is not None and path.is_file() and not arguments.force:
            raise ConfigError(f"{path}: the file exists; --force replaces it")


def _write(client: "ServerClient", file_id: str, path: Path | None) -> None:
    """Download a file to `path`, or to standard output. `path` appears only after a complete download."""
    if path is None:
        try:
            client.download(file_id, sys.stdout.buffer)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise TidemillError(f"standard output cannot be written: {error.strerror}") from None
        sys.stdout.flush()
        return
    with replacing(path) as target:
        client.download(file_id, target)


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
    from tidemill.batch import Batch

    file = arguments.schema
    batch = Batch(
        arguments.source,
        arguments.output,
        schema=None if file is None else _object(file.read_text, f"--schema {file}"),
        map_model=pairs_of(arguments.map_model, "--map-model"),
        body={} if arguments.body is None else _object(lambda: arguments.body, "--body"),
        **{name: getattr(arguments, name) for name in _PLAIN},
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
