"""Co-location, live: the same online arrivals alone, beside offline work that competes, and beside ours.

Five arms, three seeds: (1) online only, (2) offline only, (3) naive mix - offline requests are sent with the same
priority -, (4) ours: they have `service_tier: "flex"`, (5) the offline side is one real batch job, a JSONL file
through /v1/files and /v1/batches. Online requests are judged by their TTFT from the scheduled arrival and the
nearest-rank P99 of their own gaps, pooled over the seeds and paired by request between arms. Every arm has a server of
its own; its first seconds do not count.
`--plot FILE.svg` adds a run with a sine-shaped online load and draws it.
"""

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import aiohttp
import orjson

from loadgen.bench.batch_job import JobClient, job_lines
from loadgen.bench.live import make_model_folder, server, wait_quiet
from loadgen.bench.machine import describe
from loadgen.bench.sine_plot import draw

ONLINE_PROMPT, ONLINE_OUTPUT = 128, 48
OFFLINE_PROMPT, OFFLINE_OUTPUT = 256, 64
OUTSTANDING = 24
WARM_UP = 5.0
"""Seconds of an arm that do not count."""
LEARNING = 15.0
"""Seconds of the same load, with offline work beside it, before each arm."""
JOB_TOKENS_PER_SECOND = 2_000
"""A job has lines for this rate, so that it does not end before its arm."""
JOB = "job"
TIERS = {"online only": None, "offline only": "flex", "naive mix": "default", "tidemill": "flex", "batch job": JOB}
"""The arms: how their offline work comes, None for without."""


@dataclass(slots=True)
class Answer:
    """One streamed request: seconds since the run's start; `tokens` are the arrival times of its tokens.

    A chunk of k tokens is one gap and k - 1 zeros. A token without text of its own has a chunk too, with its usage.
    """

    scheduled: float
    tokens: list[float] = field(default_factory=list)
    ok: bool = False

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.scheduled if self.tokens else math.inf

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]

    def good(self, ttft: float, tbt: float) -> bool:
        return self.ok and self.ttft <= ttft and percentile(self.gaps, 99) <= tbt


@dataclass(slots=True)
class Run:
    """One arm with one seed. `offline` holds (time, tokens) as they were delivered."""

    online: list[Answer] = field(default_factory=list)
    offline: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def offline_rate(self) -> float:
        window = [(at, tokens) for at, tokens in self.offline if WARM_UP <= at <= self.seconds]
        return sum(tokens for _, tokens in window) / (self.seconds - WARM_UP)


def percentile(values: list[float], rank: float) -> float:
    """Nearest rank; 0 for no values."""
    return sorted(values)[max(math.ceil(rank * len(values) / 100), 1) - 1] if values else 0.0


def poisson(rate: Callable[[float], float], top: float, seconds: float, seed: int) -> list[float]:
    """Arrivals of a Poisson process with a rate that changes over time, by thinning; `top` bounds the rate."""
    generator, at, arrivals = random.Random(seed), 0.0, []
    while (at := at + generator.expovariate(top)) < seconds:
        if generator.random() * top < rate(at):
            arrivals.append(at)
    return arrivals


def prompt_of(length: int, salt: int) -> list[int]:
    return [(salt * 7919 + 31 * i) % 40_000 + 5 for i in range(length)]


def completion_body(prompt: int, output: int, salt: int) -> dict[str, Any]:
    """A completion of exactly these lengths in tokens; no two salts share a prefix."""
    return {
        "model": "model",
        "prompt": prompt_of(prompt, salt),
        "max_tokens": output,
        "min_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
    }


class Client:
    """Sends requests to one server and stamps what comes back."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start

    async def stream(self, answer: Answer, salt: int, prompt: int, output: int, tier: str) -> None:
        body = {
            **completion_body(prompt, output, salt),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "service_tier": tier,
        }
        async with self._session.post(f"{self._url}/v1/completions", data=orjson.dumps(body)) as response:
            if response.status != 200:
                # Like any client it comes back when it is told to; at once, it would take the machine from the server.
                await asyncio.sleep(float(response.headers.get("retry-after", 1)))
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now, usage = self.now(), orjson.loads(line[6:])["usage"]
                    answer.tokens += [now] * (usage["completion_tokens"] - len(answer.tokens))
        answer.ok = len(answer.tokens) >= output

    async def online(self, run: Run, at: float, salt: int) -> None:
        await asyncio.sleep(max(0.0, at - self.now()))
        answer = Answer(at)
        run.online.append(answer)
        await self.stream(answer, salt, ONLINE_PROMPT, ONLINE_OUTPUT, "default")

    async def offline(self, run: Run, salt: int, tier: str) -> None:
        """One offline client: a request after the other until it is cancelled."""
        while True:
            answer = Answer(self.now())
            salt += 1000
            task = asyncio.create_task(self.stream(answer, salt, OFFLINE_PROMPT, OFFLINE_OUTPUT, tier))
            seen = 0
            try:
                await task
            finally:
                task.cancel()
                for index, at in enumerate(answer.tokens[seen:]):
                    run.offline.append((at, OFFLINE_PROMPT + 1 if index == 0 else 1))


def job_of(seconds: float, seed: int) -> bytes:
    """More lines than an arm of `seconds` can take."""
    count = math.ceil(seconds * JOB_TOKENS_PER_SECOND / (OFFLINE_PROMPT + OFFLINE_OUTPUT))
    return job_lines([completion_body(OFFLINE_PROMPT, OFFLINE_OUTPUT, 90_000_000 * seed + i) for i in range(count)])


@asynccontextmanager
async def offline_work(
    session: aiohttp.ClientSession, url: str, client: Client, run: Run, tier: str | None, seed: int, content: bytes
) -> AsyncIterator[None]:
    """The offline side of an arm, from now to the end of the block. A job is uploaded inside it: that is part of it."""
    tasks: list[asyncio.Task[None]] = []
    job = JobClient(session, url) if tier == JOB else None
    if job is not None:

        async def run_job() -> None:
            await job.submit(content)
            await job.follow(lambda tokens: run.offline.append((client.now(), tokens)))

        tasks = [asyncio.create_task(run_job())]
    elif tier is not None:
        salts = [50_000_000 + seed * 1_000_000 + i for i in range(OUTSTANDING)]
        tasks = [asyncio.create_task(client.offline(run, salt, tier)) for salt in salts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    if job is not None:
        if failures := [error for error in ended if isinstance(error, Exception)]:
            raise failures[0]
        await job.cancel()


async def run_arm(url: str, arrivals: list[float], seconds: float, offline_tier: str | None, seed: int) -> Run:
    """Online arrivals (perhaps none) beside `OUTSTANDING` offline clients of `offline_tier`, one batch job (`JOB`) or
    none (None)."""
    await wait_quiet(url)
    run = Run(seconds=seconds)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        content = job_of(seconds, seed) if offline_tier == JOB else b""
        client = Client(session, url)
        async with aiohttp.ClientSession() as plain, offline_work(plain, url, client, run, offline_tier, seed, content):
            tasks = [asyncio.create_task(client.online(run, at, seed * 10_000 + i)) for i, at in enumerate(arrivals)]
            if tasks:
                await asyncio.wait(tasks, timeout=seconds + 30)
            await asyncio.sleep(max(0.0, seconds - client.now()))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    run.online.sort(key=lambda answer: answer.scheduled)
    return run


def summarise(name: str, runs: list[Run], ttft: float, tbt: float) -> None:
    answers = [answer for run in runs for answer in run.online if answer.scheduled >= WARM_UP]
    ttfts = [answer.ttft for answer in answers if answer.tokens]
    gaps = [gap for answer in answers for gap in answer.gaps]
    good = mean(answer.good(ttft, tbt) for answer in answers) if answers else math.nan
    cells = [percentile(ttfts, 50), percentile(ttfts, 99), percentile(gaps, 50), percentile(gaps, 99)]
    offline = mean(run.offline_rate for run in runs)
    print(
        f"{name:14} {len(answers):7d}  {cells[0] * 1e3:9.0f} {cells[1] * 1e3:9.0f} {cells[2] * 1e3:9.1f} "
        f"{cells[3] * 1e3:9.1f} {good:11.1%} {offline:12.0f}",
        flush=True,
    )


def paired_bound(ours: list[Run], alone: list[Run], ttft: float, tbt: float) -> tuple[float, float]:
    """(mean, lower 95 % bound) of attainment(ours) - attainment(alone), paired by request."""
    pairs = [
        float(a.good(ttft, tbt)) - float(b.good(ttft, tbt))
        for left, right in zip(ours, alone, strict=True)
        for a, b in zip(left.online, right.online, strict=True)
        if a.scheduled >= WARM_UP
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
) -> Run:
    """One arm against a server of its own: what the keeper learns from one arm must not help or harm another."""
    with serve() as url:
        warm = [i / rate for i in range(int(rate * LEARNING))]
        asyncio.run(run_arm(url, warm, LEARNING, "flex", 0))  # nothing is cold, and the keeper has seen some steps
        return asyncio.run(run_arm(url, arrivals, seconds, tier, seed))


def compare(serve: Callable[[], AbstractContextManager[str]], args: argparse.Namespace) -> None:
    rate = args.rate
    arms: dict[str, list[Run]] = {name: [] for name in args.arms}
    for seed in range(1, args.seeds + 1):
        arrivals = poisson(lambda _t: rate, rate, args.seconds, seed)
        for name in arms:
            online = [] if name == "offline only" else arrivals
            arms[name].append(run_alone(serve, rate, online, args.seconds, TIERS[name], seed))
            summarise(f"  {name} {seed}", arms[name][-1:], args.ttft, args.tbt)
    print(
        f"{'arm':14} {'online':>7}  {'TTFT P50':>9} {'P99 ms':>9} {'TBT P50':>9} {'P99 ms':>9} {'attainment':>11} "
        f"{'offline tok/s':>12}"
    )
    for name, runs in arms.items():
        summarise(name, runs, args.ttft, args.tbt)
    for name, beside in (("tidemill", "offline work"), ("batch job", "a batch job")):
        if name in arms and "online only" in arms:
            change, lower = paired_bound(arms[name], arms["online only"], args.ttft, args.tbt)
            print(f"attainment beside {beside} - alone: {change:+.2%}, lower 95 % bound {lower:+.2%}")
            if "offline only" in arms:
                print_harvest(arms["offline only"], arms[name], rate)


def print_harvest(alone: list[Run], mixed: list[Run], rate: float) -> None:
    """Offline tokens/s beside online work, of what the online work leaves of the machine's offline tokens/s."""
    most, got = (mean(run.offline_rate for run in runs) for runs in (alone, mixed))
    online = rate * (ONLINE_PROMPT + ONLINE_OUTPUT)
    left = most - online
    print(f"left over: {most:.0f} offline only - {online:.0f} online = {left:.0f} tok/s; harvested {got / left:.0%}")


def arms_of(text: str) -> tuple[str, ...]:
    """Names of arms, separated by commas, in the order in which they run."""
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in TIERS]:
        raise argparse.ArgumentTypeError(f"no such arm: {', '.join(unknown)} (there are {', '.join(TIERS)})")
    return names


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench.colocation", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.5, help="online requests a second")
    parser.add_argument("--seconds", type=float, default=75.0, help="length of one arm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ttft", type=float, default=1.0, help="TTFT limit in seconds")
    parser.add_argument("--tbt", type=float, default=0.1, help="limit on the P99 of a request's gaps in seconds")
    parser.add_argument("--fill-policy", default="tidemill", choices=("tidemill", "hygen"))
    parser.add_argument("--arms", type=arms_of, default=tuple(TIERS), help=f"some of {', '.join(TIERS)} (default: all)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw a run with a sine-shaped online load")
    args = parser.parse_args(argv)
    slo = f"ttft_p99={args.ttft * 1e3:g}ms,tbt_p99={args.tbt * 1e3:g}ms"
    print(
        f"co-location: random 134.5 M Llama, SLO {slo}, {args.rate} online requests/s of "
        f"{ONLINE_PROMPT}/{ONLINE_OUTPUT}, {OUTSTANDING} offline clients of "
        f"{OFFLINE_PROMPT}/{OFFLINE_OUTPUT}; {describe()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder)
        flags = ("--slo", slo, "--fill-policy", args.fill_policy, "--profile-dir", name)

        def serve() -> AbstractContextManager[str]:
            return server(folder, 0, *flags, "--state-dir", str(folder / "state"))

        if args.plot is None:
            compare(serve, args)
            return
        period = args.seconds / 3

        def sine(t: float) -> float:
            return float(args.rate) * (1 + math.sin(2 * math.pi * t / period))

        arrivals = poisson(sine, 2 * args.rate, args.seconds, 1)
        run = run_alone(serve, args.rate, arrivals, args.seconds, "flex", 1)
        summarise("sine", [run], args.ttft, args.tbt)
        args.plot.write_text(draw(run.offline, sine, run.seconds))


if __name__ == "__main__":
    main()
