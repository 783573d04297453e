"""Launch configurations, selected from tables instead of autotuning, so that a captured graph meets no new variant.

The numbers follow from capacity: tiles fill about half the shared memory of a multiprocessor (two programs stay
resident) and accumulators fit in registers. Tests compile every row of the tables and check for spills. The decode rows
of Hopper for heads of 64 and 128 were selected from some 30 candidates on an H100 (batches of 32 to 256, contexts of
512 to 4,096) and are near the best in each case. MIN_SPLIT shortened a single stream at no cost to larger batches. The
prefill row for heads of 128 was the best there without changes. Heads of 256 were not measured.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

_HOPPER, _AMPERE = 90, 80
MIN_SPLIT = 64
"""Context length in tokens above which decode splits a context. Splits are at least half as long."""

MIN_PREFILL_SPLIT = 256
"""Minimum number of cached tokens per split of a prefill chunk. Contexts shorter than four times that are not split,
because the merge would take as long as it saves."""

LORA_SPLIT = 1024
"""Inputs of a linear layer that one program multiplies with the matrix of an adapter."""

SHARE_ONE = float(2**40)
"""Share of the best token in a draw; the sum of the shares of a vocabulary fits into 63 bits."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """A tile of `block_m` query rows by `block_n` cached tokens; other kernels define their own use of the fields."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Launch options. Fusion into multiply-adds is requested explicitly because Triton 3.9 warns otherwise."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


# (architecture, padded head_dim) -> tile for 16-bit elements. The rows of _AMPERE stay within 99 KB of shared memory,
# so that they also run on the smaller chips of that generation and the next (8.6, 8.9).
_DECODE = {
    (_HOPPER, 64): LaunchConfig(16, 128, 4, 2),
    (_HOPPER, 128): LaunchConfig(16, 64, 2, 2),
    (_HOPPER, 256): LaunchConfig(16, 32, 4, 3),
    (_AMPERE, 64): LaunchConfig(16, 64, 4, 3),
    (_AMPERE, 128): LaunchConfig(16, 32, 4, 3),
    (_AMPERE, 256): LaunchConfig(16, 32, 4, 2),
}
_PREFILL = {
    (_HOPPER, 64): LaunchConfig(128, 128, 8, 3),
    (_HOPPER, 128): LaunchConfig(128, 64, 8, 3),  # 128 x 128 spills
    (_HOPPER, 256): LaunchConfig(128, 16, 8, 3),  # 128 x 32 spills with some groups and with 64-bit tables
    (_AMPERE, 64): LaunchConfig(128, 64, 8, 3),
    (_AMPERE, 128): LaunchConfig(128, 32, 8, 3),  # 128 x 64 spills
    (_AMPERE, 256): LaunchConfig(64, 32, 8, 2),
}
# float32 is for comparisons, not for serving: full-precision products outside the tensor cores, tiles small
# enough for registers.
_DECODE_FLOAT32 = LaunchConfig(16, 16, 4, 2)
_PREFILL_FLOAT32 = LaunchConfig(32, 16, 8, 2)

FEW_ROWS = 16
"""Rows of an expert, on average, up to which products of sorted rows have the smallest tiles."""
_FEW_GROUPED = LaunchConfig(FEW_ROWS, 64, 4, 4), 64
_MANY_GROUPED = LaunchConfig(64, 128, 4, 3), 64
_GROUPED_FLOAT32 = LaunchConfig(16, 32, 4, 2), 32
"""Products of sorted rows: rows by outputs, and inputs at a time. Within 72 KB of shared memory, not measured."""
_GROUPED_ARCHS = (9, 10)
"""Major compute capabilities on which torch multiplies all experts in one product; elsewhere it waits for the host."""

FLAT = LaunchConfig(1, 1024, 4, 1)
"""Element-wise kernels: 1,024 elements per program, 8 per thread."""
BEGIN = LaunchConfig(1, 32, 4, 1)
"""Start of a step: one program per request, with 32 splits or table changes at a time."""
COPY = LaunchConfig(1, 4096, 4, 1)
"""Copies: 4,096 elements per program, so that each thread has four 16-byte loads in flight before it stores."""
DRAW = LaunchConfig(1, 4096, 16, 1)
"""Draws: one program with many threads per row, over which it passes many times."""
HEADS = LaunchConfig(8, 1, 2, 1)
"""RoPE and cache write: 8 heads of one token per program."""


def next_power_of_two(value: int) -> int:
    """Smallest power of two >= `value` (>= 1)."""
    return 1 << (value - 1).bit_length()


def is_cuda(device: torch.device) -> bool:
    """Return whether the device has streams and copies from pinned memory."""
    return device.type == "cuda"


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 4 for a device that only interprets kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if is_cuda(device) else 4


@cache
def device_arch(device: torch.device) -> int:
    """Return the compute capability as an integer (90 for 9.0). Devices that only interpret kernels count as Hopper."""
    if not is_cuda(device):
        return _HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def decode_config(
    arch: int,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    *,
    int8: bool = False,
    unlike: bool = False,
) -> LaunchConfig:
    """Return the tile of the split-KV decode kernel.

    `group` is the number of query heads per KV head, packed into `block_m` rows. `int8`: K and V have 8 bits; scales
    and conversions need registers, so more warps share a tile. `unlike`: K and V differ in width and need two masks.
    """
    block_m = max(16, next_power_of_two(group))
    row = _DECODE_FLOAT32 if dtype.itemsize == 4 else _DECODE[_table_arch(arch), _padded_head_dim(head_dim)]
    if int8:
        return LaunchConfig(block_m, row.block_n, max(4, row.num_warps), min(2, row.num_stages))
    return LaunchConfig(block_m, row.block_n, row.num_warps, min(2, row.num_stages) if unlike else row.num_stages)


def prefill_config(arch: int, head_dim: int, dtype: torch.dtype, *, int8: bool = False) -> LaunchConfig:
    """Return the tile of the prefill kernel; `block_m` counts (token, head of the group) pairs.

    `block_m` is at least 64 to enable `wgmma`, except for float32. `int8`: as in decode, with shorter tiles.
    """
    if dtype.itemsize == 4:
        return _PREFILL_FLOAT32
    row = _PREFILL[_table_arch(arch), _padded_head_dim(head_dim)]
    return replace(row, block_n=max(16, min(32, row.block_n // 2))) if int8 else row


def grouped_config(rows: int, experts: int, dtype: torch.dtype) -> tuple[LaunchConfig, int]:
    """Return the tile of a product of sorted rows, and the inputs at a time."""
    if dtype.itemsize == 4:
        return _GROUPED_FLOAT32
    return _FEW_GROUPED if rows <= FEW_ROWS * experts else _MANY_GROUPED


def groups_by_torch(device: torch.device) -> bool:
    """Return whether torch multiplies sorted rows with all experts in one product on this device."""
    return is_cuda(device) and device_arch(device) // 10 in _GROUPED_ARCHS


def merged_splits(width: int) -> int:
    """Return the number of splits merged at once, each `width` floats: 16 KB in flight, for which two warps have
    registers beside a tile of wide heads."""
    return max(2, min(32, 4096 // width))


def row_config(width: int) -> LaunchConfig:
    """Return the configuration of norms: one program per row of `width` elements, about 8 elements per thread."""
    block = next_power_of_two(width)
    return LaunchConfig(1, block, max(1, min(16, block // 256)), 1)


def decode_items(num_requests: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Return the capacity of a decode work list for a bucket: one item per request, plus four programs per
    multiprocessor for splits."""
    return num_requests + -(-4 * num_multiprocessors // num_kv_heads)


def prefill_items(num_tokens: int, num_requests: int, tokens_per_tile: int, slots: int = 0) -> int:
    """Return the capacity of a prefill work list for a bucket of `num_tokens` in at most `num_requests` chunks."""
    return num_tokens // tokens_per_tile + num_requests + slots


def prefill_slots(num_kv_heads: int, num_multiprocessors: int) -> int:
    """Return the number of concurrent query tiles: each tile has one program per KV head, each on a multiprocessor."""
    return num_multiprocessors // num_kv_heads


def prefill_merged(slots: int, tokens_per_tile: int) -> int:
    """Return the tokens whose context can be split at once; with half of the slots used, splits no longer help."""
    return slots // 2 * tokens_per_tile


def prefill_partials(slots: int, tokens_per_tile: int) -> int:
    """Return the maximum rows of partial results that the splits of a step need (`PrefillWork.fill`)."""
    return (slots + slots // 2) * tokens_per_tile


def _table_arch(arch: int) -> int:
    assert arch >= _AMPERE, f"compute capability {arch / 10} is not supported (8.0 or newer)"
    return _HOPPER if arch in (90, 100, 103) else _AMPERE


def _padded_head_dim(head_dim: int) -> int:
    assert 0 < head_dim <= 256, f"head_dim {head_dim} is not supported (at most 256)"
    return max(64, next_power_of_two(head_dim))
