"""How many cache units fit on the device: after the weights, and beside what a step needs.

CPU: a share of the memory that is available to this process (container limits counted), capped. CUDA: what
`gpu_memory_utilization` of the whole device leaves after weights and the peak of a profiling pass. What running from
hidden state needs beside the units comes out of the same memory; the host tier has a size of its own, given in bytes.
"""

from collections.abc import Callable

import torch

from engine.config import CHECKPOINT_TOKENS
from engine.errors import ConfigError
from engine.execution.plan import STORED
from engine.machine.facts import available_memory as available_memory
from engine.models.byte_cells import slice_elements
from engine.models.sharding import head_ranks
from engine.models.spec import ModelShape, ModelSpec
from predictor.limits import UNITS_PER_BLOCK, Limits

CPU_SHARE = 0.25
CPU_LIMIT = 4 * 1024**3
SWAP_SHARE, SWAP_LIMIT = 0.25, 16 * 1024**3
CHECKPOINT_PART = 4
"""One part in so many of what the rows' states leave of the cache's memory is the most that checkpoints take."""
HOST_CHECKPOINT_TOKENS = 4 * CHECKPOINT_TOKENS
"""Tokens of the host tier to a state there: a chat comes back for its last one or two."""
LEAST_SLOTS = 4
"""With fewer each prompt's states would push out those of the one before."""
WEIGHT_SHARE = 0.75
"""Of the free memory, what weights may take before some of them stream (`--offload-weights auto`)."""


def unit_bytes(spec: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """One block of K, or of V, for all layers, in a cache of this type."""
    return spec.num_layers * slice_elements(block_size, spec.num_kv_heads, spec.head_dim, dtype) * dtype.itemsize


def weight_bytes(spec: ModelShape, dtype: torch.dtype, quantization: str, ranks: int = 1) -> int:
    """All weights; those of one of several ranks, where `spec` has its layers' sizes, and its part of the head.
    Quantised, a linear layer's are bytes, with a scale and a sum of 4 bytes for each output; its bias, norms and
    embeddings stay in `dtype`, a tied head beside its embedding. Beside stored values the head is in `dtype`, as such
    checkpoints have it."""
    if not isinstance(spec, ModelSpec):
        assert quantization == "none", "only layers of ours are quantised"
        return spec.num_parameters * dtype.itemsize
    hidden, ffn, vocab = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    head = vocab // head_ranks(vocab, ranks)
    if quantization == "none":
        elsewhere = 0 if spec.tie_word_embeddings else (vocab - head) * hidden
        return (spec.num_parameters - elsewhere) * dtype.itemsize
    up = ffn * (2 if spec.gated_mlp else 1)
    layers = ((spec.q_size + 2 * spec.kv_size, hidden), (hidden, spec.q_size), (up, hidden), (hidden, ffn))
    rounds_head = quantization not in STORED
    every = [*layers * spec.num_layers, *([(head, hidden)] if rounds_head else [])]
    dense = spec.num_layers * sum(n * k for n, k in layers)
    if rounds_head and not spec.tie_word_embeddings:
        dense += vocab * hidden
    return sum(n * (k + 8) for n, k in every) + (spec.num_parameters - dense) * dtype.itemsize


def scratch_bytes(spec: ModelShape, block_size: int, dtype: torch.dtype, scratch_blocks: int) -> int:
    """K and V of so many blocks in one layer: every layer uses the same."""
    return scratch_blocks * UNITS_PER_BLOCK * unit_bytes(spec, block_size, dtype) // spec.num_layers


def projection_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the K and V parts of all projections, packed once more for hidden state (`Heads`). The CPU packs types
    of 16 bits; others are views of the weights."""
    if dtype.itemsize != 2:
        return 0
    return spec.num_layers * 2 * spec.kv_size * spec.hidden_size * dtype.itemsize


def hidden_cache_bytes(
    spec: ModelSpec,
    block_size: int,
    dtype: torch.dtype,
    scratch_blocks: int,
    device: torch.device,
    *,
    streams: bool = False,
) -> int:
    """All device memory that running from hidden state takes beside cache units; 0 without scratch. Where layers
    stream, none is packed and projections are views."""
    if not scratch_blocks:
        return 0
    copies = projection_bytes(spec, dtype) if device.type == "cpu" and not streams else 0
    return scratch_bytes(spec, block_size, dtype, scratch_blocks) + copies


def host_units(host_bytes: int, bytes_per_unit: int) -> int:
    """Units of the host tier that fit into so many bytes of host memory."""
    return max(host_bytes, 0) // bytes_per_unit


def useful_slots(limits: Limits, num_blocks: int) -> int:
    """Checkpoints that so many blocks can be used with: as often as prompts have them, and two of each row, whose last
    one must not take the place of these."""
    return num_blocks * limits.block_size // CHECKPOINT_TOKENS + 2 * limits.max_num_seqs


def swap_bytes(available: int) -> int:
    """Bytes for the host tier beside a GPU, of `available` bytes of host memory: page-locked, so not much of it."""
    return min(int(available * SWAP_SHARE), SWAP_LIMIT)


def cpu_cache_bytes(available: int | None = None) -> int:
    """Bytes for the cache on the CPU, of `available` bytes of memory (default: ask the machine)."""
    available = available_memory() if available is None else available
    return min(int(available * CPU_SHARE), CPU_LIMIT)


def cuda_cache_bytes(device: torch.device, utilization: float, profile: Callable[[], object]) -> int:
    """Bytes for the cache on a CUDA device that holds the weights. `profile` runs the largest step once."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # the context, libraries, and other processes: in use, and not by torch's allocator
    outside = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - peak - outside


def num_units(cache_bytes: int, bytes_per_unit: int, block_size: int, max_model_len: int, other_bytes: int = 0) -> int:
    """Units that fit into `cache_bytes` beside the zero unit and what hidden state (`hidden_cache_bytes`) or recurrent
    layers need.

    ConfigError if not one full context does.
    """
    cache_bytes -= other_bytes
    units = cache_bytes // bytes_per_unit - 1
    units -= units % UNITS_PER_BLOCK
    longest = longest_context(units, block_size)
    if longest < 1:
        needed = (UNITS_PER_BLOCK + 1) * bytes_per_unit
        raise ConfigError(
            f"no memory is left for the cache: one block takes {_mib(needed)}, "
            f"{_mib(max(cache_bytes, 0))} are available"
        )
    if longest < max_model_len:
        raise ConfigError(
            f"the cache ({_mib(cache_bytes)}) holds {longest} tokens, less than one context of {max_model_len}; "
            f"use --max-model-len {longest} or less, or give the cache more memory"
        )
    return units


def longest_context(units: int, block_size: int) -> int:
    """Tokens of one request that fit into so many units."""
    return max(units, 0) // UNITS_PER_BLOCK * block_size


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**2:.1f} MiB"
