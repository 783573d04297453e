"""Decoder layers of transformers' modules that run as wholes: what is read of them, what runs, what is refused."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers
import torch
from native_build import native
from test_transformers_model import Case, check_tokens, make_driver

from engine.execution import self_test
from engine.execution.cpu.native.layers import known_groups
from engine.execution.cpu.native.linear import NativeLinear
from engine.execution.cpu.transformers_device import TransformersDevice
from engine.models.known_layers import LayerForm, Rotation
from engine.models.transformers_model import TransformersModel, load_model
from engine.models.transformers_shape import load_shape

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
    "arcee": 4,
    "nemotron": 4,
    "hunyuan_v1_dense": 4,
    "olmo": 4,
}
"""Types, and how many of their four layers are known."""
CHANGED = {
    "granite": {
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]},
}
UNKNOWN = {"mixtral": "parts", "deepseek_v3": "parts", "apertus": "MLP"}
"""Experts, latent attention, an activation with weights."""


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name), **CHANGED.get(name, {})))


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


def test_what_changes_a_tensor_in_place_is_seen(tmp_path: Path) -> None:
    """OLMo may cut queries, keys and values off where they lie."""
    case = Case("olmo", tmp_path, clip_qkv=0.5)
    model = load(case)
    assert all(isinstance(form, str) and "values" in form for form in model.layer_forms()), model.layer_forms()
    driver = make_driver(model, 0)
    assert driver.runner.device.known_layers == 0
    check_tokens(case, driver)


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
    "norms of heads before they are turned": ("hunyuan_v1_dense", lambda _: {"qk_norms_last": False}),
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


def test_queries_keys_and_values_are_one_layer_and_kept_once(case_of: Any) -> None:
    """The modules' layers read its memory, and a second device takes it as it is."""
    model = load(case_of("llama"))
    layer = model.module.model.layers[0].self_attn
    apart = [each.layer for each in (layer.q_proj, layer.k_proj, layer.v_proj)]
    dense = [each.dense_from(0)[0] for each in apart]
    first, again = (known_groups(model)[0][0].qkv for _ in range(2))
    assert len(first) == len(again) == 1 and first[0].panels.data_ptr() == again[0].panels.data_ptr()
    assert len({each.panels.untyped_storage().data_ptr() for each in (*first, *again, *apart)}) == 1
    assert torch.equal(first[0].dense_from(0)[0], torch.cat(dense))
    assert all(torch.equal(each.dense_from(0)[0], rows) for each, rows in zip(apart, dense, strict=True))


def test_layers_whose_outputs_do_not_fill_panels_stay_apart() -> None:
    parts = [NativeLinear(native(), torch.randn(n, 32), None) for n in (64, 48)]
    before = [part.panels.data_ptr() for part in parts]
    assert NativeLinear.joined(parts) is None
    assert [part.panels.data_ptr() for part in parts] == before


def test_a_joined_layer_adds_the_biases_of_its_parts() -> None:
    biases = (torch.randn(32), None, torch.randn(64))
    parts = [NativeLinear(native(), torch.randn(n, 48), bias) for n, bias in zip((32, 96, 64), biases, strict=True)]
    x = torch.randn(5, 48)
    for each in (parts, parts[::-1]):  # where they lie, which is one behind the other, and elsewhere
        expected = torch.cat([part(x) for part in each], dim=1)
        before, joined = each[0].panels.data_ptr(), NativeLinear.joined(each)
        assert joined is not None and (joined.panels.data_ptr() == before) == (each is parts)
        assert torch.equal(joined(x), expected)
        assert torch.equal(torch.cat([part(x) for part in each], dim=1), expected)
        assert len({part.panels.untyped_storage().data_ptr() for part in (joined, *each)}) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_within_rounding(tmp_path: Path, dtype: str) -> None:
    for name in ("llama", "granite", "gemma2"):
        tiny_transformers.save(name, tmp_path / name)
        shape = load_shape(tmp_path / name)
        model = load_model(shape, tmp_path / name, dtype=dtype, make=native().linear)
        with torch.inference_mode():
            assert self_test.test_modules(model) == ""
            device = TransformersDevice(model, self_test.LIMITS)
            assert device.known_layers == shape.num_layers
