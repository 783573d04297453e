"""Operations of a decoder layer in torch, for devices without kernels and as twins of the Triton kernels of layers.

Pure functions. Rounding of elementwise operations follows the evaluation code of the checkpoints. Norms reduce in
float32 and round before the weight is applied, or after it if the weight is float32 in a model of another type. Rotary
products use the type of the model.

Inverse frequencies are float32 on purpose: checkpoints are trained and evaluated with it, and at position 100,000 a
more exact frequency is a different angle. Papers: RoPE (Su et al.), YaRN (Peng et al.), LongRoPE (Ding et al.).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.rope import RopeSpec

_P = TypeVar("_P", int, Tensor)


class Rotary(NamedTuple):
    """Rotation of one step for `apply_rotary`: cos and signed sin, [T, 1, rotary_dim], in the model's type."""

    cos: Tensor
    sin: Tensor


def first_seen(position: _P, reach: int) -> _P:
    """Return the first token that a query at each position sees by `Manner.reach`, which is not 0; it may be < 0."""
    return position + 1 - reach if reach > 0 else position - position % -reach


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension. x [..., H]; weight [H] or [heads, H]."""
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)
    return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: Tensor | None = None,
    inner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of residual + x, and residual + x; without a residual, the norm of x, and x.

    All [T, H]; with `rows [R]` only these rows, [R, H]. With `inner [H]` x is normalised by it before the addition.
    """
    total = _sum(x if inner is None else rms_norm(x, inner, eps), residual, rows)
    return rms_norm(total, weight, eps), total


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    rows: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of residual + x, and residual + x; without a residual, that of x, and x. All [T, H].

    The norm is (x - mean) / sqrt(variance + eps) · weight + bias. `rows`: as in `add_rms_norm`. With `beside [T, H]`,
    x + beside replaces x.
    """
    total = _sum(x if beside is None else x + beside, residual, rows)
    return torch.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def _sum(x: Tensor, residual: Tensor | None, rows: Tensor | None) -> Tensor:
    parts = [x] if residual is None else [residual, x]
    if rows is not None:
        parts = [part.index_select(0, rows) for part in parts]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def rotary_tables(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every angle times `scaling`, two [T, R/2] float32.

    positions [T]; inv_freq [R/2], or [T, R/2].
    """
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


def inverse_frequencies(rope: RopeSpec, *, is_long: bool = False) -> Tensor:
    """Return radians per position, [rotary_dim / 2] float32 on the CPU; `is_long` selects the factors of longrope."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        factors = rope.long_factor if is_long else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    return plain


def attention_scaling(rope: RopeSpec) -> float:
    """Return the factor of cos and sin."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and interpolate between them."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # over the context of the pretraining
    weight = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = (1 - weight) * plain / rope.factor + weight * plain
    blend = torch.where(turns < rope.low_freq_factor, plain / rope.factor, blend)
    return torch.where(turns > rope.high_freq_factor, plain, blend)


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Keep dimensions that turn more than beta_fast times, interpolate those below beta_slow, with a ramp between."""
    low, high = (_turning_dim(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _turning_dim(rope: RopeSpec, turns: float) -> float:
    """Return the (fractional) frequency index that makes `turns` turns over the pretraining context."""
    span = math.log(rope.original_max_position / (turns * 2 * math.pi))
    return rope.rotary_dim * span / (2 * math.log(rope.theta))
