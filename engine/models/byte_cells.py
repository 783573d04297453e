"""K and V in 8 bits: each head of each token is rounded to numbers of 8 bits and keeps a scale of its own.

A slice of the pool is bytes then: the values of a block [block_size, kv_heads, head_dim], behind them the scales
[block_size, kv_heads] of type SCALE. The type of a pool says which numbers they are (`CELL_TYPES`): whole ones, 255
steps of one size, or the bits of floats (e4m3), whose steps are smaller where a value is smaller. Floats have a scale
too, where others store them without one: it costs two bytes of a head, and whatever a model's keys are, none is cut
off. A head with a number that is not finite has NaN for a scale, so that nothing of it is read as if it were sound.
The native kernels (`engine/execution/cpu/native/src/cells.h`) read and write the same integers, those of
`engine.triton_kernels` both.
"""

import torch
from torch import Tensor

SCALE = torch.bfloat16
"""Its range is that of what is rounded. A scale is rounded upwards, so that no value is cut off."""
INTEGERS, FLOATS = torch.int8, torch.uint8
CELL_TYPES = {"int8": INTEGERS, "fp8": FLOATS}
"""`--kv-cache-dtype` -> the type of a pool. Floats are bytes to everybody but who rounds and widens them: every
operator copies bytes, and Triton refuses the type itself, even behind a pointer, on devices before 8.9."""
STEPS = 127
LARGEST_FLOAT = 448.0
_FLOAT8 = torch.float8_e4m3fn


def is_bytes(dtype: torch.dtype) -> bool:
    """Whether a pool of this type keeps its cells so."""
    return dtype in (INTEGERS, FLOATS)


def slice_elements(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that K, or V, of a block take in one layer; of 8 bits with the scales."""
    heads = block_size * num_kv_heads
    return heads * head_dim + (heads * SCALE.itemsize if is_bytes(dtype) else 0)


def quantize(x: Tensor, kind: torch.dtype = INTEGERS) -> tuple[Tensor, Tensor]:
    """x [..., d] of any floating type -> values [..., d] of `kind` and scales [...]."""
    wide, most = x.float(), STEPS if kind == INTEGERS else LARGEST_FLOAT
    least = wide.abs().amax(-1) / most
    upwards = ((least.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    scales = upwards.masked_fill(~wide.isfinite().all(-1), float("nan"))
    inverse = scales.reciprocal().nan_to_num(0.0, posinf=0.0).unsqueeze(-1)
    exact = (wide * inverse).clamp(-most, most).nan_to_num(0.0)
    values = exact.round().to(INTEGERS) if kind == INTEGERS else exact.to(_FLOAT8).view(FLOATS)
    return values, scales.to(SCALE)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """values [..., d] of 8 bits and scales [...] -> [..., d]."""
    numbers = values if values.dtype == INTEGERS else values.view(_FLOAT8)
    return (numbers.float() * scales.float().unsqueeze(-1)).to(dtype)


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
        self.values[where], self.scales[where] = quantize(x, self.values.dtype)

    def read(self, slices: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, block_size * kv_heads * head_dim] of slices [n]."""
        values, scales = self.values.index_select(0, slices), self.scales.index_select(0, slices)
        return dequantize(values, scales, dtype).flatten(1)
