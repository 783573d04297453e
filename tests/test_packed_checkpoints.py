"""Checkpoints in fewer bits: the weights that they stand for to the last bit, the same tokens as of plain ones, the
plan of a start before it reads them, and one clear line for an unreadable one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import packed_checkpoints
import pytest
import tiny_models
import torch
from driver import Driver, make_request
from native_build import native_library
from packed_checkpoints import FORMATS, GROUP, NIBBLES, NVFP4
from safetensors.torch import load_file
from torch import Tensor

from engine.build import build_runner, plan_launch
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution.cpu.native import library
from engine.execution.plan import LaunchPlan
from engine.limits import SchedulerConfig
from engine.models.checkpoint import Checkpoint, blocks_of, bytes_of, dense, load_weights, nibbles_of
from engine.models.packing import packing_from_config
from engine.models.quantized import Int4Linear, QuantizedLinear
from engine.models.spec import load_spec, spec_from_config
from engine.models.transformers_shape import load_shape
from tidemill.commands.preflight import report_launch

CPU = torch.device("cpu")
INTEGERS = ("w8a8", "w8a8 by tensors")


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    options: dict[str, Any] = {"dtype": "float32", "kernels": "torch"}
    return EngineConfig(
        model=str(folder), device="cpu", num_gpu_blocks_override=40, max_model_len=64,
        profile_seconds=0.0, threads=1, **(options | changes),
    )  # fmt: skip


def generated(config: EngineConfig) -> tuple[dict[str, list[int]], LaunchPlan]:
    runner, plan = build_runner(config, plan_launch(config))
    driver = Driver(runner, SchedulerConfig(num_units=plan.limits.num_units, max_model_len=64))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in (5, 17, 30)]
    driver.add(*[make_request(str(index), prompt, 12) for index, prompt in enumerate(prompts)])
    driver.run()
    return driver.outputs, plan


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_equal_to_the_last_bit(name: str, tmp_path: Path) -> None:
    weights = packed_checkpoints.write(tmp_path, name)
    packing = load_spec(tmp_path).packing
    plain = [key for key in load_file(tmp_path / "model.safetensors") if ".layers." not in key or "norm" in key]
    for dtype in (torch.float32, torch.bfloat16):
        with Checkpoint(tmp_path, dtype, CPU, packing) as checkpoint:
            for key, weight in weights.items():
                assert checkpoint.has(key)
                assert torch.equal(checkpoint.fetch(key, tuple(weight.shape)), weight.to(dtype)), key
            for key in plain:
                checkpoint.fetch(key, (97, 64) if "norm" not in key else (64,))
            checkpoint.check_all_used()


@pytest.mark.parametrize("name", ["int4 with zero points", "gptq", "fp8 in blocks"])
def test_tokens_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    """Through the self-test, as a start has it."""
    packed_checkpoints.write_dense(tmp_path / "dense", packed_checkpoints.write(tmp_path / "packed", name))
    found, plan = generated(config_of(tmp_path / "packed"))
    assert plan.quantization == "none"
    assert found == generated(config_of(tmp_path / "dense"))[0]


@pytest.mark.parametrize("name", ["w8a8", "awq"])
def test_tokens_by_transformers_modules(name: str, tmp_path: Path) -> None:
    packed_checkpoints.write_dense(tmp_path / "dense", packed_checkpoints.write(tmp_path / "packed", name))
    found, plan = generated(config_of(tmp_path / "packed", model_impl="transformers"))
    assert plan.implementation == "transformers" and "unpacked to float32 at load" in plan.notes[-1]
    assert found == generated(config_of(tmp_path / "dense"))[0]


BESIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AutoGPTQ": ("gptq", "quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "with its method": ("gptq", "quantize_config.json", FORMATS["gptq"].config),
    "AutoAWQ": ("awq", "quant_config.json", {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}),
    "modelopt": ("nvfp4", "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": NVFP4}),
    "AWQ by another name": ("awq", "quantize_config.json", FORMATS["awq"].config),
}


@pytest.mark.parametrize(("name", "impl"), [*((name, "auto") for name in BESIDE), ("AutoAWQ", "transformers")])
def test_settings_beside_config_json_are_read(name: str, impl: str, tmp_path: Path) -> None:
    kind, file, given = BESIDE[name]
    packed_checkpoints.write(tmp_path, kind)
    expected = generated(config_of(tmp_path, model_impl=impl))[0]
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    tiny_models.write_config(tmp_path, config)
    with pytest.raises(
        ConfigError, match=r"(qweight|weight_scale) is quantized, but config.json has no quantization_config"
    ):
        plan_launch(config_of(tmp_path, model_impl=impl))
    (tmp_path / file).write_text(json.dumps(given))
    assert generated(config_of(tmp_path, model_impl=impl))[0] == expected


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_weights_are_unpacked_on_their_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operand of every operation is there; on a CPU a checkpoint of 20B in MXFP4 would take minutes."""
    numbers = torch.Generator().manual_seed(5)
    config: dict[str, Any] = {"quant_method": "mxfp4"}
    if name == "mxfp4":
        stored = packed_checkpoints.mxfp4(3, 96, 40, (0, 12), numbers).stored
    else:
        config, stored = FORMATS[name].config, FORMATS[name].make(64, 64, numbers).stored
    packing = packing_from_config({"quantization_config": config})
    assert packing is not None
    monkeypatch.setattr(Tensor, "__bool__", lambda _: name != "mxfp4")  # scales are finite
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    parts = {
        part: each if part == "weight_shape" else torch.empty(each.shape, dtype=each.dtype, device="meta")
        for part, each in stored.items()
    }
    found: list[Any] = [dense(packing, parts)]
    if packing.integers or packing.floats:
        found += bytes_of(packing, parts)
    if packing.nibbles:
        found += nibbles_of(packing, parts) or ()
    if packing.blocks:
        found += blocks_of(packing, parts) or ()
    assert {each.device.type for each in found if each is not None} == {"meta"}


# Experts of gpt-oss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [(0, 255), (0, 12), (243, 255)], ids=["all", "least", "greatest"])
def test_mxfp4_stands_for_what_transformers_makes_of_it(scale: tuple[int, int]) -> None:
    """Denormal numbers, infinities and signs of zeros, too."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packing = packing_from_config({"quantization_config": {"quant_method": "mxfp4"}})
    assert packing is not None
    made = packed_checkpoints.mxfp4(3, 96, 40, scale, torch.Generator().manual_seed(5))
    found = dense(packing, made.stored)
    reference = convert_moe_packed_tensors(made.stored["blocks"], made.stored["scales"])
    assert found.dtype == torch.bfloat16 and found.shape == (3, 96, 40)
    assert torch.equal(found.view(torch.int16), reference.view(torch.int16))
    assert torch.equal(found.view(torch.int16), made.weight.contiguous().view(torch.int16))


def test_gpt_oss_with_stored_experts_gives_the_tokens_of_the_plain_one(tmp_path: Path) -> None:
    weights = packed_checkpoints.write_gpt_oss(tmp_path / "packed", tmp_path / "plain")
    plan = plan_launch(config_of(tmp_path / "packed"))
    (note,) = [line for line in report_launch(plan, "tiny") if "MXFP4" in line]
    assert note.startswith("note") and " on disk, " in note and "in memory, unpacked to float32 at load" in note
    with Checkpoint(tmp_path / "packed", torch.bfloat16, CPU, plan.spec.packing) as checkpoint:
        tensors = checkpoint.dense_tensors()
    assert len(weights) == 8 and all(torch.equal(tensors[name], weight) for name, weight in weights.items())
    assert tensors.keys() == load_file(tmp_path / "plain" / "model.safetensors").keys()
    found, plan = generated(config_of(tmp_path / "packed"))
    assert plan.implementation == "transformers"
    assert found == generated(config_of(tmp_path / "plain"))[0]
    one, other = (load_weights(load_spec(tmp_path / name), tmp_path / name).layers[0] for name in ("packed", "plain"))
    assert torch.equal(one.up.data(), other.up.data()) and torch.equal(one.down.data(), other.down.data())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, name: t[f"{name}_scales"].fill_(255), "mlp.experts.down_proj by MXFP4: some scales are not finite"),
        (lambda t, name: t.update({f"{name}_scales": t[f"{name}_scales"][:, 1:].contiguous()}), "MXFP4: scales [4, 63"),
        (lambda t, name: t.update({f"{name}_blocks": t[f"{name}_blocks"][..., 1:].contiguous()}), "for blocks [4, 64,"),
        (lambda t, name: t.update({f"{name}_scales": t[f"{name}_scales"].float()}), "scales of type float32"),
        (lambda t, name: t.pop(f"{name}_scales"), "mlp.experts.down_proj_blocks is of type uint8"),
    ],
)
def test_stored_experts_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Tensor], str], object], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "packed"
    packed_checkpoints.write_gpt_oss(folder, tmp_path / "plain")
    tiny_models.rewrite(folder, lambda tensors: change(tensors, "model.layers.1.mlp.experts.down_proj"))
    with pytest.raises(ModelLoadError) as caught:
        build_runner(config_of(folder), plan_launch(config_of(folder)))
    assert message in caught.value.message and "\n" not in caught.value.message


def test_a_config_without_a_type_has_that_of_the_tensors(tmp_path: Path) -> None:
    packed_checkpoints.write_gpt_oss(tmp_path, tmp_path / "plain")
    tiny_models.rewrite(tmp_path, lambda all: all.update({k: t.bfloat16() for k, t in all.items() if "_" in k}))
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"dtype"', '"type"'))  # as the config of gpt-oss-20b
    assert load_spec(tmp_path).dtype == load_shape(tmp_path).dtype == "bfloat16"


# Integers that are computed with -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama-gqa2", "neox"])
@pytest.mark.parametrize("name", INTEGERS)
def test_stored_integers_are_computed_with(name: str, case: str, tmp_path: Path) -> None:
    weights = packed_checkpoints.write(tmp_path, name, case)
    spec = load_spec(tmp_path)
    model = load_weights(spec, tmp_path, dtype="float32", stored=True)
    down = next(key for key in weights if "layers.1." in key and ("down_proj" in key or "4h_to_h" in key))
    stored = load_file(tmp_path / "model.safetensors")
    layer = model.layers[1].down
    assert isinstance(layer, QuantizedLinear) and isinstance(model.layers[0].qkv, QuantizedLinear)
    values, each = stored[down], stored[down.replace("weight", "weight_scale")].float()
    assert torch.equal(layer.dense_from(0)[0], values.float() * each.reshape(-1, 1))
    assert not isinstance(model.head, QuantizedLinear)  # stored as it was
    x = torch.randn(3, layer.in_features)
    exact = x.double() @ (values.double() * each.reshape(-1, 1).double()).t()
    assert float((layer.product(x).double() - exact).square().mean().sqrt()) < 0.02 * float(exact.std())
    fused = model.layers[0].qkv.dense_from(0)[0]
    plain = load_weights(spec, tmp_path, dtype="float32").layers[0].qkv.dense_from(0)[0]
    torch.testing.assert_close(fused, plain, rtol=0.01, atol=1e-6)  # the type of the scales rounds products


def test_a_start_computes_with_them_natively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens by the kernels and by torch; a layer that was left as it was beside those of integers."""
    packed_checkpoints.write(tmp_path, "w8a8")
    name = "model.layers.1.mlp.gate_proj"
    tiny_models.rewrite(tmp_path, lambda tensors: unpacked_again(tensors, name))
    monkeypatch.setattr(library, "load", native_library)
    monkeypatch.setattr("engine.execution.cpu.native.start.load", native_library)
    answers = {}
    for kernels in ("auto", "torch"):
        answers[kernels], plan = generated(config_of(tmp_path, kernels=kernels))
        assert (plan.quantization, plan.precision) == ("w8a8", "float32, w8a8 layers")
        assert plan.kernels.startswith("native" if kernels == "auto" else "torch")
    assert answers["auto"] == answers["torch"]


@pytest.mark.parametrize("name", ["w8a8", "int4 by outputs"])
def test_they_are_unpacked_where_they_cannot_be_used(name: str, tmp_path: Path) -> None:
    packed_checkpoints.write(tmp_path, name)
    for changes in ({"offload_weights": "1"}, {"overload": "hidden", "online_policy": "apt"}):
        assert plan_launch(config_of(tmp_path, **changes)).quantization == "none"
    assert plan_launch(config_of(tmp_path, load_format="dummy")).quantization == ("none" if name == "w8a8" else "int4")


# Four bits that stay packed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NIBBLES)
def test_stored_nibbles_are_computed_with(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers stand for the checkpoint's weights; kernels and torch give the same tokens; the start compares them with
    transformers. A fused layer with a module in 16 bits is unpacked."""
    weights = packed_checkpoints.write(tmp_path, name, "llama-wide")
    module = "model.layers.1.mlp.gate_proj"
    tiny_models.rewrite(tmp_path, lambda tensors: left_as_it_was(tensors, module, weights[f"{module}.weight"]))
    model = load_weights(load_spec(tmp_path), tmp_path, dtype="float32", stored=True)
    layer, plain = model.layers[0].qkv, load_weights(load_spec(tmp_path), tmp_path, dtype="float32")
    assert isinstance(layer, Int4Linear) and not isinstance(model.layers[1].up, Int4Linear)
    torch.testing.assert_close(layer.dense_from(0)[0], plain.layers[0].qkv.dense_from(0)[0], rtol=0.004, atol=1e-7)
    assert torch.equal(model.layers[1].up.dense_from(0)[0], plain.layers[1].up.dense_from(0)[0])
    monkeypatch.setattr(library, "load", native_library)
    monkeypatch.setattr("engine.execution.cpu.native.start.load", native_library)
    answers = {}
    for kernels in ("auto", "torch"):
        answers[kernels], plan = generated(config_of(tmp_path, kernels=kernels))
        assert (plan.quantization, plan.precision) == ("int4", "float32, int4 layers")
        assert "in 4 bits as they are stored" in plan.notes[-1]
    assert answers["auto"] == answers["torch"]


def left_as_it_was(tensors: dict[str, Tensor], module: str, weight: Tensor) -> None:
    for name in [each for each in tensors if each.startswith(f"{module}.")]:
        del tensors[name]
    tensors[f"{module}.weight"] = weight.float()


def test_groups_in_act_order_are_unpacked(tmp_path: Path) -> None:
    """As the config says, or as only the tensors show."""
    packed_checkpoints.write(tmp_path, "gptq of 32", "llama-wide")
    name = "model.layers.0.mlp.down_proj.g_idx"
    tiny_models.rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].flip(0).contiguous()}))
    model = load_weights(load_spec(tmp_path), tmp_path, dtype="float32", stored=True)
    assert not isinstance(model.layers[0].down, Int4Linear) and isinstance(model.layers[1].down, Int4Linear)
    config = tiny_models.llama_config(
        quantization_config={**FORMATS["gptq"].config, "group_size": 32, "desc_act": True}
    )
    assert (packing := packing_from_config(config)) is not None and not packing.nibbles


def test_a_model_of_32_billion_in_4_bits_is_planned_for_24_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-32B-AWQ."""
    shape = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600,
        "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "float16",
        "quantization_config": {**FORMATS["awq"].config, "group_size": 128},
    }  # fmt: skip
    tiny_models.write_config(tmp_path, tiny_models.llama_config(**shape))
    monkeypatch.setattr("engine.execution.memory.available_memory", lambda: 24 * 10**9)
    config = config_of(tmp_path, load_format="dummy", dtype="float16")
    plan = plan_launch(replace(config, num_gpu_blocks_override=None, max_model_len=4096))
    assert plan.quantization == "int4" and plan.cache_bytes > 10**9
    assert plan.weight_bytes > 17e9 and plan.weight_bytes + plan.cache_bytes < 24e9


# The plan of a start -----------------------------------------------------------------------------------------------


def test_a_start_says_what_it_takes_before_it_reads(tmp_path: Path) -> None:
    packed_checkpoints.write(tmp_path, "awq")
    plan = plan_launch(config_of(tmp_path))
    (note,) = [line for line in report_launch(plan, "tiny") if line.startswith("note")]
    assert "AWQ int4 in groups of 8: 0.00 GiB on disk, 0.00 GiB in memory, unpacked to float32 at load" in note
    assert "with --quantization int8" in note
    assert plan_launch(config_of(tmp_path, quantization="int8")).notes[-1].endswith("in memory")
    packed_checkpoints.write(tmp_path, "w8a8")
    assert "W8A8 int8: " in plan_launch(config_of(tmp_path)).notes[-1]
    assert not plan_launch(config_of(tmp_path, load_format="dummy")).notes


# What cannot be read -------------------------------------------------------------------------------------------------


def unpacked_again(tensors: dict[str, Tensor], module: str) -> None:
    """A layer that 'ignore' names."""
    scales = tensors.pop(f"{module}.weight_scale")
    tensors[f"{module}.weight"] = tensors[f"{module}.weight"].float() * scales.float()


_INT4, _W8A8 = FORMATS["int4"].config, FORMATS["w8a8"].config
_GROUPS = _INT4["config_groups"]["group_0"]


def changed(**scheme: Any) -> dict[str, Any]:
    group = {**_GROUPS, "weights": {**_GROUPS["weights"], **scheme}}
    return {**_INT4, "config_groups": {"group_0": group}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized by bitsandbytes are not supported"),
    ({"bits": 4}, "quantized by an unknown method are not supported"),
    ({**FORMATS["awq"].config, "version": "gemv"}, "awq version 'gemv' is not supported"),
    ({**FORMATS["awq"].config, "group_size": 24}, "groups of 24: 64 inputs cannot be divided into groups of 24"),
    ({**FORMATS["awq"].config, "bits": 3}, "awq with 3 bits is not supported"),
    ({**FORMATS["gptq"].config, "bits": 3}, "gptq with 3 bits is not supported"),
    ({**FORMATS["gptq"].config, "bits": "4"}, "gptq with bits '4' is not supported"),
    ({**FORMATS["gptq"].config, "group_size": 7}, "gptq with group_size 7 is not supported"),
    ({**FORMATS["gptq"].config, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    ({**FORMATS["gptq"].config, "dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq with other settings for some layers"),
    ({**FORMATS["fp8"].config, "fmt": "e5m2"}, "fp8 with values in e5m2 is not supported"),
    ({**FORMATS["fp8"].config, "weight_block_size": [128]}, r"fp8 with blocks of \[128\] is not supported"),
    ({**_INT4, "format": "mxfp4-pack-quantized"}, "format 'mxfp4-pack-quantized' is not supported"),
    ({**_INT4, "format": "nvfp4-pack-quantized"}, "int4 in nvfp4-pack-quantized is not supported"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt with quant_algo 'W4A8_AWQ' is not supported"),
    ({**_INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "with a sparsity_config is not supported"),
    ({**_INT4, "config_groups": {"a": _GROUPS, "b": _W8A8["config_groups"]["group_0"]}}, "more than one scheme"),
    ({**_INT4, "config_groups": {}}, "without a scheme of weights"),
    (changed(num_bits=3), "int3 in pack-quantized is not supported"),
    (changed(strategy="tensor_group"), "strategy 'tensor_group' is not supported"),
    (changed(group_size=128), "in groups of 128: 64 inputs cannot be divided into groups of 128"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_read_is_refused_by_its_config(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Without a file of weights."""
    with pytest.raises(ModelLoadError, match=message) as caught:
        spec_from_config(tiny_models.llama_config(quantization_config=given))
    assert "\n" not in caught.value.message
    tiny_models.write_config(tmp_path, tiny_models.llama_config(quantization_config=given))
    with pytest.raises(ModelLoadError):
        plan_launch(config_of(tmp_path))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_weights(load_spec(folder), folder)
    assert "\n" not in caught.value.message
    return caught.value.message


_Q = "model.layers.0.self_attn.q_proj"


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def broken(name: str, change: Callable[[dict[str, Tensor]], object]) -> str:
        packed_checkpoints.write(tmp_path, name)
        tiny_models.rewrite(tmp_path, change)
        return refusal(tmp_path)

    assert "the tensor qzeros is missing" in broken("awq", lambda t: t.pop(f"{_Q}.qzeros"))
    narrow = broken("int4", lambda t: t.update({f"{_Q}.weight_scale": t[f"{_Q}.weight_scale"][:, :3].contiguous()}))
    assert f"weight {_Q}.weight by compressed-tensors int4 in groups of {GROUP}: scales [64, 3]" in narrow
    assert f"lacks tensor {_Q}.weight" in broken("int4", lambda t: t.pop(f"{_Q}.weight_scale"))
    assert "do not hold a weight of [64, 999]" in broken(
        "int4", lambda t: t.update({f"{_Q}.weight_shape": torch.tensor([64, 999])})
    )
    order = broken("gptq", lambda t: t.update({f"{_Q}.g_idx": t[f"{_Q}.g_idx"] + 5}))
    assert "the group order" in order
    assert "values of type uint8 are not supported" in broken(
        "fp8", lambda t: t.update({f"{_Q}.weight": t[f"{_Q}.weight"].view(torch.uint8)})
    )
    assert "is of type float8_e4m3fn" in broken("fp8", lambda t: t.pop(f"{_Q}.weight_scale"))
    assert "does not use" in broken("gptq", lambda t: t.update({f"{_Q}.bias": torch.ones(64)}))


def test_scales_of_a_cache_are_left_aside(tmp_path: Path) -> None:
    packed_checkpoints.write(tmp_path, "float8 by outputs")
    more = {"model.layers.0.self_attn.k_scale": torch.ones(1), f"{_Q}.input_scale": torch.ones(1)}
    tiny_models.rewrite(tmp_path, lambda tensors: tensors.update(more))
    load_weights(load_spec(tmp_path), tmp_path)
