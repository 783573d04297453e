"""Logits of a model over one sequence, by torch operators and without a cache, as a reference."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.execution.cpu.attention import mix
from engine.models.attention import manners_of
from engine.models.decoder import Decoder
from engine.models.heads import HeadProjection
from engine.models.spec import ModelSpec
from engine.models.weights import LayerWeights, ModelWeights


def dense_logits(
    spec: ModelSpec, weights: ModelWeights, ids: Tensor, keep: Callable[[Tensor], Tensor] = lambda cells: cells
) -> Tensor:
    """Return logits [length, vocab] float32. `keep` applies a cache's rounding to K and to V [length, kv_heads, d]."""
    length = len(ids)
    heads, decoder, manners = HeadProjection(spec, weights, length), Decoder(spec, weights), manners_of(spec)
    positions = torch.arange(length)
    rotary, past_by = heads.rotary(positions), positions[:, None] - positions

    def attend(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        q, k, v = heads.qkv(layer, x, rotary[index])
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, keep(k), keep(v)))
        hidden = (past_by < 0) | (past_by >= (manners[index].window or length))
        bias = torch.zeros(past_by.shape, dtype=x.dtype).masked_fill_(hidden, -torch.inf)
        mixed = mix(q, k, v, bias[None, None], manners[index])
        return mixed.squeeze(0).transpose(0, 1).reshape(length, -1)

    with torch.inference_mode():
        return decoder.logits(decoder.run(decoder.embed(ids, positions), attend)).float()
