"""Linear layers on 8-bit integers (W8A8), symmetric, rounded to the nearest of 255 values, and on 4-bit weights.

Weights are rounded once, with a scale per output; inputs are rounded in every call, with a scale per token. These torch
operators are the twin of the native kernels: the same integers, sums and products of scales. Both agree to the last bit
before the bias. Products of 4-bit weights have a scale per group of inputs, and agree to the rounding of float32.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

_HIGHEST = 127.0
_SMALLEST = 1e-30  # rows with a smaller maximum become zero
GROUPS = (128, 64, 32)
"""Inputs that share a scale of a 4-bit weight in memory, largest first; larger groups are divided."""
GROUP = 32
"""Inputs that share a scale of a weight that is rounded here."""


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


class PackedWeight(NamedTuple):
    """A weight in 4 bits: (value - zero) * scale, with a scale and a zero point per output and group of inputs.

    Attributes:
        values: [n, k / 2] uint8, the first of two inputs in the lower bits.
        scales: [n, groups] of a floating type.
        zeros: [n, groups] uint8 of 0 to 15.
        dtype: Type of a layer's inputs and outputs.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return 2 * self.values.shape[1] // self.scales.shape[1]

    @classmethod
    def stacked(cls, parts: Sequence["PackedWeight"], stack: Callable[[list[Tensor]], Tensor]) -> "PackedWeight":
        """Stack weights with the same groups along their outputs."""
        values, scales = stack([each.values for each in parts]), stack([each.scales for each in parts])
        return cls(values, scales, stack([each.zeros for each in parts]), parts[0].dtype)

    def part(self, first: int) -> "PackedWeight":
        """Return the outputs from `first` on."""
        return self._replace(values=self.values[first:], scales=self.scales[first:], zeros=self.zeros[first:])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), 2 * self.values.shape[1]

    def dense(self) -> Tensor:
        """Return the weight [n, k] float32."""
        return self._unpacked(torch.float32)

    def unpacked(self) -> Tensor:
        """Return the weight [n, k] of its type."""
        return self._unpacked(self.dtype)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        values = torch.stack((self.values & 15, self.values >> 4), -1)
        return scaled(values.view(self.shape), self.zeros, self.scales, dtype)

    def data(self) -> Tensor:
        return as_bytes(self.values)

    def on(self, data: Tensor) -> "PackedWeight":
        return self._replace(values=data.view(self.values.shape))


def scaled(values: Tensor, zeros: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (values - zeros) * scales of this type [n, k]; values [n, k], the others [n, groups]."""
    n, groups = scales.shape
    wide = values.view(n, groups, -1).to(dtype)
    return wide.sub_(zeros[..., None].to(dtype)).mul_(scales[..., None].to(dtype)).view(n, -1)


class BlockWeight(NamedTuple):
    """A weight in 8-bit floats with a scale per block; blocks divide it.

    Attributes:
        values: [n, k] e4m3.
        scales: [n / rows, padded] float32, one per block; padded to a multiple of 4, as products need them.
        block: Rows and columns of a block.
        dtype: Type of a layer's inputs and outputs.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> "BlockWeight":
        """Return the weight with scales [n / rows, k / columns]."""
        return cls(values, functional.pad(scales, (0, -scales.shape[1] % 4)), block, dtype)

    @classmethod
    def stacked(cls, parts: Sequence["BlockWeight"]) -> "BlockWeight":
        """Stack weights along their outputs."""
        values, scales = torch.cat([each.values for each in parts]), torch.cat([each.scales for each in parts])
        return parts[0]._replace(values=values, scales=scales)

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.values.shape
        return n, k

    def dense(self) -> Tensor:
        """Return the weight [n, k] float32."""
        (n, k), (rows, columns) = self.shape, self.block
        scales = self.scales[:, None, : k // columns, None]
        return self.values.float().view(n // rows, rows, -1, columns).mul_(scales).view(n, k)

    def unpacked(self) -> Tensor:
        """Return the weight [n, k] of its type."""
        return self.dense().to(self.dtype)

    def data(self) -> Tensor:
        return as_bytes(self.values)

    def on(self, data: Tensor) -> "BlockWeight":
        return self._replace(values=data.view(self.values.dtype).view(self.values.shape))


class FloatWeight(NamedTuple):
    """A weight in 4-bit floats (e2m1), with a scale per output and group of inputs.

    Attributes:
        values: [n, k / 2] uint8, the first of two inputs in the lower bits.
        scales: [n, groups] e8m0 (powers of two), or of a floating type.
        dtype: Type of a layer's inputs and outputs.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return 2 * self.values.shape[1] // self.scales.shape[1]

    @classmethod
    def stacked(cls, parts: Sequence["FloatWeight"]) -> "FloatWeight":
        """Stack weights along their outputs."""
        return parts[0]._replace(
            values=torch.cat([each.values for each in parts]), scales=torch.cat([each.scales for each in parts])
        )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), 2 * self.values.shape[1]

    def dense(self) -> Tensor:
        """Return the weight [n, k] float32."""
        return floats_of(self.values, self.scales.float())

    def unpacked(self) -> Tensor:
        """Return the weight [n, k] of its type."""
        return self.dense().to(self.dtype)

    def data(self) -> Tensor:
        return as_bytes(self.values)

    def on(self, data: Tensor) -> "FloatWeight":
        return self._replace(values=data.view(self.values.shape))


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the first eight of the 4-bit values; the others are their negatives


def floats_of(values: Tensor, scales: Tensor) -> Tensor:
    """Return the products [n, k] float32 of values [n, k / 2] as in FloatWeight and scales [n, groups] float32."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=values.device)
    pairs = torch.stack((values & 15, values >> 4), -1).int()
    return table[pairs].view(*scales.shape, -1).mul_(scales.unsqueeze(-1)).flatten(-2)


StoredWeight = RoundedWeight | PackedWeight | BlockWeight | FloatWeight


def group_of(inputs: int, stored: int = 0) -> int | None:
    """Return the group in memory of a weight with so many inputs, `stored` of which share a scale (0: all).

    Returns None if there is none, because a group does not divide them.
    """
    return next((size for size in GROUPS if inputs % size == 0 and stored % size == 0), None)


def pack_values(values: Tensor) -> Tensor:
    """Pack values [n, k] of 0 to 15 into bytes [n, k / 2] uint8."""
    pairs = values.to(torch.uint8).view(len(values), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def pack_weight(weight: Tensor, group: int = GROUP) -> PackedWeight:
    """Round a weight [n, k], k a multiple of the group, to 4 bits between the extremes of each group.

    Raises ValueError if it is not finite.
    """
    groups = weight.float().view(len(weight), -1, group)
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    scales = ((high - low) / 15).clamp_min(_SMALLEST).bfloat16()
    if not bool(scales.isfinite().all()):
        raise ValueError("the weight has values that are not finite")
    each = scales.float()
    zeros = (-low / each).round().clamp(0, 15)
    values = (groups / each[..., None] + zeros[..., None]).round().clamp(0, 15)
    return PackedWeight(pack_values(values.flatten(1)), scales, zeros.to(torch.uint8), weight.dtype)


def as_bytes(weight: Tensor) -> Tensor:
    """Return a weight as bytes [n] uint8, a view if it is contiguous."""
    return weight.contiguous().view(torch.uint8).flatten()


def round_weight(weight: Tensor | StoredWeight) -> RoundedWeight:
    """Round a weight to integers of 8 bits unless it is rounded so already."""
    if isinstance(weight, RoundedWeight):
        return weight
    dense = weight if isinstance(weight, Tensor) else weight.dense()
    return RoundedWeight(*quantize_weight(dense), weight.dtype)


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


def make_quantized(weight: Tensor | StoredWeight, bias: Tensor | None = None, **_gated: bool) -> QuantizedLinear:
    """Round a weight [n, k], which is not kept (a MakeLinear)."""
    values, scales, dtype, _ = round_weight(weight)
    return QuantizedLinear(values, scales, bias, dtype)


class Int4Linear:
    """A `Linear` on a weight of 4 bits, which is unpacked in every call; bias [n].

    `rounds`: inputs are rounded to 8-bit integers with a scale per token and group, as the native kernels do.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None, *, rounds: bool = True) -> None:
        self.out_features, self.in_features = len(weight.values), 2 * weight.values.shape[1]
        self._weight, self._bias, self._rounds = weight, bias, rounds

    def __call__(self, x: Tensor) -> Tensor:
        result = self.product(x)
        if self._bias is not None:
            result = result + self._bias.float()
        return result.to(self._weight.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return the product of x [..., k], [..., n] float32, without the bias."""
        rows = x.float()
        if self._rounds:
            values, scales = quantize_rows(x.reshape(-1, self._weight.group))
            rows = (values.float() * scales[:, None]).view(x.shape)
        return rows @ self._weight.dense().t()

    def outputs_from(self, first: int) -> "Int4Linear":
        bias = None if self._bias is None else self._bias[first:]
        return Int4Linear(self._weight.part(first), bias, rounds=self._rounds)

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        weight = self._weight.part(first).dense().to(self._weight.dtype)
        return weight, None if self._bias is None else self._bias[first:]

    def data(self) -> Tensor:
        return as_bytes(self._weight.values)

    def on(self, data: Tensor) -> "Int4Linear":
        moved = self._weight._replace(values=data.view(self._weight.values.shape))
        return Int4Linear(moved, self._bias, rounds=self._rounds)
