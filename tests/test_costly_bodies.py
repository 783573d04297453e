"""Bodies and batch lines that cost more than they weigh: each test counts the built values and the reported errors.
One server for all of it."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from batch_tools import FAST, open_folder
from fake_engine import MODEL, FakeEngine, Served, say, serve
from fixtures import refuse_blocking
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from support.fuzz import fuzz
from support.tables import for_each, mostly_slow

from benchmarks import hostile as bombs
from engine.text import chat_template
from engine.text import tokenizer as text
from engine.text.tokenizer import Tokenizer
from gateway.batch.input import check_input
from gateway.generate import completions, messages, wire
from gateway.generate.answering import INLINE_BYTES, read_json
from gateway.generate.validation import parse_json
from gateway.http import json_text
from gateway.http.json_text import LIMITS, JsonSize, TooMuchJson, count_json, load_json

one_loop = pytest.mark.asyncio(loop_scope="module")

MOST_ERRORS = 64
CONTEXT, LONGEST_TOKEN = 512, 13
MOST_CHARS = CONTEXT * LONGEST_TOKEN + 64 * wire.MAX_MESSAGES  # the template adds text to each message


def size_of(value: Any) -> JsonSize:
    """Count the values of a parsed JSON text one by one."""
    containers = strings = values = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        values += 1
        if isinstance(item, dict):
            strings += len(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        containers += isinstance(item, (dict, list))
        strings += isinstance(item, str)
    return JsonSize(containers, strings, values)


@dataclass
class Work:
    """Work of the server since the last call of `clear`."""

    built: list[JsonSize] = field(default_factory=list)
    inline_bytes: list[int] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    read_chars: list[int] = field(default_factory=list)
    inline_items: list[int] = field(default_factory=list)

    def clear(self) -> None:
        for counts in vars(self).values():
            counts.clear()

    def check(self, said: str = "") -> None:
        for size in self.built:
            assert size.containers <= LIMITS.containers and size.strings <= LIMITS.strings, (size, said)
            assert size.commas <= LIMITS.commas + size.containers + 1, (size, said)
        assert all(number <= MOST_ERRORS for number in self.errors), (self.errors, said)
        assert all(size <= INLINE_BYTES for size in self.inline_bytes), (self.inline_bytes, said)
        assert not self.inline_items, (self.inline_items, said)
        assert all(chars <= MOST_CHARS for chars in self.read_chars), (self.read_chars, said)


class CountedJson:
    """In the place of a module's `orjson`."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.JSONDecodeError, self.dumps = orjson.JSONDecodeError, orjson.dumps

    def loads(self, raw: bytes) -> Any:
        if threading.current_thread() is threading.main_thread():
            self._work.inline_bytes.append(len(raw))
        value = orjson.loads(raw)
        self._work.built.append(size_of(value))
        return value


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    monkeypatch.setattr(json_text, "orjson", CountedJson(work))
    read = completions.read_form

    def read_beside(body: Any, *arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            work.inline_items.append(len(body.messages))
        return read(body, *arguments, **options)

    monkeypatch.setattr(completions, "read_form", read_beside)
    translate = messages.translate

    def translate_beside(*arguments: Any) -> Any:
        translated = translate(*arguments)
        if threading.current_thread() is threading.main_thread():
            work.inline_items.append(len(translated.chat.messages))
        return translated

    monkeypatch.setattr(messages, "translate", translate_beside)
    validate = BaseModel.model_validate.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, body: Any) -> Any:
        try:
            return validate(cls, body)
        except ValidationError as error:
            work.errors.append(error.error_count())
            raise

    encode_text = chat_template.encode_text

    def encode(tokenizer: Any, given: str, **options: Any) -> list[int]:
        work.read_chars.append(len(given))
        return encode_text(tokenizer, given, **options)

    for module in (text, chat_template):
        monkeypatch.setattr(module, "encode_text", encode)
    monkeypatch.setattr(BaseModel, "model_validate", classmethod(counted))
    return work


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    with refuse_blocking():
        eos = frozenset({tokenizer.eos_token_id})
        engine = FakeEngine(say(tokenizer, "hello"), eos_token_ids=eos, max_model_len=CONTEXT)
        folder = await open_folder(tmp_path_factory.mktemp("state"))
        async with serve(engine, tokenizer, folder=folder, batch_limits=FAST) as server:
            yield server


ALL = {bomb.name: bomb for bomb in bombs.bombs(MODEL)}


async def send(served: Served, bomb: bombs.Bomb, size: int) -> httpx.Response:
    body = bomb.make(size)
    assert len(body) <= max(size, 200_000)
    async with httpx.AsyncClient(timeout=150, verify=False) as client:
        return await client.post(served.url + bomb.path, content=body, headers={"content-type": "application/json"})


@one_loop
@pytest.mark.parametrize("name", mostly_slow(ALL, list(ALL)[::4]))
@for_each("size", [bombs.MAX_BYTES, bombs.SMALL_BYTES])
async def test_a_bomb_costs_little(served: Served, work: Work, name: str, size: int) -> None:
    work.clear()
    bomb = ALL[name]
    answer = await send(served, bomb, size)
    said = f"{bomb.name}, {size} bytes: {answer.status_code} {answer.text[:500]}"
    assert answer.status_code in (bomb.statuses if size == bombs.MAX_BYTES else (*bomb.statuses, 200, 404)), said
    if answer.status_code != 200:
        names = {"message", "type"} if bomb.path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        assert set(answer.json()["error"]) == names and len(answer.content) < 1000, said
    work.check(said)
    assert not served.engine.num_open, said


def as_line(bomb: bombs.Bomb, size: int) -> bytes:
    body = bomb.make(size - 200)
    return b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n' % (bomb.name.encode(), bomb.path.encode(), body)


LINES = {name: bomb for name, bomb in ALL.items() if bomb.path in (bombs.CHAT, bombs.COMPLETIONS)}


@pytest.mark.parametrize("names", [list(LINES)[::8], pytest.param(list(LINES), marks=pytest.mark.slow)], ids=len)
def test_a_line_costs_its_reader_little(work: Work, names: list[str]) -> None:
    for bomb in map(LINES.__getitem__, names):
        work.clear()
        report = check_input(io.BytesIO(as_line(bomb, bombs.MAX_BYTES)), bomb.path, 10, bombs.MAX_BYTES)
        work.inline_bytes.clear()  # this reader is a process of its own
        work.check(bomb.name)
        assert {error.code for error in report.errors} <= {"invalid_request", "invalid_json_line"}, bomb.name
        assert {error.line for error in report.errors} <= {1}, bomb.name


# --- counts


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.sampled_from('a"\\[{,:\n'), max_size=6),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('b"\\,]'), max_size=3), children, max_size=4)
    ),
    max_leaves=30,
)


numbers = st.lists(st.integers(0, 99), max_size=12)
values = st.recursive(
    json_values | numbers | st.lists(numbers, max_size=6) | st.lists(numbers | st.integers(0, 9), max_size=6),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text("a,", max_size=2), children, max_size=3),
    max_leaves=6,
)
damage = st.none() | st.tuples(st.floats(0, 1), st.sampled_from([b"", *(bytes([c]) for c in b',[]{}" 1:\\')]))


@fuzz(100)
@given(json_values, st.integers(1, 40))
def test_a_count_is_what_is_built(value: Any, window: int) -> None:
    raw = orjson.dumps(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "WINDOW_BYTES", window)
        found = json_text._Counter(raw, LIMITS).count().size
    built = size_of(orjson.loads(raw))
    assert (found.containers, found.strings) == (built.containers, built.strings)
    assert found.commas + found.numbers <= built.commas <= found.commas + found.numbers + found.containers + 1


@fuzz(100)
@given(values, st.booleans(), damage)
def test_what_is_read_in_pieces_is_what_one_reading_gives(
    value: Any, spaced: bool, damage: tuple[float, bytes] | None
) -> None:
    raw = bytearray(orjson.dumps(value, option=orjson.OPT_INDENT_2 if spaced else None))
    if damage is not None:
        place = int(damage[0] * len(raw))
        raw[place : place + (not damage[1])] = damage[1]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WINDOW_BYTES", "PIECE_BYTES"):
            patch.setattr(json_text, name, 8)
        patch.setattr(json_text, "count_json", lambda raw, limits: json_text._Counter(raw, limits).count())
        try:
            expected = orjson.loads(raw)
        except orjson.JSONDecodeError:
            with pytest.raises(orjson.JSONDecodeError):
                load_json(raw)
        else:
            assert load_json(raw) == expected


def test_token_ids_are_read_in_pieces(work: Work) -> None:
    """However many there are, and beside text that looks like them."""
    ids = list(range(100_000, 300_000))
    body = {
        "a": "[1,2,3," * 9000,
        "b": ids,
        "c": [ids[i : i + 300] for i in range(0, len(ids), 300)],
        "d": [ids, [], [1]],
    }
    assert load_json(orjson.dumps(body)) == body
    assert max(size.commas for size in work.built) < 2 * json_text.WINDOW_BYTES


@pytest.mark.parametrize("unit", [b'\\"', b"\\\\", b"[{,", b'\\\\\\"[', b"\xc3\xa9,"])
def test_text_may_hold_anything(unit: bytes) -> None:
    for tail in (b"", b"x", b"xy", b"xyz"):
        raw = b'{"a":"' + tail + unit * (bombs.MAX_BYTES // len(unit)) + b'"}'
        assert json_text._Counter(raw, LIMITS).count() == ((1, 2, 0, 0), ())
        assert count_json(raw).size.excess(LIMITS) is None


def test_counting_ends_soon_after_a_limit() -> None:
    limits = JsonSize(100, 100, 100, 100)
    for raw in (b"[]," * 10**6, b'"",' * 10**6, b"1," * 10**6, b"1.5," * 10**6):
        assert max(count_json(raw, limits).size) <= json_text.WINDOW_BYTES
        with pytest.raises(TooMuchJson, match="more than 100 "):
            load_json(raw, limits)


@pytest.mark.parametrize("body", [
    {"messages": [{"role": "user", "content": "x"}] * wire.MAX_MESSAGES},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5}] * (wire.MAX_MESSAGES)},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "[{,\"" * 5000}]}] * 100},
    {"prompt": [list(range(70000, 74096))] * 128},
    {"input": [list(range(70000, 70300))] * 2048},
    {"prompt": list(range(700_000))},
], ids=["messages", "parts", "text", "token ids", "many short ids", "many token ids"])  # fmt: skip
def test_what_people_send_is_not_too_much(body: Any) -> None:
    assert parse_json(orjson.dumps(body)) == body


@one_loop
async def test_where_it_is_wrong_is_still_told(served: Served) -> None:
    names = {f"x{i}": 0 for i in range(1000)}
    async with httpx.AsyncClient(timeout=150, verify=False, base_url=served.url) as client:

        async def told(**fields: Any) -> tuple[str, str]:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
            answer = await client.post(bombs.CHAT, json=body)
            assert answer.status_code == 400
            return answer.json()["error"]["code"], answer.json()["error"]["param"]

        assert await told(**names) == ("unknown_parameter", "x0")
        nameless = [{"role": "user", "content": "x"}, names]
        assert await told(messages=nameless) == ("missing_required_parameter", "messages[1].role")
        assert await told(stream_options=names, stream=True) == ("unknown_parameter", "stream_options.x0")
        assert await told(logit_bias=names) == ("invalid_value", "logit_bias")
        assert await told(tools=[{"type": "function", "function": {}}] * 9) == (
            "missing_required_parameter",
            "tools[0].function.name",
        )
        assert await told(metadata=[[]] * 40_000) == ("too_many_values", None)


async def test_large_bodies_are_put_together_a_piece_in_a_round_of_the_loop() -> None:
    loop, rounds, pieces = asyncio.get_running_loop(), 0, list[int]()
    turn, body = asyncio.Lock(), orjson.dumps("x" * 10 * INLINE_BYTES)

    def go_round() -> None:
        nonlocal rounds
        rounds += 1
        loop.call_soon(go_round)

    def request() -> Request:
        places = iter(range(0, len(body), INLINE_BYTES))

        async def receive() -> dict[str, Any]:
            place = next(places)
            if place:
                pieces.append(rounds)
            more = place + INLINE_BYTES < len(body)
            return {"type": "http.request", "body": body[place : place + INLINE_BYTES], "more_body": more}

        context = SimpleNamespace(body_turn=turn, parse_thread=None)
        app = SimpleNamespace(state=SimpleNamespace(context=context))
        return Request({"type": "http", "headers": [(b"content-type", b"application/json")], "app": app}, receive)

    go_round()
    read = await asyncio.gather(*(read_json(request(), len) for _ in range(8)))
    assert read == [len(body)] * 8
    assert len(pieces) == 8 * (len(body) // INLINE_BYTES)
    assert len(set(pieces[8:])) == len(pieces) - 8, "one in a round, but for the first"
