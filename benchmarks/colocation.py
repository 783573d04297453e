"""Co-location, live: the same online arrivals alone, beside offline work that competes, and beside ours.

Five arms, three seeds: (1) online only, (2) offline only, (3) naive mix - offline requests are sent with the same
priority -, (4) ours: they have `service_tier: "flex"`, (5) the offline side is one real batch job, a JSONL file
through /v1/files and /v1/batches. Online requests are judged by their TTFT from the scheduled arrival and the
nearest-rank P99 of their own gaps, pooled over the seeds and paired by request between arms. Every arm has a server of
its own; its first seconds do not count.
`--plot FILE.svg` makes one run with a sine-shaped online load instead and draws it; `--steps`, `--alternate` and
`--disturb` are other benchmarks, of `benchmarks.steps`, `benchmarks.alternate` and `benchmarks.disturbance`.
"""

import argparse
import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks import live
from benchmarks.colocation_plot import draw, output_events
from benchmarks.figures import percentile
from benchmarks.frame import Table
from benchmarks.gpu.setup import SHAPES
from benchmarks.live import CONFIG, Watch, make_model_folder, plan_for, server, wait_quiet
from benchmarks.machine import describe
from loadgen import arrivals as processes
from loadgen.arrivals import RateCurve, constant_rate
from loadgen.metrics import Slo, token_events
from loadgen.plan import Job, Plan, Windows
from loadgen.records import JobRecord, Records, RequestRecord
from loadgen.stats import stream
from loadgen.workloads import fixed

ONLINE_PROMPT, ONLINE_OUTPUT = 128, 48
OFFLINE_PROMPT, OFFLINE_OUTPUT = 256, 64
OUTSTANDING = 24
WARM_UP = 5.0
"""Seconds of an arm that do not count."""
LEARNING = 15.0
"""Seconds of the same load, with offline work beside it, before each arm."""
JOB_TOKENS_PER_SECOND = 6_000
"""A job has lines for this rate, and offline clients for ten times it, so that none ends before its arm."""
JOB = "job"
SMALL = "134.5M Llama"
_IDS = {"torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
FORMS = ("tbt_p99", "tbt_mean", "5%")
"""Forms of the SLO that `--steps` compares."""
TOKENS = "tidemill_offline_tokens_total"
"""The server's count of offline tokens (a prompt with its first token, then each token), as clients count them."""
DRAIN = 30.0
TIERS = {"online only": None, "offline only": "flex", "naive mix": "default", "tidemill": "flex", "batch job": JOB}
"""The arms: how their offline work comes, None for without."""

TABLE = Table({
    "arm": "14", "online": "7d", "TTFT P50": "9.0f", "P99 ms": "9.0f", "TBT P50": "9.1f", "TBT P99": "9.1f",
    "attainment": "11.1%", "lines/s": "8.2f", "output tok/s": ".0f", "prompt tok/s": ".0f",
})  # fmt: skip


@dataclass(slots=True)
class Run:
    """One arm with one seed: online requests by arrival; `offline` holds (time, tokens) as they were delivered.

    `offline` counts a prompt with its first token, `offline_output` only output tokens (empty for a batch job).
    """

    online: list[RequestRecord]
    offline: list[tuple[float, float]]
    seconds: float
    offline_output: list[tuple[float, float]] = field(default_factory=list)

    @property
    def offline_rate(self) -> float:
        """Return prompt and output tokens/s."""
        window = [tokens for at, tokens in self.offline if WARM_UP <= at <= self.seconds]
        return sum(window) / (self.seconds - WARM_UP)

    @property
    def offline_lines(self) -> float:
        """Return offline requests/s, each of OFFLINE_PROMPT and OFFLINE_OUTPUT tokens."""
        return self.offline_rate / (OFFLINE_PROMPT + OFFLINE_OUTPUT)


def slo_of(ttft: float, tbt: float) -> Slo:
    """TTFT from the scheduled arrival and the P99 of a request's own gaps, seconds."""
    return Slo((("ttft", ttft), ("tbt_p99", tbt)))


def poisson(curve: RateCurve, seconds: float, seed: int) -> list[float]:
    """Arrivals of one seed."""
    return list(map(float, processes.schedule(curve, "poisson", stream(seed, "arrivals"), duration=seconds)))


def plan_arm(
    url: str,
    arrivals: Sequence[float],
    seconds: float,
    tier: str | None,
    seed: int,
    *,
    outstanding: int | None = None,
    job_rate: float | None = None,
    prompt: int = ONLINE_PROMPT,
    **settings: Any,
) -> Plan:
    """Return a plan of online arrivals (perhaps none) with `prompt` tokens each, beside offline work.

    The offline work is `outstanding` clients of a tier, one batch job (`JOB`) with lines for `job_rate` tokens/s, or
    none. `settings` are further settings of the plan.
    """
    online = fixed(1, prompt, ONLINE_OUTPUT).at(np.array(arrivals)) if arrivals else None
    rate = JOB_TOKENS_PER_SECOND if job_rate is None else job_rate
    lines = math.ceil(seconds * rate / (OFFLINE_PROMPT + OFFLINE_OUTPUT))
    job = Job(fixed(lines if tier == JOB else 10 * lines, OFFLINE_PROMPT, OFFLINE_OUTPUT))
    return plan_for(
        url,
        seed,
        online=online,
        jobs=() if tier is None else (job,),
        offline_mode="none" if tier is None else "batch" if tier == JOB else "flex",
        offline_concurrency=outstanding or OUTSTANDING,
        offline_tier=tier,
        windows=Windows(horizon=seconds, drain=DRAIN),
        **settings,
    )


async def run_arm(
    url: str,
    arrivals: Sequence[float],
    seconds: float,
    tier: str | None,
    seed: int,
    quiet: Sequence[str] = live.OPEN,
    **settings: Any,
) -> Run:
    """One arm on a server that is quiet before, by the metrics named so; a job is uploaded inside it: that is part of
    it."""
    await wait_quiet(url, quiet)
    watch = Watch((TOKENS,), live.look_interval(seconds)) if tier == JOB else None
    records = await live.run(plan_arm(url, arrivals, seconds, tier, seed, **settings), watch)
    for job in records.jobs:
        check_job(job)
    online = [record for record in records.requests if record.service_class == "online"]
    online.sort(key=lambda record: record.index)
    if watch is not None:
        return Run(online, watch.grown(TOKENS), seconds)
    return Run(online, delivered(records), seconds, output_of(records))


def check_job(job: JobRecord) -> None:
    """A job must outlast its arm and account for every line in the end; raises SystemExit."""
    if job.error:
        raise SystemExit(f"the batch job: {job.error}")
    if job.status == "completed":
        raise SystemExit("the batch job is completed before the arm's end; it needs more lines")
    if job.missing or job.duplicated or job.output_lines + job.error_lines + job.unexecuted != job.lines:
        raise SystemExit(f"lines of the batch job are missing: {job}")


def delivered(records: Records) -> list[tuple[float, float]]:
    """Return (time, tokens) of offline requests; a prompt counts with its first token."""
    found: list[tuple[float, float]] = []
    for record in records.requests:
        if record.service_class == "offline":
            times, prompt, answer = token_events(record)
            found += zip(times.tolist(), (prompt + answer).tolist(), strict=True)
    return found


def output_of(records: Records) -> list[tuple[float, float]]:
    """Return (time, output tokens) of offline requests."""
    offline = [record for record in records.requests if record.service_class == "offline"]
    return [event for record in offline for event in output_events(record)]


def judged(runs: Sequence[Run]) -> list[RequestRecord]:
    """The online requests that count."""
    return [answer for run in runs for answer in run.online if answer.scheduled_at >= WARM_UP]


def summarise(name: str, runs: list[Run], ttft: float, tbt: float) -> None:
    answers = judged(runs)
    ttfts = [answer.ttft for answer in answers if answer.ttft is not None]
    gaps = [gap for answer in answers for gap in answer.gaps()]
    good = mean(map(slo_of(ttft, tbt).good, answers)) if answers else math.nan
    times = [percentile(values, rank) * 1e3 for values in (ttfts, gaps) for rank in (50, 99)]
    lines = mean(run.offline_lines for run in runs)
    print(TABLE.line(name, len(answers), *times, good, lines, *split_of(lines)), flush=True)


def split_of(lines: float) -> tuple[float, float]:
    """Return the output tokens/s and the prompt tokens/s of offline lines/s."""
    return lines * OFFLINE_OUTPUT, lines * OFFLINE_PROMPT


def paired_bound(ours: list[Run], alone: list[Run], ttft: float, tbt: float) -> tuple[float, float]:
    """(mean, lower 95 % bound) of attainment(ours) - attainment(alone), paired by request."""
    good = slo_of(ttft, tbt).good
    pairs = [
        float(good(a)) - float(good(b))
        for left, right in zip(ours, alone, strict=True)
        for a, b in zip(left.online, right.online, strict=True)
        if a.scheduled_at >= WARM_UP
    ]
    spread = stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    return mean(pairs), mean(pairs) - 1.96 * spread


def run_alone(
    serve: Callable[[], AbstractContextManager[str]],
    rate: float,
    arrivals: list[float],
    seconds: float,
    tier: str | None,
    seed: int,
    **settings: Any,
) -> Run:
    """One arm against a server of its own: what the keeper learns from one arm must not help or harm another."""
    with serve() as url:
        warm = [i / rate for i in range(int(rate * LEARNING))]
        # nothing is cold, and the keeper has seen some steps
        asyncio.run(run_arm(url, warm, LEARNING, "flex", 0, **settings))
        return asyncio.run(run_arm(url, arrivals, seconds, tier, seed, **settings))


def compare(serve: Callable[[], AbstractContextManager[str]], args: argparse.Namespace) -> None:
    rate, settings = args.rate, {"outstanding": args.outstanding, "job_rate": args.job_rate}
    arms: dict[str, list[Run]] = {name: [] for name in args.arms}
    for seed in range(1, args.seeds + 1):
        arrivals = poisson(constant_rate(rate), args.seconds, seed)
        for name in arms:
            online = [] if name == "offline only" else arrivals
            arms[name].append(run_alone(serve, rate, online, args.seconds, TIERS[name], seed, **settings))
            summarise(f"  {name} {seed}", arms[name][-1:], args.ttft, args.tbt)
    print(TABLE.heading)
    for name, runs in arms.items():
        summarise(name, runs, args.ttft, args.tbt)
    for name, beside in (("tidemill", "offline work"), ("batch job", "a batch job")):
        if name in arms and "online only" in arms:
            change, lower = paired_bound(arms[name], arms["online only"], args.ttft, args.tbt)
            print(f"attainment beside {beside} - alone: {change:+.2%}, lower 95 % bound {lower:+.2%}")
            if "offline only" in arms:
                print_harvest(arms["offline only"], arms[name], rate)


def print_harvest(alone: list[Run], mixed: list[Run], rate: float) -> None:
    """Print the offline tokens/s beside online work as a share of the capacity that the online work leaves.

    All figures count prompt and output tokens.
    """
    most, got = (mean(run.offline_rate for run in runs) for runs in (alone, mixed))
    online = rate * (ONLINE_PROMPT + ONLINE_OUTPUT)
    left = most - online
    print(f"left over: {most:.0f} offline only - {online:.0f} online = {left:.0f} tok/s, prompts counted")
    print(f"harvested {got / left:.0%}")


def arms_of(text: str) -> tuple[str, ...]:
    """Names of arms, separated by commas, in the order in which they run."""
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in TIERS]:
        raise argparse.ArgumentTypeError(f"no such arm: {', '.join(unknown)} (there are {', '.join(TIERS)})")
    return names


def rates_of(text: str) -> tuple[float, ...]:
    """Rates of steps, separated by commas: 0 for one without online requests, but not all of them."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of rates such as 0.3,1,2,0.3") from None
    if not all(0.0 <= rate < math.inf for rate in rates) or not any(rates):
        raise argparse.ArgumentTypeError("rates are not negative, and one of them is positive")
    return rates


def forms_of(text: str) -> tuple[str, ...]:
    """Names of SLO forms, separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in FORMS]:
        raise argparse.ArgumentTypeError(f"no such form: {', '.join(unknown)} (there are {', '.join(FORMS)})")
    return names


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks colocation", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.5, help="online requests a second")
    parser.add_argument("--seconds", type=float, default=75.0, help="length of one arm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ttft", type=float, default=1.0, help="TTFT limit in seconds")
    parser.add_argument("--tbt", type=float, default=0.1, help="limit on the P99 of a request's gaps in seconds")
    parser.add_argument("--model", default=SMALL, choices=(SMALL, *SHAPES), help="shape of the random model")
    parser.add_argument("--outstanding", type=int, help=f"offline clients (default: {OUTSTANDING})")
    parser.add_argument(
        "--job-rate", type=float, help=f"tokens/s for which a job has lines (default: {JOB_TOKENS_PER_SECOND:,})"
    )
    parser.add_argument("--arms", type=arms_of, default=tuple(TIERS), help=f"some of {', '.join(TIERS)} (default: all)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw a run with a sine-shaped online load")
    parser.add_argument("--steps", type=rates_of, metavar="RATES", help="online requests/s, step by step: 0.3,1,2,0.3")
    parser.add_argument("--step-seconds", type=float, default=120.0, help="length of each step")
    parser.add_argument(
        "--slos", type=forms_of, default=FORMS, help=f"some of {', '.join(FORMS)} (default: all)".replace("%", "%%")
    )
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals of --steps and --alternate")
    parser.add_argument(
        "--alternate", type=float, metavar="SECONDS", help="offline work in every second spell of so many"
    )
    parser.add_argument("--disturb", action="store_true", help="recovery from slow steps, on the virtual clock")
    parser.add_argument("--slo", default="5%", help="of --alternate (default: 5%%)")
    parser.add_argument("--learning", type=float, default=120.0, help="seconds of --alternate that do not count")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where --steps writes steps.json and steps.md")
    args = parser.parse_args(argv)
    if args.job_rate is not None and args.job_rate <= 0.0:
        parser.error("--job-rate must be positive; --arms selects arms without offline work")
    if args.disturb:
        from benchmarks import disturbance

        disturbance.main()
        return
    if args.alternate is not None:
        from benchmarks import alternate  # it stands on this module

        about = (
            f"co-location by turns of {args.alternate:g} s: random {SMALL}, SLO {args.slo}, {args.rate} online "
            f"requests/s of {ONLINE_PROMPT}/{ONLINE_OUTPUT}, {OUTSTANDING} offline clients of "
            f"{OFFLINE_PROMPT}/{OFFLINE_OUTPUT}, seed {args.seed}; {describe()}"
        )
        print(about, flush=True)
        alternate.run(args.slo, args.rate, args.seconds, args.alternate, args.seed, args.learning)
        return
    if args.steps is not None:
        from benchmarks import steps  # it stands on this module

        about = (
            f"co-location in steps of {args.step_seconds:g} s: random 134.5 M Llama, {ONLINE_PROMPT}/{ONLINE_OUTPUT} "
            f"online beside a batch job of {OFFLINE_PROMPT}/{OFFLINE_OUTPUT}, seed {args.seed}; {describe()}"
        )
        print(about, flush=True)
        limits = (args.ttft, args.tbt)
        steps.run_steps(
            args.steps, args.step_seconds, args.slos, limits,
            seed=args.seed, job_rate=args.job_rate, output=args.output, about=about,
        )  # fmt: skip
        return
    slo = f"ttft_p99={args.ttft * 1e3:g}ms,tbt_p99={args.tbt * 1e3:g}ms"
    print(
        f"co-location: random {args.model}, SLO {slo}, {args.rate} online requests/s of "
        f"{ONLINE_PROMPT}/{ONLINE_OUTPUT}, {args.outstanding or OUTSTANDING} offline clients of "
        f"{OFFLINE_PROMPT}/{OFFLINE_OUTPUT}; {describe()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder, CONFIG if args.model == SMALL else SHAPES[args.model] | _IDS)
        flags = ("--slo", slo)

        def serve() -> AbstractContextManager[str]:
            return server(folder, 0, *flags, "--state-dir", str(folder / "state"))

        if args.plot is None:
            compare(serve, args)
            return
        curve = processes.sine(args.rate, args.rate, args.seconds / 3)
        settings = {"outstanding": args.outstanding, "job_rate": args.job_rate}
        run = run_alone(serve, args.rate, poisson(curve, args.seconds, 1), args.seconds, "flex", 1, **settings)
        print(TABLE.heading)
        summarise("sine", [run], args.ttft, args.tbt)
        args.plot.write_text(draw(run, args.ttft, args.tbt))


if __name__ == "__main__":
    main()
