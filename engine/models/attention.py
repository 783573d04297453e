"""Attention of a layer over a paged pool: its variant, the pool as kernels see it, and in torch operators, for backends
without a fused kernel, its queries, keys and values with norms and rotation."""

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.models import torch_ops
from engine.models.linear import Linear, PlainLinear
from engine.models.rope import RopeSpec
from engine.models.spec import ModelShape, ModelSpec
from engine.models.torch_ops import Rotary, attention_scaling, inverse_frequencies
from engine.models.weights import LayerWeights, ModelWeights


class HeadSizes(NamedTuple):
    """Numbers of query heads and KV heads, and head widths of q and k, and of v."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, spec: ModelShape) -> Self:
        return cls(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim)

    @classmethod
    def seen(cls, q: Tensor, k: Tensor, v: Tensor) -> Self:
        """Return the sizes of q, k and v [tokens, heads, width]."""
        return cls(q.shape[1], k.shape[1], k.shape[2], v.shape[2])

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)


class Manner(NamedTuple):
    """Deviations of a layer's attention from softmax(q · k / sqrt(d)) · v.

    Attributes:
        scale: Replaces 1 / sqrt(d).
        window: A query sees itself and the window - 1 tokens before it.
        chunk: A query sees the tokens of its chunk: positions are cut at the multiples of this number. Not with a
            window.
        softcap: A score s becomes softcap · tanh(s / softcap), after the scale.
        sinks: [heads], a score per head that takes part in the softmax without a value; float32 for kernels.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None

    @property
    def reach(self) -> int:
        """Visible tokens as kernels take them: n > 0, a window of n; n < 0, chunks of -n; 0, all."""
        return self.window or -(self.chunk or 0)


PLAIN = Manner()


def manners_of(spec: ModelSpec, layers: Iterable[LayerWeights]) -> list[Manner]:
    """Return the variant of each of the first `spec.num_layers` layers."""
    numbered = zip(range(spec.num_layers), layers, strict=False)
    return [Manner(spec.scale, spec.window_of(index), spec.softcap, layer.sinks) for index, layer in numbered]


class PoolView(NamedTuple):
    """The pool as kernels read and write it (layout: `engine.triton_kernels.cache`).

    Attributes:
        cells: [slices, block_size, kv_heads, head_dim], also 8-bit, or a view of wider cells.
        k_table: Block table of K, [rows, max_blocks].
        v_table: Block table of V; None in a paired pool.
        scratch_base: First scratch slice.
        pair: Slices from K to V of a block in a paired pool; else 0.
    """

    cells: Tensor
    k_table: Tensor
    v_table: Tensor | None
    scratch_base: int
    pair: int = 0


class HeadProjection:
    """Projections to queries, keys and values by head, in torch operators.

    `hidden` creates the layers of `kv`; with packed weights, these use the memory of the K and V parts a second time.
    For streamed layers they are views of the layer last passed to `hold`.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, *, hidden: bool = False) -> None:
        self.hidden_size = spec.hidden_size
        self._spec = spec
        self._layers = weights.layers
        self._dtype = weights.embedding.dtype
        self._qk_heads = spec.num_heads + spec.num_kv_heads
        self._all_heads = self._qk_heads + spec.num_kv_heads
        device = weights.embedding.device
        self._ropes = {
            rope: (
                [inverse_frequencies(rope, is_long=each).to(device) for each in (False, True)],
                attention_scaling(rope),
            )
            for rope in (spec.rope, spec.local_rope)
            if rope is not None
        }
        views = all(isinstance(weights.layers[index].qkv, PlainLinear) for index in weights.layers.streamed)
        assert views or not hidden, "packed streamed layers would keep copies of their K and V projections in memory"
        self._kv: list[Linear] = [layer.qkv.outputs_from(spec.q_size) for layer in weights.layers] if hidden else []

    def rotary(self, positions: Tensor, is_long: Tensor | None = None) -> list[Rotary | None]:
        """Return the rotation of Q and K at these positions [T] for every layer, shared between layers of equal rope;
        None for layers without rotary embedding. `is_long [T]`: see `RowTable`; None: no token."""
        made: dict[RopeSpec | None, Rotary | None] = {None: None}
        for rope, ((inv_freq, other), scaling) in self._ropes.items():
            if rope.short_context and is_long is not None:
                inv_freq = torch.where(is_long.unsqueeze(1), other, inv_freq)
            cos, sin = torch_ops.rotary_tables(positions, inv_freq, scaling)
            made[rope] = torch_ops.prepare_rotary(cos, sin, self._dtype)
        return [made[self._spec.rope_of(layer)] for layer in range(self._spec.num_layers)]

    def qkv(self, layer: LayerWeights, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [T, H] to q [T, heads, D], k and v [T, kv_heads, D], with norms and rotation applied to q and k.

        The last dimension is contiguous; tokens and heads are strided views.
        """
        heads = layer.qkv(x).view(-1, self._all_heads, self._spec.head_dim)
        qk = heads[:, : self._qk_heads]
        if layer.qk_norm is not None:
            qk = torch_ops.rms_norm(qk, layer.qk_norm, self._spec.norm_eps)
        if rotary is not None:
            qk = torch_ops.apply_rotary(qk, rotary)
        num_heads = self._spec.num_heads
        return qk[:, :num_heads], qk[:, num_heads:], heads[:, self._qk_heads :]

    def hold(self, index: int, layer: LayerWeights) -> None:
        """Refresh the K and V projections of a streamed layer from its current weights."""
        if self._kv:
            self._kv[index] = layer.qkv.outputs_from(self._spec.q_size)

    def kv(self, layer: int, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Return K and V of tokens with attention input x, equal to those of `qkv`. Needs `hidden`."""
        num_heads = self._spec.num_kv_heads
        heads = self._kv[layer](x).view(-1, 2 * num_heads, self._spec.head_dim)
        k, v = heads[:, :num_heads], heads[:, num_heads:]
        norm = self._layers[layer].qk_norm
        if norm is not None:
            k = torch_ops.rms_norm(k, norm[self._spec.num_heads :], self._spec.norm_eps)
        return k if rotary is None else torch_ops.apply_rotary(k, rotary), v
