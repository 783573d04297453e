"""Hidden state on a GPU: projected to K and V once (restore), or anew in every layer of a step that runs from it.

The kernels of a step address tokens by row and position; so does everything here. A step gives each hidden block of its
rows two scratch slices and enters them in the K and V tables (`engine.execution.hidden` says how); then, before a layer
attends, the new tokens' input is stored and the past tokens are gathered, multiplied and written to scratch by the same
kernel that writes new K and V. A restore does that for rows of a table that lives as long as the restore. Such
steps run without a graph, because the number of tokens to project differs every time. Apt-Serve §4.
"""

from typing import Self

import numpy as np
from torch import Tensor

from engine.arrays import Int32Array, IntArray
from engine.execution.cuda.buffers import StepBuffers, StepInputs, send
from engine.execution.cuda.forward import Forward
from engine.execution.hidden import ScratchPlan
from engine.execution.layout import Layout
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from predictor.limits import Limits

PIECE = 2048
"""Tokens projected per call at most: enough for the matrix products' full rate, small beside what a step takes."""


class Projection:
    """K and V of tokens whose hidden state is in the pool. `max_tokens` of a step; `max_model_len`: positions."""

    def __init__(self, forward: Forward, pool: UnitPool, limits: Limits) -> None:
        self._forward = forward
        self._pool = pool
        self._piece = min(PIECE, limits.max_num_batched_tokens)
        self._max_model_len = limits.max_model_len

    def __call__(self, layer: int, tables: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Tokens at `positions [t]` of `rows [t]`, both int32: from where `tables [3, rows, blocks]` has their hidden
        state to where it has their K and V."""
        for first in range(0, len(rows), self._piece):
            part = slice(first, first + self._piece)
            self._forward.project(layer, tables, rows[part], positions[part])

    def restore(self, units: IntArray, starts: IntArray) -> None:
        """Blocks [n]: `units [n, 3]` (hidden state, K, V) of tokens that begin at positions `starts`.

        Of a block that is not full all cells are projected: what lies in the others is written before it is read.
        """
        pool, device = self._pool, self._pool.device
        rows, table = _table_of(units * pool.num_layers, starts // pool.block_size)
        positions = (starts[:, None] + np.arange(pool.block_size)).reshape(-1)
        exist = positions < self._max_model_len  # the last block may reach beyond the longest context
        tokens = np.stack((np.repeat(rows, pool.block_size), positions))[:, exist].astype(np.int32)
        tables, (token_rows, token_positions) = send(table, device), send(tokens, device)
        for layer in range(pool.num_layers):
            self(layer, tables, token_rows, token_positions)


class StepHidden:
    """The hidden state of one step; called with each layer's attention input, before attention.

    `inputs.stored`: rows of the new tokens that are kept as hidden state, -1 for all others. `past [2, t]`: rows and
    positions of the tokens to project.
    """

    def __init__(self, projection: Projection, forward: Forward, inputs: StepInputs, past: Int32Array) -> None:
        self._projection, self._forward, self._inputs = projection, forward, inputs
        self._past = send(past, inputs.positions.device) if past.size else None

    @classmethod
    def of(
        cls, projection: Projection, forward: Forward, buffers: StepBuffers, inputs: StepInputs, rows: RowTable,
        layout: Layout, scratch_blocks: int,
    ) -> Self:  # fmt: skip
        """Plan the step: write `buffers`, and point the tables of `rows` at scratch, before their changes are sent."""
        chunks, block_size = layout.chunks, rows.block_size
        is_hidden = rows.is_hidden[layout.token_rows, layout.positions // block_size]
        buffers.fill_stored(np.where(is_hidden, layout.token_rows, -1))
        plan = ScratchPlan(rows, chunks, scratch_blocks)
        plan.enter(rows)
        index, offsets = plan.past_tokens(chunks, block_size)
        members, blocks = plan.rows[plan.first][index], plan.blocks[plan.first][index]
        past = np.stack((members, blocks * block_size + offsets)).astype(np.int32)
        return cls(projection, forward, inputs, past)

    @classmethod
    def padding(cls, projection: Projection, forward: Forward, inputs: StepInputs) -> Self:
        """Everything that a step may do, for no request."""
        return cls(projection, forward, inputs, np.array([[-1], [0]], dtype=np.int32))

    def __call__(self, layer: int, x: Tensor) -> None:
        """Store x [T, H] where it belongs; project what is stored of the past."""
        tables, inputs = self._forward.tables, self._inputs
        self._forward.store(layer, tables, x, inputs.stored, inputs.positions)
        if self._past is not None:
            self._projection(layer, tables, *self._past)


def _table_of(entries: IntArray, blocks: IntArray) -> tuple[IntArray, Int32Array]:
    """A table [3, rows, blocks] (K, V, hidden state) with `entries [n, 3]` (hidden state, K, V) in columns `blocks`,
    and the row of each: as many rows as a column is needed most often."""
    order = np.argsort(blocks, kind="stable")
    rows = np.empty_like(blocks)
    rows[order] = np.arange(len(blocks)) - np.searchsorted(blocks[order], blocks[order])
    table = np.zeros((3, int(rows.max()) + 1, int(blocks.max()) + 1), dtype=np.int32)
    table[:, rows, blocks] = entries[:, (1, 2, 0)].T
    return rows, table
