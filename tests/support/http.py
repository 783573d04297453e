"""One request to a served application, each over a connection of its own."""

from typing import Any

import httpx
from fake_engine import MODEL, Served


async def send(served: Served, method: str, path: str, **options: Any) -> httpx.Response:
    """Send a request with the options of httpx; a streamed answer is read to its end."""
    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
        return await client.request(method, path, **options)


async def get(served: Served, path: str, **headers: str) -> httpx.Response:
    return await send(served, "GET", path, headers=headers)


async def post(served: Served, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    """Send a JSON body that names the served model unless `fields` do."""
    return await send(served, "POST", path, json={"model": MODEL, **fields})


def prompt_of(served: Served, number: int = -1) -> str:
    """Return the prompt of a request that reached the engine, with its special tokens."""
    ids = served.engine.requests[number].prompt_token_ids
    text: str = served.app.state.context.tokenizer.decode(ids, skip_special_tokens=False)
    return text
