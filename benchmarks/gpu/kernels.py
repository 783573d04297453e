"""Every kernel on the device against its twin in float64, and the attention kernels against the roofline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.limits import measure_limits
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.table import Row
from engine.limits import UNITS_PER_BLOCK
from engine.models.attention import PoolView
from engine.triton_kernels import Kernels, configs, twins
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch

_BLOCK, _LAYERS = 16, 2
_OF_BANDWIDTH, _OF_MATMUL, _BEHIND_A_PAST = 0.85, 0.506, 0.6
"""What decode and prefill attention should reach: 147 µs and 400 TFLOP/s on an H200; of bandwidth, a short chunk."""
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-4}
_HEADS = ((64, 14, 2), (80, 8, 8), (96, 16, 4), (128, 32, 8), (128, 8, 8), (256, 16, 2))
"""(head_dim, heads, KV heads) of the equality check: every head_dim, and groups of 1, 4, 7 and 8."""


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A filled, paired pool with scattered blocks: row i of the table holds `lengths[i]` tokens, in layer 1 of 2."""

    pool: Tensor
    table: Tensor
    lengths: list[int]
    heads: int

    @property
    def view(self) -> PoolView:
        return PoolView(self.pool, self.table, None, len(self.pool), pair=_LAYERS)

    def row(self, index: int) -> "PagedCase":
        return PagedCase(self.pool, self.table[index : index + 1], [self.lengths[index]], self.heads)


def paged_case(setup: Setup, lengths: list[int], head_dim: int, heads: int, kv_heads: int) -> PagedCase:
    blocks = max(-(-length // _BLOCK) for length in lengths)
    count, slices = len(lengths) * blocks, UNITS_PER_BLOCK * _LAYERS  # of a block
    generator = torch.Generator().manual_seed(head_dim)
    pool = torch.randn((slices * count, _BLOCK, kv_heads, head_dim), device=setup.device, dtype=setup.dtype)
    entries = slices * torch.randperm(count, generator=generator).reshape(len(lengths), blocks)
    return PagedCase(pool, entries.to(setup.device, torch.int32), lengths, heads)


def decode_call(setup: Setup, kernels: Kernels, case: PagedCase, q: Tensor, out: Tensor) -> Callable[[], None]:
    """One call of the decode kernel over every row of the case."""
    (_, _, kv_heads, head_dim), device = case.pool.shape, setup.device
    config = configs.decode_config(configs.device_arch(device), head_dim, case.heads // kv_heads, setup.dtype)
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 4
    items = configs.decode_items(len(case.lengths), kv_heads, processors)
    work = DecodeWork(len(case.lengths), items, config.block_n, device)
    work.fill(np.arange(len(case.lengths), dtype=np.int32), np.array(case.lengths, dtype=np.int32))
    work.buffer.upload()
    scratch = _scratch(case, items)

    def call() -> None:
        kernels.decode_attention(q, case.view, work, scratch, out, layer=1)

    return call


def _scratch(case: PagedCase, items: int) -> Scratch:
    (_, _, kv_heads, head_dim), device = case.pool.shape, case.pool.device
    return Scratch(
        torch.empty((items, case.heads, head_dim), device=device), torch.empty((items, case.heads), device=device),
        torch.zeros((items, kv_heads), dtype=torch.int32, device=device),
    )  # fmt: skip


def prefill_call(setup: Setup, kernels: Kernels, case: PagedCase, q: Tensor, out: Tensor, chunk: int) -> tuple[
    Callable[[], None], PrefillWork
]:  # fmt: skip
    """One call of the prefill kernel for the last `chunk` tokens (all, if there are fewer) of every row."""
    (_, _, kv_heads, head_dim), device = case.pool.shape, setup.device
    config = configs.prefill_config(configs.device_arch(device), head_dim, setup.dtype)
    tile = config.block_m // (case.heads // kv_heads)
    sizes = [min(chunk, length) for length in case.lengths]
    firsts = np.cumsum(sizes) - sizes
    chunks = [
        (row, first, size, length - size)
        for row, (first, size, length) in enumerate(zip(firsts, sizes, case.lengths, strict=True))
    ]
    slots = configs.prefill_slots(kv_heads, configs.num_multiprocessors(device))
    items = configs.prefill_items(sum(sizes), len(sizes), tile, slots)
    work = PrefillWork(len(sizes), items, tile, device, slots=slots, tile=config.block_n)
    work.fill(np.array(chunks, dtype=np.int32))
    work.buffer.upload()
    scratch = _scratch(case, work.partials)

    def call() -> None:
        kernels.prefill_attention(q, case.view, work, scratch, out, layer=1)

    return call, work


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
    """Equality; a figure is the largest error, relative to 1 + the expected value."""
    kernels = setup.kernels()
    target = _TOLERANCE[setup.dtype]
    with torch.inference_mode():
        for head_dim, heads, kv_heads in _HEADS[: setup.size(len(_HEADS), 2)]:
            name = f"heads {heads}/{kv_heads} of {head_dim}"
            for kernel, error in _attention_errors(setup, kernels, head_dim, heads, kv_heads):
                yield Row(f"{kernel}, {name}: error", "", error, target, lower=True, note=str(setup.dtype))
        for kernel, error in (*_row_errors(setup, kernels), *_copy_errors(setup, kernels)):
            yield Row(f"{kernel}: error", "", error, target, lower=True, note=str(setup.dtype))


def check_attention(setup: Setup) -> Iterator[Row]:
    """The attention kernels at the sizes of the target table."""
    kernels, limits = setup.kernels(), measure_limits(setup)
    count, context = setup.size(32, 2), setup.size(4096, 40)
    with torch.inference_mode():
        case = paged_case(setup, [context] * count, 128, 32, 8)
        q = torch.randn((count, 32, 128), device=setup.device, dtype=setup.dtype)
        seconds = setup.seconds(decode_call(setup, kernels, case, q, torch.empty_like(q)))
        floor = 2 * count * context * 8 * 128 * setup.dtype.itemsize / limits.bandwidth
        yield Row(
            "decode attention, 8B shape, B32 c4k",
            "µs",
            seconds * 1e6,
            floor * 1e6 / _OF_BANDWIDTH,
            floor * 1e6,
            "135 (TileOPs, H200)",
            True,
        )
        length = setup.size(8192, 40)
        case = paged_case(setup, [length], 128, 32, 8)
        q = torch.randn((length, 32, 128), device=setup.device, dtype=setup.dtype)
        call, _ = prefill_call(setup, kernels, case, q, torch.empty_like(q), length)
        rate = 4 * length * (length + 1) / 2 * 32 * 128 / setup.seconds(call) / 1e12
        yield Row(
            "prefill attention, causal, d128, 8k",
            "TFLOP/s",
            rate,
            _OF_MATMUL * limits.flops / 1e12,
            limits.flops / 1e12,
            "407-487 (Triton)",
        )
        chunk, rows = setup.size(32, 8), 4  # rows in turn: their K and V are more than a cache on the device holds
        case = paged_case(setup, [length] * rows, 128, 32, 8)
        q = torch.randn((chunk, 32, 128), device=setup.device, dtype=setup.dtype)
        calls = [prefill_call(setup, kernels, case.row(row), q, torch.empty_like(q), chunk)[0] for row in range(rows)]
        seconds = setup.seconds(together(setup, calls * setup.size(5, 1))) / (rows * setup.size(5, 1))
        rate = 2 * length * 8 * 128 * setup.dtype.itemsize / seconds / 1e9
        yield Row(
            "prefill attention, 32 behind 8k",
            "GB/s",
            rate,
            _BEHIND_A_PAST * limits.bandwidth / 1e9,
            limits.bandwidth / 1e9,
        )


def _error(actual: Tensor, expected: Tensor) -> float:
    """NaN anywhere is an infinite error."""
    error = ((actual.double() - expected.double()).abs() / (1 + expected.double().abs())).max().item()
    return error if error == error else float("inf")


def _attention_errors(
    setup: Setup, kernels: Kernels, head_dim: int, heads: int, kv_heads: int
) -> Iterator[tuple[str, float]]:
    case = paged_case(setup, [1, 37, 700 if not setup.tiny else 50, 64], head_dim, heads, kv_heads)
    wide = case.view._replace(cells=case.pool.double())
    q = torch.randn((len(case.lengths), heads, head_dim), device=setup.device, dtype=setup.dtype)
    out, expected = torch.empty_like(q), torch.empty_like(q, dtype=torch.float64)
    decode_call(setup, kernels, case, q, out)()
    requests = DecodeWork(len(case.lengths), len(case.lengths), _BLOCK, torch.device("cpu"))
    rows = np.arange(len(case.lengths), dtype=np.int32)
    requests.fill(rows, np.array(case.lengths, dtype=np.int32))
    twins.decode_attention(q.double(), wide, requests, Scratch(q, q, q), expected, layer=1)
    yield "decode attention", _error(out, expected)
    tokens = sum(min(29, length) for length in case.lengths)
    q = torch.randn((tokens, heads, head_dim), device=setup.device, dtype=setup.dtype)
    out, expected = torch.empty_like(q), torch.empty_like(q, dtype=torch.float64)
    call, work = prefill_call(setup, kernels, case, q, out, 29)
    call()
    twins.prefill_attention(q.double(), wide, work, Scratch(q, q, q), expected, layer=1)
    yield "prefill attention", _error(out, expected)
    yield "RoPE and cache write", _rope_error(setup, kernels, case)


def _rope_error(setup: Setup, kernels: Kernels, case: PagedCase) -> float:
    (_, _, kv_heads, head_dim), device = case.pool.shape, setup.device
    count = len(case.lengths)
    qkv = torch.randn((count, case.heads + 2 * kv_heads, head_dim), device=device, dtype=setup.dtype)
    q, k, v = qkv.tensor_split((case.heads, case.heads + kv_heads), dim=1)
    positions = torch.tensor([length - 1 for length in case.lengths], dtype=torch.int32, device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    angles = torch.rand((max(case.lengths), head_dim // 2), device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q_norm, k_norm = torch.rand((2, head_dim), device=device).to(setup.dtype)
    wide_pool, wide_q = case.pool.double(), q.double()
    twins.rope_cache_write(
        wide_q, k.double(), v.double(), cos_sin, positions, rows, case.view._replace(cells=wide_pool), layer=1,
        q_norm=q_norm.double(), k_norm=k_norm.double(),
    )  # fmt: skip
    kernels.rope_cache_write(
        q, k, v, cos_sin, positions, rows, case.view, layer=1, q_norm=q_norm, k_norm=k_norm
    )  # fmt: skip
    return max(_error(q, wide_q), _error(case.pool, wide_pool))


def _copy_errors(setup: Setup, kernels: Kernels) -> Iterator[tuple[str, float]]:
    """What moves hidden state and units: nothing may change on the way."""
    case = paged_case(setup, [37, 50], 64, 4, 2)
    x = torch.randn((4, 128), device=setup.device, dtype=setup.dtype)
    positions = torch.tensor([0, 36, 49, 0], dtype=torch.int32, device=setup.device)
    rows = torch.tensor([1, 0, 1, -1], dtype=torch.int32, device=setup.device)
    where = (positions, rows, case.pool, case.table)
    kernels.hidden_write(x, *where, layer=1, scratch_base=len(case.pool))
    out = torch.full_like(x, float("nan"))
    kernels.hidden_gather(out, *where, layer=1, scratch_base=len(case.pool))
    yield "hidden write and gather", _error(out, torch.cat((x[:3], torch.zeros_like(x[:1]))))
    source = torch.randn((6, 5000), device=setup.device, dtype=setup.dtype)
    target, expected = torch.zeros_like(source), torch.zeros_like(source)
    pairs = torch.tensor([[5, 0], [-1, 1], [2, 4]], dtype=torch.int32, device=setup.device)
    kernels.unit_copy(source, target, pairs)
    expected[0], expected[4] = source[5], source[2]
    yield "unit copy", _error(target, expected)


def _row_errors(setup: Setup, kernels: Kernels) -> Iterator[tuple[str, float]]:
    width = setup.size(5120, 96)
    x, residual = torch.randn((2, 33, width), device=setup.device, dtype=setup.dtype)
    weight, bias = torch.rand((2, width), device=setup.device, dtype=setup.dtype)
    out, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    wide = total.double()
    yield (
        "residual and RMS norm",
        _error(out, wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()),
    )
    out, total = kernels.add_layer_norm(x, residual, weight, bias, 1e-5)
    wide = total.double()
    exact, _ = twins.add_layer_norm(wide, None, weight.double(), bias.double(), 1e-5)
    yield "residual and layer norm", _error(out, exact)
    logits, places = torch.randn((5, width), device=setup.device), torch.arange(3, dtype=torch.int32).to(setup.device)
    bits = torch.randint(-(2**31), 2**31, (3, -(-width // 32))).to(torch.int32).to(setup.device)
    expected = logits.clone()
    twins.token_mask(expected, places, bits)
    kernels.token_mask(logits, places, bits)
    yield "token mask", _error(*(torch.nan_to_num(each, neginf=-100.0) for each in (logits, expected)))
    yield "draws that differ from those of sorting", _draw_errors(setup, kernels)
    yield "SwiGLU", _error(kernels.silu_and_mul(x), twins.silu_and_mul(x.double()))


def _draw_errors(setup: Setup, kernels: Kernels) -> float:
    """Share of tokens. Weights may differ by a rounding, so a draw in many may fall beside the border of two tokens."""
    rows, vocab = 64, setup.size(128_256, 200)
    logits = (3 * torch.randn((rows, vocab), device=setup.device)).to(setup.dtype)
    each = torch.arange(rows, device=setup.device)
    inputs = (
        torch.rand(rows, dtype=torch.float64, device=setup.device), 0.5 + each / rows,
        torch.where(each % 2 == 0, 0, 40).to(torch.int32), torch.where(each % 4 < 2, 1.0, 0.9), each / rows * 0.02,
    )  # fmt: skip
    greedy = logits.float().argmax(dim=-1).to(torch.int32)
    different = kernels.draw(logits, greedy, *inputs) != twins.draw(logits, greedy, *inputs)
    return float((different.sum() > 1).float())
