"""The composition root: configurations on the real demo model and on invented shapes."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import outputs_of

from engine.api import EngineRequest, FinishReason, SamplingParams
from engine.build import build_engine, build_runner, plan_launch, profile_key
from engine.build.join import describe_costs, drafts_tokens
from engine.config import USUAL_STEP, WIDE_STEP, EngineConfig, scheduler_settings, step_limits
from engine.errors import ConfigError, ModelLoadError
from engine.execution import backend as backends
from engine.execution import memory
from engine.execution.cpu.native import is_built
from engine.execution.cpu.native.crew import NativeRunner
from engine.execution.cuda.backend import CudaBackend
from engine.limits import SchedulerConfig
from engine.machine.facts import HOST_ENGINES, Processor, read_processor
from engine.models.quantized import make_quantized
from engine.models.weights import DummyTensors, build_weights
from engine.scheduling.report import report_stats
from predictor.model import LatencyModel

DEMO = EngineConfig(device="cpu", dtype="float32", num_gpu_blocks_override=40, profile_seconds=0.0)


def shape(folder: Path, **changes: object) -> Path:
    """A checkpoint's folder with a config and no weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 99,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "eos_token_id": [5, 6],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


async def answer(config: EngineConfig, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    engine = build_engine(config)
    await engine.start()
    try:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        (output,) = [out async for out in outputs_of(engine, EngineRequest("r", prompt, sampling, final_only=True))]
        assert output.error is None and output.finish_reason is FinishReason.LENGTH
        return output.token_ids
    finally:
        await engine.stop()


def test_the_facts_of_the_built_engine_are_those_of_the_model() -> None:
    plan = plan_launch(DEMO)
    engine = build_engine(DEMO, plan)
    assert engine.info.architecture == "LlamaForCausalLM" and engine.info.dtype == "float32"
    assert (engine.info.device, engine.info.max_model_len) == ("cpu", 640)
    assert engine.info.vocab_size == plan.spec.vocab_size and engine.info.eos_token_ids == plan.spec.eos_token_ids
    assert report_stats(engine.core.state).units_total == 2 * 40


async def test_the_longest_context_that_is_offered_can_be_used() -> None:
    """To the last token of the last block, in the smallest pool of all too."""
    for blocks in (1, 40):
        config = EngineConfig(device="cpu", dtype="float32", num_gpu_blocks_override=blocks, profile_seconds=0.0)
        length = plan_launch(config).limits.max_model_len
        assert length == 16 * blocks
        assert len(await answer(config, (1, 2, 3), length - 3)) == length - 3


async def test_dummy_weights_need_no_weight_files(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(shape(tmp_path)), device="cpu", dtype="float32", load_format="dummy", num_gpu_blocks_override=4,
        profile_seconds=0.0,
    )  # fmt: skip
    assert await answer(config, (1, 2, 3), 20) == await answer(config, (1, 2, 3), 20)
    with pytest.raises(ModelLoadError):
        build_engine(EngineConfig(model=str(tmp_path), device="cpu", num_gpu_blocks_override=4))


# ---- context and cache


def test_the_context_is_the_least_of_model_flag_and_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(**fields: int) -> tuple[int, bool]:
        made = plan_launch(EngineConfig(model=str(shape(tmp_path)), device="cpu", **fields))  # type: ignore[arg-type]
        return made.limits.max_model_len, any("context limited" in note for note in made.notes)

    assert plan(num_gpu_blocks_override=1000) == (4096, False)
    assert plan(num_gpu_blocks_override=1000, max_model_len=100) == (100, False)
    assert plan(num_gpu_blocks_override=10) == (160, True)
    assert plan(num_gpu_blocks_override=10, max_model_len=160) == (160, False)
    with pytest.raises(ConfigError, match="--max-model-len 161 does not fit: the cache holds 160 tokens"):
        plan(num_gpu_blocks_override=10, max_model_len=161)
    with pytest.raises(ConfigError, match="--max-model-len 4097 exceeds"):
        plan(max_model_len=4097)
    monkeypatch.setattr("engine.build.plan.BLOCK_SIZE", 4)
    with pytest.raises(ConfigError, match="holds 4 tokens, too few"):
        plan(num_gpu_blocks_override=1)


def test_the_cache_takes_its_share_of_what_the_weights_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(shape(tmp_path)), device="cpu", dtype="float32")
    weights = plan_launch(config).weight_bytes
    unit = 2 * 16 * 2 * 8 * 4
    monkeypatch.setattr(memory, "available_memory", lambda: weights + 4 * 1001 * unit)
    plan = plan_launch(config)
    assert (plan.num_blocks, plan.limits.max_model_len) == (500, 4096)
    monkeypatch.setenv(HOST_ENGINES, "2")
    monkeypatch.setattr(memory, "available_memory", lambda: 2 * (weights + 4 * 1001 * unit))
    assert plan_launch(config).num_blocks == 500, "the free memory is for two engines"
    monkeypatch.setattr(memory, "available_memory", lambda: weights // 2)
    with pytest.raises(ConfigError, match="no memory is left for the cache"):
        plan_launch(config)


# ---- threads


@pytest.mark.slow
@pytest.mark.skipif(not is_built(), reason="no native kernels here")
@pytest.mark.parametrize(("threads", "watched"), [(None, True), (2, False), (1, False)])
def test_threads_are_chosen_by_measuring_unless_they_are_said(
    threads: int | None, watched: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        torch.set_num_threads(2)
        config = replace(DEMO, profile_seconds=1.0, threads=threads)
        with caplog.at_level("DEBUG", "tidemill.engine"):
            runner, plan = build_runner(config, plan_launch(config))
    finally:
        torch.set_num_threads(before)
    assert isinstance(runner, NativeRunner) and (runner.watch is not None) == watched
    assert any("of 2 threads" in line for line in caplog.messages) == watched
    assert plan.threads == threads or (threads is None and plan.threads in (1, 2))
    assert f"{plan.threads} threads" in profile_key(plan).device


# ---- quantization


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_a_model_on_integers_answers_and_says_what_it_is(kernels: str) -> None:
    config = replace(DEMO, quantization="int8", kernels=kernels)
    plan = plan_launch(config)
    assert plan.precision == "float32, int8 layers"
    assert profile_key(plan) != profile_key(plan_launch(DEMO))
    assert len(await answer(config, (5, 6, 7), 4)) == 4


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_quantised_weights_are_those_that_are_kept(tmp_path: Path, tied: bool) -> None:
    folder = shape(tmp_path, tie_word_embeddings=tied)
    plan = plan_launch(EngineConfig(model=str(folder), device="cpu", dtype="float32", quantization="int8"))
    weights = build_weights(plan.spec, DummyTensors(0, torch.float32, torch.device("cpu")), make_quantized)
    kept = weights.embedding.nbytes + weights.final_norm.weight.nbytes
    layers = [weights.head]
    for layer in weights.layers:
        layers += [layer.qkv, layer.out, layer.up, layer.down]
        kept += layer.input_norm.weight.nbytes + layer.post_norm.weight.nbytes
    assert plan.weight_bytes == kept + sum(each.out_features * (each.in_features + 8) for each in layers)


def test_where_quantization_does_not_apply_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--overload hidden cannot be combined with --quantization"):
        EngineConfig(quantization="int8", overload="hidden")
    monkeypatch.setattr("engine.execution.backend.find_backend", lambda _name: CudaBackend())
    with pytest.raises(ConfigError, match="--quantization int8 is not supported on a GPU; set --device cpu"):
        plan_launch(EngineConfig(quantization="int8"))


# ---- type and device


@pytest.mark.parametrize(
    ("features", "checkpoint", "changes", "chosen"),
    [
        ("avx512_bf16", "bfloat16", None, "bfloat16"),
        ("amx_bf16", "bfloat16", None, "bfloat16"),
        ("avx2 avx512f", "bfloat16", None, "float32"),
        ("avx512_bf16", "float16", None, "float32"),
        ("avx512_fp16", "float16", None, "float16"),
        ("", "float32", None, "float32"),
        ("avx2", "bfloat16", {}, "bfloat16"),
        ("avx2", "bfloat16", {"kernels": "torch"}, "float32"),
        ("avx2", "bfloat16", {"overload": "hidden"}, "float32"),
    ],
)
def test_half_precision_only_where_the_processor_is_fast_in_it_or_native_kernels_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str, checkpoint: str, changes: Any, chosen: str
) -> None:
    """`changes`: settings beside native kernels, None without them."""
    processor = Processor("p", 2, 2, frozenset(features.split()))
    monkeypatch.setattr("engine.execution.cpu.backend.read_processor", lambda: processor)
    monkeypatch.setattr("engine.execution.cpu.backend.load", object if changes is not None else lambda: "not built")
    model = str(shape(tmp_path, torch_dtype=checkpoint))
    config = EngineConfig(model=model, device="cpu", num_gpu_blocks_override=999, **changes or {})
    plan = plan_launch(config)
    assert plan.dtype == chosen
    if changes is None:
        assert [checkpoint in note for note in plan.notes] == ([True] if chosen != checkpoint else [])
        asked = plan_launch(replace(config, dtype=checkpoint))
        assert asked.dtype == checkpoint and not asked.notes


@pytest.mark.parametrize(("asked", "note"), [(True, "KV alone"), (False, None)])
def test_hidden_cache_that_cannot_be_is_said(tmp_path: Path, asked: bool, note: str | None) -> None:
    model = str(shape(tmp_path, torch_dtype="float32"))  # K and V of half the heads: no larger than hidden state
    config = EngineConfig(model=model, device="cpu", num_gpu_blocks_override=9, max_model_len=99)
    plan = plan_launch(replace(config, overload="hidden" if asked else "recompute"))
    assert plan.scratch_blocks == 0
    assert [note in found for found in plan.notes] == [True] if note else not plan.notes


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan_launch(EngineConfig()).device == "cpu"
    with pytest.raises(ConfigError, match="--device cuda"):
        plan_launch(EngineConfig(device="cuda"))


@pytest.mark.gpu
async def test_a_gpu_measures_its_cache_and_gives_the_same_answer() -> None:
    config = EngineConfig(device="cuda", dtype="float32", gpu_memory_utilization=0.2)
    engine = build_engine(config)
    assert engine.info.device == "cuda" and report_stats(engine.core.state).units_total > 1000
    del engine
    prompt = tuple(range(20, 60))
    assert await answer(config, prompt, 12) == await answer(DEMO, prompt, 12)


# ---- the processor

CPUINFO = "".join(
    f"processor\t: {thread}\nmodel name\t: Test CPU\nphysical id\t: 0\ncore id\t\t: {core}\n"
    "flags\t\t: fpu avx2 avx512_bf16\n\n"
    for thread, core in ((0, 0), (1, 0), (2, 1))
)


def test_two_threads_of_a_core_are_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.machine.facts._quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    found = read_processor(CPUINFO)
    assert (found.name, found.cores, found.threads) == ("Test CPU", 2, 3)
    assert found.shown_features == ["avx2", "avx512_bf16"] and found.is_fast("bfloat16")
    assert not found.is_fast("float16") and found.is_fast("float32")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    assert read_processor(CPUINFO).cores == 1
    assert read_processor("").cores == 1 and not read_processor("").is_fast("bfloat16")


def test_a_model_is_loaded_in_a_thread_that_is_gone_when_the_engine_is_there(tmp_path: Path) -> None:
    """Else its OpenMP workers slow the engine's own down (see `build_engine`)."""
    threads: list[threading.Thread] = []
    build_engine(DEMO, say=lambda _line: threads.append(threading.current_thread()))
    assert threads and threading.current_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(ModelLoadError):
        build_engine(replace(DEMO, model=str(shape(tmp_path))))


def test_one_thread_per_core_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr("engine.execution.cpu.backend.read_processor", lambda: Processor("p", 7, 14, frozenset()))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    build_engine(DEMO)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    build_engine(DEMO)
    assert taken == [7]


# ---- memory of a step, and the host tier


@pytest.mark.parametrize(
    ("said", "usual", "wide"),
    [
        ({}, (64, 512), (256, 2048)),
        ({"max_num_seqs": 64}, (64, 512), (64, 2048)),
        ({"max_num_batched_tokens": 512}, (64, 512), (256, 512)),
        ({"max_num_batched_tokens": 48}, (48, 48), (48, 48)),
        ({"max_num_seqs": 1000}, (1000, 1000), (1000, 2048)),
        ({"max_num_seqs": 7, "max_num_batched_tokens": 100}, (7, 100), (7, 100)),
    ],
)
def test_what_is_said_of_a_step_is_kept(said: dict[str, int], usual: tuple[int, int], wide: tuple[int, int]) -> None:
    config = EngineConfig(**said)
    assert (step_limits(config), step_limits(config, wide=True)) == (usual, wide)
    limits = scheduler_settings(config, num_units=10, max_model_len=64)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == usual


def test_a_large_gpu_takes_wide_steps_and_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend()
    monkeypatch.setattr(backends, "find_backend", lambda _name: backend)
    monkeypatch.setattr(backend, "refusal", lambda *_: None)
    for gib, is_wide in ((1.2, False), (3.0, True), (80.0, True)):  # at 0.9, beside 1 GiB for a step
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda total=gib: (int(total * 2**30),) * 2)
        limits = plan_launch(replace(DEMO, dtype="float32", swap_space=0.0)).limits
        assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (WIDE_STEP if is_wide else USUAL_STEP)
    for free, host in ((8 * 2**30, 2 * 2**30), (512 * 2**30, 16 * 2**30), (0, 0)):
        monkeypatch.setattr(memory, "available_memory", lambda free=free: free)
        assert backend.swap_bytes() == host


@pytest.mark.parametrize(
    ("asked", "change", "drafts"),
    [
        ("auto", {}, True),
        ("auto", {"device": "cuda"}, False),
        ("on", {"device": "cuda"}, True),
        ("off", {}, False),
        ("on", {"droppable": True}, False),
    ],
)
def test_tokens_are_drafted_on_a_cpu_or_if_asked_for(asked: str, change: dict[str, Any], drafts: bool) -> None:
    plan = replace(plan_launch(EngineConfig()), **change)
    assert drafts_tokens(EngineConfig(speculation=asked), plan) is drafts


def test_on_a_cpu_the_host_tier_is_asked_for() -> None:
    assert plan_launch(DEMO).host_units == 0
    plan = plan_launch(replace(DEMO, swap_space=0.01))
    unit = memory.unit_bytes(plan.spec, plan.limits.block_size, torch.float32)
    assert plan.dtype == "float32" and plan.host_units == int(0.01 * 2**30) // unit > 0


@pytest.mark.parametrize(
    ("host", "on_cpu", "transferred", "line"),
    [
        (0, True, 0.0, "recomputed: the cache is in host memory already, and a block takes 16 ms to recompute"),
        (0, False, 0.0, "recomputed: a block takes 16 ms to recompute; see --swap-space"),
        (8, False, 1e-3, "restored from the host: a block takes 4 ms to copy and 16 ms to recompute"),
        (8, False, 1e-2, "recomputed: a block takes 40 ms to copy and 16 ms to recompute"),
    ],
)
def test_a_start_tells_which_representation_pays(host: int, on_cpu: bool, transferred: float, line: str) -> None:
    model = LatencyModel(prefill_tokens=1e-3, transferred=transferred)
    config = SchedulerConfig(num_units=8, max_model_len=64, host_units=host, unit_bytes=1)
    assert describe_costs(model, config, on_cpu=on_cpu) == f"preempted requests are {line}"
    hidden = replace(config, scratch_blocks=2, rho=2e-5)
    assert describe_costs(model, hidden, on_cpu=on_cpu).endswith("; 20 ms a step to run 1000 tokens from hidden state")
