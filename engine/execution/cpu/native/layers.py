"""Known decoder layers of transformers modules in the C++ library; each run of adjacent layers is one tape.

The first layer of a run takes the hidden state and returns the result of the last; the others return their input. The
modules remain as the twin: the tape is derived from their computation, shares their linear layers, and they run steps
with adapters.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.execution.cpu.native.attention import ANY_TOKEN, FIRST_TOKENS, HeadShape, NativeAttention
from engine.execution.cpu.native.layer_tape import Composer, KnownLayer, LayerKind, Rows
from engine.execution.cpu.native.library import TYPES, Tape, TapeShape, TapeStep, activation_dtype
from engine.execution.cpu.native.linear import PANEL, Native, NativeLinear
from engine.execution.cpu.native.tape import shape_over
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.models.known_layers import LayerForm, NormForm, Rotation, rotation_of
from engine.models.transformers_model import Look, TransformersModel


class NativeLayers:
    """A `RunLayer` for the step begun by `attention`, over the runs of layers from `known_groups`."""

    def __init__(
        self,
        native: Native,
        groups: list[list[KnownLayer]],
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
        self._groups = groups
        self._inside = {each.index for group in self._groups for each in group[1:]}
        self._runs: dict[int, _Run] = {}
        self._max_tokens = 0

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
        rows: dict[LayerKind, Rows] = {}
        level = self._native.level_for(self._pool.dtype)
        for group in self._groups:
            kind = group[0].kind
            if kind not in rows:
                rows[kind] = Rows(kind, max_tokens, activation_dtype(level))
            angles = torch.zeros(max_tokens, kind.rotary_dim)
            ops = Composer(rows[kind])
            for layer in group:
                ops.add(layer, angles)
            rotations = [layer.form.rotation for layer in group if layer.form.rotation is not None]
            frequencies = angles.data_ptr() if kind.rotary_dim else None  # a placeholder: modules supply the angles
            shape = shape_over(
                self._pool, self._table, self._max_model_len, **kind.heads._asdict(), rotary_dim=kind.rotary_dim,
                hidden=kind.hidden, vocab=ANY_TOKEN, max_tokens=max_tokens, rounds_once=int(kind.rounds_once),
                rotary_scaling=1.0, level=level, type=TYPES[self._pool.dtype], inverse_frequencies=frequencies,
            )  # fmt: skip
            self._runs[group[0].index] = _Run(self._native, shape, rows[kind], ops, angles, rotations)


def known_groups(model: TransformersModel) -> list[list[KnownLayer]]:
    """Return the known layers, grouped into runs of adjacent layers of the same kind."""
    groups: list[list[KnownLayer]] = []
    last: KnownLayer | None = None
    for index, (look, form) in enumerate(zip(model.look(), model.layer_forms(), strict=True)):
        known = None if isinstance(form, str) else _known(look, form, model.like.dtype, index)
        if known is not None:
            assert look.given is not None
            joins = last is not None and look.given.follows and known.goes_with(last)
            groups[-1:] = [[*groups[-1], known]] if joins else [*groups[-1:], [known]]
        last = known
    return groups


def _known(look: Look, form: LayerForm, dtype: torch.dtype, index: int) -> KnownLayer | None:
    """Return the layer if the library supports all of it, else None."""
    module, given, seen = look.layer, look.given, look.seen
    assert module is not None and given is not None
    linear: dict[str, Any] = {name: getattr(module.get_submodule(name), "layer", None) for name in form.linear}
    rms = {norm.once for norm in form.norms if not norm.layer}
    if given.x.dtype != dtype or len(rms) > 1 or not all(_is_plain(each, dtype) for each in linear.values()):
        return None
    if form.qk_norms is not None and not _norms_heads(form.qk_norms, last=form.qk_norms_last):
        return None
    inner = linear[form.down].in_features
    if form.gated and len(form.up) == 1 and inner % PANEL:
        return None
    scale = seen.widths[0] ** -0.5 if seen.manner.scale is None else seen.manner.scale
    rotation = None if given.rotation is None else given.rotation[0]
    kind = LayerKind(
        HeadShape(seen.heads, seen.kv_heads, *seen.widths, scale), given.x.shape[2], inner,
        0 if rotation is None else rotation.shape[2], any(rms),
    )  # fmt: skip
    parts = [linear[name] for name in form.qkv]
    joined = NativeLinear.joined(parts)
    return KnownLayer(
        index, kind, form, module, seen.manner, linear, tuple(parts) if joined is None else (joined,), rotation
    )


def _norms_heads(norms: tuple[NormForm, NormForm], *, last: bool) -> bool:
    """Return whether the norms of queries and keys are supported: per head in the rotation, or per row before it."""
    first, second = norms
    return not last if not first.heads else not first.layer and first.eps == second.eps


def _is_plain(layer: object, dtype: torch.dtype) -> bool:
    """Return whether a tape of this type can read the layer's weight as it is."""
    return type(layer) is NativeLinear and layer.dtype == dtype and not layer.gated


class _Run:
    """Tape of a run of layers."""

    def __init__(
        self,
        native: Native,
        shape: TapeShape,
        rows: Rows,
        composer: Composer,
        angles: Tensor,
        rotations: list[Rotation],
    ) -> None:
        self._team = native.team
        self._rotation = rotations[0] if rotations else None
        assert len(set(rotations)) <= 1, "layers with the same angles must share the layout of rotation"
        self._rows, self._angles = rows, angles
        self._ops = composer.end()
        self._kept = composer.kept
        self._tape = Tape(native.library, shape, self._ops)

    def __call__(self, step: TapeStep, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Run x [1, T, H] of the step's tokens through the layers. Raises StepError."""
        at, (_, count, width) = self._rows, x.shape
        at.x[:count, :width] = x[0]
        if rotation is not None and self._rotation is not None:
            half = at.kind.rotary_dim // 2
            for angles, values in zip(torch.split(self._angles[:count], half, dim=1), rotation, strict=True):
                angles.copy_(self._rotation.once(values[0]))
        self._tape.begin(self._team, step)
        self._tape.run_ops(self._team, 0, len(self._ops))
        return torch.empty_like(x).copy_(at.x[None, :count, :width])
