"""Embeddings: vectors equal to transformers', for any chunks, neighbours and memory; the endpoint."""

import asyncio
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizer_folders
import torch
from batch_tools import jsonl, line, open_folder, results_of, submit, until
from devices import BACKENDS, device_of, linear_of
from driver import Driver, make_request, small_config
from fake_engine import MODEL, FakeEngine, demo_engine, say, serve
from support.lazy import openai
from test_tools import client_of
from tiny_models import model_folder, reference_model

from engine.api import EngineRequest, FinishReason, RequestClass, SamplingParams
from engine.build.join import read_embedding_spec
from engine.execution.runner import Runner
from engine.forms import EmbeddingSpec, Pooling
from engine.models import demo
from engine.models.checkpoint import load_weights
from engine.models.spec import load_spec
from engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(600)  # the first test may have to build the library
CASES = ["llama-gqa2", "opt", "neox", "qwen3"]
EMBED = SamplingParams(max_tokens=1, temperature=0.0)


def make_driver(backend: str, case: str, num_blocks: int = 200) -> Driver:
    folder = model_folder(case)
    spec = load_spec(folder)
    config = small_config(
        num_blocks, max_model_len=min(4 * num_blocks, 120), min_prefill_chunk=4, pipeline_depth=int(backend == "cuda")
    )
    weights = load_weights(spec, folder, dtype="float32", device="cpu", make=linear_of(backend))
    return Driver(Runner(device_of(backend, spec, weights, config.limits)), config)


def embed(name: str, ids: list[int], pooling: Pooling, kind: RequestClass = RequestClass.ONLINE) -> EngineRequest:
    return EngineRequest(name, tuple(ids), EMBED, kind, pooling=pooling)


def vector_of(driver: Driver, name: str) -> np.ndarray:
    final = driver.finals[name]
    assert final.finish_reason is FinishReason.STOP and final.error is None and final.embedding is not None
    assert final.num_output_tokens == 0 and final.times.first_token is not None
    return np.frombuffer(final.embedding, dtype="<f4")


@functools.cache
def reference(case: str, ids: tuple[int, ...], pooling: Pooling) -> np.ndarray:
    with torch.inference_mode():
        hidden = reference_model(case).base_model(torch.tensor([ids])).last_hidden_state[0].float()
    return (hidden[-1] if pooling is Pooling.LAST else hidden.mean(dim=0)).numpy()


def texts(count: int, shared: int = 12) -> list[list[int]]:
    """Of many lengths, 1 and one that is a whole number of blocks among them; with a common beginning."""
    rng = np.random.default_rng(count)
    begin = rng.integers(3, 90, shared).tolist()
    lengths = [1, 16, 60, 5, 33, 17, 24, 25, 49, 2, 41, 8][:count]
    return [[*begin, *rng.integers(3, 90, 64).tolist()][:length] for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_vectors_equal_a_reference(backend: str, case: str) -> None:
    """Both poolings, in chunks, beside chats, in a pool that is too small, with prefixes that others have computed."""
    driver = make_driver(backend, case, num_blocks=25)
    asked = {}
    for number, ids in enumerate(texts(12)):
        kind = [RequestClass.ONLINE, RequestClass.OFFLINE][number % 2]
        for pooling in (Pooling.LAST, Pooling.MEAN):
            name = f"{pooling.value} {number}"
            asked[name] = (tuple(ids), pooling)
            driver.add(embed(name, ids, pooling, kind))
        driver.add(make_request(f"chat {number}", ids, 30, request_class=kind))
        for _ in range(2):
            driver.step()
    driver.run()
    for name, (ids, pooling) in asked.items():
        found, expected = vector_of(driver, name), reference(case, ids, pooling)
        assert np.abs(found - expected).max() < 1e-4 * max(1.0, np.abs(expected).max()), name
    stats = driver.stats()
    assert sum(stats.preemptions.values()) > 0 and stats.prefix_hit_tokens > 0
    assert stats.units_owned == 0
    free = make_driver(backend, case)
    for number, ids in enumerate(texts(12)):
        free.add(make_request(f"chat {number}", ids, 30))
    free.run()
    assert all(free.outputs[name] == driver.outputs[name] for name in free.outputs)


def test_a_mean_is_computed_whole_and_leaves_nothing_behind() -> None:
    """No prefix hits, after any request; one that only looks at the last token has them."""
    driver = make_driver("torch", "llama-gqa2")
    ids = texts(3)[2]
    for name, pooling in (("m1", Pooling.MEAN), ("l1", Pooling.LAST), ("m2", Pooling.MEAN), ("l2", Pooling.LAST)):
        driver.add(embed(name, ids, pooling))
        driver.run()
        if name == "m1":
            assert driver.stats().units_cached == 0
    hits = {name: driver.finals[name].num_cached_tokens for name in driver.finals}
    assert hits["m1"] == hits["m2"] == hits["l1"] == 0 and hits["l2"] > 40
    assert np.allclose(vector_of(driver, "l1"), vector_of(driver, "l2"), atol=1e-5)


def test_the_longest_text_is_as_long_as_the_context() -> None:
    driver = make_driver("torch", "llama-gqa2")
    driver.add(embed("whole", [5] * 120, Pooling.MEAN))
    driver.run()
    assert vector_of(driver, "whole").shape == (64,)


def test_a_vector_that_is_not_finite_ends_its_request_alone() -> None:
    driver = make_driver("torch", "llama-gqa2")
    decoder = driver.runner.device.decoder  # type: ignore[attr-defined]
    embed_tokens = decoder.embed

    def poisoned(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return embed_tokens(token_ids, positions).masked_fill((token_ids == 96)[:, None], math.nan)  # type: ignore[no-any-return]

    decoder.embed = poisoned
    driver.add(embed("ill", [4, 96, 5], Pooling.LAST), embed("well", [4, 5, 6], Pooling.MEAN))
    driver.add(make_request("chat", [7, 8, 9], 5))
    driver.run()
    assert driver.finals["ill"].finish_reason is FinishReason.ERROR
    assert np.abs(vector_of(driver, "well") - reference("llama-gqa2", (4, 5, 6), Pooling.MEAN)).max() < 1e-4
    assert len(driver.outputs["chat"]) == 5


# Settings of a checkpoint


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def test_a_checkpoint_says_how(tmp_path: Path) -> None:
    plain = read_embedding_spec(tmp_path, 8)
    assert plain[:3] == (Pooling.LAST, 8, True) and "no 1_Pooling" in str(plain) and "last token" in str(plain)
    pooling = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    write(tmp_path, "1_Pooling/config.json", pooling)
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling")]
    write(tmp_path, "modules.json", modules)
    assert read_embedding_spec(tmp_path, 8)[:3] == (Pooling.MEAN, 8, False)
    write(tmp_path, "modules.json", [*modules, {"type": "sentence_transformers.models.Normalize"}])
    assert read_embedding_spec(tmp_path, 8)[:3] == (Pooling.MEAN, 8, True)
    write(tmp_path, "modules.json", [*modules, {"type": "sentence_transformers.models.Dense"}])
    assert read_embedding_spec(tmp_path, 8).pooling is None
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    spec = read_embedding_spec(tmp_path, 8)
    assert spec.pooling is None and "pooling_mode_cls_token" in spec.origin


# Through HTTP


TEXTS = ["the river rises", "a boat", "the river rises and the mill turns, again and again, until the evening comes"]


async def test_the_official_client_gets_what_transformers_compute(tmp_path: Path) -> None:
    from transformers import AutoModel

    """Texts, lists of texts and of ids; both encodings, fewer dimensions; usage; and the same as lines of a batch."""
    engine, tokenizer = demo_engine(num_gpu_blocks_override=200, max_num_seqs=8, max_num_batched_tokens=64)
    ids = [tokenizer.encode(text) for text in TEXTS]
    model = await asyncio.to_thread(
        AutoModel.from_pretrained, Path(demo.__file__).parent / "weights", dtype=torch.float32
    )
    with torch.inference_mode():
        hidden = [model(torch.tensor([each])).last_hidden_state[0, -1].numpy() for each in ids]
    expected = [vector / np.linalg.norm(vector) for vector in hidden]
    folder = await open_folder(tmp_path / "state")
    names = (MODEL,)
    async with serve(engine, tokenizer, folder=folder, served_model_name=names) as served, client_of(served) as client:
        ask = client.embeddings.create
        for given in (TEXTS, ids):
            answer = await ask(model=MODEL, input=given)  # base64: the client's default
            assert [each.index for each in answer.data] == [0, 1, 2]
            for each, vector in zip(answer.data, expected, strict=True):
                assert np.abs(np.array(each.embedding) - vector).max() < 1e-4
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        for one in (TEXTS[0], ids[0]):
            answer = await ask(model=MODEL, input=one, encoding_format="float", extra_body={"service_tier": "flex"})
            assert len(answer.data) == 1 and np.abs(np.array(answer.data[0].embedding) - expected[0]).max() < 1e-4
        short = np.array((await ask(model=MODEL, input=TEXTS[0], dimensions=16)).data[0].embedding)
        cut = expected[0][:16] / np.linalg.norm(expected[0][:16])
        assert short.shape == (16,) and np.abs(short - cut).max() < 1e-4
        many = await ask(model=MODEL, input=[[5, 6, number % 50 + 3] for number in range(300)])
        assert len(many.data) == 300
        bodies: list[dict[str, Any]] = [
            {"model": MODEL, "input": text, "encoding_format": "float", "dimensions": size}
            for text, size in zip(TEXTS, (None, None, 10_000), strict=True)
        ]
        lines = [{**line(number, "/v1/embeddings"), "body": body} for number, body in enumerate(bodies)]
        batch = await until(client, (await submit(client, jsonl(lines), "/v1/embeddings")).id, "completed")
        done, failed = await results_of(client, batch)
        for number in (0, 1):
            vector = done[f"id-{number}"]["response"]["body"]["data"][0]["embedding"]
            assert np.abs(np.array(vector) - expected[number]).max() < 1e-4
        assert failed["id-2"]["response"]["body"]["error"]["param"] == "dimensions"
        assert batch.usage.input_tokens == len(ids[0]) + len(ids[1]) and batch.usage.output_tokens == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": [10**6]}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": [5] * 5000}, "input"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": 9}, "dimensions"),
    ({"encoding_format": "hex"}, "encoding_format"),
    ({"extra_body": {"temperature": 1}}, "temperature"),
    ({"model": "other"}, "model"),
]


async def test_what_is_refused_names_its_parameter(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folders.byte_level(tmp_path), probe=False)
    spec = EmbeddingSpec(Pooling.LAST, 8, True, "")
    for embedding, cases in ((spec, REFUSED), (spec._replace(pooling=None), [({}, "model")]), (None, [({}, "model")])):
        engine = FakeEngine(say(tokenizer, "x"), embedding=embedding)
        async with serve(engine, tokenizer) as served, client_of(served) as client:
            for fields, param in cases:
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.embeddings.create(**{"model": MODEL, "input": "a", **fields})
                assert caught.value.status_code in (400, 404), fields
                assert caught.value.body["param"] == param, (fields, caught.value)  # type: ignore[index]
            assert not engine.requests
