"""Requests and batches that cost a server more than they should, of all sizes up to the limit of a body: the loads of
the parts `inputs` and `blanks`."""

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import orjson

from benchmarks.chaos import load
from benchmarks.chaos.load import MODEL
from benchmarks.chaos.promises import Scale
from benchmarks.chaos.work import CHAT, ask
from benchmarks.hostile import MAX_BYTES, Bomb, HostileGrammar, Make, always, dump, grammars, joined
from loadgen import ServerError
from loadgen.client import upload

if TYPE_CHECKING:
    from benchmarks.chaos.engine import Saboteur

SERVED = (200, 400, 413)
"""Statuses of an answer that is right: the request is served or refused."""
SIZES = (2_000, 64_000, 250_000, MAX_BYTES - 1_000)
TOOL_SIZES = (25_000, 100_000, 400_000, 1_600_000, MAX_BYTES - 1_000)
AT_ONCE, TOKENS, BATCH_SECONDS = 4, 48, 600.0
RESPONSES = "/v1/responses"
HI = f'{{"model":"{MODEL}","max_tokens":{TOKENS},"messages":[{{"role":"user","content":"hi"}}],"temperature":0'


def sized(name: str, path: str, make: Make, sizes: Sequence[int] = SIZES) -> Iterator[Bomb]:
    """Yield a body in each size."""
    for size in sizes:
        yield Bomb(f"{name} of {size:,}", path, lambda _limit, size=size: make(size), SERVED)  # type: ignore[misc]


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


def grammar_bombs() -> Iterator[Bomb]:
    """Yield every grammar in every size, by every way that takes it."""
    for grammar in grammars():
        yield from sized(f"{grammar.name} by chat", CHAT, partial(of_chat, grammar))
        if grammar.kind == "json":
            yield from sized(f"{grammar.name} by tools", CHAT, partial(of_tools, grammar))
            yield from sized(f"{grammar.name} by responses", RESPONSES, partial(of_responses, grammar))


def large_tools(size: int) -> str:
    """Return a request with a tool of a large definition and many parameters."""
    names = ",".join(f'"p{i}":{{}}' for i in range(size // 30))
    schema = f'{{"type":"object","$defs":{{"d":{{"description":"{"x" * (size // 2)}"}}}},"properties":{{{names}}}}}'
    return of_tools(HostileGrammar("", "json", always(schema)), 0)


def of_schema(schema: str) -> str:
    return of_chat(HostileGrammar("", "json", always(schema)), 0)


def slow_schema(number: int) -> str:
    """Return a schema of its own that compiles slowly."""
    pattern = {"type": "string", "pattern": "^[a-z]{1,8}(-[0-9a-f]{4,12}){1,4}$"}
    return dump({"type": "object", "properties": {f"p{number}_{k}": pattern for k in range(300)}})


def innocent_lines(count: int, start: int = 0) -> list[str]:
    """Return bodies with small schemas of their own."""
    names = [f"q{i}" for i in range(start, start + count)]
    kind = {"type": "boolean"}
    return [of_schema(dump({"type": "object", "properties": {name: kind}, "required": [name]})) for name in names]


ODD = (
    "-1e30", "-1e308", '"-inf"', '"nan"', "1e308", "-5", "0", "0.5", "true", "null", "[]", "{}", "9" * 30,
    '"' + "9" * 400 + '"',
)  # fmt: skip


def odd_lines() -> list[str]:
    """Return lines with absurd lengths and counts of answers, and lines that are no requests at all."""
    bodies = [f"{HI.replace(f':{TOKENS},', f':{odd},')}}}" for odd in ODD] + [f'{HI},"n":{odd}}}' for odd in ODD]
    return [*bodies, "{}", '{"model":5}', '{"max_tokens":-1e30}']


def _is_json(body: str) -> bool:
    """Return whether a batch takes the body as a line: one line that is no JSON fails its batch."""
    try:
        return orjson.loads(body) is not None
    except orjson.JSONDecodeError:
        return False


async def run_batch(
    saboteur: "Saboteur", scale: Scale, name: str, hostile: Sequence[str], innocent: Sequence[str]
) -> None:
    """Run one batch of both kinds of lines, mixed; each is a body. Note lost lines, and innocent lines that failed."""
    bodies = {f"hostile-{i}": body for i, body in enumerate(hostile)}
    bodies |= {f"innocent-{i}": body for i, body in enumerate(innocent)}
    lines = [load.line(line, body, CHAT) for line, body in bodies.items()]
    scale.dice().shuffle(lines)
    saboteur.faults[f"batch of {name}"] += 1
    try:
        batch = await load.submit(saboteur.client, lines, CHAT)
        state = await load.wait_batch(saboteur.client, batch, time.monotonic() + BATCH_SECONDS)
        rows, errors = await load.read_rows(saboteur.client, state)
    except (ServerError, KeyError) as error:
        saboteur.wrong[f"batch of {name}: {type(error).__name__} {error}"] += 1
        return
    missing = load.miscounted(bodies, rows + errors)
    if state["status"] != "completed" or missing:
        why = f"{state['request_counts']}, {dump(state.get('errors'))[:300]}"
        saboteur.wrong[f"batch of {name}: {state['status']}, {missing} lines without one row, {why}"] += 1
    for row in errors:
        if row["custom_id"].startswith("innocent"):
            saboteur.wrong[f"batch of {name}: an innocent line failed: {json.dumps(row)[:240]}"] += 1


async def send_inputs(saboteur: "Saboteur", scale: Scale) -> None:
    """Send prompts in thousands of pieces, large tools and grammars, run batches of such lines, and create a batch of
    one line again and again."""
    pieces = [bomb for each in joined(MODEL) for bomb in sized(each.name, each.path, each.text)]
    await saboteur.send_bombs([*pieces, *sized("tools", CHAT, large_tools, TOOL_SIZES)], 1)
    await run_batch(saboteur, scale, "odd numbers", odd_lines(), innocent_lines(10))
    schemas = [of_schema(slow_schema(i)) for i in range(scale.of(300, 20))]
    await run_batch(saboteur, scale, "schemas of their own", [], schemas)
    await saboteur.send_bombs(scale.some(list(grammar_bombs()), 24), AT_ONCE)
    for size in SIZES[:3]:
        hostile = [body for each in scale.some(grammars(), 12) if _is_json(body := of_chat(each, size))]
        await run_batch(saboteur, scale, f"grammars of {size:,}", hostile, innocent_lines(scale.of(100, 10), size))
    line = load.line("a", json.dumps(load.body_of([20, 21], 1)))
    file = await upload(saboteur.client, line.encode(), "lines.jsonl")
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    again = Bomb("a batch", "/v1/batches", always(batch), SERVED)
    await saboteur.send_bombs([again] * scale.of(1000, 50), AT_ONCE)


async def write_blanks(saboteur: "Saboteur", scale: Scale) -> None:
    """Make the model answer with white space where a call of a function may begin."""
    prompt = f'{{"model":"{MODEL}","prompt":"\\n\\n\\n\\n","max_tokens":1,"return_token_ids":true}}'
    _, answer = await ask(saboteur.client, "/v1/completions", prompt.encode())
    blank = json.loads(answer)["choices"][0]["prompt_token_ids"][-1]
    tools = '"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}]'
    lengths, bombs = (300, 600, 1200, 1900), list[Bomb]()
    for tokens in lengths[: scale.of(len(lengths), 2)]:
        head = HI.replace(f":{TOKENS},", f":{tokens},") + f',"logit_bias":{{"{blank}":100}},"ignore_eos":true,{tools}'
        for stream in ("true", "false"):
            body = always(f'{head},"stream":{stream}}}')
            bombs.append(Bomb(f"{tokens} blanks, stream {stream}", CHAT, body, SERVED))
    await saboteur.send_bombs(bombs, 1)
