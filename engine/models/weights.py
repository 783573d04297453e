"""A model's weights as explicit objects, built from a tensor source (a checkpoint, or seeded random numbers).

q/k/v and gate/up are stacked here: a layer is four GEMMs whatever the family. Knows nothing of how a layer runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.models.families import TensorNames, family_named
from engine.models.linear import AbsentLinear, Linear, MakeLinear, make_linear
from engine.models.quantized import Rounded
from engine.models.sharding import GatherRanks, Shard, ShardedTensors, SummedLinear
from engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Norm:
    """weight [H], in float32 where the spec says `centered_norms`; bias [H] for layer norm, None for RMS norm."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qkv` gives [q heads | k heads | v heads], `up` gives [gate | up] where the MLP is gated.

    `qk_norm` [heads + kv_heads, head_dim] is None where q and k are not normed; `branch_norms` are of what attention
    and the MLP give, None where that is added as it is.
    """

    input_norm: Norm
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    post_norm: Norm
    up: Linear
    down: Linear
    branch_norms: tuple[Norm, Norm] | None = None


class LayerSource(Protocol):
    """The layers of a model in their order. Some may stream: their matrices pass through memory in every step.

    `streamed`: indices of those, ascending. `held_bytes`: memory that matrices of layers take, buffers included.
    """

    @property
    def streamed(self) -> tuple[int, ...]: ...

    @property
    def held_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[LayerWeights]: ...

    def __getitem__(self, index: int, /) -> LayerWeights:
        """What stays of a layer: norms, biases, sizes. The matrices of one that streams hold anything at all."""

    def use(self, index: int, /) -> AbstractContextManager[LayerWeights]:
        """The whole layer, for what is launched inside. Raises WeightReadError where it cannot be had."""


class ResidentLayers(list[LayerWeights]):
    """Layers that all stay in memory; see LayerSource. They can be given up, and come back."""

    streamed: tuple[int, ...] = ()

    @property
    def held_bytes(self) -> int:
        return sum(matrix.data().nbytes for layer in self for matrix in matrices(layer))

    def use(self, index: int, /) -> AbstractContextManager[LayerWeights]:
        return nullcontext(self[index])

    @property
    def absent(self) -> list[int]:
        """Indices of the layers that were given up."""
        return [index for index, layer in enumerate(self) if isinstance(layer.qkv, AbsentLinear)]

    @property
    def spare_bytes(self) -> int:
        """What the pool may get when all of them are given up."""
        return self.held_bytes

    def give_up(self, indices: Sequence[int], needed: int) -> None:
        """Keep only the norms of these layers, until each is set to the whole layer again. `needed`: bytes that the
        pool is to have then; raises ValueError, with nothing changed, where that is more than there is."""
        del needed  # a pool in host memory takes it from the system
        for index in indices:
            qkv, out, up, down = map(AbsentLinear, matrices(self[index]))
            self[index] = replace(self[index], qkv=qkv, out=out, up=up, down=down)

    def refill(self, index: int, loaded: LayerWeights) -> LayerWeights:
        """What `self[index]` is to be set to, of the layer as it was loaded again."""
        del index
        return loaded


Gather = Callable[[Iterator[LayerWeights]], LayerSource]
"""Takes layers one by one as they are made, so that no more than one need be in memory besides those that stay."""


def matrices(layer: LayerWeights) -> tuple[Linear, Linear, Linear, Linear]:
    """What a layer reads in every step, all but a thousandth of its bytes."""
    return layer.qkv, layer.out, layer.up, layer.down


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole model. embedding [vocab, H]; positions [max_position + offset, H] or None. `gather`: makes of a head's
    logits all ranks'; None where the head is whole."""

    embedding: Tensor
    positions: Tensor | None
    layers: LayerSource
    final_norm: Norm
    head: Linear
    gather: GatherRanks | None = None


def embedding_scale(spec: ModelSpec, dtype: torch.dtype) -> float | None:
    """What embeddings are multiplied by, as a model of this type rounds it; None where they are not."""
    return None if spec.embedding_scale is None else float(torch.tensor(spec.embedding_scale).to(dtype))


class TensorSource(Protocol):
    """Where tensors come from. Every tensor is on the target device, in the target type."""

    def has(self, name: str, /) -> bool:
        """Whether there is such a tensor."""

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, of exactly this shape. Errors: ModelLoadError if it is missing or has another shape."""

    def fetch_bytes(self, name: str, shape: tuple[int, int]) -> Rounded | None:
        """The weight as the 8 bits that it is stored in, where layers are to compute with them; None elsewhere."""


class DummyTensors:
    """Random weights that keep activations near 1: norms of one, small biases, matrices scaled by their width."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._dtype = dtype
        self._device = device

    def has(self, _name: str, /) -> bool:
        return True

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        empty = torch.empty(shape, dtype=self._dtype, device=self._device)
        return empty.normal_(0.0, shape[-1] ** -0.5 if len(shape) > 1 else 0.02, generator=self._generator)

    def fetch_bytes(self, _name: str, _shape: tuple[int, int]) -> None:
        return None


def build_weights(
    spec: ModelSpec,
    source: TensorSource,
    make: MakeLinear = make_linear,
    gather: Gather = ResidentLayers,
    shard: Shard | None = None,
) -> ModelWeights:
    """Fetch, stack and pack every tensor, one layer at a time; `gather` keeps the layers. Errors: ModelLoadError.

    `shard`: only that rank's part of the layers; `spec` and `source` are of the whole model all the same.
    """
    if shard is None:
        return _Builder(spec, source, make).model(gather)
    part = ShardedTensors(source.has, source.fetch, spec, shard)
    return _Builder(shard.spec_of(spec), part, make, shard).model(gather)


def build_layers(
    spec: ModelSpec, source: TensorSource, wanted: Sequence[int], make: MakeLinear
) -> Iterator[LayerWeights]:
    """Some of the layers, one after the other. Errors: ModelLoadError."""
    return _Builder(spec, source, make).layers(wanted)


class _Builder:
    """Walks a family's tensor names in the order in which the model runs."""

    def __init__(self, spec: ModelSpec, source: TensorSource, make: MakeLinear, shard: Shard | None = None) -> None:
        self._spec = spec
        self._source = source
        self._make = make
        self._shard = shard
        self._names: TensorNames = family_named(spec.family).names
        self._prefix = self._first_prefix()

    def model(self, gather: Gather) -> ModelWeights:
        spec, names, prefix = self._spec, self._names, self._prefix
        embedding = self._source.fetch(f"{prefix}{names.embedding}.weight", (spec.vocab_size, spec.hidden_size))
        positions = None
        if spec.position_offset is not None:
            shape = (spec.max_position_embeddings + spec.position_offset, spec.hidden_size)
            positions = self._source.fetch(f"{prefix}{names.positions}.weight", shape)
        layers = gather(self.layers(range(spec.num_layers)))
        final_norm = self._norm(prefix + names.final_norm)
        return ModelWeights(embedding, positions, layers, final_norm, *self._head(embedding))

    def layers(self, wanted: Sequence[int]) -> Iterator[LayerWeights]:
        return (self._layer(f"{self._prefix}layers.{index}.") for index in wanted)

    def _layer(self, prefix: str) -> LayerWeights:
        spec, names = self._spec, self._names
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        qkv_sizes = split_over(names.qkv, (spec.q_size, spec.kv_size, spec.kv_size))
        up_sizes = split_over(names.up, (ffn, ffn) if spec.gated_mlp else (ffn,))
        return LayerWeights(
            input_norm=self._norm(prefix + names.input_norm),
            qkv=self._linear(prefix, names.qkv, qkv_sizes, hidden, spec.qkv_bias, names.interleaved_qkv),
            qk_norm=self._qk_norm(prefix),
            out=self._linear(prefix, (names.out,), (hidden,), spec.q_size, spec.out_bias, summed=True),
            post_norm=self._norm(prefix + names.post_norm),
            up=self._linear(prefix, names.up, up_sizes, hidden, spec.mlp_bias, gated=spec.gated_mlp),
            down=self._linear(prefix, (names.down,), (hidden,), ffn, spec.mlp_bias, summed=True),
            branch_norms=self._branch_norms(prefix),
        )

    def _linear(
        self,
        prefix: str,
        modules: tuple[str, ...],
        sizes: tuple[int, ...],
        width: int,
        has_bias: bool,
        interleaved: bool = False,
        gated: bool = False,
        summed: bool = False,
    ) -> Linear:
        """`summed`: where the layers are divided among ranks, this one's inputs are."""
        pairs = list(zip(modules, sizes, strict=True))
        weight = self._weight([(f"{prefix}{name}.weight", (size, width)) for name, size in pairs])
        bias = None
        if has_bias:
            bias = _stack([self._source.fetch(f"{prefix}{name}.bias", (size,)) for name, size in pairs])
        if interleaved:
            spec = self._spec
            bias = None if bias is None else straighten(spec, bias)
            if isinstance(weight, Rounded):
                values, scales = straighten(spec, weight.values), straighten(spec, weight.scales)
                weight = weight._replace(values=values, scales=scales)
            else:
                weight = straighten(spec, weight)
        if summed and self._shard is not None:
            return SummedLinear(self._make(weight), bias, self._shard.total)
        return self._make(weight, bias, gated=gated)

    def _weight(self, modules: list[tuple[str, tuple[int, int]]]) -> Tensor | Rounded:
        """In 8 bits only if every module is stored so."""
        found = [each for module in modules if (each := self._source.fetch_bytes(*module)) is not None]
        if len(found) < len(modules):
            return _stack([self._source.fetch(*each) for each in modules])
        values, scales = _stack([each.values for each in found]), _stack([each.scales for each in found])
        given = [each.inputs for each in found if each.inputs is not None]
        # one input for all of them: of scales that differ nevertheless, the largest cuts nobody's off
        inputs = torch.stack(given).amax(0) if len(given) == len(found) else None
        return Rounded(values, scales, found[0].dtype, inputs)

    def _norm(self, module: str) -> Norm:
        shape = (self._spec.hidden_size,)
        weight = self._norm_weight(module, shape)
        return Norm(weight, self._source.fetch(f"{module}.bias", shape) if self._spec.norm == "layer" else None)

    def _norm_weight(self, module: str, shape: tuple[int, ...]) -> Tensor:
        weight = self._source.fetch(f"{module}.weight", shape)
        return weight.float() + 1.0 if self._spec.centered_norms else weight

    def _branch_norms(self, prefix: str) -> tuple[Norm, Norm] | None:
        names = self._names.branch_norms
        return None if names is None else (self._norm(prefix + names[0]), self._norm(prefix + names[1]))

    def _qk_norm(self, prefix: str) -> Tensor | None:
        spec, names = self._spec, self._names
        if not spec.qk_norm:
            return None
        q, k = (self._norm_weight(f"{prefix}{name}", (spec.head_dim,)) for name in (names.q_norm, names.k_norm))
        return torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))

    def _head(self, embedding: Tensor) -> tuple[Linear, GatherRanks | None]:
        whole, tied = embedding, self._spec.tie_word_embeddings
        if not tied:
            names = [f"{module}.weight" for module in self._names.head]
            name = next((name for name in names if self._source.has(name)), names[0])
            whole = self._source.fetch(name, (self._spec.vocab_size, self._spec.hidden_size))
        if self._shard is None:
            return self._make(whole), None
        part, gather = self._shard.head_of(whole)
        return self._make(part if tied or gather is None else part.clone()), gather

    def _first_prefix(self) -> str:
        """The prefix this checkpoint uses: some were saved from the model without its head."""
        prefixes = self._names.prefixes
        has = self._source.has
        return next((p for p in prefixes if has(f"{p}{self._names.embedding}.weight")), prefixes[0])


def straighten(spec: ModelSpec, fused: Tensor) -> Tensor:
    """Outputs of an interleaved projection [heads · 3 · D, ...] as [3 · heads · D, ...]."""
    by_head = fused.view(spec.num_heads, 3, spec.head_dim, *fused.shape[1:])
    return by_head.transpose(0, 1).flatten(0, 2)


def split_over(modules: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Output sizes of the modules of one slot: one each, or all of them in one fused module."""
    assert len(modules) in (1, len(sizes))
    return sizes if len(modules) == len(sizes) else (sum(sizes),)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a spec's or a configuration's name. Errors: ModelLoadError."""
    types = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in types:
        raise ModelLoadError(f"dtype {name!r} is not supported (supported: {', '.join(types)})")
    return types[name]
