"""Chats beside offline work on this server and on vLLM with priorities: chats within both limits, offline work done.

One server runs at a time, because an idle server still takes memory and processor time. Each seed starts every server
anew, in a different order, sends a warm-up load, and then runs the loads of `--loads` with the same arrivals and words;
this server also without offline work.
`--sweep` measures vLLM at every pair of `--tokens` (tokens a step) and `--rows` (rows a step); its best point is the
one with the most offline output among those that keep at least BEST_KEPT of the chats.
The limits apply to the TTFT from the scheduled arrival and to the nearest-rank P99 of a request's own gaps.
"""

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import loads
from benchmarks.colocation import TABLE, summarise
from benchmarks.figures import percentile
from benchmarks.frame import Table, in_turn
from benchmarks.live import Served
from benchmarks.loads import (
    JOB,
    LEARNING,
    ONLINE_PROMPT,
    Run,
    judged,
    poisson,
    restless,
    run_arm,
    slo_of,
    split_of,
)
from benchmarks.machine import describe, provenance
from benchmarks.peers import finders
from benchmarks.peers.engine import Engine, start_all
from benchmarks.weights import LAYERS, make_checkpoint
from loadgen.arrivals import RateCurve, constant_rate, sine

ALONE = ", no batch"
"""End of the name of an arm without offline work: the chats that an engine keeps by itself."""
BEST_KEPT = 0.95
"""Minimum share of kept chats of a peer's best point."""
PERIODS = 3
"""Number of waves of the sine load in a run."""
DISTURBERS = 1
"""Number of processes that compute all the time beside the disturbed load."""
POINTS = Table({
    "arm": "24", "load": "9", "chats": "6d", "kept": "7.1%", "TTFT P50": "9.0f", "lines/s": "8.2f",
    "output tok/s": ".0f", "prompt tok/s": ".0f",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """Online load of one run. `curve` makes the rate over time from the mean rate and the run's seconds."""

    curve: Callable[[float, float], RateCurve]
    prompts: tuple[int, ...] = (ONLINE_PROMPT,)  # in turn
    beside: Callable[[], AbstractContextManager[object]] = nullcontext


LOADS = {
    "steady": Load(lambda rate, _: constant_rate(rate)),
    "sine": Load(lambda rate, seconds: sine(rate, rate, seconds / PERIODS)),
    "double": Load(lambda rate, _: constant_rate(2.0 * rate)),
    "long": Load(lambda rate, _: constant_rate(rate), prompts=(4 * ONLINE_PROMPT,)),
    "long2k": Load(lambda rate, _: constant_rate(rate), prompts=(*(ONLINE_PROMPT,) * 9, 16 * ONLINE_PROMPT)),
    "disturbed": Load(lambda rate, _: constant_rate(rate), beside=lambda: restless(DISTURBERS)),
}
"""Loads by name: constant rate; a sine from 0 to twice the rate; twice the rate; prompts of four times the length;
one prompt in ten of 16 times the length; constant rate beside a process that competes for the cores."""


@dataclass(slots=True)
class Arm:
    """One engine with one form of offline work: its runs by load, one for each seed that its server survived."""

    name: str
    engine: Engine
    tier: str | None  # None: no offline work
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def measure(
        self, served: Served, arrivals: list[float], seconds: float, seed: int, load: str = "", **settings: Any
    ) -> Run:
        """Run the arm once and, with a `load`, keep the run."""
        chosen = {**settings, **self.engine.settings()}
        run = asyncio.run(run_arm(served.url, arrivals, seconds, self.tier, seed, quiet=self.engine.open, **chosen))
        if load:
            self.runs.setdefault(load, []).append(run)
        return run

    def summary(self, load: str, ttft: float, tbt: float) -> dict[str, Any]:
        """Return by seed the chats, the chats within both limits, and the offline work per second."""
        good, runs = slo_of(ttft, tbt).good, self.runs.get(load, [])
        lines = [run.offline_lines for run in runs]
        return {
            "online": [len(judged([run])) for run in runs],
            "kept": [sum(map(good, judged([run]))) for run in runs],
            "ttft_p50": [percentile(ttfts_of(run), 50) for run in runs],
            "offline_lines": lines,
            "offline_output_tokens": [split_of(rate)[0] for rate in lines],
            "offline_prompt_tokens": [split_of(rate)[1] for rate in lines],
        }


def ttfts_of(run: Run) -> list[float]:
    """Return the TTFTs of the answered chats that count, in seconds."""
    return [record.ttft for record in judged([run]) if record.ttft is not None]


def arms_of(engine: Engine) -> list[Arm]:
    """Return the arms of an engine: low-priority requests for a peer; for this server flex requests and a batch job.
    This server and the scheduler of tidemill inside vLLM have an arm with chats alone."""
    alone = [Arm(f"{engine.name}{ALONE}", engine, None)] if engine.name.startswith("tidemill") else []
    if engine.offline is not None:
        return [*alone, Arm(engine.name, engine, "default")]
    return [*alone, Arm("tidemill, flex", engine, "flex"), Arm("tidemill, batch", engine, JOB)]


def points_of(args: argparse.Namespace, slo: str) -> list[Engine]:
    """Return the peers: vLLM at its default settings, with `--sweep` also at each point of the grid, and with
    `--plugin` also with the scheduler of tidemill."""
    peers = finders.found(args)
    if args.vllm and args.sweep:
        grid = [(tokens, rows) for tokens, rows in product(args.tokens, args.rows) if rows <= tokens]
        peers += [finders.vllm(args.vllm, args.threads, args.dtype, tokens=tokens, rows=rows) for tokens, rows in grid]
    if args.vllm and args.plugin:
        peers.append(finders.vllm_with_plugin(args.vllm, args.threads, args.dtype, slo))
    return peers


def compare(arms: Sequence[Arm], folder: Path, args: argparse.Namespace, **settings: Any) -> None:
    """Measure all arms with each seed and each load; a peer that does not start is left out of that seed."""
    engines = list({arm.engine.name: arm.engine for arm in arms}.values())
    warm = [number / args.rate for number in range(int(args.rate * args.learning))]
    print(TABLE.heading)
    for seed in range(1, args.seeds + 1):
        for engine in in_turn(engines, seed):
            with ExitStack() as stack:
                for _, served in start_all([engine], folder, stack, required=engine.offline is None):
                    own = [arm for arm in arms if arm.engine is engine]
                    next((arm for arm in own if arm.tier), own[0]).measure(served, warm, args.learning, 0, **settings)
                    measure_loads(own, served, seed, args, **settings)


def measure_loads(arms: Sequence[Arm], served: Served, seed: int, args: argparse.Namespace, **settings: Any) -> None:
    """Run the loads in order, and each with every arm of the engine that runs."""
    for name in args.loads:
        load = LOADS[name]
        arrivals = poisson(load.curve(args.rate, args.seconds), args.seconds, seed)
        for arm in arms:
            with load.beside():
                run = arm.measure(served, arrivals, args.seconds, seed, name, prompts=load.prompts, **settings)
            summarise(f"{arm.name}, {name} {seed}", [run], args.ttft, args.tbt)


def report(arms: Sequence[Arm], loads: Sequence[str], ttft: float, tbt: float) -> None:
    """Print one line for each arm and load, pooled over the seeds, and the best point of the peers."""
    print(POINTS.heading)
    for load in loads:
        for arm in arms:
            found = arm.summary(load, ttft, tbt)
            if found["online"]:
                lines = mean(found["offline_lines"])
                cells = (sum(found["online"]), kept_of(found), mean(found["ttft_p50"]) * 1e3, lines, *split_of(lines))
                print(POINTS.line(arm.name, load, *cells))
        for line in verdict({arm.name: arm.summary(load, ttft, tbt) for arm in arms}, load):
            print(line, flush=True)


def kept_of(found: dict[str, Any]) -> float:
    """Return the share of the chats within both limits, over all seeds."""
    return sum(found["kept"]) / sum(found["online"]) if sum(found["online"]) else math.nan


def verdict(found: dict[str, dict[str, Any]], load: str) -> Iterator[str]:
    """Yield each arm of tidemill relative to its chats alone, and to the best point of the peers under a load."""
    ran = {name: each for name, each in found.items() if each["online"]}
    rates = {name: mean(each["offline_output_tokens"]) for name, each in ran.items() if not name.endswith(ALONE)}
    ours = [name for name in rates if name.startswith("tidemill")]
    for name in ours:
        if alone := ran.get(f"{name.split(',')[0]}{ALONE}"):
            yield f"{load}: {name}: {sum(found[name]['kept'])} chats kept, {sum(alone['kept'])} alone"
    good = [name for name in rates if name not in ours and kept_of(found[name]) >= BEST_KEPT]
    if not good:
        if len(ours) < len(rates):
            yield f"{load}: no point of a peer keeps {BEST_KEPT:.0%} of the chats"
        return
    best = max(good, key=rates.__getitem__)
    yield f"{load}: best point of the peers: {best}, {kept_of(found[best]):.1%} kept, {rates[best]:.0f} output tok/s"
    for name in ours:
        yield f"{load}: {name}: {kept_of(found[name]):.1%} kept, {rates[name] / rates[best]:.2f} times its output"


def numbers_of(text: str) -> tuple[int, ...]:
    """Return positive whole numbers that are separated by commas."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers such as 64,128") from None
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("numbers must be positive")
    return numbers


def loads_of(text: str) -> tuple[str, ...]:
    """Return names of loads that are separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in LOADS]:
        raise argparse.ArgumentTypeError(f"unknown load {', '.join(unknown)}; known: {', '.join(LOADS)}")
    return names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks colocation-peers", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.35, help="online requests a second")
    parser.add_argument("--seconds", type=float, default=45.0, help="length of one run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning", type=float, default=LEARNING, help="seconds of chats before the first load")
    parser.add_argument("--ttft", type=float, default=1.0, help="TTFT limit in seconds")
    parser.add_argument("--tbt", type=float, default=0.15, help="limit on the P99 of a request's gaps in seconds")
    parser.add_argument("--loads", type=loads_of, default=("steady",), help=f"some of {', '.join(LOADS)}")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model, fewer on a slow machine")
    parser.add_argument("--arms", type=lambda text: text.split(";"), metavar="ARM;ARM", help="measure only these arms")
    parser.add_argument("--no-drafts", action="store_true", help="run tidemill with --speculation off")
    parser.add_argument("--sweep", action="store_true", help="measure vLLM at every pair of --tokens and --rows")
    parser.add_argument("--plugin", action="store_true", help="measure vLLM with the scheduler of integrations/vllm")
    parser.add_argument("--tokens", type=numbers_of, default=(64, 128, 256, 512, 2048), help="vLLM's tokens a step")
    parser.add_argument("--rows", type=numbers_of, default=(4, 16, 64), help="vLLM's rows a step")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write all figures to this file")
    finders.add_flags(parser, ["vllm"])
    args = parser.parse_args(argv)
    if args.seconds <= loads.WARM_UP:
        parser.error(f"--seconds must exceed {loads.WARM_UP:g}, which do not count")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    slo = f"ttft_p99={args.ttft * 1e3:g}ms,tbt_p99={args.tbt * 1e3:g}ms"
    about = (
        f"co-location: random Llama of {args.layers} layers, {args.dtype}, {args.threads} threads, SLO {slo}, "
        f"{args.rate} chats/s of {loads.ONLINE_PROMPT}/{loads.ONLINE_OUTPUT} beside {loads.OUTSTANDING} "
        f"clients (or a batch job) of {loads.OFFLINE_PROMPT}/{loads.OFFLINE_OUTPUT}; {describe()}"
    )
    print(about, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        words = make_checkpoint(folder, args.dtype, args.layers)
        drafts = ["--speculation", "off"] if args.no_drafts else []
        ours = finders.tidemill(args.threads, args.dtype, "--slo", slo, *drafts)
        every = [arm for engine in (ours, *points_of(args, slo)) for arm in arms_of(engine)]
        arms = [arm for arm in every if args.arms is None or arm.name in args.arms]
        compare(arms, folder, args, source=words)
    report(arms, args.loads, args.ttft, args.tbt)
    if args.output is not None:
        found = {load: {arm.name: arm.summary(load, args.ttft, args.tbt) for arm in arms} for load in args.loads}
        versions = {arm.engine.name: arm.engine.version for arm in arms}
        whole = {**provenance(sys.argv), "about": about, "versions": versions, "loads": found}
        args.output.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
