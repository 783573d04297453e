"""Multimodal wrappers: the text part is served as transformers runs it, in the layouts in which they are published."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cuda_runner import driver_of
from test_runner import crowd, run_in_waves
from test_transformers_model import make_driver as make_modules_driver
from tiny_models import prompts_of
from tiny_wrappers import logits_of, tokens_of, wrapper

from engine.build.plan import plan_launch
from engine.build.runner import build_runner
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.hub import choose
from engine.models.spec import load_spec
from engine.models.stored_tensors import text_names
from engine.models.transformers_model import load_model
from engine.models.transformers_shape import TransformersShape


def relayout(folder: Path, pattern: str, replacement: str) -> None:
    path = folder / "model.safetensors"
    tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.cpu_limit(8)  # imports of transformers' models
@pytest.mark.parametrize("layout", ["published", "inner"])
@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_the_text_part_of_a_wrapper_equals_transformers(name: str, layout: str, tmp_path: Path) -> None:
    model = wrapper(name, tmp_path)
    if layout == "inner":  # as transformers names the parts of a loaded model
        relayout(tmp_path, r"^language_model\.(model\.)", "model.language_model.")
        relayout(tmp_path, r"^language_model\.lm_head", "lm_head")
    spec = load_spec(tmp_path)
    assert spec.architecture == {"gemma3": "Gemma3ForCausalLM", "mistral3": "MistralForCausalLM"}[name]
    assert "requests with images are refused" in spec.notes[0]
    driver = driver_of(Decoder(spec, load_weights(spec, tmp_path)), seqs=3)
    requests = crowd(np.random.default_rng(5), 4)
    run_in_waves(driver, requests)
    for request in requests:
        expected = tokens_of(model, list(request.prompt_token_ids), request.sampling.max_tokens)
        assert driver.outputs[request.request_id] == expected


@pytest.mark.cpu_limit(8)
@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
@pytest.mark.parametrize(
    ("name", "text"),
    [("gemma3", {}), ("gemma4", {}), ("qwen3_5", {}), ("mistral3", {"model_type": "ministral3"}), ("llama4", {})],
)
def test_transformers_modules_run_the_text_part_as_well(name: str, text: dict[str, Any], tmp_path: Path) -> None:
    model = wrapper(name, tmp_path, **text)
    config = EngineConfig(
        model=str(tmp_path), model_impl="transformers", device="cpu", dtype="float32", num_gpu_blocks_override=20,
        max_model_len=64, profile_seconds=0.0, threads=1,
    )  # fmt: skip
    runner, plan = build_runner(config, plan_launch(config))
    assert f"text part of {type(model).__name__}" in plan.notes[1]
    ids = torch.arange(9)
    with torch.inference_mode():
        found = runner.device._model.eager(ids)
    assert torch.allclose(found, logits_of(model, ids), atol=1e-4)


@pytest.mark.cpu_limit(8)
def test_llama_4_attends_in_chunks_of_positions(tmp_path: Path) -> None:
    """As published: files with an index, layers without the names of their types, and a number for a flag; prompts and
    answers within a chunk, across its end, and in the third chunk."""
    model = wrapper("llama4", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]["layer_types"]
    config["text_config"] |= {"no_rope_layers": [], "attn_temperature_tuning": 4}
    path.write_text(json.dumps(config))
    choice = choose(tmp_path, "auto")
    shape = choice.shape
    assert isinstance(shape, TransformersShape) and shape.max_context == 128
    assert shape.windows == (24, 24, 24, None) and (tmp_path / "model.safetensors.index.json").exists()
    found = load_model(shape, tmp_path, dtype="float32")
    prompts = prompts_of(97, (5, 20, 23, 24, 25, 47, 60))
    answers = make_modules_driver(found, 0).run_all(prompts, 8)
    assert answers == [tokens_of(model, prompt, 8) for prompt in prompts]


def test_published_configs_leave_defaults_out(tmp_path: Path) -> None:
    """Gemma 3 4B's file names five values of its text part; transformers knows the others, and ends are beside them."""
    wrapper("gemma3", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    path.write_text(json.dumps({**config, "eos_token_id": [1, 106], "dtype": "bfloat16"}))
    spec = load_spec(tmp_path)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert spec.eos_token_ids == {1, 106} and spec.dtype == "bfloat16" and spec.tie_word_embeddings
    assert spec.rope is not None and spec.windows.count(None) == 34 // 6


def test_a_wrapper_without_a_text_model_of_its_own_is_refused(tmp_path: Path) -> None:
    wrapper("gemma3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["X"], "model_type": "qwen2_5_vl"}))
    with pytest.raises(ModelLoadError, match="multimodal model; only text models are supported"):
        choose(tmp_path, "auto")


def test_names_of_other_parts_are_left_out() -> None:
    names = ["language_model.lm_head.weight", "model.language_model.norm.weight", "lm_head.weight", "vision_tower.x"]
    assert text_names(names) == {"lm_head.weight": "lm_head.weight", "model.norm.weight": names[1]}
    assert text_names(["model.norm.weight", "visual.x"]) == {name: name for name in ("model.norm.weight", "visual.x")}
