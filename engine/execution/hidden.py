"""Steps from hidden state: rows whose past is stored, in whole or in part, as attention inputs (Apt-Serve §4).

A step assigns two scratch slices to every hidden block of its rows and enters them in the K and V tables of the rows,
so that attention needs no special case. Before a layer attends, the device stores the input of new tokens in their
hidden blocks and projects K and V of past tokens into the scratch; attention writes K and V of new tokens there. All
layers use the same slices in turn. A block shared by several rows is projected once.
"""

import numpy as np

from engine.arrays import IntArray
from engine.execution.pool import SLICES_PER_SCRATCH_BLOCK
from engine.execution.rows import RowTable


def has_hidden(rows: RowTable, chunks: IntArray) -> bool:
    """Return whether any row of the chunks [n, >=3] has a block of hidden state."""
    return bool(rows.num_hidden[chunks[:, 0]].any())


class ScratchPlan:
    """Hidden blocks of a step's rows, and the scratch slices of their K and V.

    Attributes:
        places: [m], chunk of every hidden block in use.
        blocks: [m], its block number.
        rows: [m], its row.
        units: [d], distinct hidden units.
        first: [d], index into `places` of a block of each unit.
        scratch: [m], index into `units`.
    """

    def __init__(self, rows: RowTable, chunks: IntArray, scratch_blocks: int) -> None:
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
        """Return index into `units`, and offset in the block, of the tokens [t] whose K and V must be projected."""
        # A shared block is full for all its rows, so its first occurrence represents all.
        begins = self.blocks[self.first] * block_size
        past = np.clip(chunks[self.places[self.first], 1] - begins, 0, block_size)
        index = np.repeat(np.arange(len(past)), past)
        return index, np.arange(len(index)) - np.repeat(np.cumsum(past) - past, past)

    def enter(self, rows: RowTable) -> None:
        """Point the K and V tables at scratch."""
        entries = SLICES_PER_SCRATCH_BLOCK * self.scratch
        rows.point(self.rows, self.blocks, -1 - entries, -2 - entries)

    def beyond(self, rows: RowTable, chunks: IntArray) -> IntArray:
        """Return the scratch entries of blocks that are not full after the chunks [n, >=3] have run."""
        ends = chunks[self.places, 1] + chunks[self.places, 2]
        partial = ends < (self.blocks + 1) * rows.block_size
        where = (self.rows[partial], self.blocks[partial])
        entries: IntArray = np.concatenate((rows.k_table[where], rows.v_table[where]))
        return entries
