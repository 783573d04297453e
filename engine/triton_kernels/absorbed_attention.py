# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Attention of one new token per request over a context that is hidden state in part, where K is linear in it.

The heads' queries are multiplied by W_k, so that their products with a token's hidden state are scores, and what is
gathered is hidden state as well, which W_v is for afterwards (`engine.models.absorption`). Where K's table is below
zero a block is one of hidden state; others are K and V, in any order. Programs take the same splits of contexts as
those of `decode_attention`: one kernel gathers hidden state, another V beside it, and a third merges what both have
left. Of models with as many KV heads as heads. Knows nothing of requests. Twin: engine.models.torch_ops.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.addressing import check_pool, slice_start
from engine.triton_kernels.decode_attention import check_partials, load_entries, online_softmax, scale_of
from engine.triton_kernels.work import AbsorbedScratch, DecodeWork

if TYPE_CHECKING:
    from engine.models.absorption import KVWeights

_NOTHING = tl.constexpr(-1e38)  # the maximum of no scores, finite


@triton.jit(do_not_specialize=["layer", "scratch_base", "count", "num_items"])
def absorbed_kernel(
    q, absorbed, bias, pool, k_table, hidden_table, items, gathered, lse, q_stride, count, num_items, table_stride,
    layer, scratch_base, scale,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr,
    SLICE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Program (block of columns of a block of heads, item): sums of hidden state that weights of a split make, divided
    by theirs. Every program of an item has all of the scores: the tile that it reads for them is in the L2 cache."""
    item = tl.program_id(1).to(tl.int64)
    request = tl.load(items + item * 4).to(tl.int64)
    if request < 0:
        return
    PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    part = tl.program_id(0) % PARTS
    heads = tl.program_id(0) // PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    live = heads < HEADS
    row = tl.load(items + item * 4 + 1).to(tl.int64) * table_stride
    begin, end = tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
    shift = tl.zeros([BLOCK_M], tl.float32)
    if BIASED:  # the part of every score that K's bias makes: K and V beside have it, too
        dims = tl.arange(0, BLOCK_D)
        at_dims, has_dims = heads[:, None] * HEAD_DIM + dims[None, :], live[:, None] & (dims < HEAD_DIM)[None, :]
        whole = tl.load(q + request * q_stride + at_dims, mask=has_dims, other=0.0).to(tl.float32)
        shift = tl.sum(whole * tl.load(bias + at_dims, mask=has_dims, other=0.0).to(tl.float32), 1) * scale
    query_at = absorbed + (heads.to(tl.int64) * count + request) * WIDTH
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        seen = (tokens < end) & (load_entries(k_table + row, tokens, end, BLOCK_SIZE) < 0)
        if tl.max(seen.to(tl.int32), 0) > 0:
            entries = tl.load(hidden_table + row + tokens // BLOCK_SIZE, mask=seen, other=0)
            at = pool + slice_start(entries, layer, scratch_base, SLICE) + (tokens % BLOCK_SIZE) * ROW
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for first in tl.range(0, WIDTH, DEPTH, num_stages=3):
                places = first + tl.arange(0, DEPTH)
                inside = (places < WIDTH)[None, :]
                query = tl.load(query_at[:, None] + places[None, :], mask=live[:, None] & inside, other=0.0)
                state = tl.load(at[:, None] + places[None, :], mask=seen[:, None] & inside, other=0.0)
                scores = tl.dot(query, tl.trans(state), scores, input_precision="ieee")
            scores = tl.where(seen[None, :], scores * scale + shift[:, None], float("-inf"))
            weights, peak, total, rescale = online_softmax(scores, peak, total)
            kept = tl.load(at[:, None] + columns[None, :], mask=seen[:, None] & (columns < WIDTH)[None, :], other=0.0)
            acc = tl.dot(weights.to(kept.dtype), kept, acc * rescale[:, None], input_precision="ieee")
    total = tl.where(total > 0.0, total, 1.0)
    to = gathered + (heads.to(tl.int64) * num_items + item) * WIDTH
    mask = live[:, None] & (columns < WIDTH)[None, :]
    tl.store(to[:, None] + columns[None, :], (acc / total[:, None]).to(gathered.dtype.element_ty), mask=mask)
    if part == 0:  # of no hidden state: -inf, which weighs nothing
        tl.store(lse + item * HEADS + heads, peak + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=["layer", "scratch_base"])
def beside_kernel(
    q, pool, k_table, v_table, items, partial, lse, q_stride, table_stride, layer, scratch_base, scale,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROW: tl.constexpr, SLICE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (head, item): what the blocks of K and V of a split give, divided by the sum of its weights."""
    head = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    request = tl.load(items + item * 4).to(tl.int64)
    if request < 0:
        return
    row = tl.load(items + item * 4 + 1).to(tl.int64) * table_stride
    begin, end = tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    query = tl.load(q + request * q_stride + head * HEAD_DIM + dims, mask=inside, other=0.0).to(tl.float32) * scale
    peak = tl.full([1], _NOTHING, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        k_entries = load_entries(k_table + row, tokens, end, BLOCK_SIZE)
        seen = (tokens < end) & (k_entries >= 0)
        if tl.max(seen.to(tl.int32), 0) > 0:
            v_entries = load_entries(v_table + row, tokens, end, BLOCK_SIZE)
            in_block = (tokens % BLOCK_SIZE) * ROW + head * HEAD_DIM
            mask = seen[:, None] & inside[None, :]
            k_at = slice_start(k_entries, layer, scratch_base, SLICE) + in_block
            v_at = slice_start(v_entries, layer, scratch_base, SLICE) + in_block
            k = tl.load(pool + k_at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
            v = tl.load(pool + v_at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
            scores = tl.where(seen, tl.sum(k * query[None, :], 1), float("-inf"))
            top = tl.maximum(peak, tl.max(scores, 0))
            weights, rescale = tl.exp2(scores - top), tl.exp2(peak - top)
            acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
            total = total * rescale + tl.sum(weights, 0)
            peak = top
    sound = tl.where(total > 0.0, total, 1.0)
    at = item * HEADS + head
    tl.store(partial + at * HEAD_DIM + dims, acc / sound, mask=inside)
    tl.store(lse + at, tl.sum(tl.where(total > 0.0, peak + tl.log2(sound), float("-inf")), 0))


@triton.jit(do_not_specialize=["num_items"])
def join_kernel(
    partial, lse, values, hidden_lse, ranges, out, num_items, out_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (head, request): all splits of its context, each with what hidden state gave of it and what K and V."""
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(ranges + request * 4).to(tl.int64)
    count = tl.load(ranges + request * 4 + 1)
    if count == 0:
        return
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    peak = tl.full([1], _NOTHING, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_S):
        index = start + tl.arange(0, BLOCK_S)
        seen, items = index < count, first + index
        beside = tl.load(lse + items * HEADS + head, mask=seen, other=float("-inf"))
        hidden = tl.load(hidden_lse + items * HEADS + head, mask=seen, other=float("-inf"))
        top = tl.maximum(peak, tl.max(tl.maximum(beside, hidden), 0))
        rescale = tl.exp2(peak - top)
        beside, hidden = tl.exp2(beside - top), tl.exp2(hidden - top)
        mask = seen[:, None] & inside[None, :]
        kept = tl.load(partial + (items * HEADS + head)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        at = values + (head.to(tl.int64) * num_items + items) * HEAD_DIM
        made = tl.load(at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        acc = acc * rescale + tl.sum(beside[:, None] * kept + hidden[:, None] * made, 0)
        total = total * rescale + tl.sum(beside + hidden, 0)
        peak = top
    to = out + request * out_stride + head * HEAD_DIM + dims
    tl.store(to, (acc / total).to(out.dtype.element_ty), mask=inside)


def absorbed_attention(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    layer_weights: "KVWeights",
    work: DecodeWork,
    scratch: AbsorbedScratch,
    out: Tensor,
    *,
    layer: int,
    scratch_base: int,
    scale: float,
) -> None:
    """out[i] = softmax(scale * q[i] K^T) V over the context of request i, whose K and V are projected from hidden state
    where K's table is below zero; not touched where `work` has no such request.

    Shapes: q, out [n, heads, head_dim] with n <= the work list's requests; pool [slices, block_size, heads, head_dim];
    tables [3, rows, max_blocks] (K, V, hidden state). The grids depend on shapes alone.
    """
    (count, heads, head_dim), num_items = q.shape, work.items.shape[0]
    check_pool(pool, *tables.unbind(0))
    _check(q, pool, layer_weights, scratch, num_items, out)
    if count == 0:
        return
    absorbed = torch.bmm(q.transpose(0, 1), layer_weights.keys)  # [heads, n, hidden size]
    where = {"layer": layer, "scratch_base": scratch_base, "scale": scale_of(scale, 0.0)}
    _gather(q, absorbed, pool, tables, layer_weights.key_bias, work, scratch, where)
    weights = layer_weights.values.transpose(1, 2)
    if layer_weights.value_bias is None:
        values = torch.bmm(scratch.gathered, weights)
    else:
        values = torch.baddbmm(layer_weights.value_bias[:, None], scratch.gathered, weights)
    config = configs.join_config()
    join_kernel[(heads, count)](
        scratch.partial, scratch.partial_lse, values, scratch.hidden_lse, work.ranges, out, num_items,
        out.stride(0), HEADS=heads, HEAD_DIM=head_dim, BLOCK_S=config.block_n,
        BLOCK_D=configs.next_power_of_two(head_dim), **config.options,
    )  # fmt: skip


def _gather(
    q: Tensor,
    absorbed: Tensor,
    pool: Tensor,
    tables: Tensor,
    bias: Tensor | None,
    work: DecodeWork,
    scratch: AbsorbedScratch,
    where: dict[str, Any],
) -> None:
    """What each item's tokens give, of hidden state and of K and V."""
    (_, heads, head_dim), (_, num_items, width) = q.shape, scratch.gathered.shape
    k_table, v_table, hidden_table = tables.unbind(0)
    config = configs.absorbed_config(heads, q.dtype, work.tile)
    sizes = {
        "BLOCK_SIZE": pool.shape[1], "HEADS": heads, "HEAD_DIM": head_dim, "ROW": pool.stride(1),
        "SLICE": pool.stride(0), "BLOCK_D": configs.next_power_of_two(head_dim),
    }  # fmt: skip
    blocks = -(-heads // config.block_m) * -(-width // config.columns)
    absorbed_kernel[(blocks, num_items)](
        q, absorbed, q if bias is None else bias, pool, k_table, hidden_table, work.items, scratch.gathered,
        scratch.hidden_lse, q.stride(0), len(q), num_items, tables.stride(1), **where, **sizes,
        WIDTH=width, BLOCK_M=config.block_m, BLOCK_N=config.block_n, COLUMNS=config.columns,
        DEPTH=config.depth, BIASED=bias is not None, **config.options,
    )  # fmt: skip
    beside = configs.beside_config(head_dim, work.tile)
    beside_kernel[(heads, num_items)](
        q, pool, k_table, v_table, work.items, scratch.partial, scratch.partial_lse, q.stride(0), tables.stride(1),
        **where, **sizes, BLOCK_N=beside.block_n, **beside.options,
    )  # fmt: skip


def _check(
    q: Tensor, pool: Tensor, weights: "KVWeights", scratch: AbsorbedScratch, num_items: int, out: Tensor
) -> None:
    (count, heads, head_dim), width = q.shape, weights.keys.shape[2]
    assert pool.shape[2:] == (heads, head_dim), "of models with as many KV heads as heads"
    assert q.shape == out.shape and q.stride()[1:] == out.stride()[1:] == (head_dim, 1), "q, out: rows of heads"
    assert count <= num_items, "more queries than the work list has items"
    assert weights.keys.shape == weights.values.shape == (heads, head_dim, width), "W_k, W_v: by head"
    assert width <= heads * head_dim, f"hidden state of {width} does not fit in {heads * head_dim}"
    assert q.dtype == pool.dtype == weights.keys.dtype == scratch.gathered.dtype, "one type"
    assert scratch.gathered.shape == (heads, num_items, width) and scratch.gathered.is_contiguous(), "gathered: by head"
    for partial_lse in (scratch.partial_lse, scratch.hidden_lse):
        check_partials(scratch.partial, partial_lse, (num_items, heads, head_dim))
