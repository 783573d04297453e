# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Mixtures of experts: routing, products of rows that are sorted by expert, gates, and the sums of each token's rows.

Nothing waits for the device: a program of the product finds its expert from the ends of the groups, and there are as
many programs as any routing needs. Where torch has one product for all experts, torch computes it. Twin:
engine.models.experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.models import experts as twin
from engine.models.experts import Routing
from engine.models.spec import ExpertSizes
from engine.triton_kernels import configs


@triton.jit
def top_experts_kernel(
    logits, shares, chosen, stride, experts,
    PER_TOKEN: tl.constexpr, NORMALISED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token): its best experts, of equal ones the first, and their shares of the softmax."""
    token, columns, slots = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    value = tl.load(logits + token * stride + columns, mask=columns < experts, other=float("-inf")).to(tl.float32)
    weight = tl.exp(value - tl.max(value, 0))
    # Integers of the same order choose an expert that exists also among NaN.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(columns < experts, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    picked = tl.zeros((SLOTS,), tl.float32)
    for slot in range(PER_TOKEN):
        best = tl.argmax(key, 0)
        tl.store(chosen + token * PER_TOKEN + slot, best)
        picked = tl.where(slots == slot, tl.sum(tl.where(columns == best, weight, 0.0), 0), picked)
        key = tl.where(columns == best, -(2**31), key)
    total = tl.sum(weight, 0)
    if NORMALISED:
        total = tl.sum(picked, 0)
    share = (picked / total).to(shares.dtype.element_ty)
    tl.store(shares + token * PER_TOKEN + slots, share, mask=slots < PER_TOKEN)


@triton.jit(do_not_specialize=["count"])
def sort_rows_kernel(chosen, ends, tokens, numbers, places, count, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Program (expert): count the rows of lower experts, then place its own rows behind them, in order."""
    me, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    lower, own = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        expert = tl.load(chosen + start + lanes, mask=start + lanes < count, other=2**31 - 1)
        lower += (expert < me).to(tl.int32)
        own += (expert == me).to(tl.int32)
    first = tl.sum(lower, 0)
    tl.store(ends + me, first + tl.sum(own, 0))
    for start in range(0, count, BLOCK):
        row = start + lanes
        mine = tl.load(chosen + row, mask=row < count, other=2**31 - 1) == me
        place = first + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(tokens + place, row // PER_TOKEN, mask=mine)
        tl.store(numbers + place, me + 0 * lanes, mask=mine)
        tl.store(places + row, place, mask=mine)
        first += tl.sum(mine.to(tl.int32), 0)


def route_experts(logits: Tensor, sizes: ExpertSizes) -> Routing:
    """Choose the experts of each token and sort the rows by expert. logits [T, experts], rows contiguous."""
    (tokens, experts), per_token = logits.shape, sizes.per_token
    assert logits.stride(1) == 1 and experts == sizes.total, f"logits: [T, {sizes.total}], not {logits.shape}"
    shares = logits.new_empty((tokens, per_token), dtype=logits.dtype if sizes.rounded else torch.float32)
    chosen, places = (logits.new_empty((tokens, per_token), dtype=torch.int32) for _ in range(2))
    rows, numbers = (logits.new_empty((tokens * per_token,), dtype=torch.int32) for _ in range(2))
    ends = logits.new_empty((experts,), dtype=torch.int32)
    block, config = configs.next_power_of_two(experts), configs.FLAT
    if tokens:
        top_experts_kernel[(tokens,)](
            logits, shares, chosen, logits.stride(0), experts, PER_TOKEN=per_token, NORMALISED=sizes.normalised,
            SLOTS=configs.next_power_of_two(per_token), BLOCK=block, num_warps=1, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    sort_rows_kernel[(experts,)](
        chosen, ends, rows, numbers, places, tokens * per_token, PER_TOKEN=per_token, BLOCK=config.block_n,
        **config.options,
    )  # fmt: skip
    return Routing(shares, ends, rows, numbers, places)


@triton.jit
def grouped_product_kernel(
    x, weight, ends, tokens, out, x_stride, experts, outputs, inputs,
    HAS_TOKENS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows of one expert, block of outputs). Tiles of an expert are neighbours and share its weight
    in the cache."""
    tile, every = tl.program_id(0), tl.arange(0, EXPERTS)
    last = tl.load(ends + every, mask=every < experts, other=0)
    first = tl.load(ends + every - 1, mask=(every > 0) & (every < experts), other=0)
    tiles = (last - first + ROWS - 1) // ROWS
    tiles = tl.where(every < experts, tiles, 0)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    begin, end = tl.sum(tl.where(every == expert, first, 0), 0), tl.sum(tl.where(every == expert, last, 0), 0)
    row = begin + (tile - tl.sum(tl.where(every < expert, tiles, 0), 0)) * ROWS + tl.arange(0, ROWS)
    source, inside = row.to(tl.int64), row < end
    if HAS_TOKENS:
        source = tl.load(tokens + row, mask=inside, other=0).to(tl.int64)
    column, depth = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    left = x + source[:, None] * x_stride + depth[None, :]
    right = weight + (expert.to(tl.int64) * outputs + column[None, :]) * inputs + depth[:, None]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        within = start + depth < inputs
        a = tl.load(left + start, mask=inside[:, None] & within[None, :], other=0.0)
        b = tl.load(right + start, mask=within[:, None] & (column < outputs)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    target = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & (column < outputs)[None, :])


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return [R, out], the product of each group of rows with the weight of its expert.

    Shapes: x [R, in], or [T, in] of which row i is `tokens [R]`[i], rows contiguous; weight [experts, out, in],
    contiguous, of the same type; ends [experts] int32, the ends of the groups in [0, R]; tokens int32.
    """
    if configs.groups_by_torch(x.device) and x.dtype == torch.bfloat16:
        return twin.grouped_product(x, weight, ends, tokens)
    rows, (experts, outputs, inputs) = len(x if tokens is None else tokens), weight.shape
    assert x.shape[1] == inputs and x.stride(1) == 1 and x.dtype == weight.dtype, f"x: [R, {inputs}] of {weight.dtype}"
    assert weight.is_contiguous() and ends.shape == (experts,) and ends.dtype == torch.int32, "ends: [experts] int32"
    out = x.new_empty((rows, outputs))
    if rows:
        config, depth = configs.grouped_config(rows, experts, x.dtype)
        # Each group with rows has at most one tile that is not full.
        tiles = (rows + min(rows, experts) * (config.block_m - 1)) // config.block_m
        grouped_product_kernel[(tiles, -(-outputs // config.block_n))](
            x, weight, ends, ends if tokens is None else tokens, out, x.stride(0), experts, outputs, inputs,
            HAS_TOKENS=tokens is not None, EXPERTS=configs.next_power_of_two(experts), ROWS=config.block_m,
            OUTPUTS=config.block_n, INPUTS=depth, **config.options,
        )  # fmt: skip
    return out


@triton.jit
def _shifted(x, bias, inside):
    """Return x plus a bias, rounded to the type of x, in float32."""
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32) + tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return value.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def clamped_swiglu_kernel(x, bias, numbers, out, width, gain, limit, BLOCK: tl.constexpr):
    """Program (row, block of columns). Comparisons keep NaN."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, x, bias = column < width, x + row * 2 * width, bias + tl.load(numbers + row).to(tl.int64) * 2 * width
    gate, up = _shifted(x + column, bias + column, inside), _shifted(x + width + column, bias + width + column, inside)
    gate, up = tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = (up + 1.0) * gate / (1.0 + tl.exp(-gain * gate))
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def clamped_swiglu(x: Tensor, bias: Tensor, numbers: Tensor, clamp: tuple[float, float]) -> Tensor:
    """Return gate · sigmoid(gain · gate) · (up + 1) of x + bias[numbers], the gate at most `limit`, up within ±limit.

    Shapes: x [R, 2 · width], gate first, contiguous; bias [experts, 2 · width]; numbers [R] int32; `clamp`: gain and
    limit. Result [R, width].
    """
    assert x.is_contiguous() and bias.is_contiguous() and bias.shape[1] == x.shape[1], "rows of 2 * width"
    width, config = x.shape[1] // 2, configs.FLAT
    out = x.new_empty((len(x), width))
    if len(x):
        clamped_swiglu_kernel[(len(x), -(-width // config.block_n))](
            x, bias, numbers, out, width, *clamp, BLOCK=config.block_n, **config.options
        )
    return out


@triton.jit
def sum_experts_kernel(
    x, bias, shares, places, numbers, out, width, HAS_BIAS: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, block of columns)."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = column < width, tl.zeros((BLOCK,), tl.float32)
    for slot in range(PER_TOKEN):
        place = tl.load(places + token * PER_TOKEN + slot).to(tl.int64)
        if HAS_BIAS:
            expert = tl.load(numbers + place).to(tl.int64)
            value = _shifted(x + place * width + column, bias + expert * width + column, inside)
        else:
            value = tl.load(x + place * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(shares + token * PER_TOKEN + slot)
        total += (value * share.to(tl.float32)).to(share.dtype).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def sum_experts(x: Tensor, bias: Tensor | None, routed: Routing) -> Tensor:
    """Return the sums [T, H] of each token's rows plus the bias of their expert, times their shares.

    Shapes: x [R, H] sorted by expert, contiguous; bias [experts, H].
    """
    tokens, per_token = routed.shares.shape
    assert x.is_contiguous() and len(x) == tokens * per_token, f"x: [{tokens * per_token}, H], not {x.shape}"
    width, config = x.shape[1], configs.FLAT
    out = x.new_empty((tokens, width))
    if tokens:
        sum_experts_kernel[(tokens, -(-width // config.block_n))](
            x, x if bias is None else bias, routed.shares, routed.places, routed.numbers, out, width,
            HAS_BIAS=bias is not None, PER_TOKEN=per_token, BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return out
