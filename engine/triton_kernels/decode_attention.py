# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Attention of one new token per request over its cached context: split-KV (flash decoding), merged by the last split.

The query heads that share a KV head are packed into one tile, so that K and V are read once per group. A program takes
one split of one context from the work list; of a group of splits the one that ends last weighs what all of them have
left in scratch, whichever that is in the same order. Knows nothing of requests or of who computed K and V. Twin:
engine.models.torch_ops.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.models.byte_cells import is_bytes
from engine.triton_kernels import configs
from engine.triton_kernels.addressing import (
    check_queries,
    check_tables,
    layer_base,
    load_scales,
    scale_pointers,
    slice_starts,
)
from engine.triton_kernels.work import DecodeWork

_LOG2_E = 1.4426950408889634
_BASE_2 = tl.constexpr(_LOG2_E)
_NOTHING = tl.constexpr(-1e38)  # the maximum of no scores: finite, unlike that of hidden ones


@triton.jit
def load_entries(row, tokens, end, BLOCK_SIZE: tl.constexpr):
    """Block table entries of a tile of tokens; entry 0 (never used) beyond `end`."""
    return tl.load(row + tokens // BLOCK_SIZE, mask=tokens < end, other=0)


@triton.jit
def load_pairs(k_row, v_row, tokens, end, BLOCK_SIZE: tl.constexpr, PAIR: tl.constexpr):
    """Entries of K and of V; of a paired pool K's are both."""
    k_entries = load_entries(k_row, tokens, end, BLOCK_SIZE)
    v_entries = k_entries
    if PAIR == 0:
        v_entries = load_entries(v_row, tokens, end, BLOCK_SIZE)
    return k_entries, v_entries


@triton.jit
def online_softmax(scores, peak, total):
    """One tile's step in base 2: (weights, new peak, new sum, factor for what was accumulated before)."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    scale = tl.exp2(peak - new_peak)
    return weights, new_peak, total * scale + tl.sum(weights, 1), scale


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores) in base 2, where there is a cap: such scores come divided by it, and not in base 2."""
    if SOFTCAP > 0:
        scores = (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _BASE_2)) + 1.0)) * (SOFTCAP * _BASE_2)
    return scores


@triton.jit
def with_sink(acc, peak, total, sink):
    """What is summed of whole contexts [rows, dims], and its sum, beside a score `sink [rows]` without a value."""
    sink = sink * _BASE_2
    new_peak = tl.maximum(peak, sink)
    scale = tl.exp2(peak - new_peak)
    return acc * scale[:, None], total * scale + tl.exp2(sink - new_peak)


@triton.jit
def attend_split(
    q, pool, k_row, v_row, head, begin, end, oldest, layer, scratch_base, scale,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROW: tl.constexpr, SLICE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Tokens [begin, end) of one KV head, with a window from `oldest` on, for the rows of `q` [BLOCK_M, BLOCK_D]:
    (weighted V, peak, sum)."""
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
        if WINDOW > 0:
            seen = seen & (tokens >= oldest)
        mask = seen[:, None] & inside
        value_mask = mask
        if VALUE_DIM != HEAD_DIM:
            value_mask = seen[:, None] & (value_dims < VALUE_DIM)[None, :]
        # The next tile's entries are loaded one iteration ahead: K and V addresses then depend on nothing that this
        # iteration loads, and the pipeliner can keep several tiles in flight.
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
    """Up to BLOCK_S of `count` rows of partial results, `stride` apart from `first` on, of heads [head, head + GROUP),
    weighed by their sums: (weighted [BLOCK_G, BLOCK_V], peak, sum)."""
    index, group, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_V)
    at = (first + index * stride).to(tl.int64)[:, None] * NUM_HEADS + (head + group)[None, :]
    mask = (index < count)[:, None] & (group < GROUP)[None, :]
    wide = mask[:, :, None] & (dims < VALUE_DIM)[None, None, :]
    # from the L2 cache, where other multiprocessors' results are
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
    """Split `index` of `count`, whose results are in row first + index, has ended. Splits are merged in groups of
    BLOCK_S, into the row of a group's first, and such groups again, each by the program that ends last of it: all of
    a group's rows are in flight at once. The last of all writes `out`, the request's row."""
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
            # Every thread has written before one says so, and all see what that one counts: a barrier, release and
            # acquire. Counted is in the row of the second member, which no group of another level has.
            tl.debug_barrier()
            place = arrived + (row + stride) * KV_HEADS + head
            if tl.atomic_add(place, 1, sem="acq_rel") == members - 1:
                tl.store(place, 0)  # for the next layer
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
                    tl.debug_barrier()  # all have read the row
                    tl.store(
                        partial + at[:, None] * VALUE_DIM + dims[None, :], acc / total[:, None], mask=mask
                    )  # fmt: skip
                    tl.store(partial_lse + at, peak + tl.log2(total), mask=group < GROUP)
            else:
                count = tl.minimum(count, 1)  # another goes on
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
    """Program (KV head, item). A request with one split goes straight to `out`, others by way of partial results."""
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
    if WINDOW > 0:  # a whole context ends where its last split does; splits before the window are empty
        last = (tl.load(ranges + request * 4) + splits - 1).to(tl.int64)
        oldest = tl.maximum(tl.load(items + last * 4 + 3) - WINDOW, 0)
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
    if WINDOW > 0:  # an empty split weighs nothing beside others, and must not be NaN
        peak = tl.where(total == 0.0, _NOTHING, peak)
        total = tl.where(total == 0.0, 1.0, total)
    if SINKS:  # of a context that is split it counts in the merge, once
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
    pool: Tensor,
    k_table: Tensor,
    v_table: Tensor | None,
    work: DecodeWork,
    partial: Tensor,
    partial_lse: Tensor,
    arrived: Tensor,
    out: Tensor,
    *,
    layer: int,
    scratch_base: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    pair: int = 0,
    config: configs.LaunchConfig | None = None,
) -> None:
    """out[i] = softmax(scale * q[i] K^T) V over the context of request i; not touched where `work` has no such request.

    Shapes: q [n, heads, head_dim] with n <= the work list's requests; out [n, heads, value_dim]; pool [slices,
    block_size, kv_heads, head_dim], of 8 bits too, or a view of wider cells (`check_pool`); k_table, v_table [rows,
    max_blocks]; partial [max_items, heads, value_dim] and partial_lse [max_items, heads] float32, scratch whose
    contents do not matter; arrived [max_items, kv_heads] int32, contiguous: zeros, which are zeros again when the
    kernel has ended. `window`: the last tokens that are seen, 0: all.
    `softcap` c, if not 0: a score s becomes c * tanh(s / c). `sinks` [heads] float32: of every head a score that takes
    part in the softmax and has no value. `pair`: slices from a block's K to its V in a paired pool, whose V has no
    table; 0: of another.
    The grid depends on shapes alone.
    """
    (num_requests, num_heads, head_dim), (_, block_size, kv_heads, _) = q.shape, pool.shape
    check_tables(pool, k_table, v_table, pair)
    _check(q, pool, work, partial, partial_lse, arrived, out)
    check_sinks(sinks, num_heads)
    group = num_heads // kv_heads
    widths = {"int8": is_bytes(pool.dtype)}
    value_dim = out.shape[2]
    widest, block_g, block_v = max(head_dim, value_dim), *map(configs.next_power_of_two, (group, value_dim))
    widths["unlike"] = value_dim != head_dim
    config = config or configs.decode_config(configs.device_arch(q.device), widest, group, q.dtype, **widths)
    assert work.tile % config.block_n == 0, f"splits of the work list begin at {work.tile}, tiles are {config.block_n}"
    if num_requests == 0:
        return
    split_kernel[(kv_heads, work.items.shape[0])](
        q, pool, k_table, k_table if v_table is None else v_table, work.items, work.ranges, out, partial, partial_lse,
        arrived, partial_lse if sinks is None else sinks, q.stride(0), out.stride(0), k_table.stride(0), layer,
        scratch_base, scale_of(scale, softcap), BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, ROW=pool.stride(1), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=configs.next_power_of_two(head_dim), BLOCK_V=block_v, BLOCK_S=configs.merged_splits(block_g * block_v),
        BLOCK_G=block_g, SLICE=pool.stride(0), WINDOW=window, SOFTCAP=softcap, SINKS=sinks is not None,
        PAIR=pair, **config.options,
    )  # fmt: skip


def scale_of(scale: float, softcap: float) -> float:
    """What products are multiplied by in front of `capped`."""
    return scale / softcap if softcap else scale * _LOG2_E


def _check(
    q: Tensor,
    pool: Tensor,
    work: DecodeWork,
    partial: Tensor,
    partial_lse: Tensor,
    arrived: Tensor,
    out: Tensor,
) -> None:
    check_queries(q, out, pool)
    assert q.shape[1] % pool.shape[2] == 0, f"{q.shape[1]} query heads over {pool.shape[2]} KV heads"
    assert q.shape[0] <= work.requests.shape[0], "more queries than the work list has requests"
    check_partials(partial, partial_lse, (work.items.shape[0], *out.shape[1:]))
    shape = (work.items.shape[0], pool.shape[2])
    assert arrived.shape == shape and arrived.dtype == torch.int32 and arrived.is_contiguous(), f"arrived: {shape}"


def check_partials(partial: Tensor, partial_lse: Tensor, shape: tuple[int, ...]) -> None:
    """Assert that the scratch of splits has `shape` [rows, heads, value_dim] and its first two dimensions."""
    assert partial.shape == shape and partial.is_contiguous(), f"partial: contiguous {shape}, not {partial.shape}"
    assert partial_lse.shape == shape[:2] and partial_lse.is_contiguous(), f"partial_lse: contiguous {shape[:2]}"
    assert partial.dtype == partial_lse.dtype == torch.float32, "partial results are float32"


def check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    """Assert the contract of a layer's sinks."""
    if sinks is not None:
        assert sinks.shape == (num_heads,) and sinks.is_contiguous(), f"sinks: [{num_heads}], not {list(sinks.shape)}"
        assert sinks.dtype == torch.float32, "sinks are float32"
