"""/v1/messages/batches: Anthropic's Message Batches. They are batches of the endpoint /v1/messages, and batches of
this endpoint that /v1/batches created are shown as well."""

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from typing import Annotated, Any

import orjson
from anyio import to_thread
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.errors import InvalidRequestError
from gateway.batch.files import FileContent, find_file, open_content, remove_file, store_content
from gateway.batch.input import check_input, run_apart
from gateway.batch.resources import describe_body, describe_page, json_response, read_page, state_of
from gateway.batch.routes import DEFAULT_LISTED, add_batch, cancel, find_batch
from gateway.batch.run import BatchLimits
from gateway.batch.tenants import listed_tenant, reached_tenant
from gateway.context import server_of, tenant_of
from gateway.generate.answering import read_raw
from gateway.generate.validation import StrictBody, parse_json, validate
from gateway.http.errors import MESSAGES_PATH, ApiError, messages_envelope, timestamp
from gateway.http.json_text import LIMITS, JsonSize, escape_line_ends
from gateway.http.sse import run_while_connected
from gateway.models import ModelNames
from gateway.store.objects import TERMINAL, BatchJob, BatchStatus, FileInUse, Page, new_batch_id

router = APIRouter()

PATH = f"{MESSAGES_PATH}/batches"
MAX_REQUESTS = 100_000
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_SIZE = JsonSize(*(32 * most for most in LIMITS))
INLINE_BYTES = 256 * 1024
"""Larger bodies are parsed in a process of their own: parsing holds the GIL."""
MAX_LISTED = 1000
WINDOW_SECONDS = 86_400
_PREFIX = "msg"
_ENDS = {"batch_expired": "expired", "batch_cancelled": "canceled"}


class BatchedMessage(StrictBody):
    """A request of a batch: `params` is a body of /v1/messages."""

    custom_id: str
    params: dict[str, Any]


class MessageBatchRequest(StrictBody):
    """POST /v1/messages/batches."""

    requests: Annotated[list[BatchedMessage], Field(min_length=1, max_length=MAX_REQUESTS, fail_fast=True)]


@router.post(PATH, openapi_extra=describe_body(MessageBatchRequest))
async def create_message_batch(request: Request) -> Response:
    server_of(request).lifecycle.check_accepting()
    state, tenant = state_of(request), tenant_of(request)
    lines = await _read_lines(request, state.limits)
    batch_id = new_batch_id()
    file = await store_content(request, lines, _input_name(batch_id))
    now = state.now()
    batch = BatchJob(batch_id, tenant, MESSAGES_PATH, file.id, "24h", now, now + WINDOW_SECONDS)
    try:
        created = await add_batch(request, batch)
    except ApiError:
        await remove_file(request, file.id)
        raise
    return json_response(_as_json(replace(created, total=lines.count(b"\n"))))


async def _read_lines(request: Request, limits: BatchLimits) -> bytes:
    """Return the input file of a batch. Raises InvalidRequestError."""
    raw, models = bytes(await read_raw(request)), server_of(request).models
    if len(raw) <= INLINE_BYTES:
        return _input_lines(raw, limits, models)
    return await run_apart(_input_lines, raw, limits, models)


def _input_lines(raw: bytes, limits: BatchLimits, models: ModelNames) -> bytes:
    """Return the input file of a batch. Raises InvalidRequestError for requests that would fail the whole batch."""
    body = validate(MessageBatchRequest, parse_json(raw, MAX_SIZE))
    common = {"method": "POST", "url": MESSAGES_PATH}
    try:
        lines = b"".join(
            orjson.dumps({"custom_id": each.custom_id, **common, "body": each.params}) + b"\n" for each in body.requests
        )
    except orjson.JSONEncodeError:
        message = "'requests' is nested too deeply."
        raise InvalidRequestError(message, param="requests", code="invalid_value") from None
    for error in check_input(BytesIO(lines), MESSAGES_PATH, limits.lines, limits.line_bytes, models).errors:
        place = f"requests[{(error.line or 1) - 1}]"
        param = f"{place}.{error.param}".replace(".body", ".params") if error.param else place
        message = f"{place}: {error.message}".replace("'body.", "'params.")
        raise InvalidRequestError(message, param=param, code=error.code)
    return lines


@router.get(PATH, openapi_extra=describe_page(MAX_LISTED, cursors=("after_id", "before_id")))
async def list_message_batches(request: Request) -> Response:
    state, query = state_of(request), request.query_params
    is_before = "before_id" in query
    page = read_page(request, default=DEFAULT_LISTED, most=MAX_LISTED)
    after = _our_id(query.get("before_id") or query.get("after_id") or "")
    page = Page(page.limit, after or None, is_before, "before_id" if is_before else "after_id")
    batches, more = await state.folder.store.list_batches(listed_tenant(request), page, MESSAGES_PATH)
    data = [_as_json(batch) for batch in (reversed(batches) if is_before else batches)]
    ids = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return json_response({"data": data, "has_more": more, **ids})


@router.get(PATH + "/{message_batch_id}")
async def retrieve_message_batch(request: Request, message_batch_id: str) -> Response:
    return json_response(_as_json(await _find(request, message_batch_id)))


@router.post(PATH + "/{message_batch_id}/cancel")
async def cancel_message_batch(request: Request, message_batch_id: str) -> Response:
    batch = await _find(request, message_batch_id)
    return json_response(_as_json(await cancel(request, batch.id)))


@router.delete(PATH + "/{message_batch_id}")
async def delete_message_batch(request: Request, message_batch_id: str) -> Response:
    """Delete a batch that has ended, with its result files and an input file that was created for it."""
    batch, state = await _find(request, message_batch_id), state_of(request)
    if batch.status not in TERMINAL:
        raise ApiError(400, "The batch has not ended; cancel it first.", param="message_batch_id", code="invalid_value")
    await state.folder.store.delete_batch(batch.id)
    given = await state.folder.store.get_file(reached_tenant(request), batch.input_file_id, state.expiry_now())
    own_input = batch.input_file_id if given is not None and given.filename == _input_name(batch.id) else None
    for file_id in (own_input, batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            with suppress(FileInUse):
                await remove_file(request, file_id)
    return json_response({"id": message_batch_id, "type": "message_batch_deleted"})


@router.get(PATH + "/{message_batch_id}/results")
async def read_results(request: Request, message_batch_id: str) -> Response:
    """Return a row for each request of a batch that has ended."""
    batch = await _find(request, message_batch_id)
    if batch.status not in TERMINAL:
        message = "The batch has no results yet; wait until its 'processing_status' is 'ended'."
        raise ApiError(404, message, param="message_batch_id", code="results_not_ready")
    contents: list[FileContent] = []
    try:
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                contents.append(await open_content(request, await find_file(request, file_id)))  # noqa: PERF401
    except BaseException:
        for content in contents:
            content.close()
        raise
    return MessageResults(contents)


async def _find(request: Request, message_batch_id: str) -> BatchJob:
    """Return a batch of messages. Raises ApiError 404."""
    batch = await find_batch(request, _our_id(message_batch_id))
    if batch.endpoint != MESSAGES_PATH:
        raise ApiError(404, "The batch is not one of /v1/messages.", param="message_batch_id", code="batch_not_found")
    return batch


def _input_name(batch_id: str) -> str:
    """Return the name of the input file that the server made for a batch; no upload knows the id before the batch."""
    return f"{batch_id}_input.jsonl"


def _our_id(message_batch_id: str) -> str:
    return message_batch_id.removeprefix(_PREFIX)


def _as_json(batch: BatchJob) -> dict[str, Any]:
    """Return the batch in Anthropic's form, in which requests count as processing until the whole batch has ended."""
    has_ended, times = batch.status in TERMINAL, batch.times
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if has_ended:
        counts |= {"succeeded": batch.completed, "errored": batch.failed}
        counts["canceled" if batch.status is BatchStatus.CANCELLED else "expired"] = batch.remaining
    else:
        counts["processing"] = batch.total
    ended_at = times.get(f"{batch.status.value}_at") if has_ended else None
    cancelled_at = times.get("cancelling_at")
    message_batch_id = _PREFIX + batch.id
    ending = "canceling" if batch.status is BatchStatus.CANCELLING else "in_progress"
    return {
        "id": message_batch_id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else ending,
        "request_counts": counts,
        "created_at": timestamp(batch.created_at),
        "expires_at": timestamp(batch.expires_at),
        "ended_at": None if ended_at is None else timestamp(ended_at),
        "cancel_initiated_at": None if cancelled_at is None else timestamp(cancelled_at),
        "archived_at": None,
        # relative: clients join it to their base URL, which may be a proxy's with a prefix
        "results_url": f"{PATH}/{message_batch_id}/results" if has_ended else None,
    }


class MessageResults(StreamingResponse):
    """The rows of our result files in Anthropic's form."""

    media_type = "application/x-jsonl"

    def __init__(self, contents: list[FileContent]) -> None:
        self._contents = contents
        super().__init__(self._rows(), headers={"x-content-type-options": "nosniff"})

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, lambda: self.stream_response(send), lambda: None)
        finally:
            for content in self._contents:
                content.close()

    async def _rows(self) -> AsyncIterator[bytes]:
        for content in self._contents:
            rest = b""
            async for piece in content.pieces():
                whole, end, rest = (rest + piece).rpartition(b"\n")
                yield await to_thread.run_sync(_message_rows, whole + end)


def _message_rows(rows: bytes) -> bytes:
    return b"".join(_message_row(row) + b"\n" for row in rows.split(b"\n") if row)


def _message_row(row: bytes) -> bytes:
    found = orjson.loads(row)
    result: dict[str, Any]
    match found:
        case {"error": {"code": str(code)}} if code in _ENDS:
            result = {"type": _ENDS[code]}
        case {"error": {"message": message}}:
            result = {"type": "errored", "error": messages_envelope(ApiError(500, message), None)}
        case {"response": {"status_code": 200, "body": body}}:
            result = {"type": "succeeded", "message": body}
        case {"response": {"status_code": status, "body": {"error": error}, "request_id": request_id}}:
            refusal = ApiError(status, error["message"], param=error["param"])
            result = {"type": "errored", "error": messages_envelope(refusal, request_id)}
    return escape_line_ends(orjson.dumps({"custom_id": found["custom_id"], "result": result}))
