"""One rank's part of a model whose layers are divided among ranks: sizes, tensors, and the sum over ranks.

A rank has some heads and some inner values of the MLP of each layer: rows of the projections to queries, keys, values,
gate and up, and the matching columns of out and down. The outputs of out and down are partial sums, added over all
ranks. If the vocabulary is divisible, each rank has some rows of the head, and all ranks gather the logits. Embedding
and norms are complete on every rank.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.models.families import family_named
from engine.models.linear import Linear
from engine.models.spec import ModelSpec

SumRanks = Callable[[Tensor], object]
"""Replaces a tensor by its sum over all ranks, in place. All ranks must call it in the same order."""

GatherRanks = Callable[[Tensor], Tensor]
"""Joins the tensors [rows, n] of all ranks to [rows, ranks · n]. All ranks must call it in the same order."""

Fetch = Callable[[str, tuple[int, ...]], Tensor]
"""(name, shape) -> the tensor of exactly this shape; see TensorSource.fetch."""

_IN_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.+)\.(weight|bias)$")


def divide(whole: ModelSpec, ranks: int) -> ModelSpec:
    """Return the sizes of one rank's part. Raises ModelLoadError if a size is not divisible."""
    sizes = {
        "attention heads": (whole.num_heads, ranks),
        "key-value heads": (whole.num_kv_heads, _kv_parts(whole, ranks)),
        "inner values of the MLP": (whole.intermediate_size, ranks),
    }
    for what, (size, parts) in sizes.items():
        if size % parts:
            raise ModelLoadError(f"the model's {size} {what} cannot be divided among {ranks} ranks")
    heads, kv_heads, inner = (size // parts for size, parts in sizes.values())
    return replace(whole, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner)


def _kv_parts(whole: ModelSpec, ranks: int) -> int:
    """Return the number of distinct parts of keys and values; ranks whose queries share a head hold the same part."""
    return ranks if ranks % whole.num_kv_heads else whole.num_kv_heads


def head_ranks(vocab: int, ranks: int) -> int:
    """Return the number of ranks among which the head is divided."""
    return 1 if vocab % ranks else ranks


@dataclass(frozen=True, slots=True)
class Shard:
    """Position of a rank and its collective operations; without `gather` the head is complete on each rank."""

    rank: int
    ranks: int
    total: SumRanks
    gather: GatherRanks | None = None

    def spec_of(self, whole: ModelSpec) -> ModelSpec:
        """See `divide`."""
        return divide(whole, self.ranks)

    def head_of(self, whole: Tensor) -> tuple[Tensor, GatherRanks | None]:
        """Return this rank's part of a head [vocab, H], a view, and the gather of its logits (None: not divided)."""
        if self.gather is None or head_ranks(len(whole), self.ranks) == 1:
            return whole, None
        return self.part_of(whole, 0), self.gather

    def part_of(self, whole: Tensor, dim: int, parts: int = 0) -> Tensor:
        """Return a view of this rank's share of a dimension; with fewer `parts` than ranks, several ranks share one."""
        parts = parts or self.ranks
        size = whole.shape[dim] // parts
        return whole.narrow(dim, self.rank * parts // self.ranks * size, size)


class ShardedTensors:
    """A rank's tensors, as a TensorSource with the spec of the part. Other tensors do not stay in memory.

    Quantized weights are unpacked, because their scales are not divided.
    """

    def __init__(self, has: Callable[[str], bool], fetch: Fetch, whole: ModelSpec, shard: Shard) -> None:
        self.has, self._fetch, self._shard = has, fetch, shard
        names = family_named(whole.family).names
        inner = whole.intermediate_size
        # Outputs of a fused module are divided section by section, unless they are ordered by head.
        kv = whole.kv_size, _kv_parts(whole, shard.ranks)
        rows = _sections(names.qkv, ((whole.q_size, shard.ranks), kv, kv))
        if names.interleaved_qkv:
            rows = dict.fromkeys(rows, ((whole.q_size + 2 * whole.kv_size, shard.ranks),))
        ups = 2 if whole.gated_mlp else 1
        self._rows = rows | _sections(names.up, ((inner, shard.ranks),) * ups)
        self._columns = {names.out: whole.q_size, names.down: inner}

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See TensorSource; `shape` is the shape of the part."""
        found = _IN_LAYER.search(name)
        module, kind = found.groups() if found else ("", "")
        if sections := self._rows.get(module):
            sizes = [size for size, _ in sections]
            split = self._fetch(name, (sum(sizes), *shape[1:])).split_with_sizes(sizes)
            return torch.cat(
                [self._shard.part_of(each, 0, parts) for each, (_, parts) in zip(split, sections, strict=True)]
            )
        if kind == "weight" and (width := self._columns.get(module)):
            return self._shard.part_of(self._fetch(name, (shape[0], width)), 1).clone(
                memory_format=torch.contiguous_format
            )
        return self._fetch(name, shape)

    def fetch_bytes(self, _name: str, _shape: tuple[int, int]) -> None:
        """Return None: no weight is available in 8 bits."""


class SummedLinear:
    """A layer whose inputs are divided among ranks: `total` adds the products of all parts, then `bias` is added."""

    def __init__(self, part: Linear, bias: Tensor | None, total: SumRanks) -> None:
        self.in_features, self.out_features = part.in_features, part.out_features
        self.part, self.bias, self.total = part, bias, total

    def __call__(self, x: Tensor) -> Tensor:
        product = self.part(x)
        self.complete(product)
        return product

    def complete(self, rows: Tensor) -> None:
        """Complete this rank's products in rows [n, stride]; elements beyond the outputs are zero on each rank."""
        self.total(rows)
        if self.bias is not None:
            rows[:, : len(self.bias)] += self.bias

    def outputs_from(self, first: int) -> "SummedLinear":
        bias = None if self.bias is None else self.bias[first:]
        return SummedLinear(self.part.outputs_from(first), bias, self.total)

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        """See Linear; the weight is this rank's part [out - first, in / ranks]."""
        return self.part.dense_from(first)[0], None if self.bias is None else self.bias[first:]

    def data(self) -> Tensor:
        return self.part.data()

    def on(self, data: Tensor) -> "SummedLinear":
        return SummedLinear(self.part.on(data), self.bias, self.total)


_Section = tuple[int, int]
"""Outputs of a module that are divided separately: (number of outputs, number of parts)."""


def _sections(modules: tuple[str, ...], sections: tuple[_Section, ...]) -> dict[str, tuple[_Section, ...]]:
    """Return the sections of each module: one section per module, or all in a single fused module."""
    if len(modules) == 1:
        return {modules[0]: sections}
    return {module: (section,) for module, section in zip(modules, sections, strict=True)}
