"""Table of the endpoints that run the model: the source of routes, OpenAPI bodies, batch URLs and the reference.

To add an endpoint, define a `ModelEndpoint` in a module and add it here."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from gateway.generate.chat import CHAT
from gateway.generate.completions import COMPLETIONS
from gateway.generate.embeddings import EMBEDDINGS
from gateway.generate.endpoint import JsonPost, ModelEndpoint
from gateway.generate.messages.endpoint import COUNT_TOKENS, MESSAGES, count_tokens
from gateway.generate.params import Unhonoured
from gateway.generate.responses.endpoint import INPUT_TOKENS, RESPONSES, input_tokens
from gateway.generate.tokenize import DETOKENIZE, TOKENIZE, TOKENIZE_CHAT, detokenize, tokenize

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


def routes() -> APIRouter:
    router = APIRouter()
    for endpoint in ENDPOINTS.values():
        router.add_api_route(endpoint.path, endpoint.answer, methods=["POST"], name=endpoint.name)
    for post, handler in COUNTS:
        router.add_api_route(post.path, handler, methods=["POST"])
    return router


def describe(document: dict[str, Any]) -> None:
    """Add the bodies to the OpenAPI document. FastAPI does not know them, because endpoints parse them with orjson."""
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


def _properties(fields: Unhonoured) -> dict[str, Any]:
    ignored = {name: {"description": "Accepted and ignored."} for name in sorted(fields.inert)}
    return ignored | {name: {"enum": [None, *values]} for name, values in fields.unsupported.items()}
