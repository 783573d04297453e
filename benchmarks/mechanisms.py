"""Mechanisms on a live server, each beside the same server without it.

`routing`: one server with two engines (LARRY's laxity and SAL's router) against two servers that get the chats in turn,
under chats of very different lengths. `refit`: a server whose stored latency profile is wrong (decodes cost three times
as much as measured, prompt tokens a third), before and after its first refit, beside one with the measured profile.
`fill`: a server whose budget searches try flat budgets alone, beside one that searches λ and δ, too, each with offline
work let in and kept out by turns, under the SLO of `--slo`. `hidden`: a server whose weights stream and whose cache is
short, with requests that may run from hidden state (`--overload hidden`, HybridServe's and Apt-Serve's two forms of the
cache) beside one that recomputes, under a burst of equal requests; the ratio is that of hidden blocks to all. A random
Llama of 134.5 M parameters, for `hidden` one of 230 M with as many KV heads as heads. Arms alternate in each round of
`routing` and `hidden`.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import alternate, colocation, live, offload, pressure
from benchmarks.figures import percentile
from benchmarks.frame import Table, in_turn
from benchmarks.machine import describe
from loadgen.arrivals import constant_rate
from loadgen.metrics import Slo
from loadgen.plan import Job, Windows
from loadgen.records import RequestRecord
from loadgen.stats import stream
from loadgen.traces import Ints, Trace
from loadgen.workloads import fixed

PARTS = ("routing", "refit", "fill", "hidden")
SLO, LIMITS = "ttft_p99=1s,tbt_p99=150ms", Slo((("ttft", 1.0), ("tbt_p99", 0.15)))
ROUTERS = ("SAL", "in turn")
MEAN_PROMPT, MEAN_OUTPUT, SPREAD = 200, 48, 1.0
"""Mean lengths of the chats of `routing`, and the standard deviation of their logarithms."""
BEFORE_REFIT, AFTER_REFIT = (10.0, 55.0), (100.0, 145.0)
"""Seconds of a run that are measured: the first refit is made after a minute of steps."""
WRONG = {"decodes": 3.0, "prefill_tokens": 1 / 3}
"""Factors on the coefficients of the stored profile; the prefill factor applies to its hinges, too."""
FILL_SLO, SPELL, SEARCHING, FILL_SECONDS = "5%", 15.0, 120.0, 240.0
"""Default SLO of `fill`; seconds of a spell, of the time before the first search has ended, and of the measurement."""
OVERLOADS = ("recompute", "hidden")
STREAMED = dict(live.CONFIG) | offload.SHAPE | {"num_hidden_layers": 16, "num_key_value_heads": 16}
"""Model of `hidden`: K and V of a token take twice the bytes of its hidden state."""
WEIGHTS, BLOCKS, BURST, BURST_TOKENS = "0.2", 160, 32, (192, 64)
"""GiB of the weights that stay in memory, blocks of 16 tokens in the cache, and requests of a burst of `hidden`."""
LAX_SLO = "ttft_p99=300s,tbt_p99=10s"
ROUTING = Table({
    "router": "10", "chats": "6d", "kept": "7.1%", "TTFT P50 ms": "11.0f", "P95 ms": "8.0f", "P99 ms": "8.0f",
    "E2E P50 s": "9.2f", "P95 s": "7.2f",
})  # fmt: skip
REFIT = Table({
    "profile": "10", "refits": "6.0f", "error before": "12.1%", "after": "7.1%", "lines/s before": "14.2f",
    "after ": "7.2f", "kept before": "11.1%", " after": "7.1%",
})  # fmt: skip
HIDDEN = Table({
    "overload": "10", "requests": "8d", "output tokens/s": "15.1f", "TTFT P50 s": "10.2f", "TBT P50 ms": "10.0f",
    "hidden blocks": "13.1f", "of all": "6.1%", "preempted": "9.0f",
})  # fmt: skip


def chats_of(rate: float, seconds: float, seed: int) -> Trace:
    """Return Poisson arrivals of chats with log-normal lengths."""
    arrivals = colocation.poisson(constant_rate(rate), seconds, seed)
    random = stream(seed, "lengths")

    def lengths(mean: int, longest: int) -> Ints:
        drawn = random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, len(arrivals))
        cut: Ints = np.clip(np.rint(drawn), 8, longest).astype(np.int64)
        return cut

    made = fixed(len(arrivals), 1, 1).at(np.array(arrivals))
    return replace(made, input_tokens=lengths(MEAN_PROMPT, 1500), output_tokens=lengths(MEAN_OUTPUT, 300))


async def send(urls: Sequence[str], chats: Trace, seed: int, seconds: float) -> list[RequestRecord]:
    """Send the chats to the servers in turn."""
    for url in urls:
        await live.wait_quiet(url)
    count, settings = len(urls), {"windows": Windows(horizon=seconds, drain=60.0)}
    parts = [chats.take(np.arange(first, len(chats), count)) for first in range(count)]
    plans = [live.plan_for(url, seed, online=part, **settings) for url, part in zip(urls, parts, strict=True)]
    return [record for records in await asyncio.gather(*map(live.run, plans)) for record in records.requests]


def routing(folder: Path, args: argparse.Namespace) -> None:
    """Compare the routers."""
    found: dict[str, list[RequestRecord]] = {name: [] for name in ROUTERS}
    for number in range(args.rounds):
        chats = chats_of(args.rate, args.seconds, args.seed + number)
        warm = chats_of(args.rate, colocation.LEARNING, args.seed + 1000)
        for name in in_turn(ROUTERS, number):
            with ExitStack() as stack:
                flags = ("--slo", SLO, "--max-queue-time", "none")
                arms = [("--engines", "2")] if name == "SAL" else [(), ()]
                threads = 0 if name == "SAL" else 1
                urls = [
                    stack.enter_context(live.server(folder, threads, "--state-dir", str(folder / state), *flags, *each))
                    for state, each in zip(("first", "second"), arms, strict=False)
                ]
                asyncio.run(send(urls, warm, args.seed, colocation.LEARNING))
                found[name] += asyncio.run(send(urls, chats, args.seed, args.seconds))
    print(f"{args.rate:g} chats/s, mean lengths {MEAN_PROMPT}/{MEAN_OUTPUT}, {SLO}\n{ROUTING.heading}")
    for name, records in found.items():
        ttfts = [record.ttft for record in records if record.ttft is not None]
        ends = [record.e2e for record in records if record.e2e is not None]
        kept = sum(map(LIMITS.good, records)) / len(records)
        cells = [1e3 * percentile(ttfts, rank) for rank in (50, 95, 99)]
        cells += [percentile(ends, rank) for rank in (50, 95)]
        print(ROUTING.line(name, len(records), kept, *cells), flush=True)


def spoil(cache: Path) -> None:
    """Make the stored profile wrong by the factors of WRONG."""
    for path in cache.rglob("*.json"):
        document = json.loads(path.read_bytes())
        if isinstance(document, dict) and "coefficients" in document:
            for name, factor in WRONG.items():
                document["coefficients"][name] *= factor
            document["hinges"] = [[knot, WRONG["prefill_tokens"] * slope] for knot, slope in document["hinges"]]
            path.write_text(json.dumps(document))


async def beside(url: str, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Run chats beside offline work. Return the lines/s and the share of kept chats before and after the refit."""
    seconds = AFTER_REFIT[1]
    arrivals = colocation.poisson(constant_rate(args.rate), seconds, args.seed)
    lines = Job(fixed(int(100 * seconds), colocation.OFFLINE_PROMPT, colocation.OFFLINE_OUTPUT))
    watch = live.Watch((colocation.TOKENS,), live.look_interval(seconds))
    plan = live.plan_for(
        url,
        args.seed,
        online=fixed(1, colocation.ONLINE_PROMPT, colocation.ONLINE_OUTPUT).at(np.array(arrivals)),
        jobs=(lines,),
        offline_mode="flex",
        offline_concurrency=colocation.OUTSTANDING,
        windows=Windows(horizon=seconds, drain=30.0),
    )
    records = [each for each in (await live.run(plan, watch)).requests if each.service_class == "online"]
    rates, kept = [], []
    for begin, end in (BEFORE_REFIT, AFTER_REFIT):
        tokens = sum(more for at, more in watch.grown(colocation.TOKENS) if begin <= at < end)
        rates.append(tokens / (end - begin) / (colocation.OFFLINE_PROMPT + colocation.OFFLINE_OUTPUT))
        chats = [record for record in records if begin <= record.scheduled_at < end]
        kept.append(sum(map(LIMITS.good, chats)) / len(chats) if chats else float("nan"))
    return rates, kept


def refit(folder: Path, args: argparse.Namespace) -> None:
    """Compare a wrong profile with the measured one."""
    print(f"{args.rate:g} chats/s beside {colocation.OUTSTANDING} clients, {SLO}\n{REFIT.heading}")
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name)
        for profile in ("measured", "wrong"):
            if profile == "wrong":
                spoil(cache)
            with live.server(folder, 0, "--slo", SLO, "--state-dir", str(cache / "state"), cache=cache) as url:
                rates, kept = asyncio.run(beside(url, args))
                page = asyncio.run(live.metrics_page(url))
            error = {
                when: live.read_metric(page, f'tidemill_model_refit_error{{model="{when}"}}', missing=float("nan"))
                for when in ("before", "after")
            }
            refits = live.read_metric(page, 'tidemill_model_refits_total{outcome="adopted"}', missing=0.0)
            print(REFIT.line(profile, refits, error["before"], error["after"], *rates, *kept), flush=True)


def fill(_: Path, args: argparse.Namespace) -> None:
    """Compare a flat with a priced fill."""
    for flat in (True, False):
        print(f"{'flat' if flat else 'priced'} fill, {args.rate:g} chats/s, {args.slo}")
        alternate.run(args.slo, args.rate, FILL_SECONDS, SPELL, args.seed, SEARCHING, flat=flat)


def hidden(folder: Path, args: argparse.Namespace) -> None:
    """Compare requests that run from hidden state with requests that are recomputed, beside streamed weights."""
    model = folder / "streamed"
    model.mkdir()
    live.make_model_folder(model, STREAMED)
    cache = ("--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(sum(BURST_TOKENS)))
    policy = ("--online-policy", "goodput-strict", "--slo", LAX_SLO, "--max-queue-time", "none")
    flags = ("--offload-weights", WEIGHTS, "--state-dir", str(model / "state"), *cache, *policy)
    found: dict[str, list[pressure.PressureRun]] = {name: [] for name in OVERLOADS}
    for number in range(args.rounds):
        for name in in_turn(OVERLOADS, number):
            with live.server(model, 0, *flags, "--overload", name) as url:
                asyncio.run(pressure.run_seed(url, [0.0] * 4, args.seed, *BURST_TOKENS))  # nothing is cold
                found[name].append(
                    asyncio.run(pressure.run_seed(url, [0.0] * BURST, args.seed + number, *BURST_TOKENS))
                )
    print(f"{BURST} requests of {BURST_TOKENS[0]}/{BURST_TOKENS[1]}, {BLOCKS * 16} tokens of cache\n{HIDDEN.heading}")
    for name, runs in found.items():
        answers = [answer for run in runs for answer in run.answers if answer.ok]
        seconds = sum(max(answer.chunk_at[-1] for answer in run.answers if answer.ok) for run in runs)
        firsts = [answer.ttft for answer in answers if answer.ttft is not None]
        gaps = np.concatenate([answer.gaps() for answer in answers])
        blocks = float(np.mean([value for run in runs for value in run.hidden_blocks]))
        preempted = sum(run.counts["preemptions"] for run in runs)
        rate, gap = len(answers) * BURST_TOKENS[1] / seconds, 1e3 * percentile(gaps, 50)
        print(
            HIDDEN.line(name, len(answers), rate, percentile(firsts, 50), gap, blocks, blocks / 2 / BLOCKS, preempted)
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks mechanisms", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rate", type=float, default=1.0, help="chats a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each arm and round of `routing`")
    parser.add_argument("--rounds", type=int, default=3, help="of `routing` and `hidden`")
    parser.add_argument("--slo", default=FILL_SLO, help="of `fill` (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    parts: dict[str, Any] = {"routing": routing, "refit": refit, "fill": fill, "hidden": hidden}
    chosen = args.parts.split(",")
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"unknown part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        live.make_model_folder(folder)
        for part in chosen:
            parts[part](folder, args)


if __name__ == "__main__":
    main()
