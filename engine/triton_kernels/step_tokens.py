# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Start and end of a step: token ids to hidden state; soft-capped logits; and sampled tokens to the buffers from which
the next step reads them. Twin: engine.triton_kernels.twins."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs


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
