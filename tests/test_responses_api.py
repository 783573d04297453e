"""/v1/responses as the official client uses it, and Codex: streamed and whole, tools, forms, thoughts, refusals."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import MODEL, Script, Served
from fixtures import StartServer
from support.http import prompt_of, send
from support.lazy import openai
from test_tools import TEMPLATE, TWO, client_of, scripted

from engine.errors import EngineStepError
from engine.text.tokenizer import Tokenizer

THINKS = TEMPLATE + "{% if false %}</think>{% endif %}"
TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": "A tool", "parameters": {"type": "object"}, "strict": False}
    for name in ("weather", "time.now")
]


OPEN_RESPONSES = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens",
    "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
"""Fields that openresponses.org requires of a response."""


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Weather?", "max_output_tokens": 300, **fields}


async def post(served: Served, **fields: Any) -> httpx.Response:
    return await send(served, "POST", "/v1/responses", json=ask(**fields))


async def events_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """As they are on the wire: each has its name and its number."""
    answer = await post(served, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    *blocks, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


async def test_the_official_client_gets_a_response(start_server: StartServer, tokenizer: Tokenizer) -> None:
    served = await start_server("hello world")
    async with client_of(served) as client:
        answer = await client.responses.create(
            **ask(
                instructions="Be brief",
                metadata={"a": "b"},
                temperature=0.5,
                store=True,
                user="u",
                top_p=0,
                prompt_cache_key="k",
                safety_identifier="s",
                max_tool_calls=3,
                reasoning={"mode": "standard"},
                text={"verbosity": "low"},
                truncation="auto",
            )
        )
    assert answer.output_text == "hello world" and answer.status == "completed" and answer.id.startswith("resp_")
    assert (answer.object, answer.error, answer.metadata, answer.temperature) == ("response", None, {"a": "b"}, 0.5)
    wire = answer.to_dict()
    assert (wire["text"], wire["truncation"]) == ({"format": {"type": "text"}, "verbosity": "low"}, "disabled")
    assert wire.keys() >= OPEN_RESPONSES and None not in (wire.get("user", ""), wire["presence_penalty"])
    assert (wire["prompt_cache_key"], wire["safety_identifier"], wire["max_tool_calls"]) == ("k", "s", 3)
    assert (wire["presence_penalty"], wire["frequency_penalty"], wire["top_logprobs"], wire["top_p"]) == (0, 0, 0, 0)
    assert wire["store"] is False and answer.service_tier == "default" and answer.model == MODEL
    (request,) = served.engine.requests
    assert request.request_id.startswith(answer.id) and request.sampling.temperature == 0.5
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(request.prompt_token_ids)
    assert answer.usage.input_tokens_details.cached_tokens == len(request.prompt_token_ids) // 2
    assert answer.usage.output_tokens == len(tokenizer.encode("hello world")) + 1
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert prompt_of(served).startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWeather?")


async def test_the_stream_helper_and_the_whole_answer_agree(tmp_path: Path) -> None:
    async with scripted(tmp_path, f"<think>\nhm hm\n</think>\n\n{TWO}", THINKS) as served, client_of(served) as client:
        whole = await client.responses.create(**ask(tools=TOOLS))
        async with client.responses.stream(**ask(tools=TOOLS)) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        at_once = await client.responses.create(**ask(tools=TOOLS, service_tier="flex"))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    streamed = final.to_dict(exclude_none=True)["output"]  # but for the additions of its parsing
    assert without_ids(whole.to_dict(exclude_none=True)["output"]) == without_ids(streamed)
    assert final.output_text == whole.output_text == "Wait."
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.function_call_arguments.done") == 2
    assert whole.usage and final.usage and whole.usage.output_tokens == final.usage.output_tokens
    thoughts = whole.usage.output_tokens_details.reasoning_tokens
    assert 0 < thoughts < whole.usage.output_tokens
    assert final.usage.output_tokens_details.reasoning_tokens == thoughts
    assert at_once.usage and at_once.usage.output_tokens_details.reasoning_tokens == thoughts


async def test_events_tell_of_what_the_response_holds(tmp_path: Path) -> None:
    """Every item is added, filled, and done, with one id from its first event to the last response."""
    async with scripted(tmp_path, f"<think>hm hm</think>\n\n{TWO}", THINKS) as served:
        events = await events_of(served, tools=TOOLS)
    final = events[-1]["response"]
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in final["output"]]
    assert [event["item"] for event in done] == final["output"]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2, 3]
    for index, item in enumerate(final["output"]):
        mine = [event for event in events if event.get("output_index") == index and "item_id" in event]
        assert {event["item_id"] for event in mine} == {item["id"]}
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        if item["type"] == "function_call":
            assert deltas == item["arguments"] == mine[-1]["arguments"]
            assert mine[-1]["type"] == "response.function_call_arguments.done"
        else:
            (part,) = item["content"]
            assert deltas == part["text"] and mine[-1] == {**mine[-1], "part": part}
            assert mine[0]["type"] == "response.content_part.added" and mine[0]["part"]["text"] == ""
            assert mine[-2]["type"] == f"response.{part['type']}.done" and mine[-2]["text"] == part["text"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm hm"}]


async def test_a_tool_loop_sends_back_what_it_got(tmp_path: Path) -> None:
    """Thoughts, text and calls of one answer reach the template as one message."""
    template = THINKS.replace("{{ message.content", "({{ message.reasoning_content }}){{ message.content")
    async with scripted(tmp_path, f"<think>hm</think>\n\n{TWO}", template) as served, client_of(served) as client:
        history: list[Any] = [{"role": "user", "content": "Weather?"}]
        first = await client.responses.create(**ask(tools=TOOLS, input=history))
        history += first.output
        for call in first.output:
            if isinstance(call, openai.types.responses.ResponseFunctionToolCall):
                history.append({"type": "function_call_output", "call_id": call.call_id, "output": f"Sun {call.name}"})
        await client.responses.create(**ask(tools=TOOLS, input=history))
    prompt = prompt_of(served)
    assert prompt.count("<|im_start|>assistant\n") == 2 and prompt.count("<|im_start|>tool\n") == 2
    said = prompt.split("<|im_start|>assistant\n")[1]
    assert said.startswith("(hm)Wait.<tool_call>") and '"arguments": {"city": "Rome", "days": 2}' in said
    assert "Sun weather" in prompt and "Sun time.now" in prompt


async def test_what_codex_sends(tmp_path: Path) -> None:
    """Items of its own making, hosted tools beside functions, metadata of its own; its instructions and its developer
    message are one system message, as templates want it."""
    hosted = ("mcp", "file_search", "code_interpreter", "computer_use_preview", "apply_patch", "shell", "new_kind")
    tools = [*TOOLS, {"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch"}]
    tools += [{"type": kind, "server_label": "x", "container": {"type": "auto"}} for kind in hosted]
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None, "id": "rs_1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}], "phase": "x"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "three"}]},
    ]
    async with scripted(tmp_path, "ok") as served:
        events = await events_of(
            served,
            input=items,
            instructions="You are Codex",
            tools=tools,
            tool_choice="auto",
            parallel_tool_calls=True,
            reasoning={"effort": "medium", "summary": "auto"},
            store=False,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="0199",
            client_metadata={"x-codex-installation-id": "1"},
        )
    assert events[-1]["type"] == "response.completed"
    assert [tool["name"] for tool in events[-1]["response"]["tools"]] == ["weather", "time.now"]
    roles = [part.split("\n")[0] for part in prompt_of(served).split("<|im_start|>")[1:]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert "system\nYou are Codex\n\nAsk first<|im_end|>" in prompt_of(served)


async def test_logprobs_of_a_response_are_those_of_chat(start_server: StartServer) -> None:
    served = await start_server("hello wörld")
    async with client_of(served) as client:
        asked: dict[str, Any] = {"model": MODEL, "logprobs": True, "top_logprobs": 2}
        chat = await client.chat.completions.create(messages=[{"role": "user", "content": "Weather?"}], **asked)
        assert chat.choices[0].logprobs
        expected = [each.to_dict() for each in chat.choices[0].logprobs.content or ()]
        fields = ask(include=["message.output_text.logprobs"], top_logprobs=2)
        whole = await client.responses.create(**fields)
    part = whole.to_dict()["output"][0]["content"][0]  # type: ignore[index]
    assert part["logprobs"] == expected and whole.top_logprobs == 2
    events = await events_of(served, **fields)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each] == expected and len(deltas) > 1
    added, done = (
        next(event["part"] for event in events if event["type"] == f"response.content_part.{kind}")
        for kind in ("added", "done")
    )
    assert (added["logprobs"], done["logprobs"]) == ([], expected)
    assert (await post(served)).json()["output"][0]["content"][0]["logprobs"] == []


async def test_tools_beside_a_form(tmp_path: Path) -> None:
    """An answer calls or has the form."""
    for number, (text, kinds) in enumerate([(TWO.removeprefix("Wait.\n"), ["function_call"] * 2), ("{}", ["message"])]):
        async with scripted(tmp_path / str(number), text) as served, client_of(served) as client:
            asked = ask(tools=TOOLS, text={"format": {"type": "json_object"}})
            answer = await client.responses.create(**asked)
            grammar = served.engine.requests[0].sampling.grammar
        assert [item.type for item in answer.output] == kinds
        assert grammar is not None and "weather" in grammar.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_is_incomplete(start_server: StartServer, stream: bool) -> None:
    served = await start_server("one two three four")
    if stream:
        events = await events_of(served, max_output_tokens=2)
        assert events[-1]["type"] == "response.incomplete"
        response = events[-1]["response"]
    else:
        response = (await post(served, max_output_tokens=2)).json()
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete" and response["usage"]["output_tokens"] == 2
    assert openai.types.responses.Response.model_validate(response).output_text


async def test_an_answer_of_nothing_is_a_message(start_server: StartServer) -> None:
    served = await start_server("")
    events = await events_of(served)
    assert [item["content"][0]["text"] for item in events[-1]["response"]["output"]] == [""]


async def test_a_stream_that_breaks_off_says_so(start_server: StartServer, tokenizer: Tokenizer) -> None:
    error = EngineStepError("The model step failed under this request.")
    script = Script([*tokenizer.encode("one two three")], fail_after=2, error=error)
    served = await start_server(lambda _: script)
    events = await events_of(served)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["error"] == {"code": "server_error", "message": error.message} and response["status"] == "failed"
    assert response["output"][0]["status"] == "incomplete" and response["usage"]["output_tokens"] == 2
    answer = await post(served)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_error"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
    ({"conversation": "c"}, "conversation", "not stored"),
    ({"background": True}, "background", "not supported"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "set 'store' to false"),
    ({"input": [{"type": "item_reference", "id": f"msg_{'a' * 24}"}, {"role": "user", "content": "x"}]}, "input[0]",
     "set 'store' to false"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type",
     "Invalid"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "Invalid"),
    ({"tools": [{"type": 5}]}, "tools[0].type", "Invalid"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "Invalid"),
    ({"tools": TOOLS * 2}, "tools", "same name"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no function"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "not in"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "x"}]}}, "tool_choice.tools", "not in"),
    ({"tools": [{"type": "mcp"}], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "mcp"}]}}, "tool_choice", "no function"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "Missing"),
    ({"text": {"verbosity": "huge"}}, "text.verbosity", "Invalid"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "Invalid"),
    ({"include": ["message.audio"]}, "include[0]", "Invalid"),
    ({"top_logprobs": 21}, "top_logprobs", "less than"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
    ({"max_output_tokens": 100_000}, "input", "context"),
    ({"messages": []}, "messages", "Unknown"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "Unknown"),
]  # fmt: skip


async def test_what_is_refused_names_its_parameter(tmp_path: Path) -> None:
    async with scripted(tmp_path, "x") as served:
        for fields, param, word in REFUSED:
            answer = await post(served, **fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (fields, error)
            assert word in error["message"], error
        assert not served.engine.requests
