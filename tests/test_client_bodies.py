"""Bodies as clients send them: decorated or empty objects in messages and tools must give the prompt of plain ones."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import MODEL, Served
from test_responses_api import prompt_of
from test_tools import TOOLS, TWO, client_of, scripted

HI: Any = {"role": "user", "content": "hi"}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
RESULT: Any = {"role": "tool", "tool_call_id": "c1", "content": "fog"}
CALLING: Any = {"role": "assistant", "content": None, "tool_calls": [CALL]}


async def post(served: Served, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        return await client.post(path, json={"model": MODEL, **fields})


async def prompt(served: Served, messages: list[Any], **fields: Any) -> str:
    answer = await post(served, messages=messages, **fields)
    assert answer.status_code == 200, answer.text
    return prompt_of(served)


DECORATED: dict[str, tuple[list[Any], list[Any]]] = {
    "a dumped message": (
        [HI, {"role": "assistant", "content": "x", "refusal": None, "annotations": None, "audio": None,
              "function_call": None, "tool_calls": None}, HI],
        [HI, {"role": "assistant", "content": "x"}, HI],
    ),
    "notes of other servers": (
        [{**HI, "id": 7, "opts": {"visible": False}},
         {"role": "assistant", "content": "x", "annotations": [], "reasoning_details": [{"text": "y"}]}, HI],
        [HI, {"role": "assistant", "content": "x"}, HI],
    ),
    "a cache mark in a part": (
        [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
        [HI],
    ),
    "notes in a call": (
        [HI, {**CALLING, "tool_calls": [{**CALL, "index": 0, "type": None, "extra_content": {"google": {}},
              "function": {**CALL["function"], "parsed_arguments": {}, "provider_specific_fields": None}}]},
         {**RESULT, "status": "done"}],
        [HI, CALLING, RESULT],
    ),
    "an empty list of calls": (
        [HI, {"role": "assistant", "content": "x", "tool_calls": []}, HI],
        [HI, {"role": "assistant", "content": "x"}, HI],
    ),
    "an answer of nothing": (
        [HI, {"role": "assistant", "content": None}, HI],
        [HI, {"role": "assistant", "content": ""}, HI],
    ),
    "empty parts": (
        [{"role": "system", "content": []}, HI, {**CALLING, "content": []}, {**RESULT, "content": []}],
        [{"role": "system", "content": ""}, HI, {**CALLING, "content": ""}, {**RESULT, "content": ""}],
    ),
    "a result of nothing": ([HI, CALLING, {**RESULT, "content": None}], [HI, CALLING, {**RESULT, "content": ""}]),
}  # fmt: skip

STRICT = (
    "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call></tool_call>{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{{ message.tool_calls[0] | tojson }}{% else %}{{ message.content | trim }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)
"""Decides like Llama 3's by the presence of `tool_calls`, and needs a content elsewhere."""


async def test_decoration_changes_nothing(tmp_path: Path) -> None:
    tools = [{**tool, "cache_control": {}, "function": {**tool["function"], "x": 1}} for tool in TOOLS]
    async with scripted(tmp_path, "ok", STRICT) as served:
        for name, (decorated, plain) in DECORATED.items():
            assert await prompt(served, decorated) == await prompt(served, plain), name
            assert await prompt(served, decorated, tools=tools) == await prompt(served, plain, tools=TOOLS), name


async def test_nulls_mean_nothing_in_all_bodies(tmp_path: Path) -> None:
    """A null is an absent field, known or unknown; an unknown field with a value is refused."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": [HI],
            "stream": True,
            "stream_options": {"include_usage": None, "x": None},
            "response_format": {"type": "text", "json_schema": None, "x": None},
        },
        "/v1/completions": {"prompt": "hi", "suffix": None},
        "/v1/messages": {"messages": [{**HI, "x": None}], "max_tokens": 9, "thinking": None},
        "/v1/responses": {"input": "hi", "text": {"format": {"type": "text", "name": None}, "x": None}},
    }
    async with scripted(tmp_path, "ok") as served:
        for path, body in bodies.items():
            answer = await post(served, path, **body, some_future_field=None)
            assert answer.status_code == 200, answer.text
            answer = await post(served, path, **body, some_future_field=False)
            error = answer.json()["error"]
            assert answer.status_code == 400 and "'some_future_field'" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_with_dumped_messages(tmp_path: Path, stream: bool) -> None:
    """The official client's message as a dict is the same turn as its object."""
    async with scripted(tmp_path, TWO) as served, client_of(served) as client:
        asked: Any = {"model": MODEL, "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**asked, messages=[HI]) as chunks:
                message: Any = (await chunks.get_final_completion()).choices[0].message
        else:
            answer: openai.types.chat.ChatCompletion = await client.chat.completions.create(**asked, messages=[HI])
            message = answer.choices[0].message
        results = [{**RESULT, "tool_call_id": call.id} for call in message.tool_calls]
        prompts = []
        for form in (message, message.model_dump(), message.to_dict(), message.model_dump(exclude_none=True)):
            await client.chat.completions.create(**asked, messages=[HI, form, *results])
            prompts.append(prompt_of(served))
    assert len(set(prompts)) == 1 and prompts[0].count("fog") == 2 and "Rome" in prompts[0]
