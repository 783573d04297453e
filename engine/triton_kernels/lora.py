# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""LoRA updates of the outputs of a linear layer, each row with its own adapter: y += b (a x).

The adapter of a row and the address and rank of its matrices are read from device memory, so that one captured graph
serves all adapters. The kernels suit few rows, as in decode: every program reads the matrices for one row. Twin:
engine.triton_kernels.twins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels.configs import LORA_SPLIT

RANKS, BLOCK, OUTPUTS = 16, 256, 64
"""RANKS rows of `a` by BLOCK inputs per multiplication of the shrink kernel; OUTPUTS outputs per expand program."""


@triton.jit
def lora_shrink_kernel(
    x, slots, table, partial, x_stride, width, split_stride, row_stride,
    RANKS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, group of ranks, split of inputs): compute a part of a x."""
    row, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    entry = table + tl.load(slots + row).to(tl.int64) * 3
    rank = tl.load(entry + 2).to(tl.int32)
    if group * RANKS >= rank:
        return
    a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
    ranks = group * RANKS + tl.arange(0, RANKS)
    total = tl.zeros((RANKS, BLOCK), tl.float32)
    for start in range(0, SPLIT, BLOCK):
        columns = split * SPLIT + start + tl.arange(0, BLOCK)
        part = tl.load(x + row * x_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
        inside = (ranks[:, None] < rank) & (columns[None, :] < width)
        rows = tl.load(a + ranks[:, None] * width + columns[None, :], mask=inside, other=0.0)
        total += rows.to(tl.float32) * part[None, :]
    tl.store(partial + split * split_stride + row * row_stride + ranks, tl.sum(total, 1))


@triton.jit
def lora_expand_kernel(
    partial, slots, table, y, y_stride, outputs, split_stride, row_stride,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Program (row, block of outputs): add b (a x) to y; a x is the sum of the splits, rounded to the type of y."""
    row = tl.program_id(0).to(tl.int64)
    entry = table + tl.load(slots + row).to(tl.int64) * 3
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    b = tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty))
    places = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((OUTPUTS,), tl.float32)
    for first in range(0, rank, RANKS):
        ranks = first + tl.arange(0, RANKS)
        mixed = tl.zeros((RANKS,), tl.float32)
        for split in range(SPLITS):
            mixed += tl.load(partial + split * split_stride + row * row_stride + ranks)
        mixed = mixed.to(y.dtype.element_ty).to(tl.float32)
        inside = (places[:, None] < outputs) & (ranks[None, :] < rank)
        part = tl.load(b + places[:, None].to(tl.int64) * rank + ranks[None, :], mask=inside, other=0.0)
        total += tl.sum(part.to(tl.float32) * mixed[None, :], 1)
    target = y + row * y_stride + places
    value = tl.load(target, mask=places < outputs, other=0.0).to(tl.float32)
    tl.store(target, (value + total).to(y.dtype.element_ty), mask=places < outputs)


def lora_add(x: Tensor, y: Tensor, slots: Tensor, table: Tensor, partial: Tensor) -> None:
    """Add b (a x[i]) to y[i], with a and b from row `slots[i]` of the table.

    Shapes: x [T, in], y [T, out] of one type, rows contiguous; slots [T] int32; table [n, 3] int64: addresses of a
    [rank, in] and b [out, rank] (contiguous, same type), and the rank, 0 for no adapter; partial [splits of in, at
    least T, ranks] float32 scratch, with at least as many ranks as any adapter.
    """
    rows, width, outputs = len(x), x.shape[1], y.shape[1]
    splits = -(-width // LORA_SPLIT)
    assert x.stride(1) == y.stride(1) == 1 and x.dtype == y.dtype and len(y) == rows, "rows of one type"
    assert slots.shape == (rows,) and slots.dtype == torch.int32 and table.dtype == torch.int64, "int32, int64"
    assert table.shape[1:] == (3,) and table.is_contiguous(), f"table: [n, 3], not {table.shape}"
    assert partial.dtype == torch.float32 and partial.stride(2) == 1 and partial.shape[2] % RANKS == 0
    assert len(partial) >= splits and partial.shape[1] >= rows, f"too little scratch: {partial.shape}"
    if not rows:
        return
    strides = partial.stride(0), partial.stride(1)
    lora_shrink_kernel[(rows, partial.shape[2] // RANKS, splits)](
        x, slots, table, partial, x.stride(0), width, *strides, RANKS=RANKS, SPLIT=LORA_SPLIT, BLOCK=BLOCK, num_warps=4,
        num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    lora_expand_kernel[(rows, -(-outputs // OUTPUTS))](
        partial, slots, table, y, y.stride(0), outputs, *strides, SPLITS=splits, RANKS=RANKS, OUTPUTS=OUTPUTS,
        num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
