# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Gate of a feed-forward layer: silu(gate) * up (SwiGLU) or gelu_tanh(gate) * up (GeGLU), from one projection. SwiGLU
can be rounded to 8-bit floats for a next layer that computes with them.

ReLU and GELU alone need no kernel. Both follow a plain projection: torch._addmm_activation lets cuBLASLt apply ReLU and
the tanh form of GELU in its epilogue. For the exact form, torch's operator is already a single pass. Twin:
engine.models.torch_ops.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.round_rows import BLOCK, SMALLEST, empty_rows, round_part, scale_of


@triton.jit
def silu_and_mul_kernel(x, out, x_stride, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y))
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    value = gate / (1.0 + tl.exp(-inner)) * up
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated(x, row, x_stride, width, columns):
    """Return silu(gate) * up of some columns, rounded as in the kernel above, in float32; zeros beyond the width."""
    mask = columns < width
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def silu_and_mul_rounded_kernel(
    x, given, out, scales, x_stride, width, HAS_SCALE: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row): find the maximum unless a scale is given, then round the values."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros((BLOCK,), tl.float32)
    if not HAS_SCALE:
        for start in range(0, width, BLOCK):
            top = tl.maximum(top, tl.abs(_gated(x, row, x_stride, width, start + tl.arange(0, BLOCK))))
    step = scale_of(tl.max(top, 0), given, SMALLEST, HAS_SCALE)
    bad = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = _gated(x, row, x_stride, width, columns)
        bad += part - part
        tl.store(out + row * width + columns, round_part(part, step).to(out.dtype.element_ty), mask=columns < width)
    tl.store(scales + row, step + tl.sum(bad, 0))  # NaN if any value is not finite


def silu_and_mul_rounded(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up as 8-bit floats: values [n, width] e4m3 and scales [n, 1] float32, per row or `scale` [1].
    x as in `silu_and_mul`."""
    assert x.dim() == 2 and x.shape[1] % 2 == 0 and x.stride(1) == 1, f"x: rows of 2 * width, not {x.shape}"
    width = x.shape[1] // 2
    out, scales = empty_rows(x, width)
    if len(x):
        silu_and_mul_rounded_kernel[(len(x),)](
            x, scales if scale is None else scale, out, scales, x.stride(0), width, HAS_SCALE=scale is not None,
            SMALLEST=SMALLEST, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return out, scales


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [n, width]. x [n, 2 * width], gate first, rows contiguous."""
    return _launch(x, gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up, [n, width]. x [n, 2 * width], gate first, rows contiguous."""
    return _launch(x, gelu=True)


def _launch(x: Tensor, *, gelu: bool) -> Tensor:
    assert x.dim() == 2 and x.shape[1] % 2 == 0 and x.stride(1) == 1, f"x: rows of 2 * width, not {x.shape}"
    width = x.shape[1] // 2
    out = x.new_empty((len(x), width))
    if len(x):
        config = configs.FLAT
        grid = (len(x), -(-width // config.block_n))
        silu_and_mul_kernel[grid](x, out, x.stride(0), width, BLOCK=config.block_n, GELU=gelu, **config.options)
    return out
