"""The next turn of a chat beside a batch that fills the pool, live: with the host tier and without.

Chats as of the workload `chat-multiturn`, with lengths that are stated: each opens with a long history, and every later
turn repeats all that was said before it and adds a question. While a chat thinks, a batch job takes the pool and other
chats their turns. Arms alternate, each run on a server of its own. What counts is the TTFT of later turns; the made-up
answer that is repeated and the new question have to be computed in any arm.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks import live
from benchmarks.colocation import check_job
from benchmarks.figures import percentile
from benchmarks.frame import Table, compare
from benchmarks.live import make_model_folder, metrics_page, plan_for, read_metric, wait_quiet
from benchmarks.machine import describe
from benchmarks.pressure import model_folder
from loadgen import traces
from loadgen.plan import Job, Windows
from loadgen.records import RequestRecord
from loadgen.stats import stream
from loadgen.traces import Content, Trace
from loadgen.workloads import fixed

ARMS = {
    "device alone": ("--swap-space=0",),
    "with the host": ("--swap-space=0.5",),
}
"""The arms: flags of their servers."""
TIERS = ("device", "host")
QUESTION, ANSWER = 24, 16
LINE_PROMPT, LINE_OUTPUT = 256, 128
SPACING = 1.0
SLO = "ttft_p99=10s,tbt_p99=100ms"
DRAIN = 30.0
HIT = 'tidemill_prefix_hit_tokens_by_tier_total{{tier="{}"}}'


@dataclass(frozen=True, slots=True)
class TurnsRun:
    """One run of an arm: later turns, and prompt tokens found on each of `TIERS`."""

    later: list[RequestRecord]
    found: tuple[float, ...]

    @property
    def ttfts(self) -> list[float]:
        return [record.ttft for record in self.later if record.ttft is not None]


def conversations(chats: int, turns: int, history: int, think: float, seed: int) -> Trace:
    """`chats` conversations of `turns` turns; between two of one chat passes `think` seconds, half of it at random."""
    random = stream(seed, "arrivals")
    times, inputs, content = [], [], []
    for chat in range(chats):
        first, when = chat * (2 * turns + 1), chat * SPACING
        segments: list[traces.Segment] = [(first, history)]
        for turn in range(turns):
            segments.append((first + 2 * turn + 1, QUESTION))
            times.append(when)
            inputs.append(sum(size for _, size in segments))
            content.append(Content(segments=tuple(segments)))
            segments.append((first + 2 * turn + 2, ANSWER))
            when += think * (0.75 + 0.5 * float(random.random()))
    outputs = np.full(len(times), ANSWER, dtype=np.int64)
    return traces.build(np.array(times), np.array(inputs, dtype=np.int64), outputs, tuple(content))


async def run_arm(url: str, chats: Trace, lines: int, history: int, seed: int) -> TurnsRun:
    """Send the turns beside a batch job of `lines` lines, which must outlast them."""
    await wait_quiet(url)
    plan = plan_for(
        url,
        seed,
        online=chats,
        jobs=(Job(fixed(lines, LINE_PROMPT, LINE_OUTPUT)),),
        offline_mode="batch",
        windows=Windows(horizon=chats.span, drain=DRAIN),
    )
    records = await live.run(plan)
    for job in records.jobs:
        check_job(job)
    page = await metrics_page(url)
    found = tuple(read_metric(page, HIT.format(tier)) for tier in TIERS)
    online = [record for record in records.requests if record.service_class == "online"]
    return TurnsRun([record for record in online if record.input_asked > history + QUESTION], found)


TABLE = Table(
    {"arm": "14", "turns": "6d", "no answer": "d", "TTFT P50": ".0f", "P90 ms": "8.0f"}
    | {f"from {tier}": "11.0f" for tier in TIERS}
)


def show(arm: str, runs: Sequence[TurnsRun]) -> str:
    """A line of the table, pooled over the runs."""
    ttfts = [ttft for run in runs for ttft in run.ttfts]
    missed = sum(len(run.later) for run in runs) - len(ttfts)
    hits = map(sum, zip(*(run.found for run in runs), strict=True))
    return TABLE.line(arm, len(ttfts), missed, *(percentile(ttfts, rank) * 1e3 for rank in (50, 90)), *hits)


def shorter(found: dict[str, list[TurnsRun]]) -> str:
    """By what factor each further tier makes later turns start sooner, a line for each."""
    alone, *others = ([ttft for run in runs for ttft in run.ttfts] for runs in found.values())
    if not alone or not all(others):
        return "no later turn was answered in one of the arms"
    factors = [(percentile(alone, 50) / percentile(other, 50), mean(alone) / mean(other)) for other in others]
    return "\n".join(
        f"TTFT of later turns {arm}: {at_median:.2f} x shorter at the median, {on_average:.2f} x on average"
        for arm, (at_median, on_average) in zip(list(found)[1:], factors, strict=True)
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks turns", description=__doc__)
    parser.add_argument(
        "--model", choices=("llama", "demo"), default="llama", help="134.5 M random weights, or the packaged model"
    )
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--history", type=int, default=1000, help="tokens that a chat opens with")
    parser.add_argument("--think", type=float, default=15.0, help="seconds between two turns of a chat")
    parser.add_argument("--blocks", type=int, default=256, help="blocks of KV in the pool, 16 tokens each")
    parser.add_argument("--lines", type=int, default=2000, help="of the batch job: more than it can end")
    parser.add_argument("--pairs", type=int, default=2, help="rounds of all arms, in turns")
    parser.add_argument("--slo", default=SLO, help="objectives of the server, so lax that it refuses no long prompt")
    parser.add_argument("--profile-seconds", type=float, default=8.0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Serve, send, print."""
    args = parse(argv)
    longest = args.history + args.turns * (QUESTION + ANSWER)
    print(
        f"turns: {args.model}, {args.chats} chats of {args.history} tokens, {args.turns} turns, "
        f"{args.blocks * 16} tokens of cache; {describe()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.model == "llama":
            make_model_folder(folder)
        flags = (
            *(model_folder(folder, args.model) if args.model == "demo" else ()),
            "--enable-prefix-caching",
            f"--slo={args.slo}",
            f"--profile-seconds={args.profile_seconds}",
            f"--num-gpu-blocks-override={args.blocks}",
            f"--max-model-len={max(longest, LINE_PROMPT + LINE_OUTPUT)}",
        )

        async def measure(url: str, pair: int) -> TurnsRun:
            chats = conversations(args.chats, args.turns, args.history, args.think, pair)
            return await run_arm(url, chats, args.lines, args.history, pair)

        found = compare(folder, flags, ARMS, args.pairs, measure, TABLE, show)
    print(shorter(found))


if __name__ == "__main__":
    main()
