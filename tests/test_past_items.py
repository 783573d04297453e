"""A session goes on with any past items: every item and block of the official clients' types is served."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from support.http import post, prompt_of
from support.lazy import openai
from test_client_bodies import CALL, HI, prompt
from test_tools import TOOLS, scripted
from typing_extensions import get_type_hints, is_typeddict

PNG = "iVBORw0KGgo" * 100
PICTURE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}


def sample(kind: Any) -> Any:
    """Return the smallest value of a type of the clients."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in (Any, object) or kind is str:
        return "x"
    if kind in (int, float, bool):
        return kind(1)
    if origin is Literal:
        return args[0]
    if is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return sample_object(kind)
    if origin is dict or kind is dict:
        return {}
    if origin is None:
        return {"some": "value"} if kind is not type(None) else None
    if origin in (Union, Annotated, Required) or "Union" in str(origin):
        return sample(args[0])
    return [sample(args[0])]


def sample_object(kind: Any) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        return {name: sample(field.annotation) for name, field in kind.model_fields.items() if field.is_required()}
    hints = get_type_hints(kind, include_extras=True)
    # "type" is optional in a few objects
    return {n: sample(hint) for n, hint in hints.items() if get_origin(hint) is Required or n == "type"}


def members(union: Any) -> Iterator[Any]:
    """Yield the object types of a union, of its parts and of its lists."""
    if is_typeddict(union) or (isinstance(union, type) and issubclass(union, BaseModel)):
        yield union
    else:
        for part in get_args(union):
            yield from members(part)


@cache
def samples(module: str, union: str) -> list[Any]:
    """Return the smallest value of each type in a union of the official client's types."""
    return [sample(kind) for kind in members(getattr(getattr(openai.types, module), union))]


def items() -> list[Any]:
    return samples("responses", "ResponseInputItemParam")


def chat_parts() -> list[Any]:
    return samples("chat", "ChatCompletionContentPartParam")


@cache
def blocks() -> list[Any]:
    from anthropic.types import ContentBlockParam, beta

    return [sample(kind) for union in (ContentBlockParam, beta.BetaContentBlockParam) for kind in members(union)]


def results() -> list[Any]:
    from anthropic.types import beta, tool_result_block_param

    unions = (tool_result_block_param.Content, beta.beta_tool_result_block_param.Content)
    return [sample(kind) for union in unions for kind in members(union)]


DEEP = '{"a":' + "[" * 300 + "]" * 300 + "}"
DEEP_LIST = json.loads(DEEP)
SEEN: Any = {"role": "tool", "tool_call_id": "c1"}
CALLING: Any = {"role": "assistant", "tool_calls": [CALL]}
NESTED: Any = {"type": "text", "text": "x"}
for _ in range(400):
    NESTED = {"type": "search_result", "content": [NESTED]}
FUTURE: Any = {"type": "telepathy_call", "thoughts": [{"deep": "x"}], "data": PNG}
USE: Any = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
FC: Any = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}


def chat_pasts() -> Iterator[list[Any]]:
    yield from ([HI, message] for message in samples("chat", "ChatCompletionMessageParam"))
    for part in (
        *chat_parts(),
        PICTURE,
        FUTURE,
        NESTED,
        {"a": DEEP_LIST},
        "text",
        {"type": "thinking", "thinking": "x"},
    ):
        yield from ([{"role": role, "content": [part]}] for role in ("user", "assistant", "system", "tool"))
        yield [
            HI,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [part]},
        ]
    yield from (
        [HI, {"role": "assistant", "tool_calls": [call]}]
        for call in (*samples("chat", "ChatCompletionMessageToolCallUnionParam"), {"type": "future_call"})
    )
    for arguments in ("", "[]", "null", '"text"', '"{}"', '{"city": "Ro', "5", {"city": "Rome"}, None, "[" * 300, DEEP):
        call = {"id": "c1", "function": {"name": "weather", "arguments": arguments}}
        yield [
            HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": {"a": 1}},
        ]
    yield [HI, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
           {"role": "function", "name": "f", "content": "fog"}]  # fmt: skip


def message_pasts() -> Iterator[list[Any]]:
    for block in (*blocks(), FUTURE):
        yield from ([HI, {"role": role, "content": [block]}, {"role": "assistant", "content": "x"}] for role in ROLES)
    for block in (*results(), FUTURE, NESTED, "text"):
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [block]}
        yield [HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
        yield [HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result, PICTURE]}]
    for given in ([], None, "cut {", "[]"):
        yield [HI, {"role": "assistant", "content": [{**USE, "input": given}]}]
    yield [
        {"role": "user", "content": None},
        {"role": "assistant", "content": [{"type": "thinking", "signature": "x"}]},
    ]


ROLES = ("user", "assistant", "system")


def response_pasts() -> Iterator[list[Any]]:
    yield from ([item] for item in (*items(), FUTURE, {"id": "msg_1"}))
    for part in (*samples("responses", "ResponseFunctionCallOutputItemListParam"), FUTURE):
        yield [FC, {"type": "function_call_output", "call_id": "c1", "output": [part]}]
        yield from ([{"role": role, "content": [part]}] for role in ("user", "assistant", "developer"))
    yield from ([{**FC, "arguments": arguments}] for arguments in ("[]", "null", '{"a', {}))


@pytest.mark.timeout(120)
async def test_every_type_in_a_past_turn_is_served(tmp_path: Path) -> None:
    async with scripted(tmp_path, "ok") as served:
        asked: list[tuple[str, dict[str, Any]]] = [
            *(("/v1/chat/completions", {"messages": [*past, HI]}) for past in chat_pasts()),
            *(("/v1/messages", {"messages": [*past, HI], "max_tokens": 9}) for past in message_pasts()),
            *(("/v1/responses", {"input": [*past, HI]}) for past in response_pasts()),
        ]
        assert len(items()) > 30 and len(blocks()) > 35 and len(asked) > 250
        for path, body in asked:
            answer = await post(served, path, **body)
            assert answer.status_code == 200, (path, body, answer.text)


async def test_an_agent_goes_on_after_its_tools(tmp_path: Path) -> None:
    """The last item may come from a tool, whose pictures are not the user's."""
    outputs = [item for item in items() if item["type"].endswith("_output")]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    ends: list[tuple[str, str, list[Any]]] = [
        *(("/v1/responses", "input", [HI, item]) for item in outputs),
        *(("/v1/chat/completions", "messages", [HI, CALLING, {**SEEN, "content": [part]}])
          for part in (*chat_parts(), PICTURE, FUTURE)),
        ("/v1/chat/completions", "messages",
         [HI, CALLING, {**SEEN, "content": "seen"}, {"role": "user", "content": [picture]}]),
        ("/v1/messages", "messages", [HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [PICTURE]}, PICTURE]}]),
    ]  # fmt: skip
    async with scripted(tmp_path, "ok") as served:
        for path, name, past in ends:
            answer = await post(served, path, **{name: past}, **({"max_tokens": 9} if "messages" in path else {}))
            assert answer.status_code == 200, (past, answer.text)


async def test_a_picture_of_the_user_is_refused_until_the_session_goes_on(tmp_path: Path) -> None:
    forms: list[tuple[str, str, Any]] = [
        ("/v1/chat/completions", "messages", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
        ("/v1/chat/completions", "messages", {"type": "file", "file": {"file_id": "x"}}),
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": "data:,"}}),
        ("/v1/messages", "messages", PICTURE),
        ("/v1/responses", "input", {"type": "input_image", "image_url": "data:,"}),
    ]
    said = ["audio is", "files are", *["images are"] * 3]
    async with scripted(tmp_path, "ok") as served:
        for (path, name, part), kind in zip(forms, said, strict=True):
            asked = [HI, {"role": "user", "content": [part]}]
            for past, status in ((asked, 400), ([*asked, HI], 200)):
                answer = await post(served, path, **{name: past}, **({"max_tokens": 9} if name != "input" else {}))
                assert answer.status_code == status, (past, answer.text)
                words = f"this server runs the text part of fake-model; {kind} not read"
                assert status == 200 or words in answer.json()["error"]["message"]
        assert "[an image, which this model cannot see]" in prompt_of(served)


WRITTEN: list[tuple[Any, str]] = [
    ({"type": "tool_reference", "tool_name": "Stop"}, "[the tool Stop]"),
    ({"type": "document", "title": "T", "source": {"type": "text", "data": "words"}}, "T\nwords"),
    ({"type": "document", "title": "T", "source": {"type": "base64", "data": PNG}},
     "[the file T, which this model cannot read]"),
    ({"type": "search_result", "source": "https://x.test", "title": "Sky",
      "content": [{"type": "text", "text": "blue"}]}, "Sky\nhttps://x.test\nblue"),
    ({"type": "web_search_tool_result", "tool_use_id": "s", "content": [
        {"type": "web_search_result", "title": "Sky", "url": "https://x.test", "encrypted_content": PNG}]},
     '[web_search_tool_result: [{"title":"Sky","url":"https://x.test"}]]'),
    ({"type": "compaction", "content": "They spoke of fog."}, "They spoke of fog."),
    ({"type": "compaction", "encrypted_content": PNG}, "[compaction]"),
    ({"type": "file", "file": {"filename": "a.pdf", "file_data": PNG}},
     "[the file a.pdf, which this model cannot read]"),
]  # fmt: skip


async def test_the_texts_in_place_of_parts(tmp_path: Path) -> None:
    async with scripted(tmp_path, "ok") as served:
        for part, text in WRITTEN:
            written = await prompt(served, [{"role": "user", "content": [part]}, HI])
            assert f"user\n{text}<|im_end|>" in written, part
        body = {"role": "user", "content": [WRITTEN[3][0], {"type": "text", "text": "What colour?"}]}
        assert (await post(served, "/v1/messages", messages=[body], max_tokens=9)).status_code == 200
        assert "blue\nWhat colour?" in prompt_of(served), "a user may send documents that are text"


async def test_calls_of_other_types_are_calls(tmp_path: Path) -> None:
    """A custom or local tool of an agent is a call and its result, whose text is whole."""
    past: list[Any] = [
        HI, {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin\n+x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done\nwell"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "a.txt", "stderr": "", "outcome": {}}]},
    ]  # fmt: skip
    async with scripted(tmp_path, "ok") as served:
        assert (await post(served, "/v1/responses", input=past, tools=[])).status_code == 200
        written = prompt_of(served)
        for arguments, text in (("[]", "{}"), ('{"city": "Ro', '{"arguments": "{\\"city\\": \\"Ro"}'), ('"{}"', "{}")):
            call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
            assert text in await prompt(served, [HI, {"role": "assistant", "tool_calls": [call]}, HI], tools=TOOLS)
    assert "apply_patch" in written and "*** Begin" in written and "tool\nDone\nwell<|im_end|>" in written
    assert '"commands"' in written and "a.txt" in written
