"""Mixtures of experts: our layers of a GPU and our experts of transformers' modules against transformers."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_transformers
import torch
from dry_device import WouldWaitError, dry_device
from test_cuda_backend import on_a_gpu  # noqa: F401 - a fixture
from test_cuda_runner import MetaTensors, driver_of
from test_dry_device import PAGE, counts_of, launches_of, make_runner
from test_kernel_check import faulty
from test_runner import crowd, run_in_waves
from tiny_models import generated
from torch import Tensor

from engine.build.plan import plan_launch
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution import self_test
from engine.execution.cpu.device import TorchDevice
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.kernel_check import KernelFaults, check_kernels, with_twins
from engine.limits import Limits
from engine.models import experts
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.families import MIXTURES
from engine.models.hub import choose
from engine.models.spec import ModelSpec, load_spec
from engine.models.transformers_model import load_model
from engine.models.transformers_shape import load_shape
from engine.triton_kernels import Kernels, configs, triton_kernels

FAMILIES = [family.name for family in MIXTURES]


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_with_experts_equal_transformers(name: str, tmp_path: Path) -> None:
    """Tokens of the runner for CUDA, without and with normed weights; names and sizes by the self-test of a start."""
    reference = tiny_transformers.save(name, tmp_path, sliding_window=8 if name == "gpt_oss" else None)
    spec = load_spec(tmp_path)
    assert spec.num_parameters == sum(each.numel() for each in reference.parameters())
    requests = crowd(np.random.default_rng(5), 4)
    driver = driver_of(Decoder(spec, load_weights(spec, tmp_path)), seqs=3)
    run_in_waves(driver, requests)
    for request in requests:
        expected = generated(reference, list(request.prompt_token_ids), request.sampling.max_tokens)
        assert driver.outputs[request.request_id] == expected
    assert not self_test.test_family(
        spec, tmp_path, "float32", lambda small, weights: TorchDevice(Decoder(small, weights), self_test.LIMITS)
    )


@pytest.fixture
def meta_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], ModelSpec]:
    """The spec of a family whose tensors on the dry device are of bfloat16, or of the type that the test names."""
    fetch, dtype = MetaTensors.fetch, getattr(request, "param", torch.bfloat16)
    monkeypatch.setattr(MetaTensors, "fetch", lambda *given: fetch(*given).to(dtype))

    def make(name: str) -> ModelSpec:
        tiny_transformers.save_config(name, tmp_path)
        return load_spec(tmp_path)

    return make


@pytest.mark.parametrize("arch", [89, 90])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_with_experts_waits_for_the_device(name: str, arch: int, meta_of: Callable[[str], ModelSpec]) -> None:
    """Nor for the compiler, with few rows of an expert or with many; on other cards torch's product would."""
    spec = meta_of(name)
    with dry_device(arch) as dry:
        runner = make_runner(spec)
        assert runner.device.num_graphs == runner.device.num_shapes
        assert ("_grouped_mm" in dry.launched) is (arch == 90) is not ("grouped_product_kernel" in dry.launched)
        dry.sealed = True
        assert [each["graphs"] for each in counts_of(dry, runner, "greedy")] == [1] * 5
    with dry_device(arch) as dry:
        runner = make_runner(spec, graphs=False, tokens=96)
        dry.sealed = True
        counts_of(dry, runner, "greedy")
        runner.device.run_padding(91, 1)
    by_torch = with_twins(triton_kernels(), ["grouped_product"])
    if arch == 89:
        with dry_device(arch) as dry:
            with pytest.raises(WouldWaitError, match="offsets of groups"):
                make_runner(spec, kernels=by_torch)  # no capture may wait
            with pytest.raises(WouldWaitError, match="offsets of groups"):
                counts_of(dry, make_runner(spec, graphs=False, kernels=by_torch), "greedy")


@pytest.mark.parametrize("meta_of", [torch.float16], indirect=True)
def test_experts_of_float16_are_multiplied_by_our_kernel(meta_of: Callable[[str], ModelSpec]) -> None:
    layer, _ = launches_of(meta_of("mixtral"), 2, 90)
    assert layer.count("grouped_product_kernel") == 2 and "_grouped_mm" not in layer


@pytest.mark.parametrize(("arch", "most"), [(80, 13), (90, 14), (120, 13)])
@pytest.mark.parametrize("name", FAMILIES)
def test_launches_of_a_layer_with_experts(name: str, arch: int, most: int, meta_of: Callable[[str], ModelSpec]) -> None:
    """Where torch multiplies, it gets a copy of the rows."""
    layer, _ = launches_of(meta_of(name), 2, arch)
    assert len(layer) == most and layer.count("_grouped_mm" if arch == 90 else "grouped_product_kernel") == 2
    kernels = {each.removesuffix("_kernel") for each in layer if each.endswith("_kernel")}
    assert all(f"**{kernel}**" in PAGE.read_text() for kernel in kernels)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("arch", [(8, 0), (9, 0), (12, 0)])
def test_captures_are_tried_on_every_card(
    arch: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**10, 10**10))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: arch)
    tiny_transformers.save_config("qwen3_moe", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "torch_dtype": "bfloat16"}))
    plan = plan_launch(EngineConfig(model=str(tmp_path), load_format="dummy"))
    assert plan.implementation == "own" and plan.graphs


def test_a_product_that_fails_at_the_start_runs_by_torch_and_without_graphs(tmp_path: Path) -> None:
    """Products of few rows and of many are tried; other kernels of experts leave the graphs as they are."""
    tiny_transformers.save("gpt_oss", tmp_path, num_hidden_layers=2, num_experts=8, num_local_experts=8)
    spec, rows = load_spec(tmp_path), set[int]()
    weights = load_weights(spec, tmp_path)

    def check(kernels: Kernels) -> KernelFaults:
        def make(small: ModelSpec, few: Limits, given: Kernels, graphs: bool) -> CudaDevice:
            return CudaDevice(small, weights, given, few, graphs=False)

        return check_kernels(spec, Limits(4, 128, 256, 0, 16), kernels, make, graphs=True)

    def fails_for_many(right: Callable[..., Tensor], x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        rows.add(len(others[1]) if len(others) == 2 else len(x))
        if len(x) > configs.FEW_ROWS * len(weight):
            raise RuntimeError("out of resource")
        return right(x, weight, *others)

    faults = check(faulty("grouped_product", fails_for_many))
    assert faults.kernels == {"grouped_product": "raised RuntimeError: out of resource"}
    assert min(rows) <= configs.FEW_ROWS * 8 < max(rows)
    assert "without CUDA graphs: the twin of grouped_product waits for the device" in faults.lines[-1]
    wrong = check(faulty("sum_experts", lambda right, *given: 1.1 * right(*given)))
    assert list(wrong.kernels) == ["sum_experts"] and "captures failed" in wrong.graphs


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", FAMILIES)
def test_only_plain_engines_of_a_gpu_have_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**10, 10**10))
    tiny_transformers.save(name, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    usual = EngineConfig(model=str(tmp_path), self_test=False)
    plan = plan_launch(usual)
    assert plan.implementation == "own" and isinstance(plan.spec, ModelSpec) and plan.spec.experts is not None
    half = plan_launch(replace(usual, dtype="float16"))
    assert (half.implementation, half.dtype) == ("own", "float16")
    config.write_text(config.read_text().replace('"bfloat16"', '"float16"'))
    assert plan_launch(usual).dtype == "float16" and plan_launch(usual).implementation == "own"
    for flag, option in (
        ("--dtype float32", {"dtype": "float32"}),
        ("--offload-weights", {"offload_weights": "auto"}),
        ("--overload hidden", {"overload": "hidden"}),
    ):
        with contextlib.suppress(ConfigError):
            modules = plan_launch(replace(usual, **option))
            assert modules.implementation == "transformers" and f"they run without {flag}" in modules.notes[0]
    assert choose(tmp_path, "auto").implementation == "transformers"
    with pytest.raises(ModelLoadError, match="own layers with experts cannot run here: they need a GPU"):
        choose(tmp_path, "own")


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral", "llama4_text"])
def test_modules_get_experts_of_ours(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results; stacked weights are gone. A module with other results keeps its weights."""
    tiny_transformers.save(name, tmp_path)
    shape, ids = load_shape(tmp_path), torch.arange(9)

    def loaded() -> tuple[list[Any], torch.Tensor]:
        model = load_model(shape, tmp_path, dtype="float32")
        mixtures = [
            each
            for each in model.module.modules()
            if hasattr(each, "is_transposed") or type(each).__name__ == "Llama4TextMoe"
        ]
        return mixtures, model.eager(ids)

    with torch.inference_mode():
        mine, found = loaded()
        assert mine and all(each.replaced and not list(getattr(each, "experts", each).parameters()) for each in mine)
        for kind in (experts._Experts, experts._ScaledExperts):
            monkeypatch.setattr(kind, "equals", lambda *_: False)
        theirs, expected = loaded()
        assert not any(hasattr(each, "replaced") for each in theirs) and list(theirs[0].parameters())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
