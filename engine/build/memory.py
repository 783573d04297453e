"""Divide the memory of a launch among cache blocks, the host tier and states of recurrent layers."""

import math
from dataclasses import replace

import torch

from engine.config import EngineConfig, scheduler_settings
from engine.errors import ConfigError
from engine.execution import backend as backends
from engine.execution import memory
from engine.execution.plan import LaunchPlan
from engine.limits import UNITS_PER_BLOCK, SchedulerConfig, most_blocks, most_unconfirmed
from engine.models.spec import ModelShape, ModelSpec, hidden_state_refusal
from engine.models.weights import torch_dtype

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
    states = (plan.limits.max_num_seqs + plan.state_slots) * plan.spec.state_bytes
    spec, limits, dtype = plan.spec, plan.limits, torch_dtype(plan.dtype)
    refusal = _hidden_refusal(config, spec)
    note = f"requests run from KV alone: {refusal}"
    if refusal and note not in plan.notes:  # this runs twice: with estimated and with actual memory
        plan = replace(plan, notes=(*plan.notes, note))
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
    else:
        blocks = memory.num_units(cache_bytes, unit, limits.block_size, 1, states) // UNITS_PER_BLOCK
        if refusal is None:
            device, streams = torch.device(plan.device), plan.offload is not None
            extra = memory.hidden_cache_bytes(
                plan.own, limits.block_size, dtype, blocks // HIDDEN_SHARE, device, streams=streams
            )
            blocks = memory.num_units(cache_bytes, unit, limits.block_size, 1, extra) // UNITS_PER_BLOCK
    plan = replace(
        plan,
        cache_bytes=cache_bytes,
        scratch_blocks=blocks // HIDDEN_SHARE if refusal is None else 0,
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
        return memory.host_units(_swap_bytes(config, plan), unit), 0
    if config.swap_space is None:
        return 0, 0
    units = -(-memory.HOST_CHECKPOINT_TOKENS // limits.block_size) * UNITS_PER_BLOCK
    slots = memory.host_units(_swap_bytes(config, plan), each + units * unit)
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
        stream_seconds=plan.stream_seconds,
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
