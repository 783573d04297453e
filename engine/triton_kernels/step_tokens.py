# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Start and end of a step: inputs of repeated decodes; token ids to hidden state; soft-capped logits; sampled tokens
to the buffers from which the next step reads them. Twin: engine.triton_kernels.twins."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.work import DecodeWork


@triton.jit
def embed_kernel(
    ids, source, last_tokens, positions, embedding, learned, out, width, offset, scale,
    SCALED: tl.constexpr, LEARNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, block of its row)."""
    token = tl.program_id(0).to(tl.int64)
    known = tl.load(ids + token)
    last = tl.load(last_tokens + tl.load(source + token))
    row = tl.where(known < 0, last, known).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(embedding + row * width + at, mask=inside)
    if SCALED:
        values = (values.to(tl.float32) * scale).to(out.dtype.element_ty)
    if LEARNED:
        place = (tl.load(positions + token) + offset).to(tl.int64)
        values = values.to(tl.float32) + tl.load(learned + place * width + at, mask=inside).to(tl.float32)
    tl.store(out + token * width + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def mixed(state):
    """Return SplitMix64's mix of a uint64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit(do_not_specialize=["padded", "capacity", "tile", "least"])
def begin_kernel(
    control, base, tables, ids, positions, angles, uniform, requests, ranges, items, padded, capacity, tile, least,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request): its position, its items, its random number, and its part of the table changes."""
    me, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    steps, changes, count, draws = tl.load(control), tl.load(control + 1), tl.load(control + 2), tl.load(control + 3)
    mine = base + me * 8
    for first in range(me * BLOCK, changes, padded * BLOCK):
        at = first + lanes
        place = tl.load(control + 4 + 2 * at, mask=at < changes, other=0)
        entry = tl.load(control + 5 + 2 * at, mask=at < changes, other=0)
        tl.store(tables + place, entry, mask=at < changes)
    # As `DecodeWork.fill`; every program computes the splits of all requests, to know where its own items begin.
    every = tl.arange(0, ROWS)
    starts = tl.load(base + every * 8 + 2, mask=every < count, other=0)
    tiles = tl.where(every < count, (starts + steps + tile) // tile, 0)
    size = tl.maximum(least, tl.cdiv(tl.sum(tiles), tl.maximum(capacity - count, 1)))
    splits = tl.cdiv(tiles, size)
    used, begins = tl.sum(splits), tl.sum(tl.where(every < me, splits, 0))
    token, row, position, length, own = 0, 0, 0, 0, 0
    if me < count:
        token, row, position = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2) + steps
        token = tl.where(steps > 0, -1, token)
        length = position + 1
        own = tl.cdiv(tl.cdiv(length, tile), size)
    tl.store(ids + me, token)
    tl.store(positions + me, position)
    tl.store(angles + me, position + tl.where(me < count, tl.load(mine + 6), 0))
    tl.store(requests + 2 * me, row)
    tl.store(requests + 2 * me + 1, length)
    tl.store(ranges + 4 * me, tl.where(me < count, begins, 0))
    tl.store(ranges + 4 * me + 1, own)
    share = tl.cdiv(tl.cdiv(length, tile), tl.maximum(own, 1)) * tile
    for first in range(0, own, BLOCK):
        number = first + lanes
        item = items + 4 * (begins + number)
        tl.store(item, tl.zeros_like(number) + me, mask=number < own)
        tl.store(item + 1, tl.zeros_like(number) + row, mask=number < own)
        tl.store(item + 2, number * share, mask=number < own)
        tl.store(item + 3, tl.minimum(number * share + share, length), mask=number < own)
    for first in range(used + me * BLOCK, capacity, padded * BLOCK):
        tl.store(items + 4 * (first + lanes), tl.zeros_like(lanes) - 1, mask=first + lanes < capacity)
    if me < draws:  # as `engine.execution.rows.uniforms`
        low, high = tl.load(mine + 4).to(tl.uint32, bitcast=True), tl.load(mine + 5).to(tl.uint32, bitcast=True)
        golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        stream = mixed(((high.to(tl.uint64) << 32) | low.to(tl.uint64)) + golden)
        bits = mixed(stream + (tl.load(mine + 3) + steps + 1).to(tl.uint64) * golden) >> 12
        tl.store(uniform + me, bits.to(tl.int64).to(tl.float64) * 2.220446049250313e-16)  # 2**-52


@triton.jit(do_not_specialize=["count"])
def accept_kernel(tokens, best, rows, sampled, last_tokens, count, BEST: tl.constexpr, BLOCK: tl.constexpr):
    """Program (block of samples)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(tokens + at, mask=inside, other=-1).to(tl.int32)
    if BEST:
        value = tl.load(best + at, mask=inside, other=0.0).to(tl.float32)
        token = tl.where(tl.abs(value) < float("inf"), token, -1)  # false for NaN
    tl.store(sampled + at, token, mask=inside)
    # An invalid token ends its request, but a step already in flight still needs a valid id to read.
    tl.store(last_tokens + tl.load(rows + at, mask=inside, other=0), tl.maximum(token, 0), mask=inside)


@triton.jit
def softcap_kernel(x, out, x_stride, out_stride, width, cap, BLOCK: tl.constexpr):
    """Program (row, block of it)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    share = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32) / cap
    wide = 1.0 - 2.0 / (tl.exp(2.0 * share) + 1.0)  # tanh
    square = share * share
    near = share * (1.0 - square * (0.33333333 - square * 0.13333333))  # series, where the difference loses digits
    value = tl.where(tl.abs(share) < 0.12, near, wide) * cap
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


def embed_tokens(
    ids: Tensor,
    source: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    embedding: Tensor,
    scale: float | None,
    learned: Tensor | None,
    offset: int,
) -> Tensor:
    """Return the hidden state [T, H] of tokens `ids [T]`, or of last_tokens[source[t]] where ids[t] is negative.

    It is the row of `embedding [vocab, H]`, times `scale`, plus row positions[t] + offset of `learned [n, H]`, rounded
    after each operation. ids, source, positions, last_tokens: int32, contiguous; embedding and learned: contiguous, of
    one type.
    """
    count, width = len(ids), embedding.shape[1]
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (ids, source, positions, last_tokens))
    assert len(source) == len(positions) == count, f"{count} tokens, {len(source)} sources, {len(positions)} positions"
    assert embedding.is_contiguous() and (learned is None or learned.is_contiguous()), "embeddings: contiguous"
    out, config = embedding.new_empty((count, width)), configs.FLAT
    embed_kernel[(count, -(-width // config.block_n))](
        ids, source, last_tokens, positions, embedding, embedding if learned is None else learned, out, width, offset,
        1.0 if scale is None else scale, SCALED=scale is not None, LEARNED=learned is not None, BLOCK=config.block_n,
        **config.options,
    )  # fmt: skip
    return out


def begin_step(
    control: Tensor,
    base: Tensor,
    tables: Tensor,
    ids: Tensor,
    positions: Tensor,
    angles: Tensor,
    uniform: Tensor,
    work: DecodeWork,
) -> None:
    """Begin a step of decodes: change block tables, and write ids, positions, work list and random numbers.

    The step is one of several that decode the same rows; all are made from the values of the first.

    Args:
        control: [4 + 2 * n] int32: number of steps since the first, number of changes, of requests, and of draws; then
            pairs of a flat index into `tables` and its entry.
        base: [S, 8] int32, of each request in the first step: token (negative: sampled last, as in all later steps),
            row, position; of each draw: output position, 0, seed (64 bits, low half first); of each request: what
            is added to the position for its place in the table of angles; 1 unused.
        tables: int32, contiguous.
        ids, positions, angles: [S] int32; those of padding are set to 0. `angles` may be `positions`.
        uniform: [S] float64 in [0, 1), one for each draw.
    """
    assert len(base) == len(ids) == len(positions) == len(uniform) == len(work.requests), f"{len(base)} requests"
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (control, base, tables, ids, angles))
    least, config = max(1, -(-work.min_split // work.tile)), configs.BEGIN
    begin_kernel[(len(base),)](
        control, base, tables, ids, positions, angles, uniform, work.requests, work.ranges, work.items, len(base),
        len(work.items), work.tile, least, ROWS=configs.next_power_of_two(work.most), BLOCK=config.block_n,
        **config.options,
    )  # fmt: skip


def accept_tokens(tokens: Tensor, best: Tensor | None, rows: Tensor, sampled: Tensor, last_tokens: Tensor) -> None:
    """Set sampled[i] to tokens[i], or -1 if best[i] is not finite; set last_tokens[rows[i]] to the same, at least 0.

    tokens [n] int32 or int64; best [n]; rows [n], sampled [n] and last_tokens int32; all contiguous.
    """
    count = len(tokens)
    assert len(rows) == len(sampled) == count and rows.dtype == sampled.dtype == last_tokens.dtype == torch.int32
    if count:
        config = configs.FLAT
        accept_kernel[(-(-count // config.block_n),)](
            tokens, tokens if best is None else best, rows, sampled, last_tokens, count, BEST=best is not None,
            BLOCK=config.block_n, **config.options,
        )  # fmt: skip


def softcap(x: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
    """Return cap * tanh(x / cap), computed in float32 and rounded once. x and out [n, width], rows contiguous."""
    out = x.new_empty(x.shape) if out is None else out
    assert x.dim() == 2 and out.shape == x.shape and x.stride(1) == out.stride(1) == 1, f"{x.shape} to {out.shape}"
    if len(x):
        config = configs.FLAT
        softcap_kernel[(len(x), -(-x.shape[1] // config.block_n))](
            x, out, x.stride(0), out.stride(0), x.shape[1], cap, BLOCK=config.block_n, **config.options
        )  # fmt: skip
    return out
