"""Linear layers on 8-bit floats (e4m3).

Weights are rounded once, at load or by the author of the checkpoint, with a scale per output. Inputs are rounded in
every call, with a scale per token or the checkpoint's scale for all tokens.

On a CUDA device `torch._scaled_mm` multiplies the bytes, with the scales of rows and columns inside. Its results are
bfloat16, and both sides of a weight must be multiples of 16. On other devices the same rounded numbers are multiplied
as float32: a twin for tests and for measuring the loss of quality, not for speed. Nothing synchronises with the device.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.linear import AnyWeight, Linear, PlainLinear
from engine.models.quantized import RoundedWeight, ScaledLinear

FLOAT8 = torch.float8_e4m3fn
OLDEST_ARCH = (8, 9)
"""Oldest compute capability whose tensor cores multiply 8-bit floats."""

_HIGHEST = torch.finfo(FLOAT8).max
_SMALLEST = 1e-12  # lower bound of the maximum of a row, to avoid division by zero
_MULTIPLE = 16


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, k] to values [T, k] e4m3 and scales [T, 1] float32; rows that are not finite become NaN."""
    top = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32)
    scales = top.clamp_min(_SMALLEST) * (1 / _HIGHEST)
    return (x / scales).to(FLOAT8), scales


def scale_rows(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Like `round_rows`, with one scale [1] float32 for all finite rows; values are clipped to the largest float."""
    values = (x.float() / scale).clamp(-_HIGHEST, _HIGHEST).to(FLOAT8)
    return values, torch.where(x.isfinite().all(-1, keepdim=True), scale, torch.nan)


class RoundedRows(NamedTuple):
    """Rounded inputs of a layer: values [T, k] e4m3, scales [T, 1] float32."""

    values: Tensor
    scales: Tensor


class Rounding(NamedTuple):
    """Functions that round layer inputs to 8-bit floats: torch operators, or kernels."""

    by_row: Callable[[Tensor], tuple[Tensor, Tensor]] = round_rows
    by_scale: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = scale_rows


BY_TORCH = Rounding()


class Float8Linear(ScaledLinear):
    """A `Linear` with values [n, k] e4m3 and scales [n, 1] float32; input and output are bfloat16.

    `inputs` is the scale [1] float32 of all inputs; None: one scale per token.
    """

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        rounding: Rounding = BY_TORCH,
        inputs: Tensor | None = None,
    ) -> None:
        super().__init__(values, scales, bias, torch.bfloat16)
        self._rounding, self.inputs = rounding, inputs

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, rounding: Rounding = BY_TORCH) -> "Float8Linear":
        """Round a weight [n, k], which is not kept. Raises ValueError if it is not finite."""
        values, scales = round_rows(weight)
        if not bool(scales.isfinite().all()):
            raise ValueError("the weight has values that are not finite")
        return cls(values, scales, bias, rounding)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        by_row, by_scale = self._rounding
        result = self.product(RoundedRows(*(by_row(rows) if self.inputs is None else by_scale(rows, self.inputs))))
        return result.view(*x.shape[:-1], self.out_features)

    def product(self, rows: RoundedRows) -> Tensor:
        """Return the product [T, n] for inputs rounded for this layer."""
        product = _on_device if rows.values.device.type in ("cuda", "meta") else _as_floats
        result = product(*rows, self._values, self._scales)
        return result if self._bias is None else result + self._bias


def make_float8(
    weight: AnyWeight,
    bias: Tensor | None = None,
    *,
    rounding: Rounding = BY_TORCH,
    keeps_floats: bool = False,
    **_gated: bool,
) -> Linear:
    """Make a layer (a MakeLinear) from a bfloat16 weight, or from a weight that the checkpoint stores in 8-bit floats.

    `rounding` rounds the inputs. A weight whose sides are not multiples of 16 becomes a plain layer. With
    `keeps_floats`, so does a weight that is not stored in 8 bits.
    """
    if isinstance(weight, RoundedWeight):
        assert weight.values.dtype == FLOAT8, "integers of a checkpoint must be unpacked before rounding"
        layer = Float8Linear(weight.values, weight.scales[:, None].contiguous(), bias, rounding, weight.inputs)
        return PlainLinear(*layer.dense_from(0)) if _is_odd(weight.values) else layer
    assert isinstance(weight, Tensor), "weights of 4 bits, or in blocks, must be unpacked before rounding"
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
    """Compute the same product on the same numbers, summed in float32."""
    return (rows.float() @ values.float().t() * scales * by_output.t()).to(torch.bfloat16)
