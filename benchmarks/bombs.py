"""Request bodies that are small on the wire and large in what they may make a server do: every one within the limit of
bytes, made anew on each call. `python -m benchmarks.bombs URL` sends them to a server and prints how long one beside
them waited.

What each must be answered is a set of statuses; how much work it may cost is the affair of who sends it.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

CHAT, COMPLETIONS, BATCHES = "/v1/chat/completions", "/v1/completions", "/v1/batches"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
MAX_BYTES = 4 * 1024 * 1024
SMALL_BYTES = 32 * 1024  # what is parsed on the event loop itself


@dataclass(frozen=True)
class Bomb:
    """`make(size)` gives a body of at most `size` bytes."""

    name: str
    path: str
    make: Callable[[int], bytes]
    statuses: tuple[int, ...] = (400,)


def repeated(start: str, unit: str, end: str) -> Callable[[int], bytes]:
    """`start`, as many units as fit with commas between them, `end`. A unit with a `%` is numbered."""

    def make(size: int) -> bytes:
        room = size - len(start.encode()) - len(end.encode())
        if "%" in unit:
            each = len((unit % 10**7).encode()) + 1
            middle = ",".join([unit % i for i in range(room // each)])
        else:
            middle = ",".join([unit] * (room // (len(unit.encode()) + 1)))
        return (start + middle + end).encode()

    return make


def filled(start: str, unit: str, end: str = "") -> Callable[[int], bytes]:
    """The same without commas: one long text, or many brackets."""
    return lambda size: (start + unit * ((size - len((start + end).encode())) // len(unit.encode())) + end).encode()


def nested(start: str, opening: str, closing: str, end: str, depth: int) -> Callable[[int], bytes]:
    return lambda _: (start + opening * depth + closing * depth + end).encode()


def _chat(model: str) -> Iterator[Bomb]:
    head = f'{{"model":"{model}",'
    hi = '"messages":[{"role":"user","content":"hi"}]'
    parts = head + '"messages":[{"role":"user","content":['
    for name, unit in {
        "empty parts": "{}",
        "null parts": "null",
        "number parts": "1",
        "text parts": '"a"',
        "array parts": "[]",
        "parts of an unknown kind": '{"type":"image_url"}',
        "parts with an unknown name": '{"type":"text","text":"","x":1}',
        "parts with many wrong fields": '{"type":1,"text":2,"a":3,"b":4}',
        "good parts": '{"type":"text","text":""}',
    }.items():
        yield Bomb(name, CHAT, repeated(parts, unit, "]}]}"))
    named = '{"type":"text","text":"",'
    yield Bomb("a part of many names", CHAT, repeated(parts + named, '"%x":0', "}]}]}"))
    calls = head + '"messages":[{"role":"assistant","content":"","tool_calls":['
    good_call = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
    for name, unit in {"empty": "{}", "null": "null", "array": "[]", "good": good_call}.items():
        yield Bomb(f"{name} tool calls", CHAT, repeated(calls, unit, "]}]}"))
    yield Bomb("a tool call of many names", CHAT, repeated(calls + "{", '"%x":0', "}]}]}"))
    messages = head + '"messages":['
    for name, unit, statuses in (
        ("empty messages", "{}", (400,)),
        ("array messages", "[]", (400,)),
        ("number messages", "1", (400,)),
        ("messages of an unknown role", '{"role":"king","content":"x"}', (400,)),
        ("messages with many wrong fields", '{"role":1,"content":2,"name":3,"a":4,"b":5}', (400,)),
        ("good messages", '{"role":"user","content":"x"}', (400,)),
    ):
        yield Bomb(name, CHAT, repeated(messages, unit, "]}"), statuses)
    yield Bomb("a message of many names", CHAT, repeated(messages + "{", '"%x":0', "}]}"))
    yield Bomb(
        "4096 messages", CHAT, lambda _: (messages + ",".join(['{"role":"user","content":"x"}'] * 4096) + "]}").encode()
    )
    yield Bomb("unknown names", CHAT, repeated(head + hi + ",", '"%x":0', "}"))
    yield Bomb("the same name again", CHAT, repeated(head + hi + ",", '"a":0', "}"))
    yield Bomb("a long name", CHAT, filled(head + hi + ',"', "x", '":0}'))
    for name in ("metadata", "tools", "response_format"):
        refused = (400,)
        yield Bomb(f"{name} of arrays", CHAT, repeated(head + hi + f',"{name}":[', "[]", "]}"), refused)
        yield Bomb(f"{name} of objects", CHAT, repeated(head + hi + f',"{name}":[', '{"a":{}}', "]}"), refused)
        yield Bomb(f"{name} of names", CHAT, repeated(head + hi + f',"{name}":{{', '"%x":0', "}}"), refused)
        yield Bomb(f"{name} of texts", CHAT, repeated(head + hi + f',"{name}":[', '"%x"', "]}"), refused)
        yield Bomb(f"{name} of fractions", CHAT, repeated(head + hi + f',"{name}":[', "1e5", "]}"))
        allowed = (200,) if name == "metadata" else (400,)  # clients send it, and it changes nothing
        yield Bomb(f"{name} of numbers", CHAT, repeated(head + hi + f',"{name}":[', "12345", "]}"), allowed)
        yield Bomb(f"{name} 1,000 deep", CHAT, nested(head + hi + f',"{name}":', "[", "]", "}", 1000), allowed)
    yield Bomb("messages 1,000 deep", CHAT, nested(messages, '[{"a":', "}]", "]}", 500))
    yield Bomb("opening brackets", CHAT, filled(messages, "["))
    yield Bomb("opening objects", CHAT, filled(messages, '{"a":'))
    yield Bomb("arrays with an error at the end", CHAT, repeated(head + '"metadata":[', "[]", "}"))
    yield Bomb("stop of texts", CHAT, repeated(head + hi + ',"stop":[', '"a"', "]}"))
    yield Bomb("stop of nothing", CHAT, repeated(head + hi + ',"stop":[', "null", "]}"))
    yield Bomb("stop token ids", CHAT, repeated(head + hi + ',"stop_token_ids":[', "-1", "]}"))
    yield Bomb("logit bias", CHAT, repeated(head + hi + ',"logit_bias":{', '"%x":1', "}}"))
    yield Bomb("bad logit bias", CHAT, repeated(head + hi + ',"logit_bias":{', '"%x":"a"', "}}"))
    yield Bomb("stream options", CHAT, repeated(head + hi + ',"stream":true,"stream_options":{', '"%x":1', "}}"))
    yield Bomb("a long number", CHAT, filled(head + hi + ',"seed":', "1", "}"))
    yield Bomb("a long fraction", CHAT, filled(head + hi + ',"temperature":0.', "1", "}"), (200, 400))
    yield Bomb("a long role", CHAT, filled(head + '"messages":[{"content":"x","role":"', "x", '"}]}'))
    yield Bomb("a long model", CHAT, filled('{"messages":[{"role":"user","content":"x"}],"model":"', "x", '"}'), (404,))


def _texts(model: str) -> Iterator[Bomb]:
    """Text that no context holds, in all the ways that are slow to read."""
    for name, unit, statuses in (
        ("words", "the quick brown fox ", (400,)),
        ("one letter", "a", (400,)),
        ("digits", "0123456789", (400,)),
        ("control tokens", "<|im_end|>", (400,)),
        ("combining marks", "a\u0301\u0323", (400,)),
        ("emoji", "\U0001f469\u200d\U0001f4bb", (400,)),
        ("Chinese", "\u4e2d\u6587", (400,)),
        ("escapes", "\\u4e2d", (400,)),
        ("quotes", '\\"', (400,)),
        ("brackets", "[{,", (400,)),
        ("spaces", " ", (200,)),
        ("new lines", "\\n", (200,)),
        ("noncharacters", "\ufdd0", (400,)),
    ):
        start = f'{{"model":"{model}","messages":[{{"role":"user","content":"x'
        yield Bomb(f"text of {name}", CHAT, filled(start, unit, '"}]}'), statuses)
    head = f'{{"model":"{model}","prompt":'
    yield Bomb("a prompt of words", COMPLETIONS, filled(head + '"', "the quick brown fox ", '"}'))
    yield Bomb("128 prompts of words", COMPLETIONS, lambda size: _prompts_of_words(head, 128, size // 135))
    start = f'{{"model":"{model}","messages":[{{"role":"user","content":['
    part = '{"type":"text","text":"' + "word " * 400 + '"}'
    yield Bomb("text in parts", CHAT, repeated(start, part, "]}]}"))


def _prompts_of_words(start: str, prompts: int, size: int) -> bytes:
    one = '"' + "word " * (size // 5) + '"'
    return f"{start}[{','.join([one] * prompts)}]}}".encode()


def _completions(model: str) -> Iterator[Bomb]:
    prompt = f'{{"model":"{model}","prompt":'
    for name, unit in {
        "token ids": "1",
        "large token ids": "99999",
        "negative token ids": "-1",
        "fractions": "0.5",
        "null prompts": "null",
        "empty prompts": '""',
        "array prompts": "[]",
        "object prompts": "{}",
        "prompts of one token": "[1]",
        "prompts of some tokens": f"[{','.join(['12345'] * 300)}]",
    }.items():
        yield Bomb(name, COMPLETIONS, repeated(prompt + "[", unit, "]}"))
    yield Bomb("a token id, then arrays", COMPLETIONS, repeated(prompt + "[1,", "[]", "]}"))
    yield Bomb("128 prompts of token ids", COMPLETIONS, lambda size: _prompts_of_ids(prompt, 128, size // 270))
    yield Bomb("a prompt 500 deep", COMPLETIONS, nested(prompt, '{"a":', "}", "}", 500))
    yield Bomb("a prompt 300 deep in arrays", COMPLETIONS, nested(prompt, "[", "]", "}", 300))


def _prompts_of_ids(start: str, prompts: int, ids: int) -> bytes:
    one = f"[{','.join(['1'] * ids)}]"
    return f"{start}[{','.join([one] * prompts)}]}}".encode()


def _responses(model: str) -> Iterator[Bomb]:
    head = f'{{"model":"{model}",'
    items = head + '"input":['
    for name, unit in {
        "empty items": "{}",
        "null items": "null",
        "array items": "[]",
        "items of an unknown type": '{"type":"computer_call"}',
        "items with many wrong fields": '{"role":1,"content":2,"a":3,"b":4}',
        "good items": '{"role":"user","content":"x"}',
        "calls": '{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}',
        "empty thoughts": '{"type":"reasoning","summary":[]}',
        "answers of functions": '{"type":"function_call_output","call_id":"a","output":[]}',
    }.items():
        yield Bomb(f"responses: {name}", RESPONSES, repeated(items, unit, "]}"))
    part = '{"type":"input_text","text":""}'
    yield Bomb("responses: parts", RESPONSES, repeated(items + '{"role":"user","content":[', part, "]}]}"))
    yield Bomb("responses: bad parts", RESPONSES, repeated(items + '{"role":"user","content":[', "{}", "]}]}"))
    yield Bomb("responses: an item of many names", RESPONSES, repeated(items + "{", '"%x":0', "}]}"))
    yield Bomb("responses: unknown names", RESPONSES, repeated(head + '"input":"x",', '"%x":0', "}"))
    for name in ("metadata", "tools", "include", "text", "reasoning"):
        start = head + f'"input":"x","{name}":'
        yield Bomb(f"responses: {name} of objects", RESPONSES, repeated(start + "[", '{"a":{}}', "]}"))
        yield Bomb(f"responses: {name} of names", RESPONSES, repeated(start + "{", '"%x":0', "}}"))
        yield Bomb(f"responses: {name} of texts", RESPONSES, repeated(start + "[", '"%x"', "]}"))
    hosted = repeated(head + '"input":"x","tools":[', '{"type":"web_search"}', "]}")
    yield Bomb("responses: hosted tools", RESPONSES, hosted)
    yield Bomb("responses: items 1,000 deep", RESPONSES, nested(items, '[{"a":', "}]", "]}", 500))
    yield Bomb("responses: a text of words", RESPONSES, filled(head + '"input":"', "the quick brown fox ", '"}'))
    yield Bomb("responses: instructions", RESPONSES, filled(head + '"input":"x","instructions":"', "a b ", '"}'))
    long_type = filled(items + '{"content":"x","type":"', "x", '"}]}')
    yield Bomb("responses: a long type", RESPONSES, long_type, (200,))  # a note of its first characters stands for it


def _messages(model: str) -> Iterator[Bomb]:
    head = f'{{"model":"{model}","max_tokens":9,'
    messages = head + '"messages":['
    blocks = messages + '{"role":"user","content":['
    for name, unit in {
        "empty blocks": "{}",
        "null blocks": "null",
        "images": '{"type":"image"}',
        "texts": '{"type":"text","text":""}',
        "wrong texts": '{"type":"text","text":1}',
        "calls": '{"type":"tool_use","id":"a","name":"f","input":{}}',
        "results": '{"type":"tool_result","tool_use_id":"a"}',
        "thoughts": '{"type":"thinking","thinking":""}',
    }.items():
        yield Bomb(f"messages: {name}", MESSAGES, repeated(blocks, unit, "]}]}"))
    yield Bomb(
        "messages: more answers than messages", MESSAGES, lambda size: _answers(messages, min(4096, size // 100))
    )
    for name, unit in {
        "empty ones": "{}",
        "null ones": "null",
        "good ones": '{"role":"user","content":"x"}',
        "empty turns": '{"role":"assistant","content":[]}',
    }.items():
        yield Bomb(f"messages: {name}", MESSAGES, repeated(messages, unit, "]}"))
    hi = '"messages":[{"role":"user","content":"hi"}]'
    yield Bomb("messages: unknown names", MESSAGES, repeated(head + hi + ",", '"%x":0', "}"))
    for name in ("system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences"):
        start = head + hi + f',"{name}":'
        yield Bomb(f"messages: {name} of objects", MESSAGES, repeated(start + "[", '{"a":{}}', "]}"))
        yield Bomb(f"messages: {name} of texts", MESSAGES, repeated(start + "[", '"%x"', "]}"))
        ignored = (200, 400) if name == "output_config" else (400,)  # it may hold other names
        yield Bomb(f"messages: {name} of names", MESSAGES, repeated(start + "{", '"%x":0', "}}"), ignored)
    search = '{"type":"web_search_20250305"}'
    yield Bomb("messages: server tools", MESSAGES, repeated(head + hi + ',"tools":[', search, "]}"))
    deep = messages + '{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":'
    end = "}]},{" + '"role":"user","content":"x"}]}'
    yield Bomb("messages: a call 500 deep", MESSAGES, nested(deep, '{"a":', "}", end, 500))
    yield Bomb("messages: a system of words", MESSAGES, filled(head + hi + ',"system":"', "the quick brown fox ", '"}'))
    billing = filled(head + hi + ',"system":"', "x-anthropic-billing-header: ", '"}')
    yield Bomb("messages: a long billing line", MESSAGES, billing, (200,))
    count = f'{{"model":"{model}","messages":[{{"role":"user","content":"'
    yield Bomb("messages: words to count", COUNT, filled(count, "the quick brown fox ", '"}]}'))


def _answers(start: str, number: int) -> bytes:
    """As many as a message may have, twice."""
    turn = '{"role":"user","content":[' + ",".join(['{"type":"tool_result","tool_use_id":"a"}'] * number) + "]}"
    return f"{start}{turn},{turn}]}}".encode()


def _batches() -> Iterator[Bomb]:
    head = '{"input_file_id":"file-x","endpoint":"/v1/completions","completion_window":"24h"'
    yield Bomb("batch: metadata", BATCHES, repeated(head + ',"metadata":{', '"%x":"a"', "}}"))
    yield Bomb("batch: bad metadata", BATCHES, repeated(head + ',"metadata":{', '"%x":1', "}}"))
    yield Bomb("batch: metadata of arrays", BATCHES, repeated(head + ',"metadata":{"a":[', "[]", "]}}"))
    yield Bomb("batch: unknown names", BATCHES, repeated(head + ",", '"%x":1', "}"))
    yield Bomb(
        "batch: a long window", BATCHES, filled('{"completion_window":"', "1", 'h","input_file_id":"","endpoint":""}')
    )


def joined(model: str) -> Iterator[Bomb]:
    """Yield bodies whose pieces of text a server puts together to one prompt."""
    hi = f'{{"model":"{model}","max_tokens":9,"messages":[{{"role":"user","content":"hi"}}],"system":['
    thought = f'{{"model":"{model}","max_tokens":9,"messages":[{{"role":"assistant","content":['
    end = ']},{"role":"user","content":"x"}]}'
    for name, path, start, opening, closing, after in (
        ("messages: a system in pieces", MESSAGES, hi, '{"type":"text","text":"', '"}', "]}"),
        ("messages: thoughts in pieces", MESSAGES, thought, '{"type":"thinking","thinking":"', '"}', end),
        ("responses: a system in pieces", RESPONSES, f'{{"model":"{model}","input":[',
         '{"role":"system","content":"', '"}', "]}"),
        ("responses: a thought in pieces", RESPONSES, f'{{"model":"{model}","input":[',
         '{"type":"reasoning","summary":[{"type":"summary_text","text":"', '"}]}', "]}"),
    ):  # fmt: skip
        statuses = (200, 400) if "reasoning" in opening else (400,)  # some templates leave thoughts out
        yield Bomb(name, path, pieces(start, opening, closing, after), statuses)


def pieces(start: str, opening: str, closing: str, end: str) -> Callable[[int], bytes]:
    """Fill a body with 4,000 equal texts, or with fewer texts of one letter."""

    def make(size: int) -> bytes:
        room = size - len(start + end)
        count = min(4000, room // len(opening + closing + "a,"))
        text = "a" * (room // count - len(opening + closing + ","))
        return (start + ",".join([opening + text + closing] * count) + end).encode()

    return make


def bombs(model: str) -> list[Bomb]:
    """All of them, for a server that calls its model so."""
    first = [*_chat(model), *_texts(model), *_completions(model), *_responses(model), *_messages(model), *_batches()]
    return [*first, *joined(model)]


async def _main() -> None:
    import httpx

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--at-once", type=int, default=1, metavar="N")
    options = parser.parse_args()
    headers = {"authorization": f"Bearer {options.api_key}", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=options.url, headers=headers, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for bomb in bombs(model):
            body = bomb.make(MAX_BYTES)
            sent = asyncio.gather(*(client.post(bomb.path, content=body) for _ in range(options.at_once)))
            worst, begin = 0.0, time.perf_counter()
            while not sent.done():
                start = time.perf_counter()
                await client.get("/version")
                worst = max(worst, time.perf_counter() - start)
                await asyncio.sleep(0.002)
            statuses = {answer.status_code for answer in await sent}
            well = "" if statuses <= {*bomb.statuses, 429, 503} else "  UNEXPECTED"
            took = time.perf_counter() - begin
            print(f"{1e3 * worst:8.1f} ms beside it {1e3 * took:9.1f} ms  {sorted(statuses)}  {bomb.name}{well}")


if __name__ == "__main__":
    asyncio.run(_main())
