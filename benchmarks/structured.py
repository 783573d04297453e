"""Forced tokens: structured JSON, and the share of its tokens that the schema forces.

`--rows` requests, `--concurrency` at a time, ask a random 134.5 M Llama for JSON of one schema of the kind that batches
extract: five required keys, an enum, numbers and short lists. The text is noise; the forced tokens follow from the
schema alone. Tokens are counted by `usage`, steps and forced tokens by the server's metrics. A forced token saves its
row a step; on a GPU, all but the first token of each run do.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.frame import Table
from benchmarks.live import completions, make_model_folder, metrics_page, read_metric, server
from benchmarks.machine import describe

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


@dataclass(frozen=True, slots=True)
class Row:
    """One round: seconds, model steps, output tokens, forced tokens, and rows with complete, valid JSON."""

    seconds: float
    steps: int
    tokens: int
    forced: int
    whole: int

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds


async def run(url: str, rows: int, concurrency: int, seed: int) -> Row:
    """Run all rows against one server."""
    async with completions(url, concurrency) as ask_server:

        async def ask(number: int) -> tuple[int, bool]:
            status, answer = await ask_server(
                model="model",
                prompt=f"Report number {number} as JSON: ",
                max_tokens=MAX_TOKENS,
                temperature=1.0,
                seed=seed + number,
                service_tier="flex",
                response_format={"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA}},
            )
            if status != HTTPStatus.OK:
                raise RuntimeError(f"the server answered {status}: {answer}")
            choice = answer["choices"][0]
            whole = choice["finish_reason"] == "stop" and bool(json.loads(choice["text"]))
            return answer["usage"]["completion_tokens"], whole

        await asyncio.gather(*(ask(rows + number) for number in range(concurrency)))  # warm-up
        before = await _counts(url)
        began = time.monotonic()
        answers = await asyncio.gather(*(ask(number) for number in range(rows)))
        seconds = time.monotonic() - began
        after = await _counts(url)
    steps, forced = (int(new - old) for old, new in zip(before, after, strict=True))
    return Row(seconds, steps, sum(tokens for tokens, _ in answers), forced, sum(whole for _, whole in answers))


async def _counts(url: str) -> tuple[float, float]:
    """Return the model steps and forced tokens so far."""
    page = await metrics_page(url)
    return read_metric(page, "tidemill_steps_total"), read_metric(page, "tidemill_forced_tokens_total", missing=0.0)


TABLE = Table({"round": "6", "tok/s": "8.1f", "steps": "7d", "tokens": "8d", "forced": "7.0%", "whole": "6d"})


def show(title: str, rows: Sequence[Row]) -> str:
    """Return a line of the table: the median rate, and the sums of the other columns."""
    tokens = sum(row.tokens for row in rows)
    forced = sum(row.forced for row in rows) / tokens
    steps = sum(row.steps for row in rows)
    return TABLE.line(title, median(row.rate for row in rows), steps, tokens, forced, sum(row.whole for row in rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks structured", description=__doc__)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    about = f"{args.rows} rows of one schema, {args.concurrency} at a time"
    print(f"forced tokens: random 134.5 M Llama, {about}; {describe()}", flush=True)
    print(TABLE.heading)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        make_model_folder(Path(name))
        with server(Path(name), 0, f"--state-dir={name}/state") as url:
            for number in range(args.rounds):
                rows.append(asyncio.run(run(url, args.rows, args.concurrency, 1000 * number)))
                print(show(str(number + 1), rows[-1:]), flush=True)
    print(show("all", rows))


if __name__ == "__main__":
    main()
