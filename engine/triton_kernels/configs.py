"""Launch configurations, chosen by table: no autotuning at run time, so a captured graph never meets a new variant.

Knows nothing of the kernels' code. The numbers follow from capacity, not from timing: tiles fill about half the shared
memory of a multiprocessor (two programs stay resident), accumulators fit in registers, and every configuration in the
tables is compiled in tests and checked for spills. Whoever measures on a device changes the rows here: those of decode
on Hopper for heads of 64 and 128 were chosen among some 30 on an H100 (batches of 32 to 256, contexts of 512 to 4,096),
near the best in each; MIN_SPLIT shortened a single stream and cost the others nothing. Prefill's for heads of 128 were
the best there as they were; heads of 256 were not measured.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

_HOPPER, _AMPERE = 90, 80
MIN_SPLIT = 64
"""Length (tokens) from which on a context is split in decode; evened out, a split is at least half as long."""

MIN_PREFILL_SPLIT = 256
"""Cached tokens that a split of a prompt's chunk reads at least, in prefill; one of under four times as many is not
split: the merge would take as long as it saves."""

LORA_SPLIT = 1024
"""Inputs of a linear layer that one program multiplies with an adapter's matrix."""

SHARE_ONE = float(2**40)
"""The share of a row's best token in draws; the shares of a vocabulary fit into 63 bits."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """`block_m` query rows by `block_n` cached tokens in a tile; other kernels use them as their function says."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Launch options. Contraction to fused multiply-adds is wanted; Triton 3.9 warns unless that is said."""
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


def next_power_of_two(value: int) -> int:
    """Smallest power of two >= `value` (>= 1)."""
    return 1 << (value - 1).bit_length()


def is_cuda(device: torch.device) -> bool:
    """Whether it has streams, and copies from pinned memory."""
    return device.type == "cuda"


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a device; 4 of one that only interprets kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if is_cuda(device) else 4


@cache
def device_arch(device: torch.device) -> int:
    """Compute capability as an integer (90 for 9.0). Devices that only interpret kernels count as Hopper."""
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
    """Tile of the split-KV decode kernel; `group` = query heads per KV head, packed into `block_m` rows. `int8`: K
    and V are in 8 bits, which takes registers for their scales and types: more warps share them. `unlike`: K and V are
    of two widths, and so are their masks."""
    block_m = max(16, next_power_of_two(group))
    row = _DECODE_FLOAT32 if dtype.itemsize == 4 else _DECODE[_table_arch(arch), _padded_head_dim(head_dim)]
    if int8:
        return LaunchConfig(block_m, row.block_n, max(4, row.num_warps), min(2, row.num_stages))
    return LaunchConfig(block_m, row.block_n, row.num_warps, min(2, row.num_stages) if unlike else row.num_stages)


def prefill_config(arch: int, head_dim: int, dtype: torch.dtype, *, int8: bool = False) -> LaunchConfig:
    """Tile of the prefill kernel: `block_m` rows of (token, head of the group) pairs; 64 or more, so that `wgmma` is
    used, but for float32. `int8`: as in decode, with shorter tiles."""
    if dtype.itemsize == 4:
        return _PREFILL_FLOAT32
    row = _PREFILL[_table_arch(arch), _padded_head_dim(head_dim)]
    return replace(row, block_n=max(16, min(32, row.block_n // 2))) if int8 else row


def merged_splits(width: int) -> int:
    """Splits that are merged at once, of `width` floats each: 16 KB in flight, for which two warps have registers
    beside a tile of wide heads."""
    return max(2, min(32, 4096 // width))


def row_config(width: int) -> LaunchConfig:
    """One program per row of `width` elements (norms): about 8 elements a thread, 16 bytes at two bytes each."""
    block = next_power_of_two(width)
    return LaunchConfig(1, block, max(1, min(16, block // 256)), 1)


def flat_config() -> LaunchConfig:
    """Element-wise kernels: 1,024 elements a program, 8 a thread."""
    return LaunchConfig(1, 1024, 4, 1)


def copy_config() -> LaunchConfig:
    """Copies: 4,096 elements a program, 32 a thread, so that four 16-byte loads are in flight before a store."""
    return LaunchConfig(1, 4096, 4, 1)


def draw_config() -> LaunchConfig:
    """Draws: one program a row, which passes over all of it many times: as many threads as fit with their sums."""
    return LaunchConfig(1, 4096, 16, 1)


def heads_config() -> LaunchConfig:
    """RoPE and cache write: 8 heads of one token a program."""
    return LaunchConfig(8, 1, 2, 1)


def decode_items(num_requests: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Capacity of a decode work list for a bucket of `num_requests`: every request once, and four programs for each
    multiprocessor to be made of splits."""
    return num_requests + -(-4 * num_multiprocessors // num_kv_heads)


def prefill_items(num_tokens: int, num_requests: int, tokens_per_tile: int, slots: int = 0) -> int:
    """Capacity of a prefill work list for a bucket of `num_tokens` in at most `num_requests` chunks."""
    return num_tokens // tokens_per_tile + num_requests + slots


def prefill_slots(num_kv_heads: int, num_multiprocessors: int) -> int:
    """Query tiles that run side by side: a tile's programs, one for each KV head, take a multiprocessor each."""
    return num_multiprocessors // num_kv_heads


def prefill_merged(slots: int, tokens_per_tile: int) -> int:
    """Tokens whose past can be split at once. From half of the slots on splits of equal tiles would gain nothing."""
    return slots // 2 * tokens_per_tile


def prefill_partials(slots: int, tokens_per_tile: int) -> int:
    """Rows of partial results that the splits of a step need at most (`PrefillWork.fill`)."""
    return (slots + slots // 2) * tokens_per_tile


def _table_arch(arch: int) -> int:
    assert arch >= _AMPERE, f"compute capability {arch / 10} is not supported (8.0 or newer)"
    return _HOPPER if arch in (90, 100, 103) else _AMPERE


def _padded_head_dim(head_dim: int) -> int:
    assert 0 < head_dim <= 256, f"head_dim {head_dim} is not supported (at most 256)"
    return max(64, next_power_of_two(head_dim))
