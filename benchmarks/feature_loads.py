"""Loads of `benchmarks features`: each sends its requests to the servers of an arm and returns samples by name.

Seconds unless a name says otherwise. Numeric keyword arguments are sizes, which `--set` changes.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import numpy as np

from benchmarks import copying_tasks, live, pressure, serving
from benchmarks import loads as shared
from benchmarks.hostile import BESIDE_CHATS
from benchmarks.live import metrics_page, plan_for, read_metric, wait_quiet
from benchmarks.speculation import CHAT, end_of, start_job
from loadgen import traces
from loadgen.arrivals import constant_rate
from loadgen.client import Client
from loadgen.metrics import Slo
from loadgen.plan import Job, Target, Windows
from loadgen.records import RequestRecord
from loadgen.stats import stream
from loadgen.traces import Content, Ints, Trace
from loadgen.workloads import fixed

Samples = dict[str, list[Any]]


def of_chats(records: Iterable[RequestRecord], slo: Slo) -> Samples:
    """Return the latencies of chats, and whether each kept the SLO."""
    chats = list(records)
    return {
        "kept": [slo.good(chat) for chat in chats],
        "ttft": [chat.ttft for chat in chats if chat.ttft is not None],
        "gap": [float(gap) for chat in chats for gap in chat.gaps()],
        "e2e": [chat.e2e for chat in chats if chat.e2e is not None],
    }


# --- turns of chats

QUESTION, ANSWER = 24, 16
HOST_HITS = 'tidemill_prefix_hit_tokens_by_tier_total{tier="host"}'


def conversations(chats: int, turns: int, history: int, think: float, seed: int) -> Trace:
    """Return `chats` conversations whose turns repeat all that was said before.

    Between two turns of a chat pass `think` seconds on average, half at random.
    """
    random = stream(seed, "arrivals")
    times, inputs, content = [], [], []
    for chat in range(chats):
        first, when = chat * (2 * turns + 1), float(chat)
        segments: list[traces.Segment] = [(first, history)]
        for turn in range(turns):
            segments.append((first + 2 * turn + 1, QUESTION))
            times.append(when)
            inputs.append(sum(size for _, size in segments))
            content.append(Content(segments=tuple(segments)))
            segments.append((first + 2 * turn + 2, ANSWER))
            when += think * (0.75 + 0.5 * float(random.random()))
    outputs = np.full(len(times), ANSWER, dtype=np.int64)
    return traces.build(np.array(times), np.array(inputs, dtype=np.int64), outputs, tuple(content))


async def turns(
    urls: Sequence[str], seed: int, *, chats: int = 6, turns: int = 4, history: int = 1000, think: float = 15.0,
    lines: int = 2000,
) -> Samples:  # fmt: skip
    """Send conversations beside a batch job of `lines` lines, which must outlast them. Return later turns' TTFTs."""
    (url,) = urls
    await wait_quiet(url)
    trace = conversations(chats, turns, history, think, seed)
    windows = Windows(horizon=trace.span, drain=30.0)
    job = Job(fixed(lines, 256, 128))
    records = await live.run(plan_for(url, seed, online=trace, jobs=(job,), offline_mode="batch", windows=windows))
    for each in records.jobs:
        shared.check_job(each)
    online = [record for record in records.requests if record.service_class == "online"]
    later = [record for record in online if record.input_asked > history + QUESTION]
    found = of_chats(later, Slo())
    return found | {"host": [read_metric(await metrics_page(url), HOST_HITS, missing=0.0)]}


async def second_turns(urls: Sequence[str], seed: int, *, chats: int = 4, history: int = 1500) -> Samples:
    """Ask two turns of each chat, one chat after another. Return the TTFTs of second turns."""
    chance, seconds = random.Random(seed), []
    async with live.completions(urls[0], 1) as ask:
        for _ in range(chats):
            prompt = [chance.randrange(16, 2000) for _ in range(history)]
            for turn in (prompt, prompt + [chance.randrange(16, 2000) for _ in range(40)]):
                began = time.monotonic()
                status, answer = await ask(model="model", prompt=turn, max_tokens=1, temperature=0.0)
                if status != HTTPStatus.OK:
                    raise SystemExit(f"the server answered {status}: {answer}")
            seconds.append(time.monotonic() - began)
    return {"ttft": seconds}


# --- bursts and lengths


async def burst(
    urls: Sequence[str], seed: int, *, seconds: float = 45.0, spacing: float = 2.0, burst: int = 32, prompt: int = 128,
    output: int = 128,
) -> Samples:  # fmt: skip
    """Send a chat every `spacing` seconds, and `burst` more within a second after a third of the time."""
    (url,) = urls
    random = stream(seed, "arrivals")
    times = np.concatenate((np.arange(0.0, seconds, spacing), seconds / 3 + random.random(burst)))
    inputs, outputs = (random.integers(size // 2, size + size // 2, len(times)) for size in (prompt, output))
    chats = traces.build(times, inputs.astype(np.int64), outputs.astype(np.int64))
    await wait_quiet(url)
    records = await live.run(plan_for(url, seed, online=chats, windows=Windows(horizon=chats.span, drain=300.0)))
    await wait_quiet(url)
    page = await metrics_page(url)
    counters = {"preempted": "tidemill_preemptions_total", "drops": "tidemill_fleet_drops_total"}
    counted = {key: [read_metric(page, name, missing=0.0)] for key, name in counters.items()}
    return of_chats(records.requests, shared.slo_of(30.0, 2.0)) | counted


def lognormal_chats(rate: float, seconds: float, seed: int, prompt: int = 200, output: int = 48) -> Trace:
    """Return Poisson arrivals of chats with log-normal lengths."""
    arrivals = shared.poisson(constant_rate(rate), seconds, seed)
    random = stream(seed, "lengths")

    def lengths(mean: int, longest: int) -> Ints:
        drawn = random.lognormal(np.log(mean) - 0.5, 1.0, len(arrivals))
        cut: Ints = np.clip(np.rint(drawn), 8, longest).astype(np.int64)
        return cut

    made = fixed(len(arrivals), 1, 1).at(np.array(arrivals))
    return replace(made, input_tokens=lengths(prompt, 1500), output_tokens=lengths(output, 300))


async def mixed_chats(urls: Sequence[str], seed: int, *, rate: float = 1.0, seconds: float = 60.0) -> Samples:
    """Send chats of very different lengths to the servers in turn, after a warm-up."""
    records: list[RequestRecord] = []
    for duration, number in ((shared.LEARNING, seed + 1000), (seconds, seed)):
        chats = lognormal_chats(rate, duration, number)
        await asyncio.gather(*map(wait_quiet, urls))
        windows = Windows(horizon=duration, drain=60.0)
        parts = [chats.take(np.arange(first, len(chats), len(urls))) for first in range(len(urls))]
        plans = [plan_for(url, number, online=part, windows=windows) for url, part in zip(urls, parts, strict=True)]
        records = [record for found in await asyncio.gather(*map(live.run, plans)) for record in found.requests]
    return of_chats(records, shared.slo_of(1.0, 0.15))


async def at_once(
    urls: Sequence[str], seed: int, *, requests: int = 32, prompt: int = 192, output: int = 64
) -> Samples:
    """Send equal requests together, after a few that warm up. Return the output tokens/s and the latencies."""
    (url,) = urls
    await pressure.run_seed(url, [0.0] * 4, seed + 1000, prompt, output)
    run = await pressure.run_seed(url, [0.0] * requests, seed, prompt, output)
    answers = [answer for answer in run.answers if answer.ok]
    last = max(answer.chunk_at[-1] for answer in answers)
    more = {"hidden": run.hidden_blocks, "preempted": [run.counts["preemptions"]]}
    return of_chats(answers, Slo()) | more | {"rate": [len(answers) * output / last]}


async def speeds(urls: Sequence[str], seed: int) -> Samples:
    """Return tokens/s of one stream, of a prompt, and of 8 and 16 streams, as `benchmarks serving` measures them."""
    await serving.measure_round(urls[0], 1000 + seed)
    found, _ = await serving.measure_round(urls[0], seed)
    names = ("one stream", "prefill", "8 streams", "16 streams")
    return {name: [value] for name, value in zip(names, found, strict=True)}


# --- chats beside offline rows

REPORT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "sentiment": {"enum": ["positive", "negative", "neutral"]},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
        "keywords": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 3},
        "needs_follow_up": {"type": "boolean"},
    },
    "required": ["title", "sentiment", "confidence", "keywords", "needs_follow_up"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": ({"ignore_eos": True},),
    "schema": ({"structured_outputs": {"json": REPORT}},),
    "hostile": tuple({"structured_outputs": {"json": json.dumps(schema)}} for schema in BESIDE_CHATS),
}


async def beside_rows(
    urls: Sequence[str], seed: int, *, forms: str, rate: float = 1.0, seconds: float = 75.0, concurrency: int = 24
) -> Samples:
    """Send chats beside offline rows of some forms, after a warm-up."""
    (url,) = urls
    answered: list[int] = []
    warm = [number / rate for number in range(int(rate * shared.LEARNING))]
    await shared.run_arm(url, warm, shared.LEARNING, "flex", 0)
    await wait_quiet(url)
    async with live.completions(url, concurrency) as ask_server:
        numbers = itertools.count()

        async def ask() -> None:
            for number in numbers:
                body = {"model": "model", "prompt": f"Report number {number}: ", "max_tokens": 100, "temperature": 1.0}
                form = FORMS[forms][number % len(FORMS[forms])]
                status, _ = await ask_server(**body, seed=number, service_tier="flex", **form)
                answered.append(status)

        rows = asyncio.gather(*(ask() for _ in range(concurrency)))
        arrivals = shared.poisson(constant_rate(rate), seconds, seed)
        run = await shared.run_arm(url, arrivals, seconds, None, seed, quiet=())
        rows.cancel()
        with suppress(asyncio.CancelledError):
            await rows
    counts = {"answered": [answered.count(200)], "refused": [answered.count(400)]}
    return of_chats(shared.judged([run]), shared.slo_of(1.5, 0.3)) | counts


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """Chats of a service class: their share of all chats, their prompt tokens, and their promise in both syntaxes."""

    share: float
    prompt: int
    slo: str
    limits: tuple[str, ...]


CLASSES = {
    "default": ClassLoad(0.55, 150, "ttft_p99=1s,tbt_p99=100ms", ("ttft:1000", "tbt_p99:100")),
    "premium": ClassLoad(0.38, 60, "premium:ttft_p99=300ms,tbt_p99=50ms", ("ttft:300", "tbt_p99:50")),
    "agent": ClassLoad(0.07, 700, "agent:e2e_p99=20s", ("e2e:20000",)),
}


async def classes(
    urls: Sequence[str], seed: int, *, rate: float = 1.0, seconds: float = 300.0, learning: float = 60.0,
    job_rate: float = 2500.0,
) -> Samples:  # fmt: skip
    """Send chats of three classes, beside a batch job with lines for `job_rate` tokens/s (0: no job)."""
    await _send_classes(urls[0], seed + 1000, rate, learning, job_rate)
    return await _send_classes(urls[0], seed, rate, seconds, job_rate)


async def _send_classes(url: str, seed: int, rate: float, seconds: float, job_rate: float) -> Samples:
    await wait_quiet(url)
    runs = []
    for number, (name, load) in enumerate(CLASSES.items()):
        arrivals = shared.poisson(constant_rate(rate * load.share), seconds, seed + number)
        settings: dict[str, Any] = {"prompt": load.prompt, "extra_body": {"tidemill": {"class": name}}}
        runs.append(live.run(shared.plan_arm(url, arrivals, seconds, None, seed + number, **settings)))
    samples: Samples = {}
    if job_rate > 0.0:
        job = shared.run_arm(url, [], seconds, shared.JOB, seed, quiet=(), job_rate=job_rate)
        beside, found = await asyncio.gather(job, asyncio.gather(*runs))
        samples["lines"] = [beside.offline_lines]
    else:
        found = await asyncio.gather(*runs)
    for (name, load), records in zip(CLASSES.items(), found, strict=True):
        chats = of_chats(records.requests, Slo.parse(load.limits))
        samples |= {name: chats["kept"], f"{name} ttft": chats["ttft"], f"{name} gap": chats["gap"]}
    return samples


# --- random requests whose answers must be equal

SEEN = ("drafted_tokens", "accepted_tokens", "preemptions")
AT_ONCE, MOST_TRIES = 48, 20
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["question", "complaint", "praise"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "(yes|no), because [a-z ]{5,30}\\."}},
    {"structured_outputs": {"choice": ["The first answer.", "The first choice.", "The second one."]}},
)


def random_bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw chats: questions and texts to repeat, half behind shared instructions, with random sampling fields."""
    rng = random.Random(f"identity {seed}")
    tasks = list(copying_tasks.GROUNDED.values())
    systems = [" ".join(rng.choice(tasks)(rng)[0] for _ in range(3)) for _ in range(4)]
    bodies = []
    for _ in range(count):
        text = rng.choice(tasks)(rng)[0] if rng.random() < 0.5 else copying_tasks.question(rng)
        system = [{"role": "system", "content": rng.choice(systems)}] if rng.random() < 0.5 else []
        bodies.append({"model": "model", "messages": [*system, {"role": "user", "content": text}], **_sampling(rng)})
    return bodies


def _sampling(rng: random.Random) -> dict[str, Any]:
    def sometimes(share: float, **fields: Any) -> dict[str, Any]:
        return fields if rng.random() < share else {}

    fields = {
        "max_tokens": rng.randint(1, 60),
        "temperature": rng.choice((0.0, 0.0, 0.3, 0.7, 1.0, 1.5)),
        "seed": rng.randrange(2**31),
        **sometimes(0.3, top_p=rng.uniform(0.3, 1.0)),
        **sometimes(0.2, top_k=rng.randint(1, 50)),
        **sometimes(0.1, min_p=rng.uniform(0.0, 0.2)),
        **sometimes(0.1, logit_bias={str(rng.randrange(100, 400)): rng.uniform(-5.0, 5.0) for _ in range(3)}),
        **sometimes(0.1, presence_penalty=rng.uniform(-1.0, 2.0)),
        **sometimes(0.1, frequency_penalty=rng.uniform(-1.0, 2.0)),
        **sometimes(0.1, repetition_penalty=rng.uniform(0.9, 1.5)),
        **sometimes(0.1, stop=rng.choice(("e", ".", " the", "\n"))),
        **sometimes(0.3, logprobs=True, top_logprobs=rng.randint(0, 5)),
        **sometimes(0.1, n=2),
        **sometimes(0.25, **rng.choice(GRAMMARS)),
    }
    if "structured_outputs" not in fields and "response_format" not in fields:
        fields |= sometimes(0.1, min_tokens=rng.randint(1, fields["max_tokens"]))
    return fields


async def random_requests(urls: Sequence[str], seed: int, *, requests: int = 5000) -> Samples:
    """Send half of the requests as chats and half as a batch job. Return all answers and the server's counters."""
    bodies, half, turns = random_bodies(requests, seed), requests // 2, asyncio.Semaphore(AT_ONCE)
    async with Client(Target(urls[0], timeout=live.ANSWER_SECONDS), time.monotonic) as client:

        async def chat(body: dict[str, Any]) -> str:
            async with turns:
                for _ in range(MOST_TRIES):  # a server without a free engine refuses a chat for a while
                    status, answer = await client.call("POST", CHAT, json=body)
                    if status == HTTPStatus.OK:
                        return all_of(answer)
                    await asyncio.sleep(1.0)
                return f"status {status}: {json.dumps(answer)}"

        job = asyncio.create_task(_job_answers(client, bodies[half:]))
        chats = await asyncio.gather(*map(chat, bodies[:half]))
        answers = [*chats, *await job]
    page = await metrics_page(urls[0])
    return {"answers": answers} | {name: [read_metric(page, f"tidemill_{name}_total")] for name in SEEN}


def all_of(body: dict[str, Any]) -> str:
    """Return everything of a completion that must not change, as text; floats keep all their bits."""
    return json.dumps([body["choices"], body["usage"]["completion_tokens"]], sort_keys=True)


async def _job_answers(client: Client, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """Return the answers of a batch job in the order of its lines."""
    batch = await end_of(client, await start_job(client, bodies))
    answers = [f"no row: the job ended as {batch['status']}"] * len(bodies)
    for kind in ("output_file_id", "error_file_id"):
        if batch.get(kind):
            _, data = await client.raw("GET", f"/v1/files/{batch[kind]}/content")
            for row in map(json.loads, data.splitlines()):
                body = (row.get("response") or {}).get("body") or {}
                number = int(row["custom_id"].partition("-")[2])
                answers[number] = all_of(body) if "choices" in body else json.dumps(row)
    return answers
