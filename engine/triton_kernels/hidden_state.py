# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Hidden state in the pool: store the post-norm input of an attention layer, and gather it to restore K and V.

The state of a token takes the first `hidden_size` elements of its row in the slice (kv_heads * head_dim elements, never
fewer where hidden state is offered). cuBLAS projects the gathered state to K and V, and
engine.triton_kernels.rope_cache_write stores the result. Twin: engine.models.torch_ops.
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
    config = configs.flat_config()
    hidden_kernel[(count, -(-width // config.block_n))](
        x, positions, rows, pool, table, x.stride(0), table.stride(0), layer, scratch_base, width,
        BLOCK_SIZE=pool.shape[1], ROW=row, BLOCK=config.block_n, GATHER=gather, **config.options,
    )  # fmt: skip
