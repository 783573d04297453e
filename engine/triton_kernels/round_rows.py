# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Round input rows of a linear layer to 8-bit floats (e4m3), with one scale per row. Twin: engine.models.float8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
SMALLEST = 1e-12


@triton.jit
def nearest_float(exact):
    """Round to the values of e4m3, as float32: four binary digits, or steps of 2**-9 below 2**-6; ties to even.

    The following cast then has nothing to round; the cast of the interpreter lacks a carry into the exponent.
    """
    bits = exact.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (exact + 24576.0) - 24576.0  # 1.5 * 2**14, whose last digit is 2**-9
    return tl.where(tl.abs(exact) < 0.015625, small, normal)


@triton.jit
def round_part(part, scale):
    """Return the e4m3 values nearest to part / scale, as float32 [n]; part is float32 [n]."""
    exact = tl.div_rn(part, tl.zeros_like(part) + scale)
    return nearest_float(tl.minimum(tl.maximum(exact, -448.0), 448.0))


@triton.jit
def scale_of(top, given, SMALLEST: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Return the scale of a row with maximum `top`, unless a scale is given."""
    scale = tl.maximum(top, SMALLEST) * (1.0 / 448.0)
    if HAS_SCALE:
        scale = tl.load(given)
    return scale


@triton.jit
def round_rows_kernel(x, values, scales, width, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): find the maximum, then round the values; the second pass reads from the cache."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.float32)  # becomes NaN if a value is not finite, which a maximum would ignore
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(part))
        bad += part - part
    scale = tl.maximum(tl.max(top, 0), SMALLEST) * (1.0 / 448.0) + tl.sum(bad, 0)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        exact = tl.div_rn(part, tl.zeros_like(part) + scale)
        tl.store(values + row * width + columns, nearest_float(exact).to(values.dtype.element_ty), mask=columns < width)


@triton.jit
def scale_rows_kernel(x, given, values, scales, width, BLOCK: tl.constexpr):
    """Program (row), in one pass. `given` [1] is the scale of all rows; rows that are not finite get NaN."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(given)
    bad = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        bad += part - part
        cut = round_part(part, scale)
        tl.store(values + row * width + columns, cut.to(values.dtype.element_ty), mask=columns < width)
    tl.store(scales + row, scale + tl.sum(bad, 0))


def empty_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Allocate values [T, width] e4m3 and scales [T, 1] float32 for the rows of x."""
    values = torch.empty((len(x), width), dtype=torch.float8_e4m3fn, device=x.device)
    return values, x.new_empty((len(x), 1), dtype=torch.float32)


def scale_rows(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, k] with one scale [1] to values [T, k] e4m3, clipped to 448, and scales [T, 1].

    The scale of a row that is not finite is NaN.
    """
    x = x.contiguous()
    values, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty((len(x), 1), dtype=torch.float32)
    if len(x):
        scale_rows_kernel[(len(x),)](
            x, scale, values, scales, x.shape[1], BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return values, scales


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, k] to values [T, k] e4m3 and scales [T, 1] float32; the scale of a row that is not finite is NaN."""
    x = x.contiguous()
    values, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty((len(x), 1), dtype=torch.float32)
    if len(x):
        round_rows_kernel[(len(x),)](
            x, values, scales, x.shape[1], SMALLEST=SMALLEST, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return values, scales
