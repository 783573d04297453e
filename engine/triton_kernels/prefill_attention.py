# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Causal attention of prompt chunks over the paged cache, including K and V of the chunk itself (write them first).

Chunks can have any length, also one token, so that a mixed step needs no other kernel. The rows of a tile are (token,
head of the group) pairs: with grouped heads a short chunk still fills a tile, and the causal edge is short. Tiles of
cached tokens visible to every row run without a mask; only the last tiles need one. A short chunk after a long context
has too few tiles to fill the device, so each tile is split over its cached tokens. A second kernel merges the splits by
token and head; a merge by the last split would take longer over all rows of a tile. Twin: engine.triton_kernels.twins.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.models.attention import PLAIN, Manner, PoolView
from engine.models.byte_cells import is_bytes
from engine.triton_kernels import configs
from engine.triton_kernels.addressing import (
    check_pool,
    check_queries,
    layer_base,
    load_scales,
    scale_pointers,
    slice_starts,
)
from engine.triton_kernels.decode_attention import (
    _NOTHING,
    capped,
    check_partials,
    check_sinks,
    load_pairs,
    merged,
    online_softmax,
    scale_of,
    with_sink,
)
from engine.triton_kernels.work import PrefillWork, Scratch


@triton.jit
def attend_tiles(
    q, state, entries, pool, k_row, v_row, head, positions, begin, end, last, layer, scratch_base, scale,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROW: tl.constexpr, SLICE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Continue `state` = (acc, peak, total) over tokens [begin, end), relative to `layer_base`. `entries`: block table
    entries of the tile at `begin`."""
    acc, peak, total = state
    k_entries, v_entries = entries
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        in_block = (tokens % BLOCK_SIZE) * ROW + head * HEAD_DIM
        values_in_block = in_block
        if VALUE_DIM != HEAD_DIM:
            values_in_block = (tokens % BLOCK_SIZE) * ROW + head * VALUE_DIM
        k_at, v_at = slice_starts(k_entries, v_entries, layer, scratch_base, SLICE, PAIR)
        mask = (dims < HEAD_DIM)[None, :]
        if MASKED:
            mask = mask & (tokens < last)[:, None]
        near = tokens < last
        if WINDOW > 0:  # blocks before the window may have been reused by another request
            near = near & (tokens > tl.min(positions, 0) - WINDOW)
            mask = mask & near[:, None]
        value_mask = mask
        if VALUE_DIM != HEAD_DIM:
            value_mask = (value_dims < VALUE_DIM)[None, :] & near[:, None]
        # Load one iteration ahead, as in decode: no address of K or V depends on a load of its own iteration.
        k_entries, v_entries = load_pairs(k_row, v_row, tokens + BLOCK_N, last, BLOCK_SIZE, PAIR)
        k = tl.load(pool + (k_at + in_block)[:, None] + dims[None, :], mask=mask, other=0)
        v = tl.load(pool + (v_at + values_in_block)[:, None] + value_dims[None, :], mask=value_mask, other=0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if pool.dtype.element_ty.primitive_bitwidth == 8:
            at = scale_pointers(pool, k_at, tokens, head, BLOCK_SIZE, ROW, KV_HEADS)
            scores *= load_scales(at, near)[None, :]
        scores = capped(scores, SOFTCAP)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        weights, peak, total, rescale = online_softmax(scores, peak, total)
        if pool.dtype.element_ty.primitive_bitwidth == 8:
            at = scale_pointers(pool, v_at, tokens, head, BLOCK_SIZE, ROW, KV_HEADS)
            weights *= load_scales(at, near)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * rescale[:, None], input_precision="ieee")
    return (acc, peak, total), (k_entries, v_entries)


@triton.jit(do_not_specialize=["layer", "scratch_base"])
def prefill_kernel(
    q_ptr, pool, k_table, v_table, items, out_ptr, partial, partial_lse, sinks, q_stride, out_stride, table_stride,
    layer, scratch_base, scale,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROW: tl.constexpr, SLICE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """Program (KV head, item). A tile with one split is written to `out`, others to partial results."""
    head = tl.program_id(0)
    item = items + tl.program_id(1) * 8
    count = tl.load(item + 2)
    if count == 0:
        return
    row = tl.load(item).to(tl.int64) * table_stride
    first = tl.load(item + 1).to(tl.int64)
    position = tl.load(item + 3)
    begin = tl.load(item + 4)
    end = tl.load(item + 5)
    splits = tl.load(item + 7)
    pairs = tl.arange(0, BLOCK_M)
    token = pairs // GROUP
    dims = tl.arange(0, BLOCK_D)
    q_columns = (head * GROUP + pairs % GROUP) * HEAD_DIM
    mask = (token < count)[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = (first + token) * q_stride + q_columns
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=mask, other=0.0)
    last = position + count
    seen_by_all = (position + 1) // BLOCK_N * BLOCK_N
    k_row, v_row = k_table + row, v_table + row
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(position + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N)
    tokens = begin + tl.arange(0, BLOCK_N)
    entries = load_pairs(k_row, v_row, tokens, last, BLOCK_SIZE, PAIR)
    pool = layer_base(pool, layer, SLICE, PAIR)
    # A row that attends to no token of its first tile, or of its split, still needs a finite maximum.
    peak = tl.full([BLOCK_M], _NOTHING, tl.float32)
    state = (tl.zeros([BLOCK_M, BLOCK_V], tl.float32), peak, tl.zeros([BLOCK_M], tl.float32))
    if WINDOW > 0:  # mask both edges in every tile: there are few tiles
        seen_by_all = begin
    else:
        seen_by_all = tl.minimum(tl.maximum(seen_by_all, begin), end)
        state, entries = attend_tiles(
            q, state, entries, pool, k_row, v_row, head, position + token, begin, seen_by_all, last, layer,
            scratch_base, scale, BLOCK_SIZE, KV_HEADS, HEAD_DIM, VALUE_DIM, ROW, SLICE, BLOCK_N, BLOCK_D, BLOCK_V,
            False, WINDOW, SOFTCAP, PAIR,
        )  # fmt: skip
    state, entries = attend_tiles(
        q, state, entries, pool, k_row, v_row, head, position + token, seen_by_all, end, last, layer, scratch_base,
        scale, BLOCK_SIZE, KV_HEADS, HEAD_DIM, VALUE_DIM, ROW, SLICE, BLOCK_N, BLOCK_D, BLOCK_V, True, WINDOW, SOFTCAP,
        PAIR,
    )  # fmt: skip
    acc, peak, total = state
    if SINKS:  # a split context adds its sink once, in the merge
        sink = tl.load(sinks + head * GROUP + pairs % GROUP)
        acc, total = with_sink(acc, peak, total, tl.where(splits == 1, sink, float("-inf")))
    total = tl.where(total == 0.0, 1.0, total)  # a row without visible tokens has no weight in the merge
    acc = acc / total[:, None]
    value_dims = tl.arange(0, BLOCK_V)
    value_mask = (token < count)[:, None] & (value_dims < VALUE_DIM)[None, :]
    if splits == 1:
        out_at = (first + token) * out_stride + (head * GROUP + pairs % GROUP) * VALUE_DIM
        tl.store(out_ptr + out_at[:, None] + value_dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=value_mask)
    else:  # the splits of a token are adjacent
        rows = tl.load(item + 6).to(tl.int64) + token * splits
        heads = rows * (KV_HEADS * GROUP) + head * GROUP + pairs % GROUP
        tl.store(partial + heads[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=value_mask)
        tl.store(partial_lse + heads, peak + tl.log2(total), mask=token < count)


@triton.jit
def merge_kernel(
    merges, partial, partial_lse, sinks, out_ptr, out_stride, NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (head, row of `merges`): (first row of the partial results, splits, row of `out`, -). A token with one
    split is already in `out`."""
    head = tl.program_id(0)
    place = merges + tl.program_id(1).to(tl.int64) * 4
    first = tl.load(place)
    count = tl.load(place + 1)
    if count == 1:
        return
    peak = tl.full([1], _NOTHING, tl.float32)
    acc, total = tl.zeros([1, BLOCK_V], tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, count, BLOCK_S):
        part, highest, weight = merged(
            partial, partial_lse, first + start, 1, count - start, head, NUM_HEADS, 1, VALUE_DIM, BLOCK_S, 1, BLOCK_V
        )  # fmt: skip
        new_peak = tl.maximum(peak, highest)
        before, behind = tl.exp2(peak - new_peak), tl.exp2(highest - new_peak)
        acc = acc * before[:, None] + part * behind[:, None]
        peak, total = new_peak, total * before + weight * behind
    if SINKS:
        acc, total = with_sink(acc, peak, total, tl.load(sinks + head + tl.arange(0, 1)))
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    dims = tl.arange(0, BLOCK_V)
    out_at = out_ptr + tl.load(place + 2).to(tl.int64) * out_stride + head * VALUE_DIM + dims[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(dims < VALUE_DIM)[None, :])


def prefill_attention(
    q: Tensor,
    pool: PoolView,
    work: PrefillWork,
    scratch: Scratch,
    out: Tensor,
    *,
    layer: int,
    manner: Manner = PLAIN,
    config: configs.LaunchConfig | None = None,
) -> None:
    """Attend the token at position p of a chunk to cached tokens [0, p] of its row; `out` of other tokens is unchanged.

    The grids depend on shapes alone. For a step outside any bucket, the merge is launched only if there are splits.

    Args:
        q: [tokens, heads, head_dim], with the tokens of the chunks at the offsets in `work`.
        work: Query tiles and splits.
        scratch: Memory for `work.partials` rows; `arrived` is not used.
        out: [tokens, heads, value_dim].
        pool, layer, manner, config: As in `decode_attention`.
    """
    (cells, k_table, v_table, scratch_base, pair), (partial, lse, _) = pool, scratch
    (_, num_heads, head_dim), (_, block_size, kv_heads, _) = q.shape, cells.shape
    check_pool(pool)
    check_queries(q, out, cells)
    assert num_heads % kv_heads == 0, f"{num_heads} query heads over {kv_heads} KV heads"
    check_sinks(manner.sinks, num_heads)
    group, value_dim = num_heads // kv_heads, out.shape[2]
    check_partials(scratch, (work.partials, num_heads, value_dim))
    config = config or configs.prefill_config(
        configs.device_arch(q.device), max(head_dim, value_dim), q.dtype, int8=is_bytes(cells.dtype)
    )
    assert work.tokens_per_tile * group <= config.block_m, "tiles of the work list are larger than those of the kernel"
    assert work.tile % config.block_n == 0, f"splits of the work list begin at {work.tile}, tiles are {config.block_n}"
    sinks, block_v = lse if manner.sinks is None else manner.sinks, configs.next_power_of_two(value_dim)
    prefill_kernel[(kv_heads, work.items.shape[0])](
        q, cells, k_table, k_table if v_table is None else v_table, work.items, out, partial, lse, sinks, q.stride(0),
        out.stride(0), k_table.stride(0), layer, scratch_base, scale_of(manner, head_dim), BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, VALUE_DIM=value_dim, ROW=cells.stride(1),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, **config.options,
        BLOCK_D=configs.next_power_of_two(head_dim), BLOCK_V=block_v, SLICE=cells.stride(0),
        WINDOW=manner.window or 0, SOFTCAP=manner.softcap or 0.0, SINKS=manner.sinks is not None, PAIR=pair,
    )  # fmt: skip
    if work.merging:
        merge_kernel[(num_heads, len(work.merges))](
            work.merges, partial, lse, sinks, out, out.stride(0), NUM_HEADS=num_heads, VALUE_DIM=value_dim, BLOCK_S=16,
            BLOCK_V=block_v, SINKS=manner.sinks is not None, num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
