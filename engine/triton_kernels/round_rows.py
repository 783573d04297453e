# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Rows of a linear layer's input as floats of 8 bits (e4m3), with a scale for each. Twin: engine.models.float8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
SMALLEST = 1e-12


@triton.jit
def nearest_float(exact):
    """The float32 that an e4m3 holds: four digits, or steps of 2**-9 below 2**-6; halves to even. The cast that follows
    has nothing left to round, which the interpreter's does without a carry into the exponent."""
    bits = exact.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (exact + 24576.0) - 24576.0  # 1.5 * 2**14: its last digit is 2**-9
    return tl.where(tl.abs(exact) < 0.015625, small, normal)


@triton.jit
def round_part(part, scale):
    """part float32 [n], scale -> what of e4m3 is nearest to part / scale, in float32."""
    exact = tl.div_rn(part, tl.zeros_like(part) + scale)
    return nearest_float(tl.minimum(tl.maximum(exact, -448.0), 448.0))


@triton.jit
def scale_of(top, given, SMALLEST: tl.constexpr, HAS_SCALE: tl.constexpr):
    """The scale of a row whose largest is `top`, unless one is given."""
    scale = tl.maximum(top, SMALLEST) * (1.0 / 448.0)
    if HAS_SCALE:
        scale = tl.load(given)
    return scale


@triton.jit
def round_rows_kernel(x, values, scales, width, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): its largest, then its values, which the second reading finds in the cache."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.float32)  # not a number once a value is not finite: a maximum would pass over it
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
    """Program (row), in one reading. `given` [1]: the scale of all rows, which one that is not finite does not get."""
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
    """Room for values [T, width] e4m3 and scales [T, 1] float32 of x's rows."""
    values = torch.empty((len(x), width), dtype=torch.float8_e4m3fn, device=x.device)
    return values, x.new_empty((len(x), 1), dtype=torch.float32)


def scale_rows(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, k], scale [1] float32 -> floats [T, k] e4m3, at most 448, and the scale for each row [T, 1]; NaN in that of
    a row that is not finite."""
    x = x.contiguous()
    values, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty((len(x), 1), dtype=torch.float32)
    if len(x):
        scale_rows_kernel[(len(x),)](
            x, scale, values, scales, x.shape[1], BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return values, scales


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, k] -> floats [T, k] e4m3 and scales [T, 1] float32; NaN in the scale of a row that is not finite."""
    x = x.contiguous()
    values, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty((len(x), 1), dtype=torch.float32)
    if len(x):
        round_rows_kernel[(len(x),)](
            x, values, scales, x.shape[1], SMALLEST=SMALLEST, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return values, scales
