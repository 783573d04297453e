# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Random tokens from logits: temperature, min-p, top-k, top-p, and the inverse CDF in order of token ids.

A program draws one row, in integers: a token's share is its weight beside the best token's, in units of 2^-40, so that
sums of shares are exact in any order. The same seed gives the same token alone or in company, and a token whose share
is zero is never drawn. Top-k and top-p look for the lowest logit that stays by pivots, without a sort: each pass over
the row, which lies in the L2 cache, says how much is at least as large as the pivot, and the bounds move to logits that
are there, so that ties stay together and the bound found is the one that sorting finds. Twin: engine.models.torch_ops.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs


@triton.jit
def _load(logits, first, vocab, best, heat, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """Logits [BLOCK] float32 from token `first` on, and their shares int64."""
    tokens = first + tl.arange(0, BLOCK)
    value = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    return value, (tl.exp((value - best) / heat) * ONE).to(tl.int64)


@triton.jit
def _lowest(logits, vocab, best, heat, low, held, goal, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """The largest logit from `low` on of which those at least as large are `goal` tokens, or shares; and how much they
    are. `low` is one, and those at least as large are `held`."""
    high = best
    while low < high:
        pivot = low + (high - low) * 0.5
        pivot = tl.where(pivot > low, pivot, high)
        much = tl.zeros([BLOCK], tl.int64)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            value, share = _load(logits, first, vocab, best, heat, BLOCK, ONE)
            upper = value >= pivot
            if BY_COUNT:
                much += upper.to(tl.int64)
            else:
                much += tl.where(upper, share, 0)
            least = tl.minimum(least, tl.where(upper, value, float("inf")))
            most = tl.maximum(most, tl.where(upper, float("-inf"), value))
        reached = tl.sum(much)
        enough = reached >= goal
        low = tl.where(enough, tl.min(least), low)
        held = tl.where(enough, reached, held)
        high = tl.where(enough, high, tl.max(most))
    return low, held


@triton.jit
def _total(logits, vocab, best, heat, low, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """Shares of what is at least `low`."""
    much = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        value, share = _load(logits, first, vocab, best, heat, BLOCK, ONE)
        much += tl.where(value >= low, share, 0)
    return tl.sum(much)


@triton.jit
def draw_kernel(
    logits, greedy, out, uniform, temperature, top_k, top_p, min_p, logits_stride, vocab, BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(greedy + row)
    heat = tl.load(temperature + row)
    if (token < 0) | (heat <= 0):
        tl.store(out + row, token)
        return
    logits += row * logits_stride
    best = tl.load(logits + token).to(tl.float32)
    one: tl.constexpr = ONE
    least_share = tl.maximum((tl.load(min_p + row).to(tl.float64) * one).to(tl.int64), 1)
    shares, counts = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    lows = tl.full([BLOCK], float("inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        value, share = _load(logits, first, vocab, best, heat, BLOCK, ONE)
        kept = share >= least_share
        shares += tl.where(kept, share, 0)
        counts += kept.to(tl.int64)
        lows = tl.minimum(lows, tl.where(kept, value, float("inf")))
    low, total, count = tl.min(lows), tl.sum(shares), tl.sum(counts)
    k = tl.load(top_k + row).to(tl.int64)
    if (k > 0) & (k < count):
        low, count = _lowest(logits, vocab, best, heat, low, count, k, True, BLOCK, ONE)
        total = _total(logits, vocab, best, heat, low, BLOCK, ONE)
    p = tl.load(top_p + row)
    if p < 1:
        goal = tl.maximum(tl.math.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        low, total = _lowest(logits, vocab, best, heat, low, total, goal, False, BLOCK, ONE)
    goal = tl.minimum((tl.load(uniform + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    before = tl.zeros([], tl.int64)
    for first in range(0, vocab, BLOCK):
        value, share = _load(logits, first, vocab, best, heat, BLOCK, ONE)
        share = tl.where(value >= low, share, 0)
        after = before + tl.sum(share)
        if (before <= goal) & (after > goal):
            token = first + tl.sum((before + tl.cumsum(share, 0) <= goal).to(tl.int32))
        before = after
    tl.store(out + row, token)


def draw(
    logits: Tensor, greedy: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Tokens [n] int32: drawn where `temperature` > 0, else, and where it is negative, the one in `greedy`.

    Shapes: logits [n, vocab], rows contiguous; greedy [n] int32, the best token of each row whose logits are finite or
    -inf, else negative; uniform [n] float64 in [0, 1); temperature, top_p, min_p [n] float32; top_k [n] int32, 0: all.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1, f"logits: [rows, vocab], not {logits.shape}"
    assert greedy.dtype == top_k.dtype == torch.int32 and uniform.dtype == torch.float64, "int32, int32, float64"
    out = torch.empty_like(greedy)
    if len(logits):
        config = configs.draw_config()
        draw_kernel[(len(logits),)](
            logits, greedy, out, uniform, temperature, top_k, top_p, min_p, logits.stride(0), logits.shape[1],
            BLOCK=config.block_n, ONE=configs.SHARE_ONE, **config.options,
        )  # fmt: skip
    return out
