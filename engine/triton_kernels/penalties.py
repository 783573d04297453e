# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Edits of logits: tokens that a grammar forbids, and repetition, frequency and presence penalties. Twin:
engine.triton_kernels.twins.

`history [rows, vocab]` int32 has a row per request. A value is twice the count of the token in the answer, plus 1 if
the token occurs in the prompt.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs


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
