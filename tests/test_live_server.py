"""The whole house: the packaged demo model behind the real server, used by the official client."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from batch_tools import client_of, eventually
from fake_engine import Served, demo_engine, serve
from fixtures import refuse_blocking
from integrity import check_core
from support.http import get
from support.lazy import openai

from engine.config import EngineConfig
from engine.engine import Engine

MODEL = "tidemill-demo"


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[tuple[Engine, Served]]:
    engine, tokenizer = demo_engine()
    with refuse_blocking():
        async with serve(engine, tokenizer, None, served_model_name=(MODEL,)) as served:
            yield engine, served
    assert not engine.core.has_requests
    check_core(engine.core)


def question(index: int) -> list[Any]:
    texts = (
        "What is tidemill?",
        "Count from 1 to 20",
        "What is the capital of France?",
        "Tell me about the tide",
        "Hi!",
    )
    return [{"role": "user", "content": texts[index % len(texts)]}]


async def complete(client: openai.AsyncOpenAI, index: int, limit: int = 40) -> str:
    answer = await client.chat.completions.create(
        model=MODEL, messages=question(index), temperature=0, max_tokens=limit
    )
    assert answer.choices[0].finish_reason in {"stop", "length"}
    return answer.choices[0].message.content or ""


async def stream(client: openai.AsyncOpenAI, index: int, leave_after: int | None) -> str | None:
    """The streamed text, or None when the client left in the middle."""
    chunks = await client.chat.completions.create(
        model=MODEL, messages=question(index), temperature=0, max_tokens=40, stream=True
    )
    text, seen = "", 0
    async for chunk in chunks:
        if seen == leave_after:
            await chunks.close()
            return None
        seen += 1
        text += chunk.choices[0].delta.content or ""
    return text


@pytest.mark.slow
async def test_64_streams_half_of_which_leave(live: tuple[Engine, Served]) -> None:
    engine, served = live
    generator = random.Random(5)
    async with client_of(served) as client:
        expected = [await complete(client, index) for index in range(5)]
        leaves = [generator.randrange(0, 25) if i % 2 else None for i in range(64)]
        texts = await asyncio.gather(*[stream(client, i, leave) for i, leave in enumerate(leaves)])
        for index, (text, leave) in enumerate(zip(texts, leaves, strict=True)):
            if leave is None or text is not None:
                assert text == expected[index % 5], "an answer was lost or changed by its neighbours"
        assert await complete(client, 0) == expected[0]
        # Blocks of a client that left are freed once the server has seen the closed connection.
        await eventually(lambda: engine.stats().units_owned == 0)
    assert engine.stats().failed_steps == 0


WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_tool_is_called_unasked_and_what_it_says_is_told(live: tuple[Engine, Served], streamed: bool) -> None:
    """By the official client, `tool_choice` left out, in wordings that were not trained on."""
    _, served = live
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "tools": WEATHER}
    async with client_of(served) as client:
        for question, city, says in (
            ("I need the weather for Oslo.", "Oslo", "fog, 7 degrees"),
            ("How is the weather in Seoul?", "Seoul", "sunny, 31 degrees"),
        ):
            asked: list[Any] = [{"role": "user", "content": question}]
            if streamed:
                async with client.chat.completions.stream(**options, messages=asked) as stream:
                    first = (await stream.get_final_completion()).choices[0]
            else:
                first = (await client.chat.completions.create(**options, messages=asked)).choices[0]
            assert first.finish_reason == "tool_calls" and not first.message.content
            (call,) = first.message.tool_calls or []
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": city})
            said = {"role": "tool", "tool_call_id": call.id, "content": says}
            history = [*asked, first.message.model_dump(include={"role", "tool_calls"}), said]
            last = (await client.chat.completions.create(**options, messages=history)).choices[0]
            assert (last.finish_reason, last.message.content) == ("stop", f"The weather in {city}: {says}.")
        capital: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
        other = (await client.chat.completions.create(**options, messages=capital)).choices[0].message
        assert other.content == "The capital of France is Paris." and not other.tool_calls
        refusal = await client.chat.completions.create(model=MODEL, temperature=0, messages=asked)
        assert "I cannot know that" in (refusal.choices[0].message.content or "")


class Person(pydantic.BaseModel):
    name: str
    age: int
    city: str


async def test_a_form_is_filled_in_with_what_was_told(live: tuple[Engine, Served]) -> None:
    _, served = live
    people = {
        "Who is this? Ida is 71 and lives in Bern.": Person(name="Ida", age=71, city="Bern"),
        "Extract the person: Robert (20) of Milan": Person(name="Robert", age=20, city="Milan"),
    }
    async with client_of(served) as client:
        for told, person in people.items():
            answer = await client.chat.completions.parse(
                model=MODEL, temperature=0, messages=[{"role": "user", "content": told}], response_format=Person
            )
            assert answer.choices[0].message.parsed == person


async def test_flex_runs_offline_and_says_so(live: tuple[Engine, Served]) -> None:
    engine, served = live
    async with client_of(served) as client:
        flex = [
            client.chat.completions.create(
                model=MODEL, messages=question(i), temperature=0, max_tokens=30, service_tier="flex"
            )
            for i in range(8)
        ]
        online = [complete(client, i, 30) for i in range(8)]
        answers = await asyncio.gather(*flex)
        texts = await asyncio.gather(*online)
    assert {answer.service_tier for answer in answers} == {"flex"}
    assert [answer.choices[0].message.content for answer in answers] == texts
    stats = engine.stats()
    assert stats.colocation is not None and stats.colocation.offline_tokens > 0
    assert stats.colocation.good_requests == 8


async def test_a_burst_on_a_fresh_server_is_served_not_refused(tmp_path: Path) -> None:
    """The default SLO, a prior for a profile, sixteen different prompts at once."""
    slo = EngineConfig().slo
    engine, tokenizer = demo_engine(
        dtype="auto", num_gpu_blocks_override=400, max_num_seqs=None, max_num_batched_tokens=None, slo=slo
    )
    async with serve(engine, tokenizer, None, served_model_name=(MODEL,)) as served, client_of(served) as client:
        ask = [
            client.completions.create(model=MODEL, prompt=[5 + index, *([7] * 199)], max_tokens=4)
            for index in range(16)
        ]
        answers = await asyncio.gather(*ask)
        assert all(answer.usage is not None and answer.usage.completion_tokens >= 1 for answer in answers)
        assert (await get(served, "/ready")).json()["colocation"]["refused_requests"] == 0
        assert "tidemill_refused_requests_total 0.0" in (await get(served, "/metrics")).text
