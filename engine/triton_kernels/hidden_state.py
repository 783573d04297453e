# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Hidden state in the pool: store the post-norm input of an attention layer, and gather it to restore K and V. Also
copies of whole units, in the pool or between the pool and a staging buffer.

The state of a token takes the first `hidden_size` elements of its row in the slice (kv_heads * head_dim elements, never
fewer where hidden state is offered). cuBLAS projects the gathered state to K and V, and
engine.triton_kernels.rope_cache_write stores the result. A unit is contiguous over all layers, so a batch of swaps
needs one launch to the staging buffer and one transfer. Twin: engine.triton_kernels.twins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.addressing import check_cells, token_start


@triton.jit(
    do_not_specialize=["layer", "scratch_base", "table_stride"],
    do_not_specialize_on_alignment=["positions", "rows", "table"],
)
def hidden_kernel(
    x, positions, rows, pool, table, x_stride, table_stride, layer, scratch_base, width,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns). Padding is skipped by a write and gathered as zeros."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    row = tl.load(rows + token)
    here = x + token * x_stride + columns
    if row < 0:
        if GATHER:
            tl.store(here, tl.zeros([BLOCK], x.dtype.element_ty), mask=mask)
    else:
        position = tl.load(positions + token)
        SLICE: tl.constexpr = BLOCK_SIZE * ROW
        start = token_start(table, row, table_stride, position, layer, scratch_base, BLOCK_SIZE, ROW, SLICE)
        there = pool + start + columns
        if GATHER:
            tl.store(here, tl.load(there, mask=mask), mask=mask)
        else:
            tl.store(there, tl.load(here, mask=mask), mask=mask)


def hidden_write(
    x: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, *, layer: int, scratch_base: int
) -> None:
    """Store x[i] as the hidden state at position positions[i] of table row rows[i]; rows[i] < 0: skip.

    Shapes: x [n, hidden_size]; positions, rows [n] int32 or int64; pool [slices, block_size, kv_heads, head_dim];
    table [rows, max_blocks], entries of hidden units.
    """
    _launch(x, positions, rows, pool, table, layer, scratch_base, gather=False)


def hidden_gather(
    out: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, *, layer: int, scratch_base: int
) -> None:
    """Set out[i] to the hidden state at positions[i] of table row rows[i]; rows[i] < 0: zeros. See `hidden_write`."""
    _launch(out, positions, rows, pool, table, layer, scratch_base, gather=True)


def _launch(
    x: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, layer: int, scratch_base: int, gather: bool
) -> None:
    check_cells(pool, table)
    (count, width), row = x.shape, pool.shape[2] * pool.shape[3]
    assert x.stride(1) == 1 and x.dtype == pool.dtype, f"hidden state: contiguous rows of {pool.dtype}, not {x.dtype}"
    assert width <= row, f"hidden size {width} does not fit in {row}, a token's share of a unit"
    for name, index in (("positions", positions), ("rows", rows)):
        assert index.shape == (count,) and index.is_contiguous(), f"{name}: contiguous [{count}], not {index.shape}"
        assert index.dtype in (torch.int32, torch.int64), f"{name}: int32 or int64, not {index.dtype}"
    if count == 0:
        return
    config = configs.FLAT
    hidden_kernel[(count, -(-width // config.block_n))](
        x, positions, rows, pool, table, x.stride(0), table.stride(0), layer, scratch_base, width,
        BLOCK_SIZE=pool.shape[1], ROW=row, BLOCK=config.block_n, GATHER=gather, **config.options,
    )  # fmt: skip


@triton.jit
def unit_copy_kernel(source, target, pairs, source_stride, target_stride, size, BLOCK: tl.constexpr):
    """Program (block of elements, pair)."""
    pair = tl.program_id(1).to(tl.int64)
    origin = tl.load(pairs + pair * 2).to(tl.int64)
    if origin < 0:
        return
    goal = tl.load(pairs + pair * 2 + 1).to(tl.int64)
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + origin * source_stride + elements, mask=elements < size)
    tl.store(target + goal * target_stride + elements, values, mask=elements < size)


def unit_copy(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """target[pairs[i, 1]] = source[pairs[i, 0]]; a pair with a negative source is skipped.

    Shapes: source, target [units, elements of a unit], rows contiguous, one dtype; pairs [n, 2] int32 or int64. Source
    and target may be the same memory if no unit is both read and written.
    """
    assert source.dim() == target.dim() == 2 and source.shape[1] == target.shape[1], f"{source.shape}, {target.shape}"
    assert source.stride(1) == target.stride(1) == 1 and source.dtype == target.dtype, "contiguous units of one dtype"
    assert pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.is_contiguous(), f"pairs: [n, 2], not {pairs.shape}"
    assert pairs.dtype in (torch.int32, torch.int64), f"pairs: int32 or int64, not {pairs.dtype}"
    if len(pairs) == 0:
        return
    config, size = configs.COPY, source.shape[1]
    unit_copy_kernel[(-(-size // config.block_n), len(pairs))](
        source, target, pairs, source.stride(0), target.stride(0), size, BLOCK=config.block_n, **config.options
    )
