"""Table of the endpoints that run the model: the source of routes, OpenAPI bodies, batch URLs and the reference.

To add an endpoint, define a `ModelEndpoint` in a module and add it here."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from pydantic.json_schema import models_json_schema

from gateway.generate.chat import CHAT
from gateway.generate.completions import COMPLETIONS
from gateway.generate.embeddings import EMBEDDINGS
from gateway.generate.endpoint import JsonPost, ModelEndpoint
from gateway.generate.messages.endpoint import COUNT_TOKENS, MESSAGES, count_tokens
from gateway.generate.params import Unhonoured
from gateway.generate.responses.endpoint import RESPONSES

ENDPOINTS: Mapping[str, ModelEndpoint[Any]] = {
    endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)
}
POSTS: tuple[JsonPost[Any], ...] = (*ENDPOINTS.values(), COUNT_TOKENS)
"""Endpoints whose bodies appear in the OpenAPI document."""


def routes() -> APIRouter:
    router = APIRouter()
    for endpoint in ENDPOINTS.values():
        router.add_api_route(endpoint.path, endpoint.answer, methods=["POST"], name=endpoint.name)
    router.add_api_route(COUNT_TOKENS.path, count_tokens, methods=["POST"])
    return router


def describe(document: dict[str, Any]) -> None:
    """Add the bodies to the OpenAPI document. FastAPI does not know them, because endpoints parse them with orjson."""
    bodies = [(post.body, "validation") for post in POSTS]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    for post in POSTS:
        name = post.body.__name__
        schemas["$defs"][name]["properties"] |= _properties(post.unhonoured)
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        document["paths"][post.path]["post"]["requestBody"] = {"required": True, "content": content}


def _properties(fields: Unhonoured) -> dict[str, Any]:
    ignored = {name: {"description": "Accepted and ignored."} for name in sorted(fields.inert)}
    return ignored | {name: {"enum": [None, *values]} for name, values in fields.unsupported.items()}
