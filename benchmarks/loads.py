"""Loads of the live benchmarks: plans of chats beside offline work, and one run of such a plan."""

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks import live
from benchmarks.live import Watch, plan_for, wait_quiet
from loadgen import arrivals as processes
from loadgen.arrivals import RateCurve
from loadgen.metrics import Slo, token_events
from loadgen.plan import Job, Plan, Windows
from loadgen.records import JobRecord, Records, RequestRecord
from loadgen.stats import stream
from loadgen.workloads import fixed

SMALL = "134.5M Llama"
ONLINE_PROMPT, ONLINE_OUTPUT = 128, 48
OFFLINE_PROMPT, OFFLINE_OUTPUT = 256, 64
OUTSTANDING = 24
"""Default number of offline clients."""
WARM_UP = 5.0
"""Seconds at the start of an arm that are not measured."""
LEARNING = 15.0
"""Seconds of the same load, with offline work beside it, before each arm."""
JOB_TOKENS_PER_SECOND = 6_000
"""A job has lines for this rate, and offline clients for ten times it, so that no job ends before its arm."""
JOB = "job"
TOKENS = "tidemill_offline_tokens_total"
"""The server's count of offline tokens (a prompt with its first token, then each token), as clients count them."""
DRAIN = 30.0
SETTLE = 1.0
"""Seconds between the start of competing processes and the measurement."""


@dataclass(slots=True)
class Run:
    """One arm with one seed: online requests by arrival; `offline` holds (time, tokens) as they were delivered.

    `offline` counts a prompt with its first token, `offline_output` only output tokens (empty for a batch job).
    `beside`: predicted seconds of offline work in steps with online work.
    """

    online: list[RequestRecord]
    offline: list[tuple[float, float]]
    seconds: float
    offline_output: list[tuple[float, float]] = field(default_factory=list)
    beside: float = 0.0

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
    """Return an SLO of the TTFT from the scheduled arrival and the P99 of a request's own gaps, in seconds."""
    return Slo((("ttft", ttft), ("tbt_p99", tbt)))


def poisson(curve: RateCurve, seconds: float, seed: int) -> list[float]:
    """Return the arrivals of one seed."""
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
    prompts: Sequence[int] = (ONLINE_PROMPT,),
    **settings: Any,
) -> Plan:
    """Return a plan of online arrivals (perhaps none) with `prompts` tokens in turn, beside offline work.

    The offline work is `outstanding` clients of a tier, one batch job (`JOB`) with lines for `job_rate` tokens/s, or
    none. `settings` are further settings of the plan.
    """
    lengths = fixed(len(prompts), 1, ONLINE_OUTPUT)
    online = replace(lengths, input_tokens=np.array(prompts)).at(np.array(arrivals)) if arrivals else None
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
    """Run one arm once the server is quiet by the metrics named in `quiet`. A job is uploaded inside the arm."""
    await wait_quiet(url, quiet)
    watch = Watch((TOKENS,), min(live.PAGE_SECONDS, seconds / live.LOOKS)) if tier == JOB else None
    used = await used_beside(url)
    records = await live.run(plan_arm(url, arrivals, seconds, tier, seed, **settings), watch)
    for job in records.jobs:
        check_job(job)
    online = [record for record in records.requests if record.service_class == "online"]
    online.sort(key=lambda record: record.index)
    used = await used_beside(url) - used
    if watch is not None:
        return Run(online, watch.grown(TOKENS), seconds, beside=used)
    return Run(online, delivered(records), seconds, output_of(records), used)


async def used_beside(url: str) -> float:
    """Return the server's predicted seconds of offline work in steps with online work, 0 for another server."""
    return live.read_metric(await live.metrics_page(url), "tidemill_leftover_used_seconds_total", missing=0.0)


def run_alone(
    serve: Callable[[], AbstractContextManager[str]],
    rate: float,
    arrivals: list[float],
    seconds: float,
    tier: str | None,
    seed: int,
    learning: float | None = None,
    **settings: Any,
) -> Run:
    """Run one arm on the server that `serve` yields, after `learning` seconds of the load."""
    with serve() as url:
        learn(url, rate, learning, **settings)
        return asyncio.run(run_arm(url, arrivals, seconds, tier, seed, **settings))


def learn(url: str, rate: float, seconds: float | None, **settings: Any) -> None:
    """Send `seconds` of the load (None: LEARNING) with offline work, so that the server learns it."""
    seconds = LEARNING if seconds is None else seconds
    if seconds > 0.0:
        warm = [i / rate for i in range(int(rate * seconds))]
        asyncio.run(run_arm(url, warm, seconds, "flex", 0, **settings))


def check_job(job: JobRecord) -> None:
    """Check that a job outlasted its arm and accounts for every line. Raise SystemExit otherwise."""
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


def output_events(record: RequestRecord) -> list[tuple[float, float]]:
    """Return (time, output tokens) of a request."""
    times, _, answer = token_events(record)
    return list(zip(times.tolist(), answer.tolist(), strict=True))


def judged(runs: Sequence[Run]) -> list[RequestRecord]:
    """Return the online requests that are measured."""
    return [answer for run in runs for answer in run.online if answer.scheduled_at >= WARM_UP]


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


@contextmanager
def restless(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` processes that compute all the time, each in a session of its own.

    Where the kernel shares the cores among sessions first (autogroups), processes of one session would count as one.
    """
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        time.sleep(SETTLE)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
