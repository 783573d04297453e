"""Operations of a decoder layer in torch, for devices without kernels and as twins of the Triton kernels of layers.

Pure functions. Rounding of elementwise operations follows the evaluation code of the checkpoints. Norms reduce in
float32 and round before the weight is applied, or after it if the weight is float32 in a model of another type. Rotary
products use the type of the model.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Rotary(NamedTuple):
    """Rotation of one step for `apply_rotary`: cos and signed sin, [T, 1, rotary_dim], in the model's type."""

    cos: Tensor
    sin: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension. x [..., H]; weight [H] or [heads, H]."""
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)
    return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rows: Tensor | None = None, inner: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of residual + x, and residual + x. All [T, H]; with `rows [R]` only these rows, [R, H].

    With `inner [H]` x is normalised by it before the addition.
    """
    total = _sum(x if inner is None else rms_norm(x, inner, eps), residual, rows)
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) · weight + bias over the last dimension. x [T, H]; weight, bias [H]."""
    return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    rows: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of residual + x, and residual + x. All [T, H]. `rows`: as in `add_rms_norm`.

    With `beside [T, H]`, x + beside replaces x.
    """
    total = _sum(x if beside is None else x + beside, residual, rows)
    return torch.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def _sum(x: Tensor, residual: Tensor, rows: Tensor | None) -> Tensor:
    return residual + x if rows is None else residual.index_select(0, rows) + x.index_select(0, rows)


def rotary_tables(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every angle times `scaling`, two [T, R/2] float32. positions [T], inv_freq [R/2]."""
    angles = positions.float().unsqueeze(1) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


def prepare_rotary(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotary:
    """Arrange the result of `rotary_tables` for `apply_rotary`, once per step instead of once per layer."""
    return Rotary(torch.cat((cos, cos), -1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype))


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the first R elements of every head in the model's type. x [T, heads, D], any strides -> [T, heads, D]."""
    cos, sin = rotary
    rotary_dim = cos.shape[-1]
    head = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    # A roll by half swaps the halves; `sin` carries the sign of rotate-half.
    turned = (head * cos).addcmul_(head.roll(rotary_dim // 2, -1), sin)
    return turned if head is x else torch.cat((turned, x[..., rotary_dim:]), -1)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU: return silu(gate) · up. x [T, 2·F], gate first -> [T, F]."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """GeGLU: return gelu_tanh(gate) · up. x [T, 2·F], gate first -> [T, F]."""
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh_gated": gelu_tanh_and_mul,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
}
"""Activations by their names in a spec: x [T, 2·F] or [T, F] -> [T, F]."""


def softcap(x: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
    """Return cap · tanh(x / cap), computed in float32 and rounded once; written to `out` if given. Any shape."""
    found = (x.float() / cap).tanh_().mul_(cap)
    return found.to(x.dtype) if out is None else out.copy_(found)
