"""/v1/tables: batches from the rows of an uploaded table, for the page, with the rules of `tidemill batch run`.

A small file may expand to any size. Tables are therefore read and written in a child process with bounded memory, file
size and time. The recipe of a batch is a stored file that the batch's metadata names, so a restart loses nothing.
"""

import asyncio
import errno
import os
import resource
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from anyio import BrokenWorkerProcess, CancelScope, to_thread
from fastapi import APIRouter
from pydantic import Field
from pydantic_core import PydanticSerializationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.errors import ConfigError, InvalidRequestError
from gateway.batch.files import (
    FileContent,
    find_file,
    remove_file,
    room,
    store_content,
    store_written,
)
from gateway.batch.input import LOW_PRIORITY, run_apart
from gateway.batch.resources import describe_body, json_response, state_of
from gateway.batch.routes import add_batch, find_batch, window_seconds
from gateway.context import server_of, tenant_of
from gateway.generate.answering import read_json
from gateway.generate.validation import StrictBody, parse_json, validate
from gateway.http.errors import ApiError
from gateway.http.sse import run_while_connected
from gateway.store.disk import DiskFile
from gateway.store.objects import FILE_ID, TERMINAL, BatchJob, FileObject, NoSuchFile, new_batch_id
from tidemill.batch import prompt_chars
from tidemill.journal import ResultFiles
from tidemill.recipe import CHAT, Recipe, SourceRows
from tidemill.run import batch_line, write_table
from tidemill.tables import check_output, check_suffix, json_line

router = APIRouter()
ResultT = TypeVar("ResultT")

RECIPE = "tidemill.table"
"""Name in a batch's metadata that holds the id of the file with the recipe."""
SHOWN_ROWS = 3
MAX_ADDRESS_BYTES = 3 * 1024**3
"""Maximum address space of the child process."""
MAX_DESCRIPTION_BYTES = 16 * 1024**2


class TableRequest(StrictBody):
    """POST /v1/tables. `input_file_id`: an uploaded table, whose format is that of its file name; see `Recipe`."""

    input_file_id: str
    prompt: str
    answer_schema: dict[str, Any] | None = Field(None, alias="schema")
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    prefix: str = ""
    encoding: str | None = None
    completion_window: str = "24h"

    def rows(self, source: Path, limit: int | None = None) -> SourceRows:
        """Return the checked rows of a table. Raises ConfigError."""
        recipe = Recipe(
            self.prompt, schema=self.answer_schema, model=self.model, max_tokens=self.max_tokens, prefix=self.prefix
        )
        rows = SourceRows(source, recipe, limit, self.encoding)
        rows.check()
        return rows


# In the child process


def _make_lines(body: TableRequest, source: Path, lines: Path, max_rows: int, model: str) -> bytes:
    """Write the lines of a batch. Return a description in JSON: the columns, the rows, and the first requests."""
    rows = body.rows(source, max_rows + 1)
    if rows.total > max_rows:
        raise ConfigError(f"{source}: the table has more than {max_rows:,} rows; split it")
    check_output(_target(source), rows.columns)
    added = rows.recipe.columns()
    shown: list[dict[str, Any]] = []
    chars = requests = 0
    with lines.open("wb") as file:
        for _, custom_id, request, problem in rows:
            sent = None if request is None else {"model": model, **request.body}
            if len(shown) < SHOWN_ROWS:
                shown.append({"body": sent, "problem": problem, "chars": prompt_chars(request) if request else 0})
            if request is not None and sent is not None:
                file.write(batch_line(custom_id, request.url, sent))
                chars += prompt_chars(request)
                requests += 1
    description = json_line(
        {
            "columns": [name for name in rows.columns if name not in added],
            "added_columns": list(added),
            "rows": rows.total,
            "requests": requests,
            "prompt_chars": chars,
            "first": shown,
            "warnings": [text.removeprefix(f"{source}: ") for text in rows.warnings],
        }
    )
    if len(description) > MAX_DESCRIPTION_BYTES:
        raise ConfigError(f"the columns and {SHOWN_ROWS} requests have more than {MAX_DESCRIPTION_BYTES:,} bytes")
    return description


def _target(source: Path) -> Path:
    return source.with_name(f"answers{check_suffix(source.name)}")


def _write_answers(body: TableRequest, source: Path, results: Sequence[Path]) -> Path:
    """Write the rows of a table with their answers."""
    rows = body.rows(source)
    found = ResultFiles(results)
    try:
        write_table(_target(source), rows, found.result)
    finally:
        found.close()
    return _target(source)


def _bounded(work: Callable[..., ResultT], max_bytes: int, *arguments: Any) -> ResultT | str:
    """Return the result of `work`, or the reason why it failed. Raises OSError if the disk refuses."""
    os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)
    most = {resource.RLIMIT_AS: MAX_ADDRESS_BYTES, resource.RLIMIT_FSIZE: max_bytes}
    before = {kind: resource.getrlimit(kind) for kind in most}
    try:
        for kind, limit in most.items():
            resource.setrlimit(kind, (limit, before[kind][1]))
        return work(*arguments)
    except MemoryError:
        return "its rows need too much memory; split it, or write smaller groups of rows"
    except (ConfigError, OSError) as error:
        cause = error.__context__ if isinstance(error, ConfigError) else error
        if not isinstance(cause, OSError) or cause.errno is None:
            return str(error)
        if cause.errno == errno.ENOENT:
            return "one of its files was deleted or has expired; upload it again"
        if cause.errno == errno.EFBIG:
            return f"its requests or answers have more than {max_bytes:,} bytes; split it"
        raise OSError(cause.errno, cause.strerror) from None
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


# In the server


@dataclass(frozen=True, slots=True)
class TableLines:
    """The lines of a batch in a temporary file, and the description of the table."""

    body: TableRequest
    recipe: bytes
    """The body in JSON."""
    source: FileObject
    lines: DiskFile
    description: bytes

    def batch(self, request: Request, input_file_id: str, recipe: str | None = None) -> BatchJob:
        now, window = state_of(request).now(), self.body.completion_window
        metadata = None if recipe is None else {RECIPE: recipe}
        return BatchJob(
            new_batch_id(), tenant_of(request), CHAT, input_file_id, window, now, now + window_seconds(window),
            metadata=metadata,
        )  # fmt: skip


@router.post("/v1/tables/preview", openapi_extra=describe_body(TableRequest))
async def preview_table(request: Request) -> Response:
    """Return the columns, the first requests and the expected end, and store nothing."""
    async with _table_lines(request) as table:
        batch = table.batch(request, table.source.id)
        notes = await state_of(request).jobs.first_notes(batch, table.lines.size, table.lines.path)
    return json_response({"table": orjson.Fragment(table.description), "metadata": notes})


@router.post("/v1/tables", openapi_extra=describe_body(TableRequest))
async def create_table_batch(request: Request) -> Response:
    """Create a batch with a line for each row."""
    made: list[FileObject] = []
    async with _table_lines(request) as table:
        name = table.source.filename
        try:
            made.append(await store_written(request, table.lines, f"{name}.jsonl"))
            made.append(await store_content(request, table.recipe, f"{name}.recipe.json"))
            created = await add_batch(request, table.batch(request, made[0].id, made[1].id))
        except ApiError:
            for file in made:
                await remove_file(request, file.id)
            raise
    notes = await state_of(request).jobs.first_notes(created, made[0].bytes)
    return json_response(created.as_json(notes))


@router.get("/v1/batches/{batch_id}/table")
async def read_table(request: Request, batch_id: str) -> Response:
    """Return the rows with their answers, in the format of the uploaded table."""
    batch, state = await find_batch(request, batch_id), state_of(request)
    recipe_id = (batch.metadata or {}).get(RECIPE)
    if recipe_id is None:
        raise ApiError(404, "The batch was not made from a table.", param="batch_id", code="no_table")
    results = [name for name in (batch.output_file_id, batch.error_file_id) if name is not None]
    if batch.status not in TERMINAL or not results:
        message = batch.errors[0].message if batch.errors else "Wait until the batch has ended."
        raise ApiError(404, f"The batch has no results: {message}", param="batch_id", code="results_not_ready")
    recipe, *paths = [await _body_of(request, await _kept_file(request, name)) for name in (recipe_id, *results)]
    body = validate(TableRequest, parse_json(await to_thread.run_sync(recipe.read_bytes)))
    source = await _kept_file(request, body.input_file_id)
    async with _workplace(request, source) as path:
        target = await _run(request, source, path, _write_answers, state.limits.file_bytes, body, path, paths)
        descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            content = FileContent(FileObject("", "", size, 0, source.filename, "table"), descriptor, state.readers)
            await content.begin()
        except BaseException:
            os.close(descriptor)
            raise
    return content


async def _kept_file(request: Request, file_id: str) -> FileObject:
    """Return a file of a batch. Raises ApiError 404."""
    try:
        return await find_file(request, file_id)
    except ApiError as error:
        message = "A file of this batch was deleted or has expired, so its table cannot be written."
        raise error if error.status != 404 else ApiError(404, message, code="file_not_found") from None


async def _body_of(request: Request, file: FileObject) -> Path:
    return await to_thread.run_sync(state_of(request).folder.copy_body, file.id)


def _read_body(raw: bytearray) -> tuple[TableRequest, bytes]:
    body = validate(TableRequest, parse_json(raw))
    try:
        return body, body.model_dump_json(by_alias=True).encode()
    except PydanticSerializationError:  # pydantic writes 255 levels
        raise InvalidRequestError("'schema' is nested too deeply.", param="schema", code="invalid_value") from None


@asynccontextmanager
async def _table_lines(request: Request) -> AsyncIterator[TableLines]:
    """Yield the lines of the request's table. They are removed at the end unless they were stored. Raises ApiError."""
    context, state, tenant = server_of(request), state_of(request), tenant_of(request)
    context.lifecycle.check_accepting()
    body, recipe = await read_json(request, _read_body)
    window_seconds(body.completion_window)
    source = None
    if FILE_ID.fullmatch(body.input_file_id):
        source = await state.folder.store.get_file(tenant, body.input_file_id, state.expiry_now())
    if source is None:
        raise NoSuchFile("input_file_id")
    max_bytes = await room(request, context.keys.quota(tenant).bytes)
    async with _workplace(request, source) as path:
        with state.folder.disk.storing():
            lines = await to_thread.run_sync(state.folder.disk.create, path.with_name("lines"))
        try:
            max_rows, model = state.limits.lines, context.models.first
            made = await _run(request, source, path, _make_lines, max_bytes, body, path, lines.path, max_rows, model)
            lines.size = lines.length()
            yield TableLines(body, recipe, source, lines, made)
        finally:
            lines.close()


@asynccontextmanager
async def _workplace(request: Request, source: FileObject) -> AsyncIterator[Path]:
    """Yield a path of the table in a temporary folder, with the suffix of its format. Raises ApiError."""
    state = state_of(request)
    try:
        suffix = check_suffix(source.filename)
    except ConfigError as error:
        raise _refusal(error.message) from None
    async with state.tables.place(tenant_of(request)):
        body = await _body_of(request, source)
        folder = await to_thread.run_sync(state.folder.create_temp_folder)
        try:
            path = folder / f"table{suffix}"
            path.symlink_to(body)
            yield path
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))


async def _run(
    request: Request, source: FileObject, path: Path, work: Callable[..., ResultT], max_bytes: int, *arguments: Any
) -> ResultT:
    """Run `work` in a child process, which ends with the connection. Raises ApiError and StorageError."""
    state = state_of(request)

    async def make() -> ResultT | str:
        async with asyncio.timeout(state.limits.check_seconds):
            with state.folder.disk.storing():
                return await run_apart(_bounded, work, max_bytes, *arguments)

    try:
        made = await run_while_connected(request.receive, make, lambda: None)
    except TimeoutError:
        raise _refusal(f"it takes more than {state.limits.check_seconds:.0f} s; split it") from None
    except BrokenWorkerProcess:
        raise _refusal("the process that reads it has died, probably for its memory; split it") from None
    if made is None:
        raise ClientDisconnect
    if isinstance(made, str):
        raise _refusal(made.replace(str(path), source.filename))
    return made


def _refusal(reason: str) -> ApiError:
    return ApiError(400, f"The table cannot be used: {reason}.", param="input_file_id", code="invalid_table")
