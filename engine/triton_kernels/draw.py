"""Edits of logits, and random draws from them.

Draw random tokens from logits: temperature, min-p, top-k, top-p, and the inverse CDF in order of token ids.

One program draws one row, in integers: the share of a token is its weight relative to the best token, in units of
2^-40, so that sums of shares are exact in any order. The same seed gives the same token in any batch, and a token with
share zero is never drawn. Top-k and top-p find the lowest admitted logit by bisection instead of a sort. Each pass over
the row, which stays in the L2 cache, sums the logits above a pivot and moves the bounds to existing logits. Equal
logits therefore stay together, and the result equals that of sorting. The first pivot comes from the largest logits of
4,096 parts of the row, in registers; it is most often the result, so that a draw takes six to eight passes. Twin:
engine.triton_kernels.twins.

Edits of logits: tokens that a grammar forbids, and repetition, frequency and presence penalties.
`history [rows, vocab]` int32 has a row per request. A value is twice the count of the token in the answer, plus 1 if
the token occurs in the prompt.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"


@triton.jit
def token_mask_kernel(logits, places, bits, logits_stride, bits_stride, vocab, BLOCK: tl.constexpr):
    """Program (mask, block of tokens)."""
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(places + mask).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    words = tl.load(bits + mask * bits_stride + tokens // 32, mask=inside, other=-1)
    forbidden = ((words >> (tokens % 32)) & 1) == 0
    lowest = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * logits_stride + tokens, lowest, mask=inside & forbidden)


def token_mask(logits: Tensor, places: Tensor, bits: Tensor) -> None:
    """Set logits[places[i], t] to -inf in place where bit t of bits[i] is not set.

    Shapes: logits [rows, vocab], rows contiguous; places [n] int32; bits [n, ceil(vocab / 32)] int32, contiguous.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1, f"logits: [rows, vocab], not {logits.shape}"
    vocab = logits.shape[1]
    assert bits.shape == (len(places), -(-vocab // 32)) and bits.is_contiguous(), f"bits: {bits.shape}"
    assert places.dtype == bits.dtype == torch.int32, f"places and bits: int32, not {places.dtype} and {bits.dtype}"
    if len(places):
        config = configs.FLAT
        grid = (len(places), -(-vocab // config.block_n))
        token_mask_kernel[grid](
            logits, places, bits, logits.stride(0), bits.stride(0), vocab, BLOCK=config.block_n, **config.options
        )


@triton.jit
def penalise_kernel(logits, places, rows, history, penalties, logits_stride, vocab, BLOCK: tl.constexpr):
    """Program (place, block of tokens)."""
    index = tl.program_id(0)
    row = tl.load(rows + index).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    said = tl.load(history + row * vocab + tokens, mask=tokens < vocab, other=0)
    repetition = tl.load(penalties + index * 3)
    frequency = tl.load(penalties + index * 3 + 1)
    presence = tl.load(penalties + index * 3 + 2)
    target = logits + tl.load(places + index).to(tl.int64) * logits_stride + tokens
    value = tl.load(target, mask=said > 0, other=0.0)
    value = tl.where(value > 0, value / repetition, value * repetition)
    times = said >> 1
    value -= tl.where(times > 0, frequency * times.to(tl.float32) + presence, 0.0)
    tl.store(target, value, mask=said > 0)


@triton.jit
def count_tokens_kernel(history, rows, places, tokens, vocab):
    """Program (place)."""
    index = tl.program_id(0)
    token = tl.load(tokens + tl.load(places + index))
    if token >= 0:
        target = history + tl.load(rows + index).to(tl.int64) * vocab + token
        tl.store(target, tl.load(target) + 2)


def penalise(logits: Tensor, places: Tensor, rows: Tensor, history: Tensor, penalties: Tensor) -> None:
    """Apply `penalties [n, 3]` (repetition, frequency, presence) to logits[places[i]] by history[rows[i]], in place.

    Shapes: logits [samples, vocab] float32, rows contiguous; places, rows [n] int32 without duplicates; history [rows,
    vocab] int32, contiguous; penalties float32.
    """
    vocab = logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits: [samples, vocab] float32"
    assert history.shape[1] == vocab and history.is_contiguous(), f"history: [rows, {vocab}], not {history.shape}"
    assert penalties.shape == (len(places), 3) and penalties.is_contiguous(), f"penalties: {penalties.shape}"
    if len(places):
        config = configs.FLAT
        penalise_kernel[(len(places), -(-vocab // config.block_n))](
            logits, places, rows, history, penalties, logits.stride(0), vocab, BLOCK=config.block_n, **config.options
        )


def count_tokens(history: Tensor, rows: Tensor, places: Tensor, tokens: Tensor) -> None:
    """Count tokens[places[i]] in history[rows[i]] unless it is negative. Shapes as above; tokens [samples] int32."""
    if len(places):
        count_tokens_kernel[(len(places),)](
            history, rows, places, tokens, history.shape[1], num_warps=1, num_stages=1, enable_fp_fusion=True
        )


@triton.jit
def _load(logits, first, vocab, best, heat, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """Return logits [BLOCK] float32 from token `first` on, and their shares int64."""
    tokens = first + tl.arange(0, BLOCK)
    value = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    return value, (tl.exp((value - best) / heat) * ONE).to(tl.int64)


@triton.jit
def _lowest(logits, vocab, best, heat, low, held, goal, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """Return the largest logit such that the tokens at or above it reach `goal` (a count, or a sum of shares), and the
    sum that they reach. `low` is a logit that reaches it with the sum `held`; it is tried first."""
    high, pivot = best, low
    while low < high:
        much = tl.zeros([BLOCK], tl.int64)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            value, share = _load(logits, first, vocab, best, heat, BLOCK, ONE)
            upper = value > pivot
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
        pivot = low + (high - low) * 0.5
        pivot = tl.where(pivot < high, pivot, low)
    return low, held


@triton.jit
def _bound(tops, best, heat, low, goal, BY_COUNT: tl.constexpr, ONE: tl.constexpr):
    """Return a logit, at least `low`, at or above which tokens in `tops` alone reach `goal`, if there is one: these are
    the largest logits of BLOCK parts of the row. It is most often the result of `_lowest`: large logits share few
    parts."""
    shares = (tl.exp((tops - best) / heat) * ONE).to(tl.int64)
    weights = tl.minimum(shares, 1) if BY_COUNT else shares
    high = best
    while low < high:
        pivot = low + (high - low) * 0.5
        pivot = tl.where(pivot < high, pivot, low)
        upper = tops > pivot
        enough = tl.sum(tl.where(upper, weights, 0)) >= goal
        low = tl.where(enough, tl.min(tl.where(upper, tops, float("inf"))), low)
        high = tl.where(enough, high, tl.max(tl.where(upper, float("-inf"), tops)))
    return low


@triton.jit
def _total(logits, vocab, best, heat, low, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """Return the sum of the shares of logits of at least `low`."""
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
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        value, share = _load(logits, first, vocab, best, heat, BLOCK, ONE)
        kept = share >= least_share
        shares += tl.where(kept, share, 0)
        counts += kept.to(tl.int64)
        lows = tl.minimum(lows, tl.where(kept, value, float("inf")))
        tops = tl.maximum(tops, tl.where(kept, value, float("-inf")))
    low, total, count = tl.min(lows), tl.sum(shares), tl.sum(counts)
    k = tl.load(top_k + row).to(tl.int64)
    if (k > 0) & (k < count):
        low = _bound(tops, best, heat, low, k, True, ONE)
        low, count = _lowest(logits, vocab, best, heat, low, count, k, True, BLOCK, ONE)
        total = _total(logits, vocab, best, heat, low, BLOCK, ONE)
    p = tl.load(top_p + row)
    if p < 1:
        goal = tl.maximum(tl.math.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        bound = _bound(tops, best, heat, low, goal, False, ONE)
        if bound > low:
            low, total = bound, _total(logits, vocab, best, heat, bound, BLOCK, ONE)
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
    """Return tokens [n] int32: drawn if `temperature` > 0, else (or if `greedy` is negative) the token in `greedy`.

    Args:
        logits: [n, vocab], rows contiguous.
        greedy: [n] int32, the best token of each row; negative if a logit is NaN or +inf.
        uniform: [n] float64 in [0, 1).
        temperature: [n] float32.
        top_k: [n] int32; 0: all tokens.
        top_p: [n] float32.
        min_p: [n] float32.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1, f"logits: [rows, vocab], not {logits.shape}"
    assert greedy.dtype == top_k.dtype == torch.int32 and uniform.dtype == torch.float64, "int32, int32, float64"
    out = torch.empty_like(greedy)
    if len(logits):
        config = configs.DRAW
        draw_kernel[(len(logits),)](
            logits, greedy, out, uniform, temperature, top_k, top_p, min_p, logits.stride(0), logits.shape[1],
            BLOCK=config.block_n, ONE=configs.SHARE_ONE, **config.options,
        )  # fmt: skip
    return out
