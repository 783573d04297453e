"""A model's weights as explicit objects, built from a tensor source (a checkpoint, or seeded random numbers).

q/k/v and gate/up are stacked, so that a layer has four GEMMs in every family.

Layer streaming: matrices pass through a few buffers in every step, in the order of the model (HybridServe §2.4;
FlexGen's layer-wise streaming).

While a layer computes, the next streamed layers are read into free buffers. The first layer follows the last one, so
that reading continues between steps. Resident layers are distributed evenly between streamed ones, to give reads time.
An unexpected order (a failed step, a range of layers) only discards the reads in progress. Norms and biases stay in
memory. A `Transport` reads from a file or from page-locked host memory.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import ModelLoadError, StreamingError
from engine.models.linear import AbsentLinear, AnyWeight, Linear, MakeLinear, PlainLinear, make_linear
from engine.models.quantized import BlockWeight, FloatWeight, StoredWeight
from engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight [H], in float32 for `centered_norms`; bias [H] for a layer norm, None for an RMS norm."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        qkv: Outputs [q heads | k heads | v heads].
        qk_norm: Weight [heads + kv_heads, head_dim] of the norms of q and k, or None.
        up: Outputs [gate | up] if the MLP is gated; with experts those of all, one after the other.
        down: With experts the outputs of all, from the inner width of one.
        branch_norms: Norms of the outputs of attention and MLP, or None.
        router: Scores [T, experts] of the experts for each token, or None without experts.
        sinks: [heads] float32, or None (`Manner.sinks`).
    """

    input_norm: Norm
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    post_norm: Norm
    up: Linear
    down: Linear
    branch_norms: tuple[Norm, Norm] | None = None
    router: Linear | None = None
    sinks: Tensor | None = None


class LayerSource(Protocol):
    """Layers of a model in order. Some may be streamed: their matrices pass through memory in every step.

    Attributes:
        streamed: Indices of streamed layers, ascending.
        held_bytes: Memory of the layers' matrices, including buffers.
    """

    @property
    def streamed(self) -> tuple[int, ...]: ...

    @property
    def held_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[LayerWeights]: ...

    def __getitem__(self, index: int, /) -> LayerWeights:
        """Return the resident part of a layer: norms, biases, sizes. Matrices of a streamed layer are undefined."""

    def use(self, index: int, /) -> AbstractContextManager[LayerWeights]:
        """Return the whole layer for work launched inside the context. Raises StreamingError if it cannot be read."""


class ResidentLayers(list[LayerWeights]):
    """A LayerSource that keeps all layers in memory. Layers can be released and loaded again."""

    streamed: tuple[int, ...] = ()

    @property
    def held_bytes(self) -> int:
        return sum(matrix.data().nbytes for layer in self for matrix in matrices(layer))

    def use(self, index: int, /) -> AbstractContextManager[LayerWeights]:
        return nullcontext(self[index])

    @property
    def absent(self) -> list[int]:
        """Indices of released layers."""
        return [index for index, layer in enumerate(self) if isinstance(layer.qkv, AbsentLinear)]

    @property
    def spare_bytes(self) -> int:
        """Bytes that the pool may get when all layers are released."""
        return self.held_bytes

    def give_up(self, indices: Sequence[int], needed: int) -> None:
        """Release the matrices of the layers until each is set to the whole layer again.

        `needed` is the size in bytes that the pool shall have. Raises ValueError, without changes, if that is too much.
        """
        del needed  # a pool in host memory allocates from the system
        for index in indices:
            qkv, out, up, down = map(AbsentLinear, matrices(self[index]))
            self[index] = replace(self[index], qkv=qkv, out=out, up=up, down=down)

    def refill(self, index: int, loaded: LayerWeights) -> LayerWeights:
        """Return the value for `self[index]`, from the layer that was loaded again."""
        del index
        return loaded


Gather = Callable[[Iterator[LayerWeights]], LayerSource]
"""Collects layers one at a time as they are made, so that at most one is in memory besides the resident ones."""


def matrices(layer: LayerWeights) -> tuple[Linear, Linear, Linear, Linear]:
    """Return the matrices of a layer, which make up 99.9 % of its bytes."""
    return layer.qkv, layer.out, layer.up, layer.down


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole model.

    Attributes:
        embedding: [vocab, H].
        positions: [max_position + offset, H] or None.
    """

    embedding: Tensor
    positions: Tensor | None
    layers: LayerSource
    final_norm: Norm
    head: Linear


def embedding_scale(spec: ModelSpec, dtype: torch.dtype) -> float | None:
    """Return the factor of embeddings, rounded to the model's type; None without one."""
    return None if spec.embedding_scale is None else float(torch.tensor(spec.embedding_scale).to(dtype))


class TensorSource(Protocol):
    """Provides tensors on the target device and of the target type."""

    def has(self, name: str, /) -> bool:
        """Return whether the tensor exists."""

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor of exactly this shape. Raises ModelLoadError if it is missing or has another shape."""

    def fetch_bytes(self, name: str, shape: tuple[int, int]) -> StoredWeight | None:
        """Return the stored 8 or 4 bits of a weight if layers compute with them; else None."""


class DummyTensors:
    """Random weights that keep activations near 1: norms of 1, small biases, matrices scaled by their width."""

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


MakeExperts = Callable[[AnyWeight, Tensor | None, int], Linear]
"""(weights of all experts [experts * out, in] on their stored bits, biases [experts * out], experts) -> layer."""


def build_weights(
    spec: ModelSpec,
    source: TensorSource,
    make: MakeLinear = make_linear,
    gather: Gather = ResidentLayers,
    experts: MakeExperts | None = None,
) -> ModelWeights:
    """Fetch, stack and pack all tensors, one layer at a time; `gather` collects the layers. Raises ModelLoadError.

    `experts`: as of `load_weights`.
    """
    return _Builder(spec, source, make, experts).model(gather)


def build_layers(
    spec: ModelSpec, source: TensorSource, wanted: Sequence[int], make: MakeLinear
) -> Iterator[LayerWeights]:
    """Build some of the layers, one at a time. Raises ModelLoadError."""
    return _Builder(spec, source, make).layers(wanted)


class _Builder:
    """Fetches tensors by a family's names in the order in which the model runs."""

    def __init__(
        self, spec: ModelSpec, source: TensorSource, make: MakeLinear, experts: MakeExperts | None = None
    ) -> None:
        self._spec = spec
        self._source = source
        self._make, self._make_experts = make, experts
        self._names = spec.family.names
        self._prefix = self._first_prefix()

    def model(self, gather: Gather) -> ModelWeights:
        spec, names, prefix = self._spec, self._names, self._prefix
        embedding = self._source.fetch(self._embedding_name(), (spec.vocab_size, spec.hidden_size))
        positions = None
        if spec.family.position_offset is not None:
            shape = (spec.max_position_embeddings + spec.family.position_offset, spec.hidden_size)
            positions = self._source.fetch(f"{prefix}{names.positions}.weight", shape)
        layers = gather(self.layers(range(spec.num_layers)))
        final_norm = self._norm(prefix + names.final_norm)
        return ModelWeights(embedding, positions, layers, final_norm, self._head(embedding))

    def layers(self, wanted: Sequence[int]) -> Iterator[LayerWeights]:
        return (self._layer(f"{self._prefix}layers.{index}.") for index in wanted)

    def _layer(self, prefix: str) -> LayerWeights:
        spec, names = self._spec, self._names
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        qkv_sizes = split_over(names.qkv, (spec.q_size, spec.kv_size, spec.kv_size))
        up_sizes = split_over(names.up, (ffn, ffn) if spec.family.gated_mlp else (ffn,))
        if spec.experts is not None:
            make, count = self._make_experts, spec.experts.total
            parts = stacked_experts(spec, self._source, prefix, stored=make is not None)
            up, down = (self._make(*each) if make is None else make(*each, count) for each in parts)
        else:
            up = self._linear(prefix, names.up, up_sizes, hidden, spec.mlp_bias, gated=spec.family.gated_mlp)
            down = self._linear(prefix, (names.down,), (hidden,), ffn, spec.mlp_bias)
        return LayerWeights(
            input_norm=self._norm(prefix + names.input_norm),
            qkv=self._linear(prefix, names.qkv, qkv_sizes, hidden, spec.qkv_bias, names.interleaved_qkv),
            qk_norm=self._qk_norm(prefix),
            out=self._linear(prefix, (names.out,), (hidden,), spec.q_size, spec.out_bias),
            post_norm=self._norm(prefix + names.post_norm),
            up=up,
            down=down,
            branch_norms=self._branch_norms(prefix),
            router=self._router(prefix),
            sinks=self._sinks(prefix),
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
    ) -> Linear:
        pairs = list(zip(modules, sizes, strict=True))
        stack = self._straightened if interleaved else _stack
        shapes = [(f"{prefix}{name}.weight", (size, width)) for name, size in pairs]
        weight = stacked_weight(self._source, shapes, stack)
        bias = (
            stack([self._source.fetch(f"{prefix}{name}.bias", (size,)) for name, size in pairs]) if has_bias else None
        )
        return self._make(weight, bias, gated=gated)

    def _straightened(self, parts: list[Tensor]) -> Tensor:
        return straighten(self._spec, _stack(parts))

    def _norm(self, module: str) -> Norm:
        shape = (self._spec.hidden_size,)
        weight = self._norm_weight(module, shape)
        return Norm(weight, self._source.fetch(f"{module}.bias", shape) if self._spec.family.norm == "layer" else None)

    def _norm_weight(self, module: str, shape: tuple[int, ...]) -> Tensor:
        weight = self._source.fetch(f"{module}.weight", shape)
        if self._spec.family.centered_norms:
            return weight.float() + 1.0
        return weight.float() if self._spec.family.float_norms else weight

    def _router(self, prefix: str) -> Linear | None:
        weight, names = router_of(self._spec, self._source, prefix), self._spec.family.experts
        if weight is None or names is None:
            return None
        bias = self._source.fetch(f"{prefix}{names.router}.bias", weight.shape[:1]) if self._spec.mlp_bias else None
        return PlainLinear(weight, bias)

    def _sinks(self, prefix: str) -> Tensor | None:
        name = self._names.sinks
        return None if name is None else self._source.fetch(f"{prefix}{name}", (self._spec.num_heads,)).float()

    def _branch_norms(self, prefix: str) -> tuple[Norm, Norm] | None:
        names = self._names.branch_norms
        return None if names is None else (self._norm(prefix + names[0]), self._norm(prefix + names[1]))

    def _qk_norm(self, prefix: str) -> Tensor | None:
        spec, names = self._spec, self._names
        if not spec.family.qk_norm:
            return None
        q, k = (self._norm_weight(f"{prefix}{name}", (spec.head_dim,)) for name in (names.q_norm, names.k_norm))
        return torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))

    def _head(self, embedding: Tensor) -> Linear:
        if self._spec.tie_word_embeddings:
            return self._make(embedding, head=True)
        shape = self._spec.vocab_size, self._spec.hidden_size
        return self._make(self._source.fetch(self._head_name(), shape), head=True)

    def _head_name(self) -> str:
        names = [f"{module}.weight" for module in self._names.head]
        return next(filter(self._source.has, names), names[0])

    def _embedding_name(self) -> str:
        """Return the name of the embedding; a tied checkpoint may store its only copy as the head."""
        name = f"{self._prefix}{self._names.embedding}.weight"
        stored_as_head = self._spec.tie_word_embeddings and not self._source.has(name)
        return head if stored_as_head and self._source.has(head := self._head_name()) else name

    def _first_prefix(self) -> str:
        """Return the prefix used by this checkpoint; some were saved without the outer model."""
        prefixes, names, has = self._names.prefixes, self._names, self._source.has
        modules = (names.embedding, names.final_norm)
        return next((p for p in prefixes if any(has(f"{p}{each}.weight") for each in modules)), prefixes[0])


def router_of(spec: ModelSpec, source: TensorSource, prefix: str) -> Tensor | None:
    """Fetch the router [experts, H] of the layer whose names begin with `prefix`; None without experts."""
    names = spec.family.experts
    if spec.experts is None or names is None:
        return None
    return source.fetch(f"{prefix}{names.router}.weight", (spec.experts.total, spec.hidden_size))


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def stacked_weight(
    source: TensorSource,
    modules: list[tuple[str, tuple[int, int]]],
    stack: Callable[[list[Tensor]], Tensor] = _stack,
    *,
    stored: bool = True,
) -> AnyWeight:
    """Return the stacked weight of modules (name, shape), in 8 or 4 bits only if all are `stored` so."""
    bits = [source.fetch_bytes(*module) if stored else None for module in modules]
    found = [each for each in bits if each is not None]
    straightens = stack is not _stack and isinstance(bits[0], BlockWeight | FloatWeight)
    if straightens or len({type(each) for each in bits}) > 1 or not found:
        return stack([source.fetch(*each) for each in modules])
    return found[0].stacked(found, stack)


def stacked_experts(
    spec: ModelSpec, source: TensorSource, prefix: str, *, stored: bool = False
) -> Iterator[tuple[AnyWeight, Tensor | None]]:
    """Fetch the experts of a layer: gate and up [experts * 2 * width, H], down [experts * H, width], and the biases of
    both, if any. `stored`: in their stored bits."""
    names, sizes, hidden = spec.family.experts, spec.experts, spec.hidden_size
    assert names is not None and sizes is not None, "a family with experts"
    inside, outside = (sizes.width, hidden), (hidden, sizes.width)
    if not names.fused:
        modules = [f"{prefix}{names.experts}.{index}.{{}}.weight" for index in range(sizes.total)]
        ups = [(module.format(part), inside) for module in modules for part in names.parts[:2]]
        downs = [(module.format(names.parts[2]), outside) for module in modules]
        for each in (ups, downs):
            yield stacked_weight(source, each, stored=stored), None
        return
    for part, (n, k) in zip(names.parts, ((2 * sizes.width, hidden), outside), strict=True):
        name = f"{prefix}{names.experts}.{part}"
        bits = source.fetch_bytes(name, (sizes.total * n, k)) if stored else None
        tensors = [source.fetch(name, (sizes.total, k, n)).mT] if bits is None else [bits.values, bits.scales]
        tensors.append(source.fetch(f"{name}_bias", (sizes.total, n)))
        tensors = [tensor.reshape(sizes.total, n, -1) for tensor in tensors]
        if part == names.parts[0]:
            tensors = [apart(tensor) for tensor in tensors]
        first, *scales, bias = (tensor.flatten(0, 1) for tensor in tensors)
        yield (first if bits is None else replace(bits, values=first, scales=scales[0])), bias.flatten()


def apart(alternating: Tensor) -> Tensor:
    """Reorder alternating outputs of gate and up [experts, 2 * width, ...]: those of the gate first."""
    return torch.cat((alternating[:, ::2], alternating[:, 1::2]), 1)


def straighten(spec: ModelSpec, fused: Tensor) -> Tensor:
    """Reorder the outputs of an interleaved projection [heads · 3 · D, ...] to [3 · heads · D, ...]."""
    by_head = fused.view(spec.num_heads, 3, spec.head_dim, *fused.shape[1:])
    return by_head.transpose(0, 1).flatten(0, 2)


def split_over(modules: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the output sizes of the modules of one slot: one each, or the sum for a single fused module."""
    assert len(modules) in (1, len(sizes))
    return sizes if len(modules) == len(sizes) else (sum(sizes),)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of that name. Raises ModelLoadError."""
    types = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in types:
        raise ModelLoadError(f"dtype {name!r} is not supported (supported: {', '.join(types)})")
    return types[name]


ALIGNMENT = 64
"""Alignment in bytes of a matrix within its layer, for cache lines and vector loads."""


class Transport(Protocol):
    """Stores layers outside compute memory and copies them into buffers. `place` numbers the layers from 0."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """At least two buffers, [bytes of a layer] uint8 each."""

    def keep(self, place: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Store a layer as (offset, bytes) parts; not while reads are in progress. Raises ConfigError."""

    def begin(self, place: int, buffer: int) -> None:
        """Start to read a layer into a buffer that is used only by work launched before `release`."""

    def wait(self, buffer: int) -> None:
        """Make work launched from now on see the last read of the buffer. Raises StreamingError."""

    def release(self, buffer: int) -> None:
        """Mark that only work launched until now reads the buffer."""

    def seconds(self) -> float:
        """Measure the seconds to read one layer, as a mean over several."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Flight(NamedTuple):
    place: int
    buffer: int


class StreamedLayers:
    """A LayerSource that reads `streamed` layers through `transport` and keeps the others in memory.

    Layers are used one at a time, by a single thread.

    Attributes:
        paused: No layer is read, and a streamed layer has the weights of another one: for measurements.
    """

    def __init__(self, layers: Iterator[LayerWeights], streamed: tuple[int, ...], transport: Transport) -> None:
        self.streamed, self.paused = streamed, False
        self._transport = transport
        self._places = {index: place for place, index in enumerate(streamed)}
        self._layers: list[LayerWeights] = []
        self._stayed_bytes = 0
        for index, layer in enumerate(layers):
            self._layers.append(self._keep(index, layer))
        self._free = deque(range(len(transport.buffers)))
        self._ahead: deque[_Flight] = deque()
        self._next = 0

    def _keep(self, index: int, layer: LayerWeights) -> LayerWeights:
        if index not in self._places:
            self._stayed_bytes += sum(matrix.data().nbytes for matrix in matrices(layer))
            return layer
        data = [matrix.data() for matrix in matrices(layer)]
        at, parts = 0, []
        for part in data:
            parts.append((at, part))
            at += aligned(part.nbytes)
        self._transport.keep(self._places[index], parts)
        return _moved(layer, self._transport.buffers[0], [part.nbytes for part in data])

    @property
    def held_bytes(self) -> int:
        return self._stayed_bytes + sum(buffer.nbytes for buffer in self._transport.buffers)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerWeights]:
        return iter(self._layers)

    def __getitem__(self, index: int, /) -> LayerWeights:
        return self._layers[index]

    @contextmanager
    def use(self, index: int, /) -> Iterator[LayerWeights]:
        layer = self._layers[index]
        if index not in self._places:
            yield layer
            return
        sizes = [matrix.data().nbytes for matrix in matrices(layer)]
        if self.paused:
            yield _moved(layer, self._transport.buffers[0], sizes)
            return
        flight = self._expect(self._places[index])
        try:
            self._transport.wait(flight.buffer)
            yield _moved(layer, self._transport.buffers[flight.buffer], sizes)
        finally:
            self._transport.release(flight.buffer)
            self._free.append(flight.buffer)
            self._read_ahead()

    def _expect(self, place: int) -> _Flight:
        """Return the read of this layer; start it if it is not the next one in progress."""
        if not self._ahead or self._ahead[0].place != place:
            self._drop_ahead()
            self._next = place
            self._read_ahead()
        return self._ahead.popleft()

    def _read_ahead(self) -> None:
        while self._free:
            flight = _Flight(self._next, self._free.popleft())
            self._transport.begin(flight.place, flight.buffer)
            self._ahead.append(flight)
            self._next = (self._next + 1) % len(self.streamed)

    def _drop_ahead(self) -> None:
        while self._ahead:
            flight = self._ahead.popleft()
            with suppress(StreamingError):  # the read is discarded
                self._transport.wait(flight.buffer)
            self._free.append(flight.buffer)


def _moved(layer: LayerWeights, buffer: Tensor, sizes: Sequence[int]) -> LayerWeights:
    """Return the layer with its matrices placed consecutively in a buffer."""
    at, parts = 0, []
    for size in sizes:
        parts.append(buffer[at : at + size])
        at += aligned(size)
    qkv, out, up, down = (matrix.on(part) for matrix, part in zip(matrices(layer), parts, strict=True))
    return replace(layer, qkv=qkv, out=out, up=up, down=down)
