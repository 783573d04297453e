"""Batches of `chaos`: prompts, lines, their upload, their end and their rows."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp

MODEL = "tidemill-demo"
TERMINAL = {"completed", "failed", "expired", "cancelled"}


def make_prompts(dice: random.Random, count: int, length: int) -> list[list[int]]:
    """Return lists of token ids; no two begin alike."""
    return [[20 + number, *(dice.randrange(20, 400) for _ in range(length - 1))] for number in range(count)]


def body_of(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def line(name: str, body: str, url: str = "/v1/completions") -> str:
    """Return one line of a batch; `body` is JSON."""
    return f'{{"custom_id":"{name}","method":"POST","url":"{url}","body":{body}}}\n'


async def upload(session: aiohttp.ClientSession, text: bytes) -> aiohttp.ClientResponse:
    """Upload a batch's input; the response has been read."""
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", text, filename="lines.jsonl")
    async with session.post("/v1/files", data=form) as response:
        await response.read()
        return response


async def create(session: aiohttp.ClientSession, file: str, url: str = "/v1/completions") -> str:
    """Create a batch of an uploaded file and return its id."""
    body = {"input_file_id": file, "endpoint": url, "completion_window": "24h"}
    async with session.post("/v1/batches", json=body) as response:
        return str((await response.json())["id"])


async def submit(session: aiohttp.ClientSession, lines: Iterable[str], url: str = "/v1/completions") -> str:
    """Upload lines, create their batch and return its id."""
    uploaded = await upload(session, "".join(lines).encode("utf-8", "surrogatepass"))
    return await create(session, (await uploaded.json())["id"], url)


async def wait_batch(session: aiohttp.ClientSession, batch: str, until: float) -> dict[str, Any]:
    """Return the batch when it has ended, or its state at `until`."""
    while True:
        async with session.get(f"/v1/batches/{batch}") as response:
            state: dict[str, Any] = await response.json()
        if state["status"] in TERMINAL or time.monotonic() > until:
            return state
        await asyncio.sleep(0.5)


async def read_rows(
    session: aiohttp.ClientSession, state: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the output file and of the error file."""
    return await _rows(session, state.get("output_file_id")), await _rows(session, state.get("error_file_id"))


def miscounted(names: Iterable[str], rows: Iterable[dict[str, Any]]) -> int:
    """Count the lines that have no row, or more than one."""
    found = Counter(str(row["custom_id"]) for row in rows)
    return sum(found[name] != 1 for name in names)


async def _rows(session: aiohttp.ClientSession, file: str | None) -> list[dict[str, Any]]:
    if not file:
        return []
    async with session.get(f"/v1/files/{file}/content") as response:
        return [_row(text) for text in (await response.read()).splitlines()]


def _row(text: bytes) -> dict[str, Any]:
    """Parse one row; an unreadable one belongs to no line."""
    try:
        return dict(json.loads(text.decode()))
    except ValueError:
        return {"custom_id": f"unreadable: {text[:40]!r}"}
