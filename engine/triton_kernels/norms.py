# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RMS norm and layer norm. Fused variants add a residual before the norm, normalise the addend, add a second branch, or
round the result to 8-bit floats. Twin: engine.models.torch_ops."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.round_rows import SMALLEST, empty_rows, round_part, scale_of


@triton.jit
def source_row(row, rows, HAS_ROWS: tl.constexpr):
    """Return the input row from which output row `row` is computed."""
    if HAS_ROWS:
        row = tl.load(rows + row).to(tl.int64)
    return row


@triton.jit
def normed_row(values, weight, columns, width, eps):
    """Return the norm of a row [BLOCK] float32 that is zero beyond its width."""
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    return values * scale * tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x, inner, weight, residual, rows, out, total_out, x_stride, residual_stride, width, eps,
    HAS_INNER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per output row."""
    row = tl.program_id(0).to(tl.int64)
    source = source_row(row, rows, HAS_ROWS)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = out.dtype.element_ty
    values = tl.load(x + source * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_INNER:
        values = normed_row(values, inner, columns, width, eps).to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        rest = tl.load(residual + source * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        # Round the sum before the norm: the next layer reads the rounded residual.
        total = (values + rest).to(kind)
        tl.store(total_out + row * width + columns, total, mask=mask)
        values = total.to(tl.float32)
    normed = normed_row(values, weight, columns, width, eps)
    tl.store(out + row * width + columns, normed.to(kind), mask=mask)


@triton.jit
def rms_norm_rounded_kernel(
    x, inner, weight, residual, rows, given, out, scales, total_out, x_stride, residual_stride, width, eps,
    HAS_INNER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_SCALE: tl.constexpr,
    SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per output row. The unrounded norm is rounded to its own type first, then to 8 bits."""
    row = tl.program_id(0).to(tl.int64)
    source = source_row(row, rows, HAS_ROWS)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = x.dtype.element_ty
    values = tl.load(x + source * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_INNER:
        values = normed_row(values, inner, columns, width, eps).to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        rest = tl.load(residual + source * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        total = (values + rest).to(kind)
        tl.store(total_out + row * width + columns, total, mask=mask)
        values = total.to(tl.float32)
    normed = normed_row(values, weight, columns, width, eps).to(kind).to(tl.float32)
    step = scale_of(tl.max(tl.abs(normed), 0), given, SMALLEST, HAS_SCALE)
    tl.store(scales + row, step + tl.sum(normed - normed, 0))  # NaN if any value is not finite
    tl.store(out + row * width + columns, round_part(normed, step).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: Tensor | None = None,
    inner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(mean(x²) + eps) * weight for the sum of residual (if any) and x, and that sum.

    Shapes: x, residual [n, width], rows contiguous; weight [width]. With `rows [m]` int32 both results are of these
    rows only, [m, width]. With `inner [width]` x is normalised by it before the addition.
    """
    count, width = check_rows(x, residual, weight, inner, rows=rows), x.shape[1]
    out = x.new_empty((count, width))
    total = x if residual is None else x.new_empty((count, width))
    other = x if residual is None else residual
    if count:
        config = configs.row_config(width)
        rms_norm_kernel[(count,)](
            x, weight if inner is None else inner, weight, other, x if rows is None else rows, out, total, x.stride(0),
            other.stride(0), width, eps, HAS_INNER=inner is not None, HAS_RESIDUAL=residual is not None,
            HAS_ROWS=rows is not None, BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return out, total


def add_rms_norm_rounded(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scale: Tensor | None,
    rows: Tensor | None = None,
    inner: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Like `add_rms_norm`, with the norm as 8-bit floats: values [n, width] e4m3 and scales [n, 1] float32, per row or
    `scale` [1]."""
    count, width = check_rows(x, residual, weight, inner, rows=rows), x.shape[1]
    out, scales = empty_rows(x if rows is None else rows, width)
    total = x if residual is None else x.new_empty((count, width))
    other = x if residual is None else residual
    if count:
        config = configs.row_config(width)
        rms_norm_rounded_kernel[(count,)](
            x, weight if inner is None else inner, weight, other, x if rows is None else rows,
            scales if scale is None else scale, out, scales, total, x.stride(0), other.stride(0), width, eps,
            HAS_INNER=inner is not None, HAS_RESIDUAL=residual is not None, HAS_ROWS=rows is not None,
            HAS_SCALE=scale is not None, SMALLEST=SMALLEST, BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return (out, scales), total


def check_rows(x: Tensor, residual: Tensor | None, *weights: Tensor | None, rows: Tensor | None = None) -> int:
    """Assert the common contract of the norms; return the number of output rows."""
    for name, value in (("x", x), ("residual", residual)):
        if value is not None:
            assert value.dim() == 2 and value.shape == x.shape, f"{name}: {value.shape}, not {x.shape}"
            assert value.dtype == x.dtype and value.stride(1) == 1, f"{name}: contiguous rows of {x.dtype}"
    for weight in weights:
        assert weight is None or (weight.shape == x.shape[1:] and weight.is_contiguous()), f"weight: [{x.shape[1]}]"
    assert rows is None or (rows.dtype == torch.int32 and rows.is_contiguous()), "rows: [m] int32, contiguous"
    return len(x if rows is None else rows)


@triton.jit
def layer_norm_kernel(
    x, beside, weight, bias, residual, rows, out, total_out, x_stride, beside_stride, residual_stride, width, eps,
    HAS_BESIDE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per output row. The variance is taken around the mean, in a second pass over registers."""
    row = tl.program_id(0).to(tl.int64)
    source = source_row(row, rows, HAS_ROWS)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = out.dtype.element_ty
    values = tl.load(x + source * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BESIDE:
        values += tl.load(beside + source * beside_stride + columns, mask=mask, other=0.0).to(tl.float32)
        values = values.to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        rest = tl.load(residual + source * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        total = (values + rest).to(kind)
        tl.store(total_out + row * width + columns, total, mask=mask)
        values = total.to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    normed = centred * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed.to(kind), mask=mask)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rows: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias for the sum of residual (if any) and x, and that sum.

    Shapes: x, residual, beside [n, width], rows contiguous; weight, bias [width]. `rows`: as in `add_rms_norm`. With
    `beside`, x + beside replaces x.
    """
    count, width = check_rows(x, residual, weight, bias, rows=rows), x.shape[1]
    check_rows(x, beside)
    out = x.new_empty((count, width))
    total = x if residual is None else x.new_empty((count, width))
    other, second = (x if each is None else each for each in (residual, beside))
    if count:
        config = configs.row_config(width)
        layer_norm_kernel[(count,)](
            x, second, weight, weight if bias is None else bias, other, x if rows is None else rows, out, total,
            x.stride(0), second.stride(0), other.stride(0), width, eps, HAS_BESIDE=beside is not None,
            HAS_RESIDUAL=residual is not None, HAS_ROWS=rows is not None, HAS_BIAS=bias is not None,
            BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return out, total
