"""All of a step of transformers' modules as one tape: from token ids to logits, where that is known of them.

Twin: the modules themselves, which run what is not known, and steps with adapters. What is in front of the layers and
behind them is read by `engine.models.ends_reader`; nothing of transformers is called here.
"""

from typing import Self

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.native.attention import FIRST_TOKENS
from engine.execution.cpu.native.binding import step_over
from engine.execution.cpu.native.layer_tape import Composer, KnownLayer, Rows
from engine.execution.cpu.native.layers import is_plain, layer_shape
from engine.execution.cpu.native.library import Kind, Op, Tape, activation_dtype
from engine.execution.cpu.native.linear import Native, NativeLinear
from engine.execution.cpu.native.model import MANY_A_SAMPLE, Sampled
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.models.ends_reader import Angles, Ends
from engine.models.transformers_model import TransformersModel


class NativeWhole:
    """One step at a time. `max_model_len`: the engine's longest context."""

    def __init__(
        self,
        native: Native,
        model: TransformersModel,
        layers: list[KnownLayer],
        ends: Ends,
        pool: UnitPool,
        rows: RowTable,
        max_model_len: int,
    ) -> None:
        self._native = native
        self._modules = model.module
        self._layers, self._ends = layers, ends
        self._pool, self._table = pool, rows
        self._max_model_len = max_model_len
        self._level = native.level_for(pool.dtype)
        self._embedding: Tensor = self._modules.get_submodule(ends.embedding).weight.contiguous()
        self._head: NativeLinear = self._modules.get_submodule(ends.head).layer
        self._best = np.empty(rows.num_rows, dtype=np.float32)
        self._best_ids = np.empty(rows.num_rows, dtype=np.int64)
        self._logits = torch.empty(0, self._head.out_features)
        self._make_room(FIRST_TOKENS)

    @classmethod
    def of(
        cls,
        native: Native,
        model: TransformersModel,
        groups: list[list[KnownLayer]],
        pool: UnitPool,
        rows: RowTable,
        max_model_len: int,
    ) -> Self | None:
        """Of a model whose every layer is in these groups, if it has nothing else that is not known."""
        layers = [layer for group in groups for layer in group]
        if len(layers) != model.shape.num_layers or len({layer.kind for layer in layers}) != 1:
            return None
        ends, dtype = model.ends(), pool.dtype
        if isinstance(ends, str) or not is_plain(model.module.get_submodule(ends.head).layer, dtype):
            return None
        rounds = ends.norm.layer or ends.norm.once == layers[0].kind.rounds_once
        turns = all(layer.form.rotation is None or ends.angles[layer.index] is not None for layer in layers)
        same_type = model.module.get_submodule(ends.embedding).weight.dtype == dtype
        if not (rounds and turns and same_type):
            return None
        return cls(native, model, layers, ends, pool, rows, max_model_len)

    def run(self, chunks: IntArray, *, logits: bool) -> Sampled:
        """Run chunks [n, 4] (row, start, length, sample). Raises StepError."""
        chunks = np.ascontiguousarray(chunks, dtype=np.int64)
        tokens, count = int(chunks[:, 2].sum()), int(np.count_nonzero(chunks[:, 3]))
        if tokens > self._max_tokens:
            self._make_room(max(tokens, 2 * self._max_tokens))
        if logits and not len(self._logits):
            self._logits = self._logits.new_empty(self._table.num_rows, self._head.out_features)
        kept = self._logits[:count] if logits and count else None
        step = step_over(
            self._pool,
            self._table,
            chunks,
            logits_stride=self._head.out_features,
            logits=None if kept is None else kept.data_ptr(),
            best=self._best.ctypes.data,
            best_id=self._best_ids.ctypes.data,
        )
        tape = self._lean if tokens >= MANY_A_SAMPLE * count else self._tape
        tape.run(self._native.team, step)
        return Sampled(self._best[:count], self._best_ids[:count], kept)

    def _make_room(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        kind, dtype = self._layers[0].kind, activation_dtype(self._level)
        self._rows, self._few = Rows(kind, max_tokens, dtype), Rows(kind, self._table.num_rows, dtype)
        self._kept: list[Tensor] = []
        self._tape, self._lean = (self._compose(max_tokens, alone) for alone in (False, True))

    def _compose(self, max_tokens: int, alone: bool) -> Tape:
        """`alone`: the last layer goes on with the tokens that sample."""
        ends, ops = self._ends, Composer(self._rows)
        ops.ops.append(self._embed())
        angles = self._add_angles(ops, max_tokens)
        for layer in self._layers:
            is_last = layer is self._layers[-1]
            ops.add(layer, angles.get(ends.angles[layer.index]), self._few if alone and is_last else None)
        logits = ops.end_with(ends.norm, self._modules, self._head, self._few.normed)
        logits.softcap, logits.scale = ends.softcap, _factor(ends.logit_scale)
        self._kept += [*ops.kept, *angles.values()]
        frequencies = next((each.frequencies.data_ptr() for each in angles if each is not None), None)
        shape = layer_shape(
            self._layers[0].kind, self._level, self._pool, self._table, self._max_model_len, max_tokens,
            len(self._embedding), frequencies,
        )  # fmt: skip
        return Tape(self._native.library, shape, ops.ops)

    def _embed(self) -> Op:
        op = Op(kind=Kind.EMBED, weight=self._embedding.data_ptr(), scale=_factor(self._ends.embedding_scale))
        op.out, op.out_stride = self._rows.x.data_ptr(), self._rows.x.stride(0)
        return op

    def _add_angles(self, ops: Composer, max_tokens: int) -> dict[Angles | None, Tensor]:
        """Where they are, once the operations are run."""
        found: dict[Angles | None, Tensor] = {}
        for each in set(self._ends.angles) - {None}:
            assert each is not None
            found[each] = torch.zeros(max_tokens, 2 * len(each.frequencies))
            source, out = each.frequencies.data_ptr(), found[each].data_ptr()
            ops.ops.append(Op(kind=Kind.ANGLES, input=source, scale=each.scaling, out=out))
        return found


def _factor(scale: float) -> float:
    """As operations have it: 0 for none."""
    return 0.0 if scale == 1.0 else scale
