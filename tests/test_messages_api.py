"""/v1/messages and count_tokens as Anthropic's API has them, and as Claude Code uses them: streamed and whole."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import MODEL, Script, Served
from fixtures import StartServer
from support.http import prompt_of, send
from test_responses_api import THINKS
from test_tools import TIME, TWO, WEATHER, scripted

from engine.errors import EngineStepError, QueueFullError
from engine.text.tokenizer import Tokenizer

TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "description": "A tool", "input_schema": WEATHER},
    {"name": "time.now", "description": "A tool", "input_schema": TIME, "cache_control": {"type": "ephemeral"}},
]


def ask(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Weather?"}]
    return {"model": MODEL, "max_tokens": 300, "messages": messages, **fields}


async def post(
    served: Served, path: str = "/v1/messages?beta=true", headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    sent = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta-2026-01-01", **(headers or {})}
    return await send(served, "POST", path, json=ask(**fields), headers=sent)


async def events_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    answer = await post(served, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream."""
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
                assert message["content"] == [] and message["stop_reason"] is None
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                texts[event["index"]] = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                name = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[block["type"]]
                kind = {"tool_use": "input_json"}.get(block["type"], block["type"])
                assert delta["type"] == f"{kind}_delta"
                texts[event["index"]] += delta[name]
            case "content_block_stop":
                block, text = message["content"][event["index"]], texts.pop(event["index"])
                block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {block["type"]: text}
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    assert not texts and events[-1]["type"] == "message_stop"
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


async def test_a_message(start_server: StartServer, tokenizer: Tokenizer) -> None:
    served = await start_server("hello world")
    answer = await post(served, system="Be brief", temperature=0.5, top_k=3, metadata={"user_id": "u"})
    message = answer.json()
    (request,) = served.engine.requests
    size = len(request.prompt_token_ids)
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": size - size // 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": size // 2,
            "output_tokens": len(tokenizer.encode("hello world")) + 1,
            "service_tier": "standard",
        },
    }
    assert message["id"].startswith("msg_") and request.request_id.startswith(message["id"])
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)
    assert prompt_of(served).startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWeather?")


async def test_the_stream_adds_up_to_the_whole_message(tmp_path: Path) -> None:
    async with scripted(tmp_path, f"<think>\nhm hm\n</think>\n\n{TWO}", THINKS) as served:
        whole = (await post(served, tools=TOOLS)).json()
        events = await events_of(served, tools=TOOLS)
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert without_ids(added_up(events)) == without_ids(whole)
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0] == {"type": "thinking", "thinking": "hm hm", "signature": ""}
    assert whole["content"][2]["input"] == {"city": "Rome", "days": 2}
    assert whole["content"][2]["id"].startswith("toolu_")
    number = "123456789012345678901234567890"
    async with scripted(tmp_path / "digits", TWO.replace('"days": 2', f'"days": {number}')) as served:
        whole = (await post(served, tools=TOOLS)).json()
        assert without_ids(added_up(await events_of(served, tools=TOOLS))) == without_ids(whole)
    assert whole["content"][1]["input"]["days"] == int(number)


async def test_strict_tools_are_enforced(tmp_path: Path) -> None:
    async with scripted(tmp_path, "x") as served:
        for strict in (True, False):
            await post(served, tools=[{**TOOLS[0], "strict": strict}, TOOLS[1]])
    strict, loose = [request.sampling.grammar for request in served.engine.requests]
    assert strict is not None and '"Rome"' in strict.text and loose is None


async def test_forms_of_answers_and_required_calls(tmp_path: Path) -> None:
    form: dict[str, Any] = {
        "type": "json_schema",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}},
    }
    async with scripted(tmp_path, TWO.removeprefix("Wait.\n")) as served:
        whole = (await post(served, tools=TOOLS, output_config={"format": form})).json()
        await post(served, output_config={"format": form})
        await post(served, tools=TOOLS, tool_choice={"type": "any"})
        both, alone, calls = [request.sampling.grammar for request in served.engine.requests]
        one = (await post(served, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})).json()
    assert [block["type"] for block in whole["content"]] == ["tool_use", "tool_use"]
    assert one["content"] == [whole["content"][0] | {"id": one["content"][0]["id"]}]
    assert both is not None and '"ok"' in both.text and "weather" in both.text
    assert alone is not None and json.loads(alone.text) == {**form["schema"], "additionalProperties": False}
    assert calls is not None and '"ok"' not in calls.text and "weather" in calls.text


async def test_what_claude_code_sends(tmp_path: Path) -> None:
    """The line that it puts before its instructions changes with every request: the prompt must not."""
    prompts = []
    async with scripted(tmp_path, "ok") as served:
        for number in ("71fea", "eb6c6"):
            line = f"x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={number};"
            system = [
                {"type": "text", "text": line},
                {"type": "text", "text": "You are Claude Code", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Be brief"},
            ]
            answer = await post(
                served,
                system=system,
                tools=[*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
                thinking={"type": "adaptive"},
                context_management={"edits": []},
                output_config={"effort": "high"},
                metadata={"user_id": "u"},
            )
            assert answer.status_code == 200, answer.text
            prompts.append(prompt_of(served))
            await post(served, system=f"{line}\nYou are Claude Code\n\nBe brief", tools=TOOLS)
            prompts.append(prompt_of(served))
    assert len(set(prompts)) == 1 and "system\nYou are Claude Code\n\nBe brief<|im_end|>" in prompts[0]
    assert "web_search" not in prompts[0]


async def test_why_a_message_ended(start_server: StartServer) -> None:
    served = await start_server("one two three four", max_model_len=40)
    for fields, reason, sequence in (
        ({"stop_sequences": ["three"]}, "stop_sequence", "three"),
        ({"max_tokens": 2}, "max_tokens", None),
        ({}, "end_turn", None),
    ):
        whole = (await post(served, **fields)).json()
        streamed = added_up(await events_of(served, **fields))
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        assert without_ids(whole) == without_ids(streamed)


async def test_an_answer_may_be_as_long_as_the_context(start_server: StartServer, tokenizer: Tokenizer) -> None:
    script = Script(tokenizer.encode("one two three"))  # without end
    served = await start_server(lambda _: script, max_model_len=100)
    answer = (await post(served, max_tokens=32_000)).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    (request,) = served.engine.requests
    assert len(request.prompt_token_ids) + answer["usage"]["output_tokens"] == 100
    refused = await post(served, messages=[{"role": "user", "content": "word " * 1000}])
    assert refused.status_code == 400 and "context" in refused.json()["error"]["message"]


async def test_the_tier_of_a_message(start_server: StartServer) -> None:
    served = await start_server("hello")
    for tier, name in (("flex", "batch"), ("standard_only", "standard"), ("auto", "standard")):
        answer = await post(served, service_tier=tier)
        assert answer.json()["usage"]["service_tier"] == name
        assert served.engine.requests[-1].request_class.name == ("OFFLINE" if tier == "flex" else "ONLINE")


async def test_tokens_are_counted_without_a_request(tmp_path: Path) -> None:
    async with scripted(tmp_path, "ok") as served:
        for fields in ({}, {"tools": TOOLS, "system": "Be brief"}):
            body = {name: value for name, value in ask(**fields).items() if name != "max_tokens"}
            counted = await send(served, "POST", "/v1/messages/count_tokens?beta=true", json=body)
            await post(served, **fields)
            assert counted.json() == {"input_tokens": len(served.engine.requests[-1].prompt_token_ids)}
        assert len(served.engine.requests) == 2


async def test_keys_come_in_either_header(start_server: StartServer) -> None:
    served = await start_server("hello", api_key=("secret",))
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "Bearer secret", "x-api-key": "other"}, 200),
        ({"authorization": "Bearer other", "x-api-key": "secret"}, 200),
        ({"authorization": "Basic dTpw", "x-api-key": "secret"}, 200),
        ({"authorization": "Basic dTpw", "x-api-key": "other"}, 401),
        ({"x-api-key": "other"}, 401),
        ({}, 401),
    ):
        answer = await post(served, headers=headers)
        assert answer.status_code == status
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "authentication_error"
    assert error["request_id"] == answer.headers["x-request-id"]
    async with httpx.AsyncClient(base_url=served.url, headers={"x-api-key": "secret"}) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_errors_have_the_form_of_the_api(start_server: StartServer, tokenizer: Tokenizer) -> None:
    served = await start_server("hello")
    served.engine.add_errors = [QueueFullError("The queue is full.", retry_after=3)]
    answer = await post(served, stream=True)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
    assert answer.json()["error"] == {"type": "rate_limit_error", "message": "The queue is full."}
    assert (await post(served, model="other")).json()["error"]["type"] == "not_found_error"
    assert (await post(served, "/v1/messages/batches")).json()["error"]["type"] == "not_found_error"
    error = EngineStepError("The model step failed under this request.")
    broken = Script([*tokenizer.encode("one two three")], fail_after=2, error=error)
    served = await start_server(lambda _: broken)
    last = (await events_of(served))[-1]
    assert last["type"] == "error" and last["error"] == {"type": "api_error", "message": error.message}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_client_that_leaves_ends_its_answer(start_server: StartServer, path: str) -> None:
    served = await start_server("one two three four", hold_after=1)
    body = ask(stream=True) if path == "/v1/messages" else {"model": MODEL, "input": "Weather?", "stream": True}
    async with (
        httpx.AsyncClient(base_url=served.url) as client,
        client.stream("POST", path, json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if "delta" in line:
                break
    await served.engine.wait(lambda: bool(served.engine.aborts))
    assert not served.engine.num_open


USER = {"role": "user", "content": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "last message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": ["a"] * 33}, "stop_sequences"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": TOOLS * 2}, "same name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"top_k": -1}, "top_k"),
    ({"n": 2}, "n"),
]  # fmt: skip


async def test_what_is_refused_is_named(tmp_path: Path) -> None:
    async with scripted(tmp_path, "x") as served:
        for fields, word in REFUSED:
            answer = await post(served, **fields)
            assert answer.status_code == 400, (fields, answer.text)
            body = answer.json()
            assert set(body) == {"type", "error", "request_id"} and body["error"]["type"] == "invalid_request_error"
            assert word in body["error"]["message"], body
        assert not served.engine.requests
