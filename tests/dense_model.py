"""A model without a cache: attention over q, k and v as a function of its own."""

from collections.abc import Callable

from torch import Tensor

from engine.models.attention import HeadProjection
from engine.models.decoder import Attend, Decoder
from engine.models.weights import LayerWeights

AttendHeads = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q [T, heads, D], k and v [T, kv_heads, D]) -> [T, heads · D]"""


def attend_with(attend: AttendHeads, decoder: Decoder, positions: Tensor, max_model_len: int | None = None) -> Attend:
    """`attend` over the normed and rotated heads of tokens at these positions."""
    heads = HeadProjection(decoder.spec, decoder.weights, max_model_len or decoder.spec.max_context)
    rotary = heads.rotary(positions)

    def attended(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        return attend(index, *heads.qkv(layer, x, rotary[index]))

    return attended
