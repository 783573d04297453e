"""The work that `chaos` disturbs: streams and a batch, greedy, so that every answer is known beforehand."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MODEL = "tidemill-demo"
STREAM_TOKENS, LINE_TOKENS, LINE_PROMPTS = 300, 24, 16
TERMINAL = {"completed", "failed", "expired", "cancelled"}


@dataclass(slots=True)
class Answer:
    """`at`: when chunks came, on the monotonic clock; `status`: of HTTP; `error`: the code of what ended it."""

    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    status: int = 0
    error: str | None = None

    def gaps(self) -> list[tuple[float, float]]:
        """The times between two chunks."""
        return list(zip(self.at, self.at[1:], strict=False))


@dataclass(slots=True)
class Outcome:
    """What became of the work. Rows are counted by their line: `lost` have none, `doubled` more than one."""

    streams: int = 0
    broken: int = 0
    differing: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    failed: int = 0
    rows_differing: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def make_prompts(dice: random.Random, count: int, length: int) -> list[list[int]]:
    """Token ids; no two begin alike."""
    return [[20 + number, *(dice.randrange(20, 400) for _ in range(length - 1))] for number in range(count)]


def body_of(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def stream(session: aiohttp.ClientSession, prompt: Sequence[int], tokens: int) -> Answer:
    """Return one streamed answer, whole or broken."""
    body = {**body_of(prompt, tokens), "stream": True, "return_token_ids": True}
    answer = Answer()
    try:
        async with session.post("/v1/completions", json=body) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = (await response.json())["error"]["code"]
                return answer
            async for raw in response.content:
                if raw.startswith(b"data: {"):
                    _take(answer, json.loads(raw[6:]))
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = type(error).__name__
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = event["error"]["code"] or "error"
    for choice in event.get("choices", ()):
        if ids := choice.get("token_ids"):
            answer.tokens += ids
            answer.at.append(time.monotonic())


async def keep_streaming(
    session: aiohttp.ClientSession, prompts: Sequence[Sequence[int]], expected: Sequence[list[int]], number: int,
    done: asyncio.Event, outcome: Outcome,
) -> None:  # fmt: skip
    """One answer after another until the end, each compared with the undisturbed answer."""
    while not done.is_set():
        expectation = expected[number]
        answer = await stream(session, prompts[number], len(expectation))
        number = (number + 1) % len(prompts)
        outcome.streams += 1
        outcome.gaps += answer.gaps()
        if answer.error is not None or len(answer.tokens) != len(expectation):
            outcome.broken += 1
            outcome.errors[f"{answer.status} {answer.error}"] += 1
            await asyncio.sleep(0.1)
        elif answer.tokens != expectation:
            outcome.differing += 1


def line(name: str, body: str, url: str = "/v1/completions") -> str:
    """Return one line of a batch; `body` is JSON."""
    return f'{{"custom_id":"{name}","method":"POST","url":"{url}","body":{body}}}\n'


async def upload(session: aiohttp.ClientSession, text: bytes) -> aiohttp.ClientResponse:
    """Upload a batch's input; the response has been read."""
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", text, filename="lines.jsonl")
    async with session.post("/v1/files", data=form) as response:
        await response.read()
        return response


async def create(session: aiohttp.ClientSession, file: str, url: str = "/v1/completions") -> str:
    """Create a batch of an uploaded file and return its id."""
    body = {"input_file_id": file, "endpoint": url, "completion_window": "24h"}
    async with session.post("/v1/batches", json=body) as response:
        return str((await response.json())["id"])


async def submit(session: aiohttp.ClientSession, lines: Iterable[str], url: str = "/v1/completions") -> str:
    """Upload lines, create their batch and return its id."""
    uploaded = await upload(session, "".join(lines).encode("utf-8", "surrogatepass"))
    return await create(session, (await uploaded.json())["id"], url)


async def submit_batch(session: aiohttp.ClientSession, prompts: Sequence[Sequence[int]], lines: int) -> str:
    """Submit so many lines, the prompts one after another; return the batch's id."""
    bodies = [json.dumps(body_of(prompt, LINE_TOKENS)) for prompt in prompts]
    return await submit(session, (line(str(i), bodies[i % len(bodies)]) for i in range(lines)))


async def wait_batch(session: aiohttp.ClientSession, batch: str, until: float) -> dict[str, Any]:
    """The batch when it has ended, or as it is then."""
    while True:
        async with session.get(f"/v1/batches/{batch}") as response:
            state: dict[str, Any] = await response.json()
        if state["status"] in TERMINAL or time.monotonic() > until:
            return state
        await asyncio.sleep(0.5)


async def count_rows(
    session: aiohttp.ClientSession, state: dict[str, Any], expected: Sequence[str], lines: int, outcome: Outcome
) -> None:
    """Compare the rows of a batch that has ended with the lines of it."""
    rows, errors = await read_rows(session, state)
    found = Counter(row["custom_id"] for row in rows + errors)
    outcome.rows = len(rows)
    outcome.failed = len(errors)
    outcome.lost = sum(str(i) not in found for i in range(lines))
    outcome.doubled = sum(count > 1 for count in found.values())
    for row in rows:
        text = row["response"]["body"]["choices"][0]["text"]
        outcome.rows_differing += text != expected[int(row["custom_id"]) % len(expected)]


async def read_rows(
    session: aiohttp.ClientSession, state: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the output file and of the error file."""
    return await _rows(session, state.get("output_file_id")), await _rows(session, state.get("error_file_id"))


def miscounted(names: Iterable[str], rows: Iterable[dict[str, Any]]) -> int:
    """Count the lines that have no row, or more than one."""
    found = Counter(str(row["custom_id"]) for row in rows)
    return sum(found[name] != 1 for name in names)


async def _rows(session: aiohttp.ClientSession, file: str | None) -> list[dict[str, Any]]:
    if not file:
        return []
    async with session.get(f"/v1/files/{file}/content") as response:
        return [_row(text) for text in (await response.read()).splitlines()]


def _row(text: bytes) -> dict[str, Any]:
    """Parse one row; an unreadable one belongs to no line."""
    try:
        return dict(json.loads(text.decode()))
    except ValueError:
        return {"custom_id": f"unreadable: {text[:40]!r}"}


async def text_of(session: aiohttp.ClientSession, prompt: Sequence[int]) -> str:
    """Return the undisturbed answer of a line of the batch."""
    async with session.post("/v1/completions", json=body_of(prompt, LINE_TOKENS)) as response:
        return str((await response.json())["choices"][0]["text"])
