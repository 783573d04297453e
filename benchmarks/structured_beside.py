"""Structured rows beside chat: the same chats beside offline rows without a form, with one, and with hostile ones.

Each arm has a server of its own, the same arrivals of chats, and `--concurrency` offline rows at a time as long as it
lasts. `structured`: rows of the schema of `bench structured`; `hostile`: objects nested 200 deep, an enum of 20,000, a
regular expression that explodes, a schema that refers to itself. What counts is how many chats keep their SLO beside
`structured` against `plain`, paired by request, and by how much their gaps grow beside `hostile`.
"""

import argparse
import asyncio
import itertools
import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from benchmarks.colocation import LEARNING, Run, judged, paired_bound, poisson, run_arm, slo_of
from benchmarks.figures import percentile
from benchmarks.frame import Table
from benchmarks.live import completions, make_model_folder, server, wait_quiet
from benchmarks.machine import describe
from benchmarks.structured import MAX_TOKENS, SCHEMA
from loadgen.arrivals import constant_rate


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


HOSTILE: tuple[dict[str, Any], ...] = (
    nested(199),
    {"enum": [f"value {number} {'x' * (number % 7)}" for number in range(20_000)]},
    {"type": "string", "pattern": "^(a+)+(b|a){1,200}(c*)*$"},
    {
        "$defs": {"node": {"type": "object", "properties": {side: {"$ref": "#/$defs/node"} for side in ("l", "r")}}},
        "$ref": "#/$defs/node",
    },
)
ARMS: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": ({"ignore_eos": True},),
    "structured": ({"structured_outputs": {"json": SCHEMA}},),
    "hostile": tuple({"structured_outputs": {"json": json.dumps(schema)}} for schema in HOSTILE),
}


@dataclass(slots=True)
class Fed:
    """Offline rows that were answered, and refused."""

    answered: int = 0
    refused: int = 0


async def feed(url: str, forms: Sequence[dict[str, Any]], concurrency: int, fed: Fed) -> None:
    """Offline rows, the forms in turn, until cancelled."""
    numbers = itertools.count()
    async with completions(url, concurrency) as ask_server:

        async def ask() -> None:
            for number in numbers:
                body = {"model": "model", "prompt": f"Report number {number}: ", "max_tokens": MAX_TOKENS // 2}
                body |= {"temperature": 1.0, "seed": number, "service_tier": "flex", **forms[number % len(forms)]}
                status, _ = await ask_server(**body)
                fed.answered += status == HTTPStatus.OK
                fed.refused += status == HTTPStatus.BAD_REQUEST

        await asyncio.gather(*(ask() for _ in range(concurrency)))


async def run_beside(
    url: str, arrivals: Sequence[float], seconds: float, seed: int, forms: Sequence[dict[str, Any]], concurrency: int
) -> tuple[Run, Fed]:
    """Chats beside rows of some forms."""
    fed = Fed()
    await wait_quiet(url)
    rows = asyncio.create_task(feed(url, forms, concurrency, fed))
    try:
        return await run_arm(url, arrivals, seconds, None, seed, quiet=()), fed
    finally:
        rows.cancel()
        with suppress(asyncio.CancelledError):
            await rows


TABLE = Table({
    "arm": "12", "chats": "6d", "attainment": "11.1%", "gap P50": "8.1f", "P99": "8.1f", "max ms": "8.1f", "rows": "6d",
    "refused": "8d",
})  # fmt: skip


def summarise(name: str, runs: Sequence[Run], fed: Sequence[Fed], options: argparse.Namespace) -> None:
    answers = judged(runs)
    gaps = [gap for answer in answers for gap in answer.gaps()]
    good = sum(map(slo_of(options.ttft, options.tbt).good, answers)) / len(answers)
    times = [1e3 * percentile(gaps, share) for share in (50, 99, 100)]
    rows = sum(each.answered for each in fed), sum(each.refused for each in fed)
    print(TABLE.line(name, len(answers), good, *times, *rows), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks structured-beside", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.0, help="chats a second")
    parser.add_argument("--seconds", type=float, default=75.0, help="length of one arm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ttft", type=float, default=1.5, help="TTFT limit in seconds")
    parser.add_argument("--tbt", type=float, default=0.3, help="limit on the P99 of a request's gaps in seconds")
    parser.add_argument("--concurrency", type=int, default=24)
    options = parser.parse_args(argv)
    slo = f"ttft_p99={options.ttft:g}s,tbt_p99={options.tbt:g}s"
    print(f"structured rows beside {options.rate:g} chats/s, SLO {slo}, random 134.5 M Llama; {describe()}", flush=True)
    print(TABLE.heading)
    runs: dict[str, list[Run]] = {name: [] for name in ARMS}
    fed: dict[str, list[Fed]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder)
        flags = ("--slo", slo, "--state-dir", str(folder / "state"))
        for seed in range(1, options.seeds + 1):
            arrivals = poisson(constant_rate(options.rate), options.seconds, seed)
            for arm, forms in ARMS.items():
                with server(folder, 0, *flags) as url:
                    warm = [number / options.rate for number in range(int(options.rate * LEARNING))]
                    asyncio.run(run_arm(url, warm, LEARNING, "flex", 0))
                    run, rows = asyncio.run(
                        run_beside(url, arrivals, options.seconds, seed, forms, options.concurrency)
                    )
                runs[arm].append(run)
                fed[arm].append(rows)
                summarise(f"  {arm} {seed}", [run], [rows], options)
    for arm in ARMS:
        summarise(arm, runs[arm], fed[arm], options)
        change, lower = paired_bound(runs[arm], runs["plain"], options.ttft, options.tbt)
        print(f"  attainment - plain: {change:+.2%}, lower 95 % bound {lower:+.2%}")


if __name__ == "__main__":
    main()
