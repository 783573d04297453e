"""Device copies of row data for kernels: block tables, and the last sampled token of each row."""

import numpy as np
import torch
from torch import Tensor

from engine.arrays import Int32Array, IntArray
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.models.attention import PoolView

_NO_CHANGES = np.zeros(0, dtype=np.int32)


class DeviceTables:
    """Tables on the device.

    Attributes:
        tables: [1 to 3, rows, max_blocks] int32, entries of K, of V unless the pool is paired, and of hidden state if
            there is scratch. An entry is the first slice of a unit, to which kernels add the layer, or negative for
            scratch.
        pair: Slices from K to V of a block in a paired pool; else 0.
        last_tokens: [rows + 1] int32, the last sampled token of each row; padding writes to the additional entry.
    """

    def __init__(self, rows: RowTable, pool: UnitPool) -> None:
        _, num_rows, max_blocks = rows.tables.shape
        shape = (1 if pool.paired else 3 if pool.scratch_blocks else 2, num_rows, max_blocks)
        self.pair = pool.num_layers if pool.paired else 0
        self.tables = torch.zeros(shape, dtype=torch.int32, device=pool.device)
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=pool.device)
        self._rows, self._num_layers, self._scratch_base = rows, pool.num_layers, pool.scratch_base
        rows.track_changes()

    def view(self, cells: Tensor) -> PoolView:
        """Return the pool with these cells [slices, block_size, kv_heads, head_dim] as kernels take it."""
        return PoolView(cells, self.tables[0], None if self.pair else self.tables[1], self._scratch_base, self.pair)

    def take_changes(self) -> tuple[Int32Array, Int32Array]:
        """Return changes since the last call: flat indices [n] into `tables`, and their entries [n]."""
        blocks, count = self._rows.take_changes(), len(self.tables)
        if not len(blocks):
            return _NO_CHANGES, _NO_CHANGES
        units = self._rows.tables.reshape(3, -1)[:, blocks]
        assert not self.pair or (units[1] == units[0] + 1).all(), "in a paired pool V must follow its K"
        entries = self._entries_of(units[:count])
        places = blocks + np.arange(count)[:, None] * self.tables[0].numel()
        return places.ravel().astype(np.int32), entries.ravel().astype(np.int32)

    def relaid(self, num_layers: int) -> None:
        """Rewrite all entries for units of `num_layers` layers. Waits for the device."""
        self._num_layers = num_layers
        self._rows.take_changes()
        entries = self._entries_of(self._rows.tables[: len(self.tables)]).astype(np.int32)
        self.tables.copy_(torch.from_numpy(entries))

    def _entries_of(self, units: IntArray) -> IntArray:
        entries: IntArray = np.where(units < 0, units, units * self._num_layers)
        return entries
