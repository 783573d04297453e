"""Case 491 of llm-d's batch gateway on a live server, in the layout of its table.

A random Llama of 134.5 M parameters serves cycles of a burst and a quiet phase of chats beside three batch jobs. Rates
are a tenth of the issue's, lengths a quarter: chats of 128/32, lines of 128 tokens with log-normal answers of 125
tokens on average (standard deviation 100). Windows shrink with the run: 30 minutes, 2 hours and 24 hours become 1, 4
and 48 times its length. `S0`: chats alone. `S1`: no gateway, lines arrive as chats, evenly over the run. `tidemill`:
three jobs through /v1/batches. Each scenario has a server of its own and the same arrivals and lengths; the first fifth
of the cycles, at least one, warms up. Latency and batch throughput (prompt and output) are those from the first burst
after it to the end of the last burst.

The simulator's part is `python -m benchmarks experiments llmd-491`.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import colocation, live
from benchmarks.experiments.llmd import warm_up_cycles
from benchmarks.figures import percentile
from benchmarks.frame import Table
from benchmarks.machine import describe
from loadgen.arrivals import parse_curve
from loadgen.metrics import token_events
from loadgen.plan import Windows
from loadgen.records import JobRecord, RequestRecord
from loadgen.traces import build as build_trace
from loadgen.workloads import Options, Workload, build, clipped

SCENARIOS = ("S0", "S1", "tidemill")
SCALE = 0.25
"""Lengths here ÷ those of the issue."""
QUIET_SHARE = 1 / 15
"""Rate of the quiet phase ÷ that of the burst, as in the issue."""
LINES_PER_SECOND = 0.8
"""Lines of each job for a second of the run."""
LENGTHS = ("input_tokens", "output_tokens")
WINDOWS = (1, 4, 48)
"""Windows of the jobs, as multiples of the run."""
TABLE = Table({
    "scenario": "10", "TTFT p50 ms": "9.0f", "TTFT p95": "8.0f", "ITL p50": "7.1f", "ITL p95": "7.1f",
    "batch tok/s": ".0f", "batch SLO completion": ".1%", "chats": "5d", "lines done s": ".0f",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """`made`: chats and jobs. `seconds`: length of the run; `measured`: seconds of its start and end that count."""

    made: Workload
    seconds: float
    measured: tuple[float, float]
    seed: int


class Outcome(NamedTuple):
    """Chats, (time, tokens) of offline work as delivered, the share of lines within their windows, and their end."""

    chats: list[RequestRecord]
    tokens: list[tuple[float, float]]
    kept: float
    done: float


def make_case(rate: float, phase: float, cycles: int, lines: int | None, seed: int) -> Case:
    """Build the scaled workload: `rate` chats/s in a burst, phases of `phase` seconds, `lines` in each job."""
    seconds = 2 * phase * cycles
    steps = ",".join(f"{phase:g}@{each:g}" for each in (rate, QUIET_SHARE * rate) * cycles)
    count = round(LINES_PER_SECOND * seconds) if lines is None else lines
    options = Options(seed=seed, curve=parse_curve(f"steps:{steps}"), duration=seconds, offline_lines=count)
    made = clipped(build("llmd-491", options), SCALE, None)
    jobs = [
        replace(job, completion_window=f"{round(factor * seconds)}s")
        for job, factor in zip(made.jobs, WINDOWS, strict=True)
    ]
    measured = (2 * phase * warm_up_cycles(cycles), seconds - phase)
    return Case(replace(made, jobs=tuple(jobs)), seconds, measured, seed)


async def run_scenario(url: str, name: str, case: Case) -> Outcome:
    """Run a scenario on a quiet server, until the last line is done."""
    await live.wait_quiet(url)
    windows = Windows(horizon=case.seconds, drain=colocation.DRAIN)
    chats = live.plan_for(url, case.seed, online=case.made.online, windows=windows)
    if name == "S0":
        return Outcome((await live.run(chats)).requests, [], 1.0, 0.0)
    if name == "S1":
        jobs = [job.lines for job in case.made.jobs]
        inputs, outputs = (np.concatenate([getattr(job, key) for job in jobs]) for key in LENGTHS)
        rows = build_trace(np.linspace(0.0, case.seconds, len(inputs), endpoint=False), inputs, outputs)
        plan = live.plan_for(url, case.seed + 1, online=rows, windows=replace(windows, drain=WINDOWS[1] * case.seconds))
        found, lines = await asyncio.gather(live.run(chats), live.run(plan))
        return Outcome(found.requests, *judge_lines(lines.requests, case))
    watch = live.Watch((colocation.TOKENS,), live.look_interval(case.seconds))
    found = await live.run(replace(chats, jobs=case.made.jobs, offline_mode="batch", wait_offline=True), watch)
    kept = sum(map(lines_kept, found.jobs)) / sum(job.lines for job in found.jobs)
    return Outcome(found.requests, watch.grown(colocation.TOKENS), kept, max(job.polls[-1].at for job in found.jobs))


def judge_lines(lines: Sequence[RequestRecord], case: Case) -> tuple[list[tuple[float, float]], float, float]:
    """Return the tokens, the share within their windows and the end of lines that were sent as chats."""
    events: list[tuple[float, float]] = []
    for record in lines:
        times, prompt, answer = token_events(record)
        events += zip(times.tolist(), (prompt + answer).tolist(), strict=True)
    ends = {record.index: record.ended_at for record in lines if record.ok and record.ended_at is not None}
    size = len(case.made.jobs[0].lines)
    kept = sum(at <= WINDOWS[index // size] * case.seconds for index, at in ends.items())
    return events, kept / (size * len(case.made.jobs)), max(ends.values(), default=0.0)


def lines_kept(job: JobRecord) -> int:
    """Return the lines of a job with an answer; the server ends a job with its window. Raise SystemExit if one is
    missing or was returned twice."""
    if job.error or job.missing or job.duplicated:
        raise SystemExit(f"the batch job is damaged: {job}")
    return job.output_lines


def row(name: str, case: Case, outcome: Outcome) -> str:
    """Return the line of a scenario. Raise SystemExit if a chat has failed."""
    failed = [record for record in outcome.chats if not record.ok]
    if failed:
        raise SystemExit(f"{len(failed)} chats failed, the first with {failed[0].status}: {failed[0].error}")
    begin, end = case.measured
    chosen = [record for record in outcome.chats if begin <= record.scheduled_at <= end]
    ttfts = [record.ttft for record in chosen if record.ttft is not None]
    gaps = [gap for record in chosen for gap in record.gaps()]
    cells = [1e3 * percentile(values, rank) for values in (ttfts, gaps) for rank in (50, 95)]
    rate = sum(tokens for at, tokens in outcome.tokens if begin <= at <= end) / (end - begin)
    return TABLE.line(name, *cells, rate, outcome.kept, len(chosen), outcome.done)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks llmd-491", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.5, help="chats a second in a burst")
    parser.add_argument("--phase", type=float, default=90.0, help="seconds of a burst, and of the time between two")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--lines", type=int, help=f"lines of each job (default: {LINES_PER_SECOND:g} a second)")
    parser.add_argument("--slo", default="ttft_p99=500ms,tbt_p99=60ms", help="of the server (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if args.cycles < 2 or args.phase <= 0.0 or args.rate <= 0.0:
        parser.error("--cycles must be at least 2, --phase and --rate positive")
    case = make_case(args.rate, args.phase, args.cycles, args.lines, args.seed)
    print(
        f"llmd-491: random {colocation.SMALL}, {args.cycles} cycles of {args.phase:g} s at {args.rate:g} and "
        f"{args.phase:g} s at {QUIET_SHARE * args.rate:g} chats/s, three jobs of {len(case.made.jobs[0].lines)} lines, "
        f"SLO {args.slo}, seed {args.seed}; {describe()}\n{TABLE.heading}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        live.make_model_folder(folder)
        for name in SCENARIOS:
            flags = ("--slo", args.slo, "--max-queue-time", "none", "--state-dir", str(folder / f"state-{name}"))
            with live.server(folder, 0, *flags) as url:
                outcome = asyncio.run(run_scenario(url, name, case))
            print(row(name, case, outcome), flush=True)


if __name__ == "__main__":
    main()
