"""An answer is taken apart with little held back; `test_cost_answers` measures that the work grows linearly."""

import asyncio
import functools
import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from cost_tools import cost_of
from test_tools import FUNCTIONS, take_apart

from engine.api import FinishReason, TokenLogprobs
from gateway.generate import answer_parser
from gateway.generate.answer_parser import MAX_BLANKS, MAX_CALL_CHARS, OutputDelta, ParsedText, Parsing
from gateway.generate.answering import INLINE_ANSWER_PARTS, collect
from gateway.generate.choices import Generation, Used
from gateway.generate.completions import CompletionLogprobs, chat_logprobs
from gateway.generate.tool_formats import FORMATS, MAX_DEPTH, Call, read_calls

CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'


def pieces_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)] if size else [text]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_held_is_bounded(name: str) -> None:
    """White space, and a call that does not end; no part is lost."""
    calls = FORMATS[name].calls
    for text in ("\n" * 5 * MAX_BLANKS, (calls.mark or calls.leads) + "a" * (MAX_CALL_CHARS + 9)):
        for size in (1000, 0):
            parser, out = Parsing(FORMATS[name], FUNCTIONS).parser(), ""
            for piece in pieces_of(text, size):
                out += parser.push(piece).text
            assert len(out) >= len(text) - MAX_BLANKS
            assert out + parser.push("", final=True).text == text


@pytest.mark.parametrize("room", [MAX_BLANKS - 1, MAX_BLANKS, MAX_BLANKS + 1])
def test_white_space_beside_a_call_is_left_out_up_to_a_bound(room: int) -> None:
    parsing = Parsing(FORMATS["hermes"], FUNCTIONS)
    text = "said" + " " * room + CALL
    expected = ParsedText("said" + " " * max(0, room - MAX_BLANKS), "", [Call("weather", "{}")])
    for size in (0, 1, 700):
        assert take_apart(parsing, pieces_of(text, size)) == expected


@pytest.mark.parametrize("name", ["pythonic", "llama3_json"])
@pytest.mark.parametrize("room", [MAX_BLANKS, MAX_BLANKS + 1])
def test_calls_begin_the_answer_behind_little_white_space(name: str, room: int) -> None:
    call = "[weather()]" if name == "pythonic" else '{"name": "weather", "parameters": {}}'
    for size in (0, 1, 700):
        whole = take_apart(Parsing(FORMATS[name], FUNCTIONS), pieces_of("\n" * room + call, size))
        assert whole == (
            ParsedText("", "", [Call("weather", "{}")]) if room <= MAX_BLANKS else ParsedText("\n" * room + call)
        )


def test_too_long_a_call_is_text_and_the_next_one_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_parser, "MAX_CALL_CHARS", len(CALL))
    long = "<tool_call>" + "[" * (len(CALL) + 1) + "</tool_call>"
    text = f"{long} {long}{CALL}"
    for size in (0, 1, 13, 60):
        whole = take_apart(Parsing(FORMATS["hermes"], FUNCTIONS), pieces_of(text, size))
        assert whole == ParsedText(f"{long} {long}", "", [Call("weather", "{}")])


@pytest.mark.parametrize("name", ["pythonic", "llama3_json"])
def test_leading_calls_may_follow_a_thought(name: str) -> None:
    call = "[weather()]" if name == "pythonic" else '<|python_tag|>{"name": "weather", "parameters": {}}'
    for text in (f"<think>hm</think>\n\n{call}", f"\n<think>hm</think>{call}"):
        for size in (0, 1, 4):
            whole = take_apart(Parsing(FORMATS[name], FUNCTIONS, reasons=True), pieces_of(text, size))
            assert whole == ParsedText(text[: text.find("<")], "hm", [Call("weather", "{}")])
    said = take_apart(Parsing(FORMATS[name], FUNCTIONS, reasons=True), [f"So: <think>hm</think>{call}"])
    assert said == ParsedText(f"So: {call}", "hm")


def test_the_only_thought_is_the_first_thing() -> None:
    parsing = Parsing(reasons=True, once=True)
    for size in (0, 1, 3):
        assert take_apart(parsing, pieces_of('<think>hm</think>{"a": "<think>"}', size)) == ParsedText(
            '{"a": "<think>"}', "hm"
        )
        assert take_apart(parsing, pieces_of("a<think>b</think>", size)) == ParsedText("a<think>b</think>")
        assert take_apart(parsing, pieces_of("<thi", size)) == ParsedText("<thi")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("a=1, b=-2.5, c=1e3, d=0x1F, e=1_000, f=.5", {"a": 1, "b": -2.5, "c": 1000.0, "d": 31, "e": 1000, "f": 0.5}),
        (r"""a='it\'s', b="\x41\n", c=r'\d', d='a' "b" """, {"a": "it's", "b": "A\n", "c": "\\d", "d": "ab"}),
        ("a=[1, {'k': (2,)},], b=(), c=(3)", {"a": [1, {"k": [2]}], "b": [], "c": 3}),
        ("a=True, b=None,\n c = False", {"a": True, "b": None, "c": False}),
    ],
)
def test_literals_of_python(text: str, arguments: dict[str, Any]) -> None:
    ((name, read),) = read_calls(f" [x.y({text})]\n")
    assert name == "x.y" and json.loads(read) == arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        "f()", "x", "1 + 1", "f'{x}'", "b'x'", "{1: 2}", "{1}", "'a", "0b2", "--1", "1 2", "*x",
        "lambda: 0", "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), r"'\x4'",
    ],
)  # fmt: skip
def test_anything_else_is_no_call(value: str) -> None:
    for text in (f"[f(a={value})]", f"[f({value})]", f"[f(a=1)] {value}", f"[f(from={value})]", f"f(a={value})", value):
        with pytest.raises(ValueError):
            read_calls(text)


# Parts of a whole answer


class Answered:
    """A generation that has ended; `whole` notes whether the event loop waited for it."""

    def __init__(self, deltas: list[OutputDelta]) -> None:
        self.choices = [None]
        self._deltas = deltas
        self.inline: bool | None = None

    async def deltas(self) -> AsyncIterator[OutputDelta]:
        for delta in self._deltas:
            yield delta

    def usage(self) -> dict[str, Any]:
        return {"total_tokens": 1}

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        self.inline = threading.current_thread() is threading.main_thread()
        return {"n": len(choices[0]), **usage}


LOGPROBS = TokenLogprobs(-1.0, ((1, -1.0), (2, -20000.0)))


@pytest.mark.parametrize(
    ("deltas", "inline"),
    [
        ([OutputDelta(0, "a")] * 20, True),
        ([OutputDelta(0, "a")] * (INLINE_ANSWER_PARTS + 1), False),
        ([OutputDelta(0, "a", logprobs=[(1, LOGPROBS)] * INLINE_ANSWER_PARTS)], False),
        ([OutputDelta(0, "", embedding=b"x" * 64 * INLINE_ANSWER_PARTS)], False),
    ],
)
async def test_a_large_answer_is_put_together_in_a_thread(deltas: list[OutputDelta], inline: bool) -> None:
    answered: Any = Answered(deltas)
    assert await collect(answered, answered) == {"n": len(deltas), "total_tokens": 1}
    assert answered.inline is inline


@pytest.mark.parametrize("num", [0, 1, 64, 65, 200])
def test_logprobs_in_pieces_are_one_list(num: int) -> None:
    class Words:
        byte_rule = None

        def token_bytes(self, token_id: int) -> bytes:
            return b"w%d" % token_id

        def decode_window(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            return "w" * len(token_ids) * (1 + skip_special_tokens)

    words: Any = Words()
    pairs = [(number, LOGPROBS) for number in range(num)]
    content = orjson.loads(orjson.dumps(chat_logprobs(words, pairs)))
    assert [entry["token"] for entry in content] == [f"w{number}" for number in range(num)]
    assert all(entry["top_logprobs"][1]["logprob"] == -9999.0 for entry in content)
    lists = orjson.loads(orjson.dumps(CompletionLogprobs(words, ()).add(pairs)))
    assert {len(each) for each in lists.values()} == {num} and lists["tokens"] == [f"w{i}" for i in range(num)]
    assert all(top["w1"] == -1.0 and top["w2"] == -9999.0 for top in lists["top_logprobs"])


# Many choices


class Counted:
    """A choice that only counts its outputs."""

    def __init__(self) -> None:
        self.account = SimpleNamespace(num_prompt_tokens=1)
        self.used, self.finished = Used(), False

    def advance(self, output: Any) -> Any:
        self.finished = output.finish_reason is not None
        return output


def merge(num_choices: int, num_outputs: int) -> list[Any]:
    """All deltas of choices whose outputs come one by one."""

    async def run() -> list[Any]:
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(num_choices)]

        async def stream(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
            while True:
                yield await queue.get()

        requests = [SimpleNamespace(final_only=False)] * num_choices
        plan: Any = SimpleNamespace(n=1, parsing=None, scoring=(), requests=requests)
        choices: Any = [Counted() for _ in queues]
        generation = Generation(plan, SimpleNamespace(), choices, [stream(queue) for queue in queues])  # type: ignore[misc]
        each, deltas = num_outputs // num_choices, generation.deltas()
        found = []
        for number in range(num_outputs):
            reason = FinishReason.LENGTH if number // num_choices == each - 1 else None
            queues[number % num_choices].put_nowait(SimpleNamespace(number=number, finish_reason=reason))
            found.append(await anext(deltas))
        assert [delta async for delta in deltas] == []
        return found

    return asyncio.run(run())


@pytest.mark.slow
def test_an_output_costs_the_same_however_many_choices_there_are() -> None:
    assert [output.number for output in merge(8, 64)] == list(range(64))
    few, many = (cost_of(functools.partial(merge, num, 512)).lines for num in (4, 64))
    assert many <= 2 * few
