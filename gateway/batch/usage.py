"""GET /v1/usage: tokens, engine seconds and value by tenant, and of each batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.batch.listing import describe_page, json_response, read_page, refuse, unknown_cursor
from gateway.batch.state import state_of
from gateway.batch.tenants import TenantExchange, listed_tenant, shown
from gateway.context import context_of
from gateway.store.objects import UnknownCursor, Usage
from gateway.telemetry.account import Account
from gateway.telemetry.engine_time import EngineTime

router = APIRouter()

MAX_LISTED = 100
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


@dataclass(frozen=True, slots=True)
class Bill:
    """Figures of token usage. `is_timed`: engine time is known; `prices`: of a million tokens, if given."""

    is_timed: bool
    prices: tuple[float, float] | None

    def of(self, usage: Usage) -> dict[str, Any]:
        value = None
        if self.prices is not None:
            price_in, price_out = self.prices
            value = round((usage.input_tokens * price_in + usage.output_tokens * price_out) / 1e6, 9)
        return {
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "engine_seconds": usage.engine_us / 1e6 if usage.engine_us or self.is_timed else None,
            "value": value,
        }


@router.get("/v1/usage", openapi_extra=_DESCRIPTION)
async def read_usage(request: Request) -> Response:
    """Return the usage of the key's tenant, or of the query's `tenant`; batches are listed as in /v1/batches."""
    tenant, page = listed_tenant(request), read_page(request, default=20, most=MAX_LISTED)
    context, state = context_of(request), state_of(request)
    bill = Bill(context.metrics.stats.token_costs is not None, _prices(request))
    try:
        batches, more = await state.folder.store.list_batches(tenant, page)
    except UnknownCursor:
        unknown_cursor()
    in_batches = dict(await state.folder.store.usage(tenant))
    since, requests = context.created, state.tenants.usage
    if state.folder.is_shared:
        await state.tenants.exchange()
        stored, requests = await state.folder.store.request_usage(tenant)
        since = stored or since
    names = sorted({*in_batches, *requests}) if tenant is None else [tenant]
    rows = [
        {
            "tenant": name,
            "requests": bill.of(requests.get(name, Usage())),
            "batches": bill.of(in_batches.get(name, Usage())),
        }
        for name in names
    ]
    listed: Sequence[dict[str, Any]] = [
        shown(request, batch, {"id": batch.id, "status": batch.status.value, **bill.of(batch.usage)})
        for batch in batches
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
