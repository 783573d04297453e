# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Addressing of cached tokens: from block table entries to offsets in the pool.

The pool is `[num_units * layers + scratch_slices, block_size, kv_heads, head_dim]`. An entry t >= 0 is the first slice
of a unit; layer l is slice t + l. An entry t < 0 is scratch slice -t - 1, counted from `scratch_base` = num_units *
layers, and the same for every layer. Offsets are 64 bit because a pool can exceed 2^31 elements.

A paired pool has no scratch. PAIR > 0 slices lie between K and V of a block, and the entry of K locates both.

An 8-bit pool is a view of its values. Bfloat16 scales follow the values of each slice (`engine.models.byte_cells`) and
are read and written as 16-bit integers. SLICE is the length of a slice in bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.models.attention import PoolView
from engine.models.byte_cells import is_bytes, slice_elements


@triton.jit
def slice_start(entry, layer, scratch_base, SLICE: tl.constexpr):
    """Return the offset of the slice's first element. `entry`: tensor of table entries; SLICE: elements per slice."""
    wide = entry.to(tl.int64)
    return tl.where(wide >= 0, wide + layer, scratch_base - 1 - wide) * SLICE


@triton.jit
def layer_base(pool, layer, SLICE: tl.constexpr, PAIR: tl.constexpr):
    """Return the base pointer for `slice_starts`; in a paired pool it includes the layer, to shorten every address."""
    if PAIR > 0:
        pool += tl.cast(layer, tl.int64) * SLICE
    return pool


@triton.jit
def slice_starts(k_entries, v_entries, layer, scratch_base, SLICE: tl.constexpr, PAIR: tl.constexpr):
    """Return the offsets of the first elements of the slices of K and of V, relative to `layer_base`."""
    if PAIR > 0:
        k_at = k_entries.to(tl.int64) * SLICE
        v_at = k_at + PAIR * SLICE
    else:
        k_at = slice_start(k_entries, layer, scratch_base, SLICE)
        v_at = slice_start(v_entries, layer, scratch_base, SLICE)
    return k_at, v_at


@triton.jit
def token_start(
    table, row, table_stride, position, layer, scratch_base,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Return the offset of one token (all heads, ROW elements) through row `row` of `table`; scalars in and out."""
    entry = tl.load(table + row.to(tl.int64) * table_stride + position // BLOCK_SIZE)
    return slice_start(entry, layer, scratch_base, SLICE) + (position % BLOCK_SIZE) * ROW


@triton.jit
def scale_pointers(pool, starts, tokens, heads, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, KV_HEADS: tl.constexpr):
    """Return pointers to the 16-bit scales of `heads` of `tokens` in 8-bit slices that begin at `starts`."""
    first = (pool + starts + BLOCK_SIZE * ROW).to(tl.pointer_type(tl.int16))
    return first + (tokens % BLOCK_SIZE) * KV_HEADS + heads


@triton.jit
def load_scales(pointers, mask):
    """Return scales as float32; 0 where masked."""
    bits = tl.load(pointers, mask=mask, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def extent(x):
    """Return the largest finite magnitude of each row of x, and its number of values that are not finite."""
    size = tl.abs(x)
    sound = size < float("inf")
    return tl.max(tl.where(sound, size, 0.0), 1), tl.sum(tl.where(sound, 0, 1), 1)


@triton.jit
def least_scales(highest, unsound):
    """Return the scales of heads, as int16 bits and as float32; NaN if a value is not finite."""
    upwards = ((highest / 127).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where(unsound == 0, upwards, 0x7FC0)
    return bits.to(tl.int16), (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_steps(x, scales):
    """Return x in steps of `scales`, int8; 0 where a scale is 0 or NaN."""
    steps = tl.where(scales > 0, x, 0.0) * (1 / tl.where(scales > 0, scales, 1.0))
    # Adding 1.5 * 2^23 rounds to the nearest integer.
    whole = (tl.minimum(tl.maximum(steps, -127.0), 127.0) + 12582912.0) - 12582912.0
    return whole.to(tl.int8)


def check_pool(view: PoolView) -> None:
    """Assert the contracts of the pool (four dimensions, 16-byte rows) and of its block tables.

    A pool whose cells are wider than the heads of K (never 8-bit) is a view with the strides of its cells. Heads of V,
    with the width of `v` or `out`, begin at the same offsets as those of K.
    """
    pool, k_table, v_table, _, pair = view
    assert (v_table is None) == (pair > 0), "pass either v_table or pair"
    check_cells(pool, k_table, *([] if v_table is None else [v_table]))


def check_cells(pool: Tensor, *tables: Tensor) -> None:
    """See `check_pool`."""
    assert pool.dim() == 4 and pool.stride(3) == 1 and pool.stride(2) == pool.shape[3], (
        "pool must be [slices, block_size, kv_heads, head_dim] with contiguous heads per token"
    )
    _, block_size, kv_heads, head_dim = pool.shape
    if is_bytes(pool.dtype):
        assert pool.stride(1) == kv_heads * head_dim, "8-bit cells must be as wide as their heads"
        assert pool.stride(0) == slice_elements(block_size, kv_heads, head_dim, pool.dtype), "slices must be adjacent"
    else:
        assert pool.stride(1) >= kv_heads * head_dim, "a cell is narrower than its heads"
        assert pool.stride(0) == block_size * pool.stride(1), "slices must be adjacent"
        assert pool.stride(1) * pool.element_size() % 16 == 0, "a cell must be a multiple of 16 bytes"
    assert block_size & (block_size - 1) == 0, f"block_size {block_size} is not a power of two"
    assert pool.shape[3] * pool.element_size() % 16 == 0, "a head must be a multiple of 16 bytes"
    for table in tables:
        assert table.dim() == 2 and table.stride(1) == 1, "block table must be [rows, max_blocks] with contiguous rows"
        assert table.dtype in (torch.int32, torch.int64), "block table must be int32 or int64"
        assert table.shape == tables[0].shape and table.stride() == tables[0].stride(), "block tables differ in shape"


def check_value_width(pool: Tensor, width: int) -> None:
    """Assert that cells of `pool` have room for heads of V of `width` elements."""
    _, _, kv_heads, head_dim = pool.shape
    assert width * pool.element_size() % 16 == 0, "a head must be a multiple of 16 bytes"
    assert kv_heads * width <= pool.stride(1), f"heads of {width} do not fit in cells of {pool.stride(1)}"
    assert width == head_dim or not is_bytes(pool.dtype), "8-bit cells need K and V of the same width"


def check_queries(q: Tensor, out: Tensor, pool: Tensor) -> None:
    """Assert the contracts of q [n, heads, head_dim] and of out [n, heads, value_dim]."""
    dtype = computed_in(pool, q)
    check_heads("q", q, pool.shape[3], dtype)
    check_heads("out", out, out.shape[2], dtype)
    assert q.shape[:2] == out.shape[:2], f"out {out.shape} differs from q {q.shape}"
    check_value_width(pool, out.shape[2])


def computed_in(pool: Tensor, like: Tensor) -> torch.dtype:
    """Return the type of K and V before storage: the type of `like` for an 8-bit pool."""
    return like.dtype if is_bytes(pool.dtype) else pool.dtype


def check_heads(name: str, value: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    """Assert that `value` is [tokens, heads, head_dim] with contiguous heads, possibly a view of a fused projection."""
    assert value.dim() == 3 and value.shape[2] == head_dim, f"{name}: [tokens, heads, {head_dim}], not {value.shape}"
    assert value.stride(2) == 1 and value.stride(1) == head_dim, f"{name}: the heads of a token must be contiguous"
    assert value.stride(0) * value.element_size() % 16 == 0, f"{name}: rows must start at multiples of 16 bytes"
    assert value.dtype == dtype, f"{name}: {value.dtype}, not {dtype}"
