"""Endpoints that count tokens without running the model: /tokenize, /detokenize and /v1/responses/input_tokens."""

from typing import Any

import pytest
from fake_engine import MODEL
from fixtures import StartServer
from support.http import post
from support.lazy import openai

from engine.text.tokenizer import Tokenizer

TEXTS = ["hello world", "naïve 東京 🙂\n\u2028 x", "<|im_end|> <s>", "a" * 2000]
HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <|im_end|>"}]


async def test_tokens_are_those_of_the_prompt(start_server: StartServer, tokenizer: Tokenizer) -> None:
    """Compared with the prompts that the engine gets for the same texts and messages; and back to the text."""
    served = await start_server(max_model_len=4096)
    for text in TEXTS:
        found = (await post(served, "/tokenize", prompt=text)).json()
        await post(served, "/v1/completions", prompt=text, max_tokens=1)
        assert tuple(found["tokens"]) == served.engine.requests[-1].prompt_token_ids
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 4096)
        assert set(found) == {"count", "max_model_len", "tokens", "token_strs"} and found["token_strs"] is None
        assert (await post(served, "/detokenize", tokens=found["tokens"])).json() == {"prompt": text}
    for messages in (HI, HI[1:]):
        found = (await post(served, "/tokenize", messages=messages)).json()
        await post(served, "/v1/chat/completions", messages=messages, max_tokens=1)
        assert tuple(found["tokens"]) == served.engine.requests[-1].prompt_token_ids
        whole = (await post(served, "/detokenize", tokens=found["tokens"])).json()["prompt"]
        assert whole == tokenizer.decode(found["tokens"], skip_special_tokens=False)
    assert (await post(served, "/tokenize", prompt="")).json()["tokens"] == tokenizer.encode("")
    assert (await post(served, "/detokenize", tokens=[])).json() == {"prompt": ""}


async def test_the_names_of_tokens(start_server: StartServer, tokenizer: Tokenizer) -> None:
    served = await start_server()
    for fields in ({"prompt": "hello world 🙂"}, {"messages": HI}):
        found = (await post(served, "/tokenize", return_token_strs=True, **fields)).json()
        assert len(found["token_strs"]) == found["count"]
        vocabulary = tokenizer._tokenizer.get_vocab(with_added_tokens=True)
        assert [vocabulary[name] for name in found["token_strs"]] == found["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "no"}, "model"),
        ("/tokenize", {"messages": HI, "model": "no"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [5, 405]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5], "model": "no"}, "model"),
        ("/v1/responses/input_tokens", {"input": []}, "input"),
        ("/v1/responses/input_tokens", {"input": "x", "model": "no"}, "model"),
    ],
)
async def test_what_is_refused_names_its_parameter(
    start_server: StartServer, path: str, body: dict[str, Any], param: str
) -> None:
    served = await start_server()
    answer = await post(served, path, **body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, answer.text


async def test_input_tokens_are_those_of_the_response(start_server: StartServer) -> None:
    """By the official client; a conversation longer than the context is counted as well."""
    served = await start_server()
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        bodies: list[dict[str, Any]] = [
            {"input": "hi"},
            {
                "input": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
                "instructions": "Go.",
            },
            {"input": "hi", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
        ]
        for body in bodies:
            counted = await client.responses.input_tokens.count(model=MODEL, **body)
            await client.responses.create(model=MODEL, max_output_tokens=16, **body)
            assert counted.object == "response.input_tokens"
            assert counted.input_tokens == len(served.engine.requests[-1].prompt_token_ids)
        long = await client.responses.input_tokens.count(model=MODEL, input="a b " * 400)
        assert long.input_tokens > 512
    assert len(served.engine.requests) == len(bodies)
