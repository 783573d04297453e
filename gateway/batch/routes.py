"""/v1/batches: create, list, retrieve, follow and cancel; and /v1/usage. The batch worker processes the batches."""

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from gateway.batch.files import FileExpiry
from gateway.batch.resources import (
    describe_body,
    describe_page,
    json_response,
    list_response,
    read_page,
    refuse,
    state_of,
)
from gateway.batch.tenants import TenantExchange, listed_tenant, reached_tenant, shown
from gateway.context import is_still_accepted, server_of, tenant_of
from gateway.endpoints import ENDPOINTS
from gateway.generate.answering import read_json
from gateway.generate.validation import StrictBody, at_most, parse_json, validate
from gateway.http.errors import ApiError
from gateway.http.keys import IDLE, limit_reached
from gateway.http.sse import EventStream, event
from gateway.store.disk import StorageError
from gateway.store.objects import BATCH_ID, FILE_ID, TERMINAL, BatchJob, LineQuota, NoSuchFile, Usage, new_batch_id
from gateway.telemetry.account import Account, EngineTime

router = APIRouter()

DEFAULT_LISTED, MAX_LISTED = 20, 100
MAX_WINDOW_SECONDS = 30 * 86_400
MAX_KEY_CHARS = 255
LINES_RETRY_SECONDS = 60
LOOK_SECONDS = 0.5
"""Seconds between two looks at a batch that a client follows."""
OUR_METADATA = "tidemill."
MAX_METADATA = 16
_WINDOW = re.compile("([1-9][0-9]{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[
    dict[MetadataKey, MetadataValue],
    at_most(MAX_METADATA),
    Field(json_schema_extra={"maxProperties": MAX_METADATA}),
]


class BatchRequest(StrictBody):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str = Field(json_schema_extra={"enum": list(ENDPOINTS)})
    completion_window: str = Field(json_schema_extra={"pattern": f"^{_WINDOW.pattern}$"})
    metadata: Metadata | None = None
    output_expires_after: FileExpiry | None = None


def window_seconds(text: str) -> int:
    """Return the seconds of a completion window such as 24h, 90m or 7d. Raises ApiError 400."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 1 <= seconds <= MAX_WINDOW_SECONDS:
        refuse("completion_window", "a duration like 24h, 90m or 7d, of at most 30 days")
    return seconds


@router.post("/v1/batches", openapi_extra=describe_body(BatchRequest))
async def create_batch(request: Request) -> Response:
    server_of(request).lifecycle.check_accepting()
    state = state_of(request)
    body = await read_json(request, lambda raw: validate(BatchRequest, parse_json(raw)))
    _check_metadata(body.metadata or {})
    if body.endpoint not in ENDPOINTS:
        refuse("endpoint", f"one of {', '.join(ENDPOINTS)}")
    now = state.now()
    batch = BatchJob(
        id=new_batch_id(),
        tenant=tenant_of(request),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window_seconds(body.completion_window),
        metadata=body.metadata,
        output_expires_after=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )
    if not FILE_ID.fullmatch(body.input_file_id):
        raise NoSuchFile("input_file_id")
    created = await add_batch(request, batch, _idempotency(request, body))
    file = await state.folder.store.get_file(created.tenant, created.input_file_id, state.expiry_now())
    notes = await state.jobs.first_notes(created, 0 if file is None else file.bytes)
    return json_response(created.as_json(notes))


def _check_metadata(metadata: dict[str, str]) -> None:
    """Raise ApiError 400 for a reserved key."""
    if any(key.startswith(OUR_METADATA) for key in metadata):
        message = f"Metadata keys that begin with '{OUR_METADATA}' are reserved; choose another key."
        raise ApiError(400, message, param="metadata", code="invalid_value")


async def add_batch(request: Request, batch: BatchJob, idempotency: tuple[str, str] | None = None) -> BatchJob:
    """Store a batch and start it; see `BatchRows.create_batch`. Raises ApiError."""
    state = state_of(request)
    max_lines = server_of(request).keys.quota(batch.tenant).lines
    try:
        created = await state.folder.store.create_batch(batch, idempotency, max_lines)
    except LineQuota as error:
        assert max_lines is not None
        what = f"unfinished batches have {error.used} lines"
        raise limit_reached("lines", max_lines, what, retry_after=LINES_RETRY_SECONDS) from None
    state.jobs.added(created)
    return created


def _idempotency(request: Request, body: BatchRequest) -> tuple[str, str] | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_CHARS:
        raise ApiError(400, f"The idempotency key must have 1 to {MAX_KEY_CHARS} characters.", code="invalid_value")
    return key, hashlib.sha256(body.model_dump_json().encode()).hexdigest()


@router.get("/v1/batches", openapi_extra=describe_page(MAX_LISTED))
async def list_batches(request: Request) -> Response:
    page, state = read_page(request, default=DEFAULT_LISTED, most=MAX_LISTED), state_of(request)
    batches, more = await state.folder.store.list_batches(listed_tenant(request), page)
    return list_response([shown(request, batch, batch.as_json(state.jobs.notes(batch))) for batch in batches], more)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    batch = await find_batch(request, batch_id)
    return json_response(shown(request, batch, batch.as_json(state_of(request).jobs.notes(batch))))


@router.get("/v1/batches/{batch_id}/events")
async def follow_batch(request: Request, batch_id: str) -> Response:
    """Stream the batch object: at once, after each change, and in its final state, which ends the stream."""
    return EventStream(_changes(request, await find_batch(request, batch_id)), lambda: None)


async def _changes(request: Request, batch: BatchJob | None) -> AsyncGenerator[bytes, None]:
    state, lifecycle, sent = state_of(request), server_of(request).lifecycle, b""
    while batch is not None:
        changed = event(shown(request, batch, batch.as_json(state.jobs.notes(batch))))
        if changed != sent:
            sent = changed
            yield changed
        if batch.status in TERMINAL or lifecycle.stopped:
            return
        await asyncio.sleep(LOOK_SECONDS)
        if not is_still_accepted(request):
            return
        with suppress(StorageError):
            batch = await state.folder.store.get_batch(reached_tenant(request), batch.id)


async def find_batch(request: Request, batch_id: str) -> BatchJob:
    """Return a batch that the request may access. Raises ApiError 404."""
    if BATCH_ID.fullmatch(batch_id):
        batch = await state_of(request).folder.store.get_batch(reached_tenant(request), batch_id)
        if batch is not None:
            return batch
    raise _no_such_batch()


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch. A batch that has already ended is returned with 200: clients would retry a 409."""
    batch = await cancel(request, batch_id)
    return json_response(shown(request, batch, batch.as_json()))


async def cancel(request: Request, batch_id: str) -> BatchJob:
    """Cancel a batch unless it has ended, and return it. Raises ApiError 404."""
    state = state_of(request)
    batch = None
    if BATCH_ID.fullmatch(batch_id):
        batch = await state.folder.store.cancel_batch(reached_tenant(request), batch_id, state.now())
    if batch is None:
        raise _no_such_batch()
    state.jobs.cancelled(batch)
    return batch


def _no_such_batch() -> ApiError:
    return ApiError(404, "The batch does not exist.", param="batch_id", code="batch_not_found")


PRICES = ("price_in", "price_out")
_DESCRIPTION = describe_page(MAX_LISTED)
_DESCRIPTION["parameters"] += [
    {"name": name, "in": "query", "schema": {"type": "number", "minimum": 0, "description": text}}
    for name, text in zip(
        PRICES, ("Price of a million prompt tokens.", "Price of a million output tokens."), strict=True
    )
]


def count_request(tenants: TenantExchange, engine_time: EngineTime, account: Account) -> None:
    """Add the tokens of a request that ended to its tenant's. Batch lines are not added: the store counts them."""
    request = account.request
    if not request.job:
        prompt, cached, output = account.num_prompt_tokens, account.num_cached_tokens, account.num_tokens
        used = Usage(prompt, cached, output, engine_us=engine_time.charge(prompt - cached, output))
        tenants.usage[request.tenant] = tenants.usage.get(request.tenant, Usage()).plus(used)


def bill_of(is_timed: bool, prices: tuple[float, float] | None, usage: Usage) -> dict[str, Any]:
    """Return figures of token usage. `is_timed`: engine time is known; `prices`: of a million tokens, if given."""
    value = None
    if prices is not None:
        value = round((usage.input_tokens * prices[0] + usage.output_tokens * prices[1]) / 1e6, 9)
    return {
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "engine_seconds": usage.engine_us / 1e6 if usage.engine_us or is_timed else None,
        "value": value,
    }


_UNUSED = (Usage(), 0)


@router.get("/v1/usage", openapi_extra=_DESCRIPTION)
async def read_usage(request: Request) -> Response:
    """Return usage, requests and unfinished lines of the key's tenant, or of the query's `tenant`.

    Batches are listed as in /v1/batches."""
    tenant, page = listed_tenant(request), read_page(request, default=20, most=MAX_LISTED)
    context, state = server_of(request), state_of(request)
    bill = partial(bill_of, context.metrics.stats.token_costs is not None, _prices(request))
    batches, more = await state.folder.store.list_batches(tenant, page)
    in_batches = await state.folder.store.usage(tenant)
    since, requests = context.created, state.tenants.usage
    if state.folder.store.is_shared:
        await state.tenants.exchange()
        stored, requests = await state.folder.store.request_usage(tenant)
        since = stored or since
    loads, refused = context.admissions.loads_everywhere(), context.admissions.refused
    names = sorted({*in_batches, *requests, *loads, *refused}) if tenant is None else [tenant]
    rows = [
        {
            "tenant": name,
            "requests": bill(requests.get(name, Usage())),
            "batches": bill(in_batches.get(name, _UNUSED)[0]),
            "unfinished_lines": in_batches.get(name, _UNUSED)[1],
            "running_requests": loads.get(name, IDLE).requests,
            "waiting_requests": loads.get(name, IDLE).queued,
            "refused_requests": refused[name],
        }
        for name in names
    ]
    listed: Sequence[dict[str, Any]] = [
        shown(request, batch, {"id": batch.id, "status": batch.status.value, **bill(batch.usage)}) for batch in batches
    ]
    content = {"object": "usage", "since": since, "tenants": rows, "batches": listed, "has_more": more}
    return json_response(content)


def _prices(request: Request) -> tuple[float, float] | None:
    """Return the prices of the query; None if there is none. Raises ApiError 400."""
    if not any(request.query_params.get(name) for name in PRICES):
        return None
    values = []
    for name in PRICES:
        try:
            value = float(request.query_params.get(name) or 0.0)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= 1e9:
            refuse(name, "a number between 0 and 1e9")
        values.append(value)
    return values[0], values[1]
