"""/v1/completions, /v1/models and the rest of the surface on a real server around a scripted engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_tools import keys_of
from fake_engine import MODEL, Script, Served
from fixtures import StartServer
from support.http import get, send
from support.lazy import openai
from support.tables import for_each

from engine.api import EngineRequest, TokenLogprobs
from engine.text.tokenizer import Tokenizer

TEXT = "hello wörld 🙂"


async def complete(served: Served, **fields: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(**{"model": MODEL, "prompt": "hi", "max_tokens": 100, **fields})
        return [chunk async for chunk in answer] if fields.get("stream") else answer


@pytest.fixture
async def served(start_server: StartServer) -> Served:
    return await start_server(TEXT)


def echo_script(tokenizer: Tokenizer) -> Any:
    """Each prompt is answered by itself, reversed."""
    eos = tokenizer.eos_token_id
    assert eos is not None
    return lambda request: Script([*tokenizer.encode(tokenizer.decode(request.prompt_token_ids)[::-1]), eos])


async def test_a_whole_answer(served: Served, tokenizer: Tokenizer) -> None:
    answer = await complete(served)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert list(served.engine.requests[0].prompt_token_ids) == tokenizer.encode("hi")
    assert answer.usage.completion_tokens == len(tokenizer.encode(TEXT)) + 1


async def test_a_stream(served: Served) -> None:
    chunks = await complete(served, stream=True, stream_options={"include_usage": True})
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXT
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]


async def test_the_default_length_is_sixteen_or_what_is_left(served: Served) -> None:
    await complete(served, max_tokens=None)
    room = served.engine.info.max_model_len
    await complete(served, max_tokens=None, prompt=[1] * (room - 3))
    assert [request.sampling.max_tokens for request in served.engine.requests] == [16, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_several_prompts_with_several_choices(
    start_server: StartServer, tokenizer: Tokenizer, stream: bool, as_ids: bool
) -> None:
    served = await start_server(echo_script(tokenizer))
    prompts: list[Any] = ["abc", "the fox", "é"]
    sent = [tokenizer.encode(prompt) for prompt in prompts] if as_ids else prompts
    answer = await complete(served, prompt=sent, n=2, stream=stream)
    found: dict[int, str] = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    assert found == {index: prompts[index // 2][::-1] for index in range(6)}
    if not stream:
        assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo(start_server: StartServer, tokenizer: Tokenizer, stream: bool, as_ids: bool) -> None:
    served = await start_server(echo_script(tokenizer))
    prompt: Any = tokenizer.encode("wörld 🙂") if as_ids else "wörld 🙂"
    answer = await complete(served, prompt=prompt, echo=True, stream=stream)
    text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
    assert text == "wörld 🙂🙂 dlröw"


async def test_an_answer_continues_its_prompt(start_server: StartServer, tokenizer: Tokenizer) -> None:
    """A character that the prompt's last token began is completed by the answer's first."""
    ids = tokenizer.encode("naïve 東")
    served = await start_server(lambda _: Script([ids[-1]]))
    answer = await complete(served, prompt=ids[:-1], max_tokens=1)
    whole = tokenizer.decode(ids)
    assert whole.endswith(answer.choices[0].text) and "\ufffd" not in answer.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(start_server: StartServer, tokenizer: Tokenizer, stream: bool) -> None:
    eos = tokenizer.eos_token_id
    assert eos is not None
    ids = tokenizer.encode(TEXT)

    def logprobs(token: int, num: int) -> TokenLogprobs:
        return TokenLogprobs(-3.0, ((1, -0.25), (2, -0.5), (3, -1.0))[:num])

    served = await start_server(lambda _: Script([*ids, eos], logprobs=logprobs))
    answer = await complete(served, logprobs=2, stream=stream)
    objects = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
    tokens = [token for part in objects for token in part.tokens]
    offsets = [offset for part in objects for offset in part.text_offset]
    assert [value for part in objects for value in part.token_logprobs] == [-3.0] * len(ids)
    assert offsets == [len(_whole_text(tokenizer, ids[:n])) for n in range(len(ids))]
    names = [tokenizer.token_bytes(i) for i in ids]
    assert tokens == [_name(piece) for piece in names]
    tops = [top for part in objects for top in part.top_logprobs]
    first, second = (tokenizer.token_bytes(each).decode("utf-8", "replace") for each in (1, 2))
    expected = {first: -0.25, second: -0.5}
    assert tops == [{**expected, token: -3.0} for token in tokens]


def _whole_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "ignore")


def _name(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


async def test_token_ids(served: Served, tokenizer: Tokenizer) -> None:
    answer = await complete(served, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [*tokenizer.encode(TEXT), tokenizer.eos_token_id]
    assert answer.choices[0].prompt_token_ids == tokenizer.encode("hi")


async def test_a_background_completion_comes_in_one_piece(served: Served) -> None:
    answer = await complete(served, extra_body={"service_tier": "flex"})
    assert answer.service_tier == "flex" and answer.choices[0].text == TEXT
    assert served.engine.requests[0].final_only
    stopped = await complete(served, stop=["wör"], extra_body={"service_tier": "flex"})
    assert stopped.choices[0].text == "hello " and not served.engine.requests[1].final_only


async def test_min_tokens_delay_stop_strings(served: Served, tokenizer: Tokenizer) -> None:
    answer = await complete(served, stop=["hello", "ld"], extra_body={"min_tokens": 2})
    assert answer.choices[0].text == "hello wör"


# --- models, health, and absent routes


async def test_models(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        listed = [model async for model in client.models.list()]
        assert [model.id for model in listed] == [MODEL, "alias"] and listed[0].object == "model"
        assert (await client.models.retrieve("alias")).id == "alias"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_health_and_readiness(served: Served) -> None:
    assert (await get(served, "/health")).status_code == 200
    assert (await get(served, "/ready")).json() == {"status": "ok"}
    served.engine.info = replace(served.engine.info, fallbacks=("a kernel differs",))
    assert (await get(served, "/ready")).json() == {"status": "ok", "kernels": ["a kernel differs"]}
    assert set((await get(served, "/version")).json()) == {"version"}
    served.app.state.context.lifecycle.draining = True
    assert (await get(served, "/health")).status_code == 200
    assert (await get(served, "/ready")).status_code == 503
    served.app.state.context.lifecycle.draining = False
    served.engine.started = False
    assert (await get(served, "/ready")).status_code == 503
    served.engine.dead = True
    answer = await get(served, "/health")
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"


@for_each(("path", "method", "allowed"), [
    ("/nothing", "GET", ""), ("/v1", "GET", ""), ("/v1/models/no", "GET", ""), ("/docs", "GET", ""),
    ("/redoc", "GET", ""), ("/v1/chat/completions", "GET", "POST"), ("/v1/models", "DELETE", "GET, HEAD"),
    ("/health", "POST", "GET, HEAD"), ("/%2e%2e/etc/passwd", "GET", ""),
    ("/v1/models/%00", "GET", ""),
])  # fmt: skip
async def test_every_error_is_an_envelope(served: Served, path: str, method: str, allowed: str) -> None:
    answer = await send(served, method, path)
    assert answer.status_code == (405 if allowed else 404) and answer.headers.get("allow", "") == allowed
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req-") and "passwd" not in answer.text
    assert (f"{method} is not possible here; use {allowed}." in answer.text) is bool(allowed)
    assert ("stores no completions" in answer.text) is (path == "/v1/chat/completions")


async def test_tenants_have_prefix_caches_of_their_own(start_server: StartServer, tmp_path: Path) -> None:
    served = await start_server(TEXT, api_key=("one", "three"), api_key_file=keys_of(tmp_path, "two shop"))

    async def salt(key: str) -> bytes:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
            await client.completions.create(model=MODEL, prompt="hi")
        return served.engine.requests[-1].cache_salt

    first: list[EngineRequest] = served.engine.requests
    salts = [await salt(key) for key in ("one", "two", "three")]
    assert salts[0] == salts[2] != salts[1] and len(first) == 3
    assert all(salts) and b"default" not in salts[0]
