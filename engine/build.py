"""The composition root: a configuration becomes a model, a runner and an Engine.

`plan_launch` decides everything that can be known without loading the weights (type, device, context, cache);
`build_engine` loads and joins. The only module besides engine.engine that knows both control and data plane.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import engine.models.demo
from engine.cache_profiling import BUS_RATE, CacheTiers, memcpy_rate
from engine.calibration import load_or_measure
from engine.client import EngineInfo
from engine.config import EngineConfig, SchedulerConfig
from engine.controller import make_controller
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution import memory
from engine.execution.cpu.native.library import load
from engine.execution.cpu.native.linear import Native
from engine.execution.cpu.native.runner import NativeRunner
from engine.execution.cpu.native.start import start
from engine.execution.cuda.assemble import Sizes, cache_room, make_runner, refusal
from engine.execution.runner import ModelRunner as TorchRunner
from engine.machine import read_processor
from engine.models.decoder import Decoder
from engine.models.families import family_named
from engine.models.heads import Heads
from engine.models.hub import resolve_model_folder
from engine.models.linear import make_linear
from engine.models.loader import load_weights
from engine.models.spec import ModelSpec, hidden_offer, load_spec, resolve_max_model_len
from engine.models.weights import LayerWeights, ModelWeights, torch_dtype
from engine.passing_thread import in_passing_thread
from engine.scheduling.output import ModelRunner
from engine.scheduling.policies import find_policy
from predictor.profile import ProfileKey
from predictor.slo import SLO, SLOError
from predictor.sweep import SweepLimits

HIDDEN_SHARE = 2  # at most a block of hidden state for every so many blocks of KV that fit: a quarter of the units
MIN_CONTEXT = 8  # tokens; the warm-up step alone takes most of it
_CUDA_STEP_BYTES = 2**30  # a guess, for the plan only: what a step needs beside weights and cache


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What will run. `num_blocks` of KV, each `block_size` tokens; on CUDA an estimate until the weights are loaded.
    `host_units` of the host tier; `scratch_blocks`: how many blocks a step may run from hidden state. `notes`:
    decisions that a user may not expect, one sentence each; `kernels`: what steps on a CPU run by, once known."""

    folder: Path
    spec: ModelSpec
    architecture: str
    device: str
    dtype: str
    max_model_len: int
    num_blocks: int
    block_size: int
    weight_bytes: int
    notes: tuple[str, ...]
    host_units: int = 0
    scratch_blocks: int = 0
    kernels: str = "torch"


def resolve_model(config: EngineConfig) -> Path:
    """The folder of the checkpoint, the packaged demo model's if none is named. Raises ModelLoadError."""
    if config.model:
        return resolve_model_folder(config.model)
    assert engine.models.demo.__file__ is not None
    return Path(engine.models.demo.__file__).parent / "weights"


def plan_launch(config: EngineConfig) -> LaunchPlan:
    """Decide how a configuration runs on this machine. Raises ConfigError for what cannot run."""
    folder = resolve_model(config)
    spec = load_spec(folder)
    device = _choose_device(config.device)
    dtype, notes = _choose_dtype(config, spec, device)
    weight_bytes = spec.num_parameters * torch_dtype(dtype).itemsize
    plan = LaunchPlan(
        folder=folder,
        spec=spec,
        architecture=family_named(spec.family).architecture,
        device=device,
        dtype=dtype,
        max_model_len=resolve_max_model_len(spec, config.max_model_len),
        num_blocks=0,
        block_size=config.block_size,
        weight_bytes=weight_bytes,
        notes=tuple(notes),
    )
    return _with_cache(plan, config, _estimate_cache_bytes(config, device, weight_bytes))


def _hidden_refusal(config: EngineConfig, spec: ModelSpec) -> str | None:
    """Why no request will be run from hidden state; None if some may be, empty if nobody asked."""
    if not config.hidden_cache:
        return ""
    if find_policy(config.online_policy).select is None:
        return f"--hidden-cache needs the policy apt or goodput, not {config.online_policy}"
    return hidden_offer(spec).refusal or None


def build_engine(
    config: EngineConfig, plan: LaunchPlan | None = None, say: Callable[[str], None] = lambda _line: None
) -> Engine:
    """Load the model and join it with a scheduler; `start` the result in an event loop. Raises ConfigError.

    `say` is told, a line each, what is measured and decided on the way.
    """
    plan = plan or plan_launch(config)
    (
        parse_slo(config),
        find_policy(config.online_policy),
    )  # what is wrong with them is said before the model is loaded
    work = partial(_build, config, plan, say)
    return in_passing_thread(work) if plan.device == "cpu" else work()


def _build(config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]) -> Engine:
    runner, plan = build_runner(config, plan, say)
    num_units = memory.UNITS_PER_BLOCK * plan.num_blocks
    return _join(config, plan, scheduler_config(config, plan, num_units), runner, say)


def build_runner(
    config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None] = lambda _line: None
) -> tuple[ModelRunner, LaunchPlan]:
    """Load the model; the plan comes back with the cache size that the device really has. Raises ConfigError."""
    device, dtype = torch.device(plan.device), torch_dtype(plan.dtype)
    native = None
    if device.type == "cpu":
        native = _start_native(config, plan, say)
        plan = replace(plan, kernels="torch" if native is None else f"native {native.level.name}")
    weights = load_weights(
        plan.spec,
        plan.folder,
        dtype=plan.dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        make=make_linear if native is None else native.linear,
    )
    if device.type == "cuda":
        reason = refusal(plan.spec, dtype, torch.cuda.get_device_capability(device))
        if reason is None:
            return _build_cuda_runner(config, plan, weights)
        plan = replace(plan, notes=(*plan.notes, f"slow attention by torch's own operators: {reason}"))
    decoder = Decoder(plan.spec, weights)
    if device.type == "cuda":
        room = memory.cuda_cache_bytes(device, config.gpu_memory_utilization, lambda: _largest_step(decoder, config))
        plan = _with_cache(plan, config, room)
    num_units = memory.UNITS_PER_BLOCK * plan.num_blocks
    make = TorchRunner if native is None else partial(NativeRunner, native=native)
    runner = make(
        decoder,
        num_units=num_units,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        device=device,
        dtype=dtype,
        scratch_blocks=plan.scratch_blocks,
        host_units=plan.host_units,
    )
    return runner, plan


def _build_cuda_runner(config: EngineConfig, plan: LaunchPlan, weights: ModelWeights) -> tuple[ModelRunner, LaunchPlan]:
    """The runner with our own kernels and CUDA graphs."""

    def sizes(plan: LaunchPlan) -> Sizes:
        return Sizes(config.block_size, config.max_num_seqs, config.max_num_batched_tokens, plan.max_model_len)

    room = cache_room(plan.spec, weights, sizes(plan), config.gpu_memory_utilization, plan.host_units)
    plan = _with_cache(plan, config, room)
    num_units = memory.UNITS_PER_BLOCK * plan.num_blocks
    runner = make_runner(
        plan.spec, weights, sizes(plan), num_units, scratch_blocks=plan.scratch_blocks, host_units=plan.host_units
    )
    return runner, plan


def parse_slo(config: EngineConfig) -> SLO:
    """What online requests are promised. Raises ConfigError."""
    try:
        return SLO.parse(config.slo)
    except SLOError as error:
        raise ConfigError(f"--slo: {error}") from None


def sweep_limits(scheduler: SchedulerConfig) -> SweepLimits:
    return SweepLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
        num_units=scheduler.num_units,
        block_size=scheduler.block_size,
    )


def profile_key(plan: LaunchPlan) -> ProfileKey:
    """What a latency profile of this launch holds for."""
    if plan.device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        processor = read_processor()
        device = f"{processor.name}, {torch.get_num_threads()} threads"
        if plan.kernels != "torch":
            device += f", {plan.kernels}"
    name = f"{plan.folder.name}, {plan.spec.num_parameters} parameters"
    return ProfileKey(name, device, plan.dtype, metadata.version("tidemill"))


def profile_folder(config: EngineConfig) -> Path:
    if config.profile_dir:
        return Path(config.profile_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill" / "profiles"


def _join(
    config: EngineConfig, plan: LaunchPlan, scheduler: SchedulerConfig, runner: ModelRunner, say: Callable[[str], None]
) -> Engine:
    """Profile, SLO and budget around the runner."""
    slo = parse_slo(config)
    copy_rate = memcpy_rate() if plan.device == "cpu" and scheduler.host_units else BUS_RATE
    tiers = CacheTiers(scheduler.scratch_blocks, scheduler.host_units, scheduler.unit_bytes, copy_rate)
    profile = load_or_measure(
        profile_folder(config),
        runner,
        sweep_limits(scheduler),
        plan.spec.vocab_size,
        profile_key(plan),
        config.profile_seconds,
        say,
        tiers,
    )
    core, colocation, tuner = make_controller(config, scheduler, profile, slo, profile_folder(config), say)
    return Engine(core, runner, _info(plan), colocation=colocation, tuner=tuner)


def _choose_device(asked: str) -> str:
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    return "cuda"


def _choose_dtype(config: EngineConfig, spec: ModelSpec, device: str) -> tuple[str, list[str]]:
    """The type of weights and cache, and a note when it is not the checkpoint's own."""
    if config.dtype != "auto":
        return config.dtype, []
    if device == "cpu" and not read_processor().is_fast(spec.dtype) and not _runs_natively(config):
        return "float32", [f"float32 instead of {spec.dtype}, which this processor has no fast instructions for"]
    if device == "cuda" and spec.dtype == "bfloat16" and torch.cuda.get_device_capability()[0] < 8:
        return "float16", ["float16 instead of bfloat16, which this GPU has no fast instructions for"]
    return spec.dtype, []


def _runs_natively(config: EngineConfig) -> bool:
    """Whether every step will run by the native kernels: they read half the bytes and compute in float32, so that half
    precision is the faster type on any processor. Steps from hidden state go by torch, which is slow in it."""
    return config.cpu_kernels == "auto" and not config.hidden_cache and not isinstance(load(), str)


def _estimate_cache_bytes(config: EngineConfig, device: str, weight_bytes: int) -> int:
    """Memory for the cache once the weights are loaded."""
    if device == "cpu":
        return memory.cpu_cache_bytes(max(0, memory.available_memory() - weight_bytes))
    free, total = torch.cuda.mem_get_info()
    return int(total * config.gpu_memory_utilization) - (total - free) - weight_bytes - _CUDA_STEP_BYTES


def _with_cache(plan: LaunchPlan, config: EngineConfig, cache_bytes: int) -> LaunchPlan:
    """The plan with its blocks and the context that they hold. Raises ConfigError."""
    spec, block_size, dtype = plan.spec, config.block_size, torch_dtype(plan.dtype)
    unit = memory.unit_bytes(spec, block_size, dtype)
    refusal = _hidden_refusal(config, spec)
    note = f"requests run from KV alone: {refusal}"
    if refusal and note not in plan.notes:  # a plan of the device's real memory follows one of an estimate
        plan = replace(plan, notes=(*plan.notes, note))
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
    else:
        blocks = memory.num_units(cache_bytes, unit, block_size, max_model_len=1) // memory.UNITS_PER_BLOCK
        if refusal is None:
            extra = memory.hidden_cache_bytes(
                spec, block_size, dtype, blocks // HIDDEN_SHARE, torch.device(plan.device)
            )
            blocks = memory.num_units(cache_bytes, unit, block_size, 1, extra) // memory.UNITS_PER_BLOCK
    plan = replace(
        plan,
        scratch_blocks=blocks // HIDDEN_SHARE if refusal is None else 0,
        host_units=memory.host_units(int(config.swap_space * 2**30), unit),
    )
    room = blocks * config.block_size
    if plan.max_model_len <= room:
        return replace(plan, num_blocks=blocks)
    if config.max_model_len is not None:
        raise ConfigError(f"--max-model-len {plan.max_model_len} does not fit: the cache holds {room} tokens")
    if room < MIN_CONTEXT:
        raise ConfigError(f"the cache holds {room} tokens, too few for any request: raise --num-gpu-blocks-override")
    note = f"context limited to the {room} tokens that the cache holds; the model allows {plan.max_model_len}"
    return replace(plan, num_blocks=blocks, max_model_len=room, notes=(*plan.notes, note))


def _start_native(config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]) -> Native | None:
    """The native kernels and their threads; None: steps run by torch, whose threads are set either way."""
    _use_cores(config.threads)
    if config.cpu_kernels == "torch":
        return None
    native = start(torch.get_num_threads(), torch_dtype(plan.dtype))
    if isinstance(native, str):
        say(f"steps run by torch's own operators: {native}")
        return None
    say(f"steps run by native kernels ({native.level.name}) on {native.team.threads} threads")
    return native


def _use_cores(threads: int | None) -> None:
    """One thread per physical core: two on one core share its vector units. OMP_NUM_THREADS has precedence."""
    if threads is not None:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(read_processor().cores)


def _largest_step(decoder: Decoder, config: EngineConfig) -> None:
    """The memory of the largest step: a full prefill, and logits with their sampling for every sequence."""

    heads = Heads(decoder.spec, decoder.weights, decoder.spec.max_context)

    def attend(_index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in heads.qkv(layer, x, rotary))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.squeeze(0).transpose(0, 1).reshape(len(x), -1)

    with torch.inference_mode():
        ids = torch.zeros(config.max_num_batched_tokens, dtype=torch.int64, device=decoder.weights.embedding.device)
        rotary = heads.rotary(ids)
        hidden = decoder.run(decoder.embed(ids, ids), attend)
        logits = decoder.logits(hidden[: config.max_num_seqs]).float()
        torch.log_softmax(logits, dim=-1).sort(dim=-1)


def scheduler_config(config: EngineConfig, plan: LaunchPlan, num_units: int) -> SchedulerConfig:
    return SchedulerConfig.of(
        config,
        num_units=num_units,
        max_model_len=plan.max_model_len,
        host_units=plan.host_units,
        unit_bytes=memory.unit_bytes(plan.spec, config.block_size, torch_dtype(plan.dtype)),
        scratch_blocks=plan.scratch_blocks,
        pipeline_depth=1 if plan.device == "cuda" else 0,
    )


def _info(plan: LaunchPlan) -> EngineInfo:
    return EngineInfo(
        max_model_len=plan.max_model_len,
        vocab_size=plan.spec.vocab_size,
        eos_token_ids=plan.spec.eos_token_ids,
        architecture=plan.architecture,
        dtype=plan.dtype,
        device=plan.device,
        num_parameters=plan.spec.num_parameters,
    )
