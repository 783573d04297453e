"""The K and V projections of a layer moved to the other side of attention (MLA's absorption; Apt-Serve §4, ours).

Where K is linear in the hidden state x (no rotary embedding, no norm on K: `ModelSpec.absorbs_kv`), a head's score of a
past token is `q·(W_k x + b_k) = (W_kᵀ q)·x + q·b_k` and its output `Σ p (W_v x + b_v) = W_v (Σ p x) + b_v Σ p`: exact,
and no past token is projected. Only the query is, and what it gathers. The second half holds of every model of ours,
for V is linear in x whatever becomes of K: where K has to be projected V need not be. Knows nothing of caches.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.spec import ModelSpec
from engine.models.weights import LayerWeights, ModelWeights


class KVWeights(NamedTuple):
    """A layer's W_k and W_v [kv_heads, D, H], and their biases [kv_heads, D], if any."""

    keys: Tensor
    values: Tensor
    key_bias: Tensor | None
    value_bias: Tensor | None


class Absorption:
    """W_k and W_v of every layer as matrices; views of the weights, or copies of them where those are packed."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        self.absorbs_keys = spec.absorbs_kv
        self._kv_heads, self._head_dim, self._hidden = spec.num_kv_heads, spec.head_dim, spec.hidden_size
        self._q_size = spec.q_size
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        self._biases: dict[int, tuple[Tensor, Tensor] | None] = {}
        for index, layer in enumerate(weights.layers):
            if index not in weights.layers.streamed:
                self.hold(index, layer)

    def hold(self, index: int, layer: LayerWeights) -> None:
        """Take W_k and W_v from this layer's weights as they are now; one that streams is in use."""
        weight, bias = layer.qkv.dense_from(self._q_size)
        k, v = weight.view(2, self._kv_heads, self._head_dim, self._hidden).unbind(0)
        self._weights[index] = k, v
        self._biases[index] = None if bias is None else _pair(bias.view(2, self._kv_heads, 1, self._head_dim))

    def of_layer(self, layer: int) -> KVWeights:
        keys, values = self._weights[layer]
        biases = self._biases[layer]
        return KVWeights(keys, values, *((None, None) if biases is None else (each[:, 0] for each in biases)))

    def queries(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """q [T, heads, D] -> W_kᵀ q [T, heads, H], and q·b_k [T, heads] in float32 (None without biases)."""
        assert self.absorbs_keys, "K of this model depends on more than the hidden state"
        by_head = self._by_kv_head(q)
        absorbed = self._by_token(torch.bmm(by_head, self._weights[layer][0]), len(q))
        bias = self._biases[layer]
        if bias is None:
            return absorbed, None
        shift = (by_head.float() * bias[0].float()).sum(-1, keepdim=True)
        return absorbed, self._by_token(shift, len(q)).squeeze(-1)

    def values(self, layer: int, gathered: Tensor, mass: Tensor) -> Tensor:
        """W_v Σ p x + b_v Σ p [T, heads, D] of `gathered` = Σ p x [T, heads, H] and `mass` = Σ p [T, heads] (at most 1:
        what lies elsewhere brings its own values)."""
        mixed = torch.bmm(self._by_kv_head(gathered), self._weights[layer][1].transpose(1, 2))
        bias = self._biases[layer]
        if bias is not None:
            mixed = mixed + self._by_kv_head(mass.unsqueeze(-1)).to(mixed.dtype) * bias[1]
        return self._by_token(mixed, len(gathered))

    def _by_kv_head(self, x: Tensor) -> Tensor:
        """[T, heads, n] -> [kv_heads, T * group, n]."""
        split = x.reshape(len(x), self._kv_heads, -1, x.shape[-1])
        return split.transpose(0, 1).flatten(1, 2)

    def _by_token(self, x: Tensor, num_tokens: int) -> Tensor:
        """[kv_heads, T * group, n] -> [T, heads, n]."""
        return x.view(self._kv_heads, num_tokens, -1, x.shape[-1]).transpose(0, 1).flatten(1, 2)


def _pair(both: Tensor) -> tuple[Tensor, Tensor]:
    return both[0], both[1]
