"""A model's weights as the tape's operations refer to them: packed layers, and addresses of float constants."""

from dataclasses import dataclass

from torch import Tensor

from engine.execution.cpu.native.linear import Native, NativeInt8, NativeLinear
from engine.models.linear import Linear
from engine.models.rotary import attention_scaling, inverse_frequencies
from engine.models.sharding import SummedLinear, SumRanks
from engine.models.spec import ModelSpec
from engine.models.weights import LayerWeights, ModelWeights, Norm, embedding_scale


@dataclass(frozen=True, slots=True)
class NativeNorm:
    """weight [H], and bias [H] for layer norm: addresses of floats."""

    weight: int
    bias: int | None


@dataclass(frozen=True, slots=True)
class RankSum:
    """What becomes of a part of a sum over ranks; `bias [H]` is added to it once."""

    total: SumRanks
    bias: Tensor | None

    def add(self, rows: Tensor) -> None:
        """Make rows [n, stride], the first H of which are products, those of all ranks. Padding is zero on each."""
        self.total(rows)
        if self.bias is not None:
            rows[:, : len(self.bias)] += self.bias


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One decoder layer; `qk_norm` is the address of floats [heads + kv_heads, head_dim]. `out_sum`, `down_sum`: of
    what `out` and `down` give, where the layer is one rank's part."""

    input_norm: NativeNorm
    qkv: NativeLinear
    qk_norm: int | None
    out: NativeLinear
    post_norm: NativeNorm
    up: NativeLinear
    down: NativeLinear
    branch_norms: tuple[NativeNorm, NativeNorm] | None
    out_sum: RankSum | None = None
    down_sum: RankSum | None = None


@dataclass(frozen=True, slots=True)
class LocalRope:
    """Of layers with a window: the address of floats [rotary_dim / 2], and what cosines and sines are multiplied by."""

    frequencies: int
    scaling: float


class NativeWeights:
    """A model, with the layers that are kept of it. Those that are not packed yet are packed here, beside what torch
    holds of them; those that stream come packed, and the addresses of their matrices hold only inside
    `LayerSource.use`."""

    def __init__(self, native: Native, spec: ModelSpec, weights: ModelWeights, kept: range, max_model_len: int) -> None:
        for index in weights.layers.streamed:
            assert isinstance(weights.layers[index].qkv, NativeLinear), "a layer that streams was packed by another"
        self._native = native
        self._constants: list[Tensor] = []
        self.embedding = weights.embedding.contiguous()
        self.embedding_scale = embedding_scale(spec, weights.embedding.dtype)
        self.local_rope: LocalRope | None = None
        if spec.local_rope is not None:
            frequencies = self._constant(inverse_frequencies(spec.local_rope, max_model_len))
            self.local_rope = LocalRope(frequencies, attention_scaling(spec.local_rope))
        self.positions = weights.positions
        self.layers = {index: self._layer(weights.layers[index], spec.gated_mlp) for index in kept}
        self.final_norm = self._norm(weights.final_norm)
        self.is_part = any(each.out_sum is not None for each in self.layers.values())
        self.head = self._linear(weights.head)
        every = (
            self.head,
            *(each for layer in self.layers.values() for each in (layer.qkv, layer.out, layer.up, layer.down)),
        )
        self.has_int8 = any(isinstance(each, NativeInt8) for each in every)

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
            out_sum=_sum_of(layer.out),
            down_sum=_sum_of(layer.down),
        )

    def _linear(self, layer: Linear, gated: bool = False) -> NativeLinear:
        """Of a layer that ranks divide, this one's part."""
        if isinstance(layer, SummedLinear):
            layer = layer.part
        if isinstance(layer, NativeLinear) and layer.gated == gated:
            return layer
        return NativeLinear(self._native, *layer.dense_from(0), gated)

    def _norm(self, norm: Norm) -> NativeNorm:
        return NativeNorm(self._constant(norm.weight), None if norm.bias is None else self._constant(norm.bias))

    def _constant(self, values: Tensor) -> int:
        self._constants.append(values.float().contiguous())
        return self._constants[-1].data_ptr()


def _sum_of(layer: Linear) -> RankSum | None:
    return RankSum(layer.total, layer.bias) if isinstance(layer, SummedLinear) else None
