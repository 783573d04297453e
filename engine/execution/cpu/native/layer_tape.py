"""Operations of known decoder layers of transformers modules, and the activation rows between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.execution.cpu.native.attention import HeadShape
from engine.execution.cpu.native.library import Epilogue, Kind, Op
from engine.execution.cpu.native.linear import NativeLinear, rows_for, stride_of
from engine.models.attention import Manner
from engine.models.known_layers import LayerForm, NormForm

_TIMES = {"silu": Epilogue.TIMES_SILU, "gelu": Epilogue.TIMES_GELU, "gelu_tanh": Epilogue.TIMES_GELU_TANH}
_ALONE = {"gelu": Epilogue.GELU, "gelu_tanh": Epilogue.GELU_TANH, "relu": Epilogue.RELU, "relu2": Epilogue.RELU2}


class LayerKind(NamedTuple):
    """Common properties of the layers of one tape: heads, widths, and rounding of norms."""

    heads: HeadShape
    hidden: int
    inner: int
    rotary_dim: int
    rounds_once: bool


@dataclass(frozen=True, slots=True)
class KnownLayer:
    """A layer that the library can run.

    `linear` holds its linear layers by name; `qkv` those of queries, keys and values, joined if possible.
    """

    index: int
    kind: LayerKind
    form: LayerForm
    module: nn.Module
    manner: Manner
    linear: Mapping[str, NativeLinear]
    qkv: tuple[NativeLinear, ...]
    rotation: Tensor | None  # cosines at the time of inspection, compared by identity

    def goes_with(self, before: "KnownLayer") -> bool:
        """Return whether one tape can run both layers."""
        return self.kind == before.kind and self.rotation is before.rotation


class Rows:
    """Activation rows of a step's tokens. They start as zeros, so that padding is and stays zero."""

    def __init__(self, kind: LayerKind, tokens: int, dtype: torch.dtype) -> None:
        def rows(width: int) -> Tensor:
            return torch.zeros(rows_for(tokens), stride_of(width), dtype=dtype)

        heads = kind.heads
        self.kind = kind
        self.x, self.delta, self.other, self.normed = (rows(kind.hidden) for _ in range(4))
        self.sizes = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim, heads.kv_heads * heads.value_dim)
        self.qkv, self.attended = rows(sum(self.sizes)), rows(heads.heads * heads.value_dim)
        self.inner = rows(kind.inner)


class Composer:
    """Composes the operations of consecutive layers; the norm of a layer also adds the output of the layer before."""

    def __init__(self, rows: Rows) -> None:
        self.ops: list[Op] = []
        self.kept: list[Tensor] = []
        self._at = rows
        self._addends: list[Tensor] = []
        self._scale = 1.0

    def add(self, layer: KnownLayer, angles: Tensor) -> None:
        """Append the operations of a layer. `angles`: cosines, then sines, float [T, rotary_dim]."""
        form, at = layer.form, self._at
        source = self._add_norm(layer.module, form.input_norm)
        self._attention(layer, source, angles)
        self._linear(layer.linear[form.out], at.attended, at.delta)
        self._norm_in_place(layer, form.attention_norm, at.delta)
        self._scale = form.scale
        result = at.other if form.parallel else at.delta
        if not form.parallel:
            self._addends = [at.delta]
            source = self._add_norm(layer.module, form.mlp_norm)
        elif form.mlp_norm is not None:
            source = self._add_norm(layer.module, form.mlp_norm)
        self._mlp(layer, source)
        self._linear(layer.linear[form.down], at.inner, result)
        self._norm_in_place(layer, form.down_norm, result)
        self._addends = [at.delta, at.other] if form.parallel else [at.delta]

    def end(self) -> list[Op]:
        """Append the last addition and return all operations."""
        self._add_norm(None, None)
        return self.ops

    def _add_norm(self, module: nn.Module | None, norm: NormForm | None) -> Tensor:
        """Add the pending addends to the hidden state. Return the rows of its norm, or of the hidden state itself."""
        at, addends = self._at, self._addends
        if norm is not None or addends:
            op = Op(kind=Kind.NORM, k=at.kind.hidden, in_stride=at.x.stride(0), residual=at.x.data_ptr())
            if addends:
                op.input, op.other = addends[0].data_ptr(), addends[1].data_ptr() if len(addends) > 1 else None
                op.scale = 0.0 if self._scale == 1.0 else self._scale
            if norm is not None and module is not None:
                self._as_norm(op, module, norm, at.normed)
            self.ops.append(op)
        self._addends = []
        return at.x if norm is None else at.normed

    def _as_norm(self, op: Op, module: nn.Module, norm: NormForm, out: Tensor) -> None:
        weight, bias = norm.constants(module.get_submodule(norm.name))
        op.weight, op.bias = self._constant(weight), None if bias is None else self._constant(bias)
        op.out, op.out_stride, op.eps = out.data_ptr(), out.stride(0), norm.eps

    def _norm_in_place(self, layer: KnownLayer, norm: NormForm | None, rows: Tensor, width: int = 0) -> None:
        """Append a norm of the first `width` elements (default: all) in place."""
        if norm is not None:
            op = Op(kind=Kind.NORM, k=width or self._at.kind.hidden, in_stride=rows.stride(0), residual=rows.data_ptr())
            self._as_norm(op, layer.module, norm, rows)
            self.ops.append(op)

    def _attention(self, layer: KnownLayer, source: Tensor, angles: Tensor) -> None:
        at, form, manner, first = self._at, layer.form, layer.manner, 0
        for linear in layer.qkv:
            self._linear(linear, source, at.qkv[:, first:])
            first += linear.out_features
        rope = Op(kind=Kind.ROPE_KV, layer=layer.index, out=at.qkv.data_ptr(), out_stride=at.qkv.stride(0))
        if form.rotation is not None:
            rope.input, rope.n = angles.data_ptr(), form.rotation.pairs + 2 * form.qk_norms_last
        if form.qk_norms is not None and form.qk_norms[0].heads:
            rope.weight, rope.eps = self._constant(self._heads_norm(layer, form.qk_norms)), form.qk_norms[0].eps
        elif form.qk_norms is not None:
            for norm, start, width in zip(form.qk_norms, (0, at.sizes[0]), at.sizes, strict=False):
                self._norm_in_place(layer, norm, at.qkv[:, start:], width)
        sinks = None if manner.sinks is None else self._constant(manner.sinks.detach().float().contiguous())
        strides = {"in_stride": at.qkv.stride(0), "out_stride": at.attended.stride(0)}
        attend = Op(kind=Kind.ATTEND, layer=layer.index, input=at.qkv.data_ptr(), out=at.attended.data_ptr(), **strides)
        attend.n, attend.softcap, attend.other = manner.window or 0, manner.softcap or 0.0, sinks
        merge = Op(kind=Kind.MERGE, layer=layer.index, out=at.attended.data_ptr(), other=sinks, **strides)
        self.ops += [rope, attend, merge]

    def _heads_norm(self, layer: KnownLayer, norms: tuple[NormForm, NormForm]) -> Tensor:
        weights = [norm.constants(layer.module.get_submodule(norm.name))[0] for norm in norms]
        heads = self._at.kind.heads
        counts = (heads.heads, heads.kv_heads)
        return torch.cat([each.expand(n, -1) for each, n in zip(weights, counts, strict=True)]).contiguous()

    def _mlp(self, layer: KnownLayer, source: Tensor) -> None:
        """Append the up projection: the output of the gate, multiplied in place by the activated other output."""
        at, form = self._at, layer.form
        first, last = layer.linear[form.up[0]], layer.linear[form.up[-1]]
        if not form.gated:
            self._linear(first, source, at.inner, _ALONE[form.activation])
            return
        self._linear(first, source, at.inner, outputs=at.kind.inner)
        self._linear(last, source, at.inner, _TIMES[form.activation], outputs=at.kind.inner)
        op = self.ops[-1]
        op.other = op.out
        if first is last:  # use the second half of its outputs
            op.weight += first.panels.numel() // 2
            op.bias = None if first.bias is None else first.bias[at.kind.inner :].data_ptr()

    def _linear(
        self,
        linear: NativeLinear,
        rows: Tensor,
        out: Tensor,
        epilogue: Epilogue = Epilogue.PLAIN,
        outputs: int = 0,
    ) -> None:
        """Append a linear layer; `outputs` limits it to its first outputs."""
        op = linear.op(epilogue)
        assert op.in_stride == rows.stride(0)
        op.n = outputs or op.n
        op.input, op.out, op.out_stride = rows.data_ptr(), out.data_ptr(), out.stride(0)
        self.ops.append(op)

    def _constant(self, values: Tensor) -> int:
        self.kept.append(values)
        return values.data_ptr()
