"""Three classes of chats on one server beside offline work, here and on vLLM with priorities.

`premium` (TTFT 300 ms, gaps 50 ms), `default` (1 s, 100 ms) and `agent` (the whole answer within 20 s) share a random
Llama of 134.5 M parameters, or of fewer `--layers`. This server gets the classes by `--slo`, and a batch job beside
them. vLLM gets one priority for each class (the lower value goes first) and clients of the lowest priority; `--tokens`
and `--rows` limit its steps. One server runs at a time, with the same arrivals and words.

A request is within its promise if the client measured its TTFT and the nearest-rank P99 of its gaps, or the time of the
whole answer, within the limits. `judged` and `missed` are the server's own counts. `--beside` starts
processes that compute all the time before each server, and ends them after it. The last line of this server's table
counts its budget searches and its new fits of the latency model.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import colocation, live
from benchmarks.frame import Table
from benchmarks.machine import describe
from benchmarks.neighbours import restless
from benchmarks.peers import finders
from benchmarks.peers.engine import Engine, start_all
from benchmarks.weights import LAYERS, make_checkpoint
from loadgen.arrivals import constant_rate
from loadgen.metrics import Slo
from loadgen.records import RequestRecord
from predictor.judge import aggregate
from predictor.slo import nearest_rank


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """Chats of a service class.

    Attributes:
        share: Share of all chats.
        prompt: Prompt tokens of each chat.
        slo: Their promise in the syntax of --slo.
        limits: The same in that of the load generator.
        priority: vLLM's priority of the class.
    """

    share: float
    prompt: int
    slo: str
    limits: tuple[str, ...]
    priority: int


CLASSES = {
    "default": ClassLoad(0.55, 150, "ttft_p99=1s,tbt_p99=100ms", ("ttft:1000", "tbt_p99:100"), 1),
    "premium": ClassLoad(0.38, 60, "premium:ttft_p99=300ms,tbt_p99=50ms", ("ttft:300", "tbt_p99:50"), 0),
    "agent": ClassLoad(0.07, 700, "agent:e2e_p99=20s", ("e2e:20000",), 2),
}
TABLE = Table({
    "class": "8", "requests": "8d", "refused": "7d", "within": "8.2%", "TTFT P99 ms": "11.0f", "TBT P99 ms": "10.1f",
    "e2e P99 s": "9.2f", "judged": "6.0f", "missed": "6.0f",
})  # fmt: skip
LEARNED = {
    "budget searches": 'tidemill_budget_searches_total{outcome="made"}',
    "failed": 'tidemill_budget_searches_total{outcome="failed"}',
    "new fits of the latency model": 'tidemill_model_refits_total{outcome="adopted"}',
    "not adopted": 'tidemill_model_refits_total{outcome="refused"}',
}
JUDGED = 'tidemill_slo_class_{kind}_requests_total{{slo_class="{name}"}}'

Records = dict[str, list[RequestRecord]]


async def send(
    url: str, engine: Engine, seconds: float, seed: int, args: argparse.Namespace, words: Any
) -> tuple[Records, float]:
    """Send chats of all classes beside offline work. Return the chats of each class, and the offline lines/s."""
    await live.wait_quiet(url, engine.open)
    settings: dict[str, Any] = {**engine.settings(), "source": words}
    runs = []
    for number, (name, load) in enumerate(CLASSES.items()):
        arrivals = colocation.poisson(constant_rate(args.rate * load.share), seconds, seed + number)
        body = {"tidemill": {"class": name}} if engine.offline is None else {"priority": load.priority}
        own = {**settings, "prompt": load.prompt, "extra_body": body}
        runs.append(live.run(colocation.plan_arm(url, arrivals, seconds, None, seed + number, **own)))
    lines = 0.0
    if args.job_rate > 0.0:
        tier = colocation.JOB if engine.offline is None else "default"
        job = colocation.run_arm(url, [], seconds, tier, seed, quiet=(), job_rate=args.job_rate, **settings)
        beside, found = await asyncio.gather(job, asyncio.gather(*runs))
        lines = beside.offline_lines
    else:
        found = await asyncio.gather(*runs)
    return {name: records.requests for name, records in zip(CLASSES, found, strict=True)}, lines


async def judged(url: str, engine: Engine) -> dict[str, list[float]]:
    """Return the requests of each class that the server has judged as kept and as missed; zeros for another server."""
    if engine.offline is not None:
        return {name: [0.0, 0.0] for name in CLASSES}
    page = await live.metrics_page(url)
    return {
        name: [live.read_metric(page, JUDGED.format(kind=kind, name=name)) for kind in ("good", "bad")]
        for name in CLASSES
    }


def show(name: str, records: Sequence[RequestRecord], good: float, bad: float) -> str:
    """Return the line of a class."""
    if not records:
        return f"{name}: no chat came"
    kept = [Slo.parse(CLASSES[name].limits).good(record) for record in records]
    ends = [record.e2e for record in records if record.e2e is not None]
    spans = [(record.ttft, record.gaps().tolist()) for record in records if record.ttft is not None]
    values = aggregate(spans, ("ttft_p99", "tbt_p99"))
    cells = (values["ttft_p99"] * 1e3, values["tbt_p99"] * 1e3, nearest_rank(ends, 99), good + bad, bad)
    refused = sum(record.status == 429 for record in records)
    return TABLE.line(name, len(records), refused, sum(kept) / len(kept), *cells)


async def learned(url: str) -> str:
    """Return a line with the searches and fits of this server since its start."""
    page = await live.metrics_page(url)
    return ", ".join(f"{live.read_metric(page, metric):.0f} {name}" for name, metric in LEARNED.items())


def measure(engine: Engine, url: str, args: argparse.Namespace, words: Any) -> None:
    """Measure an engine after a minute of the same load, and print its table."""
    asyncio.run(send(url, engine, args.learning, args.seed + 1000, args, words))
    before = asyncio.run(judged(url, engine))
    found, lines = asyncio.run(send(url, engine, args.seconds, args.seed, args, words))
    after = asyncio.run(judged(url, engine))
    print(f"{engine.name} {engine.version}\n{TABLE.heading}")
    for name, records in found.items():
        print(show(name, records, *(late - early for late, early in zip(after[name], before[name], strict=True))))
    output, prompt = colocation.split_of(lines)
    print(f"{lines:.2f} offline lines/s, {output:.0f} output tok/s, {prompt:.0f} prompt tok/s", flush=True)
    if engine.offline is None:
        print(asyncio.run(learned(url)), flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks classes", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.0, help="chats a second, all classes together")
    parser.add_argument("--seconds", type=float, default=600.0, help="length of one arm")
    parser.add_argument("--learning", type=float, default=60.0, help="seconds of the same load before each arm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--job-rate", type=float, default=2_500.0, help="tokens/s for which the job has lines; 0: no job"
    )
    parser.add_argument("--beside", type=int, default=0, help="processes that compute all the time")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model, fewer on a slow machine")
    parser.add_argument("--tokens", type=int, default=128, help="vLLM's tokens a step")
    parser.add_argument("--rows", type=int, default=16, help="vLLM's rows a step")
    parser.add_argument("--only-vllm", action="store_true", help="measure vLLM alone")
    finders.add_flags(parser, ["vllm"])
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve, send, print."""
    args = parse(argv)
    shape = f"{colocation.OFFLINE_PROMPT}/{colocation.OFFLINE_OUTPUT}"
    model = f"{args.layers} layers in {args.dtype}, beside {args.beside} busy processes"
    print(f"three classes at {args.rate:g} chats/s beside {shape} lines, {model}; {describe()}", flush=True)
    flags = [word for load in CLASSES.values() for word in ("--slo", load.slo)]
    engines = [] if args.only_vllm else [finders.tidemill(args.threads, args.dtype, *flags)]
    if args.vllm:
        engines.append(finders.vllm(args.vllm, args.threads, args.dtype, tokens=args.tokens, rows=args.rows))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        words = make_checkpoint(folder, args.dtype, args.layers)
        for engine in engines:
            with restless(args.beside), ExitStack() as stack:
                for _, served in start_all([engine], folder, stack):
                    measure(engine, served.url, args, words)


if __name__ == "__main__":
    main()
