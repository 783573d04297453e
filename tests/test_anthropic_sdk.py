"""Anthropic's SDK: streams, history, typed errors, models, the tool runner, and message batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tokenizer_folders
from batch_tools import batch_server, client_of, jsonl, keys_of, line, submit
from fake_engine import MODEL, FakeEngine, Script, Served, say, serve
from fixtures import StartServer, refuse_blocking
from support.http import get, prompt_of
from support.lazy import anthropic, openai
from test_batches_api import check_types
from test_messages_api import TOOLS, ask
from test_responses_api import THINKS
from test_tools import TEMPLATE, TWO, scripted

from engine.api import EngineRequest
from engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("default")  # raised by the SDK


def sdk(served: Served, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60, **options)


# --- messages


async def test_a_tool_loop_sends_back_what_it_got(tmp_path: Path) -> None:
    """Objects of the SDK as they are, results of the tools, and its typed errors."""
    template = THINKS.replace("{{ message.content", "({{ message.reasoning_content }}){{ message.content")
    async with scripted(tmp_path, f"<think>hm</think>\n\n{TWO}", template) as served, sdk(served) as client:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        fields: Any = {"model": ask()["model"], "max_tokens": 300, "tools": TOOLS, "messages": messages}
        first = await client.messages.create(**fields)
        messages.append({"role": "assistant", "content": first.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "Sun"}
            for block in first.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on"}]})
        second = await client.messages.create(**fields)
        assert second.id != first.id and second.stop_reason == "tool_use"
        prompt = prompt_of(served)
        roles = [part.split("\n")[0] for part in prompt.split("<|im_start|>")[1:]]
        assert roles[-6:] == ["user", "assistant", "tool", "tool", "user", "assistant"]
        said = prompt.split("<|im_start|>assistant\n")[1]
        assert said.startswith("(hm)Wait.<tool_call>") and '"arguments": {"city": "Rome", "days": 2}' in said
        assert said.count("<tool_call>") == 2 and "Go on" in said
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**fields, "model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences") as caught:
            await client.messages.create(**fields, stop_sequences=["a"] * 33)
        assert caught.value.request_id


# --- models


async def test_models_have_the_form_of_the_clients_api(start_server: StartServer) -> None:
    served = await start_server(served_model_name=(MODEL, "alias"))
    async with sdk(served) as client:
        listed = [model async for model in client.models.list(limit=1)]
        one = await client.models.retrieve("alias")
        for model in (*listed, one):
            check_types(model)
            assert model.type == "model" and model.display_name == model.id and model.max_input_tokens == 512
        assert [model.id for model in listed] == [MODEL, "alias"] and one.id == "alias"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.models.retrieve("other")
        assert caught.value.body["error"]["type"] == "not_found_error" and caught.value.request_id  # type: ignore[index]
    assert (await get(served, "/v1/models")).json()["data"][0]["object"] == "model"
    assert (await get(served, "/v1/models/other")).json()["error"]["code"] == "model_not_found"


# --- threads, which the SDK gives up when a server refuses them


async def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"fog in {city}"


async def test_the_tool_runner_goes_on_without_threads(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders.byte_level(tmp_path, TEMPLATE), probe=False)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'

    def script(request: EngineRequest) -> Script:
        is_told = "fog in Rome" in tokenizer.decode(request.prompt_token_ids)
        return say(tokenizer, "It is foggy." if is_told else call)(request)

    engine = FakeEngine(script, eos_token_ids=frozenset({tokenizer.eos_token_id or 0}), max_model_len=2048)
    with refuse_blocking():
        async with serve(engine, tokenizer) as served, sdk(served) as client:
            fields: Any = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "Weather?"}]}
            last = await client.beta.messages.tool_runner(
                tools=[anthropic.beta_async_tool(weather)], **fields
            ).until_done()
            assert [block.text for block in last.content if block.type == "text"] == ["It is foggy."]
            assert len(engine.requests) == 2
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(**fields, extra_body={"thread": {"type": "create"}})
            assert caught.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}  # type: ignore[index]
            await client.messages.create(**fields, extra_body={"thread": None})


# --- message batches

Requests = list[dict[str, Any]]


def a_request(custom_id: str, **params: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"number {custom_id}"}]
    return {"custom_id": custom_id, "params": {"model": MODEL, "max_tokens": 8, "messages": asked, **params}}


async def ended(client: anthropic.AsyncAnthropic, batch_id: str) -> Any:
    while (batch := await client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        check_types(batch)
        await asyncio.sleep(0.01)
    check_types(batch)
    assert batch.ended_at is not None and batch.results_url == f"/v1/messages/batches/{batch_id}/results"
    return batch


async def results_of(client: anthropic.AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    async for row in await client.messages.batches.results(batch_id):
        check_types(row)
        assert row.custom_id not in results
        results[row.custom_id] = row.result
    return results


def counts_of(batch: Any) -> dict[str, int]:
    return {name: count for name, count in batch.request_counts.model_dump().items() if count}


@pytest.fixture
async def batches(
    tokenizer: Tokenizer, tmp_path: Path
) -> AsyncIterator[tuple[Served, anthropic.AsyncAnthropic, openai.AsyncOpenAI]]:
    async with batch_server(tokenizer, tmp_path, "so\u2028und\x85so") as (served, ours), sdk(served) as client:
        yield served, client, ours


Batches = tuple[Served, "anthropic.AsyncAnthropic", "openai.AsyncOpenAI"]


@pytest.mark.slow
async def test_a_large_message_batch(batches: Batches) -> None:
    """More bytes and more objects than other bodies may have; bad ones are errors of their rows or of the request."""
    _, client, _ = batches
    page = [{"role": "user", "content": "lorem " * 100_000}]
    many = [a_request(f"r{i}") for i in range(9000)] + [a_request(f"p{i}", messages=page) for i in range(8)]
    created = await client.messages.batches.create(requests=many)  # type: ignore[arg-type]
    assert counts_of(created) == {"processing": 9008}
    await client.messages.batches.cancel(created.id)
    with pytest.raises(anthropic.BadRequestError, match=r"requests\[9008\]: Another line"):
        await client.messages.batches.create(requests=[*many, many[0]])  # type: ignore[list-item]


async def test_a_message_batch_from_creation_to_deletion(batches: Batches) -> None:
    served, client, ours = batches
    good = [a_request(f"good-{i}") for i in range(5)]
    bad = [a_request("hot", temperature=9), a_request("odd", nonsense=1)]
    created = await client.messages.batches.create(requests=[*good, *bad])  # type: ignore[list-item]
    check_types(created)
    assert created.processing_status == "in_progress" and created.results_url is None
    assert counts_of(created) == {"processing": 7}
    assert (created.expires_at - created.created_at).total_seconds() == 86_400
    batch = await ended(client, created.id)
    assert counts_of(batch) == {"succeeded": 5, "errored": 2}
    results = await results_of(client, batch.id)
    assert {name for name, result in results.items() if result.type == "succeeded"} == {
        each["custom_id"] for each in good
    }
    whole = await client.messages.create(**good[0]["params"])
    message = results["good-0"].message
    assert message.content == whole.content and message.usage.output_tokens == whole.usage.output_tokens
    for name in ("hot", "odd"):
        assert results[name].type == "errored" and results[name].error.error.type == "invalid_request_error"
    assert "temperature" in results["hot"].error.error.message
    assert (await ours.batches.retrieve(batch.id.removeprefix("msg"))).endpoint == "/v1/messages"
    names = [file.filename async for file in ours.files.list()]
    deleted = await client.messages.batches.delete(batch.id)
    check_types(deleted)
    assert deleted.id == batch.id and not [file async for file in ours.files.list()]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": good[0]["params"]}
    content = json.dumps(line).encode()
    for name in (*names, "message_batch.jsonl"):  # a user's file stays under any name
        given = await ours.files.create(file=(name, content), purpose="batch")
        own = await ours.batches.create(input_file_id=given.id, endpoint="/v1/messages", completion_window="24h")  # type: ignore[arg-type]
        await ended(client, f"msg{own.id}")
        await client.messages.batches.delete(f"msg{own.id}")
        assert [file.id async for file in ours.files.list()] == [given.id]
        await ours.files.delete(given.id)
    for work in (client.messages.batches.retrieve, client.messages.batches.delete, client.messages.batches.cancel):
        with pytest.raises(anthropic.NotFoundError):
            await work(batch.id)
    assert not served.engine.requests[0].request_id.startswith("msgbatch")


async def test_a_message_batch_that_is_cancelled(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path, "x", hold_after=0) as (served, _), sdk(served) as client:
        created = await client.messages.batches.create(requests=[a_request(str(i)) for i in range(4)])  # type: ignore[list-item]
        await served.engine.wait_for_event("add")
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            await client.messages.batches.delete(created.id)
        with pytest.raises(anthropic.AnthropicError):
            await client.messages.batches.results(created.id)
        running = await client.messages.batches.retrieve(created.id)
        assert counts_of(running) == {"processing": 4}
        cancelling = await client.messages.batches.cancel(created.id)
        check_types(cancelling)
        assert cancelling.processing_status == "canceling" and cancelling.cancel_initiated_at
        batch = await ended(client, created.id)
        assert counts_of(batch) == {"canceled": 4}
        assert {result.type for result in (await results_of(client, batch.id)).values()} == {"canceled"}


async def test_pages_of_message_batches(batches: Batches) -> None:
    """Batches of other endpoints are left out; those of /v1/messages from /v1/batches are shown."""
    _, client, ours = batches
    ids = [(await client.messages.batches.create(requests=[a_request("a")])).id for _ in range(4)]  # type: ignore[list-item]
    await submit(ours, jsonl([line(1)]))
    ids.append(
        "msg"
        + (
            await submit(ours, jsonl([{**line(1, "/v1/messages"), "body": a_request("a")["params"]}]), "/v1/messages")
        ).id
    )
    assert [batch.id async for batch in client.messages.batches.list(limit=2)] == ids[::-1]
    page = await client.messages.batches.list(limit=2, before_id=ids[0])
    assert [batch.id for batch in page.data] == [ids[2], ids[1]] and page.has_more
    assert (page.first_id, page.last_id) == (ids[2], ids[1])
    for query in ({"after_id": "msgbatch_x"}, {"limit": 0}):
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.batches.list(**query)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "requests"),
        ([a_request("a"), a_request("b"), a_request("a")], r"requests\[2\]: Another line has the same 'custom_id'"),
        ([a_request("a", model="other")], r"requests\[0\]: This server has no model 'other'"),
        ([a_request("")], r"requests\[0\]: 'custom_id' must be"),
        ([{"custom_id": "a"}], r"requests\[0\].params"),
        ([{"custom_id": "a", "params": "x"}], r"requests\[0\].params"),
        ([{**a_request("a"), "more": 1}], r"requests\[0\].more"),
        ([a_request("a", metadata=json.loads("[" * 500 + "]" * 500))], "'requests' is nested too deeply"),
    ],
)
async def test_a_message_batch_that_cannot_run_is_refused_at_once(
    batches: Batches, requests: Requests, message: str
) -> None:
    served, client, ours = batches
    with pytest.raises(anthropic.BadRequestError, match=message):
        await client.messages.batches.create(requests=requests)  # type: ignore[arg-type]
    assert not served.engine.requests and not [file async for file in ours.files.list()]


async def test_a_message_batch_beyond_a_quota_leaves_no_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "few few lines=2", "small small bytes=300")
    async with batch_server(tokenizer, tmp_path / "state", "x", hold_after=0, api_key_file=keys) as (served, _):
        for key, status in (("few", 429), ("small", 413)):
            async with sdk(served).with_options(api_key=key) as client:
                await client.messages.batches.create(requests=[a_request("a")])  # type: ignore[list-item]
                with pytest.raises(anthropic.APIStatusError) as caught:
                    for number in range(4):
                        await client.messages.batches.create(requests=[a_request(str(number))])  # type: ignore[list-item]
                assert caught.value.status_code == status
                shown = [batch.id async for batch in client.messages.batches.list()]
            async with client_of(served, api_key=key) as ours:
                assert len([file async for file in ours.files.list()]) == len(shown)
