"""One decoder for all supported families: embedding, layer loop, logits. Families differ in data only.

The backend supplies attention (`attend`) and operations (`ops`, a module with the functions of
`engine.models.torch_ops`); the caller supplies inference mode. A run can be limited to a range of layers, from hidden
state to hidden state, because layers can be dropped or live in another engine. A `LayerSource` provides the weights of
a layer, which may be streamed.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional

from engine.models import experts, torch_ops
from engine.models.compact import Float8Linear, RoundedRows
from engine.models.linear import Linear
from engine.models.spec import ModelSpec
from engine.models.weights import LayerWeights, ModelWeights, Norm, embedding_scale

Attend = Callable[[int, LayerWeights, Any], Tensor]
"""(layer index, layer, x [T, H]) -> [T, heads · D]; x is the normalised input of the layer's attention.

The backend computes everything between x and the output projection, so that its kernels can fuse it: queries, keys and
values with norms and rotation, the write to the cache, and causal attention to the whole context. A hidden cache also
stores x. With `rounds`, x is RoundedRows if `qkv` is a Float8Linear; else a tensor.
"""

Adapt = Callable[[int, LayerWeights], LayerWeights]
"""(layer index, layer) -> the layer of this step, with adapters added."""


class Branch(NamedTuple):
    """A pending addend of the hidden state.

    Attributes:
        x: [T, H].
        inner: Weight [H] of an RMS norm of x before the addition, or None.
        beside: Second addend [T, H], or None.
    """

    x: Tensor
    inner: Tensor | None = None
    beside: Tensor | None = None


class Decoder:
    """A runnable model. The T tokens of a step may belong to any requests, in any order that `attend` supports."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: ModuleType = torch_ops) -> None:
        self.spec = spec
        self.weights = weights
        self._ops, self._fuses = ops, ops is not torch_ops
        self._embedding_scale = embedding_scale(spec, weights.embedding.dtype)
        gates = {"silu": ops.silu_and_mul, "gelu_tanh_gated": ops.gelu_tanh_and_mul}
        self._activation = (torch_ops.ACTIVATIONS | gates)[spec.activation]

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden state [T, H] of token_ids [T] at positions [T]."""
        hidden = functional.embedding(token_ids, self.weights.embedding)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        if self.weights.positions is None:
            return hidden
        assert self.spec.family.position_offset is not None
        return hidden + functional.embedding(positions + self.spec.family.position_offset, self.weights.positions)

    def run(
        self,
        hidden: Tensor,
        attend: Attend,
        layers: range | None = None,
        adapt: Adapt | None = None,
    ) -> Tensor:
        """Run layers (default: all) on hidden [T, H] -> [T, H]; the argument is not modified."""
        return self.summed(*self.run_unsummed(hidden, attend, layers, adapt))

    def run_unsummed(
        self,
        hidden: Tensor,
        attend: Attend,
        layers: range | None = None,
        adapt: Adapt | None = None,
        *,
        rounds: bool = False,
    ) -> tuple[Tensor, Branch | None]:
        """Like `run`, but return the output of the last layer as a pending addend (None without layers).

        `rounds`: norms may round the inputs of 8-bit float layers, also that of `attend`.
        """
        # A branch is added in the next norm, in one pass over the rows.
        delta: Branch | None = None
        for index in range(len(self.weights.layers)) if layers is None else layers:
            with self.weights.layers.use(index) as stored:
                layer = stored if adapt is None else adapt(index, stored)
                x, hidden = self._add_norm(delta, hidden, layer.input_norm, layer.qkv if rounds else None)
                attention = layer.out(attend(index, layer, x))
                if self.spec.parallel_residual:
                    fed = self._feed_forward(layer, self._add_norm(None, hidden, layer.post_norm)[0])
                    delta = Branch(fed, beside=attention)
                    continue
                inner = (None, None) if layer.branch_norms is None else [each.weight for each in layer.branch_norms]
                x, hidden = self._add_norm(Branch(attention, inner[0]), hidden, layer.post_norm, layer.up)
                delta = Branch(self._feed_forward(layer, x), inner[1])
        return hidden, delta

    def summed(self, hidden: Tensor, delta: Branch | None) -> Tensor:
        """Return the hidden state after the result of `run_unsummed`."""
        if delta is None:
            return hidden
        x, eps = delta.x, self.spec.norm_eps
        if delta.inner is not None:
            x, _ = self._ops.add_rms_norm(x, None, delta.inner, eps)
        return hidden + (x if delta.beside is None else x + delta.beside)

    def logits(
        self, hidden: Tensor, delta: Branch | None = None, rows: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Apply the final norm and the head: hidden [R, H] -> [R, vocab], written to `out` if given.

        With `delta`, the input is the sum of both, and `rows [R]` selects its rows.
        """
        x, _ = self._add_norm(delta, hidden, self.weights.final_norm, self.weights.head, rows)
        return self.head(x, out)

    def head(self, normed: Tensor | RoundedRows, out: Tensor | None = None) -> Tensor:
        """Apply the head to hidden states [R, H] after the final norm: [R, vocab], written to `out` if given."""
        logits = product(self.weights.head, normed)
        if self.spec.logit_softcap is None:
            return logits if out is None else out.copy_(logits)
        capped: Tensor = self._ops.softcap(logits, self.spec.logit_softcap, out)
        return capped

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the final norm: hidden [T, H] -> [T, H]."""
        normed, _ = self._add_norm(None, hidden, self.weights.final_norm)
        assert isinstance(normed, Tensor)
        return normed

    def _feed_forward(self, layer: LayerWeights, x: Tensor | RoundedRows) -> Tensor:
        if layer.router is not None:
            return self._run_experts(layer, layer.router, x)
        wide = product(layer.up, x)
        if self._fuses and self.spec.activation == "silu" and isinstance(layer.down, Float8Linear):
            return layer.down.product(RoundedRows(*self._ops.silu_and_mul_rounded(wide, layer.down.inputs)))
        return layer.down(self._activation(wide))

    def _run_experts(self, layer: LayerWeights, router: Linear, x: Tensor | RoundedRows) -> Tensor:
        """Return the weighted sum of each token's experts, without waiting for the device."""
        sizes, ops = self.spec.experts, self._ops if self._fuses else experts
        assert sizes is not None and isinstance(x, Tensor), "experts have inputs of the model's type"
        routed = ops.route_experts(router(x), sizes)
        wide, up_bias = experts.product(layer.up, x, routed, ops.grouped_product, routed.tokens)
        if sizes.clamp is None:
            assert up_bias is None, "only clamped gates add a bias"
            inner = self._activation(wide)
        else:
            inner = ops.clamped_swiglu(wide, up_bias, routed.numbers, sizes.clamp)
        summed: Tensor = ops.sum_experts(*experts.product(layer.down, inner, routed, ops.grouped_product), routed)
        return summed

    def _add_norm(
        self,
        branch: Branch | None,
        residual: Tensor,
        norm: Norm,
        linear: Linear | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor | RoundedRows, Tensor]:
        """Return the norm of the sum of residual and branch, and the sum; of all rows or of `rows`.

        A kernel rounds the result of an RMS norm for `linear`, its only reader, if that is a Float8Linear (an adapted
        layer is not).
        """
        assert branch is not None or rows is None, "rows can be selected only with a branch"
        (x, inner, beside), eps, ops = Branch(residual) if branch is None else branch, self.spec.norm_eps, self._ops
        added = None if branch is None else residual
        if norm.bias is not None:
            assert inner is None, "only RMS norms normalise a branch"
            normed, total = ops.add_layer_norm(x, added, norm.weight, norm.bias, eps, rows, beside)
            return normed, total
        assert beside is None, "only layer norms add two branches"
        if self._fuses and isinstance(linear, Float8Linear):
            rounded, total = ops.add_rms_norm_rounded(x, added, norm.weight, eps, linear.inputs, rows, inner)
            return RoundedRows(*rounded), total
        normed, total = ops.add_rms_norm(x, added, norm.weight, eps, rows, inner)
        return normed, total


def product(linear: Linear, x: Tensor | RoundedRows) -> Tensor:
    """Apply a linear layer to its input, or to its rounded input."""
    if isinstance(x, RoundedRows):
        assert isinstance(linear, Float8Linear)
        return linear.product(x)
    return linear(x)
