"""transformers' modules over our cache: what transformers itself generates, or a sentence that says why not."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_transformers
import torch
from driver import Driver, make_request, small_config
from native_build import native
from support.tables import mostly_slow
from tiny_transformers import Case

from engine.build import plan_launch
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution import self_test
from engine.execution.cpu import transformers_device
from engine.execution.cpu.transformers_device import TransformersDevice
from engine.execution.cuda.modules import KernelAttention
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.execution.runner import Runner
from engine.models.hub import choose
from engine.models.transformers_model import TransformersModel, load_model
from engine.models.transformers_shape import load_shape
from engine.triton_kernels import Kernels, twins

LENGTHS, OUTPUT = (1, 5, 8, 9, 16, 17, 23, 33, 40, 47, 58, 64), 12
EXACT = (
    "granite", "olmo2", "stablelm", "gemma", "phi", "glm", "gpt2", "gemma2", "gpt_oss", "mixtral", "deepseek_v3",
    "llama4_text",
)  # fmt: skip
"""Scaled residuals, norms behind branches, partial rotary, wide heads, parallel branches, learned positions, windows
with soft caps, sinks, experts, K wider than V, chunks and a temperature by position."""
NATIVE = ("deepseek_v2", "deepseek_v3", "gemma2", "gpt_oss", "gpt2", "llama4_text")
"""K wider than V, without and with normed scores of experts; windows with soft caps; sinks; bare heads; chunks."""


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name), LENGTHS, OUTPUT))


def make_driver(model: TransformersModel, depth: int, kernels: Kernels | None = None, **changes: Any) -> Driver:
    """`kernels`: attention by them."""
    config = small_config(30, max_model_len=90, pipeline_depth=depth, **changes)

    def attention(pool: UnitPool, rows: RowTable) -> KernelAttention:
        assert kernels is not None
        return KernelAttention(kernels, pool, rows, config.limits)

    device = TransformersDevice(
        model, config.limits, host_units=config.host_units, attention=None if kernels is None else attention
    )
    return Driver(Runner(device), config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "depth"), [(name, at % 2) for at, name in enumerate(EXACT)])
def test_tokens_equal_generate(case_of: Any, name: str, depth: int) -> None:
    """Chunks, prefix hits and preemptions: the pool is too small for all."""
    case = case_of(name)
    check_tokens(case, make_driver(case.model, depth))


def check_tokens(case: Case, driver: Driver) -> None:
    assert driver.run_all(case.prompts, OUTPUT) == case.answers
    stats = driver.stats()
    assert sum(stats.preemptions.values()) > 0
    assert stats.prefix_hit_tokens > 0


def test_parked_pasts_come_back(case_of: Any) -> None:
    case = case_of("gemma2")
    driver = make_driver(case.model, 0, host_units=60)
    driver.add(*[make_request(str(index), prompt, OUTPUT) for index, prompt in enumerate(case.prompts)])
    driver.run()
    assert [driver.outputs[str(index)] for index in range(len(case.prompts))] == case.answers


@pytest.mark.slow
@pytest.mark.parametrize(("name", "host_units"), [(name, 60 * (at % 2)) for at, name in enumerate(NATIVE)])
def test_native_attention_equals_generate(
    case_of: Any, name: str, host_units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same by the native library, whose attention takes the place of torch's; pasts that are parked, too."""
    case = case_of(name)
    model = load_model(case.shape, case.folder, dtype="float32", make=native().linear)
    monkeypatch.setattr(transformers_device, "PagedAttention", None)
    driver = make_driver(model, 0, host_units=host_units)
    check_tokens(case, driver)
    if host_units:
        assert driver.stats().cache_units["swap_in"] > 0
    with torch.inference_mode():
        assert self_test.test_modules(model) == ""


@pytest.mark.parametrize(
    ("name", "host_units"),
    mostly_slow([(name, 60 - 60 * (at % 2)) for at, name in enumerate(NATIVE)], [(NATIVE[0], 60), (NATIVE[3], 0)]),
)
def test_attention_by_kernels_equals_generate(
    case_of: Any, name: str, host_units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same by the twins of the Triton kernels, as modules on a GPU attend."""
    case = case_of(name)
    monkeypatch.setattr(transformers_device, "PagedAttention", None)
    kernels: Any = twins
    driver = make_driver(case.model, 0, kernels, host_units=host_units)
    check_tokens(case, driver)
    if host_units:
        assert driver.stats().cache_units["swap_in"] > 0

    def attention(pool: UnitPool, rows: RowTable) -> KernelAttention:
        return KernelAttention(kernels, pool, rows, self_test.LIMITS)

    with torch.inference_mode():
        assert self_test.test_modules(case.model, attention) == ""


def test_shapes_are_read_from_tensors(case_of: Any) -> None:
    """K of 12, V of 8 elements: cells as wide as K."""
    shape = case_of("deepseek_v3").shape
    assert (shape.num_kv_heads, shape.head_dim, shape.num_layers) == (4, 12, 4)
    assert case_of("gpt2").shape.num_kv_heads == 4
    model = case_of("gemma2").reference
    assert case_of("gemma2").shape.num_parameters == sum(p.numel() for p in model.parameters())


def test_auto_takes_ours_where_it_can(case_of: Any) -> None:
    assert choose(tiny_models.model_folder("llama-gqa2"), "auto").implementation == "own"
    choice = choose(case_of("granite").folder, "auto")
    assert (choice.implementation, choice.shape.architecture) == ("transformers", "GraniteForCausalLM")
    with pytest.raises(ModelLoadError, match="is not supported"):
        choose(case_of("granite").folder, "own")


REFUSED = {
    "qwen4_exp_text": "layers of the unsupported type",
    "bart": "encoder-decoder model|takes no position_ids",
    "bert": "not causal",
    "bloom": "takes no position_ids",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name: str, tmp_path: Path) -> None:
    tiny_transformers.save_config(name, tmp_path)
    with pytest.raises(ModelLoadError, match=REFUSED[name]):
        load_shape(tmp_path)


def test_code_from_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ModelLoadError, match="never run"):
        load_shape(tmp_path)


def test_weights_that_are_missing_are_refused(case_of: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    case = case_of("granite")
    (tmp_path / "config.json").write_bytes((case.folder / "config.json").read_bytes())
    tensors = load_file(case.folder / "model.safetensors")
    gone = next(name for name in tensors if "q_proj" in name)
    save_file({k: v for k, v in tensors.items() if k != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks tensor .*q_proj"):
        load_model(load_shape(tmp_path), tmp_path, dtype="float32")


def test_what_the_modules_cannot_do_is_said(case_of: Any) -> None:
    folder = str(case_of("granite").folder)
    with pytest.raises(ConfigError, match=r"--quantization int8 .* transformers' modules run"):
        plan_launch(EngineConfig(model=folder, device="cpu", quantization="int8"))
    with pytest.raises(ConfigError, match=r"--offload-weights .* transformers' modules run"):
        plan_launch(EngineConfig(model=folder, device="cpu", offload_weights="1"))
    plan = plan_launch(EngineConfig(model=folder, device="cpu", overload="hidden", num_gpu_blocks_override=40))
    assert plan.scratch_blocks == 0
    assert any("hidden state of their layers to themselves" in note for note in plan.notes)
    assert any("transformers' modules run GraniteForCausalLM" in note for note in plan.notes)
