"""Plan a launch: decide everything that does not need the loaded weights.

Divide the memory of a launch among cache blocks, the host tier and states of recurrent layers.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import engine.models.demo
from engine.config import EngineConfig, is_wide, parse_adapters, parse_offload, scheduler_settings, step_limits
from engine.errors import ConfigError
from engine.execution import backend as backends
from engine.execution import memory
from engine.execution.backend import Backend
from engine.execution.offload import plan_offload
from engine.execution.plan import (
    BLOCKS,
    COMPACT,
    FLOAT8,
    INT4,
    NIBBLES,
    SMALL_FLOATS,
    STORED_FLOATS,
    STORED_INTEGERS,
    LaunchPlan,
)
from engine.execution.streamed_cache import BUFFERS
from engine.limits import BLOCK_SIZE, UNITS_PER_BLOCK, Limits, SchedulerConfig, most_blocks, most_unconfirmed
from engine.machine.folders import expand, user_folder
from engine.models import humming
from engine.models.hub import OWN, TRANSFORMERS, Choice, cached_folder, choose, is_hub_id, resolve_model_folder
from engine.models.lora import plan_adapter
from engine.models.packing import Packing
from engine.models.spec import ModelShape, ModelSpec, hidden_state_refusal, resolve_max_model_len
from engine.models.stored_tensors import stored_bytes
from engine.models.transformers_shape import TransformersShape
from engine.models.weights import torch_dtype
from engine.refusals import unsupported
from predictor.features import Reach

HIDDEN_SHARE = 2
"""KV blocks of the pool per scratch block for hidden state."""
READ_TOGETHER = 64
"""Keys that a kernel reads at once, so it may read as many before the window (`kernels.h`, TILE_KEYS)."""
MIN_CONTEXT = 8
"""Minimum context in tokens; the warm-up request needs most of it."""


def with_cache(plan: LaunchPlan, config: EngineConfig, cache_bytes: int) -> LaunchPlan:
    """Return the plan with its cache blocks and the context that fits. Raise ConfigError."""
    host_units, host_states = _host_room(config, plan)
    unit = unit_bytes(plan)
    plan = _with_snapshots(_with_states(plan, config, cache_bytes), config, cache_bytes, unit)
    streams, device_bytes = plan.offload is not None and bool(config.swap_space), cache_bytes
    if streams:  # `device_bytes` hold buffers of one layer, and as much scratch if every block can be hidden state
        parts = BUFFERS * (2 if config.hidden_cache else 1)
        host_units, cache_bytes = 0, min(host_units * unit, device_bytes * plan.spec.num_layers // parts)
    states = (plan.limits.max_num_seqs + plan.state_slots) * plan.spec.state_bytes
    spec, limits, dtype = plan.spec, plan.limits, torch_dtype(plan.dtype)
    refusal = _hidden_refusal(config, spec)
    note = f"requests run from KV alone: {refusal}"
    if refusal and note not in plan.notes:  # this runs twice: with estimated and with actual memory
        plan = replace(plan, notes=(*plan.notes, note))
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
    else:
        blocks = memory.num_units(cache_bytes, unit, states) // UNITS_PER_BLOCK
        if refusal is None and not streams:
            device, views = torch.device(plan.device), plan.offload is not None
            extra = memory.hidden_cache_bytes(
                plan.own, limits.block_size, dtype, blocks // HIDDEN_SHARE, device, streams=views
            )
            blocks = memory.num_units(cache_bytes, unit, extra) // UNITS_PER_BLOCK
    plan = replace(
        plan,
        cache_bytes=device_bytes,
        streams_cache=streams,
        scratch_blocks=(blocks * UNITS_PER_BLOCK if streams else blocks // HIDDEN_SHARE) if refusal is None else 0,
        host_units=host_units,
        host_state_slots=host_states,
        limits=replace(limits, num_units=blocks * UNITS_PER_BLOCK),
    )
    plan = replace(plan, limits=replace(plan.limits, window=_window(plan)))
    room = blocks * limits.block_size
    if limits.max_model_len <= room or _most_blocks(plan) <= blocks:
        return plan
    if config.max_model_len is not None:
        raise ConfigError(f"--max-model-len {limits.max_model_len} does not fit: the cache holds {room} tokens")
    if room < MIN_CONTEXT:
        raise ConfigError(f"the cache holds {room} tokens, too few for any request: raise --num-gpu-blocks-override")
    note = f"context limited to the {room} tokens that the cache holds; the model allows {limits.max_model_len}"
    return replace(plan, limits=replace(plan.limits, max_model_len=room), notes=(*plan.notes, note))


def _hidden_refusal(config: EngineConfig, spec: ModelShape) -> str | None:
    """Return why requests cannot run from hidden state; None if they can; empty without `--overload hidden`."""
    if not config.hidden_cache:
        return ""
    if not isinstance(spec, ModelSpec):
        return "transformers' modules keep the hidden state of their layers to themselves"
    if 0 < spec.short_context < (config.max_model_len or spec.max_context):
        return (
            f"stored hidden state does not tell longrope's set of factors (--max-model-len {spec.short_context} does)"
        )
    return hidden_state_refusal(spec)


def _window(plan: LaunchPlan) -> int:
    """Return the tokens for which a request keeps its blocks if every layer has a window; 0: all tokens.

    Engines with hidden state or droppable layers keep all blocks.
    """
    spec = plan.spec
    if not isinstance(spec, ModelSpec) or plan.scratch_blocks or plan.droppable:
        return 0
    windows = list(filter(None, spec.windows))
    return max(windows) + READ_TOGETHER if windows and len(windows) == spec.num_layers else 0


def _most_blocks(plan: LaunchPlan) -> float:
    """Return the maximum blocks that a request holds at the same time; infinite without a window."""
    limits, backend = plan.limits, backends.find_backend(plan.device)
    tokens = most_unconfirmed(limits.max_num_batched_tokens, backend.pipeline_depth, backend.ahead_seconds)
    return most_blocks(limits.window, limits.block_size, tokens) if limits.window else math.inf


def _with_states(plan: LaunchPlan, config: EngineConfig, cache_bytes: int) -> LaunchPlan:
    """Return the plan with at most as many requests per step as recurrent states fit into half of the cache memory.

    Raise ConfigError if that is fewer than `--max-num-seqs`.
    """
    each, rows = plan.spec.state_bytes, plan.limits.max_num_seqs
    if config.num_gpu_blocks_override is not None or rows * each <= max(cache_bytes // 2, each):
        return plan
    rows = max(1, cache_bytes // 2 // each)
    if config.max_num_seqs is not None:
        raise ConfigError(f"--max-num-seqs {config.max_num_seqs} does not fit: memory holds the states of {rows}")
    note = f"at most {rows} requests run at once: memory holds the states of no more"
    return replace(plan, limits=replace(plan.limits, max_num_seqs=rows), notes=(*plan.notes, note))


def _host_room(config: EngineConfig, plan: LaunchPlan) -> tuple[int, int]:
    """Return the units of the host tier and its slots for states. Recurrent models get both only on request."""
    each, unit, limits = plan.spec.state_bytes, unit_bytes(plan), plan.limits
    if not each:
        return _swap_bytes(config, plan) // unit, 0
    if config.swap_space is None:
        return 0, 0
    units = -(-memory.HOST_CHECKPOINT_TOKENS // limits.block_size) * UNITS_PER_BLOCK
    slots = _swap_bytes(config, plan) // (each + units * unit)
    return slots * units, slots


def _with_snapshots(plan: LaunchPlan, config: EngineConfig, cache_bytes: int, unit: int) -> LaunchPlan:
    """Return the plan with slots for snapshots of recurrent state, which prefix sharing needs.

    They take a part of the cache memory that the states of running requests leave.
    """
    each, limits = plan.spec.state_bytes, plan.limits
    if not each or not config.enable_prefix_caching:
        return plan
    left = max(0, cache_bytes - limits.max_num_seqs * each)
    if config.num_gpu_blocks_override is not None:
        return replace(plan, state_slots=memory.useful_slots(limits, config.num_gpu_blocks_override))
    wanted = memory.useful_slots(limits, left // unit // UNITS_PER_BLOCK)
    slots = min(wanted, left // memory.SNAPSHOT_PART // each)
    return replace(plan, state_slots=slots if slots >= memory.LEAST_SLOTS else 0)


def host_bytes(plan: LaunchPlan) -> int:
    """Return the bytes of the host tier."""
    return plan.host_units * unit_bytes(plan) + plan.host_state_slots * plan.spec.state_bytes


def unit_bytes(plan: LaunchPlan) -> int:
    """Return the bytes of a unit on every tier."""
    return memory.unit_bytes(plan.spec, plan.limits.block_size, plan.cell_type or torch_dtype(plan.dtype))


def _swap_bytes(config: EngineConfig, plan: LaunchPlan) -> int:
    """Return the bytes for the host tier."""
    backend = backends.find_backend(plan.device)
    if config.overload == "drop":
        return 0  # units of the host tier hold all layers
    if config.swap_space is None:
        return backend.swap_bytes()
    wanted, free = int(config.swap_space * 2**30), memory.available_memory()
    if backend.locks_pages and not plan.beside and wanted > free:  # locked pages stay in memory
        raise ConfigError(f"--swap-space {config.swap_space:g}: {gib(free)} of host memory are free")
    return wanted


def scheduler_config(config: EngineConfig, plan: LaunchPlan) -> SchedulerConfig:
    prefixes = bool(plan.state_slots) or not plan.spec.state_bytes
    return scheduler_settings(
        config,
        num_units=plan.limits.num_units,
        block_size=plan.limits.block_size,
        max_model_len=plan.limits.max_model_len,
        host_units=plan.host_units if prefixes else 0,
        unit_bytes=unit_bytes(plan),
        max_num_seqs=plan.limits.max_num_seqs,
        max_num_batched_tokens=plan.limits.max_num_batched_tokens,
        scratch_blocks=plan.scratch_blocks,
        window=plan.limits.window,
        pipeline_depth=backends.find_backend(plan.device).pipeline_depth,
        ahead_seconds=backends.find_backend(plan.device).ahead_seconds,
        state_slots=plan.state_slots,
        host_state_slots=plan.host_state_slots if prefixes else 0,
        state_bytes=plan.spec.state_bytes,
        short_context=plan.short_context,
        enable_prefix_caching=config.enable_prefix_caching and prefixes,
    )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def resolve_model(config: EngineConfig) -> Path:
    """Return the folder of the checkpoint; that of the packaged demo model by default. Raise ModelLoadError."""
    if config.model:
        return resolve_model_folder(config.model, config.revision)
    assert engine.models.demo.__file__ is not None
    return Path(engine.models.demo.__file__).parent / "weights"


def local_config(config: EngineConfig) -> EngineConfig | None:
    """Return the configuration with the local folder of its model; None if the model must be downloaded."""
    if not config.model or Path(config.model).expanduser().is_dir() or not is_hub_id(config.model):
        return config
    folder = cached_folder(config.model, config.revision)
    return None if folder is None else replace(config, model=str(folder), revision=None)


def profile_folder(config: EngineConfig) -> Path:
    if config.profile_dir:
        return expand(config.profile_dir, "--profile-dir")
    return user_folder("cache", "--profile-dir") / "profiles"


def plan_launch(config: EngineConfig, *, beside: bool = False) -> LaunchPlan:
    """Decide how a configuration runs on this machine. Raise ConfigError if it cannot run. `beside`: see LaunchPlan."""
    folder = resolve_model(config)
    backend = backends.find_backend(config.device)
    choice = choose(folder, config.model_impl, experts=backend.experts_refusal(config))
    spec = choice.shape
    if refusal := backend.config_refusal(config):
        raise ConfigError(refusal)
    dtype, note = (config.dtype, None) if config.dtype != "auto" else backend.choose_dtype(spec, config)
    foreign = choice.implementation == TRANSFORMERS
    _check_model(config, choice, backend, dtype)
    by = f"transformers' modules run {spec.architecture}: {choice.why}" if foreign else None
    by_kernels = config.kernels != "torch"
    refusal = backend.refusal(spec, dtype) if by_kernels else None
    slow = f"slow attention by torch's own operators: {refusal}" if refusal else None
    (quantization, library), unrounded = _quantization(config, choice, backend), None
    if quantization in (STORED_FLOATS, *COMPACT):
        if dtype != "bfloat16":
            note = f"bfloat16 instead of {dtype}: products of {quantization} layers take no other type"
        dtype = "bfloat16"
    if quantization == FLOAT8:
        if why := backend.float8_refusal():
            quantization, unrounded = "none", f"--quantization fp8: {why}; weights stay in {dtype}"
        else:
            dtype = "bfloat16"
    max_model_len = resolve_max_model_len(spec, config.max_model_len)
    weights = memory.weight_bytes(spec, torch_dtype(dtype), quantization, library=library)
    block = UNITS_PER_BLOCK * memory.unit_bytes(spec, BLOCK_SIZE, torch_dtype(dtype))
    room = backend.room(config.gpu_memory_utilization, beside=beside) - weights
    wide = is_wide(room // block * BLOCK_SIZE, max_model_len)
    plan = LaunchPlan(
        folder=folder,
        spec=spec,
        device=backend.name,
        dtype=dtype,
        limits=Limits(
            *step_limits(config, wide=wide),
            max_model_len,
            num_units=0,
            block_size=BLOCK_SIZE,
            reach=Reach.of(spec.windows),
        ),
        weight_bytes=weights,
        quantization=quantization,
        implementation=choice.implementation,
        int8_cache=config.kv_cache_dtype == "int8",
        memory_utilization=config.gpu_memory_utilization,
        droppable=config.overload == "drop",
        by_kernels=by_kernels,
        graphs=config.kernels == "auto",
        library=library,
        beside=beside,
        notes=tuple(filter(None, (by, *spec.notes, note, slow, unrounded, *_notes(spec, max_model_len)))),
    )
    plan = _with_adapters(_with_offload(_with_storage(plan, config), config), config)
    plan = replace(plan, limits=replace(plan.limits, padding=backend.padding(plan)))
    if (free := backend.room(config.gpu_memory_utilization, beside=beside)) and plan.held_bytes > free:
        raise ConfigError(f"{_sizes(plan, free)}; {_ways(plan, config, backend)}")
    return with_cache(plan, config, backend.cache_bytes(plan, None))


def _sizes(plan: LaunchPlan, free: int) -> str:
    """Return how the memory of weights compares with the memory of the device."""
    packing, why = plan.spec.packing, ""
    if packing is not None:
        part = "" if plan.own.experts is None or plan.library else "its experts are "
        how = f": {part or 'it is '}unpacked to {plan.dtype}" if part or plan.quantization == "none" else ""
        why = f" ({packing.name}{how})"
    return f"the weights take {gib(plan.held_bytes)}{why}, and the GPU has {gib(free)} for weights and cache"


def _ways(plan: LaunchPlan, config: EngineConfig, backend: Backend) -> str:
    """Return the remedies of a user whose weights do not fit on the device."""
    ways = ["use a smaller checkpoint or a larger GPU"]
    if isinstance(plan.spec, ModelSpec) and plan.spec.experts is None:
        if plan.offload is None:
            ways.append("set --offload-weights auto, which streams layers and serves batches")
        if plan.quantization == "none" and plan.spec.packing is None and backend.float8_refusal() is None:
            smaller = memory.weight_bytes(plan.spec, torch_dtype("bfloat16"), FLOAT8)
            ways.append(f"set --quantization fp8 ({gib(smaller)})")
    packing, has_experts = plan.spec.packing, plan.implementation == OWN and plan.own.experts is not None
    if packing is not None and has_experts and humming.is_missing() and humming.multiplies(packing):
        kind = NIBBLES if packing.nibbles else SMALL_FLOATS if packing.small_floats else BLOCKS
        kept = memory.weight_bytes(plan.spec, torch_dtype("bfloat16"), kind, library=True)
        ways.append(f"install humming-kernels (the extra gpu), which keeps the experts in their bits ({gib(kept)})")
    if config.gpu_memory_utilization < 0.9:
        ways.append("raise --gpu-memory-utilization")
    return ", or ".join(ways)


def out_of_memory(plan: LaunchPlan, config: EngineConfig, said: str) -> ConfigError:
    """Return the error of a start that ran out of device memory. `said`: the message of torch."""
    backend = backends.find_backend(plan.device)
    held = f"the weights take {gib(plan.held_bytes)}"
    return ConfigError(
        f"the GPU has no memory left while the model is loaded; {held}: {said.partition('. GPU')[0]}; "
        f"{_ways(plan, config, backend)}, or lower --gpu-memory-utilization if other programs use the GPU"
    )


def _check_model(config: EngineConfig, choice: Choice, backend: Backend, dtype: str) -> None:
    """Raise ConfigError for a flag that the model or the device does not support."""
    spec, foreign = choice.shape, choice.implementation == TRANSFORMERS
    by_modules = f"transformers' modules run {spec.architecture}"
    if foreign and config.kv_cache_dtype != "auto":
        raise unsupported(f"--kv-cache-dtype {config.kv_cache_dtype}", by_modules)
    if foreign and config.quantization != "none":
        raise unsupported(f"--quantization {config.quantization}", by_modules)
    if spec.state_bytes and not config.enable_prefix_caching and config.swap_space:
        raise unsupported(
            "--swap-space", f"{spec.architecture} has recurrent layers", "remove --no-enable-prefix-caching"
        )
    if config.overload == "drop" and (refusal := _drop_refusal(choice, backend, dtype)):
        raise unsupported("--overload drop", refusal)


def _drop_refusal(choice: Choice, backend: Backend, dtype: str) -> str | None:
    """Return why engines of this model cannot drop layers on this machine; None if they can."""
    spec = choice.shape
    if choice.implementation == TRANSFORMERS:
        return f"transformers' modules run {spec.architecture}"
    if spec.num_layers < 2:
        return f"{spec.architecture} has one layer"
    return backend.drop_refusal(spec, dtype)


def _floats_refusal(config: EngineConfig, packing: Packing, backend: Backend) -> str | None:
    """Return why our layers cannot compute with the stored 8-bit floats; None if they can.

    An empty string means that no note is needed.
    """
    if not packing.floats:
        return "products of blocks are of 128 x 128, on compute capability 9.0" if packing.blocks else ""
    if config.dtype not in ("auto", "bfloat16"):
        return f"products are of bfloat16, not of {config.dtype}"
    return backend.float8_refusal()


def _notes(spec: ModelShape, max_model_len: int) -> Iterator[str]:
    """Yield notes on the memory of recurrent layers and on rotary embeddings that depend on the longest context."""
    if spec.state_bytes:
        size = f"{spec.state_bytes / 2**20:.3g} MiB"
        yield f"recurrent layers keep up to {size} of each running request, and as much of each prefix in the cache"
    if 0 < spec.short_context < max_model_len:
        yield (
            f"longrope: the short factors apply while prompt and max_tokens fit into {spec.short_context} tokens, the "
            "long ones to all other requests, also to those without max_tokens"
        )


def _quantization(config: EngineConfig, choice: Choice, backend: Backend) -> tuple[str, bool]:
    """Return the quantization of the linear layers, and whether a library multiplies them (see LaunchPlan).

    It is the requested one, or else that of the checkpoint if the backend computes with its 8 or 4 bits directly.
    Streamed layers, and integers with `--overload hidden`, use unpacked weights.
    """
    packing, streams = choice.shape.packing, parse_offload(config.offload_weights) is not None
    if config.quantization != "none" or packing is None:
        return config.quantization, False
    if config.load_format == "dummy" and not packing.nibbles:
        return "none", False
    if choice.implementation != OWN or streams:
        return "none", False
    if packing.floats and _floats_refusal(config, packing, backend) is None:
        return STORED_FLOATS, False
    if config.dtype in ("auto", "bfloat16") and (packing.nibbles or packing.blocks or packing.small_floats):
        library = config.kernels != "torch" and backend.has_library() and humming.multiplies(packing)
        has_experts = isinstance(choice.shape, ModelSpec) and choice.shape.experts is not None
        # experts are unpacked anyway, and beside them the other layers need little memory
        unpacked = 0 if has_experts else memory.weight_bytes(choice.shape, torch_dtype("bfloat16"), "none")
        if library and packing.small_floats:
            return SMALL_FLOATS, True
        if library and packing.blocks and (has_experts or backend.float8_refusal() is not None):
            return BLOCKS, True
        if backend.keeps_bits(packing, unpacked, config.gpu_memory_utilization):
            return (NIBBLES, library) if packing.nibbles else (BLOCKS, False)
        if packing.blocks and not has_experts and backend.float8_refusal() is None:
            return FLOAT8, False  # a scale for each output in place of each block, as the device multiplies them
    if not backend.multiplies_integers or config.hidden_cache:
        return "none", False
    return INT4 if packing.nibbles else STORED_INTEGERS if packing.integers else "none", False


def _with_storage(plan: LaunchPlan, config: EngineConfig) -> LaunchPlan:
    """Return the plan with a note on the size of a quantized checkpoint. Raise ModelLoadError if files are missing."""
    packing = plan.spec.packing
    if packing is None or config.load_format == "dummy":
        return plan
    note = f"{packing.name}: {gib(stored_bytes(plan.folder))} on disk, {gib(plan.weight_bytes)} in memory"
    if plan.quantization == FLOAT8:
        note += ", as they are stored" if packing.floats else ", unpacked at load and rounded again"
    if plan.quantization == STORED_FLOATS:
        note += f", {'with the scales of inputs that are stored' if packing.static else 'a scale for each token'}"
    if plan.quantization in COMPACT:
        note += ", as they are stored" + (
            f"; experts unpacked to {plan.dtype}" if plan.own.experts and not plan.library else ""
        )
    if plan.quantization == INT4:
        note += ", in 4 bits as they are stored" if plan.stored else ", unpacked at load and rounded again"
    if plan.quantization == "none":
        note += f", unpacked to {plan.dtype} at load"
        backend = backends.find_backend(plan.device)
        rounds = backend.multiplies_integers
        if not rounds and (why := _floats_refusal(config, packing, backend)):
            note += f": {why}"
        if packing.shuffled and rounds:
            note += ": its groups are of inputs that do not lie side by side (act-order)"
        if rounds and plan.implementation == OWN and not config.hidden_cache:
            smaller = memory.weight_bytes(plan.spec, torch_dtype(plan.dtype), "int8")
            note += f" ({gib(smaller)} with --quantization int8)"
    return replace(plan, notes=(*plan.notes, note))


def _with_adapters(plan: LaunchPlan, config: EngineConfig) -> LaunchPlan:
    """Return the plan with its LoRA adapters. Raise ConfigError, or ModelLoadError for an unsupported adapter."""
    if not config.lora:
        return plan
    if isinstance(plan.spec, TransformersShape) and plan.spec.recurrent:
        raise unsupported("--lora", f"{plan.spec.architecture} has recurrent layers")
    adapters = tuple(plan_adapter(each, plan.spec) for each in parse_adapters(config.lora))
    size = 4 * sum(each.num_parameters for each in adapters)  # native kernels may need float32
    how = None if plan.implementation == TRANSFORMERS else backends.find_backend(plan.device).adapted_steps(plan)
    plan = replace(plan, adapters=adapters, adapter_bytes=size)
    if how is None:
        return plan
    return replace(plan, notes=(*plan.notes, f"steps with rows of adapters run {how}"))


def _with_offload(plan: LaunchPlan, config: EngineConfig) -> LaunchPlan:
    """Return the plan with the layers that stream. Raise ConfigError.

    Steps are then large by default, because their requests share the cost of the stream.
    """
    wanted = parse_offload(config.offload_weights)
    if wanted is None:
        return plan
    if plan.implementation == TRANSFORMERS:
        raise unsupported("--offload-weights", f"transformers' modules run {plan.spec.architecture}")
    budget = backends.find_backend(plan.device).weight_room(plan) if math.isinf(wanted) else int(wanted * 2**30)
    offload = plan_offload(plan.own, torch_dtype(plan.dtype).itemsize, plan.quantization, budget)
    if offload is None:
        return plan
    seqs, tokens = step_limits(config, wide=True)
    limits = replace(plan.limits, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    note = (
        f"{offload}: {gib(offload.held_bytes)} of weights stay, {gib(offload.streamed_bytes)} pass through in every "
        f"step, which holds up to {limits.max_num_seqs} requests and {limits.max_num_batched_tokens} tokens"
    )
    return replace(plan, offload=offload, limits=limits, notes=(*plan.notes, note))
