"""A pool too small for its load: every policy on every cache under the same arrivals, live or on a virtual clock.

Live, the packaged demo model (as many KV heads as heads), and one with half the KV heads (`gqa`, random weights), which
offers no hidden state. All pools take the same bytes, so that one of 8 bits has more blocks. Each arm has a server of
its own; every seed's requests arrive at the same times in each. Rates are multiples of the answers a second of a burst,
by arrival with a cache of 16 bits. Attainment counts requests whose first token came within the TTFT limit and whose
nearest-rank P99 gap is within the TBT limit; those refused with 429 count as missed. Recomputed are the tokens that the
server computed beyond one pass over every answered request. `--virtual` runs the same arms on simulated GPUs, see
`benchmarks.pressure_virtual`.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import percentile
from benchmarks.frame import Table
from benchmarks.live import PACKAGED, Watch, metrics_page, plan_for, read_metric, run, server, wait_quiet
from benchmarks.machine import describe
from benchmarks.pressure_virtual import POLICIES, arms, run_virtual
from engine.models.byte_cells import slice_elements
from engine.models.spec import load_spec
from loadgen.arrivals import constant_rate, schedule
from loadgen.metrics import Slo
from loadgen.records import RequestRecord
from loadgen.stats import stream, wilson
from loadgen.workloads import fixed
from predictor.slo import SLO

TOKENS, VIRTUAL_TOKENS = 192, 512
"""Mean prompt and output tokens live and on the virtual clock, whose machines have 20 times the cache."""
BLOCK_SIZE = 16
INT8 = "--kv-cache-dtype=int8"
HOST = "--swap-space=0.25"
FLAGS = {"16 bits": (), "16 bits, host": (HOST,), "int8": (INT8,), "int8, host": (HOST, INT8)}
ARMS = {
    f"{policy}, {cache}": (f"--online-policy={policy}", *flags) for cache, flags in FLAGS.items() for policy in POLICIES
} | {"goodput-strict, 16 bits, hidden": ("--online-policy=goodput-strict", "--overload=hidden")}
"""The arms: flags of their servers."""
FIRST = "fcfs, 16 bits"
"""The arm whose burst sets the rates."""
MODELS = ("gqa", "demo")
GQA_HEADS = 2
"""KV heads of the model `gqa`, of four heads."""
SAMPLE_SECONDS = 0.5
BURST = 32
COUNTED = ("preemptions", "prefill_tokens", "decode_tokens")
MOVED = ("swap_out", "swap_in", "restore")
HIDDEN = "tidemill_hidden_blocks"


@dataclass(slots=True)
class PressureRun:
    """One seed of one arm. `counts`: growth of the server's counters; `hidden_blocks`: the gauge, as sampled."""

    prompt: int
    output: int
    answers: list[RequestRecord] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    hidden_blocks: list[float] = field(default_factory=list)

    @property
    def recomputed(self) -> float:
        """Tokens computed beyond one pass over every answered request (of the last token nothing is computed)."""
        computed = self.counts["prefill_tokens"] + self.counts["decode_tokens"]
        return computed - sum(answer.ok for answer in self.answers) * (self.prompt + self.output - 1)


def model_folder(folder: Path, model: str) -> tuple[str, ...]:
    """Fill `folder` with the model's files; the server's flags for them."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PACKAGED / name, folder / name)
    if model != "demo":
        fewer = json.loads((PACKAGED / "config.json").read_bytes()) | {"num_key_value_heads": GQA_HEADS}
        (folder / "config.json").write_text(json.dumps(fewer))
        return ("--load-format=dummy",)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(PACKAGED / name, folder / name)
    return ("--load-format=safetensors",)


def counters(page: str) -> dict[str, float]:
    """Return the counters of a page of /metrics, summed over labels, cache units by operation; 0 for missing ones."""
    names = {name: f"tidemill_{name}_total" for name in COUNTED}
    names |= {name: f'tidemill_cache_units_total{{operation="{name}"}}' for name in MOVED}
    return {name: read_metric(page, metric, missing=0.0) for name, metric in names.items()}


async def run_seed(url: str, arrivals: Sequence[float], seed: int, prompt: int, output: int) -> PressureRun:
    """Send what arrives, wait for every answer, read the counters before and after."""
    await wait_quiet(url)
    watch = Watch((HIDDEN,), SAMPLE_SECONDS)
    before = counters(await metrics_page(url))
    online = fixed(1, prompt, output).at(np.asarray(arrivals, dtype=np.float64))
    records = await run(plan_for(url, seed, online=online), watch)
    after = counters(await metrics_page(url))
    counts = {name: after[name] - before[name] for name in after}
    hidden = [value for _, value in watch.seen.get(HIDDEN, [])]
    return PressureRun(prompt, output, records.requests, counts, hidden)


def blocks_of(folder: Path, blocks: int, flags: Sequence[str]) -> int:
    """Blocks of an arm's pool, in the bytes of `blocks` blocks of 16 bits."""
    spec = load_spec(folder)
    plain, small = (
        slice_elements(BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, kind) * kind.itemsize
        for kind in (torch.bfloat16, torch.int8)
    )
    return blocks * plain // small if INT8 in flags else blocks


def answered_rate(burst: PressureRun) -> float:
    """Answers a second of requests that came at once."""
    ended = [answer.chunk_at[-1] for answer in burst.answers if answer.ok]
    if not ended:
        raise SystemExit("no request of the burst was answered; give --rate")
    return len(ended) / max(ended)


TABLE = Table({
    "arm": "44", "requests": "d", "refused": "d", "attained": ".1%", "low": ".1%", "high": ".1%", "TTFT P50": "9.0f",
    "P99 ms": "8.0f", "TBT P50": "8.1f", "TBT P99": "8.1f", "preempted": ".0f", "recomputed": ".0f", "out": "6.0f",
    "in": "6.0f", "restored": ".0f", "hidden": "7.1f",
})  # fmt: skip


def show(name: str, runs: Sequence[PressureRun], ttft: float, tbt: float) -> str:
    """A line of the table, latencies and attainment (with its 95 % interval) pooled over the runs, counts added up;
    `hidden`: blocks that run from hidden state, on average."""
    answers = [answer for run in runs for answer in run.answers]
    firsts = [answer.ttft for answer in answers if answer.ttft is not None]
    gaps = np.concatenate([answer.gaps() for answer in answers])
    slo = Slo((("ttft", ttft), ("tbt_p99", tbt)))
    good = sum(map(slo.good, answers))
    shares = (good / len(answers), *wilson(good, len(answers)))
    counts = {key: sum(run.counts[key] for run in runs) for key in runs[0].counts}
    sampled = [value for run in runs for value in run.hidden_blocks]
    times = [percentile(values, rank) * 1e3 for values in (firsts, gaps) for rank in (50, 99)]
    recomputed = sum(run.recomputed for run in runs)
    moved = [counts[key] for key in MOVED]
    hidden = sum(sampled) / max(len(sampled), 1)
    refused = len(answers) - len(firsts)
    return TABLE.line(name, len(answers), refused, *shares, *times, counts["preemptions"], recomputed, *moved, hidden)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pressure", description=__doc__)
    parser.add_argument("--virtual", action="store_true", help="all arms on the virtual clock of simulated GPUs")
    parser.add_argument("--model", choices=MODELS, action="append", help="repeatable (default: all)")
    parser.add_argument("--arms", help="separated by ';', as 'goodput, int8; fcfs, 16 bits, host' (default: all)")
    parser.add_argument("--rate", type=float, nargs="+", help="requests a second (default: by --load)")
    parser.add_argument(
        "--load", type=float, nargs="+", default=[1.2, 1.8], help="multiples of a burst's answers/s (default: 1.2 1.8)"
    )
    parser.add_argument("--requests", type=int, help="a seed, rate and arm (default: 120, --virtual 400)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lengths", choices=("fixed", "chat"), help="chat: ShareGPT's spread (--virtual only)")
    parser.add_argument("--blocks", type=int, default=128, help="live: blocks of KV in the pool, 16 tokens each")
    parser.add_argument("--prompt", type=int, help=f"mean tokens (default: {TOKENS}, --virtual {VIRTUAL_TOKENS})")
    parser.add_argument("--output", type=int, help="the same for answers")
    parser.add_argument("--ttft", type=float, default=1.0, help="TTFT limit in seconds")
    parser.add_argument("--tbt", type=float, default=0.1, help="limit on the P99 of a request's gaps in seconds")
    parser.add_argument("--profile-seconds", type=float, default=8.0)
    args = parser.parse_args(argv)
    tokens = VIRTUAL_TOKENS if args.virtual else TOKENS
    args.prompt, args.output = args.prompt or tokens, args.output or tokens
    args.requests = args.requests or (400 if args.virtual else 120)
    known = [f"{policy}, {cache}" for policy, cache, _ in arms(MODELS[-1])] if args.virtual else list(ARMS)
    args.model = args.model or list(MODELS)
    args.arms = [arm.strip() for arm in args.arms.split(";")] if args.arms else known
    if unknown := set(args.arms).difference(known):
        parser.error(f"unknown arms {'; '.join(sorted(unknown))}; known: {'; '.join(known)}")
    if args.lengths == "chat" and not args.virtual:
        parser.error("--lengths chat needs --virtual")
    return args


def main(argv: list[str] | None = None) -> None:
    """Serve, send, print."""
    args = parse(argv)
    slo = f"ttft_p99={args.ttft * 1e3:g}ms,tbt_p99={args.tbt * 1e3:g}ms"
    print(f"pressure: requests of {args.prompt}/{args.output} tokens, SLO {slo}; {describe()}", flush=True)
    if args.virtual:
        run_virtual(args, SLO.parse(slo))
        return
    for model in args.model:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            flags = (
                *model_folder(folder, model),
                f"--slo={slo}",
                f"--profile-seconds={args.profile_seconds}",
                "--dtype=bfloat16",
                "--enable-prefix-caching",
                f"--max-model-len={args.prompt + args.output}",
                f"--state-dir={folder / 'state'}",
            )
            base = 1.0 if args.rate else burst_rate(args, folder, flags)
            rates = args.rate or [load * base for load in args.load]
            print(f"{model}: {' and '.join(f'{rate:.2f}' for rate in rates)} requests/s\n{TABLE.heading}", flush=True)
            for arm in args.arms:
                run_arm(args, folder, arm, flags, rates)


@contextmanager
def arm_server(args: argparse.Namespace, folder: Path, arm: str, flags: Sequence[str]) -> Iterator[str]:
    """Serve an arm after a few requests that warm it up; yields the URL."""
    pool = f"--num-gpu-blocks-override={blocks_of(folder, args.blocks, ARMS[arm])}"
    with server(folder, 0, *flags, pool, *ARMS[arm]) as url:
        asyncio.run(run_seed(url, [0.2 * i for i in range(8)], 0, args.prompt, args.output))
        yield url


def burst_rate(args: argparse.Namespace, folder: Path, flags: Sequence[str]) -> float:
    """Return the answers a second of a burst, by arrival with a cache of 16 bits."""
    with arm_server(args, folder, FIRST, flags) as url:
        return answered_rate(asyncio.run(run_seed(url, [0.0] * BURST, 100, args.prompt, args.output)))


def run_arm(args: argparse.Namespace, folder: Path, arm: str, flags: Sequence[str], rates: Sequence[float]) -> None:
    """Run all seeds of an arm at each rate, and print a line for the cell."""
    with arm_server(args, folder, arm, flags) as url:
        for rate in rates:
            runs: list[PressureRun] = []
            for seed in range(1, args.seeds + 1):
                arrivals = schedule(constant_rate(rate), "poisson", stream(seed, "arrivals"), count=args.requests)
                runs.append(asyncio.run(run_seed(url, list(arrivals), seed, args.prompt, args.output)))
            print(show(f"{arm} at {rate:.2f}/s", runs, args.ttft, args.tbt), flush=True)
