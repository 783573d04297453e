"""Hidden state on a GPU: projected to K and V once (restore), or in every layer of a step (Apt-Serve §4).

Kernels address tokens by row and position. A step assigns two scratch slices to each hidden block of its rows and
enters them in the K and V tables (see `ScratchPlan`). Before a layer attends, the input of new tokens is
stored; past tokens are gathered, projected, and written to scratch by the kernel that writes new K and V. A restore
does the same for rows of a temporary table. Such steps run without a graph, because the number of projected tokens
varies.
"""

from typing import Self

import numpy as np
from torch import Tensor

from engine.arrays import Int32Array, IntArray
from engine.execution.cuda.buffers import StepBuffers, StepInputs, send
from engine.execution.cuda.forward import Forward
from engine.execution.layout import Layout
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable, ScratchPlan
from engine.limits import Limits

PIECE = 2048
"""Maximum number of tokens per projection, enough for the full rate of matrix products and small beside a step."""


class Projection:
    """Projects hidden state in the pool to K and V."""

    def __init__(self, forward: Forward, pool: UnitPool, limits: Limits) -> None:
        self._forward = forward
        self._pool = pool
        self._piece = min(PIECE, limits.max_num_batched_tokens)
        self._max_model_len = limits.max_model_len

    def __call__(self, layer: int, tables: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Project tokens at `positions [t]` of `rows [t]` (int32) from their hidden state to their K and V, both found
        in `tables [3, rows, blocks]`."""
        for first in range(0, len(rows), self._piece):
            part = slice(first, first + self._piece)
            self._forward.project(layer, tables, rows[part], positions[part])

    def restore(self, units: IntArray, starts: IntArray) -> None:
        """Restore blocks [n] with `units [n, 3]` (hidden state, K, V) and first positions `starts`.

        All cells of a partial block are projected; unused ones are overwritten before they are read.
        """
        pool, device = self._pool, self._pool.device
        rows, table = _table_of(units * pool.num_layers, starts // pool.block_size)
        positions = (starts[:, None] + np.arange(pool.block_size)).reshape(-1)
        exist = positions < self._max_model_len  # the last block may exceed the longest context
        tokens = np.stack((np.repeat(rows, pool.block_size), positions))[:, exist].astype(np.int32)
        tables, (token_rows, token_positions) = send(table, device), send(tokens, device)
        for layer in range(pool.num_layers):
            self(layer, tables, token_rows, token_positions)


class StepHidden:
    """Hidden state of one step; called with the attention input of each layer, before attention.

    `inputs.stored`: rows of new tokens stored as hidden state, -1 for others. `past [2, t]`: rows and positions of the
    tokens to project.
    """

    def __init__(self, projection: Projection, forward: Forward, inputs: StepInputs, past: Int32Array) -> None:
        self._projection, self._forward, self._inputs = projection, forward, inputs
        self._past = send(past, inputs.positions.device) if past.size else None

    @classmethod
    def of(
        cls, projection: Projection, forward: Forward, buffers: StepBuffers, inputs: StepInputs, rows: RowTable,
        layout: Layout, scratch_blocks: int,
    ) -> Self:  # fmt: skip
        """Plan the step: write `buffers` and point the tables of `rows` at scratch, before their changes are sent."""
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
        """Return a plan that runs all operations without a request."""
        return cls(projection, forward, inputs, np.array([[-1], [0]], dtype=np.int32))

    def __call__(self, layer: int, x: Tensor) -> None:
        """Store x [T, H] of new tokens in hidden blocks, and project the stored past."""
        tables, inputs = self._forward.tables, self._inputs
        self._forward.store(layer, tables, x, inputs.stored, inputs.positions)
        if self._past is not None:
            self._projection(layer, tables, *self._past)


def _table_of(entries: IntArray, blocks: IntArray) -> tuple[IntArray, Int32Array]:
    """Return a table [3, rows, blocks] (K, V, hidden state) and the row of each block.

    `entries [n, 3]` (hidden state, K, V) are placed in columns `blocks`; there are as many rows as the most frequent
    column has entries.
    """
    order = np.argsort(blocks, kind="stable")
    rows = np.empty_like(blocks)
    rows[order] = np.arange(len(blocks)) - np.searchsorted(blocks[order], blocks[order])
    table = np.zeros((3, int(rows.max()) + 1, int(blocks.max()) + 1), dtype=np.int32)
    table[:, rows, blocks] = entries[:, (1, 2, 0)].T
    return rows, table
