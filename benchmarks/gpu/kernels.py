"""Every kernel on the device against its twin, and the attention kernels against the roofline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.loop import scheduler_config
from benchmarks.gpu.setup import SHAPES, Setup, measure_limits
from benchmarks.gpu.table import Row
from engine.execution.cuda import kernel_check
from engine.execution.cuda.device import CudaDevice
from engine.limits import UNITS_PER_BLOCK, Limits
from engine.models.attention import PoolView
from engine.models.spec import ModelSpec, spec_from_config
from engine.models.weights import ModelWeights
from engine.triton_kernels import Kernels, configs
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch

_BLOCK, _LAYERS = 16, 2
_NUM_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
"""Of the 8B shape, whose attention is timed."""
_OF_BANDWIDTH, _OF_MATMUL, _BEHIND_A_PAST = 0.85, 0.506, 0.6
"""What decode and prefill attention should reach: 147 µs and 400 TFLOP/s on an H200; of bandwidth, a short chunk."""
_HEADS = ((64, 14, 2), (80, 8, 8), (96, 16, 4), (128, 32, 8), (128, 8, 8), (256, 16, 2))
"""(head_dim, heads, KV heads) of the comparison: every head_dim, and groups of 1, 4, 7 and 8."""
_SMALL: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 1000, "eos_token_id": None,
}  # fmt: skip
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 8}


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A filled, paired pool with scattered blocks: row i of the table holds `lengths[i]` tokens, in layer 1 of 2."""

    pool: Tensor
    table: Tensor
    lengths: list[int]

    @property
    def view(self) -> PoolView:
        return PoolView(self.pool, self.table, None, len(self.pool), pair=_LAYERS)

    def row(self, index: int) -> "PagedCase":
        return PagedCase(self.pool, self.table[index : index + 1], [self.lengths[index]])


def paged_case(setup: Setup, lengths: list[int]) -> PagedCase:
    blocks = max(-(-length // _BLOCK) for length in lengths)
    count, slices = len(lengths) * blocks, UNITS_PER_BLOCK * _LAYERS  # of a block
    generator = torch.Generator().manual_seed(_HEAD_DIM)
    pool = torch.randn((slices * count, _BLOCK, _KV_HEADS, _HEAD_DIM), device=setup.device, dtype=setup.dtype)
    entries = slices * torch.randperm(count, generator=generator).reshape(len(lengths), blocks)
    return PagedCase(pool, entries.to(setup.device, torch.int32), lengths)


def decode_call(setup: Setup, kernels: Kernels, case: PagedCase) -> Callable[[], None]:
    """One call of the decode kernel over every row of the case."""
    device, (q, out) = setup.device, _queries(setup, len(case.lengths))
    config = configs.decode_config(configs.device_arch(device), _HEAD_DIM, _NUM_HEADS // _KV_HEADS, setup.dtype)
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 4
    items = configs.decode_items(len(case.lengths), _KV_HEADS, processors)
    work = DecodeWork(len(case.lengths), items, config.block_n, device)
    work.fill(np.arange(len(case.lengths), dtype=np.int32), np.array(case.lengths, dtype=np.int32))
    work.buffer.upload()
    scratch = _scratch(device, items)

    def call() -> None:
        kernels.decode_attention(q, case.view, work, scratch, out, layer=1)

    return call


def _queries(setup: Setup, tokens: int) -> tuple[Tensor, Tensor]:
    """Return queries, and room for their outputs."""
    q = torch.randn((tokens, _NUM_HEADS, _HEAD_DIM), device=setup.device, dtype=setup.dtype)
    return q, torch.empty_like(q)


def _scratch(device: torch.device, items: int) -> Scratch:
    outputs, sums = (
        torch.empty(shape, device=device) for shape in ((items, _NUM_HEADS, _HEAD_DIM), (items, _NUM_HEADS))
    )
    return Scratch(outputs, sums, torch.zeros((items, _KV_HEADS), dtype=torch.int32, device=device))


def prefill_call(setup: Setup, kernels: Kernels, case: PagedCase, chunk: int) -> Callable[[], None]:
    """One call of the prefill kernel for the last `chunk` tokens (all, if there are fewer) of every row."""
    device, config = setup.device, configs.prefill_config(configs.device_arch(setup.device), _HEAD_DIM, setup.dtype)
    tile = config.block_m // (_NUM_HEADS // _KV_HEADS)
    sizes = [min(chunk, length) for length in case.lengths]
    firsts = np.cumsum(sizes) - sizes
    chunks = [
        (row, first, size, length - size)
        for row, (first, size, length) in enumerate(zip(firsts, sizes, case.lengths, strict=True))
    ]
    slots = configs.prefill_slots(_KV_HEADS, configs.num_multiprocessors(device))
    items = configs.prefill_items(sum(sizes), len(sizes), tile, slots)
    work = PrefillWork(len(sizes), items, tile, device, slots=slots, tile=config.block_n)
    work.fill(np.array(chunks, dtype=np.int32))
    work.buffer.upload()
    (q, out), scratch = _queries(setup, sum(sizes)), _scratch(device, work.partials)

    def call() -> None:
        kernels.prefill_attention(q, case.view, work, scratch, out, layer=1)

    return call


def together(setup: Setup, calls: list[Callable[[], None]]) -> Callable[[], None]:
    """Return a call of all calls in turn; on a GPU as one graph, for calls that take the host longer than the
    device."""

    def run() -> None:
        for call in calls:
            call()

    if setup.device.type != "cuda":
        return run
    run()
    setup.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def check_kernels(setup: Setup) -> Iterator[Row]:
    """Compare kernels with their twins, and graphs with eager steps, as the start of a server does, by heads."""
    for head_dim, heads, kv_heads in _HEADS[: setup.size(len(_HEADS), 1)]:
        yield _compare(setup, f"heads {heads}/{kv_heads} of {head_dim}", _heads(head_dim, heads, kv_heads))


def check_options(setup: Setup) -> Iterator[Row]:
    """Do the same for a cache of 8 bits, adapters, a cache of hidden state, and windows beside sinks and experts."""
    yield _compare(setup, "8-bit cache", _heads(128, 8, 2), cell_type=torch.int8)
    yield _compare(setup, "LoRA", _heads(64, 4, 2), adapted=True)
    yield _compare(setup, "hidden state", _heads(128, 4, 4), scratch_blocks=2)
    yield _compare(setup, "gpt-oss", SHAPES["gpt-oss-20b"] | _heads(64, 8, 1) | _WINDOWS)


def _heads(head_dim: int, heads: int, kv_heads: int) -> dict[str, object]:
    return {"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def _compare(setup: Setup, name: str, config: dict[str, object], **options: Any) -> Row:
    limits = scheduler_config(16, setup.size(128, 32), setup.size(2048, 64), setup.size(2048, 80)).limits
    spec = spec_from_config(SHAPES["8B"] | config | _SMALL)
    make, cuda = partial(_device, setup.weights(spec), options), setup.device.type == "cuda"
    faults = kernel_check.check_kernels(spec, limits, setup.kernels(), make, graphs=cuda)
    return Row(f"kernels, {name}: faults", "", len(faults.lines), 0, lower=True, note="; ".join(faults.lines))


def _device(
    weights: ModelWeights, options: dict[str, Any], spec: ModelSpec, limits: Limits, kernels: Kernels, graphs: bool
) -> CudaDevice:
    return CudaDevice(spec, weights, kernels, limits, graphs=graphs, host_units=2, **options)


def check_attention(setup: Setup) -> Iterator[Row]:
    """The attention kernels at the sizes of the target table."""
    kernels, limits = setup.kernels(), measure_limits(setup)
    count, context = setup.size(32, 2), setup.size(4096, 40)
    with torch.inference_mode():
        case = paged_case(setup, [context] * count)
        seconds = setup.seconds(decode_call(setup, kernels, case))
        floor = 2 * count * context * 8 * 128 * setup.dtype.itemsize / limits.bandwidth
        name, anchor = "decode attention, 8B shape, B32 c4k", "135 (TileOPs, H200)"
        yield Row(name, "µs", seconds * 1e6, floor * 1e6 / _OF_BANDWIDTH, floor * 1e6, anchor, True)
        for length in (setup.size(32768, 60), setup.size(8192, 40)):
            case = paged_case(setup, [length])
            call = prefill_call(setup, kernels, case, length)
            work, most = 4 * length * (length + 1) / 2 * 32 * 128 / 1e12, limits.flops / 1e12
            rate, theirs = (work / setup.seconds(each, 4) for each in (call, _torch_prefill(setup, length)))
            name = f"prefill attention, causal, d128, {length}"
            yield Row(name, "TFLOP/s", rate, _OF_MATMUL * most, most, f"{theirs:.0f} (torch here)")
        chunk, rows = setup.size(32, 8), 4  # rows in turn: their K and V are more than a cache on the device holds
        case = paged_case(setup, [length] * rows)
        calls = [prefill_call(setup, kernels, case.row(row), chunk) for row in range(rows)]
        seconds = setup.seconds(together(setup, calls * setup.size(5, 1))) / (rows * setup.size(5, 1))
        rate, most = 2 * length * 8 * 128 * setup.dtype.itemsize / seconds / 1e9, limits.bandwidth / 1e9
        yield Row("prefill attention, 32 behind 8k", "GB/s", rate, _BEHIND_A_PAST * most, most)


def _torch_prefill(setup: Setup, length: int) -> Callable[[], object]:
    """One call of torch's own attention for the same work; it reads as many heads of K as of q."""
    q, k, v = torch.randn((3, 1, 32, length, 128), device=setup.device, dtype=setup.dtype)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
