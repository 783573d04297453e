"""Checkpoints as they are found: served with the tokens of transformers' own loading, or refused by tensor and file."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
import tokenizer_folders
import torch
from driver import Driver, make_request
from safetensors.torch import load_file
from support.tables import mostly_slow
from torch import Tensor

from engine.build import build_runner, plan_launch
from engine.build.plan import scheduler_config
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.cpu.backend import CpuBackend
from engine.models.weights import _Builder

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = 10
WHOLE = "model.safetensors"
Change = Callable[[Path], object]


def engine_of(folder: Path, **changes: Any) -> EngineConfig:
    options = {"dtype": "float32", "num_gpu_blocks_override": 64, "profile_seconds": 0.0, "threads": 1, **changes}
    return EngineConfig(model=str(folder), device="cpu", **options)


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def served(folder: Path, *lengths: int, **changes: Any) -> tuple[list[list[int]], Any]:
    """Return the tokens behind prompts of the given lengths, and the plan. Raise ConfigError, as the start does."""
    config = engine_of(folder, **changes)
    runner, plan = build_runner(config, plan_launch(config))
    limits, config = plan.limits, replace(config, max_num_seqs=4, max_num_batched_tokens=64)
    driver = Driver(runner, scheduler_config(config, plan))
    for length in lengths:
        driver.add(make_request(str(length), prompt_of(length), min(TOKENS, limits.max_model_len - length)))
    driver.run()
    return [driver.outputs[str(length)] for length in lengths], plan


def generated(folder: Path, *lengths: int, most: int = 10**6) -> list[list[int]]:
    """Return the most likely tokens of transformers, which computes every sequence from its beginning."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for length in lengths:
        ids = prompt_of(length)
        with torch.inference_mode():
            while len(ids) < min(length + TOKENS, most):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[length:])
    return answers


def config(**changes: Any) -> Change:
    """Change config.json; a value of None removes the key."""

    def change(folder: Path) -> None:
        values = {**json.loads((folder / "config.json").read_text()), **changes}
        values = {key: value for key, value in values.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(values))

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Change:
    return lambda folder: tiny_models.rewrite(folder, change)


def renamed(change: Callable[[str], str]) -> Change:
    return tensors(lambda stored: [stored.update({change(name): stored.pop(name)}) for name in list(stored)])


def written(name: str, value: Any) -> Change:
    return lambda folder: (folder / name).write_text(json.dumps(value))


def mix_types(stored: dict[str, Tensor]) -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    stored.update({name: each.to(kinds[index % 3]) for index, (name, each) in enumerate(sorted(stored.items()))})


def pickle(folder: Path) -> None:
    torch.save(load_file(folder / WHOLE), folder / "pytorch_model.bin")
    (folder / WHOLE).unlink()


def ends_in_tokenizer(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    tokenizer_folders.byte_level(folder, eos_token="e")


EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
LOST_SHARD = {"weight_map": {HEAD: "model-00001-of-00002.safetensors"}}


class Odd(NamedTuple):
    """A change of a tiny checkpoint. `refused`: words of the refusal; without any, the tokens are transformers'.

    `note`: words of the notes of the start. `ends`: end tokens.
    """

    change: Change
    refused: tuple[str, ...] = ()
    note: str = ""
    model: str = "llama-gqa2"
    shard_size: str = "1GB"
    ends: frozenset[int] = frozenset({2})


ODD: dict[str, Odd] = {
    "tied": Odd(lambda _: None, model="llama-mha-tied"),
    "untied": Odd(lambda _: None),
    "untied without a head": Odd(tensors(lambda stored: stored.pop(HEAD)), (f"lacks tensor {HEAD}", WHOLE)),
    "tied with the same head": Odd(
        tensors(lambda stored: stored.update({HEAD: stored[EMBEDDING].clone()})), model="llama-mha-tied"
    ),
    "tied with a head of its own": Odd(config(tie_word_embeddings=True), note="its own output head, which is used"),
    "tied with the head only": Odd(
        tensors(lambda stored: stored.update({HEAD: stored.pop(EMBEDDING)})), model="llama-mha-tied"
    ),
    "shards": Odd(lambda _: None, shard_size="40KB"),
    "a whole file beside a stale index": Odd(written(f"{WHOLE}.index.json", LOST_SHARD)),
    "a lost shard": Odd(
        lambda folder: sorted(folder.glob("model-*.safetensors"))[1].unlink(),
        ("lacks model-00002-of-", "which model.safetensors.index.json names"),
        shard_size="40KB",
    ),
    "pickles only": Odd(pickle, ("pickled weights only (pytorch_model.bin)", "convert them to safetensors")),
    "without `model.`": Odd(renamed(lambda name: name.removeprefix("model."))),
    "three types": Odd(tensors(mix_types)),
    "a missing tensor": Odd(tensors(lambda stored: stored.pop(UP)), (f"lacks tensor {UP}", WHOLE)),
    "an extra tensor": Odd(
        tensors(lambda stored: stored.update({"model.layers.1.mlp.gate.scale": torch.ones(3)})),
        ("does not use: model.layers.1.mlp.gate.scale (model.safetensors)",),
    ),
    "buffers of old exporters": Odd(
        tensors(lambda stored: stored.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    ),
    "a wrong shape": Odd(
        tensors(lambda stored: stored.update({UP: torch.zeros(87, 64)})),
        (f"tensor {UP} ({WHOLE}) is [87, 64], config.json implies [88, 64]",),
    ),
    "a head of another vocabulary": Odd(
        tensors(lambda stored: stored.update({HEAD: torch.zeros(90, 64)})),
        (f"tensor {HEAD} ({WHOLE}) is [90, 64], config.json implies [97, 64]",),
    ),
    "NaN": Odd(
        tensors(lambda stored: stored[UP][3, 5].fill_(torch.nan)),
        (f"{UP} ({WHOLE}) has NaN or infinity", "it is damaged"),
    ),
    "several end tokens": Odd(written("generation_config.json", {"eos_token_id": [5, 9]}), ends=frozenset({2, 5, 9})),
    "an end token in the tokenizer only": Odd(
        ends_in_tokenizer,
        note="answers also end at e (",
        ends=frozenset({68}),
    ),
}


def changed(folder: Path, odd: Odd) -> Path:
    shutil.copytree(tiny_models.model_folder(odd.model, shard_size=odd.shard_size), folder)
    odd.change(folder)
    return folder


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("name", ODD)
def test_tokens_are_those_of_transformers_or_the_refusal_names_the_tensor(name: str, impl: str, tmp_path: Path) -> None:
    odd = ODD[name]
    folder = changed(tmp_path / "model", odd)
    if odd.refused:
        with pytest.raises(ConfigError) as caught:
            served(folder, 20, model_impl=impl)
        assert "\n" not in caught.value.message
        assert all(words in caught.value.message for words in odd.refused)
        return
    tokens, plan = served(folder, 20, model_impl=impl)
    assert tokens == generated(folder, 20)
    assert impl == "transformers" or any(odd.note in note for note in (*plan.notes, ""))
    assert plan.spec.eos_token_ids == odd.ends


# Rotary embeddings ----------------------------------------------------------------------------------------------------

FACTORS = {"short_factor": [1.0 + i / 20 for i in range(8)], "long_factor": [1.0 + i / 2 for i in range(8)]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
OUTSIDE = {"original_max_position_embeddings": 64}
GIVEN = {"rope_type": "default", "rope_theta": 5e4}


class Rope(NamedTuple):
    """Changes of config.json (64 positions), and the context that is served by our layers and transformers' modules."""

    changes: dict[str, Any]
    contexts: tuple[int, int] = (256, 256)
    reason: str = "positions"
    note: str = ""
    lengths: tuple[int, ...] = (24, 150)


ROPES: dict[str, Rope] = {
    "yarn as cards write it": Rope({"rope_scaling": {"type": "yarn", **YARN}}, note="yarn scaling .* by 4: 256 posit"),
    "yarn by its newer name": Rope({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e3, **YARN}}),
    "yarn with the original context outside": Rope({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, **OUTSIDE}),
    "yarn without the original context": Rope({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "yarn by the ratio": Rope(
        {"rope_scaling": {"rope_type": "yarn", **YARN, "factor": None}, "max_position_embeddings": 256}
    ),
    "yarn, extended already": Rope({"rope_scaling": {"type": "yarn", **YARN}, "max_position_embeddings": 256}),
    "yarn with every field": Rope(
        {
            "rope_scaling": {
                "rope_type": "yarn",
                **YARN,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.7,
                "mscale_all_dim": 0,
                "attention_factor": 1.3,
                "truncate": False,
            }
        }
    ),
    "linear": Rope({"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "linear from the original context": Rope({"rope_scaling": {"rope_type": "linear", **YARN}}),
    "linear of 2.5": Rope({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}, (160, 160)),
    "dynamic": Rope(
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        (64, 64),
        "dynamic rotary embedding, whose angles change after 64 tokens",
        lengths=(24, 54),
    ),
    "longrope": Rope(
        {"rope_scaling": {"type": "longrope", **FACTORS}, **OUTSIDE, "max_position_embeddings": 256},
        note="longrope: the short factors apply while prompt and max_tokens fit into 64 tokens",
        lengths=(24, 54, 70, 150),
    ),
    "longrope by a factor": Rope(
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS, **YARN}},
        lengths=(24, 54, 70, 150),
    ),
    "llama3": Rope(
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "max_position_embeddings": 256,
        }
    ),
    "none": Rope({"rope_scaling": {"type": "default"}}, (64, 64), lengths=(24, 54)),
    "both spellings": Rope(
        {"rope_scaling": {"type": "yarn", **YARN}, "rope_parameters": GIVEN, "rope_theta": None},
        note="rope_theta 50000.0 is not used",
    ),
}


def rope_folder(folder: Path, rope: Rope) -> Path:
    base = {"max_position_embeddings": 64, "rope_parameters": None, "rope_theta": 1e4}
    return changed(folder, Odd(config(**{**base, **rope.changes})))


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("name", mostly_slow(ROPES, [*ROPES][::4]))
def test_scaled_contexts_are_served_as_transformers_computes_them(name: str, impl: str, tmp_path: Path) -> None:
    rope = ROPES[name]
    folder, context = rope_folder(tmp_path / "model", rope), rope.contexts[impl == "transformers"]
    lengths = sorted({min(length, context - TOKENS) for length in rope.lengths})
    tokens, plan = served(folder, *lengths, model_impl=impl, max_model_len=context)
    assert plan_launch(engine_of(folder, model_impl=impl)).limits.max_model_len == context
    with pytest.raises(ConfigError, match=f"--max-model-len {context + 1} exceeds the model's .*({rope.reason})"):
        plan_launch(engine_of(folder, model_impl=impl, max_model_len=context + 1))
    assert tokens == generated(folder, *lengths)
    assert impl == "transformers" or any(re.search(rope.note, each) for each in (*plan.notes, ""))


def test_longrope_within_the_original_context_uses_the_short_factors(tmp_path: Path) -> None:
    folder = rope_folder(tmp_path / "model", ROPES["longrope"])
    tokens, plan = served(folder, 24, 54, max_model_len=64)
    assert tokens == generated(folder, 24, 54)
    assert not any("longrope" in note for note in plan.notes)


# Quantisation ---------------------------------------------------------------------------------------------------------


def test_a_head_of_its_own_is_used_under_int8(tmp_path: Path) -> None:
    untied, tied = (changed(tmp_path / name, ODD[name]) for name in ("untied", "tied with a head of its own"))
    assert served(tied, 20, 50, quantization="int8")[0] == served(untied, 20, 50, quantization="int8")[0]


def _wrong_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Builder, "_head", lambda self, embedding: self._make(embedding))


def _wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = CpuBackend.prepare

    def prepared(self: Any, *arguments: Any) -> Any:
        plan, make = prepare(self, *arguments)
        return plan, lambda weight, *more, **options: make(weight * 1.2, *more, **options)

    monkeypatch.setattr(CpuBackend, "prepare", prepared)


def test_values_that_overflow_the_type_are_named(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", Odd(tensors(lambda stored: stored[UP].mul_(3e4))))
    with pytest.raises(ConfigError, match="logits are NaN or infinite in float16; set --dtype"):
        served(folder, 5, dtype="float16")


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("mutate", [_wrong_head, _wrong_products])
def test_the_self_test_refuses_wrong_weights_and_products(
    mutate: Callable[[pytest.MonkeyPatch], None], quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.model_folder("llama-gqa2")
    served(folder, 5, quantization=quantization)
    mutate(monkeypatch)
    with pytest.raises(ConfigError, match="self-test: logits differ from those of transformers"):
        served(folder, 5, quantization=quantization)
