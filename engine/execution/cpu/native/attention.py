"""Attention of transformers modules by the C++ library: takes q, k and v of a layer and returns the result.

Twin: `engine.execution.cpu.device.PagedAttention`. Layers may differ in heads, widths of K and V, and variants of
attention. Each shape of heads has its own tape, with three operations per layer (write cells, attend queries, merge
parts of split contexts), added when the layer is first seen. A step is planned once per tape.
"""

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.native.library import TYPES, Kind, Op, Tape, TapeStep, activation_dtype
from engine.execution.cpu.native.linear import Native, rows_for, stride_of
from engine.execution.cpu.native.tape import shape_over, step_over
from engine.execution.pool import UnitPool
from engine.execution.rows import Layout, RowTable
from engine.models.attention import PLAIN, HeadSizes, Manner

FIRST_TOKENS = 512
"""Initial rows of the buffers; they grow when a step needs more."""

ANY_TOKEN = 2**31
"""Vocabulary size of modules, whose tokens the library does not look up."""


class NativeAttention:
    """A StepAttention over a pool in the model's type. `max_model_len`: longest context."""

    def __init__(self, native: Native, pool: UnitPool, rows: RowTable, max_model_len: int) -> None:
        self._native = native
        self._pool = pool
        self._rows = rows
        self._max_model_len = max_model_len
        self._tapes: dict[tuple[HeadSizes, float], _HeadsTape] = {}
        self._chunks: IntArray = np.empty((0, 4), dtype=np.int64)
        self._step = TapeStep()

    def begin(self, chunks: IntArray) -> Layout:
        self._chunks = np.ascontiguousarray(chunks, dtype=np.int64)
        self._step = step_over(self._pool, self._rows, self._chunks)
        return Layout.of(chunks, np.arange(len(chunks)))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, manner: Manner = PLAIN) -> Tensor:
        """See StepAttention. Raises StepError."""
        scale = q.shape[2] ** -0.5 if manner.scale is None else manner.scale
        heads = HeadSizes.seen(q, k, v)
        tape = self._tapes.get((heads, scale))
        if tape is None or tape.max_tokens < len(q):
            room = max(len(q), 2 * tape.max_tokens if tape else FIRST_TOKENS)
            tape = _HeadsTape(self._native, self._pool, self._rows, self._max_model_len, heads, scale, room)
            self._tapes[heads, scale] = tape
        return tape.attend(self._step, layer, (q, k, v), manner)


class _HeadsTape:
    """Tape of the layers with the same shape of heads, for steps of at most `max_tokens`."""

    def __init__(
        self,
        native: Native,
        pool: UnitPool,
        rows: RowTable,
        max_model_len: int,
        heads: HeadSizes,
        scale: float,
        max_tokens: int,
    ) -> None:
        self.max_tokens = max_tokens
        self._native = native
        self._heads = heads
        level = native.level_for(pool.dtype)
        self._shape = shape_over(
            pool, rows, max_model_len, **heads._asdict(), scale=scale, hidden=heads.heads * heads.head_dim,
            vocab=ANY_TOKEN, max_tokens=max_tokens, level=level, type=TYPES[pool.dtype],
        )  # fmt: skip
        widths = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim, heads.kv_heads * heads.value_dim)
        kind, count = activation_dtype(level), rows_for(max_tokens)
        self._rows = torch.zeros(count, stride_of(sum(widths)), dtype=kind)
        self._parts = torch.split(self._rows[:, : sum(widths)], list(widths), dim=1)  # q, k, v
        self._gathered = torch.zeros(count, stride_of(heads.heads * heads.value_dim), dtype=kind)
        self._ops: list[Op] = []
        self._places: dict[tuple[object, ...], int] = {}
        self._kept: list[Tensor] = []  # sinks of the modules, and the copies that the tape reads
        self._tape: Tape | None = None
        self._begun: TapeStep | None = None

    def attend(self, step: TapeStep, layer: int, parts: tuple[Tensor, Tensor, Tensor], manner: Manner) -> Tensor:
        """See NativeAttention."""
        what = (layer, manner.reach, manner.softcap, None if manner.sinks is None else id(manner.sinks))
        place = self._places.get(what)
        if place is None:
            place = self._places[what] = len(self._ops)
            self._ops += self._layer(layer, manner)
            self._tape = None
        if self._tape is None:
            self._tape, self._begun = Tape(self._native.library, self._shape, self._ops), None
        if self._begun is not step:
            self._tape.begin(self._native.team, step)
            self._begun = step
        q, count = parts[0], len(parts[0])
        for rows, part in zip(self._parts, parts, strict=True):
            torch.unflatten(rows[:count], 1, part.shape[1:]).copy_(part)
        self._tape.run_ops(self._native.team, place, place + 3)
        width = self._heads.heads * self._heads.value_dim
        return torch.empty(count, width, dtype=q.dtype).copy_(self._gathered[:count, :width])

    def _layer(self, layer: int, manner: Manner) -> list[Op]:
        sinks = None
        if manner.sinks is not None:
            learned = manner.sinks.detach().float().contiguous()
            self._kept += [manner.sinks, learned]
            sinks = learned.data_ptr()
        rows, out = self._rows.data_ptr(), self._gathered.data_ptr()
        in_stride, out_stride = self._rows.stride(0), self._gathered.stride(0)
        attend = Op(kind=Kind.ATTEND, layer=layer, input=rows, in_stride=in_stride, out=out, out_stride=out_stride)
        attend.n, attend.softcap, attend.other = manner.reach, manner.softcap or 0.0, sinks
        return [
            Op(kind=Kind.ROPE_KV, layer=layer, out=rows, out_stride=in_stride),  # no rotation: only writes cells
            attend,
            Op(kind=Kind.MERGE, layer=layer, out=out, out_stride=out_stride, other=sinks),
        ]
