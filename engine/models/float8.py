"""Linear layers on floats of 8 bits (e4m3): weights rounded once, with a scale for each output; inputs in every call,
with a scale for each token.

On a CUDA device `torch._scaled_mm` multiplies the bytes themselves, with the scales of rows and columns inside; its
results are bfloat16 and both sides of a weight multiples of 16. Elsewhere the same rounded numbers are multiplied as
float32: the twin, for tests and for what rounding costs in quality, not for speed. Nothing waits for the device.

Knows nothing of models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.linear import Linear, PlainLinear
from engine.models.quantized import Rounded, as_bytes

FLOAT8 = torch.float8_e4m3fn
OLDEST_ARCH = (8, 9)
"""Compute capability from which on tensor cores multiply such floats."""

_HIGHEST = torch.finfo(FLOAT8).max
_SMALLEST = 1e-12  # rows that are smaller than this everywhere lose precision, and zero is nobody's divisor
_MULTIPLE = 16


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, k] -> floats [T, k] e4m3 and scales [T, 1] float32, whose product is nearest to it; not a number in a row
    that has a value that is not finite."""
    top = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32)
    scales = top.clamp_min(_SMALLEST) * (1 / _HIGHEST)
    return (x / scales).to(FLOAT8), scales


RoundRows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""See round_rows."""


class Float8Linear:
    """See engine.models.linear.Linear. values [n, k] e4m3, scales [n, 1] float32; takes and gives bfloat16."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None, rounder: RoundRows = round_rows) -> None:
        self.out_features, self.in_features = values.shape
        self._round = rounder
        self._values, self._scales, self._bias = values, scales, bias

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, rounder: RoundRows = round_rows) -> "Float8Linear":
        """A layer of a weight [n, k], which is not kept. Errors: ValueError for one that is not finite."""
        values, scales = round_rows(weight)
        if not bool(scales.isfinite().all()):
            raise ValueError("a weight that is not finite")
        return cls(values, scales, bias, rounder)

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = self._round(x.reshape(-1, self.in_features))
        product = _on_device if x.device.type in ("cuda", "meta") else _as_floats
        result = product(rows, scales, self._values, self._scales)
        if self._bias is not None:
            result = result + self._bias
        return result.view(*x.shape[:-1], self.out_features)

    def outputs_from(self, first: int) -> "Float8Linear":
        bias = None if self._bias is None else self._bias[first:]
        return Float8Linear(self._values[first:], self._scales[first:], bias, self._round)

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        weight = self._values[first:].float() * self._scales[first:]
        return weight.to(torch.bfloat16), None if self._bias is None else self._bias[first:]

    def data(self) -> Tensor:
        return as_bytes(self._values)

    def on(self, data: Tensor) -> "Float8Linear":
        return Float8Linear(data.view(FLOAT8).view(self._values.shape), self._scales, self._bias, self._round)


def make_float8(
    weight: Tensor | Rounded,
    bias: Tensor | None = None,
    *,
    gated: bool = False,  # noqa: ARG001
    rounder: RoundRows = round_rows,
) -> Linear:
    """A MakeLinear for weights in bfloat16; `rounder` rounds what its layers are given. A weight whose sides are no
    multiples of 16 stays as it is."""
    assert isinstance(weight, Tensor), "integers of a checkpoint are unpacked before they are rounded to floats"
    if any(size % _MULTIPLE for size in weight.shape):
        return PlainLinear(weight, bias)
    return Float8Linear.of(weight, bias, rounder)


def _on_device(rows: Tensor, scales: Tensor, values: Tensor, by_output: Tensor) -> Tensor:
    """rows [T, k], scales [T, 1], values [n, k], by_output [n, 1] -> [T, n] bfloat16."""
    return torch._scaled_mm(
        rows, values.t(), scale_a=scales, scale_b=by_output.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _as_floats(rows: Tensor, scales: Tensor, values: Tensor, by_output: Tensor) -> Tensor:
    """The same of the same numbers, summed in float32."""
    return (rows.float() @ values.float().t() * scales * by_output.t()).to(torch.bfloat16)
