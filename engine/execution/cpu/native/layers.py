"""Decoder layers of transformers' modules as the C++ library runs them: those that are known, each run of neighbours as
one tape.

The first layer of a run takes the hidden state of a step and gives that behind the last; the others hand on what they
are given. The modules stay what they are, and are the twin: the tape was made from what they compute, their linear
layers are the tape's, and a step with adapters runs by them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.execution.cpu.native.attention import ANY_TOKEN, FIRST_TOKENS, Heads, NativeAttention
from engine.execution.cpu.native.binding import shape_over
from engine.execution.cpu.native.library import TYPES, Epilogue, Kind, Op, Shape, Step, Tape, activation_dtype
from engine.execution.cpu.native.linear import Native, NativeLinear, rows_for, stride_of
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.models.known_layers import LayerForm, NormForm, Rotation, rotation_of
from engine.models.manner import Manner
from engine.models.transformers_model import Look, TransformersModel

_PANEL = 32  # outputs of a packed weight that lie together
_TIMES = {"silu": Epilogue.TIMES_SILU, "gelu": Epilogue.TIMES_GELU, "gelu_tanh": Epilogue.TIMES_GELU_TANH}
_ALONE = {"gelu": Epilogue.GELU, "gelu_tanh": Epilogue.GELU_TANH, "relu": Epilogue.RELU}


class _Kind(NamedTuple):
    """What layers of one tape have in common: heads, widths, and how their norms round."""

    heads: Heads
    hidden: int
    inner: int
    rotary_dim: int
    rounds_once: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """A layer that can be run. `linear`: its linear layers by their names."""

    index: int
    kind: _Kind
    form: LayerForm
    module: nn.Module
    manner: Manner
    linear: Mapping[str, NativeLinear]
    rotation: Tensor | None  # cosines, when it was looked at

    def goes_with(self, before: "_Known") -> bool:
        """Whether one tape can run both."""
        return self.kind == before.kind and self.rotation is before.rotation


class NativeLayers:
    """A `RunLayer` for the step that `attention` has begun."""

    def __init__(
        self,
        native: Native,
        model: TransformersModel,
        pool: UnitPool,
        rows: RowTable,
        attention: NativeAttention,
        max_model_len: int,
    ) -> None:
        self._native = native
        self._pool = pool
        self._table = rows
        self._attention = attention
        self._max_model_len = max_model_len
        self._groups = _groups(model)
        self._inside = {each.index for group in self._groups for each in group[1:]}
        self._runs: dict[int, _Run] = {}
        self._max_tokens = 0

    @property
    def known(self) -> int:
        """How many layers are run here."""
        return sum(map(len, self._groups))

    def __call__(self, index: int, whole: Callable[..., Any], x: Tensor, others: Mapping[str, Any]) -> Any:
        """See RunLayer. Raises StepError."""
        if index in self._inside:
            return x
        if self._max_tokens < x.shape[1]:
            self._make_room(max(x.shape[1], 2 * self._max_tokens, FIRST_TOKENS))
        run = self._runs.get(index)
        return whole(hidden_states=x, **others) if run is None else run(self._attention.step, x, rotation_of(others))

    def _make_room(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        rows: dict[_Kind, _Rows] = {}
        for group in self._groups:
            kind = group[0].kind
            if kind not in rows:
                rows[kind] = _Rows(kind, max_tokens, activation_dtype(self._native.level_for(self._pool.dtype)))
            ops = _Composer(rows[kind])
            for layer in group:
                ops.add(layer)
            rotations = [layer.form.rotation for layer in group if layer.form.rotation is not None]
            shape = self._shape(kind, rows[kind])
            self._runs[group[0].index] = _Run(self._native, shape, rows[kind], ops, rotations)

    def _shape(self, kind: _Kind, rows: "_Rows") -> Shape:
        return shape_over(
            self._pool,
            self._table,
            self._max_model_len,
            **kind.heads._asdict(),
            rotary_dim=kind.rotary_dim,
            hidden=kind.hidden,
            vocab=ANY_TOKEN,
            max_tokens=self._max_tokens,
            max_samples=self._table.num_rows,
            rounds_once=int(kind.rounds_once),
            level=self._native.level_for(self._pool.dtype),
            type=TYPES[self._pool.dtype],
            rotary_scaling=1.0,
            inverse_frequencies=rows.angles.data_ptr() if kind.rotary_dim else None,  # angles come from the modules
        )


def _groups(model: TransformersModel) -> list[list[_Known]]:
    """Known layers, those that follow each other and are alike together."""
    groups: list[list[_Known]] = []
    last: _Known | None = None
    for index, (look, form) in enumerate(zip(model.look(), model.layer_forms(), strict=True)):
        known = None if isinstance(form, str) else _known(look, form, model.like.dtype, index)
        if known is not None:
            assert look.given is not None
            joins = last is not None and look.given.follows and known.goes_with(last)
            groups[-1:] = [[*groups[-1], known]] if joins else [*groups[-1:], [known]]
        last = known
    return groups


def _known(look: Look, form: LayerForm, dtype: torch.dtype, index: int) -> _Known | None:
    """The layer, if the library has all that it needs."""
    module, given, seen = look.layer, look.given, look.seen
    assert module is not None and given is not None
    linear: dict[str, Any] = {name: getattr(module.get_submodule(name), "layer", None) for name in form.linear}
    rms = {norm.once for norm in form.norms if not norm.layer}
    if given.x.dtype != dtype or len(rms) > 1 or not all(_is_plain(each, dtype) for each in linear.values()):
        return None
    if (
        form.qk_norms is not None
        and (heads := form.qk_norms)[0].heads
        and (heads[0].layer or heads[0].eps != heads[1].eps)
    ):
        return None
    inner = linear[form.down].in_features
    if form.gated and len(form.up) == 1 and inner % _PANEL:
        return None
    scale = seen.widths[0] ** -0.5 if seen.manner.scale is None else seen.manner.scale
    rotation = None if given.rotation is None else given.rotation[0]
    kind = _Kind(
        Heads(seen.heads, seen.kv_heads, *seen.widths, scale), given.x.shape[2], inner,
        0 if rotation is None else rotation.shape[2], any(rms),
    )  # fmt: skip
    return _Known(index, kind, form, module, seen.manner, linear, rotation)


def _is_plain(layer: object, dtype: torch.dtype) -> bool:
    return type(layer) is NativeLinear and layer.dtype == dtype and not layer.gated


class _Rows:
    """Rows of a step's tokens between operations. Zero at first, so that padding is and stays zero."""

    def __init__(self, kind: _Kind, tokens: int, dtype: torch.dtype) -> None:
        def rows(width: int) -> Tensor:
            return torch.zeros(rows_for(tokens), stride_of(width), dtype=dtype)

        heads = kind.heads
        self.kind = kind
        self.x, self.delta, self.other, self.normed = (rows(kind.hidden) for _ in range(4))
        self.sizes = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim, heads.kv_heads * heads.value_dim)
        self.qkv, self.attended = rows(sum(self.sizes)), rows(heads.heads * heads.value_dim)
        self.inner = rows(kind.inner)
        self.angles = torch.zeros(tokens, kind.rotary_dim)


class _Composer:
    """The operations of layers, one behind the other: the addition of what a layer gives is the next one's norm's."""

    def __init__(self, rows: _Rows) -> None:
        self.ops: list[Op] = []
        self.kept: list[Tensor] = []
        self._at = rows
        self._addends: list[Tensor] = []
        self._scale = 1.0

    def add(self, layer: _Known) -> None:
        at, form = self._at, layer.form
        source = self._add_norm(layer, form.input_norm)
        self._attention(layer, source)
        self._linear(layer, form.out, at.attended, at.delta)
        self._norm_in_place(layer, form.attention_norm, at.delta)
        self._scale = form.scale
        result = at.other if form.parallel else at.delta
        if not form.parallel:
            self._addends = [at.delta]
            source = self._add_norm(layer, form.mlp_norm)
        elif form.mlp_norm is not None:
            source = self._add_norm(layer, form.mlp_norm)
        self._mlp(layer, source)
        self._linear(layer, form.down, at.inner, result)
        self._norm_in_place(layer, form.down_norm, result)
        self._addends = [at.delta, at.other] if form.parallel else [at.delta]

    def end(self) -> list[Op]:
        """All of them, and the last addition."""
        self._add_norm(None, None)
        return self.ops

    def _add_norm(self, layer: _Known | None, norm: NormForm | None) -> Tensor:
        """What waits is added to the hidden state; its norm, or the hidden state itself."""
        at, addends = self._at, self._addends
        if norm is not None or addends:
            op = Op(kind=Kind.NORM, k=at.kind.hidden, in_stride=at.x.stride(0), residual=at.x.data_ptr())
            if addends:
                op.input, op.other = addends[0].data_ptr(), addends[1].data_ptr() if len(addends) > 1 else None
                op.scale = 0.0 if self._scale == 1.0 else self._scale
            if norm is not None and layer is not None:
                self._as_norm(op, layer, norm, at.normed)
            self.ops.append(op)
        self._addends = []
        return at.x if norm is None else at.normed

    def _as_norm(self, op: Op, layer: _Known, norm: NormForm, out: Tensor) -> None:
        weight, bias = norm.constants(layer.module.get_submodule(norm.name))
        op.weight, op.bias = self._constant(weight), None if bias is None else self._constant(bias)
        op.out, op.out_stride, op.eps = out.data_ptr(), out.stride(0), norm.eps

    def _norm_in_place(self, layer: _Known, norm: NormForm | None, rows: Tensor, width: int = 0) -> None:
        """Of the first `width` elements, all by default."""
        if norm is not None:
            op = Op(kind=Kind.NORM, k=width or self._at.kind.hidden, in_stride=rows.stride(0), residual=rows.data_ptr())
            self._as_norm(op, layer, norm, rows)
            self.ops.append(op)

    def _attention(self, layer: _Known, source: Tensor) -> None:
        at, form, manner, first = self._at, layer.form, layer.manner, 0
        for name in form.qkv:
            self._linear(layer, name, source, at.qkv[:, first:])
            first += layer.linear[name].out_features
        rope = Op(kind=Kind.ROPE_KV, layer=layer.index, out=at.qkv.data_ptr(), out_stride=at.qkv.stride(0))
        if form.rotation is not None:
            rope.input, rope.n = at.angles.data_ptr(), int(form.rotation.pairs)
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

    def _heads_norm(self, layer: _Known, norms: tuple[NormForm, NormForm]) -> Tensor:
        weights = [norm.constants(layer.module.get_submodule(norm.name))[0] for norm in norms]
        heads = self._at.kind.heads
        counts = (heads.heads, heads.kv_heads)
        return torch.cat([each.expand(n, -1) for each, n in zip(weights, counts, strict=True)]).contiguous()

    def _mlp(self, layer: _Known, source: Tensor) -> None:
        """Up to what the layer down takes: a gate's outputs, and in their places the others times their activation."""
        at, form = self._at, layer.form
        if not form.gated:
            self._linear(layer, form.up[0], source, at.inner, _ALONE[form.activation])
            return
        self._linear(layer, form.up[0], source, at.inner, outputs=at.kind.inner)
        self._linear(layer, form.up[-1], source, at.inner, _TIMES[form.activation], outputs=at.kind.inner)
        op, packed = self.ops[-1], layer.linear[form.up[0]]
        op.other = op.out
        if len(form.up) == 1:  # the second half of its outputs
            op.weight += packed.panels.numel() // 2
            op.bias = None if packed.bias is None else packed.bias[at.kind.inner :].data_ptr()

    def _linear(
        self,
        layer: _Known,
        name: str,
        rows: Tensor,
        out: Tensor,
        epilogue: Epilogue = Epilogue.PLAIN,
        outputs: int = 0,
    ) -> None:
        """`outputs`: so many, the first ones; all by default."""
        op = layer.linear[name].op(epilogue)
        assert op.in_stride == rows.stride(0)
        op.n = outputs or op.n
        op.input, op.out, op.out_stride = rows.data_ptr(), out.data_ptr(), out.stride(0)
        self.ops.append(op)

    def _constant(self, values: Tensor) -> int:
        self.kept.append(values)
        return values.data_ptr()


class _Run:
    """The tape of a run of layers."""

    def __init__(
        self, native: Native, shape: Shape, rows: _Rows, composer: _Composer, rotations: list[Rotation]
    ) -> None:
        self._team = native.team
        self._rotation = rotations[0] if rotations else None
        assert len(set(rotations)) <= 1, "layers that are given the same angles turn by them in one way"
        self._rows = rows
        self._ops = composer.end()
        self._kept = composer.kept
        self._tape = Tape(native.library, shape, self._ops)

    def __call__(self, step: Step, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """x [1, T, H] of the step's tokens. Raises StepError."""
        at, (_, count, width) = self._rows, x.shape
        at.x[:count, :width] = x[0]
        if rotation is not None and self._rotation is not None:
            half = at.kind.rotary_dim // 2
            for angles, values in zip(torch.split(at.angles[:count], half, dim=1), rotation, strict=True):
                angles.copy_(self._rotation.once(values[0]))
        self._tape.begin(self._team, step)
        self._tape.run_ops(self._team, 0, len(self._ops))
        return torch.empty_like(x).copy_(at.x[None, :count, :width])
