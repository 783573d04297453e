"""One decoder for every supported family: embedding, a range of layers, logits. The families' differences are data.

Where attention keeps its keys and values, and how it reads them, is the caller's (`attend`); so is inference mode.
Layers can be run in ranges, from and to a hidden state: they can be streamed, dropped, or live in another engine.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.execution import torch_ops
from engine.execution.linear import Linear
from engine.execution.torch_ops import Rotary
from engine.models.rotary import attention_scaling, inverse_frequencies
from engine.models.spec import ModelSpec
from engine.models.weights import LayerWeights, ModelWeights, Norm

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D]) -> [T, heads · D].

q and k come normed and rotated. Within a head the last dimension is contiguous; tokens and heads are strided views.
`attend` stores k and v in the cache and attends, causally, to the whole context.
"""

Observe = Callable[[int, Tensor], None]
"""(layer index, x [T, H]): the normed input of a layer's attention, before `attend`; what a hidden cache stores."""


class Ops(Protocol):
    """What a layer computes besides its GEMMs; `engine.execution.torch_ops` is the default and the reference."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def rotary_tables(self, positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]: ...
    def prepare_rotary(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotary: ...
    def apply_rotary(self, x: Tensor, rotary: Rotary) -> Tensor: ...
    def silu_and_mul(self, x: Tensor) -> Tensor: ...
    def gelu(self, x: Tensor) -> Tensor: ...
    def gelu_tanh(self, x: Tensor) -> Tensor: ...
    def relu(self, x: Tensor) -> Tensor: ...


class Decoder:
    """A model that runs. `max_model_len` is the engine's longest context (it picks longrope's factors)."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, *, max_model_len: int | None = None, ops: Ops = torch_ops
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._ops = ops
        self._qk_heads = spec.num_heads + spec.num_kv_heads
        self._all_heads = self._qk_heads + spec.num_kv_heads
        self._inv_freq: Tensor | None = None
        self._rope_scaling = 1.0
        if spec.rope is not None:
            longest = max_model_len or spec.max_context
            self._inv_freq = inverse_frequencies(spec.rope, longest).to(self.device)
            self._rope_scaling = attention_scaling(spec.rope)
        self._kv: list[Linear] | None = None
        activations = {"silu": ops.silu_and_mul, "gelu": ops.gelu, "gelu_tanh": ops.gelu_tanh, "relu": ops.relu}
        self._activation = activations[spec.activation]

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids [T] int64, positions [T] int64 -> hidden state [T, H]."""
        hidden = functional.embedding(token_ids, self.weights.embedding)
        if self.weights.positions is not None:
            assert self.spec.position_offset is not None
            hidden = hidden + functional.embedding(positions + self.spec.position_offset, self.weights.positions)
        return hidden

    def run_layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        first: int = 0,
        last: int | None = None,
        observe: Observe | None = None,
    ) -> Tensor:
        """Layers [first, last) on hidden [T, H] -> [T, H]; `last` None: to the end. The argument is not modified."""
        rotary = self.rotary(positions)
        layers = self.weights.layers
        # The sum of a layer's two branches is added together with the next norm: one pass over the rows.
        delta: Tensor | None = None
        for index in range(first, len(layers) if last is None else last):
            layer = layers[index]
            normed, hidden = self._add_norm(delta, hidden, layer.input_norm)
            if observe is not None:
                observe(index, normed)
            q, k, v = self._project(layer, normed, rotary)
            attention = layer.out(attend(index, q, k, v))
            if self.spec.parallel_residual:
                normed = self._norm(hidden, layer.post_norm)
                delta = layer.down(self._activation(layer.up(normed))) + attention
            else:
                normed, hidden = self._add_norm(attention, hidden, layer.post_norm)
                delta = layer.down(self._activation(layer.up(normed)))
        return hidden if delta is None else hidden + delta

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of the rows that sample: hidden [R, H] -> [R, vocab]."""
        return self.weights.head(self._norm(hidden, self.weights.final_norm))

    def prepare_project_kv(self) -> None:
        """Make the layers of `project_kv`, once. Where weights are packed this takes memory of their K and V parts."""
        if self._kv is None:
            self._kv = [layer.qkv.outputs_from(self.spec.q_size) for layer in self.weights.layers]

    def project_kv(self, layer: int, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """K and V of tokens whose `observe`d input of layer `layer` was x [T, H]: two [T, kv_heads, D], as `attend`
        got them. `rotary`: that of their positions. Needs `prepare_project_kv`."""
        assert self._kv is not None, "prepare_project_kv was not called"
        num_heads = self.spec.num_kv_heads
        heads = self._kv[layer](x).view(-1, 2 * num_heads, self.spec.head_dim)
        k, norm = heads[:, :num_heads], self.weights.layers[layer].qk_norm
        if norm is not None:
            k = self._ops.rms_norm(k, norm[self.spec.num_heads :], self.spec.norm_eps)
        if rotary is not None:
            k = self._ops.apply_rotary(k, rotary)
        return k, heads[:, num_heads:]

    def rotary(self, positions: Tensor) -> Rotary | None:
        """The rotation of K and Q at these positions [T]; None for models without rotary embeddings."""
        if self._inv_freq is None:
            return None
        cos, sin = self._ops.rotary_tables(positions, self._inv_freq, self._rope_scaling)
        return self._ops.prepare_rotary(cos, sin, self.dtype)

    def _project(self, layer: LayerWeights, normed: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D]; q and k normed and rotated together, as one tensor of heads."""
        heads = layer.qkv(normed).view(-1, self._all_heads, self.spec.head_dim)
        qk = heads[:, : self._qk_heads]
        if layer.qk_norm is not None:
            qk = self._ops.rms_norm(qk, layer.qk_norm, self.spec.norm_eps)
        if rotary is not None:
            qk = self._ops.apply_rotary(qk, rotary)
        num_heads = self.spec.num_heads
        return qk[:, :num_heads], qk[:, num_heads:], heads[:, self._qk_heads :]

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.bias is None:
            return self._ops.rms_norm(x, norm.weight, self.spec.norm_eps)
        return self._ops.layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps)

    def _add_norm(self, x: Tensor | None, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The norm of residual + x, and residual + x."""
        if x is None:
            return self._norm(residual, norm), residual
        if norm.bias is None:
            return self._ops.add_rms_norm(x, residual, norm.weight, self.spec.norm_eps)
        return self._ops.add_layer_norm(x, residual, norm.weight, norm.bias, self.spec.norm_eps)
