"""8-bit K and V: each head of each token is rounded to integers with its own scale.

A slice of the pool consists of bytes: the values of a block [block_size, kv_heads, head_dim], then the scales
[block_size, kv_heads] of type SCALE. Values are integers in -STEPS ... STEPS. A head with a value that is not finite
gets the scale NaN, so that none of its values is used silently. The native kernels
(`engine/execution/cpu/native/src/cells.h`) and those of `engine.triton_kernels` read and write the same integers.
"""

import torch
from torch import Tensor

SCALE = torch.bfloat16
"""Type of scales, with the range of the values. Scales are rounded up, so that no value is clipped."""
INTEGERS = torch.int8
STEPS = 127


def is_bytes(dtype: torch.dtype) -> bool:
    """Return whether a pool of this type stores cells as integers with scales."""
    return dtype == INTEGERS


def slice_elements(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements of `dtype` that K (or V) of a block takes in one layer, including scales for 8 bits."""
    heads = block_size * num_kv_heads
    return heads * head_dim + (heads * SCALE.itemsize if is_bytes(dtype) else 0)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., d] of any floating type to int8 values [..., d] and scales [...]."""
    wide = x.float()
    least = wide.abs().amax(-1) / STEPS
    upwards = ((least.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    scales = upwards.masked_fill(~wide.isfinite().all(-1), float("nan"))
    inverse = scales.reciprocal().nan_to_num(0.0, posinf=0.0).unsqueeze(-1)
    exact = (wide * inverse).clamp(-STEPS, STEPS).nan_to_num(0.0)
    return exact.round().to(INTEGERS), scales.to(SCALE)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply int8 values [..., d] by their scales [...]; returns [..., d] of `dtype`."""
    return (values.float() * scales.float().unsqueeze(-1)).to(dtype)


class ByteSlices:
    """Views of byte slices [n, `slice_elements`], whose type is that of the values.

    `values` is [slices, block_size, kv_heads, head_dim], `scales` is [slices, block_size, kv_heads].
    """

    def __init__(self, slices: Tensor, block_size: int, num_kv_heads: int, head_dim: int) -> None:
        shape, values = (len(slices), block_size, num_kv_heads), block_size * num_kv_heads * head_dim
        self.values = torch.unflatten(slices[:, :values], 1, (*shape[1:], head_dim))
        self.scales = slices[:, values:].view(SCALE).view(shape)

    @classmethod
    def of(cls, values: Tensor) -> "ByteSlices":
        """Return the slices whose values are the view `values` [slices, block_size, kv_heads, head_dim]."""
        count, stride = len(values), values.stride(0)
        return cls(values.as_strided((count, stride), (stride, 1)), *values.shape[1:])

    def write(self, cells: Tensor, x: Tensor) -> None:
        """Round x [n, kv_heads, head_dim] into cells [n], numbered slice * block_size + token."""
        block_size = self.values.shape[1]
        where = (cells // block_size, cells % block_size)
        self.values[where], self.scales[where] = quantize(x)

    def read(self, slices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return slices [n] as [n, block_size * kv_heads * head_dim] of `dtype`."""
        values, scales = self.values.index_select(0, slices), self.scales.index_select(0, slices)
        return dequantize(values, scales, dtype).flatten(1)
