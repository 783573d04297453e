"""Table of the endpoints that run the model: the source of routes, OpenAPI bodies, batch URLs and the reference.

To add an endpoint, define a `ModelEndpoint` in a module and add it here."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from gateway.generate.answering import ModelEndpoint
from gateway.generate.completions import CHAT, COMPLETIONS
from gateway.generate.embeddings import EMBEDDINGS
from gateway.generate.messages import COUNT_TOKENS, MESSAGES, count_tokens
from gateway.generate.responses import INPUT_TOKENS, RESPONSES, input_tokens
from gateway.generate.tokenize import DETOKENIZE, TOKENIZE, TOKENIZE_CHAT, detokenize, tokenize
from gateway.generate.validation import JsonPost, Unhonoured
from gateway.http.errors import MESSAGES_PATH

ENDPOINTS: Mapping[str, ModelEndpoint[Any]] = {
    endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)
}
COUNTS: tuple[tuple[JsonPost[Any], Callable[[Request], Awaitable[Response]]], ...] = (
    (COUNT_TOKENS, count_tokens),
    (INPUT_TOKENS, input_tokens),
    (DETOKENIZE, detokenize),
    (TOKENIZE, tokenize),
)
"""Endpoints that tokenize without running the model, and their handlers."""
POSTS: tuple[JsonPost[Any], ...] = (*ENDPOINTS.values(), *(post for post, _ in COUNTS), TOKENIZE_CHAT)
"""Endpoints whose bodies appear in the OpenAPI document."""


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT, _NULLABLE = {"type": "string"}, {"type": ["string", "null"]}
_MESSAGES_ERROR = _object(type=_TEXT, message=_TEXT)
_MESSAGES_ERROR["properties"]["details"] = _object(error_code=_TEXT)
_ERRORS = {
    "ErrorResponse": _object(error=_object(message=_TEXT, type=_TEXT, param=_NULLABLE, code=_NULLABLE)),
    "MessagesErrorResponse": _object(type={"const": "error"}, error=_MESSAGES_ERROR, request_id=_NULLABLE),
}

_EVENTS = "text/event-stream"
"""Described without a schema: readers of the document apply it to the events or to the whole text."""
_CONTENT_TYPES = {
    "/metrics": "text/plain",
    "/v1/batches/{batch_id}/events": _EVENTS,
    "/v1/files/{file_id}/content": "application/octet-stream",
    "/v1/messages/batches/{message_batch_id}/results": "application/x-jsonl",
}
"""Content types of the responses that are not JSON."""


def routes() -> APIRouter:
    router = APIRouter()
    for endpoint in ENDPOINTS.values():
        router.add_api_route(endpoint.path, endpoint.answer, methods=["POST"], name=endpoint.name)
    for post, handler in COUNTS:
        router.add_api_route(post.path, handler, methods=["POST"])
    return router


def describe(document: dict[str, Any]) -> None:
    """Add bodies, content types and errors to the OpenAPI document.

    FastAPI does not know them, because endpoints parse bodies with orjson and return responses of their own.
    """
    bodies = [(post.body, "validation") for post in POSTS]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    for post in POSTS:
        name = post.body.__name__
        schemas["$defs"][name]["properties"] |= _properties(post.unhonoured)
        schema: dict[str, Any] = {"$ref": f"#/components/schemas/{name}"}
        operation = document["paths"][post.path]["post"]
        if (known := operation.get("requestBody")) is not None:
            schema = {"anyOf": [known["content"]["application/json"]["schema"], schema]}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if post.path in ENDPOINTS and "stream" in post.body.model_fields:
            operation["responses"]["200"]["content"][_EVENTS] = {}
    _describe_responses(document)


def _describe_responses(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        error = "MessagesErrorResponse" if path.startswith(MESSAGES_PATH) else "ErrorResponse"
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
        for operation in operations.values():
            if (kind := _CONTENT_TYPES.get(path)) is not None:
                operation["responses"]["200"]["content"] = {kind: {} if kind == _EVENTS else {"schema": _TEXT}}
            operation["responses"].pop("422", None)  # FastAPI's default; invalid requests are answered with 400
            operation["responses"]["default"] = {"description": "Error", "content": content}
    schemas = document["components"]["schemas"]
    schemas.update(_ERRORS)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)


def _properties(fields: Unhonoured) -> dict[str, Any]:
    ignored = {name: {"description": "Accepted and ignored."} for name in sorted(fields.inert)}
    refused = {
        name: {"enum": [None, *each.defaults], "description": each.advice} for name, each in fields.unsupported.items()
    }
    return ignored | refused
