"""Requests of every kind whose answers are known from an undisturbed run, and their comparison."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.chaos.load import MODEL
from loadgen.client import Client

NUMBERS, AT_ONCE = 48, 4
CUT = 0.1
"""Share of streams whose client disconnects after a few chunks."""
MARGIN = 1e-4
"""Difference of log probabilities below which two tokens are a tie; a recomputed prompt may pick the other."""
COUNTRIES = ("France", "Italy", "Spain", "Japan", "Peru")
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _completion(**fields: Any) -> Callable[[int, random.Random], dict[str, Any]]:
    def make(number: int, dice: random.Random) -> dict[str, Any]:
        prompt = [20 + number, *(dice.randrange(20, 400) for _ in range(dice.randrange(3, 40)))]
        seed = {"seed": number} if fields.get("temperature") else {}
        tokens = fields.get("max_tokens", dice.randrange(20, 200))
        return {"temperature": 0, "ignore_eos": True, **fields, **seed, "prompt": prompt, "max_tokens": tokens}

    return make


def _chat(text: str, **fields: Any) -> Callable[[int, random.Random], dict[str, Any]]:
    def make(number: int, dice: random.Random) -> dict[str, Any]:
        content = text.format(number=number, country=dice.choice(COUNTRIES))
        return {"temperature": 0, "max_tokens": 60, "messages": [{"role": "user", "content": content}], **fields}

    return make


KINDS: Mapping[str, Callable[[int, random.Random], dict[str, Any]]] = {
    "greedy": _completion(),
    "sampled": _completion(temperature=0.8),
    "three choices": _completion(temperature=0.8, n=3, max_tokens=60),
    "penalties": _completion(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
    "logprobs": _completion(logprobs=3, max_tokens=50),
    "stop": _completion(ignore_eos=False, stop=["e", " a"], min_tokens=20),
    "chat": _chat("What is the capital of {country}? Number {number}."),
    "structured": _chat("Fill in form {number}.", response_format={
        "type": "json_schema", "json_schema": {"name": "a", "schema": FORM}}),
}  # fmt: skip


def request_of(number: int) -> tuple[str, str, dict[str, Any]]:
    """Return kind, path and body of the request with this number."""
    kind = list(KINDS)[number % len(KINDS)]
    body = KINDS[kind](number, random.Random(number))
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return kind, path, {"model": MODEL, "return_token_ids": True, **body}


@dataclass(slots=True)
class Answer:
    """`choices`: tokens and finish reason by index; `error`: reason of a missing answer, which begins with the code;
    `cut`: the client has disconnected; `at`: times of the request and of each chunk, on the monotonic clock."""

    choices: dict[int, tuple[list[int], str | None]] = field(default_factory=dict)
    tokens: int | None = None
    error: str | None = None
    cut: bool = False
    at: list[float] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Add a chunk, or a whole answer."""
        if "error" in event:
            self.error = f"{event['error']['code']}: {event['error']['message']}"[:160]
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        for choice in event.get("choices", ()):
            tokens, reason = self.choices.setdefault(choice["index"], ([], None))
            tokens += choice.get("token_ids") or []
            self.choices[choice["index"]] = tokens, choice.get("finish_reason") or reason

    def gaps(self) -> list[tuple[float, float]]:
        """Return begin and end of each wait for a chunk."""
        return list(zip(self.at, self.at[1:], strict=False))


async def ask(client: Client, number: int, *, stream: bool, most: int | None = None) -> Answer:
    """Send the request with this number; disconnect after `most` chunks."""
    _, path, body = request_of(number)
    return await send(client, path, body, stream=stream, most=most)


async def send(
    client: Client, path: str, body: dict[str, Any], *, stream: bool = True, most: int | None = None
) -> Answer:
    """Send a request and return its answer, whole or broken."""
    if stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer(at=[time.monotonic()])
    try:
        async with client.session.post(client.target.url(path), json=body) as response:
            if response.status != 200 or not stream:
                answer.take(await response.json())
                return answer
            await _read(response, answer, most)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__} {error}"[:160]
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer, most: int | None) -> None:
    async for raw in response.content:
        if raw.startswith(b"data: {"):
            answer.take(json.loads(raw[6:]))
            answer.at.append(time.monotonic())
            if most is not None and len(answer.at) > most:
                answer.cut = True
                return
        elif raw.startswith(b"data: [DONE]"):
            return
    answer.error = answer.error or "the stream ended without [DONE]"


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the undisturbed one."""

    number: int
    choice: int
    place: int
    expected: list[int]
    got: list[int]
    reasons: tuple[str | None, str | None]

    @property
    def sampled(self) -> bool:
        """Whether the answer was drawn, and not the likeliest one."""
        return bool(request_of(self.number)[2]["temperature"])

    def __str__(self) -> str:
        kind, _, _ = request_of(self.number)
        around = slice(self.place, self.place + 3)
        return (f"request {self.number} ({kind}), choice {self.choice}, token {self.place} of {len(self.expected)}: "
                f"{self.expected[around]} became {self.got[around]}, finish reasons {self.reasons}")  # fmt: skip


def compare(number: int, expected: Answer, got: Answer) -> list[Difference]:
    """List the choices that differ."""
    found = []
    for index in sorted(expected.choices.keys() | got.choices.keys()):
        tokens, reason = expected.choices.get(index, ([], None))
        others, other_reason = got.choices.get(index, ([], None))
        if (tokens, reason) != (others, other_reason):
            pairs = zip(tokens, others, strict=False)
            same = min(len(tokens), len(others))
            place = next((at for at, (one, other) in enumerate(pairs) if one != other), same)
            found.append(Difference(number, index, place, tokens, others, (reason, other_reason)))
    return found


async def is_tie(client: Client, difference: Difference) -> bool:
    """Return whether both tokens of a greedy answer had nearly the same probability there."""
    kind, path, body = request_of(difference.number)
    place = difference.place
    if kind not in {"greedy", "logprobs"} or place >= min(len(difference.expected), len(difference.got)):
        return False
    prompt = [*body["prompt"], *difference.expected[:place]]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5}
    async with client.session.post(client.target.url(path), json=body) as response:
        (top,) = (await response.json())["choices"][0]["logprobs"]["top_logprobs"]
    first, second = sorted(top.values(), reverse=True)[:2]
    return bool(first - second < MARGIN)


@dataclass(slots=True)
class Tally:
    """Answers of clients: `cut`, errors by text, differences; `gaps`: every wait for a chunk of a stream."""

    asked: int = 0
    choices: int = 0
    cut: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)

    def add(self, number: int, expected: Answer, got: Answer) -> None:
        """Compare an answer with the undisturbed one."""
        self.asked += 1
        self.choices += len(expected.choices)
        self.gaps += got.gaps()
        if got.error is not None:
            self.errors[got.error] += 1
        elif got.cut:
            self.cut += 1
        elif found := compare(number, expected, got):
            self.differences += found
        else:
            self.errors["wrong usage"] += got.tokens != expected.tokens


async def undisturbed(client: Client) -> list[Answer]:
    """Return the answers of all numbers, a few at a time. Raise RuntimeError if one fails."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Answer:
        async with turns:
            return await ask(client, number, stream=number % 2 == 0)

    found = await asyncio.gather(*map(one, range(NUMBERS)))
    if failed := [answer.error for answer in found if answer.error is not None]:
        raise RuntimeError(f"the undisturbed run failed: {failed[0]}")
    return found


async def keep_asking(
    client: Client, expected: Sequence[Answer], dice: random.Random, done: asyncio.Event, tally: Tally
) -> None:
    """Send one request after another until `done`; some clients disconnect."""
    while not done.is_set():
        number, stream = dice.randrange(NUMBERS), dice.random() < 0.6
        most = dice.randrange(1, 12) if stream and dice.random() < CUT else None
        answer = await ask(client, number, stream=stream, most=most)
        tally.add(number, expected[number], answer)
        if answer.error is not None:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def clients(client: Client, expected: Sequence[Answer], count: int, dice: random.Random) -> AsyncIterator[Tally]:
    """Keep so many clients asking during the block."""
    tally, done = Tally(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            own = random.Random(dice.random())
            group.create_task(keep_asking(client, expected, own, done, tally))
        try:
            yield tally
        finally:
            done.set()
