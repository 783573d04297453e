"""Speculation on and off: answers from the prompt, free chat, a batch job of similar lines, and chats beside a job.

The model is that of `copying_model`: it was trained to use its prompt's words, and its steps take as long as those of
a Llama of 134 M parameters. Arms take turns, each on a server of its own, with the same requests.

- grounded: quotes, excerpts, rewritten text, renamed code and JSON, one request after the other, greedy
- chat: questions without a text, one after the other, temperature 1
- job: a batch of `--lines` forms of one kind
- beside: chats that arrive at random beside such a job; `kept` is the share with TTFT and TBT within the SLO

Speculation must not change answers; `changed` counts answers that differ from the first arm of the round. In bfloat16
an answer may differ where two logits are nearly equal.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from benchmarks.copying_tasks import GROUNDED, question, ticket
from benchmarks.frame import Arm, Table, compare
from benchmarks.live import ANSWER_SECONDS, metrics_page, read_metric, wait_quiet
from benchmarks.loads import poisson, slo_of
from benchmarks.machine import describe
from benchmarks.peers import finders
from loadgen.arrivals import constant_rate
from loadgen.client import TERMINAL, Client, create, expect, job_lines, upload
from loadgen.plan import Target
from loadgen.records import RequestRecord

ARMS = {name: Arm((f"--speculation={name}",)) for name in ("on", "off")}
CHAT = "/v1/chat/completions"
TTFT, TBT = 1.5, 0.15
MOST_TOKENS = 400
POLL = 0.1
STEPS, OFFLINE_TOKENS = "tidemill_steps_total", "tidemill_offline_tokens_total"

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a round: bodies of one stream each, and arrivals of chats in seconds."""

    grounded: list[Body]
    chat: list[Body]
    lines: list[Body]
    arrivals: list[float]
    seconds: float


@dataclass(frozen=True, slots=True)
class Spell:
    """Requests one after the other or together: seconds, output tokens, model steps and answers in the order asked."""

    seconds: float
    tokens: int
    steps: int
    answers: list[str]

    @property
    def rate(self) -> float:
        """Output tokens/s."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Run:
    """One arm in one round. `kept`: share of chats beside the job within the SLO; `offline`: tokens/s beside them."""

    grounded: Spell
    chat: Spell
    job: Spell
    kept: float
    offline: float

    @property
    def answers(self) -> list[str]:
        """All answers that are compared between arms."""
        return [*self.grounded.answers, *self.chat.answers, *self.job.answers]


def body_of(text: str, **fields: Any) -> Body:
    """Return the body of a chat completion."""
    return {
        "model": "model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MOST_TOKENS,
        "temperature": 0.0,
        **fields,
    }


def make_load(options: argparse.Namespace, seed: int) -> Load:
    """Draw the requests of a round."""
    rng = random.Random(f"speculation {seed}")
    tasks = list(GROUNDED.values())
    return Load(
        [body_of(tasks[number % len(tasks)](rng)[0]) for number in range(options.requests)],
        [body_of(question(rng), temperature=1.0, seed=number) for number in range(3 * options.requests)],
        [body_of(ticket(rng)[0]) for _ in range(options.lines)],
        poisson(constant_rate(options.rate), options.seconds, seed),
        options.seconds,
    )


async def timed(url: str, work: Callable[[], Any]) -> Spell:
    """Run `work`, which returns (answer, tokens) pairs, on a quiet server."""
    await wait_quiet(url)
    before = read_metric(await metrics_page(url), STEPS)
    begin = time.monotonic()
    found = await work()
    seconds = time.monotonic() - begin
    steps = read_metric(await metrics_page(url), STEPS) - before
    return Spell(seconds, sum(tokens for _, tokens in found), int(steps), [answer for answer, _ in found])


def answer_of(body: Any) -> tuple[str, int]:
    """Return the text and the tokens of a chat completion."""
    return body["choices"][0]["message"]["content"] or "", body["usage"]["completion_tokens"]


async def one_stream(client: Client, bodies: Sequence[Body]) -> list[tuple[str, int]]:
    """Ask one after the other."""
    return [answer_of(await expect(client, "POST", CHAT, json=body)) for body in bodies]


async def start_job(client: Client, bodies: Sequence[Body]) -> str:
    """Create a batch job and return its id."""
    file_id = await upload(client, job_lines(bodies, CHAT, 0), "job.jsonl")
    return str((await create(client, file_id, CHAT, "24h"))["id"])


async def end_of(client: Client, job: str) -> dict[str, Any]:
    while (batch := await expect(client, "GET", f"/v1/batches/{job}"))["status"] not in TERMINAL:  # noqa: ASYNC110
        await asyncio.sleep(POLL)
    return batch


async def whole_job(client: Client, bodies: Sequence[Body]) -> list[tuple[str, int]]:
    """Run a job and return the answers in the order of its lines."""
    batch = await end_of(client, await start_job(client, bodies))
    if batch["status"] != "completed" or batch["request_counts"]["completed"] != len(bodies):
        raise SystemExit(f"the batch job ended as {batch['status']}: {batch['request_counts']}")
    _, data = await client.raw("GET", f"/v1/files/{batch['output_file_id']}/content")
    rows = sorted(map(json.loads, data.splitlines()), key=lambda row: int(row["custom_id"].partition("-")[2]))
    return [answer_of(row["response"]["body"]) for row in rows]


async def beside(url: str, client: Client, load: Load) -> tuple[float, float]:
    """Send chats at their times beside a job that lasts. Return the share within the SLO, and offline tokens/s."""
    await wait_quiet(url)
    job = await start_job(client, load.lines * 20)
    while not read_metric(await metrics_page(url), OFFLINE_TOKENS, missing=0.0):  # noqa: ASYNC110
        await asyncio.sleep(POLL)
    before, start = read_metric(await metrics_page(url), OFFLINE_TOKENS), time.monotonic()
    pool = [*load.grounded, *load.chat]
    records = [RequestRecord(i, "online", at, 0, MOST_TOKENS) for i, at in enumerate(load.arrivals)]

    async with Client(Target(url, endpoint=CHAT, silent_tokens=True), lambda: time.monotonic() - start) as chats:

        async def send(record: RequestRecord) -> None:
            await asyncio.sleep(start + record.scheduled_at - time.monotonic())
            usage = {"include_usage": True, "continuous_usage_stats": True}
            body = {**pool[record.index * 7 % len(pool)], "stream": True, "stream_options": usage}
            await chats.send(orjson.dumps(body), record)

        sent = [asyncio.create_task(send(record)) for record in records]
        await asyncio.sleep(start + load.seconds - time.monotonic())
        offline = (read_metric(await metrics_page(url), OFFLINE_TOKENS) - before) / load.seconds
        await asyncio.gather(*sent)
    await expect(client, "POST", f"/v1/batches/{job}/cancel")
    if (await end_of(client, job))["status"] == "completed":
        raise SystemExit("the batch job ended before the chats; it needs more lines")
    return sum(map(slo_of(TTFT, TBT).good, records)) / len(records), offline


async def measure(url: str, load: Load) -> Run:
    """Run all parts of a round against one server."""
    async with Client(Target(url, timeout=ANSWER_SECONDS), time.monotonic) as client:
        await one_stream(client, load.chat[-2:])  # warm-up
        grounded = await timed(url, lambda: one_stream(client, load.grounded))
        chat = await timed(url, lambda: one_stream(client, load.chat))
        job = await timed(url, lambda: whole_job(client, load.lines))
        return Run(grounded, chat, job, *await beside(url, client, load))


TABLE = Table({
    "arm": "4", "grounded tok/s": ".1f", "tok/step": ".2f", "chat tok/s": ".1f", "per step": ".2f",
    "job lines/s": ".2f", "a step": ".2f", "kept": "7.1%", "offline tok/s": ".0f",
})  # fmt: skip


def show(arm: str, runs: Sequence[Run]) -> str:
    """Return a line of the table: medians of the rounds."""
    cells: list[float] = []
    for part in ("grounded", "chat", "job"):
        spells: list[Spell] = [getattr(run, part) for run in runs]
        unit = [len(each.answers) / each.seconds if part == "job" else each.rate for each in spells]
        cells += [median(unit), median(each.tokens / each.steps for each in spells)]
    return TABLE.line(arm, *cells, median(run.kept for run in runs), median(run.offline for run in runs))


def ratios(found: dict[str, list[Run]]) -> str:
    """Return what speculation changes, paired by round, and the number of answers that differ."""
    pairs = list(zip(found["on"], found["off"], strict=True))
    parts: dict[str, Callable[[Run], float]] = {
        "grounded": lambda run: run.grounded.rate,
        "chat": lambda run: run.chat.rate,
        "job": lambda run: 1.0 / run.job.seconds,
        "offline beside chats": lambda run: run.offline,
    }
    factors = {name: median(of(on) / of(off) for on, off in pairs) for name, of in parts.items()}
    kept = 100 * median(on.kept - off.kept for on, off in pairs)
    changed = sum(a != b for on, off in pairs for a, b in zip(on.answers, off.answers, strict=True))
    total = sum(len(on.answers) for on, _ in pairs)
    speeds = ", ".join(f"{name} {factor:.2f} x" for name, factor in factors.items())
    return f"on / off: {speeds}; chats within the SLO {kept:+.1f} points; {changed} of {total} answers changed"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks speculation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20, help="grounded requests; three times as many of free chat")
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--rate", type=float, default=0.5, help="chats a second beside the job")
    parser.add_argument("--seconds", type=float, default=40.0, help="of chats beside the job")
    finders.add_flags(parser, ())
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train if needed, serve, send, print."""
    from benchmarks.copying_model import copying_model  # torch

    options = parse(argv)
    model = copying_model()
    print(f"speculation: copying model of 133 M parameters, {options.dtype}; {describe()}", flush=True)
    print(TABLE.heading)
    slo = f"--slo=ttft_p99={TTFT:g}s,tbt_p99={TBT * 1e3:g}ms"
    flags = ("--load-format=auto", "--dtype", options.dtype, "--threads", str(options.threads), slo)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).symlink_to(file)
        loads = [make_load(options, number) for number in range(options.rounds)]
        found = compare(
            folder,
            flags,
            ARMS,
            options.rounds,
            lambda urls, number, _: measure(urls[0], loads[number]),
            TABLE,
            show,
        )
    print(ratios(found))
