"""Layers and experts on stored bits by the library humming-kernels, which a stand-in for the CPU replaces."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fake_humming
import packed_checkpoints
import pytest
import test_dry_device
import tiny_models
import tiny_transformers
import torch
from dry_device import dry_device
from packed_checkpoints import FORMATS, NIBBLES, SMALL_FLOATS
from safetensors.torch import load_file, save_file
from test_compact import OF_8B, OF_30B_MOE, OF_32B, loaded, logits, plan_on_gpu
from test_cuda_backend import on_a_gpu  # noqa: F401 - a fixture
from test_cuda_runner import MetaTensors
from torch import Tensor

from engine.build.runner import prepare
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.memory import stored_shapes
from engine.models import humming
from engine.models.checkpoint import load_weights
from engine.models.compact import CompactLinear, make_compact
from engine.models.humming import ExpertsLinear, LibraryWeight, make_experts, make_kept
from engine.models.packing import packing_from_config
from engine.models.quantized import FloatWeight
from engine.models.spec import load_spec
from engine.models.weights import ModelWeights, build_weights, matrices

CPU = torch.device("cpu")
CONFIGS = {
    "nibbles": NIBBLES["awq of 32"].config,
    "blocks": {**FORMATS["fp8 in blocks"].config, "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": SMALL_FLOATS["nvfp4 of 16"].config,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "rms_norm_eps": 1e-5, "attention_bias": True,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"},
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[fake_humming.HummingLayer]]:
    yield fake_humming.install(monkeypatch)


def make(weight: Any, bias: Tensor | None = None, **options: Any) -> Any:
    return make_compact(weight, bias, library=make_kept, **options)


@pytest.mark.parametrize("name", [*NIBBLES, *SMALL_FLOATS, "fp8 in blocks"])
def test_layers_equal_unpacked_ones(name: str, tmp_path: Path) -> None:
    packed_checkpoints.write(tmp_path, name, "llama-wide")
    found, plain = loaded(tmp_path, make)
    for mine, theirs in zip(matrices(found.layers[0]), matrices(plain.layers[0]), strict=True):
        assert isinstance(mine, CompactLinear) and isinstance(mine._weight, LibraryWeight)
        torch.testing.assert_close(mine.dense_from(3)[0], theirs.dense_from(3)[0], rtol=0.01, atol=1e-6)
        moved = mine.on(mine.data().clone())
        assert torch.equal(moved.dense_from(0)[0], mine.dense_from(0)[0])
        before = mine.dense_from(0)[0]
        mine.data().zero_()
        assert torch.equal(moved.dense_from(0)[0], before), "it reads what it was moved to"
        assert not torch.equal(mine.dense_from(0)[0], before)
    found, _ = loaded(tmp_path, make)
    for tokens in (5, 33):
        expected = logits(tmp_path, plain, tokens)
        error = (logits(tmp_path, found, tokens) - expected).square().mean().sqrt()
        assert float(error / expected.std()) < 0.03


@pytest.mark.parametrize("experts", [1, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_trial_tells_right_products_from_wrong_ones(
    name: str, experts: int, library: type[fake_humming.HummingLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only products of many rows are wrong. A fault lasts as long as the process."""
    packing = packing_from_config({"quantization_config": CONFIGS[name]})
    assert packing is not None and humming.multiplies(packing)
    shapes = [(384, 256, experts)]
    assert humming.trial(packing, shapes, CPU) == "" and humming.is_usable()
    library.fault = "wrong"
    assert humming.trial(packing, shapes, CPU).startswith("differs from unpacked weights by 0.1")
    assert not humming.is_usable()
    monkeypatch.setattr(humming, "_faults", [])
    library.fault = "raises"
    assert humming.trial(packing, shapes, CPU) == "raised RuntimeError: no kernel image is available"
    monkeypatch.setattr(humming, "_faults", [])
    monkeypatch.setitem(sys.modules, "humming", None)
    assert not humming.is_usable()


def write_experts(folder: Path, name: str) -> None:
    """A tiny Qwen3-MoE whose linear layers, except for routers, are stored by FORMATS or NIBBLES."""
    tiny_transformers.save("qwen3_moe", folder)
    chosen, generator = (FORMATS | NIBBLES | SMALL_FLOATS)[name], torch.Generator().manual_seed(11)
    stored: dict[str, Tensor] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            made = chosen.make(*tensor.shape, generator).stored
            stored |= {f"{key.removesuffix('.weight')}.{part}": value for part, value in made.items()}
        else:
            stored[key] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": chosen.config}))


def check_experts(found: ModelWeights, plain: ModelWeights, folder: Path) -> None:
    for layer in found.layers:
        assert isinstance(layer.up, ExpertsLinear) and isinstance(layer.down, ExpertsLinear)
    expected = logits(folder, plain, 9)
    error = (logits(folder, found, 9) - expected).square().mean().sqrt()
    assert float(error / expected.std()) < 0.03


@pytest.mark.parametrize("name", ["awq of 32", "int4 of 32", "fp8 in blocks", "nvfp4 of 16"])
def test_experts_of_modules_keep_their_bits(name: str, tmp_path: Path) -> None:
    write_experts(tmp_path, name)
    spec = load_spec(tmp_path)
    plain = load_weights(spec, tmp_path, dtype="bfloat16")
    found = load_weights(spec, tmp_path, dtype="bfloat16", stored=True, make=make, experts=make_experts)
    check_experts(found, plain, tmp_path)
    held = sum(
        part.nbytes
        for layer in found.layers
        for matrix in matrices(layer)
        for part in matrix._weight._layer.parameters()  # type: ignore[attr-defined]
    )
    assert spec.packing is not None
    if humming.multiplies(spec.packing):  # the fake does not pad scales
        planned = sum(count * humming.bytes_of(spec.packing, n, k) for n, k, count in stored_shapes(spec, library=True))
        assert held <= spec.num_layers * planned <= 1.3 * held


def test_experts_of_gpt_oss_keep_their_bits(tmp_path: Path) -> None:
    packed_checkpoints.write_gpt_oss(tmp_path / "packed", tmp_path / "plain")
    folder = tmp_path / "packed"
    spec = load_spec(folder)
    found = load_weights(spec, folder, dtype="bfloat16", stored=True, make=make, experts=make_experts)
    check_experts(found, load_weights(spec, folder, dtype="bfloat16"), folder)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_no_step_with_kept_experts_waits_for_the_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card on which torch's product of experts cannot be captured."""
    tiny_transformers.save_config(name, tmp_path)
    fetch, meta = MetaTensors.fetch, torch.device("meta")

    def bits(_source: MetaTensors, name: str, shape: tuple[int, int]) -> FloatWeight | None:
        n, k = shape
        values = torch.empty(n, k // 2, dtype=torch.uint8, device=meta)
        scales = torch.empty(n, k // 32, dtype=torch.float8_e8m0fnu, device=meta)
        return FloatWeight(values, scales, torch.bfloat16) if ".experts." in name else None

    monkeypatch.setattr(MetaTensors, "fetch", lambda *given: fetch(*given).bfloat16())
    monkeypatch.setattr(MetaTensors, "fetch_bytes", bits)
    monkeypatch.setattr(test_dry_device, "build_weights", partial(build_weights, make=make, experts=make_experts))
    with dry_device(89) as dry:
        runner = test_dry_device.make_runner(load_spec(tmp_path))
        assert runner.device.num_graphs == runner.device.num_shapes
        dry.sealed = True
        counts = test_dry_device.counts_of(dry, runner, "greedy")
        assert [each["graphs"] for each in counts] == [1] * 5


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("shape", "gigabytes", "arch", "kind", "weights"),
    [
        (OF_32B, 24, (8, 9), "stored int4", (18.0e9, 19.5e9)),
        (OF_30B_MOE, 24, (8, 9), "stored int4", (16.5e9, 17.5e9)),
        (GPT_OSS, 24, (8, 9), "stored fp4", (13.5e9, 14.5e9)),
        (OF_8B, 24, (8, 0), "fp8 blocks", (9.3e9, 9.6e9)),
    ],
)
def test_plans_count_stored_bits_and_capture_graphs(
    shape: dict[str, Any], gigabytes: int, arch: tuple[int, int], kind: str, weights: tuple[float, float],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Qwen3-32B-AWQ, Qwen3-30B-A3B in 4 bits and gpt-oss-20b fit 24 GB; FP8 in blocks stays so on an A100."""
    tiny_models.write_config(tmp_path, tiny_models.llama_config(**shape))
    (tmp_path / "model.safetensors").touch()
    plan = plan_on_gpu(monkeypatch, tmp_path, gigabytes, arch)
    assert plan.library and plan.graphs and plan.quantization == kind and not plan.limits.padding.jump
    assert weights[0] < plan.weight_bytes < weights[1] and plan.num_blocks > 50
    assert plan.notes[-1].endswith("in memory, as they are stored")


@pytest.mark.usefixtures("on_a_gpu")
def test_the_libraries_of_others_keep_what_they_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.write_config(tmp_path, tiny_models.llama_config(**OF_8B))
    (tmp_path / "model.safetensors").touch()
    for arch, kind in (((9, 0), "fp8 blocks"), ((8, 9), "fp8")):
        plan = plan_on_gpu(monkeypatch, tmp_path, 80, arch)
        assert (plan.quantization, plan.library) == (kind, False)
    assert not plan_on_gpu(monkeypatch, tmp_path, 80, (7, 5)).library


@pytest.mark.usefixtures("on_a_gpu")
def test_a_fault_of_the_library_plans_without_it(
    library: type[fake_humming.HummingLayer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products are tried at the model's shapes, when the start prepares the device."""
    packed_checkpoints.write(tmp_path, "awq of 32", "llama-wide")
    plan = replace(plan_on_gpu(monkeypatch, tmp_path, 24, (8, 0)), device="cpu")
    config = EngineConfig(model=str(tmp_path), self_test=False, max_model_len=256)
    lines: list[str] = []
    kept, making = prepare(config, plan, lines.append)
    assert kept.library and not kept.faults and len(lines) == 1 and "checking products of humming-kernels" in lines[0]
    weight = loaded(tmp_path, making)[0].layers[0].down._weight  # type: ignore[attr-defined]
    assert isinstance(weight, LibraryWeight)
    library.fault = "wrong"
    told = "the product of stored int4 layers by humming-kernels differs from unpacked weights by "
    monkeypatch.setattr("engine.execution.cuda.backend._compact", lambda _config, plan, _say: (plan, make))
    without, _ = prepare(config, plan, lines.append)
    assert not without.library and without.quantization == "stored int4" and without.faults[0].startswith(told)
    assert without.limits.padding.jump and lines[-1] == without.faults[0]


@pytest.mark.usefixtures("on_a_gpu")
def test_experts_that_do_not_fit_without_the_library_are_refused(
    library: type[fake_humming.HummingLayer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.write_config(tmp_path, tiny_models.llama_config(**OF_30B_MOE))
    (tmp_path / "model.safetensors").touch()
    plan = plan_on_gpu(monkeypatch, tmp_path, 24, (8, 9))
    library.fault = "raises"
    monkeypatch.setattr(humming, "_largest_error", lambda *_: torch.inf)
    with pytest.raises(ConfigError, match="its experts are unpacked to bfloat16"):
        prepare(EngineConfig(model=str(tmp_path), self_test=False, max_model_len=256), plan, lambda _line: None)


def test_weights_that_it_does_not_take_are_unpacked() -> None:
    weight = humming._drawn(packing_of("nibbles"), 36, 64, torch.Generator().manual_seed(0))
    assert make_kept(weight, None) is None and make_kept(torch.zeros(8, 8), None) is None
    layer = make_experts(weight, None, 3)
    assert torch.equal(layer.dense_from(0)[0], weight.unpacked())


def packing_of(name: str) -> Any:
    return packing_from_config({"quantization_config": CONFIGS[name]})
