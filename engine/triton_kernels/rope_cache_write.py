# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RMS norm of the heads of Q and K (if the model has it), rotary embedding, and the write of K and V to the pool.

One pass over the projections of a step: Q is changed in place; rotated K and unchanged V are written to the slices in
their block tables. Without `q`, the kernel is the second half of a restore from hidden state. Half-split ("neox")
layout; the rotary dimensions may be fewer than those of a head, or none. Twin: engine.triton_kernels.twins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.models.attention import PoolView
from engine.triton_kernels import configs
from engine.triton_kernels.addressing import (
    check_heads,
    check_pool,
    check_value_width,
    computed_in,
    extent,
    least_scales,
    scale_pointers,
    to_steps,
    token_start,
)


@triton.jit
def normalize(a, b, rest, weight, half, tail, eps, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Apply RMS norm over the three parts of each head; elements outside a part are zero."""
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    a *= scale * tl.load(weight + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
    b *= scale * tl.load(weight + ROTARY // 2 + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
    rest *= scale * tl.load(weight + tail, mask=tail < HEAD_DIM, other=0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def transform_heads(
    source, target, scales, weight, cos_sin, block, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Transform heads [block * BLOCK_H, ...) of one token from `source` to `target` (may be the same): norm, rotation,
    and rounding to 8 bits with `scales` if the target has 8 bits."""
    heads = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    half = tl.arange(0, HALF)[None, :]
    tail = ROTARY + tl.arange(0, REST)[None, :]
    turns = (heads < NUM_HEADS) & (half < ROTARY // 2)
    stays = (heads < NUM_HEADS) & (tail < HEAD_DIM)
    first = heads * HEAD_DIM + half
    a = tl.load(source + first, mask=turns, other=0.0).to(tl.float32)
    b = tl.load(source + first + ROTARY // 2, mask=turns, other=0.0).to(tl.float32)
    rest = tl.load(source + heads * HEAD_DIM + tail, mask=stays, other=0.0).to(tl.float32)
    if NORM:
        a, b, rest = normalize(a, b, rest, weight, half, tail, eps, HEAD_DIM, ROTARY)
    kind = source.dtype.element_ty
    x, y = a, b
    if ROTARY > 0:
        cos = tl.load(cos_sin + half, mask=half < ROTARY // 2, other=0.0)
        sin = tl.load(cos_sin + ROTARY // 2 + half, mask=half < ROTARY // 2, other=0.0)
        x, y = a * cos - b * sin, b * cos + a * sin
    x, y, z = x.to(kind), y.to(kind), rest.to(kind)
    cell: tl.constexpr = target.dtype.element_ty
    if cell.primitive_bitwidth == 8:
        wide_x, wide_y, wide_z = x.to(tl.float32), y.to(tl.float32), z.to(tl.float32)
        highest, unsound = extent(wide_x)
        highest_y, unsound_y = extent(wide_y)
        highest_z, unsound_z = extent(wide_z)
        highest = tl.maximum(tl.maximum(highest, highest_y), highest_z)
        bits, step = least_scales(highest, unsound + unsound_y + unsound_z)
        tl.store(scales + heads, bits[:, None], mask=heads < NUM_HEADS)
        x, y = to_steps(wide_x, step[:, None]), to_steps(wide_y, step[:, None])
        z = to_steps(wide_z, step[:, None])
    if ROTARY > 0:
        tl.store(target + first, x, mask=turns)
        tl.store(target + first + ROTARY // 2, y, mask=turns)
    if ROTARY < HEAD_DIM:
        tl.store(target + heads * HEAD_DIM + tail, z, mask=stays)


@triton.jit(
    do_not_specialize=["layer", "scratch_base", "table_stride"],
    do_not_specialize_on_alignment=["positions", "places", "rows", "k_table", "v_table"],
)  # a restore has its own tables and token counts of any size
def rope_cache_kernel(
    q, k, v, cos_sin, positions, places, rows, pool, k_table, v_table, q_weight, k_weight, q_stride, k_stride, v_stride,
    table_stride, layer, scratch_base, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, SLICE: tl.constexpr, Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads): blocks of Q first, then of K, then of V."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    row = tl.load(rows + token)
    if row < 0:
        return
    position = tl.load(positions + token)
    angles = cos_sin + tl.load(places + token).to(tl.int64) * ROTARY
    cell: tl.constexpr = pool.dtype.element_ty
    if part < Q_BLOCKS:
        at = q + token * q_stride
        transform_heads(
            at, at, at, q_weight, angles, part, eps, Q_HEADS, HEAD_DIM, ROTARY, Q_NORM, BLOCK_H, HALF, REST
        )  # fmt: skip
    elif part < Q_BLOCKS + KV_BLOCKS:
        to = token_start(k_table, row, table_stride, position, layer, scratch_base, BLOCK_SIZE, ROW, SLICE)
        scales = pool
        if cell.primitive_bitwidth == 8:
            scales = scale_pointers(pool, to - position % BLOCK_SIZE * ROW, position, 0, BLOCK_SIZE, ROW, KV_HEADS)
        transform_heads(
            k + token * k_stride, pool + to, scales, k_weight, angles, part - Q_BLOCKS, eps, KV_HEADS, HEAD_DIM, ROTARY,
            K_NORM, BLOCK_H, HALF, REST,
        )  # fmt: skip
    else:
        to = token_start(v_table, row, table_stride, position, layer, scratch_base, BLOCK_SIZE, ROW, SLICE)
        to += PAIR * SLICE  # a paired pool has only the table of K
        heads = (part - Q_BLOCKS - KV_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        dims = tl.arange(0, WIDE)[None, :]
        mask = (heads < KV_HEADS) & (dims < VALUE_DIM)
        values = tl.load(v + token * v_stride + heads * VALUE_DIM + dims, mask=mask, other=0)
        if cell.primitive_bitwidth == 8:
            wide = values.to(tl.float32)
            highest, unsound = extent(wide)
            bits, step = least_scales(highest, unsound)
            at = scale_pointers(pool, to - position % BLOCK_SIZE * ROW, position, heads, BLOCK_SIZE, ROW, KV_HEADS)
            tl.store(at, bits[:, None], mask=heads < KV_HEADS)
            tl.store(pool + to + heads * HEAD_DIM + dims, to_steps(wide, step[:, None]), mask=mask)
        else:
            tl.store(pool + to + heads * VALUE_DIM + dims, values, mask=mask)


def rope_cache_write(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    rows: Tensor,
    pool: PoolView,
    *,
    layer: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    angles: Tensor | None = None,
) -> None:
    """Rotate q in place; write rotated k, and v, of token i to position positions[i] of table row rows[i].

    Args:
        q: [n, heads, head_dim], or None.
        k: [n, kv_heads, head_dim].
        v: [n, kv_heads, value_dim].
        cos_sin: [places, rotary_dim] float32, cosines first; None: no rotation.
        positions: [n] int32 or int64.
        rows: [n] int32 or int64; a token with rows[i] < 0 is padding and is skipped.
        pool, layer: As in `decode_attention`.
        q_norm: Weight [head_dim] of the norm of Q, or None.
        k_norm: Weight [head_dim] of the norm of K, or None.
        angles: [n], of the type of `positions`: rows of `cos_sin`. None: `positions`.
    """
    cells, k_table, v_table, scratch_base, pair = pool
    (count, kv_heads, head_dim), block_size = k.shape, cells.shape[1]
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    check_pool(pool)
    places = positions if angles is None else angles
    _check(q, k, v, cos_sin, (positions, places, rows), cells, (q_norm, k_norm))
    if count == 0:
        return
    config = configs.HEADS
    # Without rotation and norm, Q is unchanged and needs no programs.
    query, q_heads = (k, 0) if q is None or not (rotary or q_norm is not None) else (q, q.shape[1])
    blocks = -(-q_heads // config.block_m) + 2 * -(-kv_heads // config.block_m)
    rope_cache_kernel[(count, blocks)](
        query, k, v, cells if cos_sin is None else cos_sin, positions, places, rows, cells, k_table,
        k_table if v_table is None else v_table,
        cells if q_norm is None else q_norm, cells if k_norm is None else k_norm, query.stride(0), k.stride(0),
        v.stride(0), k_table.stride(0), layer, scratch_base, eps, Q_HEADS=q_heads, KV_HEADS=kv_heads,
        HEAD_DIM=head_dim, VALUE_DIM=v.shape[2], ROW=cells.stride(1), ROTARY=rotary, BLOCK_SIZE=block_size,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, SLICE=cells.stride(0),
        BLOCK_H=config.block_m, HALF=configs.next_power_of_two(max(1, rotary // 2)), **config.options,
        REST=configs.next_power_of_two(max(1, head_dim - rotary)), WIDE=configs.next_power_of_two(v.shape[2]),
        PAIR=pair,
    )  # fmt: skip


def _check(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    indices: tuple[Tensor, ...],
    pool: Tensor,
    norms: tuple[Tensor | None, ...],
) -> None:
    head_dim = pool.shape[3]
    for name, value, width in (("k", k, head_dim), ("v", v, v.shape[2])):
        check_heads(name, value, width, computed_in(pool, k))
        assert value.shape[:2] == k.shape[:2] and value.shape[1] == pool.shape[2], (
            f"{name}: {value.shape}, pool {pool.shape}"
        )
    check_value_width(pool, v.shape[2])
    if q is not None:
        check_heads("q", q, head_dim, k.dtype)
        assert len(q) == len(k), f"{len(q)} queries, {len(k)} keys"
    for name, index in zip(("positions", "angles", "rows"), indices, strict=True):
        assert index.shape == (len(k),) and index.is_contiguous(), f"{name}: contiguous [{len(k)}], not {index.shape}"
        assert index.dtype in (torch.int32, torch.int64), f"{name}: int32 or int64, not {index.dtype}"
    if cos_sin is not None:
        assert cos_sin.dim() == 2 and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32, "cos_sin: float32 2-D"
        assert cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= head_dim, f"rotary_dim {cos_sin.shape[1]}"
    for weight in norms:
        assert weight is None or (weight.shape == (head_dim,) and weight.is_contiguous()), "norm weight: [head_dim]"
