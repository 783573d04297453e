"""Batches of `chaos`: prompts, lines, their upload, their end and their rows."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from loadgen.client import TERMINAL, Client, create, expect, upload

MODEL = "tidemill-demo"


def make_prompts(dice: random.Random, count: int, length: int) -> list[list[int]]:
    """Return lists of token ids; no two begin alike."""
    return [[20 + number, *(dice.randrange(20, 400) for _ in range(length - 1))] for number in range(count)]


def body_of(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def line(name: str, body: str, url: str = "/v1/completions") -> str:
    """Return one line of a batch; `body` is JSON."""
    return f'{{"custom_id":"{name}","method":"POST","url":"{url}","body":{body}}}\n'


async def submit(client: Client, lines: Iterable[str], url: str = "/v1/completions") -> str:
    """Upload lines, create their batch and return its id."""
    file = await upload(client, "".join(lines).encode("utf-8", "surrogatepass"), "lines.jsonl")
    return str((await create(client, file, url, "24h"))["id"])


async def wait_batch(client: Client, batch: str, until: float) -> dict[str, Any]:
    """Return the batch when it has ended, or its state at `until`."""
    while (state := await expect(client, "GET", f"/v1/batches/{batch}"))["status"] not in TERMINAL:
        if time.monotonic() > until:
            break
        await asyncio.sleep(0.5)
    return state


async def read_rows(client: Client, state: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the output file and of the error file."""
    return await _rows(client, state.get("output_file_id")), await _rows(client, state.get("error_file_id"))


def miscounted(names: Iterable[str], rows: Iterable[dict[str, Any]]) -> int:
    """Count the lines that have no row, or more than one."""
    found = Counter(str(row["custom_id"]) for row in rows)
    return sum(found[name] != 1 for name in names)


async def _rows(client: Client, file: str | None) -> list[dict[str, Any]]:
    if not file:
        return []
    _, data = await client.raw("GET", f"/v1/files/{file}/content")
    return [_row(text) for text in data.splitlines()]


def _row(text: bytes) -> dict[str, Any]:
    """Parse one row; an unreadable one belongs to no line."""
    try:
        return dict(json.loads(text.decode()))
    except ValueError:
        return {"custom_id": f"unreadable: {text[:40]!r}"}
