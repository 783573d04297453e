"""K and V in 8 bits: each head of each token is rounded to integers and keeps a scale of its own.

A slice of the pool is bytes then: the values of a block [block_size, kv_heads, head_dim], behind them the scales
[block_size, kv_heads] of type SCALE. Values are integers of 255 steps of one size. A head with a number that is not
finite has NaN for a scale, so that none of its values is read as sound. The native kernels
(`engine/execution/cpu/native/src/cells.h`) and those of `engine.triton_kernels` read and write the same integers.
"""

import torch
from torch import Tensor

SCALE = torch.bfloat16
"""Its range is that of the values. A scale is rounded upwards, so that no value is cut off."""
INTEGERS = torch.int8
STEPS = 127


def is_bytes(dtype: torch.dtype) -> bool:
    """Return whether a pool of this type keeps its cells as integers with scales."""
    return dtype == INTEGERS


def slice_elements(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements of `dtype` that K, or V, of a block take in one layer; of 8 bits with the scales."""
    heads = block_size * num_kv_heads
    return heads * head_dim + (heads * SCALE.itemsize if is_bytes(dtype) else 0)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., d] of any floating type: int8 values [..., d] and scales [...]."""
    wide = x.float()
    least = wide.abs().amax(-1) / STEPS
    upwards = ((least.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    scales = upwards.masked_fill(~wide.isfinite().all(-1), float("nan"))
    inverse = scales.reciprocal().nan_to_num(0.0, posinf=0.0).unsqueeze(-1)
    exact = (wide * inverse).clamp(-STEPS, STEPS).nan_to_num(0.0)
    return exact.round().to(INTEGERS), scales.to(SCALE)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply int8 values [..., d] by their scales [...]: [..., d] of `dtype`."""
    return (values.float() * scales.float().unsqueeze(-1)).to(dtype)


class ByteSlices:
    """`values [slices, block_size, kv_heads, head_dim]` of 8 bits and `scales [slices, block_size, kv_heads]`, views of
    slices of bytes [n, `slice_elements`], whose type is that of the values."""

    def __init__(self, slices: Tensor, block_size: int, num_kv_heads: int, head_dim: int) -> None:
        shape, values = (len(slices), block_size, num_kv_heads), block_size * num_kv_heads * head_dim
        self.values = torch.unflatten(slices[:, :values], 1, (*shape[1:], head_dim))
        self.scales = slices[:, values:].view(SCALE).view(shape)

    @classmethod
    def of(cls, values: Tensor) -> "ByteSlices":
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
