"""Chats beside offline work, in this server and in vLLM with priorities: who keeps the limits, and what is left.

Online requests come by a Poisson process; beside them 24 clients always have an offline request open, or one batch job
runs. Every server is up for the whole run and is measured in turn, seed by seed, with the same arrivals and the same
words, when the others rest; the first seconds of a run do not count. Limits are those on the TTFT from the scheduled
arrival and on the nearest-rank P99 of a request's own gaps.
"""

import argparse
import asyncio
import json
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import colocation
from benchmarks.colocation import JOB, LEARNING, TABLE, Run, judged, poisson, run_arm, slo_of, split_of, summarise
from benchmarks.frame import in_turn
from benchmarks.live import Served, wait_for_rest
from benchmarks.machine import describe
from benchmarks.peers import finders
from benchmarks.peers.engine import Engine, start_all
from benchmarks.weights import make_checkpoint
from loadgen.arrivals import constant_rate

REST_LOOKS = 240
"""Two minutes: requests that were given up stay in a step until it has ended."""


@dataclass(slots=True)
class Arm:
    """One engine with one form of offline work, and its runs by seed."""

    name: str
    engine: Engine
    served: Served
    tier: str
    runs: list[Run] = field(default_factory=list)

    def measure(self, arrivals: list[float], seconds: float, seed: int, **settings: Any) -> Run:
        """One run."""
        chosen = {**settings, **self.engine.settings()}
        return asyncio.run(
            run_arm(self.served.url, arrivals, seconds, self.tier, seed, quiet=self.engine.open, **chosen)
        )

    def summary(self, ttft: float, tbt: float) -> dict[str, Any]:
        """Return by seed the chats, the chats within both limits, and the offline work per second."""
        good = slo_of(ttft, tbt).good
        lines = [run.offline_lines for run in self.runs]
        return {
            "version": self.engine.version,
            "online": [len(judged([run])) for run in self.runs],
            "kept": [sum(map(good, judged([run]))) for run in self.runs],
            "offline_lines": lines,
            "offline_output_tokens": [split_of(rate)[0] for rate in lines],
            "offline_prompt_tokens": [split_of(rate)[1] for rate in lines],
        }


def arms_of(engine: Engine, served: Served) -> list[Arm]:
    """This server with flex requests and with a batch job; a peer with requests of its lower class."""
    if engine.offline is not None:
        return [Arm(f"{engine.name}, priority", engine, served, "default")]
    return [Arm("tidemill, flex", engine, served, "flex"), Arm("tidemill, batch", engine, served, JOB)]


def compare(arms: list[Arm], args: argparse.Namespace, **settings: Any) -> None:
    """All arms once with each seed, after a run of each server that nobody counts."""
    servers = list({arm.engine.name: arm.served for arm in arms}.values())
    warm = [number / args.rate for number in range(int(args.rate * LEARNING))]
    for arm in {arm.engine.name: arm for arm in arms}.values():
        arm.measure(warm, LEARNING, 0, **settings)
    print(TABLE.heading)
    for seed in range(1, args.seeds + 1):
        arrivals = poisson(constant_rate(args.rate), args.seconds, seed)
        for arm in in_turn(arms, seed):
            wait_for_rest([served for served in servers if served is not arm.served], REST_LOOKS)
            arm.runs.append(arm.measure(arrivals, args.seconds, seed, **settings))
            summarise(f"{arm.name} {seed}", arm.runs[-1:], args.ttft, args.tbt)
    print(f"all {args.seeds} seeds:")
    for arm in arms:
        summarise(arm.name, arm.runs, args.ttft, args.tbt)
    rates = {arm.name: mean(run.offline_rate for run in arm.runs) for arm in arms}
    for arm in arms:
        if arm.engine.offline is not None and rates[arm.name]:
            ratios = ", ".join(
                f"{name} {rate / rates[arm.name]:.2f}" for name, rate in rates.items() if name != arm.name
            )
            print(f"batch work over that of {arm.name}: {ratios}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks colocation-peers", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.35, help="online requests a second")
    parser.add_argument("--seconds", type=float, default=45.0, help="length of one run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ttft", type=float, default=1.0, help="TTFT limit in seconds")
    parser.add_argument("--tbt", type=float, default=0.15, help="limit on the P99 of a request's gaps in seconds")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="where all figures are written")
    finders.add_flags(parser, ["vllm"])
    args = parser.parse_args(argv)
    if args.seconds <= colocation.WARM_UP:
        parser.error(f"--seconds is more than {colocation.WARM_UP:g}, which do not count")
    slo = f"ttft_p99={args.ttft * 1e3:g}ms,tbt_p99={args.tbt * 1e3:g}ms"
    about = (
        f"co-location: random 134.5 M Llama, {args.dtype}, {args.threads} threads, SLO {slo}, {args.rate} chats/s of "
        f"{colocation.ONLINE_PROMPT}/{colocation.ONLINE_OUTPUT} beside {colocation.OUTSTANDING} clients (or a batch "
        f"job) of {colocation.OFFLINE_PROMPT}/{colocation.OFFLINE_OUTPUT}; {describe()}"
    )
    print(about, flush=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name) / "model"
        folder.mkdir()
        words = make_checkpoint(folder, args.dtype)
        ours = finders.tidemill(args.threads, args.dtype, "--slo", slo)
        arms = [arm for pair in start_all([ours, *finders.found(args)], folder, stack) for arm in arms_of(*pair)]
        compare(arms, args, source=words)
    if args.output is not None:
        whole = {"about": about, "arms": {arm.name: arm.summary(args.ttft, args.tbt) for arm in arms}}
        args.output.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
