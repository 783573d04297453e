"""Torch twins of the norm kernels, with the residual addition before them."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, *, eps: float, residual: Tensor | None = None) -> None:
    """out = x / rms(x) * weight, after residual += x if there is one; shapes as in the kernel's wrapper."""
    y = _input(x, residual)
    out.copy_(y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(y.dtype))


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, eps: float, residual: Tensor | None = None
) -> None:
    """out = (x - mean) / std * weight + bias, after residual += x if there is one; shapes as in the wrapper."""
    y = _input(x, residual)
    offset = None if bias is None else bias.to(y.dtype)
    out.copy_(torch.nn.functional.layer_norm(y, y.shape[1:], weight.to(y.dtype), offset, eps))


def _input(x: Tensor, residual: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    if residual is None:
        return x.to(wide)
    residual.copy_(x.to(wide) + residual.to(wide))
    return residual.to(wide)
