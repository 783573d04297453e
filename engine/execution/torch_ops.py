"""The elementwise operations of a decoder layer in torch: what the CPU runs, and the reference twin of every kernel.

Pure functions; rounding follows the evaluation code the checkpoints ship with (norms reduce in float32 and round before
the weight is applied; rotary products are taken in the type of the model). Knows nothing of models, caches or requests.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Rotary(NamedTuple):
    """One step's rotation, as `apply_rotary` wants it: cos and signed sin, [T, 1, rotary_dim], in the model's type."""

    cos: Tensor
    sin: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension. x [..., H], weight [H] or [heads, H]: same shape."""
    if x.dtype == torch.float32 or x.device.type != "cpu" or not x.shape[0]:
        return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    return _rms_norm_cpu(x, eps).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, normed; and residual + x. All [T, H]."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last dimension. x [T, H], weight and bias [H]."""
    return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, layer-normed; and residual + x. All [T, H]."""
    total = residual + x
    return torch.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def rotary_tables(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, times `scaling`. positions [T], inv_freq [R/2] -> two [T, R/2] float32."""
    angles = positions.float().unsqueeze(1) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


def prepare_rotary(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotary:
    """Lay the tables of `rotary_tables` out for `apply_rotary`: once a step, not once a layer."""
    return Rotary(torch.cat((cos, cos), -1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype))


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the first R of every head in the model's type. x [T, heads, D] (any strides) -> [T, heads, D]."""
    cos, sin = rotary
    rotary_dim = cos.shape[-1]
    head = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    # Rolling by half swaps the two halves; the sign of rotate-half lives in `sin`.
    turned = (head * cos).addcmul_(head.roll(rotary_dim // 2, -1), sin)
    return turned if head is x else torch.cat((turned, x[..., rotary_dim:]), -1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R of every head, in float32: what a fused kernel does. x [T, heads, D], cos and sin [T, R/2]."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), -1)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU: silu(gate) · up. x [T, 2·F], gate first -> [T, F]."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def gelu(x: Tensor) -> Tensor:
    """The exact GELU (erf)."""
    return functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return functional.gelu(x, approximate="tanh")


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.relu(x)


def _rms_norm_cpu(x: Tensor, eps: float) -> Tensor:
    """Half-precision RMS norm without a weight.

    torch's own has no half-precision CPU kernel and copies the rows to float32 and back (five times the time of this at
    [512, 576], the same at [16, 576]). A norm that accumulates in float32 plus batch norm's inference kernel (rows as
    channels, mean 0, the sum of squares as "running variance") reads the half-precision rows directly and rounds at the
    same place. Both sides of the fraction are times the row size: sqrt(H) · x / sqrt(sum(x²) + H · eps).
    """
    size = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    zeros, scale = _row_constants(rows.shape[0], size)
    squares = torch.linalg.vector_norm(rows, 2, -1, dtype=torch.float32).square_()
    normed = torch.batch_norm(rows.unsqueeze(0), scale, None, zeros, squares, False, 0.0, eps * size, False)
    return normed.view(x.shape)


@lru_cache(maxsize=256)
def _row_constants(count: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(count), torch.full((count,), size**0.5)
