# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The gate of a feed-forward layer: silu(gate) * up (SwiGLU) or gelu_tanh(gate) * up (GeGLU), from one projection.

ReLU and GELU alone have no kernel. Both follow a plain projection: torch._addmm_activation lets cuBLASLt apply ReLU and
the tanh form of GELU in its epilogue, and for the exact form torch's own operator is the one pass that a kernel here
would be. Twin: engine.models.torch_ops.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs


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


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up. x [n, 2 * width], gate first, rows contiguous: [n, width]."""
    return _launch(x, gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """gelu_tanh(gate) * up. x [n, 2 * width], gate first, rows contiguous: [n, width]."""
    return _launch(x, gelu=True)


def _launch(x: Tensor, *, gelu: bool) -> Tensor:
    assert x.dim() == 2 and x.shape[1] % 2 == 0 and x.stride(1) == 1, f"x: rows of 2 * width, not {x.shape}"
    width = x.shape[1] // 2
    out = x.new_empty((len(x), width))
    if len(x):
        config = configs.flat_config()
        grid = (len(x), -(-width // config.block_n))
        silu_and_mul_kernel[grid](x, out, x.stride(0), width, BLOCK=config.block_n, GELU=gelu, **config.options)
    return out
