"""Mixtures of experts: our layers of a GPU and our experts of transformers' modules against transformers."""

import contextlib
import json
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
from test_dry_device import counts_of, make_runner
from test_runner import crowd, run_in_waves
from tiny_models import generated

from engine.build.plan import plan_launch
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution import self_test
from engine.execution.cpu.device import TorchDevice
from engine.models import experts
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.families import MIXTURES
from engine.models.hub import choose
from engine.models.spec import ModelSpec, load_spec
from engine.models.transformers_model import load_model
from engine.models.transformers_shape import load_shape

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


@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_with_experts_waits_for_the_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_transformers.save_config(name, tmp_path)
    fetch = MetaTensors.fetch  # grouped products are of bfloat16
    monkeypatch.setattr(MetaTensors, "fetch", lambda *given: fetch(*given).bfloat16())
    with dry_device() as dry:
        runner = make_runner(load_spec(tmp_path))
        assert runner.device.num_graphs == runner.device.num_shapes
        dry.sealed = True
        assert [each["graphs"] for each in counts_of(dry, runner, "greedy")] == [1] * 5
    with dry_device(89) as dry:
        with pytest.raises(WouldWaitError, match="offsets of groups"):
            make_runner(load_spec(tmp_path))  # no capture may wait
        with pytest.raises(WouldWaitError, match="offsets of groups"):
            counts_of(dry, make_runner(load_spec(tmp_path), graphs=False), "greedy")


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(("arch", "graphs"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_a_capture_that_must_fail_is_not_tried(
    arch: tuple[int, int], graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**10, 10**10))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: arch)
    tiny_transformers.save_config("qwen3_moe", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "torch_dtype": "bfloat16"}))
    plan = plan_launch(EngineConfig(model=str(tmp_path), load_format="dummy"))
    line = (
        f"steps run without CUDA graphs: torch multiplies experts one by one on compute capability {arch[0]}.{arch[1]}"
    )
    assert plan.implementation == "own" and plan.graphs is graphs and (line in plan.notes) is not graphs


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
    for flag, option in (
        ("--dtype float16", {"dtype": "float16"}),
        ("--offload-weights", {"offload_weights": "auto"}),
        ("--overload hidden", {"overload": "hidden"}),
    ):
        with contextlib.suppress(ConfigError):
            modules = plan_launch(replace(usual, **option))
            assert modules.implementation == "transformers" and f"they run without {flag}" in modules.notes[0]
    assert choose(tmp_path, "auto").implementation == "transformers"
    with pytest.raises(ModelLoadError, match="own layers with experts cannot run here: they need a GPU"):
        choose(tmp_path, "own")


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral"])
def test_modules_get_experts_of_ours(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results; stacked weights are gone. A module with other results keeps its weights."""
    tiny_transformers.save(name, tmp_path)
    shape, ids = load_shape(tmp_path), torch.arange(9)

    def loaded() -> tuple[list[Any], torch.Tensor]:
        model = load_model(shape, tmp_path, dtype="float32")
        mixtures = [each for each in model.module.modules() if hasattr(each, "is_transposed")]
        return mixtures, model.eager(ids)

    with torch.inference_mode():
        mine, found = loaded()
        assert mine and all(each.replaced and not list(each.parameters()) for each in mine)
        monkeypatch.setattr(experts._Experts, "equals", lambda *_: False)
        theirs, expected = loaded()
        assert not any(hasattr(each, "replaced") for each in theirs) and list(theirs[0].parameters())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
