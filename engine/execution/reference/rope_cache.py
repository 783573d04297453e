"""Torch twin of the fused head norm, rotary embedding and cache write."""

import torch
from torch import Tensor

from engine.execution.reference.addressing import token_slots


def rope_cache_write(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    rows: Tensor,
    pool: Tensor,
    k_table: Tensor,
    v_table: Tensor,
    *,
    layer: int,
    scratch_base: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate q in place; write rotated k, and v, to the pool; shapes as in the kernel's wrapper."""
    real = rows >= 0
    positions, rows = positions[real].long(), rows[real].long()
    angles = None if cos_sin is None else cos_sin[positions]
    tokens = pool.flatten(0, 1)
    k_slots, v_slots = (token_slots(table, rows, positions, pool, layer, scratch_base) for table in (k_table, v_table))
    tokens[k_slots] = _transform(k[real], angles, k_norm, eps)
    tokens[v_slots] = v[real]
    if q is not None:
        q[real] = _transform(q[real], angles, q_norm, eps)


def _transform(x: Tensor, angles: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    """x [n, heads, head_dim]; angles [n, rotary_dim], cosines first."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight is not None:
        y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(y.dtype)
    if angles is not None:
        half = angles.shape[1] // 2
        cos, sin = angles[:, None, :half], angles[:, None, half:]
        a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        y = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
    return y.to(x.dtype)
