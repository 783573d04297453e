"""The engine as the server builds it, with the packaged demo model in float32, by feature: the answers on the device
equal those of the plain engine on the CPU, token for token. And what drafts gain."""

import asyncio
import importlib
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.gpu.setup import Setup
from benchmarks.gpu.table import Row
from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.forms import Pooling
from engine.models.spec import ModelSpec

_RANK = 4
_SHORT_OF_MEMORY = 40  # blocks, for two dozen requests of up to 13: some are preempted
_ANSWER = ("lora", "kv_cache_dtype")
"""What changes the answer itself: the CPU's engine has it too."""
Answer = list[int] | list[float]
"""Tokens, or an embedding."""
_PLAIN = EngineConfig(device="cpu", dtype="float32", profile_seconds=0.0, self_test=False, max_model_len=512)


@dataclass(frozen=True, slots=True)
class Feature:
    """`changes` of the configuration; `preempts`: the pool must have been too small for all requests. `exact`: the
    same tokens are due (of draws the note tells: one may fall beside the border of two tokens by a rounding), else the
    row only says how many answers differ."""

    name: str
    changes: Mapping[str, Any]
    preempts: bool = False
    exact: bool = True


def _build() -> Any:
    """engine.build, which reads orjson and llguidance: the other sections need neither."""
    return importlib.import_module("engine.build")


def _features(adapter: Path) -> list[Feature]:
    short: dict[str, Any] = {"num_gpu_blocks_override": _SHORT_OF_MEMORY}
    return [
        Feature("our own layers, eager and graphs", {}),
        Feature("memory short, recompute", short, True),
        Feature("memory short, swap", short | {"swap_space": 0.25}, True),
        Feature("memory short, hidden cache", short | {"overload": "hidden", "online_policy": "apt"}, True),
        Feature("weights that stream", {"offload_weights": "0.012"}),
        Feature("transformers' modules", {"model_impl": "transformers"}),
        Feature("a LoRA adapter beside none", {"lora": (f"a={adapter}",)}),
        Feature("drafts", {"speculation": "on"}),
        Feature("cache of 8 bits", {"kv_cache_dtype": "int8"}),
        Feature("cache of 8 bits, memory short, swap", short | {"kv_cache_dtype": "int8", "swap_space": 0.25}, True),
        Feature("bfloat16", {"dtype": "bfloat16"}, exact=False),
        Feature("float16", {"dtype": "float16"}, exact=False),
    ]


def check_features(setup: Setup) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        adapter = _make_adapter(Path(folder) / "adapter", _build().plan_launch(_PLAIN).own)
        known: dict[EngineConfig, dict[str, Answer]] = {}
        for feature in _features(adapter)[: setup.size(100, 1)]:
            plain = replace(_PLAIN, **{name: feature.changes[name] for name in _ANSWER if name in feature.changes})
            if plain not in known:
                known[plain] = asyncio.run(_answers(plain, setup)).answers
            yield _row(setup, feature, known[plain])


def _equal(one: Answer, other: Answer) -> bool:
    """Return whether tokens are the same, or embeddings up to rounding."""
    return len(one) == len(other) and np.allclose(one, other, rtol=0.0, atol=1e-3)


def _row(setup: Setup, feature: Feature, expected: dict[str, Answer]) -> Row:
    name = f"answers that differ from the CPU's: {feature.name}"
    config = replace(_PLAIN, device=setup.device.type, **feature.changes)
    setup.release()
    try:
        got = asyncio.run(_answers(config, setup))
    except Exception as error:  # a feature that cannot run is a row of the table, and the others still run
        return Row(name, "", None, note=f"{type(error).__name__}: {error}"[:300])
    different = [key for key, answer in expected.items() if not _equal(answer, got.answers[key])]
    wrong = [key for key in different if not key.startswith("drawn")] if feature.exact else different
    moved = "".join(f", {count} units {name}" for name, count in sorted(got.moved.items()))
    note = f"of {len(expected)}; {got.preemptions} preemptions{moved}{': ' if different else ''}{', '.join(different)}"
    if feature.preempts and not got.preemptions:
        return Row(name, "", None, note="no request was preempted: the check checks nothing")
    return Row(name, "", len(wrong), 0 if feature.exact else None, None, "", True, note)


@dataclass(frozen=True, slots=True)
class _Answers:
    answers: dict[str, Answer]
    preemptions: int
    moved: Mapping[str, int]
    seconds: float
    accepted: int


async def _answers(config: EngineConfig, setup: Setup, requests: list[EngineRequest] | None = None) -> _Answers:
    engine: Engine = _build().build_engine(config)
    await engine.start()
    try:
        requests = requests or _requests(setup, engine.info.vocab_size, bool(config.lora))
        began = time.perf_counter()
        answers = await asyncio.gather(*map(_collect, await engine.submit(requests)))
        seconds, stats = time.perf_counter() - began, engine.stats()
        found = dict(zip((request.request_id for request in requests), answers, strict=True))
        return _Answers(found, sum(stats.preemptions.values()), stats.cache_units, seconds, stats.accepted_tokens)
    finally:
        await engine.stop()


async def _collect(stream: object) -> Answer:
    tokens: list[int] = []
    async for output in stream:  # type: ignore[attr-defined]
        if output.error is not None:
            raise output.error.to_error()
        tokens += output.token_ids
        if output.embedding is not None:
            return list(map(float, np.frombuffer(output.embedding, np.float32)))
    return tokens


def _requests(setup: Setup, vocab: int, adapters: bool) -> list[EngineRequest]:
    """Two dozen of both classes: greedy, drawn, with penalties, and with log probabilities; and two embeddings."""
    rng = random.Random(5)
    kinds = {
        "greedy": SamplingParams(setup.size(48, 5), temperature=0.0),
        "drawn": SamplingParams(setup.size(48, 5), temperature=0.8, top_p=0.9, top_k=50, seed=11),
        "penalties": SamplingParams(
            setup.size(48, 5), temperature=0.0, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2,
            logit_bias=((17, 2.0),), min_tokens=3,
        ),
        "logprobs": SamplingParams(setup.size(48, 5), temperature=0.0, logprobs=3),
    }  # fmt: skip
    shared = [rng.randrange(3, vocab) for _ in range(40)]
    requests = []
    for index in range(setup.size(24, 8)):
        kind = list(kinds)[index % len(kinds)]
        own = [rng.randrange(3, vocab) for _ in range(rng.randint(1, setup.size(150, 20)))]
        prompt = tuple(shared + own if index % 3 else own)
        which = RequestClass.OFFLINE if index % 2 else RequestClass.ONLINE
        number = index % 2 if adapters else 0
        requests.append(EngineRequest(f"{kind} {index}", prompt, kinds[kind], which, adapter=number))
    return requests + [
        EngineRequest(f"embedding {each.value}", tuple(shared), kinds["greedy"], pooling=each)
        for each in (Pooling.LAST, Pooling.MEAN)
    ]


def check_drafts(setup: Setup) -> Iterator[Row]:
    """Greedy answers of the 8B shape with random weights, without and with drafts. Such answers soon repeat a few
    tokens, so that nearly all drafts are right: a bound for other answers, and the cost of steps that verify."""
    rates: dict[str, float] = {}
    for count, arm in ((count, arm) for count in (1, 8) for arm in ("off", "on")):
        sampling = SamplingParams(setup.size(384, 12), temperature=0.0)
        prompts = [tuple(7 + (index * place) % 90 for place in range(64)) for index in range(count)]
        requests = [EngineRequest(f"r{index}", prompt, sampling) for index, prompt in enumerate(prompts)]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(setup.config("8B")))
            config = EngineConfig(
                model=folder, device=setup.device.type, load_format="dummy", max_model_len=512, max_num_seqs=16,
                profile_seconds=setup.size(3, 0), profile_dir=folder, self_test=False, speculation=arm,
            )  # fmt: skip
            setup.release()
            got = asyncio.run(_answers(config, setup, requests))
        rates[arm] = sum(map(len, got.answers.values())) / got.seconds
        if arm == "on":
            note = f"{rates['on']:.0f} instead of {rates['off']:.0f} tok/s; {got.accepted} tokens by drafts"
            yield Row(f"drafts, 8B, {count} streams that repeat", "x", rates["on"] / rates["off"], note=note)


def _make_adapter(folder: Path, spec: ModelSpec) -> Path:
    """A random adapter of every layer's queries and of its way back, as peft stores it."""
    generator, tensors = torch.Generator().manual_seed(3), dict[str, torch.Tensor]()
    for layer in range(spec.num_layers):
        for module, wide, narrow in (("q", spec.q_size, spec.hidden_size), ("o", spec.hidden_size, spec.q_size)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}_proj.lora_"
            tensors[f"{stem}A.weight"] = torch.randn(_RANK, narrow, generator=generator) * narrow**-0.5
            tensors[f"{stem}B.weight"] = torch.randn(wide, _RANK, generator=generator) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 8.0, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
