"""Number of cache units that fit on the device, after the weights and the needs of a step.

On a CPU, the cache gets a capped share of the memory available to the process (container limits included). On CUDA, it
gets the share `gpu_memory_utilization` of the device minus weights and the peak of a profiling pass. Hidden state takes
additional memory from the same budget. The host tier has its own size in bytes.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import ConfigError
from engine.execution.offload import int4_bytes
from engine.execution.plan import BLOCKS, INT4, NIBBLES, STORED
from engine.limits import SNAPSHOT_TOKENS, UNITS_PER_BLOCK, Limits
from engine.machine.facts import available_memory as available_memory
from engine.models.attention import HeadProjection
from engine.models.byte_cells import slice_elements
from engine.models.decoder import Decoder
from engine.models.humming import bytes_of
from engine.models.packing import EXPERTS, Packing
from engine.models.quantized import GROUPS, group_of
from engine.models.spec import ModelShape, ModelSpec
from engine.models.weights import LayerWeights

CPU_SHARE = 0.25
CPU_LIMIT = 4 * 1024**3
SWAP_SHARE, SWAP_LIMIT = 0.25, 16 * 1024**3
SNAPSHOT_PART = 4
"""1 / SNAPSHOT_PART is the maximum share of the cache memory (after the states of rows) for snapshots."""
HOST_CHECKPOINT_TOKENS = 4 * SNAPSHOT_TOKENS
"""Tokens of the host tier per state there; a returning chat needs only its last one or two."""
LEAST_SLOTS = 4
"""Minimum number of slots; with fewer, the states of each prompt would evict those of the previous one."""
WEIGHT_SHARE = 0.75
"""Maximum share of the free memory for weights before layers are streamed (`--offload-weights auto`)."""


def unit_bytes(spec: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block of K, or of V, in all layers of a cache of this type."""
    return spec.num_layers * slice_elements(block_size, spec.num_kv_heads, spec.head_dim, dtype) * dtype.itemsize


def weight_bytes(spec: ModelShape, dtype: torch.dtype, quantization: str, *, library: bool = False) -> int:
    """Return the bytes of all weights.

    A quantised linear layer takes one byte per value,
    plus a scale and a sum of 4 bytes each per output; in 4 bits, see `int4_bytes`. Bias, norms and embeddings stay in
    `dtype`, a tied head in addition to the embedding. With stored 8 bits the head stays in `dtype`, as in such
    checkpoints; with 4 bits it has 8. Without `library` (see LaunchPlan) experts are unpacked to `dtype`, because
    grouped products take no other type.
    """
    if not isinstance(spec, ModelSpec):
        assert quantization == "none", "only native layers are quantised"
        return spec.num_parameters * dtype.itemsize
    hidden, vocab = spec.hidden_size, spec.vocab_size
    if quantization == "none":
        return spec.num_parameters * dtype.itemsize
    rounds_head = quantization not in STORED
    shapes = stored_shapes(spec, library=library)
    if library and spec.packing is not None:
        sizes = [count * bytes_of(spec.packing, n, k) for n, k, count in shapes]
    else:
        sizes = [n * _output_bytes(k, quantization, spec.packing) for n, k, _ in shapes]
    dense = spec.num_layers * sum(n * k * count for n, k, count in shapes)
    if rounds_head and not spec.tie_word_embeddings:
        dense += vocab * hidden
    rounded = spec.num_layers * sum(sizes) + (vocab * (hidden + 8) if rounds_head else 0)
    return rounded + (spec.num_parameters - dense) * dtype.itemsize


def stored_shapes(spec: ModelSpec, *, library: bool) -> list[tuple[int, int, int]]:
    """Return outputs, inputs and number of the matrices of a layer that take few bits; more than one are of experts.

    Experts do so by the library only (see LaunchPlan); in MXFP4, only experts do.
    """
    matrices = [(n, k, 1) for n, k in (spec.matrices if spec.experts is None else spec.matrices[:2])]
    if spec.experts is None or not library:
        return matrices
    total, width, hidden = spec.experts.total, spec.experts.width, spec.hidden_size
    experts = [(2 * width, hidden, total), (hidden, width, total)]
    return experts if spec.packing is not None and spec.packing.layout == EXPERTS else matrices + experts


def _output_bytes(k: int, quantization: str, packing: Packing | None) -> int:
    """Return the bytes of one output of a rounded layer with k inputs."""
    if quantization == BLOCKS and packing is not None:
        rows, columns = packing.block
        return k + -(-4 * -(-k // columns) // rows)
    stored = packing.block[1] if packing is not None and packing.nibbles else GROUPS[-1]
    group = group_of(k, stored) if quantization in (INT4, NIBBLES) else None
    if quantization == NIBBLES and group is not None:
        return k // 2 + 4 * (k // group)  # see `TiledWeight`
    return k + 8 if group is None else int4_bytes(k, group)


def scratch_bytes(spec: ModelShape, block_size: int, dtype: torch.dtype, scratch_blocks: int) -> int:
    """Return the bytes of K and V of the blocks in one layer; all layers share them."""
    return scratch_blocks * UNITS_PER_BLOCK * unit_bytes(spec, block_size, dtype) // spec.num_layers


def hidden_cache_bytes(
    spec: ModelSpec,
    block_size: int,
    dtype: torch.dtype,
    scratch_blocks: int,
    device: torch.device,
    *,
    streams: bool = False,
) -> int:
    """Return the device memory that hidden state takes in addition to cache units; 0 without scratch.

    A CPU packs the K and V projections of 16-bit types a second time; those of other types, and of streamed layers, are
    views.
    """
    if not scratch_blocks:
        return 0
    packs = device.type == "cpu" and dtype.itemsize == 2 and not streams
    copies = spec.num_layers * 2 * spec.kv_size * spec.hidden_size * dtype.itemsize if packs else 0
    return scratch_bytes(spec, block_size, dtype, scratch_blocks) + copies


def useful_slots(limits: Limits, num_blocks: int) -> int:
    """Return the number of checkpoints that are useful for these blocks: one per SNAPSHOT_TOKENS, and two per row, so
    that the last checkpoint of a row does not evict those."""
    return num_blocks * limits.block_size // SNAPSHOT_TOKENS + 2 * limits.max_num_seqs


def swap_bytes(available: int) -> int:
    """Return the bytes for the host tier beside a GPU; a small share, because the memory is page-locked."""
    return min(int(available * SWAP_SHARE), SWAP_LIMIT)


def cpu_cache_bytes(available: int | None = None) -> int:
    """Return the bytes for the cache on a CPU with `available` bytes of memory (default: measured)."""
    available = available_memory() if available is None else available
    return min(int(available * CPU_SHARE), CPU_LIMIT)


def cuda_cache_bytes(device: torch.device, utilization: float, profile: Callable[[], object]) -> int:
    """Return the bytes for the cache on a CUDA device that holds the weights. `profile` runs the largest step once."""
    gc.collect()  # a device for a check or a rehearsal is a cycle of references
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    gc.collect()
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # CUDA context, libraries and other processes use memory outside torch's allocator.
    outside = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - peak - outside


def run_largest_step(decoder: Decoder, limits: Limits) -> None:
    """Allocate the memory of the largest step: a full prefill, and logits with sampling for every sequence."""
    heads = HeadProjection(decoder.spec, decoder.weights)

    def attend(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in heads.qkv(layer, x, rotary[index]))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.squeeze(0).transpose(0, 1).reshape(len(x), -1)

    with torch.inference_mode():
        size, device = limits.max_num_batched_tokens, decoder.weights.embedding.device
        ids = torch.zeros(size, dtype=torch.int64, device=device)
        rotary = heads.rotary(ids)
        hidden = decoder.run(decoder.embed(ids, ids), attend)
        logits = decoder.logits(hidden[: limits.max_num_seqs]).float()
        torch.log_softmax(logits, dim=-1).sort(dim=-1)


def num_units(cache_bytes: int, bytes_per_unit: int, other_bytes: int = 0) -> int:
    """Return the units that fit into `cache_bytes`, besides the zero unit and `other_bytes` (for hidden state or
    recurrent layers).

    Raises ConfigError if they hold no block.
    """
    cache_bytes -= other_bytes
    units = cache_bytes // bytes_per_unit - 1
    units -= units % UNITS_PER_BLOCK
    if units < UNITS_PER_BLOCK:
        needed = (UNITS_PER_BLOCK + 1) * bytes_per_unit
        sizes = (f"{size / 1024**2:.1f} MiB" for size in (needed, max(cache_bytes, 0)))
        raise ConfigError("no memory is left for the cache: one block takes {}, {} are available".format(*sizes))
    return units
