"""Attention over the paged cache, of decodes and of prompt chunks.

Attention of one new token per request over its cached context: split-KV (flash decoding), merged by the last split.

The query heads that share a KV head are packed into one tile, so that K and V are read once per group. A program takes
one split of one context from the work list. The program that finishes last in a group of splits merges the partial
results of the group; the order of the sum does not depend on the program. Twin: engine.triton_kernels.twins.

Causal attention of prompt chunks over the paged cache, including K and V of the chunk itself (write them first).

Chunks can have any length, also one token, so that a mixed step needs no other kernel. The rows of a tile are (token,
head of the group) pairs: with grouped heads a short chunk still fills a tile, and the causal edge is short. Tiles of
cached tokens visible to every row run without a mask; only the last tiles need one. A short chunk after a long context
has too few tiles to fill the device, so each tile is split over its cached tokens. A second kernel merges the splits by
token and head; a merge by the last split would take longer over all rows of a tile. Twin: engine.triton_kernels.twins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.models.attention import PLAIN, Manner, PoolView
from engine.models.byte_cells import is_bytes
from engine.triton_kernels import configs
from engine.triton_kernels.cache import (
    check_pool,
    check_queries,
    layer_base,
    load_scales,
    scale_pointers,
    slice_starts,
)
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"


_LOG2_E = 1.4426950408889634
_BASE_2 = tl.constexpr(_LOG2_E)
_NOTHING = tl.constexpr(-1e38)  # maximum over no scores: finite, unlike the scores of masked tokens


@triton.jit
def load_entries(row, tokens, end, BLOCK_SIZE: tl.constexpr):
    """Load the block table entries of a tile of tokens; entry 0 (never used) beyond `end`."""
    return tl.load(row + tokens // BLOCK_SIZE, mask=tokens < end, other=0)


@triton.jit
def load_pairs(k_row, v_row, tokens, end, BLOCK_SIZE: tl.constexpr, PAIR: tl.constexpr):
    """Load the entries of K and of V; in a paired pool the entries of K serve both."""
    k_entries = load_entries(k_row, tokens, end, BLOCK_SIZE)
    v_entries = k_entries
    if PAIR == 0:
        v_entries = load_entries(v_row, tokens, end, BLOCK_SIZE)
    return k_entries, v_entries


@triton.jit
def online_softmax(scores, peak, total):
    """Advance the softmax by one tile, in base 2: (weights, new peak, new sum, factor for earlier results)."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    scale = tl.exp2(peak - new_peak)
    return weights, new_peak, total * scale + tl.sum(weights, 1), scale


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """Return SOFTCAP * tanh(scores) in base 2 if there is a cap; such scores arrive divided by it, not in base 2."""
    if SOFTCAP > 0:
        scores = (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _BASE_2)) + 1.0)) * (SOFTCAP * _BASE_2)
    return scores


@triton.jit
def with_sink(acc, peak, total, sink):
    """Add a score `sink [rows]` without a value to the sums over whole contexts: (acc [rows, dims], total)."""
    sink = sink * _BASE_2
    new_peak = tl.maximum(peak, sink)
    scale = tl.exp2(peak - new_peak)
    return acc * scale[:, None], total * scale + tl.exp2(sink - new_peak)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """Return the first token that a query at `position` sees by `Manner.reach`, which is not 0."""
    return position // -WINDOW * -WINDOW if WINDOW < 0 else tl.maximum(position + 1 - WINDOW, 0)


@triton.jit
def attend_split(
    q, pool, k_row, v_row, head, begin, end, oldest, layer, scratch_base, scale,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROW: tl.constexpr, SLICE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Attend the rows of `q` [BLOCK_M, BLOCK_D] to tokens [begin, end) of one KV head: (weighted V, peak, sum).

    With a window, tokens before `oldest` are masked.
    """
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    inside = (dims < HEAD_DIM)[None, :]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    pool = layer_base(pool, layer, SLICE, PAIR)
    tokens = begin + tl.arange(0, BLOCK_N)
    k_entries, v_entries = load_pairs(k_row, v_row, tokens, end, BLOCK_SIZE, PAIR)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        in_block = (tokens % BLOCK_SIZE) * ROW + head * HEAD_DIM
        values_in_block = in_block
        if VALUE_DIM != HEAD_DIM:
            values_in_block = (tokens % BLOCK_SIZE) * ROW + head * VALUE_DIM
        k_at, v_at = slice_starts(k_entries, v_entries, layer, scratch_base, SLICE, PAIR)
        seen = tokens < end
        if WINDOW != 0:
            seen = seen & (tokens >= oldest)
        mask = seen[:, None] & inside
        value_mask = mask
        if VALUE_DIM != HEAD_DIM:
            value_mask = seen[:, None] & (value_dims < VALUE_DIM)[None, :]
        # Load the entries of the next tile one iteration ahead: the addresses of K and V then depend on no load of the
        # same iteration, and the pipeliner can keep several tiles in flight.
        k_entries, v_entries = load_pairs(k_row, v_row, tokens + BLOCK_N, end, BLOCK_SIZE, PAIR)
        k = tl.load(pool + (k_at + in_block)[:, None] + dims[None, :], mask=mask, other=0)
        v = tl.load(pool + (v_at + values_in_block)[:, None] + value_dims[None, :], mask=value_mask, other=0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if pool.dtype.element_ty.primitive_bitwidth == 8:
            at = scale_pointers(pool, k_at, tokens, head, BLOCK_SIZE, ROW, KV_HEADS)
            scores *= load_scales(at, seen)[None, :]
        scores = capped(scores, SOFTCAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, peak, total, rescale = online_softmax(scores, peak, total)
        if pool.dtype.element_ty.primitive_bitwidth == 8:
            at = scale_pointers(pool, v_at, tokens, head, BLOCK_SIZE, ROW, KV_HEADS)
            weights *= load_scales(at, seen)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * rescale[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit
def merged(
    partial, partial_lse, first, stride, count, head, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merge up to BLOCK_S of `count` rows of partial results: (weighted [BLOCK_G, BLOCK_V], peak, sum).

    The rows start at `first`, `stride` apart, and cover heads [head, head + GROUP).
    """
    index, group, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_V)
    at = (first + index * stride).to(tl.int64)[:, None] * NUM_HEADS + (head + group)[None, :]
    mask = (index < count)[:, None] & (group < GROUP)[None, :]
    wide = mask[:, :, None] & (dims < VALUE_DIM)[None, None, :]
    # Bypass L1: other multiprocessors wrote these results, which are in L2.
    lse = tl.load(partial_lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    values = tl.load(
        partial + at[:, :, None] * VALUE_DIM + dims[None, None, :], mask=wide, other=0.0, cache_modifier=".cg"
    )  # fmt: skip
    peak = tl.maximum(tl.max(lse, 0), _NOTHING)
    weights = tl.exp2(lse - peak[None, :])
    return tl.sum(weights[:, :, None] * values, 0), peak, tl.sum(weights, 0)


@triton.jit
def merge_upwards(
    out, partial, partial_lse, arrived, sinks, first, index, count, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_V: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the results of split `index` of `count`, stored in row first + index, with those of its neighbours.

    Splits are merged in groups of BLOCK_S into the row of the group's first member, then groups of groups. The program
    that finishes last in a group merges it, with all rows of the group in flight at once. The last program of all
    writes `out`, the row of the request.
    """
    group, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_V)
    heads = head * GROUP + group
    mask = (group < GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
    stride = index * 0 + 1  # rows between the members of a group
    while count > 1:
        index = index // BLOCK_S
        members = tl.minimum(count - index * BLOCK_S, BLOCK_S)
        count = (count + BLOCK_S - 1) // BLOCK_S
        row = first + index * BLOCK_S * stride
        if members > 1:
            # The barrier, release and acquire ensure that all threads have written before the count and that the
            # merging program sees the results. The counter is in the row of the second member, unique to this level.
            tl.debug_barrier()
            place = arrived + (row + stride) * KV_HEADS + head
            if tl.atomic_add(place, 1, sem="acq_rel") == members - 1:
                tl.store(place, 0)  # reset for the next layer
                acc, peak, total = merged(
                    partial, partial_lse, row, stride, members, head * GROUP, KV_HEADS * GROUP, GROUP, VALUE_DIM,
                    BLOCK_S, BLOCK_G, BLOCK_V,
                )  # fmt: skip
                if count == 1:
                    if SINKS:
                        acc, total = with_sink(acc, peak, total, tl.load(sinks + heads, mask=group < GROUP, other=0.0))
                    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
                    tl.store(
                        out + heads[:, None] * VALUE_DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=mask
                    )  # fmt: skip
                else:
                    total = tl.where(total > 0, total, 1.0)
                    at = row.to(tl.int64) * (KV_HEADS * GROUP) + heads
                    tl.debug_barrier()  # all threads have read the row
                    tl.store(
                        partial + at[:, None] * VALUE_DIM + dims[None, :], acc / total[:, None], mask=mask
                    )  # fmt: skip
                    tl.store(partial_lse + at, peak + tl.log2(total), mask=group < GROUP)
            else:
                count = tl.minimum(count, 1)  # another program continues
        stride = stride * BLOCK_S


@triton.jit(do_not_specialize=["layer", "scratch_base"])
def split_kernel(
    q_ptr, pool, k_table, v_table, items, ranges, out_ptr, partial, partial_lse, arrived, sinks, q_stride, out_stride,
    table_stride, layer, scratch_base, scale,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROW: tl.constexpr, SLICE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Program (KV head, item). A request with one split is written to `out`, others to partial results."""
    head = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    request = tl.load(items + item * 4)
    if request < 0:
        return
    row = tl.load(items + item * 4 + 1).to(tl.int64) * table_stride
    begin = tl.load(items + item * 4 + 2)
    end = tl.load(items + item * 4 + 3)
    splits = tl.load(ranges + request * 4 + 1)
    oldest = 0
    if WINDOW != 0:  # the context ends with its last split; splits before the window are empty
        last = (tl.load(ranges + request * 4) + splits - 1).to(tl.int64)
        oldest = first_seen(tl.load(items + last * 4 + 3) - 1, WINDOW)
        begin = tl.maximum(begin, oldest // BLOCK_N * BLOCK_N)
    group = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_columns = (head * GROUP + group) * HEAD_DIM
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = q_ptr + request.to(tl.int64) * q_stride + q_columns[:, None] + dims[None, :]
    q = tl.load(q_at, mask=mask, other=0.0)
    acc, peak, total = attend_split(
        q, pool, k_table + row, v_table + row, head, begin, end, oldest, layer, scratch_base, scale,
        BLOCK_SIZE, KV_HEADS, HEAD_DIM, VALUE_DIM, ROW, SLICE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, WINDOW, SOFTCAP,
        PAIR,
    )  # fmt: skip
    if WINDOW != 0:  # an empty split has no weight in the merge and must not be NaN
        peak = tl.where(total == 0.0, _NOTHING, peak)
        total = tl.where(total == 0.0, 1.0, total)
    if SINKS:  # a split context adds its sink once, in the merge
        sink = tl.load(sinks + head * GROUP + group, mask=group < GROUP, other=0.0)
        acc, total = with_sink(acc, peak, total, tl.where(splits == 1, sink, float("-inf")))
    acc = acc / total[:, None]
    value_dims = tl.arange(0, BLOCK_V)
    value_mask = (group < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
    if splits == 1:
        columns = (head * GROUP + group) * VALUE_DIM
        out_at = out_ptr + request.to(tl.int64) * out_stride + columns[:, None] + value_dims[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=value_mask)
    else:
        heads = item * (KV_HEADS * GROUP) + head * GROUP + group
        tl.store(partial + heads[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=value_mask)
        tl.store(partial_lse + heads, peak + tl.log2(total), mask=group < GROUP)
        first = tl.load(ranges + request * 4)
        merge_upwards(
            out_ptr + request.to(tl.int64) * out_stride, partial, partial_lse, arrived, sinks, first,
            item.to(tl.int32) - first, splits, head, KV_HEADS, GROUP, VALUE_DIM, BLOCK_S, BLOCK_G, BLOCK_V, SINKS,
        )  # fmt: skip


def decode_attention(
    q: Tensor,
    pool: PoolView,
    work: DecodeWork,
    scratch: Scratch,
    out: Tensor,
    *,
    layer: int,
    manner: Manner = PLAIN,
    config: configs.LaunchConfig | None = None,
) -> None:
    """Compute out[i] = softmax(q[i] K^T / sqrt(head_dim)) V over the context of request i; other rows are unchanged.

    The grid depends on shapes alone.

    Args:
        q: [n, heads, head_dim], n at most the number of requests of the work list.
        pool: The pool and its tables (`check_pool`).
        work: Splits of the contexts.
        scratch: Memory for as many splits as the work list has items.
        out: [n, heads, value_dim].
        config: Tile; default from `configs`.
    """
    (cells, k_table, v_table, scratch_base, pair), (partial, lse, arrived) = pool, scratch
    (num_requests, num_heads, head_dim), (_, block_size, kv_heads, _) = q.shape, cells.shape
    _check(q, pool, scratch, len(work.items), out, manner.sinks)
    assert num_requests <= len(work.requests), "more queries than the work list has requests"
    shape = len(work.items), kv_heads
    assert arrived.shape == shape and arrived.dtype == torch.int32 and arrived.is_contiguous(), f"arrived: {shape}"
    group, value_dim = num_heads // kv_heads, out.shape[2]
    widest, block_g, block_v = max(head_dim, value_dim), *map(configs.next_power_of_two, (group, value_dim))
    config = config or configs.decode_config(
        configs.device_arch(q.device), widest, group, q.dtype, int8=is_bytes(cells.dtype), unlike=value_dim != head_dim
    )
    assert work.tile % config.block_n == 0, f"splits of the work list begin at {work.tile}, tiles are {config.block_n}"
    if num_requests == 0:
        return
    split_kernel[(kv_heads, work.items.shape[0])](
        q, cells, k_table, k_table if v_table is None else v_table, work.items, work.ranges, out, partial, lse,
        arrived, lse if manner.sinks is None else manner.sinks, q.stride(0), out.stride(0), k_table.stride(0), layer,
        scratch_base, scale_of(manner, head_dim), BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, ROW=cells.stride(1), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=configs.next_power_of_two(head_dim), BLOCK_V=block_v, BLOCK_S=configs.merged_splits(block_g * block_v),
        BLOCK_G=block_g, SLICE=cells.stride(0), WINDOW=manner.reach, SOFTCAP=manner.softcap or 0.0,
        SINKS=manner.sinks is not None, PAIR=pair, **config.options,
    )  # fmt: skip


def scale_of(manner: Manner, head_dim: int) -> float:
    """Return the factor of the products before `capped`."""
    scale = head_dim**-0.5 if manner.scale is None else manner.scale
    return scale / manner.softcap if manner.softcap else scale * _LOG2_E


def _check(q: Tensor, pool: PoolView, scratch: Scratch, rows: int, out: Tensor, sinks: Tensor | None) -> None:
    """Assert the common contract of both kernels. `rows`: of the partial results of splits."""
    check_pool(pool)
    check_queries(q, out, pool.cells)
    (_, num_heads, _), (partial, lse, _), shape = q.shape, scratch, (rows, *out.shape[1:])
    assert num_heads % pool.cells.shape[2] == 0, f"{num_heads} query heads over {pool.cells.shape[2]} KV heads"
    assert partial.shape == shape and partial.is_contiguous(), f"partial: contiguous {shape}, not {partial.shape}"
    assert lse.shape == shape[:2] and lse.is_contiguous(), f"lse: contiguous {shape[:2]}"
    assert partial.dtype == lse.dtype == torch.float32, "partial results are float32"
    if sinks is not None:
        assert sinks.shape == (num_heads,) and sinks.is_contiguous(), f"sinks: [{num_heads}], not {list(sinks.shape)}"
        assert sinks.dtype == torch.float32, "sinks are float32"


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
        if WINDOW != 0:  # blocks before the window may have been reused by another request
            near = near & (tokens >= first_seen(tl.min(positions, 0), WINDOW))
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
            if WINDOW != 0:
                seen = seen & (tokens[None, :] >= first_seen(positions, WINDOW)[:, None])
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
    if WINDOW != 0:
        begin = tl.maximum(begin, first_seen(position, WINDOW) // BLOCK_N * BLOCK_N)
    tokens = begin + tl.arange(0, BLOCK_N)
    entries = load_pairs(k_row, v_row, tokens, last, BLOCK_SIZE, PAIR)
    pool = layer_base(pool, layer, SLICE, PAIR)
    # A row that attends to no token of its first tile, or of its split, still needs a finite maximum.
    peak = tl.full([BLOCK_M], _NOTHING, tl.float32)
    state = (tl.zeros([BLOCK_M, BLOCK_V], tl.float32), peak, tl.zeros([BLOCK_M], tl.float32))
    if WINDOW != 0:  # mask both edges in every tile: there are few tiles
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
    _check(q, pool, scratch, work.partials, out, manner.sinks)
    group, value_dim = num_heads // kv_heads, out.shape[2]
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
        WINDOW=manner.reach, SOFTCAP=manner.softcap or 0.0, SINKS=manner.sinks is not None, PAIR=pair,
    )  # fmt: skip
    if work.merging:
        merge_kernel[(num_heads, len(work.merges))](
            work.merges, partial, lse, sinks, out, out.stride(0), NUM_HEADS=num_heads, VALUE_DIM=value_dim, BLOCK_S=16,
            BLOCK_V=block_v, SINKS=manner.sinks is not None, num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
