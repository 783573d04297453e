# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RMS-norm, with the residual addition before it fused in, and the rounding to floats of 8 bits behind it. Twin:
engine.models.torch_ops."""

import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.round_rows import SMALLEST, empty_rows, round_part, scale_of


@triton.jit
def rms_norm_kernel(
    x, weight, residual, out, total_out, x_stride, residual_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = out.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        rest = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        # The sum is rounded before it is normalised: what the next layer reads is what this norm saw.
        total = (values + rest).to(kind)
        tl.store(total_out + row * width + columns, total, mask=mask)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = values * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed.to(kind), mask=mask)


@triton.jit
def rms_norm_rounded_kernel(
    x, weight, residual, given, out, scales, total_out, x_stride, residual_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. What is rounded to 8 bits is what the norm alone would have stored."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = x.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        rest = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        total = (values + rest).to(kind)
        tl.store(total_out + row * width + columns, total, mask=mask)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = values * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    normed = normed.to(kind).to(tl.float32)
    step = scale_of(tl.max(tl.abs(normed), 0), given, SMALLEST, HAS_SCALE)
    tl.store(scales + row, step + tl.sum(normed - normed, 0))  # not a number for a row that is not finite
    tl.store(out + row * width + columns, round_part(normed, step).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight. x [n, width], rows contiguous; weight [width]: [n, width]."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, normed; and residual + x. All [n, width], rows contiguous; weight [width]."""
    return _launch(x, residual, weight, eps)


def rms_norm_rounded(x: Tensor, weight: Tensor, eps: float, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm as floats of 8 bits: values [n, width] e4m3 and scales [n, 1] float32, by row or by `scale` [1]."""
    return _launch_rounded(x, None, weight, eps, scale)[0]


def add_rms_norm_rounded(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """residual + x, normed and rounded; and residual + x."""
    return _launch_rounded(x, residual, weight, eps, scale)


def _launch_rounded(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, scale: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    check_rows(x, residual, weight)
    width = x.shape[1]
    out, scales = empty_rows(x, width)
    total = x if residual is None else x.new_empty(x.shape)
    other = x if residual is None else residual
    if len(x):
        config = configs.row_config(width)
        rms_norm_rounded_kernel[(len(x),)](
            x, weight, other, scales if scale is None else scale, out, scales, total, x.stride(0), other.stride(0),
            width, eps, HAS_RESIDUAL=residual is not None, HAS_SCALE=scale is not None, SMALLEST=SMALLEST,
            BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return (out, scales), total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_rows(x, residual, weight)
    out = x.new_empty(x.shape)
    total = out if residual is None else x.new_empty(x.shape)
    other = x if residual is None else residual
    if len(x):
        config = configs.row_config(x.shape[1])
        rms_norm_kernel[(len(x),)](
            x, weight, other, out, total, x.stride(0), other.stride(0), x.shape[1], eps,
            HAS_RESIDUAL=residual is not None, BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return out, total


def check_rows(x: Tensor, residual: Tensor | None, *weights: Tensor | None) -> None:
    """Assert the contract that the norms share."""
    for name, value in (("x", x), ("residual", residual)):
        if value is not None:
            assert value.dim() == 2 and value.shape == x.shape, f"{name}: {value.shape}, not {x.shape}"
            assert value.dtype == x.dtype and value.stride(1) == 1, f"{name}: contiguous rows of {x.dtype}"
    for weight in weights:
        assert weight is None or (weight.shape == x.shape[1:] and weight.is_contiguous()), f"weight: [{x.shape[1]}]"
