"""K and V in 8 bits: each head of each token is rounded to 255 steps of its own and keeps the size of a step.

A slice of the pool is bytes then: the values of a block [block_size, kv_heads, head_dim], behind them the scales
[block_size, kv_heads] of type SCALE. A head with a number that is not finite has NaN for a scale, so that nothing of it
is read as if it were sound. The native kernels (`engine/execution/cpu/native/src/cells.h`) and those of
`engine.triton_kernels` read and write the same.
"""

import torch
from torch import Tensor

SCALE = torch.bfloat16
"""Its range is that of what is rounded. A scale is rounded upwards, so that no value is cut off."""
STEPS = 127


def slice_elements(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that K, or V, of a block take in one layer; of int8 with the scales."""
    heads = block_size * num_kv_heads
    return heads * head_dim + (heads * SCALE.itemsize if dtype == torch.int8 else 0)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] of any floating type -> values [..., d] int8 and scales [...]."""
    wide = x.float()
    least = wide.abs().amax(-1) / STEPS
    upwards = ((least.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    scales = upwards.masked_fill(~wide.isfinite().all(-1), float("nan"))
    inverse = scales.reciprocal().nan_to_num(0.0, posinf=0.0).unsqueeze(-1)
    steps = (wide * inverse).round().clamp(-STEPS, STEPS)
    return steps.nan_to_num(0.0).to(torch.int8), scales.to(SCALE)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """values [..., d] int8 and scales [...] -> [..., d]."""
    return (values.float() * scales.float().unsqueeze(-1)).to(dtype)


class Int8Slices:
    """`values [slices, block_size, kv_heads, head_dim]` int8 and `scales [slices, block_size, kv_heads]`, views of
    slices of bytes [n, `slice_elements`]."""

    def __init__(self, slices: Tensor, block_size: int, num_kv_heads: int, head_dim: int) -> None:
        shape, values = (len(slices), block_size, num_kv_heads), block_size * num_kv_heads * head_dim
        self.values = torch.unflatten(slices[:, :values], 1, (*shape[1:], head_dim))
        self.scales = slices[:, values:].view(SCALE).view(shape)

    @classmethod
    def of(cls, values: Tensor) -> "Int8Slices":
        """The slices whose values are seen in this view [slices, block_size, kv_heads, head_dim]."""
        count, stride = len(values), values.stride(0)
        return cls(values.as_strided((count, stride), (stride, 1)), *values.shape[1:])

    def write(self, cells: Tensor, x: Tensor) -> None:
        """Round x [n, kv_heads, head_dim] into cells [n]: slice * block_size + token."""
        block_size = self.values.shape[1]
        where = (cells // block_size, cells % block_size)
        self.values[where], self.scales[where] = quantize(x)

    def read(self, slices: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, block_size * kv_heads * head_dim] of slices [n]."""
        values, scales = self.values.index_select(0, slices), self.scales.index_select(0, slices)
        return dequantize(values, scales, dtype).flatten(1)
