"""The look at a model before it serves: exact ones pass, and every feature that is dropped on the way is noticed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_transformers
import torch
from native_build import native_library

from engine.build import build_runner, plan_launch
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cpu.native.library import Team, load
from engine.execution.cpu.native.linear import Native, NativeLinear
from engine.execution.self_test import LIMITS, test_family, test_modules
from engine.models.attention import Manner
from engine.models.decoder import Decoder
from engine.models.linear import MakeLinear, make_linear
from engine.models.spec import ModelSpec, load_spec
from engine.models.transformers_model import Attend, TransformersModel, load_model
from engine.models.transformers_shape import load_shape
from engine.models.weights import ModelWeights, ResidentLayers

test_family.__test__ = test_modules.__test__ = False  # type: ignore[attr-defined]


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cpu", num_gpu_blocks_override=40, profile_seconds=0.0, threads=1, **changes
    )


def torch_device(spec: ModelSpec, weights: ModelWeights) -> TorchDevice:
    return TorchDevice(Decoder(spec, weights), LIMITS)


@pytest.mark.parametrize("name", [*tiny_models.FAMILY_CASES, "gemma2-uncapped"])
def test_our_families_pass(name: str) -> None:
    folder = tiny_models.model_folder(name)
    assert test_family(load_spec(folder), folder, "float32", torch_device) == ""


def test_our_families_pass_in_half_precision_by_the_kernels_that_serve() -> None:
    build_runner(config := config_of(tiny_models.model_folder("qwen3", dtype=torch.bfloat16)), plan_launch(config))


OWN_MUTANTS: dict[str, Callable[[ModelSpec], ModelSpec]] = {
    "another theta": lambda spec: replace(spec, rope=replace(spec.rope, theta=2e4)),
    "another activation": lambda spec: replace(spec, activation="gelu_tanh"),
    "branches one after the other": lambda spec: replace(spec, parallel_residual=not spec.parallel_residual),
    "no epsilon": lambda spec: replace(spec, norm_eps=1e-2),
}


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
def test_a_window_of_ours_that_is_dropped_is_noticed(name: str) -> None:
    """It is cut short for the test, so that a few tokens tell."""
    folder = tiny_models.model_folder(name)
    spec = load_spec(folder)
    assert test_family(spec, folder, "float32", torch_device) == ""

    def forgetful(small: ModelSpec, weights: ModelWeights) -> TorchDevice:
        return torch_device(replace(small, windows=()), weights)

    assert "of their spread" in test_family(spec, folder, "float32", forgetful)


GEMMA_MUTANTS: dict[str, tuple[str, Callable[[ModelSpec], dict[str, Any]]]] = {
    "no softcap": ("gemma2", lambda _spec: {"softcap": None}),
    "no softcap of logits": ("gemma2", lambda _spec: {"logit_softcap": None}),
    "no window": ("gemma2", lambda _spec: {"windows": ()}),
    "windows everywhere": ("gemma2", lambda spec: {"windows": (min(filter(None, spec.windows)),) * 2}),
    "no scale": ("gemma2", lambda _spec: {"scale": None}),
    "an embedding that is not scaled": ("gemma2", lambda _spec: {"embedding_scale": None}),
    "another activation": ("gemma2", lambda _spec: {"activation": "silu"}),
    "one theta": ("gemma3", lambda _spec: {"local_rope": None}),
    "the other theta": ("gemma3", lambda spec: {"rope": spec.local_rope}),
}


def native_device(spec: ModelSpec, weights: ModelWeights) -> NativeDevice:
    assert isinstance(weights.head, NativeLinear)
    return NativeDevice(Decoder(spec, weights), weights.head.native, LIMITS)


@pytest.mark.timeout(900)  # the first test may have to build the library
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("mutant", GEMMA_MUTANTS)
def test_what_is_dropped_of_a_gemma_is_noticed(mutant: str, native: bool) -> None:
    """Layers of both kinds are looked at, though its first three are of one."""
    name, change = GEMMA_MUTANTS[mutant]
    folder = tiny_models.model_folder(name)
    make: MakeLinear = make_linear
    if native:
        library = native_library()
        make = Native(library, max(library.levels()), Team(library, 1)).linear
    device = native_device if native else torch_device

    def forgetful(small: ModelSpec, weights: ModelWeights) -> TorchDevice:
        return device(replace(small, **change(small)), weights)

    spec = load_spec(folder)
    assert test_family(spec, folder, "float32", device, make) == ""
    assert "of their spread" in test_family(spec, folder, "float32", forgetful, make)


@pytest.mark.parametrize("stored", ["centered_norms", "branch_norms"])
def test_norms_of_a_gemma_that_are_read_wrong_are_noticed(stored: str) -> None:
    folder = tiny_models.model_folder("gemma2")

    def forgetful(small: ModelSpec, weights: ModelWeights) -> TorchDevice:
        layers = ResidentLayers(
            replace(layer, branch_norms=None)
            if stored == "branch_norms"
            else replace(layer, post_norm=replace(layer.post_norm, weight=layer.post_norm.weight - 1.0))
            for layer in weights.layers
        )
        return torch_device(small, replace(weights, layers=layers))

    assert "of their spread" in test_family(load_spec(folder), folder, "float32", forgetful)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gemma_runs_by_the_native_kernels_where_they_are(name: str, dtype: torch.dtype) -> None:
    config = config_of(tiny_models.model_folder(name, dtype=dtype), dtype="auto")
    runner, plan = build_runner(config, plan_launch(config))
    assert (type(runner.device) is TorchDevice) == (plan.kernels == "torch") == isinstance(load(), str)


@pytest.mark.parametrize("mutant", OWN_MUTANTS)
def test_a_config_that_is_read_wrong_is_refused(mutant: str) -> None:
    folder = tiny_models.model_folder("neox")
    wrong = test_family(OWN_MUTANTS[mutant](load_spec(folder)), folder, "float32", torch_device)
    assert "differ from those of transformers" in wrong


class Mutant(TransformersModel):
    """Drops what `change` takes from the manner of every layer's attention."""

    change: Callable[[Manner], Manner]

    def forward(self, token_ids: Any, positions: Any, attend: Attend, *others: Any, **more: Any) -> Any:
        def changed(layer: int, q: Any, k: Any, v: Any, manner: Manner) -> Any:
            return attend(layer, q, k, v, self.change(manner))

        return super().forward(token_ids, positions, changed, *others, **more)


DROPPED: dict[str, tuple[str, Callable[[Manner], Manner]]] = {
    "window": ("gemma2", lambda manner: manner._replace(window=None)),
    "softcap": ("gemma2", lambda manner: manner._replace(softcap=None)),
    "scale": ("granite", lambda manner: manner._replace(scale=None)),
    "sinks": ("gpt_oss", lambda manner: manner._replace(sinks=None)),
    "chunk": ("llama4_text", lambda manner: manner._replace(chunk=None)),
}


@pytest.mark.parametrize("feature", DROPPED)
def test_a_dropped_feature_is_noticed(feature: str, tmp_path: Path) -> None:
    """Windows and chunks of 200 tokens, too: they are cut short for the test."""
    name, change = DROPPED[feature]
    spans = {"granite": {}, "llama4_text": {"attention_chunk_size": 200, "floor_scale": 200}}
    tiny_transformers.save(name, tmp_path, **spans.get(name, {"sliding_window": 200}))
    shape = load_shape(tmp_path)
    model = load_model(shape, tmp_path, dtype="float32")
    assert test_modules(model) == ""
    mutant = Mutant(shape, model.module)
    mutant.change = change
    assert "of their spread" in test_modules(mutant)


def test_the_start_refuses_and_a_flag_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_transformers.save("granite", tmp_path)
    monkeypatch.setattr("engine.build.runner.test_modules", lambda *_: "logits are 3 of their spread")
    config = config_of(tmp_path)
    with pytest.raises(ModelLoadError, match=r"self-test: logits are 3 .*--no-self-test serves it"):
        build_runner(config, plan_launch(config))
    config = replace(config, self_test=False)
    build_runner(config, plan_launch(config))


def test_differences_of_heads_are_refused(tmp_path: Path) -> None:
    """What diffllama does with the values of its heads comes after our attention, and is not seen by it."""
    tiny_transformers.save("diffllama", tmp_path)
    config = config_of(tmp_path)
    with pytest.raises(ModelLoadError):
        build_runner(config, plan_launch(config))
