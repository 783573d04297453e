"""A burst that overflows two engines' memory, live: they become one pipeline (KunServe), or preempt and compute
again, or keep what they preempt in host memory.

Chats come evenly, and in the middle a burst of them at once, which needs more cache than both engines have. Arms
alternate, each run on a server of its own with the same arrivals. What counts is the TTFT of the chats and how often
one lost its cache; the pauses of the change are in the gaps between tokens.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import live
from benchmarks.figures import percentile
from benchmarks.frame import Table, compare
from benchmarks.live import make_model_folder, metrics_page, plan_for, read_metric, wait_quiet
from benchmarks.machine import describe
from loadgen import traces
from loadgen.plan import Windows
from loadgen.records import RequestRecord
from loadgen.stats import stream
from loadgen.traces import Trace

ARMS = {"recompute": (), "swap": ("--swap-space=1",), "drop": ("--overload=drop",)}
SLO = "ttft_p99=30s,tbt_p99=2s"
DRAIN = 300.0
COUNTERS = ("tidemill_preemptions_total", "tidemill_fleet_drops_total", "tidemill_fleet_restores_total")


@dataclass(frozen=True, slots=True)
class OverloadRun:
    """One run of an arm: its chats, and what `COUNTERS` said at its end."""

    chats: list[RequestRecord]
    counted: tuple[float, ...]


def arrivals(spacing: float, seconds: float, burst: int, prompt: int, output: int, seed: int) -> Trace:
    """A chat every `spacing` seconds, and after a third of the time `burst` more of them within a second."""
    random = stream(seed, "arrivals")
    even = np.arange(0.0, seconds, spacing)
    times = np.concatenate((even, seconds / 3 + random.random(burst)))
    lengths = (random.integers(size // 2, size + size // 2, len(times)) for size in (prompt, output))
    inputs, outputs = (each.astype(np.int64) for each in lengths)
    return traces.build(times, inputs, outputs)


async def run_arm(url: str, chats: Trace, seed: int) -> OverloadRun:
    """Send the chats; comes back when all have ended and layers that were given up had their time to return."""
    await wait_quiet(url)
    plan = plan_for(url, seed, online=chats, windows=Windows(horizon=chats.span, drain=DRAIN))
    records = await live.run(plan)
    await wait_quiet(url)
    page = await metrics_page(url)
    return OverloadRun(records.requests, tuple(read_metric(page, name, missing=0.0) for name in COUNTERS))


TABLE = Table({
    "arm": "10", "chats": "6d", "failed": "d", "TTFT P50": ".2f", "P99 s": "8.2f", "TBT P50 ms": ".0f",
    "worst s": "8.2f", "preempted": ".0f", "drops": "9.0f", "restores": "9.0f",
})  # fmt: skip


def show(arm: str, runs: Sequence[OverloadRun]) -> str:
    """A line of the table, pooled over the runs."""
    chats = [chat for run in runs for chat in run.chats]
    ttfts = [chat.ttft for chat in chats if chat.ttft is not None]
    gaps = [gap for chat in chats for gap in chat.gaps()]
    times = [percentile(ttfts, 50), percentile(ttfts, 99), percentile(gaps, 50) * 1e3, max(gaps, default=0.0)]
    counted = map(sum, zip(*(run.counted for run in runs), strict=True))
    return TABLE.line(arm, len(chats), sum(not chat.ok for chat in chats), *times, *counted)


def ratio(found: dict[str, list[OverloadRun]]) -> str:
    """How much shorter the longest waits are with a drop."""
    longest = {
        arm: percentile([chat.ttft for run in runs for chat in run.chats if chat.ttft is not None], 99)
        for arm, runs in found.items()
    }
    if not all(longest.values()):
        return "no chat was answered in one of the arms"
    drop = longest.pop("drop")
    return ", ".join(f"TTFT P99, {arm} / drop: {seconds / drop:.2f}" for arm, seconds in longest.items())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=45.0, help="from the first chat to the last")
    parser.add_argument("--spacing", type=float, default=2.0, help="seconds between two chats outside the burst")
    parser.add_argument("--burst", type=int, default=32, help="chats that come within a second")
    parser.add_argument("--prompt", type=int, default=128, help="tokens, on average")
    parser.add_argument("--output", type=int, default=128, help="tokens, on average")
    parser.add_argument("--blocks", type=int, default=96, help="blocks of KV in each engine's pool, 16 tokens each")
    parser.add_argument("--seeds", type=int, default=2, help="rounds of all arms, in turns")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--profile-seconds", type=float, default=8.0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Serve, send, print."""
    args = parse(argv)
    print(
        f"overload: two engines of {args.blocks * 16} tokens of cache each; {args.burst} chats of {args.prompt}/"
        f"{args.output} tokens at once; {describe()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder)
        flags = (
            "--engines=2",
            f"--slo={SLO}",
            "--max-queue-time=none",
            f"--dtype={args.dtype}",
            f"--profile-seconds={args.profile_seconds}",
            f"--num-gpu-blocks-override={args.blocks}",
            f"--max-model-len={3 * max(args.prompt, args.output)}",
        )

        async def measure(url: str, seed: int) -> OverloadRun:
            return await run_arm(
                url, arrivals(args.spacing, args.seconds, args.burst, args.prompt, args.output, seed), seed
            )

        found = compare(folder, flags, ARMS, args.seeds, measure, TABLE, show)
    print(ratio(found))


if __name__ == "__main__":
    main()
