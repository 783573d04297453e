# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Layer norm with the preceding residual addition fused in, of one or two branches. Twin: engine.models.torch_ops."""

import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.rms_norm import check_rows, source_row


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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias. x [n, width], rows contiguous; weight, bias [width]."""
    return add_layer_norm(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rows: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of residual + x, and residual + x; without a residual, the norm of x twice.

    Shapes: x, residual, beside [n, width], rows contiguous; weight, bias [width]. `rows`: as in `add_rms_norm`. With
    `beside`, x + beside replaces x.
    """
    count, width = check_rows(x, residual, weight, bias, rows=rows), x.shape[1]
    check_rows(x, beside)
    out = x.new_empty((count, width))
    total = out if residual is None else x.new_empty((count, width))
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
