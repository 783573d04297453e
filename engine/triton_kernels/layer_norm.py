# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Layer norm, with the residual addition before it fused in. Twin: engine.execution.reference.norm."""

import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.rms_norm import check_rows


@triton.jit
def layer_norm_kernel(
    x, weight, bias, residual, out, x_stride, residual_stride, out_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. The variance is taken around the mean, in a second pass over registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = out.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * residual_stride + columns
        total = (values + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(kind)
        tl.store(at, total, mask=mask)
        values = total.to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    normed = centred * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, normed.to(kind), mask=mask)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, eps: float, residual: Tensor | None = None
) -> None:
    """out = (x - mean) / std * weight + bias; with a residual, first residual += x, in place, and its norm is taken.

    Shapes: x, out, residual [n, width], rows contiguous, one dtype; weight, bias [width]. `out` may be `x`.
    """
    check_rows(x, out, residual, weight, bias)
    if len(x) == 0:
        return
    config = configs.row_config(x.shape[1])
    other = x if residual is None else residual
    layer_norm_kernel[(len(x),)](
        x, weight, weight if bias is None else bias, other, out, x.stride(0), other.stride(0), out.stride(0),
        x.shape[1], eps, HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None, BLOCK=config.block_n,
        **config.options,
    )  # fmt: skip
