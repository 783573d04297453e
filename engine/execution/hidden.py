"""Running from hidden state: rows whose past is, wholly or in part, the input of each attention layer (Apt-Serve §4).

A step gives every hidden block of its rows two scratch slices and enters them in the rows' K and V tables, so that
attention finds K and V there as it does anywhere else. Before a layer attends, the device stores the new tokens' input
in their hidden blocks and projects K and V of the past tokens into the scratch; the new tokens' own K and V are written
there by attention itself. Every layer uses the same slices in turn. A block that several rows share is projected once.

Knows nothing of requests or models.
"""

import numpy as np

from engine.arrays import IntArray
from engine.execution.pool import SLICES_PER_SCRATCH_BLOCK
from engine.execution.rows import RowTable


def has_hidden(rows: RowTable, chunks: IntArray) -> bool:
    """Whether any row of the chunks [n, >=3] has a block of hidden state."""
    return bool(rows.num_hidden[chunks[:, 0]].any())


class ScratchPlan:
    """The hidden blocks of a step's rows, and the scratch slices that hold their K and V during it.

    `places`, `blocks [m]`: chunk and block number of every hidden block in use; `units [d]`: the distinct hidden units,
    `first [d]` the place in the former where each is found, `scratch [m]` the number of its unit.
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
        """The tokens [t] whose K and V are to be projected: place of each in `units`, and its offset in the block."""
        # a shared block is full for all who share it, so that its first place speaks for all of them
        begins = self.blocks[self.first] * block_size
        past = np.clip(chunks[self.places[self.first], 1] - begins, 0, block_size)
        index = np.repeat(np.arange(len(past)), past)
        return index, np.arange(len(index)) - np.repeat(np.cumsum(past) - past, past)

    def enter(self, rows: RowTable) -> None:
        """Point the K and V tables at scratch."""
        entries = SLICES_PER_SCRATCH_BLOCK * self.scratch
        rows.point(self.rows, self.blocks, -1 - entries, -2 - entries)

    def beyond(self, rows: RowTable, chunks: IntArray) -> IntArray:
        """Entries of scratch that are not full when the chunks [n, >=3] have run."""
        ends = chunks[self.places, 1] + chunks[self.places, 2]
        partial = ends < (self.blocks + 1) * rows.block_size
        where = (self.rows[partial], self.blocks[partial])
        entries: IntArray = np.concatenate((rows.k_table[where], rows.v_table[where]))
        return entries
