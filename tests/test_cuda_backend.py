"""The CUDA backend: refusals, the size of the cache, and its use by engine.build."""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dry_device import Driver as DryDriver
from fake_cuda_driver import fake_memory
from test_runner import reference_logits
from tiny_models import llama_config, model_folder, write_config

from engine import build
from engine.api import SamplingParams
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution import memory, stream
from engine.execution.backend import find_backend
from engine.execution.cpu.device import TorchDevice
from engine.execution.cuda import backend
from engine.execution.cuda.buffers import GRAPH_TOKENS, Buckets
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.mapped_layers import MappedLayers
from engine.execution.plan import LaunchPlan
from engine.execution.runner import Runner
from engine.machine.facts import Processor
from engine.models.attention import HeadSizes
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.spec import load_spec
from engine.scheduling.output import Chunk, NewRequest, SchedulerOutput
from engine.triton_kernels import twins


def test_what_the_kernels_cannot_run_is_refused() -> None:
    spec = load_spec(model_folder("llama-gqa2"))
    assert backend.kernel_refusal(HeadSizes.of(spec), torch.bfloat16, (8, 0)) is None
    assert "older than 8.0" in str(backend.kernel_refusal(HeadSizes.of(spec), torch.bfloat16, (7, 5)))
    odd = dataclasses.replace(spec, head_dim=20)
    assert "multiple of 16 bytes" in str(backend.kernel_refusal(HeadSizes.of(odd), torch.bfloat16, (9, 0)))
    for size in (8, 12, 512):  # a product of the tensor cores is 16 wide
        small = dataclasses.replace(spec, head_dim=size)
        for dtype in (torch.bfloat16, torch.float32):
            assert "16 up to 256" in str(backend.kernel_refusal(HeadSizes.of(small), dtype, (9, 0)))
    for heads, fits in ((64, torch.bfloat16), (32, torch.float32)):
        grouped = dataclasses.replace(spec, num_heads=heads, num_kv_heads=1)
        assert backend.kernel_refusal(HeadSizes.of(grouped), fits, (9, 0)) is None
        wider = dataclasses.replace(grouped, num_heads=heads + 1)
        assert f"more than {heads} query heads" in str(backend.kernel_refusal(HeadSizes.of(wider), fits, (9, 0)))


def test_a_machine_on_which_triton_launches_nothing_takes_the_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, with one that fails, and with a driver that does not load."""
    spec = load_spec(model_folder("llama-gqa2"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def refusal() -> str | None:
        backend.launch_refusal.cache_clear()
        return backend.CudaBackend().refusal(spec, "bfloat16")

    driver = importlib.import_module("triton.runtime.driver").driver
    monkeypatch.setattr(driver, "_active", DryDriver(90))
    assert refusal() is None
    with monkeypatch.context() as patch:
        patch.delenv("CC", raising=False)
        patch.setenv("PATH", "/nowhere")
        assert "needs a C compiler" in str(refusal())
    monkeypatch.setattr(DryDriver, "get_current_target", lambda _: 1 / 0)
    assert "Python's headers" in str(refusal()) and "division by zero" in str(refusal())
    backend.launch_refusal.cache_clear()


@pytest.mark.parametrize(("cores", "sleeps"), [(2, True), (16, False)])
def test_who_waits_for_the_device_sleeps_where_cores_are_few(
    monkeypatch: pytest.MonkeyPatch, cores: int, sleeps: bool
) -> None:
    made: list[bool] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            made.append(blocking)

        def record(self, _stream: object) -> None: ...

    monkeypatch.setattr(stream, "read_processor", lambda: Processor("", cores, 2 * cores, frozenset()))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream._few_cores.cache_clear()
    here = stream.DeviceStream(torch.device("cpu"))
    here.stream = object()  # type: ignore[assignment]
    here.mark()
    stream._few_cores.cache_clear()
    assert made == [sleeps]


def test_host_memory_that_is_not_there_is_refused_at_once(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**10, 10**10))
    monkeypatch.setattr(memory, "available_memory", lambda: 2**30)
    with pytest.raises(ConfigError, match=r"--swap-space 1\.5: 1\.00 GiB of host memory are free"):
        build.plan_launch(EngineConfig(swap_space=1.5, device="cpu"))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engine.build take the CUDA backend on the CPU."""
    monkeypatch.setattr("engine.execution.backend.find_backend", lambda _name: backend.CudaBackend())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(backend, "launch_refusal", lambda: None)
    monkeypatch.setattr(backend, "triton_kernels", lambda: twins)


def tiny(folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> EngineConfig:
    """A model of random weights in small steps, without the self-test."""
    write_config(folder, llama_config() if model is None else model)
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 64,
        "max_model_len": 64, "self_test": False,
    }  # fmt: skip
    return EngineConfig(model=str(folder), **options | changes)


def plan_on_cpu(config: EngineConfig) -> LaunchPlan:
    """The plan with an estimate of this machine's memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.execution.backend.find_backend", find_backend)
        return build.plan_launch(config)


@pytest.mark.usefixtures("on_a_gpu")
def test_the_cache_gets_what_step_and_graphs_leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The seam in engine.build, with the memory of a device made up: 3000 bytes for the largest step."""
    config = tiny(tmp_path)
    plan = plan_on_cpu(config)
    weights = load_weights(plan.spec, tmp_path, dtype="float32", load_format="dummy")
    profiled = []

    def room(device: torch.device, utilization: float, profile: Callable[[], object]) -> int:
        profile()
        profiled.append(utilization)
        return 110_000_000

    monkeypatch.setattr(memory, "cuda_cache_bytes", room)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3500)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    captured: list[CudaDevice] = []
    monkeypatch.setattr(CudaDevice, "_capture", lambda self: captured.append(self))
    runner, sized = build.build_runner(config, plan)
    assert isinstance(runner, Runner) and captured == [runner.device] and profiled == [0.9]
    unit = memory.unit_bytes(plan.spec, 16, torch.float32)
    num_shapes = len(Buckets(4, 64).all_shapes())
    bytes_left = 110_000_000 - backend.graph_bytes(num_shapes, 3000, 64)
    assert sized.num_blocks == memory.num_units(bytes_left, unit) // 2
    new = NewRequest(0, "a", (1, 2, 3), 3, SamplingParams(max_tokens=2, temperature=0.0), _kv(2 * sized.num_blocks - 2))
    output = runner.launch(SchedulerOutput(0, (Chunk(0, 0, 3, True),), (new,)))()
    reference = reference_logits(Decoder(plan.spec, weights), [1, 2, 3])
    assert output.token_ids == [int(reference.argmax())]


@pytest.mark.usefixtures("on_a_gpu")
def test_layers_that_can_be_dropped_are_the_pools_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a model with biases, whose graphs know where all of it lies; no host tier, in contrast to other GPUs."""
    model = {**llama_config(num_hidden_layers=4), "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config = tiny(tmp_path, model, overload="drop", num_gpu_blocks_override=20)
    monkeypatch.setattr(memory, "cuda_cache_bytes", lambda *_: 110_000_000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend, "Memory", lambda _device: fake_memory()[0])
    monkeypatch.setattr(backend.CudaBackend, "swap_bytes", lambda _self: 2**20)
    monkeypatch.setattr(CudaDevice, "_capture", lambda _self: None)
    runner, sized = build.build_runner(config, plan_on_cpu(config))
    layers = runner.device.decoder.weights.layers
    assert isinstance(layers, MappedLayers) and sized.host_units == 0 and not len(runner.device.pool.host_units)
    staged = backend.CudaBackend().make_staged(config, sized, runner)
    places = [[part.data_ptr() for part in (layer.qkv._weight, layer.qkv._bias, layer.out._weight)] for layer in layers]
    entry = (CacheEntry(CacheKind.KV, Tier.DEVICE, (0, 1)),)
    new = NewRequest(0, "a", (1, 2, 3), 3, SamplingParams(max_tokens=2, temperature=0.0), entry)
    step = SchedulerOutput(0, (Chunk(0, 0, 3, True),), (new,))
    whole = staged.launch(step)().token_ids
    staged.drop(range(2, 4), 60)
    staged.restore(40)
    assert staged.launch(step)().token_ids == whole
    assert places == [
        [part.data_ptr() for part in (layer.qkv._weight, layer.qkv._bias, layer.out._weight)] for layer in layers
    ]


@pytest.mark.usefixtures("on_a_gpu")
def test_why_a_gpu_cannot_drop_layers_is_said_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tiny(tmp_path, device="cuda", overload="drop")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**34, 2**34))
    monkeypatch.setattr(backend, "mapping_refusal", lambda _ordinal: "no such driver")
    with pytest.raises(ConfigError, match="--overload drop is not supported here: no such driver"):
        build.plan_launch(config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ConfigError, match=r"--overload drop .*: the CUDA kernels do not run this .* older than 8.0"):
        build.plan_launch(config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(backend, "mapping_refusal", lambda _ordinal: None)
    assert build.plan_launch(config).droppable


@pytest.mark.usefixtures("on_a_gpu")
def test_a_kernel_that_fails_at_start_is_named_and_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line is told, shown by /ready, and in the key of the latency profile; `torch` and `no-graphs` are obeyed."""
    stored = str(tmp_path / "profiles")
    config = tiny(tmp_path, num_gpu_blocks_override=20, profile_dir=stored, swap_space=0.0, self_test=True)
    wrong: Any = ModuleType("wrong")
    vars(wrong).update({name: getattr(twins, name) for name in twins.__all__})
    wrong.silu_and_mul = lambda x: 2 * twins.silu_and_mul(x)
    monkeypatch.setattr(backend, "triton_kernels", lambda: wrong)
    monkeypatch.setattr(memory, "cuda_cache_bytes", lambda *_: 110_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**10, 10**10))
    said: list[str] = []
    config = replace(config, kernels="no-graphs")
    runner, plan = build.build_runner(config, plan_on_cpu(config), said.append)
    assert plan.twins == ("silu_and_mul",) and plan.faults == tuple(line for line in said if "the kernel s" in line)
    assert "torch's silu_and_mul" in backend.CudaBackend().fingerprint(plan)
    new = NewRequest(0, "a", (1, 2, 3), 3, SamplingParams(max_tokens=2, temperature=0.0), _kv(0))
    output = runner.launch(SchedulerOutput(0, (Chunk(0, 0, 3, True),), (new,)))()
    assert output.token_ids == [int(reference_logits(runner.device.decoder, [1, 2, 3]).argmax())]
    plan = replace(build.plan_launch(replace(config, kernels="torch")), device="cpu")
    runner, plan = build.build_runner(replace(config, kernels="torch"), plan)
    assert isinstance(runner.device, TorchDevice) and not plan.faults


@pytest.mark.usefixtures("on_a_gpu")
def test_a_plan_beside_the_engine_that_it_replaces_counts_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The running engine has all but 7 of 80 GiB, and the host tier."""
    config = tiny(tmp_path, swap_space=8.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7 * 2**30, 80 * 2**30))
    monkeypatch.setattr(memory, "available_memory", lambda: 2**30)
    with pytest.raises(ConfigError):
        build.plan_launch(config)
    assert build.plan_launch(config, beside=True).cache_bytes > 60 * 2**30


@pytest.mark.usefixtures("on_a_gpu")
def test_what_the_kernels_refuse_torch_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An old GPU: the largest step is measured without kernels, and the note says why it is slow."""
    config = tiny(tmp_path)
    steps = []

    def room(device: torch.device, utilization: float, profile: Callable[[], object]) -> int:
        steps.append(profile())
        return 110_000_000

    monkeypatch.setattr(memory, "cuda_cache_bytes", room)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**10, 10**10))
    plan = build.plan_launch(config)
    assert any("slow attention" in note and "older than 8.0" in note for note in plan.notes)
    weights = load_weights(plan.spec, tmp_path, dtype="float32", load_format="dummy")
    room_for_cache = backend.CudaBackend().cache_bytes(plan, weights)
    assert (len(steps), room_for_cache) == (1, 110_000_000)
    runner, _plan = backend.CudaBackend().make_runner(EngineConfig(), plan, weights)
    assert isinstance(runner, Runner) and isinstance(runner.device, TorchDevice)


@pytest.mark.usefixtures("on_a_gpu")
def test_scratch_and_host_tier_are_made_and_accounted_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model with as many KV heads as heads, under a policy that may run from hidden state."""
    model = llama_config(num_key_value_heads=4)
    config = tiny(tmp_path, model, swap_space=0.01, online_policy="apt", overload="hidden")
    plan = plan_on_cpu(config)
    unit, room = memory.unit_bytes(plan.spec, 16, torch.float32), 4_000_000

    def cache_bytes(device: torch.device, utilization: float, profile: Callable[[], object]) -> int:
        return room + backend.graph_bytes(num_shapes, 0, 64)

    num_shapes = len(Buckets(4, 64).all_shapes())
    monkeypatch.setattr(memory, "cuda_cache_bytes", cache_bytes)
    monkeypatch.setattr(CudaDevice, "_capture", lambda self: None)
    monkeypatch.setattr("engine.execution.cuda.swap.STAGING_BYTES", 4 * unit)
    runner, sized = build.build_runner(config, plan)
    assert isinstance(runner, Runner) and sized.notes == plan.notes
    pool = runner.device.pool
    assert runner.device.num_shapes == num_shapes
    assert (pool.scratch_blocks, len(pool.host_units)) == (sized.scratch_blocks, sized.host_units)
    assert sized.host_units == int(0.01 * 2**30) // unit > 4
    scratch = memory.scratch_bytes(plan.spec, 16, torch.float32, sized.scratch_blocks)
    taken = (2 * sized.num_blocks + 1 + 4) * unit + scratch
    assert sized.scratch_blocks > 0 and room - 3 * unit - scratch < taken <= room + scratch


def _kv(first: int) -> tuple[CacheEntry, ...]:
    return (CacheEntry(CacheKind.KV, Tier.DEVICE, (first, first + 1)),)


def test_graphs_share_memory_and_large_steps_need_none() -> None:
    assert backend.graph_bytes(0, 1000, 64) == 1000
    assert backend.graph_bytes(0, 1000, 4 * GRAPH_TOKENS) == 250
    assert backend.graph_bytes(3, 0, 64) == 3 * backend.graph_bytes(1, 0, 64) > 0


def test_a_gpu_without_a_working_driver_is_not_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`auto` would load a model for a GPU into host memory. A build of torch for CPUs is a choice."""
    (driver := tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May\n")
    monkeypatch.setattr("engine.machine.facts._DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert find_backend("auto").name == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"1 with driver 535\.183\.01, .* CUDA 13\.0; .* set --device cpu"):
        find_backend("auto")
    assert find_backend("cpu").name == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_backend("auto").name == "cpu"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_device_without_memory_ends_the_start_with_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB.\nmore"
        )

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**10, 10**10))
    monkeypatch.setattr("engine.build.runner._load", full)
    monkeypatch.setattr("engine.build.runner._test_family", lambda *_: None)
    expected = r"no memory left .* weights take 0.00 GiB: CUDA out of memory. Tried to allocate 2.00 GiB; use a smaller"
    with pytest.raises(ConfigError, match=expected):
        build.build_engine(tiny(tmp_path))


def test_another_maker_s_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "built for ROCm; only NVIDIA GPUs" in str(backend.CudaBackend().absence())
