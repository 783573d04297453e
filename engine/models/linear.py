"""Linear layers: weights packed once for the CPU, plain `F.linear` elsewhere.

At the few rows of a decode step, a linear layer is bound by reading its weight. On a CPU, `F.linear` hands oneDNN a
row-major weight, which every call converts to the blocked layout of the matmul kernels. Packing at load avoids that.
The packing operators are private to torch and therefore used in this module only, behind a self-test. If an operator is
missing or disagrees with `F.linear`, weights of that type stay plain and one log line reports it.

Packed types are bfloat16 and float16 where oneDNN has kernels for them (AMX, AVX-512 or AVX2 with extensions). float32
stays plain: packed, it gained little at a few rows and lost at one row and at prefill sizes. The packed layout depends
on a row count given as a hint. The layout for one row is slower from 32 rows on, and all hints from 16 up gave one
layout that is as fast at one row; hence a single hint.
"""

import functools
import logging
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.quantized import QuantizedLinear, RoundedWeight, as_bytes

logger = logging.getLogger(__name__)

_PACK_ROWS = 64


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


class PackedLinear:
    """A oneDNN matmul on a weight in the layout of oneDNN. The original weight is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._bias = bias
        self._matmul = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._matmul(x, self._weight, self._bias, "none", [], "")
        return result

    def outputs_from(self, first: int) -> "PackedLinear":
        with torch.inference_mode():
            return PackedLinear(*self.dense_from(first))

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        with torch.inference_mode():
            weight = self._weight.to_dense()[first:].clone()  # a view would keep the whole weight
        return weight, None if self._bias is None else self._bias[first:]

    def data(self) -> Tensor:
        return as_bytes(self.dense_from(0)[0])

    def on(self, data: Tensor) -> PlainLinear:
        """Return a plain layer, because oneDNN packs into its own memory."""
        return PlainLinear(data.view(self._weight.dtype).view(self.out_features, self.in_features), self._bias)


class MakeLinear(Protocol):
    """Makes a layer from `weight [out, in]` and `bias [out]`. `gated`: half of the outputs gate the other half.

    A weight in 8 bits stays in 8 bits.
    """

    def __call__(
        self, weight: Tensor | RoundedWeight, bias: Tensor | None = None, *, gated: bool = False
    ) -> Linear: ...


def make_plain(weight: Tensor | RoundedWeight, bias: Tensor | None = None, *, gated: bool = False) -> PlainLinear:  # noqa: ARG001
    """Make a layer on the weight as stored in the checkpoint (a MakeLinear); parts of it are views."""
    assert isinstance(weight, Tensor), "plain layers cannot compute with 8-bit weights"
    return PlainLinear(weight, bias)


class AbsentLinear:
    """Placeholder of a layer whose weight was released; it keeps the sizes only."""

    def __init__(self, layer: Linear) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("the weights of this layer were released")

    outputs_from = dense_from = on = __call__

    def data(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)


def make_linear(
    weight: Tensor | RoundedWeight,
    bias: Tensor | None = None,
    *,
    gated: bool = False,  # noqa: ARG001
) -> Linear:
    """Make the fastest torch linear layer for `weight [out, in]` and `bias [out]` that agrees with `F.linear`.

    A packed layer holds its own copy of the weight, a plain layer refers to it.
    """
    if isinstance(weight, RoundedWeight):
        return QuantizedLinear.of(weight, bias)
    if weight.device.type == "cpu" and _packing_works(weight.dtype):
        with torch.inference_mode():
            return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


@functools.cache
def _packing_works(dtype: torch.dtype) -> bool:
    """Return whether packing pays for this type here and the private operators agree with `F.linear`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        reason = _self_test(dtype)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
    if reason:
        logger.warning("linear layers in %s are not packed and will be slower: %s", dtype, reason)
    return not reason


def _self_test(dtype: torch.dtype) -> str:
    """Compare with `F.linear` on small layers, including odd sizes. Return the defect, or an empty string."""
    if dtype == torch.bfloat16:
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    else:
        supported = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if not supported:
        return "this CPU lacks the instructions for it"
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for rows, width, outputs in ((1, 96, 64), (5, 33, 7), (130, 64, 100)):
            x = torch.randn(rows, width, generator=generator).to(dtype)
            weight = torch.randn(outputs, width, generator=generator).to(dtype)
            bias = torch.randn(outputs, generator=generator).to(dtype)
            for each in (None, bias):
                expected = functional.linear(x, weight, each).float()
                error = (PackedLinear(weight, each)(x).float() - expected).abs()
                allowed = 4 * torch.finfo(dtype).eps * (expected.abs() + width**0.5)
                if not bool((error <= allowed).all()):
                    return "the packed operator does not agree with F.linear"
    return ""
