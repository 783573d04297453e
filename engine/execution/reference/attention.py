"""Torch twins of the attention kernels: one request and one token at a time, in float32 (float64 stays float64).

They read requests and chunks from a work list, never the kernels' items: a wrong split shows as a difference.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.execution.reference.addressing import token_slots

if TYPE_CHECKING:
    from engine.triton_kernels.configs import LaunchConfig
    from engine.triton_kernels.work import DecodeWork, PrefillWork


def decode_attention(
    q: Tensor,
    pool: Tensor,
    k_table: Tensor,
    v_table: Tensor,
    work: "DecodeWork",
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    *,
    layer: int,
    scratch_base: int,
    scale: float,
    config: "LaunchConfig | None" = None,
) -> None:
    """out[i] = softmax(scale * q[i] K^T) V; shapes as in the kernel's wrapper, `partial*` and `config` unused."""
    del partial, partial_lse, config
    for index, (row, length) in enumerate(work.requests.tolist()[: len(q)]):
        k, v = (_gather(pool, table[row], length, layer, scratch_base) for table in (k_table, v_table))
        out[index] = _attend(q[index], k, v, scale).to(out.dtype) if length else 0.0


def prefill_attention(
    q: Tensor,
    pool: Tensor,
    k_table: Tensor,
    v_table: Tensor,
    work: "PrefillWork",
    out: Tensor,
    *,
    layer: int,
    scratch_base: int,
    scale: float,
    config: "LaunchConfig | None" = None,
) -> None:
    """Causal attention of every chunk's tokens; shapes as in the kernel's wrapper, `config` unused."""
    del config
    for row, first, length, position in work.chunks.tolist():
        k, v = (_gather(pool, table[row], position + length, layer, scratch_base) for table in (k_table, v_table))
        for token in range(length):
            seen = position + token + 1
            out[first + token] = _attend(q[first + token], k[:seen], v[:seen], scale).to(out.dtype)


def _gather(pool: Tensor, row: Tensor, length: int, layer: int, scratch_base: int) -> Tensor:
    """[length, kv_heads, head_dim]: the first tokens behind one row of a block table."""
    positions = torch.arange(length, device=pool.device)
    return pool.flatten(0, 1)[token_slots(row[None], torch.zeros_like(positions), positions, pool, layer, scratch_base)]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [heads, head_dim] over k, v [tokens, kv_heads, head_dim]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[0] // k.shape[1]
    k, v = (value.to(wide).repeat_interleave(group, dim=1) for value in (k, v))
    weights = (torch.einsum("hd,thd->ht", q.to(wide), k) * scale).softmax(dim=-1)
    return torch.einsum("ht,thd->hd", weights, v)
