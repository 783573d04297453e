"""Linear layers of a model: their interface, and `F.linear` for every device."""

from typing import NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.quantized import (
    GROUP,
    Int4Linear,
    PackedWeight,
    RoundedWeight,
    StoredWeight,
    as_bytes,
    group_of,
    make_quantized,
    pack_weight,
    round_weight,
)

AnyWeight = Tensor | StoredWeight


class Linear(Protocol):
    """`x [T, in_features] -> [T, out_features]`, of the weight's type and device."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def outputs_from(self, first: int) -> "Linear":
        """Return a layer of the outputs from `first` on; a packed layer copies that part of the weight."""

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        """Return weight [out - first, in] and bias of the outputs from `first` on: views, or unpacked copies."""

    def data(self) -> Tensor:
        """Return the bytes [n] uint8 of the weight as each call reads them, without small tensors such as scales.

        A layer with a hidden layout returns the bytes of its dense weight.
        """

    def on(self, data: Tensor) -> "Linear":
        """Return this layer with its weight in `data [n]` uint8, which holds or will hold the same bytes."""


class PlainLinear:
    """`F.linear` on an unmodified weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def outputs_from(self, first: int) -> "PlainLinear":
        return PlainLinear(*self.dense_from(first))

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        return self._weight[first:], None if self._bias is None else self._bias[first:]

    def data(self) -> Tensor:
        return as_bytes(self._weight)

    def on(self, data: Tensor) -> "PlainLinear":
        return PlainLinear(data.view(self._weight.dtype).view(self._weight.shape), self._bias)


class MakeLinear(Protocol):
    """Makes a layer from `weight [out, in]` and `bias [out]`. `gated`: half of the outputs gate the other half.

    A weight in 8 or 4 bits stays so. `head`: the outputs are logits.
    """

    def __call__(
        self, weight: AnyWeight, bias: Tensor | None = None, *, gated: bool = False, head: bool = False
    ) -> Linear: ...


class AbsentLinear:
    """Placeholder of a layer whose weight was released; it keeps the sizes only."""

    def __init__(self, layer: Linear) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("the weights of this layer were released")

    outputs_from = dense_from = on = __call__

    def data(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)


def make_linear(weight: AnyWeight, bias: Tensor | None = None, **_gated: bool) -> Linear:
    """Make a torch layer for `weight [out, in]`, which it refers to, and `bias [out]` (a MakeLinear)."""
    if isinstance(weight, Tensor):
        return PlainLinear(weight, bias)
    if isinstance(weight, PackedWeight):
        return Int4Linear(weight, bias)
    return make_quantized(weight, bias) if isinstance(weight, RoundedWeight) else PlainLinear(weight.unpacked(), bias)


def make_packed(
    weight: AnyWeight,
    bias: Tensor | None = None,
    *,
    make: MakeLinear = make_linear,
    head: bool = False,
    gated: bool = False,
    group: int = GROUP,
) -> Linear:
    """Make a layer of 4 bits by `make` (a MakeLinear); the head has 8, and so have layers that no group divides.

    `group`: inputs that share a scale of a weight that is not stored so; 0: it is not rounded.
    """
    if head:
        weight = round_weight(weight)
    elif isinstance(weight, Tensor) and group:
        size = group_of(weight.shape[1], group)
        weight = round_weight(weight) if size is None else pack_weight(weight, size)
    return make(weight, bias, gated=gated)
