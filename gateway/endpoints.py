"""The table of endpoints that ask the model. Their routes, what OpenAPI says of their bodies, the urls that a line of a
batch may have and the reference are read from it: a new one is a module with a `ModelEndpoint`, and a name here."""

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
"""All whose bodies are described: what is honoured, ignored and refused."""


def routes() -> APIRouter:
    router = APIRouter()
    for endpoint in ENDPOINTS.values():
        router.add_api_route(endpoint.path, endpoint.answer, methods=["POST"], name=endpoint.name)
    router.add_api_route(COUNT_TOKENS.path, count_tokens, methods=["POST"])
    return router


def describe(document: dict[str, Any]) -> None:
    """Bodies are parsed by hand (orjson, our own errors), so the OpenAPI document is told of them by hand, too."""
    bodies = [(post.body, "validation") for post in POSTS]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    for post in POSTS:
        name = post.body.__name__
        schemas["$defs"][name]["properties"] |= _properties(post.unhonoured)
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        document["paths"][post.path]["post"]["requestBody"] = {"required": True, "content": content}


def _properties(fields: Unhonoured) -> dict[str, Any]:
    ignored = {name: {"description": "Accepted and without effect."} for name in sorted(fields.inert)}
    return ignored | {name: {"enum": [None, *values]} for name, values in fields.unsupported.items()}
