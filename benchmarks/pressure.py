"""A pool too small for its load, live: K and V alone, in 8 bits, the hybrid cache, and the host tier under the same
arrivals.

The packaged demo model (as many KV heads as heads), or one with half the KV heads (`--model gqa`, random weights),
which offers no hidden state. All pools take the same bytes, so that one of 8 bits has more blocks. Each arm has a
server of its own; every seed's requests arrive at the same times in each. Admitted are requests of a burst that ran at
once before the first was preempted. Attainment counts requests whose first token came within the TTFT limit and whose
nearest-rank P99 gap is within the TBT limit; those refused with 429 count as missed. Recomputed are the tokens that
the server computed beyond one pass over every answered request.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import percentile
from benchmarks.frame import Table
from benchmarks.live import PACKAGED, Watch, metrics_page, plan_for, read_metric, run, server, wait_quiet
from benchmarks.machine import describe
from engine.models.byte_cells import slice_elements
from engine.models.spec import load_spec
from loadgen.arrivals import constant_rate, schedule
from loadgen.metrics import Slo
from loadgen.records import RequestRecord
from loadgen.stats import stream
from loadgen.workloads import fixed

PROMPT, OUTPUT = 192, 192
BLOCK_SIZE = 16
INT8 = "--kv-cache-dtype=int8"
HOST = "--swap-space=0.25"
STORES = {"KV": (), "host": (HOST,), "KV8": (INT8,), "KV8 host": (HOST, INT8)}
ARMS = {
    f"{policy}, {store}": (f"--online-policy={policy}", *flags)
    for policy in ("fcfs", "apt", "goodput", "goodput-strict")
    for store, flags in STORES.items()
} | {"goodput-strict, hybrid": ("--online-policy=goodput-strict", "--overload=hidden")}
"""The arms: flags of their servers."""
GQA_HEADS = 2
"""KV heads of the model `gqa`, of four heads."""
SAMPLE_SECONDS = 0.5
BURST = 32
COUNTED = ("preemptions", "prefill_tokens", "decode_tokens")
MOVED = ("swap_out", "swap_in", "restore")
HIDDEN, RUNNING, PREEMPTED = "tidemill_hidden_blocks", "tidemill_requests_running", "tidemill_preemptions_total"


@dataclass(slots=True)
class PressureRun:
    """One seed of one arm. `counts`: growth of the server's counters; `hidden_blocks`: the gauge, as sampled;
    `admitted`: the most requests seen to run before one was preempted."""

    prompt: int
    output: int
    answers: list[RequestRecord] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    hidden_blocks: list[float] = field(default_factory=list)
    admitted: float = 0.0

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
    watch = Watch((HIDDEN, RUNNING, PREEMPTED), SAMPLE_SECONDS)
    before = counters(await metrics_page(url))
    online = fixed(1, prompt, output).at(np.asarray(arrivals, dtype=np.float64))
    records = await run(plan_for(url, seed, online=online), watch)
    after = counters(await metrics_page(url))
    counts = {name: after[name] - before[name] for name in after}
    hidden, running, preempted = ([value for _, value in watch.seen.get(name, [])] for name in watch.names)
    return PressureRun(prompt, output, records.requests, counts, hidden, most_before(running, preempted))


def most_before(running: Sequence[float], preempted: Sequence[float]) -> float:
    """The most that ran at once, of samples before the second counter began to grow."""
    return max((many for many, lost in zip(running, preempted, strict=True) if lost == preempted[0]), default=0.0)


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
    "arm": "34", "seed": ">4", "requests": "d", "refused": "d", "attained": ".1%", "TTFT P50": "9.0f", "P99 ms": "8.0f",
    "TBT P50": "8.1f", "TBT P99": "8.1f", "preempted": ".0f", "recomputed": ".0f", "out": "6.0f", "in": "6.0f",
    "restored": ".0f", "hidden": "7.1f",
})  # fmt: skip


def show(name: str, seed: str, runs: Sequence[PressureRun], ttft: float, tbt: float) -> str:
    """A line of the table, latencies and attainment pooled over the runs, counts added up; `hidden`: blocks that run
    from hidden state, on average."""
    answers = [answer for run in runs for answer in run.answers]
    firsts = [answer.ttft for answer in answers if answer.ttft is not None]
    gaps = np.concatenate([answer.gaps() for answer in answers])
    slo = Slo((("ttft", ttft), ("tbt_p99", tbt)))
    good = sum(map(slo.good, answers)) / len(answers)
    counts = {key: sum(run.counts[key] for run in runs) for key in runs[0].counts}
    sampled = [value for run in runs for value in run.hidden_blocks]
    times = [percentile(values, rank) * 1e3 for values in (firsts, gaps) for rank in (50, 99)]
    recomputed = sum(run.recomputed for run in runs)
    moved = [counts[key] for key in MOVED]
    hidden = sum(sampled) / max(len(sampled), 1)
    refused = len(answers) - len(firsts)
    return TABLE.line(
        name, seed, len(answers), refused, good, *times, counts["preemptions"], recomputed, *moved, hidden
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pressure", description=__doc__)
    parser.add_argument("--model", choices=("demo", "gqa"), default="demo")
    parser.add_argument("--rate", type=float, help="requests a second (default: by --load)")
    parser.add_argument(
        "--load", type=float, default=1.2, help="the rate as a multiple of the first arm's answers/s in a burst"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals, for each seed of each arm")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=128, help="blocks of KV in the pool, 16 tokens each")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--output", type=int, default=OUTPUT)
    parser.add_argument("--ttft", type=float, default=1.0, help="TTFT limit in seconds")
    parser.add_argument("--tbt", type=float, default=0.1, help="limit on the P99 of a request's gaps in seconds")
    parser.add_argument("--profile-seconds", type=float, default=8.0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Serve, send, print."""
    args = parse(argv)
    slo = f"ttft_p99={args.ttft * 1e3:g}ms,tbt_p99={args.tbt * 1e3:g}ms"
    print(
        f"pressure: {args.model}, requests of {args.prompt}/{args.output} tokens, {args.blocks * 16} tokens of cache, "
        f"SLO {slo}; {describe()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = (
            *model_folder(folder, args.model),
            f"--slo={slo}",
            f"--profile-seconds={args.profile_seconds}",
            "--dtype=bfloat16",
            f"--max-model-len={args.prompt + args.output}",
            f"--state-dir={folder / 'state'}",
        )
        found = {arm: run_arm(args, folder, arm, flags) for arm in ARMS}
    print(TABLE.heading)
    for arm, runs in found.items():
        print(show(arm, "all", runs, args.ttft, args.tbt))


def run_arm(args: argparse.Namespace, folder: Path, arm: str, flags: Sequence[str]) -> list[PressureRun]:
    """All seeds of an arm, a line for each."""
    runs: list[PressureRun] = []
    pool = f"--num-gpu-blocks-override={blocks_of(folder, args.blocks, ARMS[arm])}"
    with server(folder, 0, *flags, pool, *ARMS[arm]) as url:
        asyncio.run(run_seed(url, [0.2 * i for i in range(8)], 0, args.prompt, args.output))  # nothing is cold
        burst = asyncio.run(run_seed(url, [0.0] * BURST, 100, args.prompt, args.output))
        print(f"  {arm:22} {burst.admitted:.0f} of a burst of {BURST} admitted before the first preemption", flush=True)
        if args.rate is None:
            args.rate = args.load * answered_rate(burst)
            print(f"{args.rate:.2f} requests/s for {args.seconds:g} s", flush=True)
        for seed in range(1, args.seeds + 1):
            random = stream(seed, "arrivals")
            arrivals = schedule(constant_rate(args.rate), "poisson", random, duration=args.seconds)
            runs.append(asyncio.run(run_seed(url, list(arrivals), seed, args.prompt, args.output)))
            print("  " + show(arm, str(seed), runs[-1:], args.ttft, args.tbt), flush=True)
    return runs


if __name__ == "__main__":
    main()
