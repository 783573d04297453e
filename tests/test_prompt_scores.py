"""Log-probabilities of prompts equal those of transformers for any chunks, other requests and memory; `echo` with
`logprobs` of /v1/completions."""

import functools
import json
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from driver import Driver, make_request
from fake_engine import MODEL as FAKE
from fake_engine import FakeEngine, Served, say, serve
from support.http import post
from test_embeddings import CASES, make_driver, texts
from test_structured_api import MODEL
from test_structured_api import server as demo_server
from tiny_models import reference_model

from engine.api import EngineRequest, FinishReason, RequestClass, SamplingParams
from engine.forms import Pooling
from engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(600)  # the first test may have to build the library
BEST = 3


ONLINE, OFFLINE = RequestClass


def score(name: str, ids: list[int], kind: RequestClass = ONLINE, best: int | None = BEST) -> EngineRequest:
    return EngineRequest(name, tuple(ids), SamplingParams(1, logprobs=best), kind, pooling=Pooling.SCORES)


def table_of(driver: Driver, name: str, size: int) -> np.ndarray:
    final = driver.finals[name]
    assert final.finish_reason is FinishReason.STOP and final.error is None and final.embedding is not None
    assert final.num_output_tokens == 0
    return np.frombuffer(final.embedding, dtype="<f4").reshape(size, -1)


@functools.cache
def reference(case: str, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(case)(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(dim=-1)


def check(table: np.ndarray, case: str, ids: tuple[int, ...]) -> None:
    assert not table[0].any() and table.shape == (len(ids), 1 + 2 * BEST)
    expected = reference(case, ids)[:-1]
    chosen = expected.gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0].numpy()
    assert np.abs(table[1:, 0] - chosen).max(initial=0) < 2e-4
    best = expected.topk(BEST, dim=-1).values.numpy()
    assert np.abs(table[1:, 1 : 1 + BEST] - best).max(initial=0) < 2e-4
    named = expected.gather(1, torch.from_numpy(table[1:, 1 + BEST :].astype(np.int64))).numpy()
    assert np.abs(table[1:, 1 : 1 + BEST] - named).max(initial=0) < 2e-4, "the ids are of the best tokens"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_scores_equal_a_reference(backend: str, case: str) -> None:
    """In chunks, beside chats, in a pool that is too small; twice, because the second finds no cached prefix."""
    driver = make_driver(backend, case, num_blocks=25)
    asked = {}
    for number, ids in enumerate([*texts(12), *texts(2)]):
        kind = [ONLINE, OFFLINE][number % 2]
        asked[f"score {number}"] = tuple(ids)
        driver.add(score(f"score {number}", ids, kind))
        driver.add(make_request(f"chat {number}", ids, 30, request_class=kind))
        for _ in range(2):
            driver.step()
    driver.run()
    for name, ids in asked.items():
        check(table_of(driver, name, len(ids)), case, ids)
    assert sum(driver.stats().preemptions.values()) > 0
    free = make_driver(backend, case)
    for number, ids in enumerate([*texts(12), *texts(2)]):
        free.add(make_request(f"chat {number}", ids, 30))
    free.run()
    assert all(free.outputs[name] == driver.outputs[name] for name in free.outputs), "chats are as without scores"


def test_scores_without_best_tokens_and_of_one_token() -> None:
    driver = make_driver("torch", "llama-gqa2")
    driver.add(score("none", [5, 6, 7], best=None))
    driver.add(score("one", [5]))
    driver.run()
    assert table_of(driver, "none", 3).shape == (3, 1)
    assert table_of(driver, "one", 1).tolist() == [[0.0] * (1 + 2 * BEST)]


# --- /v1/completions


async def complete(served: Served, **fields: Any) -> httpx.Response:
    return await post(served, "/v1/completions", **{"model": MODEL, "temperature": 0, **fields})


async def whole(served: Served, **fields: Any) -> dict[str, Any]:
    answer = await complete(served, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_echoed_scores_are_those_of_generation() -> None:
    """An answer, sent as a prompt, has the same log-probabilities as when it was generated."""
    async with demo_server() as served:
        tokenizer: Tokenizer = served.app.state.context.tokenizer
        prompt = tokenizer.encode("The capital of France is")
        first = await whole(served, prompt=prompt, max_tokens=12, logprobs=2, return_token_ids=True, ignore_eos=True)
        said, before = first["choices"][0]["token_ids"], first["choices"][0]["logprobs"]
        for max_tokens in (0, 1, 5):
            body = await whole(served, prompt=[*prompt, *said], max_tokens=max_tokens, logprobs=2, echo=True)
            (choice,) = body["choices"]
            found = choice["logprobs"]
            size = len(prompt) + len(said)
            assert body["usage"]["prompt_tokens"] == size and body["usage"]["completion_tokens"] == max_tokens
            assert {len(values) for values in found.values()} == {size + max_tokens}
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            assert found["tokens"][len(prompt) : size] == before["tokens"]
            assert np.allclose(found["token_logprobs"][len(prompt) : size], before["token_logprobs"], atol=1e-4)
            shown = [list(each) for each in found["top_logprobs"][len(prompt) : size]]
            assert shown == [list(each) for each in before["top_logprobs"]]
            ends = [*found["text_offset"][1:], None]
            parts = [choice["text"][a:b] for a, b in zip(found["text_offset"], ends, strict=True)]
            assert parts == found["tokens"], "offsets count from the start of the prompt"
            assert choice["finish_reason"] == "length"


async def test_scores_streamed_for_several_choices_and_in_the_background() -> None:
    fields: dict[str, Any] = {"prompt": ["The capital", "A dog sleeps"], "n": 2, "max_tokens": 3, "seed": 1}
    fields |= {"echo": True, "logprobs": 1}
    async with demo_server() as served:
        body = await whole(served, **fields)
        streamed = await complete(served, **fields, stream=True)
        flex = await whole(served, **fields, service_tier="flex")
        empty = await whole(served, **{**fields, "max_tokens": 0})
        silent = await whole(served, prompt="The capital", max_tokens=0)
    assert flex["choices"] == body["choices"] and flex["service_tier"] == "flex"
    assert [choice["text"] for choice in empty["choices"]] == ["The capital"] * 2 + ["A dog sleeps"] * 2
    assert (silent["choices"][0]["text"], silent["choices"][0]["finish_reason"]) == ("", "length")
    joined: dict[int, dict[str, Any]] = {}
    for line in streamed.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            held = joined.setdefault(choice["index"], {"text": "", "logprobs": {}})
            held["text"] += choice["text"]
            for name, values in choice["logprobs"].items():
                held["logprobs"].setdefault(name, []).extend(values)
    for choice, other in zip(body["choices"], empty["choices"], strict=True):
        assert joined[choice["index"]] == {"text": choice["text"], "logprobs": choice["logprobs"]}
        size = len(other["logprobs"]["tokens"])
        assert choice["text"].startswith(other["text"]) and other["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["tokens"][:size] == other["logprobs"]["tokens"]


async def test_a_model_that_cannot_score_says_so(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(say(tokenizer, "ok"), scores_prompts=False)
    async with serve(engine, tokenizer) as served:
        for fields, param in (({"echo": True, "logprobs": 1}, "echo"), ({"max_tokens": 0}, "max_tokens")):
            answer = await complete(served, prompt="x", **{**fields, "model": FAKE})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await complete(served, prompt="x", echo=True, model=FAKE)).status_code == 200
        assert len(engine.requests) == 1
