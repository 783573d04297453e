"""The masks of grammars on the device: between a step's logits and the tokens that are drawn from them."""

import numpy as np
import torch
from torch import Tensor

from engine.execution.arrays import Int32Array
from engine.execution.cuda.buffers import send
from engine.execution.cuda.kernels import Kernels
from engine.execution.masks import StepMasks
from engine.scheduling.output import LATE_TOKEN, UNMASKED_TOKEN


def limit(kernels: Kernels, logits: Tensor, greedy: Tensor, masks: StepMasks) -> Tensor:
    """Mask logits [S, vocab] in place and give the greedy tokens [S] int32 of what is left. Those that are negative in
    `greedy`, whose logits are not finite, stay so: a mask may hide a NaN."""
    if not len(masks.places):
        return greedy
    kernels.token_mask(logits, send(masks.places.astype(np.int32), logits.device), send(masks.bits, logits.device))
    best, tokens = logits.max(dim=-1)
    return torch.where((greedy < 0) | ~best.isfinite(), greedy.clamp(max=-1), tokens.to(torch.int32))


def without_masks(tokens: Tensor, masks: StepMasks) -> Tensor:
    """Tokens [S] with, at places that have no mask, the reason in a token's place."""
    for places, reason in ((masks.late, LATE_TOKEN), (masks.failed, UNMASKED_TOKEN)):
        if len(places):
            index: Int32Array = places.astype(np.int32)
            tokens = tokens.index_fill(0, send(index, tokens.device).long(), reason)
    return tokens
