# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Set the logits of tokens that a grammar forbids to -inf; one bit per token. Twin: engine.models.torch_ops."""

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
        config = configs.flat_config()
        grid = (len(places), -(-vocab // config.block_n))
        token_mask_kernel[grid](
            logits, places, bits, logits.stride(0), bits.stride(0), vocab, BLOCK=config.block_n, **config.options
        )
