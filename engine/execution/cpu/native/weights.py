"""A model's weights for the operations of a tape: packed layers, and addresses of float constants."""

from dataclasses import dataclass

from torch import Tensor

from engine.execution.cpu.native.linear import Native, NativeInt8, NativeLinear
from engine.models.linear import Linear
from engine.models.spec import ModelSpec
from engine.models.torch_ops import attention_scaling, inverse_frequencies
from engine.models.weights import LayerWeights, ModelWeights, Norm, embedding_scale


@dataclass(frozen=True, slots=True)
class NativeNorm:
    """Addresses of float weight [H], and bias [H] for a layer norm."""

    weight: int
    bias: int | None


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One decoder layer.

    `qk_norm` is the address of floats [heads + kv_heads, head_dim].
    """

    input_norm: NativeNorm
    qkv: NativeLinear
    qk_norm: int | None
    out: NativeLinear
    post_norm: NativeNorm
    up: NativeLinear
    down: NativeLinear
    branch_norms: tuple[NativeNorm, NativeNorm] | None


@dataclass(frozen=True, slots=True)
class LocalRope:
    """Rotary embedding of layers with a window: address of floats [rotary_dim / 2], and the factor of cos and sin."""

    frequencies: int
    scaling: float


class NativeWeights:
    """Weights of a model with the `kept` layers.

    Layers that are not packed are packed here, in addition to torch's copy. Streamed layers must be packed; the
    addresses of their matrices are valid only inside `LayerSource.use`.
    """

    def __init__(self, native: Native, spec: ModelSpec, weights: ModelWeights, kept: range) -> None:
        for index in weights.layers.streamed:
            assert isinstance(weights.layers[index].qkv, NativeLinear), "streamed layers must be packed by this library"
        self._native = native
        self._constants: list[Tensor] = []
        self.embedding = weights.embedding.contiguous()
        self.embedding_scale = embedding_scale(spec, weights.embedding.dtype)
        self.local_rope: LocalRope | None = None
        if spec.local_rope is not None:
            frequencies = self._constant(inverse_frequencies(spec.local_rope))
            self.local_rope = LocalRope(frequencies, attention_scaling(spec.local_rope))
        self.positions = weights.positions
        self.layers = {index: self._layer(weights.layers[index], spec.gated_mlp) for index in kept}
        self.final_norm = self._norm(weights.final_norm)
        self.head = self._linear(weights.head)
        every = (
            self.head,
            *(each for layer in self.layers.values() for each in (layer.qkv, layer.out, layer.up, layer.down)),
        )
        self.row_scales = max((each.row_scales for each in every if isinstance(each, NativeInt8)), default=0)
        """Most floats that go with a row of integers; 0 without layers on integers."""

    def _layer(self, layer: LayerWeights, gated: bool) -> NativeLayer:
        after = layer.branch_norms
        return NativeLayer(
            input_norm=self._norm(layer.input_norm),
            qkv=self._linear(layer.qkv),
            qk_norm=None if layer.qk_norm is None else self._constant(layer.qk_norm),
            out=self._linear(layer.out),
            post_norm=self._norm(layer.post_norm),
            up=self._linear(layer.up, gated),
            down=self._linear(layer.down),
            branch_norms=None if after is None else (self._norm(after[0]), self._norm(after[1])),
        )

    def _linear(self, layer: Linear, gated: bool = False) -> NativeLinear:
        if isinstance(layer, NativeLinear) and layer.gated == gated:
            return layer
        return NativeLinear(self._native, *layer.dense_from(0), gated)

    def _norm(self, norm: Norm) -> NativeNorm:
        return NativeNorm(self._constant(norm.weight), None if norm.bias is None else self._constant(norm.bias))

    def _constant(self, values: Tensor) -> int:
        self._constants.append(values.float().contiguous())
        return self._constants[-1].data_ptr()
