"""Linear layers on floats of 8 bits (e4m3): weights rounded once, or by who made the checkpoint, with a scale for each
output; inputs in every call, with a scale for each token, or with the checkpoint's for all of them.

On a CUDA device `torch._scaled_mm` multiplies the bytes themselves, with the scales of rows and columns inside; its
results are bfloat16 and both sides of a weight multiples of 16. Elsewhere the same rounded numbers are multiplied as
float32: the twin, for tests and for what rounding costs in quality, not for speed. Nothing waits for the device.

Knows nothing of models.
"""

from collections.abc import Callable
from typing import NamedTuple

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


def scale_rows(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same with one scale [1] float32 for all rows that are finite. What is beyond the largest float becomes it."""
    values = (x.float() / scale).clamp(-_HIGHEST, _HIGHEST).to(FLOAT8)
    return values, torch.where(x.isfinite().all(-1, keepdim=True), scale, torch.nan)


def rounded(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """By one of the two."""
    return round_rows(x) if scale is None else scale_rows(x, scale)


class RoundedRows(NamedTuple):
    """Inputs of a layer that are rounded already: values [T, k] e4m3, scales [T, 1] float32."""

    values: Tensor
    scales: Tensor


class Rounding(NamedTuple):
    """How inputs of layers become floats of 8 bits: by torch's operators, or by kernels."""

    by_row: Callable[[Tensor], tuple[Tensor, Tensor]] = round_rows
    by_scale: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = scale_rows


BY_TORCH = Rounding()


class Float8Linear:
    """See engine.models.linear.Linear. values [n, k] e4m3, scales [n, 1] float32; takes and gives bfloat16. `inputs`:
    the scale [1] float32 of all that it takes; None: each token has its own."""

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        rounding: Rounding = BY_TORCH,
        inputs: Tensor | None = None,
    ) -> None:
        self.out_features, self.in_features = values.shape
        self._rounding, self.inputs = rounding, inputs
        self._values, self._scales, self._bias = values, scales, bias

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, rounding: Rounding = BY_TORCH) -> "Float8Linear":
        """A layer of a weight [n, k], which is not kept. Errors: ValueError for one that is not finite."""
        values, scales = round_rows(weight)
        if not bool(scales.isfinite().all()):
            raise ValueError("a weight that is not finite")
        return cls(values, scales, bias, rounding)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        by_row, by_scale = self._rounding
        result = self.product(RoundedRows(*(by_row(rows) if self.inputs is None else by_scale(rows, self.inputs))))
        return result.view(*x.shape[:-1], self.out_features)

    def product(self, rows: RoundedRows) -> Tensor:
        """[T, n] of what was rounded for this layer, by `inputs`."""
        product = _on_device if rows.values.device.type in ("cuda", "meta") else _as_floats
        result = product(*rows, self._values, self._scales)
        return result if self._bias is None else result + self._bias

    def outputs_from(self, first: int) -> "Float8Linear":
        bias = None if self._bias is None else self._bias[first:]
        return Float8Linear(self._values[first:], self._scales[first:], bias, self._rounding, self.inputs)

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        weight = self._values[first:].float() * self._scales[first:]
        return weight.to(torch.bfloat16), None if self._bias is None else self._bias[first:]

    def data(self) -> Tensor:
        return as_bytes(self._values)

    def on(self, data: Tensor) -> "Float8Linear":
        values = data.view(FLOAT8).view(self._values.shape)
        return Float8Linear(values, self._scales, self._bias, self._rounding, self.inputs)


def make_float8(
    weight: Tensor | Rounded,
    bias: Tensor | None = None,
    *,
    gated: bool = False,  # noqa: ARG001
    rounding: Rounding = BY_TORCH,
    keeps_floats: bool = False,
) -> Linear:
    """A MakeLinear for weights in bfloat16 and for those that a checkpoint stores as such floats; `rounding` of what
    its layers are given. One whose sides are no multiples of 16 is a plain layer; so is, with `keeps_floats`, one that
    is not stored in 8 bits."""
    if isinstance(weight, Rounded):
        assert weight.values.dtype == FLOAT8, "integers of a checkpoint are unpacked before they are rounded to floats"
        layer = Float8Linear(weight.values, weight.scales[:, None].contiguous(), bias, rounding, weight.inputs)
        return PlainLinear(*layer.dense_from(0)) if _is_odd(weight.values) else layer
    if keeps_floats or _is_odd(weight):
        return PlainLinear(weight, bias)
    return Float8Linear.of(weight, bias, rounding)


def _is_odd(weight: Tensor) -> bool:
    return any(size % _MULTIPLE for size in weight.shape)


def _on_device(rows: Tensor, scales: Tensor, values: Tensor, by_output: Tensor) -> Tensor:
    """rows [T, k], scales [T, 1], values [n, k], by_output [n, 1] -> [T, n] bfloat16."""
    return torch._scaled_mm(
        rows, values.t(), scale_a=scales, scale_b=by_output.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _as_floats(rows: Tensor, scales: Tensor, values: Tensor, by_output: Tensor) -> Tensor:
    """The same of the same numbers, summed in float32."""
    return (rows.float() @ values.float().t() * scales * by_output.t()).to(torch.bfloat16)
