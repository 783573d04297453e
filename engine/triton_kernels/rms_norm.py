# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RMS-norm, with the residual addition before it fused in. Twin: engine.execution.reference.norm."""

import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs


@triton.jit
def rms_norm_kernel(
    x, weight, residual, out, x_stride, residual_stride, out_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = out.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * residual_stride + columns
        # The sum is rounded before it is normalised: what the next layer reads is what this norm saw.
        total = (values + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(kind)
        tl.store(at, total, mask=mask)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = values * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, normed.to(kind), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, *, eps: float, residual: Tensor | None = None) -> None:
    """out = x / rms(x) * weight; with a residual, first residual += x, in place, and its norm is taken.

    Shapes: x, out, residual [n, width], rows contiguous, one dtype; weight [width]. `out` may be `x`.
    """
    check_rows(x, out, residual, weight)
    if len(x) == 0:
        return
    config = configs.row_config(x.shape[1])
    other = x if residual is None else residual
    rms_norm_kernel[(len(x),)](
        x, weight, other, out, x.stride(0), other.stride(0), out.stride(0), x.shape[1], eps,
        HAS_RESIDUAL=residual is not None, BLOCK=config.block_n, **config.options,
    )  # fmt: skip


def check_rows(x: Tensor, out: Tensor, residual: Tensor | None, *weights: Tensor | None) -> None:
    """Assert the contract that the norms share."""
    for name, value in (("x", x), ("out", out), ("residual", residual)):
        if value is not None:
            assert value.dim() == 2 and value.shape == x.shape, f"{name}: {value.shape}, not {x.shape}"
            assert value.dtype == x.dtype and value.stride(1) == 1, f"{name}: contiguous rows of {x.dtype}"
    for weight in weights:
        assert weight is None or (weight.shape == x.shape[1:] and weight.is_contiguous()), f"weight: [{x.shape[1]}]"
