"""Anthropic's SDK beyond single messages: models, the tool runner, and message batches."""

from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import tokenizer_folders
from fake_engine import MODEL, FakeEngine, Script, Served, say, serve
from fixtures import StartServer, refuse_blocking
from test_tools import TEMPLATE

from engine.api import EngineRequest
from engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("default")  # raised by the SDK


def sdk(served: Served, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60, **options)


def check_types(item: Any) -> None:
    """Validate each field against the client's own types, strictly, unlike the client itself."""
    assert not item.model_extra, f"fields that the client does not know: {item.model_extra}"
    type(item).model_validate_json(item.model_dump_json(), strict=True)


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
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as plain:
        assert (await plain.get("/v1/models")).json()["data"][0]["object"] == "model"
        assert (await plain.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


# --- threads, which the SDK gives up when a server refuses them


@anthropic.beta_async_tool
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
            last = await client.beta.messages.tool_runner(tools=[weather], **fields).until_done()
            assert [block.text for block in last.content if block.type == "text"] == ["It is foggy."]
            assert len(engine.requests) == 2
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(**fields, extra_body={"thread": {"type": "create"}})
            assert caught.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}  # type: ignore[index]
            await client.messages.create(**fields, extra_body={"thread": None})
