# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Layer norm, with the residual addition before it fused in. Twin: engine.models.torch_ops."""

import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.rms_norm import check_rows


@triton.jit
def layer_norm_kernel(
    x, weight, bias, residual, out, total_out, x_stride, residual_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. The variance is taken around the mean, in a second pass over registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = out.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        rest = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
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
    """(x - mean) / sqrt(variance + eps) * weight + bias. x [n, width], rows contiguous; weight and bias [width]."""
    return _launch(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """residual + x, layer-normed; and residual + x. All [n, width], rows contiguous; weight and bias [width]."""
    return _launch(x, residual, weight, bias, eps)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    check_rows(x, residual, weight, bias)
    out = x.new_empty(x.shape)
    total = out if residual is None else x.new_empty(x.shape)
    other = x if residual is None else residual
    if len(x):
        config = configs.row_config(x.shape[1])
        layer_norm_kernel[(len(x),)](
            x, weight, weight if bias is None else bias, other, out, total, x.stride(0), other.stride(0), x.shape[1],
            eps, HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None, BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return out, total
