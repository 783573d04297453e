"""Decoder layers of transformers' modules that run as wholes: what is read of them, what runs, what is refused."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers
import torch
from native_build import native_library
from test_transformers_model import Case, check_tokens, make_driver

from engine.execution import self_test
from engine.execution.cpu.native.library import Level, Team
from engine.execution.cpu.native.linear import Native
from engine.execution.cpu.transformers_device import TransformersDevice
from engine.models.known_layers import LayerForm, Rotation
from engine.models.transformers_model import TransformersModel, load_model, load_shape

pytestmark = pytest.mark.timeout(900)  # the first test may have to build the library

KNOWN = {
    "llama": 4,
    "qwen3": 4,
    "olmo2": 4,
    "granite": 4,
    "gemma2": 4,
    "gemma3_text": 4,
    "smollm3": 4,
    "phi3": 4,
    "stablelm": 4,
    "starcoder2": 4,
    "phi": 4,
    "exaone4": 4,
    "glm": 4,
    "cohere": 4,
    "helium": 4,
    "gpt2": 4,
}
"""Types, and how many of their four layers are known."""
CHANGED = {"granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.2}}
UNKNOWN = {"mixtral": "parts", "deepseek_v3": "parts", "arcee": "activation", "hunyuan_v1_dense": "norm"}
"""Experts, latent attention, a squared activation, norms behind the rotation."""


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name), **CHANGED.get(name, {})))


@functools.cache
def native() -> Native:
    library = native_library()
    return Native(library, min(max(library.levels()), Level.AVX512), Team(library, 1))


def load(case: Case) -> TransformersModel:
    return load_model(case.shape, case.folder, dtype="float32", make=native().linear)


@pytest.mark.parametrize(("name", "host_units"), [*((name, 0) for name in KNOWN), ("llama", 60), ("gemma2", 60)])
def test_tokens_equal_generate(case_of: Any, name: str, host_units: int) -> None:
    """Chunks, prefix hits, preemptions, parked pasts."""
    case = case_of(name)
    model = load(case)
    driver = make_driver(model, 0, host_units=host_units, unit_bytes=1)
    assert driver.runner.device.known_layers == KNOWN[name], model.layer_forms()
    check_tokens(case, driver)
    with torch.inference_mode():
        assert self_test.test_modules(model) == ""


@pytest.mark.parametrize("name", UNKNOWN)
def test_layers_that_compute_something_else_run_by_their_modules(case_of: Any, name: str) -> None:
    model = load(case_of(name))
    forms = model.layer_forms()
    assert all(isinstance(form, str) and UNKNOWN[name] in form for form in forms), forms
    driver = make_driver(model, 0)
    assert driver.runner.device.known_layers == 0
    check_tokens(case_of(name), driver)


def form_of(case: Case, layer: int = 0) -> LayerForm:
    form = load_model(case.shape, case.folder, dtype="float32").layer_forms()[layer]
    assert isinstance(form, LayerForm), form
    return form


def test_what_is_read(case_of: Any) -> None:
    """Whatever linear layers are made of, and whoever runs them."""
    llama = form_of(case_of("llama"))
    assert llama.qkv == ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") and llama.rotation == Rotation(
        False, False
    )
    assert llama.up == ("mlp.gate_proj", "mlp.up_proj") and llama.activation == "silu" and llama.scale == 1.0
    assert llama.input_norm is not None and llama.input_norm.name == "input_layernorm" and not llama.input_norm.once
    assert llama.mlp_norm is not None and llama.mlp_norm.name == "post_attention_layernorm"
    granite, olmo, gemma = (form_of(case_of(name)) for name in ("granite", "olmo2", "gemma2"))
    assert granite.scale == 0.3
    assert olmo.input_norm is None and olmo.mlp_norm is None and olmo.qk_norms is not None
    assert olmo.attention_norm is not None and not olmo.qk_norms[0].heads
    assert all(norm.centered and norm.once for norm in gemma.norms) and len(gemma.norms) == 4
    assert [form_of(case_of("smollm3"), layer).rotation is None for layer in range(4)] == [False, False, False, True]
    assert form_of(case_of("phi")).parallel and form_of(case_of("phi")).mlp_norm is None


MUTANTS: dict[str, tuple[str, Callable[[LayerForm], dict[str, Any]]]] = {
    "a scale that is dropped": ("granite", lambda _: {"scale": 1.0}),
    "no rotation": ("llama", lambda _: {"rotation": None}),
    "pairs that are turned as halves": ("glm", lambda _: {"rotation": Rotation(False, False)}),
    "a gate that is not one": ("llama", lambda form: {"up": form.up[::-1]}),
    "another activation": ("llama", lambda _: {"activation": "gelu"}),
    "a norm less": ("gemma2", lambda _: {"down_norm": None}),
    "norms of heads that are dropped": ("qwen3", lambda _: {"qk_norms": None}),
    "branches one after the other": ("phi", lambda _: {"parallel": False}),
    "another epsilon": ("llama", lambda form: {"input_norm": replace(form.input_norm, eps=1e-1)}),  # type: ignore[type-var]
    "a weight with 1 too many": ("llama", lambda form: {"mlp_norm": replace(form.mlp_norm, centered=True)}),  # type: ignore[type-var]
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_layer_that_is_read_wrong_is_refused(case_of: Any, mutant: str) -> None:
    name, change = MUTANTS[mutant]
    model = load(case_of(name))
    model.layer_forms()[:] = [
        replace(form, **change(form)) for form in model.layer_forms() if not isinstance(form, str)
    ]
    with torch.inference_mode():
        assert "of their spread" in self_test.test_modules(model)


def test_windows_and_caps_are_those_of_the_moment(case_of: Any) -> None:
    """The self-test cuts windows short, and a tape made meanwhile has the short ones."""
    model = load(case_of("gemma2"))
    windows = [look.seen.manner.window for look in model.look()]
    with model.short_windows(3):
        assert [look.seen.manner.window for look in model.look()] == [window and 3 for window in windows]
    assert {look.seen.manner.window for look in model.look()} == {8, None}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_within_rounding(tmp_path: Path, dtype: str) -> None:
    for name in ("llama", "granite", "gemma2"):
        tiny_transformers.save(name, tmp_path / name)
        shape = load_shape(tmp_path / name)
        model = load_model(shape, tmp_path / name, dtype=dtype, make=native().linear)
        with torch.inference_mode():
            assert self_test.test_modules(model) == ""
            assert TransformersDevice(model, self_test.LIMITS).known_layers == shape.num_layers
