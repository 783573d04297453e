"""Forced tokens: rows of structured JSON with and without them, server against server, in alternation.

`--rows` requests, `--concurrency` at a time, ask a random 134.5 M Llama for JSON of one schema of the kind that batches
extract: five required keys, an enum, numbers and short lists. What the model says is noise; what the grammar leaves no
choice for is the schema's. Tokens are those that the server says it gave (`usage`).
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from loadgen.bench.live import make_model_folder, read_metric, server
from loadgen.bench.machine import describe

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "sentiment": {"enum": ["positive", "negative", "neutral"]},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
        "keywords": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 3},
        "needs_follow_up": {"type": "boolean"},
    },
    "required": ["title", "sentiment", "confidence", "keywords", "needs_follow_up"],
    "additionalProperties": False,
}
MAX_TOKENS = 200
ARMS = {"one by one": "--no-forced-tokens", "forced": "--forced-tokens"}
TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """What one run gave: seconds, output tokens, those of them that were forced, rows that are whole and valid JSON."""

    seconds: float
    tokens: int
    forced: int
    whole: int


async def run(url: str, rows: int, concurrency: int, seed: int) -> Row:
    """All rows against one server."""
    limits = httpx.Limits(max_connections=concurrency)
    turns = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False) as client:

        async def ask(number: int) -> tuple[int, bool]:
            body = {
                "model": "model",
                "prompt": f"Report number {number} as JSON: ",
                "max_tokens": MAX_TOKENS,
                "temperature": 1.0,
                "seed": seed + number,
                "service_tier": "flex",
                "response_format": {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA}},
            }
            async with turns:
                response = await client.post("/v1/completions", json=body)
            answer = response.json()
            if response.status_code != httpx.codes.OK:
                raise RuntimeError(f"the server answered {response.status_code}: {answer}")
            choice = answer["choices"][0]
            whole = choice["finish_reason"] == "stop" and bool(json.loads(choice["text"]))
            return answer["usage"]["completion_tokens"], whole

        await asyncio.gather(*(ask(rows + number) for number in range(concurrency)))  # nothing is cold
        before = await _forced(client)
        began = time.monotonic()
        answers = await asyncio.gather(*(ask(number) for number in range(rows)))
        seconds = time.monotonic() - began
        forced = await _forced(client) - before
    return Row(seconds, sum(tokens for tokens, _ in answers), int(forced), sum(whole for _, whole in answers))


async def _forced(client: httpx.AsyncClient) -> float:
    page = await client.get("/metrics")
    return read_metric(page.text, "tidemill_forced_tokens_total", missing=0.0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench structured", description=__doc__)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    about = f"{args.rows} rows of one schema, {args.concurrency} at a time"
    print(f"forced tokens: random 134.5 M Llama, {about}; {describe()}", flush=True)
    rates: dict[str, list[float]] = {name: [] for name in ARMS}
    print(f"{'arm':12} {'tok/s':>8} {'tokens':>8} {'forced':>7} {'whole':>6}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder)
        flags = ("--profile-dir", name, "--state-dir", str(folder / "state"))
        for number in range(args.rounds):
            for arm, flag in ARMS.items():
                with server(folder, 0, *flags, flag) as url:
                    row = asyncio.run(run(url, args.rows, args.concurrency, 1000 * number))
                rates[arm].append(row.tokens / row.seconds)
                share = row.forced / row.tokens
                print(f"{arm:12} {rates[arm][-1]:8.1f} {row.tokens:8d} {share:7.0%} {row.whole:6d}", flush=True)
    pairs = [forced / plain for plain, forced in zip(*rates.values(), strict=True)]
    print(f"times as fast with forced tokens: {', '.join(f'{pair:.2f}' for pair in pairs)}; median {median(pairs):.2f}")


if __name__ == "__main__":
    main()
