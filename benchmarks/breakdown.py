"""What offline work gets beside no chat, one chat, two chats, ..., and where the time of the steps goes.

One server without drafts, which would end the answers of random weights early; a random Llama of 134.5 M parameters
and the limits of `colocation-peers`. Every row has as many answers in progress for the whole time, and 24 offline
clients. Printed: lines/s; the P99 gap of the chats; the share of the time in steps; mean tokens, measured and
predicted milliseconds of a step; and the predicted time that steps with chats left unused, as a share of the time. A
prediction contains the margin for the variation of step times, so `predicted ÷ measured` is the part that the margin
takes.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import colocation, live
from benchmarks.figures import percentile
from benchmarks.frame import Table
from benchmarks.machine import describe
from benchmarks.peers import finders
from benchmarks.peers.engine import start_all
from benchmarks.weights import make_checkpoint
from loadgen.plan import Job, Windows
from loadgen.workloads import fixed

PROMPT, OUTPUT = 128, 1_800
"""Tokens of a chat: an answer that is in progress for the whole time."""
PROVING = 80
"""Short chats beside offline work before the first row: the breaker grants the whole budget after 35 good ones."""
STEPS, TIME, PREDICTED, LEFT, USED, TOKENS = (
    f"tidemill_{name}_total"
    for name in (
        "steps",
        "step_seconds",
        "predicted_step_seconds",
        "leftover_seconds",
        "leftover_used_seconds",
        "offline_tokens",
    )
)
TABLE = Table({
    "chats": "5d", "lines/s": "8.2f", "output tok/s": ".0f", "prompt tok/s": ".0f", "TBT P99 ms": "10.1f",
    "in steps": "8.1%", "tokens": "8.1f", "step ms": "8.1f", "predicted": "9.1f", "÷ measured": "10.2f",
    "left": "7.1%",
})  # fmt: skip


async def measure(url: str, chats: int, seconds: float, seed: int, words: Any) -> str:
    """Run so many chats beside offline work, and return their line of the table."""
    await live.wait_quiet(url)
    online = fixed(chats, PROMPT, OUTPUT).at(np.zeros(chats)) if chats else None
    lines = fixed(int(100 * seconds), colocation.OFFLINE_PROMPT, colocation.OFFLINE_OUTPUT)
    plan = live.plan_for(
        url,
        seed,
        online=online,
        jobs=(Job(lines),),
        offline_mode="flex",
        offline_concurrency=colocation.OUTSTANDING,
        windows=Windows(horizon=seconds, drain=0.0),
        source=words,
    )
    watch = live.Watch((STEPS, TIME, PREDICTED, LEFT, USED, TOKENS), live.look_interval(seconds))
    records = await live.run(plan, watch)
    grown = {name: sum(more for at, more in watch.grown(name) if counts(at, seconds)) for name in watch.names}
    span = live.GRID_SECONDS * sum(counts(at, seconds) for at, _ in watch.grown(STEPS))
    made = [record for record in records.requests if record.service_class == "online"]
    events = [at for record in made for at in record.chunk_at if counts(at, seconds)]
    gaps = [gap for record in made for gap in record.gaps().tolist()]
    steps = max(grown[STEPS], 1.0)
    rate = grown[TOKENS] / span / (colocation.OFFLINE_PROMPT + colocation.OFFLINE_OUTPUT)
    times = (1e3 * grown[TIME] / steps, 1e3 * grown[PREDICTED] / steps, grown[PREDICTED] / max(grown[TIME], 1e-9))
    tokens = (grown[TOKENS] + len(events)) / steps
    p99 = 1e3 * percentile(gaps, 99) if gaps else float("nan")
    left = (grown[LEFT] - grown[USED]) / span
    return TABLE.line(chats, rate, *colocation.split_of(rate), p99, grown[TIME] / span, tokens, *times, left)


def counts(at: float, seconds: float) -> bool:
    """Return whether a time is after the warm-up and before the end."""
    return colocation.WARM_UP <= at <= seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Serve, measure each number of chats, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks breakdown", description=__doc__)
    parser.add_argument("--chats", default="0,1,2,4,8", help="numbers of answers in progress (default: 0,1,2,4,8)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each number of chats, the first 5 not counted")
    parser.add_argument("--slo", default="ttft_p99=1s,tbt_p99=150ms")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the engine (default: all cores)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    args = parser.parse_args(argv)
    numbers = [int(number) for number in args.chats.split(",")]
    print(f"{args.slo}, {args.dtype}, {args.threads} threads; {describe()}\n{TABLE.heading}", flush=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name) / "model"
        folder.mkdir()
        words = make_checkpoint(folder, args.dtype)
        flags = ("--slo", args.slo, "--speculation", "off")
        for _, served in start_all([finders.tidemill(args.threads, args.dtype, *flags)], folder, stack):
            chats = [0.5 * number for number in range(PROVING)]
            asyncio.run(colocation.run_arm(served.url, chats, chats[-1], "flex", args.seed + 1000, source=words))
            for number in numbers:
                print(asyncio.run(measure(served.url, number, args.seconds, args.seed + number, words)), flush=True)


if __name__ == "__main__":
    main()
