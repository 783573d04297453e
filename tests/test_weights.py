"""Loading: shards, types, dummy weights, where the files are, and one clear line for every broken checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny_models
import torch
from dense_model import attend_with
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ModelLoadError
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.hub import resolve_model_folder, with_tokenizer_end
from engine.models.spec import load_spec, spec_from_config
from engine.models.weights import ModelWeights

CPU = torch.device("cpu")


def first_layer_logits(folder: Path, dtype: str = "auto") -> Tensor:
    """A few logits through the whole model; attention answers with zeros, which is enough to compare loaders."""
    spec = load_spec(folder)
    decoder = Decoder(spec, load_weights(spec, folder, dtype=dtype))
    return _logits(decoder)


def _logits(decoder: Decoder) -> Tensor:
    spec, positions = decoder.spec, torch.arange(5)
    group = spec.num_heads // spec.num_kv_heads

    def attend_to_itself(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.repeat_interleave(group, 1).flatten(1) + q.flatten(1)

    with torch.inference_mode():
        hidden = decoder.embed(torch.arange(5), positions)
        return decoder.logits(decoder.run(hidden, attend_with(attend_to_itself, decoder, positions)))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny Llama that a test may break."""
    return Path(shutil.copytree(tiny_models.model_folder("llama-gqa2"), tmp_path / "model"))


def refusal(folder: Path, **options: str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_weights(load_spec(folder), folder, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


# Good checkpoints -----------------------------------------------------------------------------------------------------


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_models.model_folder("llama-gqa2", shard_size="40KB"), tmp_path / "model"))
    save_file({"surplus": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert torch.equal(first_layer_logits(folder), first_layer_logits(tiny_models.model_folder("llama-gqa2")))


def test_one_file_of_any_name_is_a_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    assert torch.equal(first_layer_logits(checkpoint), first_layer_logits(tiny_models.model_folder("llama-gqa2")))


def strip_model(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def rename_head(tensors: dict[str, Tensor]) -> None:
    (head,) = [name for name in tensors if name in ("lm_head.weight", "embed_out.weight")]
    other = {"lm_head.weight": "embed_out.weight", "embed_out.weight": "lm_head.weight"}[head]
    tensors[other] = tensors.pop(head)


BUFFERS = {
    "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
    "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2),
}
SAME: dict[str, tuple[str, Callable[[dict[str, Tensor]], None]]] = {
    "without the outer `model.`": ("opt", strip_model),
    "another name of the head": ("neox", rename_head),
    "buffers of old exporters": ("neox", lambda tensors: tensors.update(BUFFERS)),
}


@pytest.mark.parametrize(("name", "change"), SAME.values(), ids=SAME)
def test_forms_of_a_checkpoint_give_the_same_model(
    name: str, change: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_models.model_folder(name), tmp_path / "model"))
    expected = first_layer_logits(folder)
    tiny_models.rewrite(folder, change)
    assert torch.equal(first_layer_logits(folder), expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_types_are_converted(stored: torch.dtype, wanted: str) -> None:
    folder = tiny_models.model_folder("llama-gqa2", dtype=stored)
    spec = load_spec(folder)
    assert spec.dtype == str(stored).removeprefix("torch.")
    weights = load_weights(spec, folder, dtype=wanted)
    expected = tiny_models.reference_model("llama-gqa2").model.embed_tokens.weight.to(stored)
    assert torch.equal(weights.embedding, expected.to(getattr(torch, wanted)))
    assert weights.layers[0].qkv(torch.zeros(2, 64, dtype=weights.embedding.dtype)).dtype == weights.embedding.dtype
    assert load_weights(spec, folder).embedding.dtype == stored


# Dummy weights --------------------------------------------------------------------------------------------------------


def dummy(name: str, dtype: str = "float32") -> ModelWeights:
    spec = load_spec(tiny_models.model_folder(name))
    return load_weights(spec, Path("/nowhere"), dtype=dtype, load_format="dummy")


@pytest.mark.parametrize("name", tiny_models.FAMILY_CASES)
def test_dummy_weights_run_and_stay_in_range(name: str) -> None:
    logits = _logits(Decoder(load_spec(tiny_models.model_folder(name)), dummy(name, dtype="bfloat16"))).float()
    assert logits.isfinite().all()
    assert 0.05 < logits.std() < 20


def test_dummy_weights_are_the_same_each_time() -> None:
    assert torch.equal(dummy("neox").layers[2].qkv(torch.ones(1, 64)), dummy("neox").layers[2].qkv(torch.ones(1, 64)))


# Broken checkpoints ---------------------------------------------------------------------------------------------------


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load_spec(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"], ids=["cut", "list", "bytes"])
def test_unreadable_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match=r"config\.json") as caught:
        load_spec(tmp_path)
    assert "\n" not in caught.value.message


def adding(tensors: dict[str, Tensor]) -> Callable[[Path], None]:
    """Add tensors to the file, or replace them."""
    return lambda folder: tiny_models.rewrite(folder, lambda stored: stored.update(tensors))


def cut_file(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def store_twice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "b.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors left over": (
        adding({f"model.layers.{i}.odd": torch.zeros(1) for i in range(5)}),
        "model.layers.1.odd (model.safetensors), model.layers.2.odd (model.safetensors) and 2 more",
    ),
    "a bias that the config does not announce": (
        adding({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        "does not use: model.layers.0.self_attn.q_proj.bias",
    ),
    "quantized": (adding({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "model.norm.weight is of type int8"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors file"),
    "cut off": (cut_file, "model.safetensors is incomplete: 0."),
    "GGUF": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"),
        "GGUF files are not supported; use the model's safetensors repository",
    ),
    "stored twice": (store_twice, "tensor model.norm.weight is in a.safetensors and in b.safetensors"),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_one_clear_line(
    damage: Callable[[Path], object], message: str, checkpoint: Path
) -> None:
    damage(checkpoint)
    assert message in refusal(checkpoint)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}'])
def test_unreadable_index(checkpoint: Path, text: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(text)
    assert "is not a readable safetensors index" in refusal(checkpoint)


def test_unknown_type(checkpoint: Path) -> None:
    assert "dtype 'int4' is not supported" in refusal(checkpoint, dtype="int4")


def test_the_folder_is_named(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "architectures": ["FooModel"], "model_type": "foo"}))
    with pytest.raises(ModelLoadError, match="FooModel") as caught:
        load_spec(checkpoint)
    assert str(checkpoint) in caught.value.message


# Where a model is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/no/such", "./here", "no-such", "a/b/c", "owner/", "~/models/none"])
def test_what_cannot_be_a_hub_id_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match="neither a folder"):
        resolve_model_folder(name)


def test_a_hub_id_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def fake(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert resolve_model_folder("owner/model") == tmp_path
    assert asked["name"] == "owner/model"
    assert not any("bin" in pattern or "py" in pattern for pattern in asked["allow_patterns"])


@pytest.mark.parametrize("place", ["added_tokens_decoder", "added_tokens", "vocab", "special_tokens_map"])
def test_answers_end_at_the_tokenizers_end_token_too(tmp_path: Path, place: str) -> None:
    written: dict[str, Any] = {"eos_token": {"content": "<end>"}}
    tokenizer: dict[str, Any] = {"model": {"vocab": {"<end>": 7} if place in ("vocab", "special_tokens_map") else {}}}
    if place == "added_tokens_decoder":
        written["added_tokens_decoder"] = {"7": {"content": "<end>"}}
    if place == "added_tokens":
        tokenizer["added_tokens"] = [{"content": "<end>", "id": 7}]
    if place == "special_tokens_map":
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(written))
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    spec = with_tokenizer_end(spec_from_config(tiny_models.llama_config()), tmp_path)
    assert spec.eos_token_ids == {2, 7} and "<end> (7)" in spec.notes[-1]
    assert with_tokenizer_end(spec, tmp_path) == spec


def test_a_broken_or_foreign_end_token_adds_nothing(tmp_path: Path) -> None:
    spec = spec_from_config(tiny_models.llama_config())
    for config in ("{", "[]", '{"eos_token": null}', '{"eos_token": "<end>"}'):
        (tmp_path / "tokenizer_config.json").write_text(config)
        assert with_tokenizer_end(spec, tmp_path) is spec
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<end>": spec.vocab_size}}}))
    assert with_tokenizer_end(spec, tmp_path) is spec
