"""Linear layers on 8-bit integers (W8A8), symmetric, rounded to the nearest of 255 values, and on 4-bit weights.

Weights are rounded once, with a scale per output; inputs are rounded in every call, with a scale per token. These torch
operators are the twin of the native kernels: the same integers, sums and products of scales. Both agree to the last bit
before the bias. Products of 4-bit weights have a scale per group of inputs, and agree to the rounding of float32.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from engine.models.linear import Linear

_HIGHEST = 127.0
_SMALLEST = 1e-30  # rows with a smaller maximum become zero
GROUPS = (128, 64, 32)
"""Inputs that share a scale of a 4-bit weight in memory, largest first; larger groups are divided."""
GROUP = 32
"""Inputs that share a scale of a weight that is rounded here."""


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A weight [n, k] in 8 or 4 bits.

    Attributes:
        values: [n, k] of one byte, or [n, k / 2] uint8, the first of two inputs in the lower bits.
        scales: Scales of the values; for 4 bits [n, groups], one per output and group of inputs.
        dtype: Type of a layer's inputs and outputs.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        n, width = self.values.shape
        return n, 2 * width if self.values.dtype == torch.uint8 else width

    @property
    def group(self) -> int:
        """Number of inputs that share a scale of 4-bit values."""
        return self.shape[1] // self.scales.shape[1]

    @classmethod
    def stacked(cls, parts: Sequence[Self], stack: Callable[[list[Tensor]], Tensor] = torch.cat) -> Self:
        """Stack weights with the same groups along their outputs."""
        values, scales = stack([each.values for each in parts]), stack([each.scales for each in parts])
        return replace(parts[0], values=values, scales=scales)

    def part(self, first: int) -> Self:
        """Return the outputs from `first` on; not of blocks."""
        return replace(self, values=self.values[first:], scales=self.scales[first:])

    def dense(self) -> Tensor:
        """Return the weight [n, k] float32."""
        raise NotImplementedError

    def unpacked(self) -> Tensor:
        """Return the weight [n, k] of its type."""
        return self.dense().to(self.dtype)

    def data(self) -> Tensor:
        return as_bytes(self.values)

    def on(self, data: Tensor) -> Self:
        return replace(self, values=data.view(self.values.dtype).view(self.values.shape))


@dataclass(frozen=True, eq=False)
class RoundedWeight(StoredWeight):
    """A weight in 8 bits, int8 or e4m3, with scales [n] or [n, 1] float32, one per output.

    `inputs`: scale [1] float32 with which all inputs are rounded; None: one scale per token.
    """

    inputs: Tensor | None = None

    @classmethod
    def stacked(cls, parts: Sequence[Self], stack: Callable[[list[Tensor]], Tensor] = torch.cat) -> Self:
        """Stack weights along their outputs. They share one scale of inputs; the largest avoids clipping."""
        given = [each.inputs for each in parts if each.inputs is not None]
        inputs = torch.stack(given).amax(0) if len(given) == len(parts) else None
        return replace(super().stacked(parts, stack), inputs=inputs)

    def dense(self) -> Tensor:
        return self.values.float() * self.scales.view(-1, 1)


@dataclass(frozen=True, eq=False)
class PackedWeight(StoredWeight):
    """A weight in 4 bits: (value - zero) * scale. `zeros`: [n, groups] uint8 of 0 to 15."""

    zeros: Tensor

    @classmethod
    def stacked(cls, parts: Sequence[Self], stack: Callable[[list[Tensor]], Tensor] = torch.cat) -> Self:
        return replace(super().stacked(parts, stack), zeros=stack([each.zeros for each in parts]))

    def part(self, first: int) -> Self:
        return replace(super().part(first), zeros=self.zeros[first:])

    def dense(self) -> Tensor:
        return self._unpacked(torch.float32)

    def unpacked(self) -> Tensor:
        return self._unpacked(self.dtype)

    def _unpacked(self, dtype: torch.dtype) -> Tensor:
        values = torch.stack((self.values & 15, self.values >> 4), -1)
        return scaled(values.view(self.shape), self.zeros, self.scales, dtype)


def scaled(values: Tensor, zeros: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (values - zeros) * scales of this type [n, k]; values [n, k], the others [n, groups]."""
    n, groups = scales.shape
    wide = values.view(n, groups, -1).to(dtype)
    return wide.sub_(zeros[..., None].to(dtype)).mul_(scales[..., None].to(dtype)).view(n, -1)


@dataclass(frozen=True, eq=False)
class BlockWeight(StoredWeight):
    """A weight in 8-bit floats (e4m3) with a scale per block; blocks divide it.

    Scales are [n / rows, padded] float32, padded to a multiple of 4, as products need them. `block`: rows and columns
    of a block.
    """

    block: tuple[int, int]

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> "BlockWeight":
        """Return the weight with scales [n / rows, k / columns]."""
        return cls(values, functional.pad(scales, (0, -scales.shape[1] % 4)), dtype, block)

    def dense(self) -> Tensor:
        (n, k), (rows, columns) = self.shape, self.block
        scales = self.scales[:, None, : k // columns, None]
        return self.values.float().view(n // rows, rows, -1, columns).mul_(scales).view(n, k)


@dataclass(frozen=True, eq=False)
class FloatWeight(StoredWeight):
    """A weight in 4-bit floats (e2m1), with scales e8m0 (powers of two), or of a floating type."""

    def dense(self) -> Tensor:
        return floats_of(self.values, self.scales.float())


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the first eight of the 4-bit values; the others are their negatives


def floats_of(values: Tensor, scales: Tensor) -> Tensor:
    """Return the products [n, k] float32 of values [n, k / 2] as in FloatWeight and scales [n, groups] float32."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=values.device)
    pairs = torch.stack((values & 15, values >> 4), -1).int()
    return table[pairs].view(*scales.shape, -1).mul_(scales.unsqueeze(-1)).flatten(-2)


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
    return PackedWeight(pack_values(values.flatten(1)), scales, weight.dtype, zeros.to(torch.uint8))


def as_bytes(weight: Tensor) -> Tensor:
    """Return a weight as bytes [n] uint8, a view if it is contiguous."""
    return weight.contiguous().view(torch.uint8).flatten()


def round_weight(weight: Tensor | StoredWeight) -> RoundedWeight:
    """Round a weight [n, k] to integers of 8 bits unless it is rounded so already. Raises ValueError if it is not
    finite."""
    if isinstance(weight, RoundedWeight):
        return weight
    values, scales = quantize_rows(weight if isinstance(weight, Tensor) else weight.dense())
    if not bool(scales.isfinite().all()):
        raise ValueError("the weight has values that are not finite")
    return RoundedWeight(values, scales, weight.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, k] to integers [T, k] int8 and scales [T] float32; NaN for a row with a value that is not finite."""
    floats = x.float()
    top = floats.abs().amax(-1)
    finite = floats.isfinite().all(-1)
    highest = torch.full_like(top, _HIGHEST)  # a tensor: by a number, torch multiplies by a reciprocal, rounding twice
    factor = torch.where(finite & (top > _SMALLEST), highest / top, 0.0)
    values = torch.where(finite[:, None], floats * factor[:, None], 0.0).round().to(torch.int8)
    return values, torch.where(finite, top / highest, torch.nan)


class StoredLinear:
    """A `Linear` on a weight in few bits; bias [n]."""

    def __init__(self, weight: Any, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        result = self.product(x)
        if self._bias is not None:
            result = result + self._bias.float()
        return result.to(self._weight.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return the product of x [..., k], [..., n] float32, without the bias."""
        raise NotImplementedError

    def outputs_from(self, first: int) -> "Linear":
        part = copy(self)
        part.out_features -= first
        part._weight, part._bias = self._weight.part(first), None if self._bias is None else self._bias[first:]
        return part

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        weight = self._weight.part(first).dense().to(self._weight.dtype)
        return weight, None if self._bias is None else self._bias[first:]

    def data(self) -> Tensor:
        data: Tensor = self._weight.data()
        return data

    def on(self, data: Tensor) -> Self:
        moved = copy(self)
        moved._weight = self._weight.on(data)
        return moved


class QuantizedLinear(StoredLinear):
    """A `Linear` on a `RoundedWeight` of 8-bit integers, scales [n]."""

    def product(self, x: Tensor) -> Tensor:
        weight: RoundedWeight = self._weight
        rows, scales = quantize_rows(x.reshape(-1, self.in_features))
        if not len(rows):
            return torch.empty(*x.shape[:-1], self.out_features)
        sums = torch._int_mm(rows, weight.values.t())
        return (sums.float() * weight.scales * scales[:, None]).view(*x.shape[:-1], self.out_features)


def make_quantized(weight: Tensor | StoredWeight, bias: Tensor | None = None, **_gated: bool) -> QuantizedLinear:
    """Round a weight [n, k], which is not kept (a MakeLinear)."""
    return QuantizedLinear(round_weight(weight), bias)


class Int4Linear(StoredLinear):
    """A `Linear` on a `PackedWeight`, which is unpacked in every call.

    Inputs are rounded to 8-bit integers with a scale per token and group, as the native kernels do.
    """

    def product(self, x: Tensor) -> Tensor:
        values, scales = quantize_rows(x.reshape(-1, self._weight.group))
        product: Tensor = (values.float() * scales[:, None]).view(x.shape) @ self._weight.dense().t()
        return product
