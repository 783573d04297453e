"""Serving speed over HTTP on the CPU: a random 134.5 M Llama in this server and in every peer that is found.

All run beside each other and are measured in turn, round by round, by one client on the same cores (a peer without a
server in process, and its name says so): one stream, three prompts of 512 tokens one after the other, whose median
counts, 8 and 16 streams of 128 in and 64 out; the same words, greedy, no end before its length. Figures are medians of
the rounds. The processor time that waiting engines take meanwhile is printed. A turn begins when the threads of the
engines before it have ceased to spin.
"""

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import OUTPUT, PREFILL, PROMPT, Figures, medians, percentile
from benchmarks.frame import Table, in_turn
from benchmarks.live import Served, over_http, plan_for, wait_for_rest
from benchmarks.machine import describe
from benchmarks.peers import finders
from benchmarks.peers.engine import Engine, start_all
from benchmarks.weights import make_checkpoint
from loadgen.plan import Plan
from loadgen.records import RequestRecord
from loadgen.workloads import fixed

PROMISE = "ttft_p99=60s,tbt_p99=1s"
"""Nothing is refused or held back."""
PROMPTS = 3
"""Of a round: one is over so soon that a moment in which the machine does something else decides about it."""
TICK = 1e-6
"""Seconds; a server that is a script may answer in less than the clock tells."""

Answers = Callable[[Plan], Awaitable[list[RequestRecord]]]


class Failed(Exception):
    """A round with an incomplete answer."""


@dataclass(slots=True)
class Arm:
    """One engine's rounds. `gaps`: seconds between tokens at 16 streams; `waiting`: seconds of processor time while
    others were measured."""

    engine: Engine
    served: Served
    rounds: list[Figures] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    waiting: float = 0.0

    def gap_figures(self) -> dict[str, float]:
        """Seconds between tokens. A prompt that comes whole in one step beside others makes few gaps, and long ones, of
        which the 99th percentile of 16 streams tells nothing."""
        longest = max(self.gaps, default=math.nan)
        return {"tbt_p50": percentile(self.gaps, 50), "tbt_p99": percentile(self.gaps, 99), "tbt_max": longest}

    def summary(self) -> dict[str, Any]:
        """For the file: every round, the medians and the gaps between tokens."""
        return {
            "version": self.engine.version,
            "http": self.engine.http,
            "command": self.engine.command(Path("model"), 0),
            "environment": self.engine.environment,
            "rounds": [found._asdict() for found in self.rounds],
            "median": medians(self.rounds)._asdict(),
            **self.gap_figures(),
            "waiting_cpu_seconds": self.waiting,
        }


async def at_once(
    url: str, count: int, prompt: int, output: int, seed: int, *, answers: Answers = over_http, **settings: Any
) -> list[RequestRecord]:
    """`count` requests sent together, each answered with exactly `output` tokens; raises Failed."""
    lines = fixed(count, prompt, output)
    found = await answers(plan_for(url, seed, online=lines, closed_loop=True, **settings))
    for record in found:
        if not record.ok or record.output_tokens != output:
            raise Failed(f"asked for {output} tokens, got {record.output_tokens} ({record.outcome} {record.error})")
    return found


async def streams(url: str, count: int, seed: int, **settings: Any) -> tuple[float, list[float]]:
    """`count` simultaneous requests: output tokens per second from the first sent to the last token, and all gaps."""
    found = await at_once(url, count, PROMPT, OUTPUT, seed, **settings)
    begin = min(record.sent_at or 0.0 for record in found)
    rate = count * OUTPUT / (max(record.chunk_at[-1] for record in found) - begin)
    return rate, [float(gap) for record in found for gap in record.gaps()]


async def measure_round(url: str, seed: int, **settings: Any) -> tuple[Figures, list[float]]:
    """The four figures once, and the gaps at 16 streams. No two prompts of a run begin alike."""
    (one,) = await at_once(url, 1, PROMPT, OUTPUT, 10 * seed, **settings)
    prompts = []
    for number in range(PROMPTS):
        prompts += await at_once(url, 1, PREFILL, 1, 10 * seed + 1 + number, **settings)
    eight, _ = await streams(url, 8, 10 * seed + PROMPTS + 1, **settings)
    sixteen, gaps = await streams(url, 16, 10 * seed + PROMPTS + 2, **settings)
    gap, first = one.tpot or TICK, percentile([prompt.ttft_sent or TICK for prompt in prompts], 50)
    return Figures(1.0 / gap, PREFILL / first, eight, sixteen), gaps


def alternate(arms: Sequence[Arm], rounds: int, **settings: Any) -> None:
    """Every arm once a round, each beginning in its turn; the first round of each is for warming up and not kept. A
    round that fails is said and left out."""
    for number in range(rounds + 1):
        for arm in in_turn(arms, number):
            others = [other for other in arms if other is not arm]
            wait_for_rest([other.served for other in others])
            before = [other.served.cpu_seconds() for other in others]
            try:
                chosen = {**settings, **arm.engine.settings(), "answers": arm.served.answers}
                found, gaps = asyncio.run(measure_round(arm.served.url, 1 + number, **chosen))
            except Failed as error:
                print(f"round {number} of {arm.engine.name} failed: {error}", flush=True)
                continue
            if number:
                arm.rounds.append(found)
                arm.gaps += gaps
                for other, seconds in zip(others, before, strict=True):
                    other.waiting += other.served.cpu_seconds() - seconds
            cells = " / ".join(f"{value:.0f}" for value in found)
            print(f"{f'round {number}' if number else 'warm-up'}: {arm.engine.name} {cells}", flush=True)


TABLE = Table(
    {"tok/s (medians)": "46", "1 stream": ">9", "prefill 512": ">12", "8 x 128/64": ">11", "16 x 128/64": ">12"}
)


def show(arms: Sequence[Arm]) -> None:
    """The table: this server first, then each other row with ours as a ratio to it."""
    print(f"{TABLE.heading}  TBT P50 / P99 / longest, ms")
    ours = medians(arms[0].rounds)
    for arm in arms:
        tail = " / ".join(f"{seconds * 1e3:.0f}" for seconds in arm.gap_figures().values())
        name, cells = f"{arm.engine.name} ({arm.engine.version})", (f"{value:.0f}" for value in medians(arm.rounds))
        print(f"{TABLE.line(name, *cells)}  {tail}")
    for arm in arms[1:]:
        ratios = (f"{a / b:.2f}" for a, b in zip(ours, medians(arm.rounds), strict=True))
        print(TABLE.line(f"tidemill / {arm.engine.name}", *ratios))


def report(arms: Sequence[Arm], output: Path | None, about: str) -> None:
    """Print the table and write all figures to `output`."""
    for arm in [arm for arm in arms if not arm.rounds]:
        print(f"{arm.engine.name} answered no round in full and is left out")
    kept = [arm for arm in arms if arm.rounds]
    if not kept or kept[0] is not arms[0]:
        raise SystemExit("no round of this server is whole")
    show(kept)
    for arm in kept if len(kept) > 1 else ():
        print(f"{arm.engine.name} took {arm.waiting:.1f} s of processor time while others were measured")
    if output is not None:
        whole = {"about": about, "engines": {arm.engine.name: arm.summary() for arm in kept}}
        output.write_text(json.dumps(whole, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks serving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each engine, besides one to warm up (default: 5)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="where all figures are written")
    parser.add_argument("--slo", default=PROMISE, help="of this server; prompts may prolong gaps within it")
    finders.add_flags(parser)
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    about = (
        f"serving: random 134.5 M Llama, {args.dtype}, {args.threads} threads, SLO {args.slo}, client on the same "
        f"cores; {describe()}"
    )
    print(about, flush=True)
    engines = [finders.tidemill(args.threads, args.dtype, "--slo", args.slo), *finders.found(args)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name) / "model"
        folder.mkdir()
        words = make_checkpoint(folder, args.dtype)
        arms = [Arm(engine, served) for engine, served in start_all(engines, folder, stack)]
        alternate(arms, args.rounds, source=words)
        report(arms, args.output, about)
