"""Linear layers with weights in the panels of the C++ library, for tapes and for torch code.

Both share one copy of a weight: torch code uses these layers for steps that tapes do not support (hidden state).
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from engine.execution.cpu.native.library import Epilogue, Int8, Kind, Level, Library, Op, Team, activation_dtype
from engine.models.linear import AnyWeight
from engine.models.quantized import PackedWeight, RoundedWeight, StoredWeight, round_weight

PAD = 32
"""Inputs, and rows of a buffer, are padded to a multiple of this."""

_SKEW = 16  # additional elements per row: rows at a distance of a power of two would share few cache lines


def rows_for(count: int) -> int:
    """Return the rows of a buffer for `count` rows; AMX reads whole tiles."""
    return -(-count // PAD) * PAD


def stride_of(width: int) -> int:
    """Return the elements from one activation row of this width to the next."""
    return -(-width // PAD) * PAD + _SKEW


class Native:
    """The library, the instruction level in use, and the threads."""

    def __init__(self, library: Library, level: Level, team: Team) -> None:
        self.library = library
        self.level = level
        self.team = team

    def level_for(self, dtype: torch.dtype) -> Level:
        """Return the level for models of a type; instructions for bfloat16 apply to that type only."""
        return self.level if dtype == torch.bfloat16 else min(self.level, Level.AVX512)

    def linear(
        self, weight: AnyWeight, bias: Tensor | None = None, *, gated: bool = False, **_head: bool
    ) -> "NativeLinear":
        """Make a layer on these threads; the weight is not needed afterwards."""
        if isinstance(weight, PackedWeight):
            return NativeInt4(self, weight, bias, gated)
        if isinstance(weight, RoundedWeight):
            return self.int8_linear(weight, bias, gated=gated)
        return NativeLinear(self, weight if isinstance(weight, Tensor) else weight.unpacked(), bias, gated)

    def int8_linear(
        self, weight: AnyWeight, bias: Tensor | None = None, *, gated: bool = False, **_head: bool
    ) -> "NativeInt8":
        """Make a layer that computes with 8-bit integers."""
        return NativeInt8(self, round_weight(weight), bias, gated)


class NativeLinear:
    """Weight [n, k] and bias [n] in panels. `gated`: the panels of gate and up outputs are interleaved."""

    def __init__(self, native: Native, weight: Any, bias: Tensor | None, gated: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.gated = gated
        self.dtype = weight.dtype
        self.bias = None if bias is None else bias.float().contiguous()
        self.native = native
        self.panels = self._packed(weight)

    def _packed(self, weight: Any) -> Tensor:
        return self.native.library.pack(weight, self.gated)

    def op(self, epilogue: Epilogue = Epilogue.PLAIN) -> Op:
        """Return the layer as an operation, without its rows."""
        return Op(
            kind=Kind.LINEAR,
            epilogue=epilogue,
            halves=self.gated,
            n=self.out_features,
            k=self.in_features,
            in_stride=stride_of(self.in_features),
            out_stride=stride_of(self.out_features // 2 if epilogue.gates else self.out_features),
            weight=self.panels.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        level = self.native.level_for(self.dtype)
        kind = activation_dtype(level)
        rows = x.reshape(-1, self.in_features)
        padded = _padded(rows, rows_for(len(rows)), kind)
        result = torch.empty(len(rows), stride_of(self.out_features), dtype=kind)
        op = self.op()
        op.input, op.out = padded.data_ptr(), result.data_ptr()
        self.native.library.linear(level, self.dtype, op, len(rows), self.native.team)
        return result[:, : self.out_features].to(self.dtype).view(*x.shape[:-1], self.out_features)

    @staticmethod
    def grouped(layers: "Sequence[NativeLinear]") -> "NativeGroup":
        """Return layers of one shape as a `Group` (`engine.models.experts`)."""
        return NativeGroup(layers)

    def outputs_from(self, first: int) -> "NativeLinear":
        return NativeLinear(self.native, *self.dense_from(first))

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        shape = (self.out_features, self.in_features)
        weight = self.native.library.unpack(self.panels, shape, self.dtype, self.gated)
        bias = None if self.bias is None else self.bias[first:].to(self.dtype)
        return (weight if first == 0 else weight[first:].clone()), bias

    def data(self) -> Tensor:
        return self.panels

    def on(self, data: Tensor) -> Self:
        """See Linear; `data` are the panels, aligned to 64 bytes."""
        moved = copy.copy(self)
        moved.panels = data
        return moved


class NativeGroup:
    """Layers of one shape, applied to consecutive rows; see `engine.models.experts.Group`."""

    def __init__(self, layers: Sequence[NativeLinear]) -> None:
        self._layers, self._one = layers, layers[0]
        self._ops = [layer.op() for layer in layers]

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        one = self._one
        level = one.native.level_for(one.dtype)
        kind = activation_dtype(level)
        padded = _padded(x, rows_for(len(x)) + PAD, kind)
        result = torch.empty(len(x), stride_of(one.out_features), dtype=kind)
        source, target = padded.data_ptr(), result.data_ptr()
        for op, count in zip(self._ops, counts, strict=True):
            if count:
                op.input, op.out = source, target
                one.native.library.linear(level, one.dtype, op, count, one.native.team)
                source += count * padded.stride(0) * padded.itemsize
                target += count * result.stride(0) * result.itemsize
        return result[:, : one.out_features].to(one.dtype)


def _padded(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` rows with x [T, k] in the first ones; others are undefined, but their sums are not stored."""
    make = torch.zeros if x.shape[1] % PAD else torch.empty
    padded = make(count, stride_of(x.shape[1]), dtype=dtype)
    padded[: len(x), : x.shape[1]] = x
    return padded


class NativeInt8(NativeLinear):
    """A layer on a `RoundedWeight` of integers; rows are rounded to integers in every call.

    Twin: `engine.models.quantized.QuantizedLinear`. `kind` None selects the fastest arithmetic of the level.
    """

    group = 0
    """Inputs that share a scale of a 4-bit weight."""
    row_scales = 1
    """Floats that go with a row of integers."""

    def __init__(
        self, native: Native, weight: Any, bias: Tensor | None, gated: bool = False, kind: Int8 | None = None
    ) -> None:
        super().__init__(native, weight, bias, gated)
        self.kind = native.library.int8(native.level_for(self.dtype)) if kind is None else kind

    def _packed(self, weight: RoundedWeight) -> Tensor:
        return self.native.library.pack_int8(weight.values, weight.scales, self.gated)

    def op(self, epilogue: Epilogue = Epilogue.PLAIN) -> Op:
        op = super().op(epilogue)
        op.int8, op.group = self.kind, self.group
        return op

    def quantize_op(self) -> Op:
        """Return the operation that rounds the input to integers for `op`, without its rows."""
        stride = stride_of(self.in_features)
        k, group = self.in_features, self.group
        return Op(kind=Kind.QUANTIZE, int8=self.kind, k=k, in_stride=stride, out_stride=stride, group=group)

    def outputs_from(self, first: int) -> "NativeInt8":
        bias = None if self.bias is None else self.bias[first:]
        return type(self)(self.native, self.weight().part(first), bias, kind=self.kind)

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        bias = None if self.bias is None else self.bias[first:].to(self.dtype)
        return self.weight().part(first).dense().to(self.dtype), bias

    def weight(self) -> StoredWeight:
        """Return the weight, unpacked from its panels."""
        shape = (self.out_features, self.in_features)
        return RoundedWeight(*self.native.library.unpack_int8(self.panels, shape, self.gated), self.dtype)


class NativeInt4(NativeInt8):
    """A layer on a `PackedWeight`; each group of a row's inputs is rounded to integers of 8 bits in every call.

    Twin: `engine.models.quantized.Int4Linear`.
    """

    def __init__(
        self, native: Native, weight: PackedWeight, bias: Tensor | None, gated: bool = False, kind: Int8 | None = None
    ) -> None:
        super().__init__(native, weight, bias, gated, kind)
        self.group, self.row_scales = weight.group, 2 * weight.scales.shape[1]

    def _packed(self, weight: PackedWeight) -> Tensor:  # type: ignore[override]
        scales = weight.scales.float()
        top = scales.abs().amax(1)  # the largest scale of an output becomes a number between 1 and 2
        base = torch.where(top > 0, 2.0 ** (torch.frexp(top).exponent - 1).float(), 1.0)
        halves = (scales / base[:, None]).half()
        return self.native.library.pack_int4((weight.values, halves, weight.zeros, base), self.gated)

    def weight(self) -> PackedWeight:
        """Return the weight, unpacked from its panels; scales are float32."""
        shape = (self.out_features, self.in_features)
        values, scales, zeros, base = self.native.library.unpack_int4(self.panels, shape, self.group, self.gated)
        return PackedWeight(values, scales.float() * base[:, None], self.dtype, zeros)
