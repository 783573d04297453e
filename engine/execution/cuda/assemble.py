"""Whether the CUDA runner can serve a model here, how much cache fits beside it, and the runner itself."""

import importlib.util
from dataclasses import dataclass

import torch

from engine.execution import memory
from engine.execution.cuda.kernels import triton_kernels
from engine.execution.cuda.runner import CudaRunner
from engine.execution.cuda.shapes import GRAPH_TOKENS, Buckets
from engine.execution.cuda.swap import staging_units
from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights

_GRAPH_BYTES = 16 * 1024**2  # a guess at what the driver keeps of one graph of a few hundred kernels
_OLDEST_ARCH = (8, 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits of the engine, tokens and requests."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def refusal(spec: ModelSpec, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why the kernels cannot run this model on a device of this compute capability; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if capability < _OLDEST_ARCH:
        return f"compute capability {capability[0]}.{capability[1]} is older than 8.0"
    if spec.head_dim > 256 or spec.head_dim * dtype.itemsize % 16:
        return f"heads of {spec.head_dim} are not supported (up to 256, a multiple of 16 bytes)"
    if dtype == torch.float32 and spec.num_heads // spec.num_kv_heads > 32:
        return "more than 32 query heads share a KV head in float32"
    return None


def graph_bytes(num_shapes: int, step_bytes: int, max_tokens: int) -> int:
    """Memory that the graphs will take: `step_bytes` of the largest step, scaled to the largest graph, once for all."""
    largest = min(max_tokens, GRAPH_TOKENS)
    return num_shapes * _GRAPH_BYTES + -(-step_bytes * largest // max_tokens)


def cache_room(spec: ModelSpec, weights: ModelWeights, sizes: Sizes, utilization: float, host_units: int = 0) -> int:
    """Bytes that remain for the cache on the CUDA device that holds the weights: beside the largest step, run once
    without a request in it, beside the graphs, and beside what units pass through on their way to a host tier."""
    device, step_bytes = weights.embedding.device, 0

    def profile() -> None:
        nonlocal step_bytes
        runner = make_runner(spec, weights, sizes, num_units=memory.UNITS_PER_BLOCK, graphs=False)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        runner.run_padding(sizes.max_num_batched_tokens, sizes.max_num_seqs)
        step_bytes = torch.cuda.max_memory_allocated(device) - before

    room = memory.cuda_cache_bytes(device, utilization, profile)
    num_shapes = len(Buckets(sizes.max_num_seqs, sizes.max_num_batched_tokens).all_shapes())
    unit = memory.unit_bytes(spec, sizes.block_size, weights.embedding.dtype)
    staging = staging_units(host_units, unit) * unit
    return room - staging - graph_bytes(num_shapes, step_bytes, sizes.max_num_batched_tokens)


def make_runner(
    spec: ModelSpec,
    weights: ModelWeights,
    sizes: Sizes,
    num_units: int,
    *,
    graphs: bool = True,
    scratch_blocks: int = 0,
    host_units: int = 0,
) -> CudaRunner:
    """The runner with our Triton kernels, its graphs captured."""
    return CudaRunner(
        spec,
        weights,
        triton_kernels(),
        num_units=num_units,
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        graphs=graphs,
        scratch_blocks=scratch_blocks,
        host_units=host_units,
    )
