"""Bad input to chat and completions: a 400 that names the field and nothing queued. One server for all of it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fake_engine import MODEL, FakeEngine, Served, say, serve
from fixtures import refuse_blocking
from support.http import send
from support.tables import for_each

from engine.text.tokenizer import Tokenizer
from gateway.generate.validation import UNHONOURED

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: Any = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tokenizer: Tokenizer) -> AsyncIterator[Served]:
    with refuse_blocking():
        engine = FakeEngine(say(tokenizer, "hello"), eos_token_ids=frozenset({tokenizer.eos_token_id}))
        async with serve(engine, tokenizer) as served:
            yield served


@pytest.fixture
def served(server: Served) -> Served:
    server.engine.requests.clear()
    return server


async def post(served: Served, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    if not isinstance(body, bytes):
        required = {"messages": HI} if "chat" in path else {"prompt": "hi"}
        body = json.dumps({"model": MODEL, **required, **body}).encode()
    return await send(served, "POST", path, content=body, headers={"content-type": "application/json"})


BAD_JSON = {
    "empty": b"",
    "broken": b'{"model": ',
    "byte order mark within": b'{"model": \xef\xbb\xbf"fake-model"}',
    "two byte order marks": b'\xef\xbb\xbf\xef\xbb\xbf{"model": "fake-model"}',
    "utf-16": '{"model": "fake-model"}'.encode("utf-16"),
    "nan": b'{"model": "fake-model", "temperature": NaN}',
    "infinity": b'{"model": "fake-model", "temperature": 1e999}',
    "lone surrogate": b'{"model": "fake-model", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "not utf-8": b'{"model": "\xff"}',
    "deep": b"[" * 30_000,
    "deep, closed": b'{"metadata":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "trailing": b"{} {}",
    "not an object": b"[1]",
}


@for_each("name", BAD_JSON)
async def test_bad_json(served: Served, name: str) -> None:
    answer = await post(served, BAD_JSON[name])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json" and not served.engine.requests


BIG = 10**30
NUMBERS = (-1, 2**31, 10**9 + 0.5, BIG, "1", True, [1])
BAD_FIELDS: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, 129, *NUMBERS)],
    *[("max_tokens", value) for value in (0, *NUMBERS)],
    *[("max_completion_tokens", value) for value in (0, *NUMBERS)],
    *[("min_tokens", value) for value in (*NUMBERS, 600)],
    *[("top_logprobs", value) for value in (21, *NUMBERS)],
    *[("seed", value) for value in (2**63, BIG, 0.5, "1", True)],
    *[("temperature", value) for value in (-0.1, 2.1, BIG, "1", True)],
    *[("top_p", value) for value in (-1, 1.1, "1")],
    *[("top_k", value) for value in (-2, 1.5, 2**31, "1")],
    *[("min_p", value) for value in (-0.1, 1.1, "1")],
    *[("presence_penalty", value) for value in (-2.1, 2.1, "1")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, "1")],
    *[("repetition_penalty", value) for value in (0, 1e-300, 1e-45, 0.0099, -1, 11)],
    *[("stop", value) for value in (5, "", [""], ["a"] * 33, [1], "x" * 2000, {})],
    *[("logit_bias", value) for value in ([], 1, {"a": 1}, {"-1": 1}, {"99999999999999": 1}, {"405": 1})],
    ("logit_bias", {str(i): 0 for i in range(301)}),
    ("stop_token_ids", [405]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", 5),
    ("model", 5),
    ("messages", []),
    ("messages", "hi"),
    ("messages", None),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("service_tier", "fast"),
    ("logprobs", 1),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tools", [{"type": "function", "function": {}}]),
    ("tools", {}),
    ("tool_choice", "auto"),
    ("tool_choice", {"type": "function"}),
    ("parallel_tool_calls", "yes"),
    ("chat_template_kwargs", {"chat_template": "x"}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_object", "schema": 5}),
    ("structured_outputs", {"regex": 5}),
    ("guided_choice", []),
    ("reasoning_effort", "extreme"),
    ("continue_final_message", True),
    ("add_special_tokens", True),
    ("echo", True),
    ("cache_salt", 5),
    *[(name, ["x"]) for name in UNHONOURED.unsupported],
]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in BAD_FIELDS))
async def test_bad_fields_are_named(served: Served, name: str) -> None:
    for value in (value for each, value in BAD_FIELDS if each == name):
        await check_refused(served, name, value)


async def check_refused(served: Served, name: str, value: Any) -> None:
    extra = {"logprobs": True} if name == "top_logprobs" else {}
    answer = await post(served, {**extra, name: value})
    error = answer.json()["error"]
    assert answer.status_code == 400, (value, error)
    assert set(error) == {"message", "type", "param", "code"}, (value, error)
    assert error["type"] == "invalid_request_error", (value, error)
    assert error["param"].partition("[")[0].partition(".")[0] == name, (value, error)
    if refused := UNHONOURED.unsupported.get(name):
        assert error["message"] == f"'{name}' is not supported. {refused.advice}" and refused.advice.endswith(".")
    assert not served.engine.requests


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([{"role": "king", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "system"}, {"role": "user", "content": "x"}], "messages[0].content"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": [5]}], "messages[1].content[0]"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
     "messages[0].content[0].type"),
    (["x"], "messages[0]"),
]  # fmt: skip


@for_each(("name", "value"), [
    ("tools", []), ("tool_choice", "none"), ("response_format", {"type": "text"}), ("modalities", ["text"]),
    ("functions", None), ("user", "x" * 500), ("metadata", {"a": [1]}), ("store", False), ("stop", None), ("n", None),
    ("parallel_tool_calls", True), ("safety_identifier", "s"), ("prompt_cache_key", "k"), ("top_k", -1),
    ("verbosity", "low"), ("prediction", {"type": "content", "content": "x"}),
])  # fmt: skip
async def test_what_changes_nothing_is_accepted(served: Served, name: str, value: Any) -> None:
    assert (await post(served, {name: value})).status_code == 200


async def test_unknown_models(served: Served) -> None:
    answer = await post(served, {"model": "../../etc/passwd"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "passwd" not in answer.text
    assert (await post(served, {"model": "alias"})).json()["model"] == "alias"


async def test_differing_lengths_and_lonely_top_logprobs(served: Served) -> None:
    error = (await post(served, {"max_tokens": 3, "max_completion_tokens": 4})).json()["error"]
    assert error["param"] == "max_tokens"
    assert (await post(served, {"top_logprobs": 2})).json()["error"]["param"] == "top_logprobs"
    assert (await post(served, {"max_tokens": 3, "max_completion_tokens": 3})).status_code == 200


# --- completions

PROMPTS: list[Any] = [
    None, 5, 1.5, True, {}, [], "", [[]], [""], ["a", 5], [1, "a"], [1.5], [True], [-1], [2**31], [10**30], [[1, -1]],
    [[1], "a", None], [405], [[1], [405]], ["a"] * 129, [[[1]]],
]  # fmt: skip


COMPLETION_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 2, "n": 1}, "best_of"),
    ({"n": 8, "prompt": ["a"] * 17}, "n"),
    ({"n": 129}, "n"),
    ({"n": 0}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 512}, "prompt"),
    ({"prompt": [1] * 512}, "prompt"),
    ({"messages": []}, "messages"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"top_logprobs": 2}, "top_logprobs"),
]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UNKNOWN = ("tokenizer", "trust_remote_code", "prompt_embeds", "best_off", "slo")
TOO_LONG: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "fox " * 600}]},
    {"messages": [{"role": "user", "content": "x" * 1_000_000}]},
    {"max_tokens": 2**31 - 1},
    {"max_tokens": 512},
]
REFUSED: list[tuple[str, Any, str, str]] = [
    *((CHAT, {"messages": messages}, "", param) for messages, param in BAD_MESSAGES),
    *((CHAT, {name: "http://example.com/etc/passwd"}, "unknown_parameter", name) for name in UNKNOWN),
    *((CHAT, fields, "context_length_exceeded", "messages") for fields in TOO_LONG),
    *((CHAT, body, "missing_required_parameter", "messages") for body in (b"{}", b'{"model": "fake-model"}')),
    *((COMPLETIONS, {"prompt": prompt}, "", "prompt") for prompt in PROMPTS),
    *((COMPLETIONS, fields, "", param) for fields, param in COMPLETION_FIELDS),
]


@for_each(("path", "body", "code", "param"), REFUSED)
async def test_what_is_refused_is_named_by_place_and_not_repeated(
    served: Served, path: str, body: Any, code: str, param: str
) -> None:
    answer = await post(served, body, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["code"] == code or not code, error
    assert "passwd" not in error["message"] and not served.engine.requests


@for_each("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_other_content_types_are_415(served: Served, content_type: str | None) -> None:
    """A page of another origin can send these without asking; JSON it cannot."""
    headers = {} if content_type is None else {"content-type": content_type}
    answer = await send(served, "POST", "/v1/chat/completions", content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@for_each(("encoding", "status"), [("gzip", 415), ("identity", 400), ("gzip, br", 415)])
async def test_bodies_are_not_decompressed_and_it_is_said(served: Served, encoding: str, status: int) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = await send(served, "POST", "/v1/chat/completions", content=b"\x1f\x8b\x08", headers=headers)
    assert answer.status_code == status
    assert ("Content-Encoding" in answer.json()["error"]["message"]) == (status == 415)
