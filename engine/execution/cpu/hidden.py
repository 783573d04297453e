"""Hidden state in torch operators; see `ScratchPlan`."""

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.layout import Layout
from engine.execution.pool import UnitPool
from engine.execution.rows import SLICES_PER_SCRATCH_BLOCK, RowTable, ScratchPlan
from engine.models.attention import HeadProjection
from engine.models.torch_ops import Rotary
from engine.models.weights import LayerSource

PIECE = 1024
"""Tokens projected per call, enough for the full rate of matrix products and few compared with the scratch."""


class HiddenPlan:
    """Hidden state of one step; called with the attention input of each layer, before attention.

    `scratch` is the plan of the step's `chunks [n, >=3]`.
    """

    def __init__(
        self,
        heads: HeadProjection,
        pool: UnitPool,
        rows: RowTable,
        chunks: IntArray,
        scratch: ScratchPlan,
        layout: Layout,
    ) -> None:
        self._heads = heads
        self._cells = pool.cells[:, : heads.hidden_size]
        self._pool = pool
        block_size = pool.block_size
        block, offset = layout.positions // block_size, layout.positions % block_size
        new = np.flatnonzero(rows.is_hidden[layout.token_rows, block])
        self._new = torch.from_numpy(new).to(pool.device)
        self._all_new = len(new) == len(layout.positions)
        self._new_cells = pool.cell_ids(rows.hidden_table[layout.token_rows[new], block[new]], offset[new])
        index, offsets = scratch.past_tokens(chunks, block_size)
        self._past_cells = pool.cell_ids(scratch.units[index], offsets)
        self._k_cells = pool.scratch_cell_ids(-1 - SLICES_PER_SCRATCH_BLOCK * index, offsets)
        self._v_cells = pool.scratch_cell_ids(-2 - SLICES_PER_SCRATCH_BLOCK * index, offsets)
        begins = scratch.blocks[scratch.first] * pool.block_size
        positions = torch.from_numpy(begins[index] + offsets).to(pool.device)
        pieces = (slice(first, first + PIECE) for first in range(0, len(index), PIECE))
        self._pieces = [(piece, heads.rotary(positions[piece])) for piece in pieces]

    def __call__(self, layer: int, x: Tensor) -> None:
        """Store x [T, H] of new tokens in hidden blocks, and project the stored past."""
        if self._new.shape[0]:
            fresh = x if self._all_new else x.index_select(0, self._new)
            self._cells.index_copy_(0, self._new_cells[layer], fresh)
        for piece, rotary in self._pieces:
            self._project(layer, piece, rotary[layer])

    def _project(self, layer: int, piece: slice, rotary: Rotary | None) -> None:
        past = self._cells.index_select(0, self._past_cells[layer, piece])
        k, v = self._heads.kv(layer, past, rotary)
        self._pool.cells.index_copy_(0, self._v_cells[piece], v.reshape(len(v), -1))
        self._pool.cells.index_copy_(0, self._k_cells[piece], k.reshape(len(k), -1))


def restore(heads: HeadProjection, pool: UnitPool, layers: LayerSource, units: IntArray, starts: IntArray) -> None:
    """Project blocks [n] once; `units [n, 3]` and `starts [n]` as in CacheMover.

    Unused cells of a partial block hold zeros, whose K and V are finite. There is one pass over the layers, so that
    streamed layers are read once.
    """
    per_call = max(1, PIECE // pool.block_size)
    parts = []
    for first in range(0, len(units), per_call):
        part = units[first : first + per_call]
        positions = (starts[first : first + per_call, None] + np.arange(pool.block_size)).reshape(-1)
        rotary = heads.rotary(torch.from_numpy(positions).to(pool.device))
        parts.append(([pool.slice_ids(part[:, column]) for column in range(3)], rotary, len(part)))
    for layer in range(pool.num_layers):
        with layers.use(layer) as stored:
            if layer in layers.streamed:
                heads.hold(layer, stored)
            for (sources, k_targets, v_targets), rotary, count in parts:
                cells = pool.slices.index_select(0, sources[layer]).view(count * pool.block_size, -1)
                k, v = heads.kv(layer, cells[:, : heads.hidden_size], rotary[layer])
                pool.slices.index_copy_(0, k_targets[layer], k.reshape(count, -1))
                pool.slices.index_copy_(0, v_targets[layer], v.reshape(count, -1))
