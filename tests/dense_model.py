"""A model without a cache: attention over q, k and v as a function of its own."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.attention import HeadProjection
from engine.models.decoder import Attend, Decoder
from engine.models.spec import ModelSpec
from engine.models.weights import LayerWeights

AttendHeads = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q [T, heads, D], k and v [T, kv_heads, D]) -> [T, heads · D]"""


def dense_attend(spec: ModelSpec, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last tokens of a sequence; k and v are those of all its tokens."""
    k, v = (x.repeat_interleave(spec.num_heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (spec.scale or spec.head_dim**-0.5)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    tokens = torch.arange(len(k))
    past = tokens[len(k) - len(q) :, None] - tokens
    unseen = (past < 0) | (past >= (spec.window_of(layer) or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), v).flatten(1)


def attend_with(attend: AttendHeads, decoder: Decoder, positions: Tensor) -> Attend:
    """`attend` over the normed and rotated heads of tokens at these positions."""
    heads = HeadProjection(decoder.spec, decoder.weights)
    rotary = heads.rotary(positions)

    def attended(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        return attend(index, *heads.qkv(layer, x, rotary[index]))

    return attended
