"""Products of stored bits by the library humming-kernels (extra `gpu`): of dense layers, and of all experts of a layer.

Inputs and outputs are bfloat16, sums float32. The library compiles kernels for each shape in its first call, and keeps
them on disk. `trial` compares them with unpacked weights on the device that will serve; after a fault, this process
plans without them.
"""

import importlib
import importlib.util
from collections.abc import Iterable
from copy import copy
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import ConfigError, first_line
from engine.models.compact import TOLERANCE, CompactLinear, error_of
from engine.models.linear import AnyWeight, Linear, PlainLinear
from engine.models.packing import EXPERTS, Packing
from engine.models.quantized import (
    BlockWeight,
    FloatWeight,
    PackedWeight,
    RoundedWeight,
    as_bytes,
    group_of,
    pack_values,
)

Kept = PackedWeight | BlockWeight | FloatWeight
_DTYPE = torch.bfloat16
_BY_EXPERT = '{"gemm_type": "grouped_contiguous"}'
_ROWS = (1, 3, 12, 32, 48, 64, 100, 200, 300, 600, 1024, 2048)  # of the trial: a dozen kernels share all numbers
_PIECE = 2048  # rows of a product that unpacks
_SIDES = 256, 128
"""Outputs and inputs to whose multiples weights are padded, as vLLM pads them."""
_MULTIPLE, _LEAST_GROUP = 8, 16
_faults: list[str] = []


def is_usable() -> bool:
    """Return whether the library is installed, and has had no fault in this process."""
    return not _faults and not is_missing()


def is_missing() -> bool:
    """Return whether the library is not installed."""
    return importlib.util.find_spec("humming") is None


def multiplies(packing: Packing) -> bool:
    """Return whether the library multiplies weights that are stored so."""
    return packing.nibbles or packing.small_floats or (packing.blocks and packing.block == (_SIDES[1], _SIDES[1]))


def bytes_of(packing: Packing, n: int, k: int) -> int:
    """Return the bytes of a weight [n, k] in the layout of the library."""
    if not (group := _group(packing, k)):
        return n * k * _DTYPE.itemsize
    n, k = (-(-size // side) * side for size, side in zip((n, k), _SIDES, strict=True))
    of_group = 1.0 if packing.layout == EXPERTS else 2.5 if packing.nibbles else 2.0
    return int(n * (k * packing.bits / 8 + k // group * of_group))


def _group(packing: Packing, k: int) -> int:
    """Return the number of inputs that share a scale in memory; 0 if it does not divide them."""
    group = packing.block[1]
    if packing.nibbles:
        return group_of(k, group or k) or 0
    return 0 if k % group or group < _LEAST_GROUP else group


def takes(weight: AnyWeight) -> TypeGuard[Kept]:
    """Return whether the library can multiply this weight."""
    if not isinstance(weight, Kept) or (isinstance(weight, FloatWeight) and weight.group < _LEAST_GROUP):
        return False
    return weight.dtype == _DTYPE and _are_even(*weight.shape)


def _are_even(*sizes: int) -> bool:
    return not any(size % _MULTIPLE for size in sizes)


class LibraryWeight:
    """A weight [n, k] in the layout of the library, or the weights of all experts [experts * n, k]."""

    def __init__(self, weight: Kept, experts: int = 0) -> None:
        self.shape = weight.shape
        stacks = experts or 1
        scheme, tensors = _described(weight, stacks)
        if not experts:
            tensors = {name: each.squeeze(0) for name, each in tensors.items()}
        with weight.values.device:  # the library's own tensors
            self._layer = importlib.import_module("humming.layer").HummingLayer(
                shape_n=weight.shape[0] // stacks, shape_k=weight.shape[1], weight_config=scheme,
                num_experts=experts or None, torch_dtype=_DTYPE, pad_n_to_multiple=_SIDES[0],
                pad_k_to_multiple=_SIDES[1],
            )  # fmt: skip
        self._layer.load_from_tensors(tensors)
        self._layer.transform()

    def product(self, x: Tensor) -> Tensor:
        """Return the product [T, n] of x [T, k]."""
        found: Tensor = self._layer(x)
        return found

    def by_expert(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the products [S, n] of rows [S, k] sorted by expert; `ends` [experts] int32 of each one's rows."""
        found: Tensor = self._layer(rows, expert_layout=functional.pad(ends, (1, 0)), compute_config=_BY_EXPERT)
        return found

    def unpacked(self) -> Tensor:
        """Return the dense weight [n, k], as the product with each unit vector."""
        n, k = self.shape
        weight = torch.empty(n, k, dtype=_DTYPE, device=self.data().device)
        for first in range(0, k, _PIECE):
            units = torch.zeros(min(_PIECE, k - first), k, dtype=_DTYPE, device=weight.device)
            units.diagonal(first).fill_(1.0)
            weight[:, first : first + _PIECE] = self.product(units).t()
        return weight

    def data(self) -> Tensor:
        return as_bytes(self._layer.weight)

    def on(self, data: Tensor) -> Self:
        moved, layer, old = copy(self), copy(self._layer), self._layer.weight
        weight = nn.Parameter(data.view(old.dtype).view(old.shape), requires_grad=False)
        layer._parameters = {**layer._parameters, "weight": weight}
        moved._layer = layer
        return moved


class ExpertsLinear(CompactLinear):
    """A layer of all experts, one after the other, on their stored bits. `bias`: [experts * n], or None."""

    def __init__(self, weight: LibraryWeight, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.by_expert, self.bias = weight.by_expert, bias


def make_kept(weight: AnyWeight, bias: Tensor | None) -> Linear | None:
    """Return a layer on these bits; None if the library does not take them."""
    if not takes(weight):
        return None
    return CompactLinear(LibraryWeight(weight), bias, LibraryWeight.product)


def make_experts(weight: AnyWeight, bias: Tensor | None, experts: int) -> Linear:
    """Make a layer of all experts from their stacked weights [experts * n, k] and biases [experts * n]."""
    if takes(weight) and _are_even(weight.shape[0] // experts):
        return ExpertsLinear(LibraryWeight(weight, experts), bias)
    assert not isinstance(weight, RoundedWeight), "these have products of their own"
    return PlainLinear(weight if isinstance(weight, Tensor) else weight.unpacked(), bias)


def _described(weight: Kept, stacks: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the library's description of a weight, and its tensors [stacks, ...] in the library's layout for files:
    words of 32 bits along the inputs, zero points along the outputs."""
    values = weight.values.contiguous().view(torch.int32)
    tensors = {"weight": values.view(stacks, -1, values.shape[1])}
    if isinstance(weight, BlockWeight):
        rows, group = weight.block
        scales = weight.scales[:, : weight.shape[1] // group].repeat_interleave(rows, 0).to(_DTYPE)
        scheme: dict[str, Any] = {"dtype": "float8e4m3"}
    elif isinstance(weight, FloatWeight):
        group, scheme, scales = weight.group, {"dtype": "float4e2m1"}, weight.scales
        if scales.dtype == torch.float8_e8m0fnu:
            scheme["scale_dtype"] = "float8e8m0"
        else:
            scales = scales.to(_DTYPE)
    else:
        group, scheme, scales = weight.group, {"dtype": "uint4", "has_zero_point": True}, weight.scales.to(_DTYPE)
        across = weight.zeros.view(stacks, -1, weight.zeros.shape[1]).transpose(1, 2)
        words = pack_values(across.flatten(0, 1).contiguous()).view(torch.int32)
        tensors["zero_point"] = words.view(*across.shape[:2], -1).transpose(1, 2).contiguous()
    tensors["weight_scale"] = scales.contiguous().view(stacks, -1, scales.shape[1])
    return scheme | {"group_size": group}, tensors


def trial(packing: Packing, shapes: Iterable[tuple[int, int, int]], device: torch.device) -> str:
    """Return how products of random bits differ from those of unpacked weights; empty if they agree.

    `shapes`: outputs, inputs and number of weights in a layer; more than one are of experts. Raises ConfigError if the
    device runs nothing afterwards.
    """
    fault = ""
    try:
        for n, k, count in dict.fromkeys(shapes):
            if not (_group(packing, k) and _are_even(n, k)) or (packing.blocks and n % packing.block[0]):
                continue  # such weights are unpacked
            experts = count if count > 1 else 0
            error = _largest_error(packing, n, k, experts, device)
            if not error <= TOLERANCE:
                kind = f"{experts} experts of " if experts else ""
                fault = f"differs from unpacked weights by {error:.2g} for {kind}{n} x {k}"
                break
    except Exception as raised:  # of the library, its compiler, or the driver
        fault = f"raised {type(raised).__name__}: {first_line(raised)[:200]}"
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError:
            raise ConfigError(f"humming-kernels ends the work of this GPU ({fault}); uninstall it") from raised
    if fault:
        _faults.append(fault)
    return fault


def _largest_error(packing: Packing, n: int, k: int, experts: int, device: torch.device) -> float:
    numbers = torch.Generator(device).manual_seed(0)
    parts: list[Any] = [_drawn(packing, n, k, numbers) for _ in range(experts or 1)]
    kept, errors = LibraryWeight(parts[0].stacked(parts), experts), []
    for rows in _ROWS:
        x = torch.randn(rows, k, generator=numbers, device=device).to(_DTYPE)
        if not experts:
            errors.append(error_of(kept.product(x), x, parts[0].dense()))
            continue
        some = torch.tensor([0, experts // 2, experts - 1], device=device)
        chosen = some[torch.randint(3, (rows,), generator=numbers, device=device)].sort().values
        every = torch.arange(experts, device=device)
        found = kept.by_expert(x, (chosen[:, None] == every).sum(0).cumsum(0, dtype=torch.int32))
        for expert in sorted(set(chosen.tolist())):
            here = chosen == expert
            errors.append(error_of(found[here], x[here], parts[expert].dense()))
    return max(errors)


def _drawn(packing: Packing, n: int, k: int, numbers: torch.Generator) -> Kept:
    """Return a weight of random bits as the checkpoint stores them."""
    device = numbers.device

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=numbers, device=device, dtype=torch.uint8)

    if packing.blocks:
        rows, group = packing.block
        values = torch.randn(n, k, generator=numbers, device=device).to(torch.float8_e4m3fn)
        return BlockWeight.of(values, 0.5 + integers(0, 8, n // rows, k // group) / 8, packing.block, _DTYPE)
    values, groups = integers(0, 256, n, k // 2), k // _group(packing, k)
    powers = integers(120, 124, n, groups).view(torch.float8_e8m0fnu)
    scales = powers if packing.layout == EXPERTS else powers.to(_DTYPE)
    if packing.small_floats:
        return FloatWeight(values, scales, _DTYPE)
    return PackedWeight(values, scales, _DTYPE, integers(0, 16, n, groups))
