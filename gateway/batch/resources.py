"""State, pages and responses of the endpoints of files and batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import orjson
from anyio import CapacityLimiter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.batch.run import BatchLimits
from gateway.batch.tenants import TenantExchange
from gateway.batch.worker import BatchWorker
from gateway.http.errors import ApiError
from gateway.http.keys import UploadPlaces
from gateway.store.folder import StateFolder
from gateway.store.objects import Page, UnknownCursor

UPLOADS_EACH, UPLOADS_IN_ALL = 16, 64
READERS = 2
TABLES_EACH, TABLES_IN_ALL = 1, 2


@dataclass(frozen=True, slots=True)
class BatchState:
    """`uploads` limits concurrent uploads per tenant and in total."""

    folder: StateFolder
    limits: BatchLimits
    jobs: BatchWorker
    tenants: TenantExchange
    readers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(READERS))
    """Threads that read and verify files for downloads."""
    uploads: UploadPlaces = field(default_factory=lambda: UploadPlaces(UPLOADS_EACH, UPLOADS_IN_ALL))
    tables: UploadPlaces = field(default_factory=lambda: UploadPlaces(TABLES_EACH, TABLES_IN_ALL))
    """Tables that are read in child processes."""

    def now(self) -> int:
        """Return the time for new objects."""
        return self.jobs.clock.now()

    def expiry_now(self) -> int:
        """Return the current time by which files and batches expire."""
        return self.jobs.clock.expiry_now()


def state_of(request: Request) -> BatchState:
    return cast(BatchState, request.app.state.batches)


MAX_CURSOR_CHARS = 128


def refuse(param: str, rule: str) -> NoReturn:
    """Raise ApiError 400 for an invalid parameter."""
    raise ApiError(400, f"'{param}' must be {rule}.", param=param, code="invalid_value")


def read_page(request: Request, *, default: int, most: int, orders: bool = False) -> Page:
    """Parse `limit`, `after` and, with `orders`, `order` from the query. Raises ApiError 400."""
    query = request.query_params
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= most):
        refuse("limit", f"a whole number between 1 and {most}")
    after = query.get("after") or None
    if after is not None and len(after) > MAX_CURSOR_CHARS:
        raise UnknownCursor("after")
    order = query.get("order", "desc") if orders else "desc"
    if order not in ("asc", "desc"):
        refuse("order", "'asc' or 'desc'")
    return Page(int(limit), after, order == "asc")


def list_response(objects: Sequence[dict[str, Any]], has_more: bool) -> Response:
    return json_response(
        {
            "object": "list",
            "data": list(objects),
            "first_id": objects[0]["id"] if objects else None,
            "last_id": objects[-1]["id"] if objects else None,
            "has_more": has_more,
        }
    )


def json_response(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def describe_body(body: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON body, without references."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return resolved(definitions[value["$ref"].rpartition("/")[2]])
        return {name: resolved(each) for name, each in value.items()}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": resolved(schema)}}}}


def describe_page(most: int, *names: str, cursors: tuple[str, ...] = ("after",)) -> dict[str, Any]:
    """Return the OpenAPI description of a list's query: `limit`, `cursors`, `tenant` and `names`."""
    schemas: dict[str, dict[str, Any]] = {
        "limit": {"type": "integer", "minimum": 1, "maximum": most},
        **{name: {"type": "string"} for name in cursors},
        "order": {"enum": ["asc", "desc"]},
        "purpose": {"type": "string"},
        "tenant": {"type": "string", "description": "Tenant name, or * for all; other tenants need an operator's key."},
    }
    chosen = ("limit", *cursors, "tenant", *names)
    return {"parameters": [{"name": name, "in": "query", "schema": schemas[name]} for name in chosen]}
