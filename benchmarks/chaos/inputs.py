"""The part `inputs`: requests, batches and answers that cost a server more than they should, of all sizes up to the
limit of a body, beside well-behaved clients."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import orjson

from benchmarks.chaos import load, oracle
from benchmarks.chaos.load import MODEL
from benchmarks.chaos.promises import Promise, Scale, never, shown
from benchmarks.chaos.server import Server, start
from benchmarks.chaos.work import CHAT, ask, bystanders, of_bystanders
from benchmarks.hostile import MAX_BYTES, HostileGrammar, always, dump, grammars, joined

ANSWERS = frozenset({200, 400, 413, 429, 503})
"""Statuses of an answer that is right: the request is served, refused, or asked to come again."""
SIZES = (2_000, 64_000, 250_000, MAX_BYTES - 1_000)
AT_ONCE, TOKENS = 4, 48
ANSWER_SECONDS, QUIET_SECONDS, BATCH_SECONDS = 120.0, 8.0, 600.0
RESPONSES = "/v1/responses"
HI = f'{{"model":"{MODEL}","max_tokens":{TOKENS},"messages":[{{"role":"user","content":"hi"}}],"temperature":0'


@dataclass(frozen=True, slots=True)
class Request:
    name: str
    path: str
    make: Callable[[], str | bytes]


@dataclass(slots=True)
class Attack:
    """`answers`: by status; `wrong`: requests without an answer or with a wrong one, batches that lost lines, innocent
    lines that failed; `slow`: seconds and names."""

    session: aiohttp.ClientSession
    scale: Scale
    dice: random.Random
    answers: Counter[int | str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slow: list[tuple[float, str]] = field(default_factory=list)

    async def send(self, requests: Sequence[Request], at_once: int = AT_ONCE) -> None:
        """Send requests in this order, so many at a time."""
        left = iter(requests)

        async def client() -> None:
            for request in left:
                await self._send(request)

        await asyncio.gather(*[client() for _ in range(at_once)])

    async def _send(self, request: Request) -> None:
        made = await asyncio.to_thread(request.make)
        body = made.encode("utf-8", "surrogatepass") if isinstance(made, str) else made
        begin = time.monotonic()
        status, answer = await ask(self.session, request.path, body)
        self.slow.append((time.monotonic() - begin, f"{request.name} ({status})"))
        self.answers[status] += 1
        if status not in ANSWERS:
            self.wrong.append(f"{request.name}, {len(body)} bytes: {status} {answer[:160].decode(errors='replace')}")

    async def run_batch(self, name: str, hostile: Sequence[str], innocent: Sequence[str]) -> None:
        """Run one batch of both kinds of lines, mixed; each is a body."""
        lines = [load.line(f"hostile-{i}", body, CHAT) for i, body in enumerate(hostile)]
        lines += [load.line(f"innocent-{i}", body, CHAT) for i, body in enumerate(innocent)]
        self.dice.shuffle(lines)
        try:
            batch = await load.submit(self.session, lines, CHAT)
            state = await load.wait_batch(self.session, batch, time.monotonic() + BATCH_SECONDS)
            rows, errors = await load.read_rows(self.session, state)
        except (aiohttp.ClientError, TimeoutError, KeyError) as error:
            self.wrong.append(f"{name}: {type(error).__name__} {error}")
            return
        self.answers[200] += len(rows)
        self.answers["error row"] += len(errors)
        names = [f"hostile-{i}" for i in range(len(hostile))] + [f"innocent-{i}" for i in range(len(innocent))]
        missing = load.miscounted(names, rows + errors)
        if state["status"] != "completed" or missing:
            why = f"{state['request_counts']}, {dump(state.get('errors'))[:300]}"
            self.wrong.append(f"{name}: the batch is {state['status']}, {missing} lines without one row, {why}")
        failed = [row for row in errors if row["custom_id"].startswith("innocent")]
        self.wrong += [f"{name}: an innocent line failed: {json.dumps(row)[:240]}" for row in failed]


Stage = Callable[[Attack], Awaitable[None]]


def of_chat(grammar: HostileGrammar, size: int) -> str:
    text = grammar.make(size)
    if grammar.kind == "json":
        return f'{HI},"response_format":{{"type":"json_schema","json_schema":{{"name":"a","schema":{text}}}}}}}'
    return f'{HI},"structured_outputs":{{"{grammar.kind}":{text if grammar.kind == "choice" else dump(text)}}}}}'


def of_tools(grammar: HostileGrammar, size: int) -> str:
    function = f'{{"type":"function","function":{{"name":"f","parameters":{grammar.make(size)}}}}}'
    return f'{HI},"tool_choice":"required","tools":[{function}]}}'


def of_responses(grammar: HostileGrammar, size: int) -> str:
    form = f'{{"type":"json_schema","name":"a","schema":{grammar.make(size)}}}'
    return f'{{"model":"{MODEL}","input":"hi","max_output_tokens":{TOKENS},"text":{{"format":{form}}}}}'


def requests_of_grammars() -> Iterator[Request]:
    """Yield every grammar in every size, by every way that takes it."""
    for grammar in grammars():
        ways = [("chat", CHAT, of_chat)]
        if grammar.kind == "json":
            ways += [("tools", CHAT, of_tools), ("responses", RESPONSES, of_responses)]
        for way, path, body in ways:
            for size in SIZES:
                name = f"{grammar.name} of {size:,} by {way}"
                yield Request(name, path, lambda body=body, grammar=grammar, size=size: body(grammar, size))  # type: ignore[misc]


async def send_grammars(attack: Attack) -> None:
    """Send grammars as requests."""
    requests = list(requests_of_grammars())
    await attack.send(attack.scale.some(requests, 24))


def _is_json(body: str) -> bool:
    """Return whether a batch takes the body as a line: one line that is no JSON fails its batch."""
    try:
        return orjson.loads(body) is not None
    except orjson.JSONDecodeError:
        return False


def innocent_lines(count: int, start: int = 0) -> list[str]:
    """Return bodies with small schemas of their own."""
    return [of_schema(_object(f"q{i}")) for i in range(start, start + count)]


def of_schema(schema: str) -> str:
    return of_chat(HostileGrammar("", "json", always(schema)), 0)


def _object(name: str) -> str:
    return dump({"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]})


async def batch_grammars(attack: Attack) -> None:
    """Send grammars as lines of batches, one batch for each size."""
    for size in SIZES[:3]:
        chosen = attack.scale.some(grammars(), 12)
        hostile = [body for grammar in chosen if _is_json(body := of_chat(grammar, size))]
        await attack.run_batch(f"grammars of {size:,}", hostile, innocent_lines(attack.scale.of(100, 10), size))


async def batch_schemas(attack: Attack) -> None:
    """Run lines that each have a slow schema of their own."""

    def schema(i: int) -> str:  # fmt: skip
        pattern = {"type": "string", "pattern": "^[a-z]{1,8}(-[0-9a-f]{4,12}){1,4}$"}
        return dump({"type": "object", "properties": {f"p{i}_{k}": pattern for k in range(300)}})

    lines = [of_schema(schema(i)) for i in range(attack.scale.of(300, 20))]
    await attack.run_batch("schemas of their own", [], lines)


ODD = (
    "-1e30",
    "-1e308",
    '"-inf"',
    '"nan"',
    "1e308",
    "-5",
    "0",
    "0.5",
    "true",
    "null",
    "[]",
    "{}",
    "9" * 30,
    '"' + "9" * 400 + '"',
)


async def batch_numbers(attack: Attack) -> None:
    """Run lines with absurd lengths and counts of answers, and lines that are no requests at all."""
    bodies = [f"{HI.replace(f':{TOKENS},', f':{odd},')}}}" for odd in ODD] + [f'{HI},"n":{odd}}}' for odd in ODD]
    await attack.run_batch("odd numbers", [*bodies, "{}", '{"model":5}', '{"max_tokens":-1e30}'], innocent_lines(10))


async def send_pieces(attack: Attack) -> None:
    """Send prompts in thousands of pieces."""
    for bomb in joined(MODEL):
        for size in SIZES:
            await attack.send([Request(f"{bomb.name} of {size:,}", bomb.path, lambda b=bomb, s=size: b.make(s))], 1)  # type: ignore[misc]


async def send_tools(attack: Attack) -> None:
    """Send tools with large definitions and many parameters."""

    def make(size: int) -> str:  # fmt: skip
        names = ",".join(f'"p{i}":{{}}' for i in range(size // 30))
        schema = f'{{"type":"object","$defs":{{"d":{{"description":"{"x" * (size // 2)}"}}}},"properties":{{{names}}}}}'
        return of_tools(HostileGrammar("", "json", always(schema)), 0)

    sizes = (25_000, 100_000, 400_000, 1_600_000, MAX_BYTES - 1_000)
    await attack.send([Request(f"tools of {size:,}", CHAT, lambda s=size: make(s)) for size in sizes], 1)  # type: ignore[misc]


async def write_blanks(attack: Attack) -> None:
    """Make the model answer with white space where a call of a function may begin."""
    prompt = f'{{"model":"{MODEL}","prompt":"\\n\\n\\n\\n","max_tokens":1,"return_token_ids":true}}'
    _, answer = await ask(attack.session, "/v1/completions", prompt.encode())
    blank = json.loads(answer)["choices"][0]["prompt_token_ids"][-1]
    tools = '"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}]'
    lengths = (300, 600, 1200, 1900)
    most = attack.scale.of(len(lengths), 2)
    for tokens in lengths[:most]:
        for stream in ("true", "false"):
            body = HI.replace(f":{TOKENS},", f":{tokens},") + f',"logit_bias":{{"{blank}":100}},"ignore_eos":true,'
            whole = f'{body}"stream":{stream},{tools}}}'
            await attack.send([Request(f"{tokens} blanks, stream {stream}", CHAT, lambda whole=whole: whole)], 1)  # type: ignore[misc]


async def create_batches(attack: Attack) -> None:
    """Create a batch of one line again and again."""
    uploaded = await load.upload(attack.session, load.line("a", json.dumps(load.body_of([20, 21], 1))).encode())
    file = (await uploaded.json())["id"]
    body = dump({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"})
    count = attack.scale.of(1000, 50)
    await attack.send([Request(f"batch {i}", "/v1/batches", lambda: body) for i in range(count)])


SERVERS: Sequence[tuple[str, Sequence[Stage]]] = (
    (
        "qwen3_xml",
        (batch_numbers, send_pieces, send_tools, batch_schemas, send_grammars, batch_grammars, create_batches),
    ),
    ("llama3_json", (write_blanks,)),
    ("hermes", (write_blanks,)),
)
"""Formats of tools, and the stages that a server with each goes through."""


async def inputs(scale: Scale) -> list[Promise]:
    """Hostile requests, grammars and batch lines of all sizes, beside a stream and others' structured requests."""
    found = []
    for parser, stages in SERVERS:
        left = list(stages)
        while left:  # a stage that takes the server away costs the next one a new server
            with start("--tool-parser", parser) as server:
                found += await _go_through(server, scale, parser, left)
    return found


async def _go_through(server: Server, scale: Scale, parser: str, left: list[Stage]) -> list[Promise]:
    """Run stages, removing them from `left`, until one has taken the server away."""
    found: list[Promise] = []
    async with server.session(seconds=ANSWER_SECONDS) as session:
        expected = await oracle.undisturbed(session)
        async with bystanders(server, session, expected, scale) as calm:
            await asyncio.sleep(QUIET_SECONDS)
        worst, late = 1e3 * calm.probes.worst(), 1e3 * calm.probes.late
        print(f"  {parser}: without hostile requests /health took at most {worst:.0f} ms, "
              f"a process waited at most {late:.0f} ms for a core", flush=True)  # fmt: skip
        while left:
            stage = left.pop(0)
            attack = Attack(session, scale, scale.dice())
            begin = time.monotonic()
            async with bystanders(server, session, expected, scale) as beside:
                await stage(attack)
            name = f"{stage.__name__} {parser}" if stage is write_blanks else stage.__name__
            _report(name, attack, time.monotonic() - begin)
            found.append(shown(f"{name}: answers", str(attack.answers.total())))
            found += [never(f"{name}: wrong answers", len(attack.wrong)), *of_bystanders(name, beside, calm.probes)]
            if beside.gone:
                server.kill()
                break
    return found


def _report(name: str, attack: Attack, seconds: float) -> None:
    slowest = ", ".join(f"{took:.1f} s {what}" for took, what in sorted(attack.slow, reverse=True)[:3])
    print(f"  {name}: {seconds:.0f} s, {dict(attack.answers)}; slowest: {slowest or '-'}", flush=True)
    for wrong in attack.wrong[:10]:
        print(f"  {name}: {wrong}", flush=True)
