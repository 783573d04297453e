# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Where a block table entry points to in the pool. Shared by every kernel that reads or writes cached tokens.

The pool is `[num_units * layers + scratch_slices, block_size, kv_heads, head_dim]`. Entry t >= 0 is the first slice of
a unit, so layer l of it is slice t + l; t < 0 is scratch slice -t - 1 (counted from `scratch_base` = num_units *
layers), the same in every layer. Offsets are 64 bit: a pool is larger than 2^31 elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def slice_start(entry, layer, scratch_base, SLICE: tl.constexpr):
    """Offset of the slice's first element; `entry` is a tensor of table entries, SLICE the elements of a slice."""
    wide = entry.to(tl.int64)
    return tl.where(wide >= 0, wide + layer, scratch_base - 1 - wide) * SLICE


@triton.jit
def token_start(table, row, table_stride, position, layer, scratch_base, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr):
    """Offset of one token (all heads, ROW elements) through row `row` of `table`; scalars in and out."""
    entry = tl.load(table + row.to(tl.int64) * table_stride + position // BLOCK_SIZE)
    return slice_start(entry, layer, scratch_base, BLOCK_SIZE * ROW) + (position % BLOCK_SIZE) * ROW


def check_pool(pool: Tensor, *tables: Tensor) -> None:
    """Assert the contracts of the pool (contiguous, four dimensions, 16-byte rows) and of its block tables."""
    assert pool.dim() == 4 and pool.is_contiguous(), "pool: contiguous [slices, block_size, kv_heads, head_dim]"
    block_size = pool.shape[1]
    assert block_size & (block_size - 1) == 0, f"block_size {block_size} is not a power of two"
    assert pool.shape[3] * pool.element_size() % 16 == 0, "a head must be a multiple of 16 bytes"
    for table in tables:
        assert table.dim() == 2 and table.stride(1) == 1, "block table: [rows, max_blocks], rows contiguous"
        assert table.dtype in (torch.int32, torch.int64), "block table: int32 or int64"
        assert table.shape == tables[0].shape and table.stride() == tables[0].stride(), "tables of one shape"


def check_heads(name: str, value: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    """Assert `value` is [tokens, heads, head_dim], heads contiguous (a view into a fused projection will do)."""
    assert value.dim() == 3 and value.shape[2] == head_dim, f"{name}: [tokens, heads, {head_dim}], not {value.shape}"
    assert value.stride(2) == 1 and value.stride(1) == head_dim, f"{name}: the heads of a token must be contiguous"
    assert value.stride(0) * value.element_size() % 16 == 0, f"{name}: rows must start at multiples of 16 bytes"
    assert value.dtype == dtype, f"{name}: {value.dtype}, not {dtype}"
