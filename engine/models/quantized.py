"""Linear layers on 8-bit integers (W8A8), symmetric, rounded to the nearest of 255 values.

Weights are rounded once, with a scale per output; inputs are rounded in every call, with a scale per token. These torch
operators are the twin of the native kernels: the same integers, sums and products of scales. Both agree to the last bit
before the bias.
"""

from copy import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor

_HIGHEST = 127.0
_SMALLEST = 1e-30  # rows with a smaller maximum become zero


class RoundedWeight(NamedTuple):
    """A weight in 8 bits.

    Attributes:
        values: [n, k] int8 or e4m3.
        scales: [n] float32.
        dtype: Type of a layer's inputs and outputs.
        inputs: Scale [1] float32 with which all inputs are rounded; None: one scale per token.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype
    inputs: Tensor | None = None


def as_bytes(weight: Tensor) -> Tensor:
    """Return a weight as bytes [n] uint8, a view if it is contiguous."""
    return weight.contiguous().view(torch.uint8).flatten()


def round_weight(weight: Tensor | RoundedWeight) -> RoundedWeight:
    """Round a weight to integers unless it is rounded already."""
    return weight if isinstance(weight, RoundedWeight) else RoundedWeight(*quantize_weight(weight), weight.dtype)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [n, k] to integers [n, k] int8 and scales [n] float32. Raises ValueError if it is not finite."""
    values, scales = quantize_rows(weight)
    if not bool(scales.isfinite().all()):
        raise ValueError("the weight has values that are not finite")
    return values, scales


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, k] to integers [T, k] int8 and scales [T] float32; NaN for a row with a value that is not finite."""
    floats = x.float()
    top = floats.abs().amax(-1)
    finite = floats.isfinite().all(-1)
    highest = torch.full_like(top, _HIGHEST)  # a tensor: by a number, torch multiplies by a reciprocal, rounding twice
    factor = torch.where(finite & (top > _SMALLEST), highest / top, 0.0)
    values = torch.where(finite[:, None], floats * factor[:, None], 0.0).round().to(torch.int8)
    return values, torch.where(finite, top / highest, torch.nan)


class ScaledLinear:
    """A weight in 8 bits: values [n, k], a scale per output, bias [n]. `dtype` is the type of inputs and outputs."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = values.shape
        self._values, self._scales, self._bias, self._dtype = values, scales, bias, dtype

    def outputs_from(self, first: int) -> Self:
        part = copy(self)
        part.out_features -= first
        part._values, part._scales = self._values[first:], self._scales[first:]
        part._bias = None if self._bias is None else self._bias[first:]
        return part

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        weight = self._values[first:].float() * self._scales[first:].view(-1, 1)
        return weight.to(self._dtype), None if self._bias is None else self._bias[first:]

    def data(self) -> Tensor:
        return as_bytes(self._values)

    def on(self, data: Tensor) -> Self:
        moved = copy(self)
        moved._values = data.view(self._values.dtype).view(self._values.shape)
        return moved


class QuantizedLinear(ScaledLinear):
    """A `Linear` on 8-bit integers, scales [n]."""

    def __call__(self, x: Tensor) -> Tensor:
        result = self.product(x)
        if self._bias is not None:
            result = result + self._bias.float()
        return result.to(self._dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return the product of x [..., k], [..., n] float32, without the bias."""
        rows, scales = quantize_rows(x.reshape(-1, self.in_features))
        if not len(rows):
            return torch.empty(*x.shape[:-1], self.out_features)
        sums = torch._int_mm(rows, self._values.t())
        return (sums.float() * self._scales * scales[:, None]).view(*x.shape[:-1], self.out_features)


def make_quantized(weight: Tensor | RoundedWeight, bias: Tensor | None = None, **_gated: bool) -> QuantizedLinear:
    """Round a weight [n, k], which is not kept (a MakeLinear)."""
    values, scales, dtype, _ = round_weight(weight)
    return QuantizedLinear(values, scales, bias, dtype)
