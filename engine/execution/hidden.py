"""Running from hidden state: rows whose past is, wholly or in part, the input of each attention layer (Apt-Serve §4).

A step gives every hidden block of its rows two scratch slices and enters them in the rows' K and V tables, so that
attention finds K and V there as it does anywhere else. Before a layer attends, `HiddenPlan` stores the new tokens'
input in their hidden blocks and projects K and V of the past tokens into the scratch; the new tokens' own K and V are
written there by attention itself. Every layer uses the same slices in turn. A block that several rows share is
projected once. Decodes of a model without rotary embeddings need no projection (`engine.execution.absorbed`): of
theirs only the new input is stored here.

Knows nothing of requests or models beyond `Heads.kv`.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.execution.attention import Batch
from engine.execution.pool import SLICES_PER_SCRATCH_BLOCK, UnitPool
from engine.execution.rows import IntArray, RowTable
from engine.models.heads import Heads
from engine.models.torch_ops import Rotary

PIECE = 1024
"""Tokens projected per call: enough for the matrix products' full rate, small beside the scratch."""


class HiddenRows(Protocol):
    """What rows tell of their hidden blocks; see `RowTable`."""

    block_size: int

    @property
    def is_hidden(self) -> npt.NDArray[Any]: ...
    @property
    def hidden_table(self) -> npt.NDArray[Any]: ...
    @property
    def num_hidden(self) -> npt.NDArray[Any]: ...


def has_hidden(rows: HiddenRows, chunks: IntArray) -> bool:
    """Whether any row of the chunks [n, >=3] has a block of hidden state."""
    return bool(rows.num_hidden[chunks[:, 0]].any())


class ScratchPlan:
    """The hidden blocks of a step's rows, and the scratch slices that hold their K and V during it.

    `places`, `blocks [m]`: chunk and block number of every hidden block in use; `units [d]`: the distinct hidden units,
    `first [d]` the place in the former where each is found, `scratch [m]` the number of its unit.
    """

    def __init__(self, rows: HiddenRows, chunks: IntArray, scratch_blocks: int) -> None:
        members, ends = chunks[:, 0], chunks[:, 1] + chunks[:, 2]
        counts = -(-ends // rows.block_size)
        width = int(counts.max())
        used = rows.is_hidden[members, :width] & (np.arange(width) < counts[:, None])
        self.places, self.blocks = np.nonzero(used)
        self.rows = members[self.places]
        found = np.unique(rows.hidden_table[self.rows, self.blocks], return_index=True, return_inverse=True)
        self.units, self.first, self.scratch = found
        assert len(self.units) <= scratch_blocks, (
            f"the step reads {len(self.units)} blocks of hidden state, scratch holds {scratch_blocks}"
        )

    def past_tokens(self, chunks: IntArray, block_size: int) -> tuple[IntArray, IntArray]:
        """The tokens [t] whose K and V are to be projected: place of each in `units`, and its offset in the block."""
        # a shared block is full for all who share it, so that its first place speaks for all of them
        begins = self.blocks[self.first] * block_size
        past = np.clip(chunks[self.places[self.first], 1] - begins, 0, block_size)
        index = np.repeat(np.arange(len(past)), past)
        return index, np.arange(len(index)) - np.repeat(np.cumsum(past) - past, past)

    def enter(self, pool: UnitPool, rows: RowTable, chunks: IntArray) -> None:
        """Point the K and V tables at scratch, and clear what is read of it beyond a row's last token."""
        rows.k_table[self.rows, self.blocks] = -1 - SLICES_PER_SCRATCH_BLOCK * self.scratch
        rows.v_table[self.rows, self.blocks] = -2 - SLICES_PER_SCRATCH_BLOCK * self.scratch
        starts, ends = chunks[self.places, 1], chunks[self.places, 1] + chunks[self.places, 2]
        begins = self.blocks * rows.block_size
        partial = np.flatnonzero(ends < begins + rows.block_size)
        where = (self.rows[partial], self.blocks[partial])
        begun = self.units[self.scratch[partial[starts[partial] <= begins[partial]]]]
        pool.clear(np.concatenate((rows.k_table[where], rows.v_table[where], begun)))


class HiddenPlan:
    """One step's hidden state: call it with each layer's attention input, before attention.

    `scratch`, and the `chunks` that it was made for, are those whose past is projected; None: of nobody.
    """

    def __init__(
        self,
        heads: Heads,
        pool: UnitPool,
        rows: RowTable,
        chunks: IntArray,
        scratch: ScratchPlan | None,
        batch: Batch,
    ) -> None:
        self._heads = heads
        self._cells = pool.cells[:, : heads.hidden_size]
        self._pool = pool
        block_size = pool.block_size
        block, offset = batch.positions // block_size, batch.positions % block_size
        new = np.flatnonzero(rows.is_hidden[batch.token_rows, block])
        self._new = torch.from_numpy(new).to(pool.device)
        self._all_new = len(new) == len(batch.positions)
        self._new_cells = pool.cell_ids(rows.hidden_table[batch.token_rows[new], block[new]], offset[new])
        self._pieces: list[tuple[slice, Rotary | None]] = []
        if scratch is not None:
            self._plan_projection(scratch, *scratch.past_tokens(chunks, block_size))

    def _plan_projection(self, scratch: ScratchPlan, index: IntArray, offsets: IntArray) -> None:
        """The past tokens [t]: place of each among the plan's units, and its offset in the block."""
        pool = self._pool
        self._past_cells = pool.cell_ids(scratch.units[index], offsets)
        self._k_cells = pool.scratch_cell_ids(-1 - SLICES_PER_SCRATCH_BLOCK * index, offsets)
        self._v_cells = pool.scratch_cell_ids(-2 - SLICES_PER_SCRATCH_BLOCK * index, offsets)
        begins = scratch.blocks[scratch.first] * pool.block_size
        positions = torch.from_numpy(begins[index] + offsets).to(pool.device)
        self._pieces = [
            (slice(first, first + PIECE), self._heads.rotary(positions[first : first + PIECE]))
            for first in range(0, len(index), PIECE)
        ]

    def __call__(self, layer: int, x: Tensor) -> None:
        """Store x [T, H] where it belongs, project what is stored of the past."""
        if self._new.shape[0]:
            fresh = x if self._all_new else x.index_select(0, self._new)
            self._cells.index_copy_(0, self._new_cells[layer], fresh)
        for piece, rotary in self._pieces:
            self._project(layer, piece, rotary)

    def _project(self, layer: int, piece: slice, rotary: Rotary | None) -> None:
        past = self._cells.index_select(0, self._past_cells[layer, piece])
        k, v = self._heads.kv(layer, past, rotary)
        for cells, values in ((self._k_cells, k), (self._v_cells, v)):
            self._pool.cells.index_copy_(0, cells[piece], values.reshape(len(values), -1))
