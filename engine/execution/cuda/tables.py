"""The device's copy of what its kernels need of the rows: block tables, and the token that each row sampled last."""

import numpy as np
import torch
from torch import Tensor

from engine.arrays import Int32Array, IntArray
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable

_NO_CHANGES = np.zeros(0, dtype=np.int32)


class DeviceTables:
    """`tables [1 to 3, rows, max_blocks]` int32: entries of K, of V unless the pool is paired, and of hidden state
    where there is scratch. One is a unit's first slice, to which a kernel adds its layer, or below zero for scratch.
    `pair`: slices from a block's K to its V in a paired pool; 0: of another.
    `last_tokens [rows + 1]` int32: the token sampled last; the place behind the last row takes what padding writes."""

    def __init__(self, rows: RowTable, pool: UnitPool) -> None:
        _, num_rows, max_blocks = rows.tables.shape
        shape = (1 if pool.paired else 3 if pool.scratch_blocks else 2, num_rows, max_blocks)
        self.pair = pool.num_layers if pool.paired else 0
        self.tables = torch.zeros(shape, dtype=torch.int32, device=pool.device)
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=pool.device)
        self._rows, self._num_layers = rows, pool.num_layers
        rows.track_changes()

    @property
    def of_kv(self) -> tuple[Tensor, Tensor | None]:
        """As kernels take them: K's, and V's where they are not K's."""
        return self.tables[0], None if self.pair else self.tables[1]

    def take_changes(self) -> tuple[Int32Array, Int32Array]:
        """What changed in the rows' tables since the last call: flat places [n] in `tables`, and their entries [n]."""
        blocks, count = self._rows.take_changes(), len(self.tables)
        if not len(blocks):
            return _NO_CHANGES, _NO_CHANGES
        units = self._rows.tables.reshape(3, -1)[:, blocks]
        assert not self.pair or (units[1] == units[0] + 1).all(), "V does not lie behind its K"
        entries = self._entries_of(units[:count])
        places = blocks + np.arange(count)[:, None] * self.tables[0].numel()
        return places.ravel().astype(np.int32), entries.ravel().astype(np.int32)

    def relaid(self, num_layers: int) -> None:
        """Units have slices of so many layers from now on: write all entries anew. Waits for the device."""
        self._num_layers = num_layers
        self._rows.take_changes()
        entries = self._entries_of(self._rows.tables[: len(self.tables)]).astype(np.int32)
        self.tables.copy_(torch.from_numpy(entries))

    def _entries_of(self, units: IntArray) -> IntArray:
        entries: IntArray = np.where(units < 0, units, units * self._num_layers)
        return entries
