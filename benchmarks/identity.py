"""Whether speculation, little memory and lost engine processes change answers: random requests of the packaged model.

    python -m benchmarks identity [--requests N] [--engines N] [--kill-every SECONDS] [--seed N]

The same requests go to two servers in float32, half as chats and half as lines of a batch job. The first server has one
engine, enough memory and no speculation. The second server verifies drafts, has `--engines` engines whose cache is a
few requests large, moves blocks to host memory, and loses its oldest engine process by SIGKILL every `--kill-every`
seconds. With two engines a process lives for more than a minute; the server gives up an engine that dies more often.

Requests draw their temperature, top-p, top-k, min-p, bias, minimum length, penalties, stop strings, grammars,
log-probabilities and number of choices. An answer differs if its text, finish reason, token count or any bit of its
log-probabilities does. The exit status is 1 if any answer differs.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import copying_tasks
from benchmarks.live import ANSWER_SECONDS, Served, demo_server, metrics_page, read_metric
from benchmarks.machine import describe
from benchmarks.speculation import CHAT, end_of, start_job
from loadgen.client import Client
from loadgen.target import Target

COMMON = ("--dtype=float32", "--max-model-len=1024", "--max-queue-time=none", "--slo=ttft_p99=60s,tbt_p99=10s")
CALM = ("--speculation=off",)
HARD = ("--speculation=on", "--num-gpu-blocks-override={blocks}", "--swap-space=0.05", "--engines={engines}")
AT_ONCE = 48
"""Chats that are open at a time."""
MOST_TRIES = 20
"""Times that a chat is sent, since a server that restarts refuses chats."""
SEEN = (
    "drafted_tokens", "accepted_tokens", "forced_tokens", "preemptions", 'cache_units_total{operation="swap_in"}',
    "engine_restarts", "resumed_requests",
)  # fmt: skip
ENGINE = b"engine.process.child"
SCHEMA = {
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
    {"response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "(yes|no), because [a-z ]{5,30}\\."}},
    {"structured_outputs": {"choice": ["The first answer.", "The first choice.", "The second one."]}},
)

Body = dict[str, Any]


def make_bodies(count: int, seed: int) -> list[Body]:
    """Draw the requests: questions and texts to repeat, half behind shared instructions."""
    rng = random.Random(f"identity {seed}")
    tasks = list(copying_tasks.GROUNDED.values())
    systems = [" ".join(rng.choice(tasks)(rng)[0] for _ in range(3)) for _ in range(4)]

    def question() -> list[dict[str, str]]:
        text = rng.choice(tasks)(rng)[0] if rng.random() < 0.5 else copying_tasks.question(rng)
        asked = [{"role": "user", "content": text}]
        return [{"role": "system", "content": rng.choice(systems)}, *asked] if rng.random() < 0.5 else asked

    return [{"messages": question(), **draw_sampling(rng)} for _ in range(count)]


def draw_sampling(rng: random.Random) -> Body:
    """Draw a request's sampling fields."""

    def sometimes(share: float, **fields: Any) -> Body:
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


def answer_of(body: Mapping[str, Any]) -> str:
    """Return everything of a completion that must not change, as text; floats keep all their bits."""
    return json.dumps([body["choices"], body["usage"]["completion_tokens"]], sort_keys=True)


async def ask(client: Client, body: Body) -> str:
    """Return the answer to a chat. A server without a free engine refuses a chat, which is then sent again."""
    for _ in range(MOST_TRIES):
        status, answer = await client.call("POST", CHAT, json=body)
        if status == 200:
            return answer_of(answer)
        if status not in (429, 503):
            return f"status {status}: {json.dumps(answer)}"
        await asyncio.sleep(1.0)
    return f"status {status} {MOST_TRIES} times"


async def run_job(client: Client, bodies: Sequence[Body]) -> list[str]:
    """Run the bodies as a batch job and return the answers in the order of its lines."""
    batch = await end_of(client, await start_job(client, bodies))
    answers = [f"no row: the job ended as {batch['status']}"] * len(bodies)
    for kind in ("output_file_id", "error_file_id"):
        if batch.get(kind):
            _, data = await client.raw("GET", f"/v1/files/{batch[kind]}/content")
            for row in map(json.loads, data.splitlines()):
                body = (row.get("response") or {}).get("body") or {}
                text = answer_of(body) if "choices" in body else json.dumps(row)
                answers[int(row["custom_id"].partition("-")[2])] = text
    return answers


def engine_processes(gateway: int) -> list[int]:
    """Return the ids of a gateway's engine processes, the oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == gateway and ENGINE in (path / "cmdline").read_bytes():
                found.append((int(fields[19]), int(path.name)))
    return [pid for _, pid in sorted(found)]


async def lose_engines(gateway: int, every: float) -> None:
    """Kill the oldest engine process of a gateway every so many seconds, until cancelled."""
    while True:
        await asyncio.sleep(every)
        with suppress(ProcessLookupError, IndexError):
            os.kill(engine_processes(gateway)[0], signal.SIGKILL)


async def answers_of(served: Served, bodies: Sequence[Body], kill_every: float) -> list[str]:
    """Send the first half of the bodies as chats and the rest as a job; return all answers in order."""
    turns = asyncio.Semaphore(AT_ONCE)
    half = len(bodies) // 2
    async with Client(Target(served.url, timeout=ANSWER_SECONDS), time.monotonic) as client:

        async def chat(body: Body) -> str:
            async with turns:
                return await ask(client, body)

        job = asyncio.create_task(run_job(client, bodies[half:]))
        killer = asyncio.create_task(lose_engines(served.group, kill_every)) if kill_every else None
        try:
            chats = await asyncio.gather(*map(chat, bodies[:half]))
            return [*chats, *await job]
        finally:
            job.cancel()
            if killer is not None:
                killer.cancel()


def run_arm(name: str, flags: Sequence[str], bodies: Sequence[Body], kill_every: float = 0.0) -> list[str]:
    """Run a server, send the requests, print the counters of the server, and return the answers."""
    with tempfile.TemporaryDirectory() as folder, demo_server(folder, *COMMON, *flags) as served:
        begin = time.monotonic()
        answers = asyncio.run(answers_of(served, bodies, kill_every))
        seconds = time.monotonic() - begin
        page = asyncio.run(metrics_page(served.url))
    counts = {each: read_metric(page, _sample(each)) for each in SEEN}
    print(f"{name}: {seconds:.0f} s, " + ", ".join(f"{each} {count:.0f}" for each, count in counts.items()), flush=True)
    return answers


def _sample(name: str) -> str:
    return f"tidemill_{name}" if name.endswith("}") else f"tidemill_{name}_total"


def report(bodies: Sequence[Body], calm: Sequence[str], hard: Sequence[str]) -> int:
    """Print the number of equal answers and the first unequal ones. Return the number of unequal answers and errors."""
    wrong = [i for i in range(len(bodies)) if calm[i] != hard[i] or not calm[i].startswith("[")]
    print(f"{len(bodies) - len(wrong)} of {len(bodies)} answers are equal", flush=True)
    for number in wrong[:5]:
        print(json.dumps(bodies[number]), calm[number], hard[number], sep="\n  ")
    if wrong:
        fields = Counter(field for number in wrong for field in bodies[number])
        print("fields of the requests whose answers differ:", dict(fields.most_common()))
    return len(wrong)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks identity", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=80, help="blocks of the second server's cache, of each engine")
    parser.add_argument("--kill-every", type=float, default=35.0, help="seconds between two SIGKILLs; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve, send, compare."""
    options = parse(argv)
    bodies = make_bodies(options.requests, options.seed)
    print(f"identity: the packaged model, float32, {options.requests} requests; {describe()}", flush=True)
    calm = run_arm("calm", CALM, bodies)
    flags = [flag.format(blocks=options.blocks, engines=options.engines) for flag in HARD]
    hard = run_arm("hard", flags, bodies, options.kill_every)
    if report(bodies, calm, hard):
        raise SystemExit(1)
