"""Anthropic's SDK for single messages: streams, history, typed errors and required tools."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from fake_engine import Served
from test_messages_api import TOOLS, ask
from test_responses_api import THINKS
from test_structured_api import MODEL as DEMO
from test_structured_api import server as demo_server
from test_tools import TWO, scripted

pytestmark = pytest.mark.filterwarnings("default")  # other people's


QUESTION = "What is the weather in Paris?"


def sdk(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120)


async def test_anthropic_streams_what_it_gets_whole(tmp_path: Path) -> None:
    async with scripted(tmp_path, f"<think>\nhm hm\n</think>\n\n{TWO}", THINKS) as served, sdk(served) as client:
        fields: Any = ask(tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        counted = await client.messages.count_tokens(model=fields["model"], messages=fields["messages"], tools=TOOLS)  # type: ignore[arg-type]
        prompt = len(served.engine.requests[0].prompt_token_ids)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert {"thinking", "text", "input_json", "content_block_stop", "message_delta"} <= set(kinds)
    for message in (whole, final):
        thinking, text, first, second = message.content
        assert thinking.type == "thinking" and thinking.thinking == "hm hm"
        assert text.type == "text" and text.text == "Wait."
        assert first.type == "tool_use" and (first.name, first.input) == ("weather", {"city": "Rome", "days": 2})
        assert second.type == "tool_use" and second.input == {"zone": "UTC"}
        assert message.stop_reason == "tool_use" and message.usage.output_tokens > 0
    assert whole.usage == final.usage and counted.input_tokens == prompt


async def test_anthropic_sends_back_what_it_got(tmp_path: Path) -> None:
    """Objects of the SDK as they are, results of the tools, and its typed errors."""
    async with scripted(tmp_path, f"<think>hm</think>\n\n{TWO}", THINKS) as served, sdk(served) as client:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        fields: Any = {"model": ask()["model"], "max_tokens": 300, "tools": TOOLS, "messages": messages}
        first = await client.messages.create(**fields)
        messages.append({"role": "assistant", "content": first.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "Sun"}
            for block in first.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
        second = await client.messages.create(**fields)
        assert second.id != first.id and second.stop_reason == "tool_use"
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**fields, "model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences") as caught:
            await client.messages.create(**fields, stop_sequences=["a"] * 33)
        assert caught.value.request_id


# With a model that answers


DEMO_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
"""One that takes tools, and names the way to call them."""


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[Served]:
    async with demo_server(template=DEMO_TEMPLATE) as served:
        yield served


async def test_anthropic_and_the_packaged_model(demo: Served) -> None:
    tool: Any = {
        "name": "weather",
        "description": "The weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    }
    tool["input_schema"]["additionalProperties"] = False
    async with sdk(demo) as client:
        answer = await client.messages.create(
            model=DEMO,
            max_tokens=200,
            messages=[{"role": "user", "content": QUESTION}],
            tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    assert answer.stop_reason == "tool_use" and answer.content[0].type == "tool_use"
    assert answer.content[0].input in ({"city": "Paris"}, {"city": "Rome"})
