"""Random sampling without a look at the device: the arithmetic of `engine.execution.sampler`, all rows in one go.

Temperature, min-p, top-k, top-p, then the inverse CDF in order of token ids at a given uniform number. Nothing here
depends on values that only the device knows, so the next step can be launched before this one has ended.
"""

import torch
from torch import Tensor

from engine.execution.cuda.buffers import DrawInputs
from engine.execution.sampling_table import GREEDY_BELOW


def draw(logits: Tensor, greedy: Tensor, inputs: DrawInputs) -> Tensor:
    """logits [S, vocab] and their `greedy` tokens [S] int32 (negative: not finite) -> tokens [S] int32.

    Rows with a temperature near zero, and rows that are not finite, keep their greedy token.
    """
    scaled = logits.float()
    best = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled.sub_(best) if scaled is not logits else scaled - best).div_(
        inputs.temperature.clamp(min=GREEDY_BELOW)[:, None]
    )
    weights = weights.exp_()  # the largest is 1
    if inputs.any_min_p:
        weights = weights * (weights >= inputs.min_p[:, None])
    if inputs.most_top_k:
        weights = _keep_top_k(weights, inputs.top_k, min(inputs.most_top_k, logits.shape[1]))
    if inputs.any_top_p:
        weights = _keep_top_p(weights, inputs.top_p)
    cdf = weights.cumsum(dim=-1).double()
    drawn = torch.searchsorted(cdf, inputs.uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    keeps = (inputs.temperature < GREEDY_BELOW) | (greedy < 0)
    return torch.where(keeps, greedy, drawn.to(torch.int32))


def _keep_top_k(weights: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Zero what lies under a row's k-th largest weight; k of 0 or beyond the vocabulary keeps all. Ties stay."""
    place = (top_k.long() - 1).clamp(0, most - 1)[:, None]
    lowest = weights.topk(most, dim=-1).values.gather(1, place)
    limited = (top_k > 0) & (top_k < weights.shape[1])
    return weights * (weights >= lowest.masked_fill(~limited[:, None], 0.0))


def _keep_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    """Zero what lies under the smallest weight of the smallest set with a share of at least top_p. Ties stay."""
    ordered = weights.sort(dim=-1, descending=True).values
    target = top_p.double()[:, None] * weights.cumsum(dim=-1)[:, -1:].double()
    missing = (ordered.double().cumsum(dim=-1) < target).sum(dim=-1, keepdim=True)
    lowest = ordered.gather(1, missing.clamp(max=weights.shape[1] - 1))
    return weights * (weights >= lowest.masked_fill((top_p >= 1)[:, None], 0.0))
