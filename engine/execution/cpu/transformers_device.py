"""A device that runs transformers' modules: attention over our pool, everything else theirs (see the model)."""

import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.attention import PagedAttention, arrange, clear_begun_blocks
from engine.execution.cpu.device import PoolDevice
from engine.execution.masks import FinishMasks
from engine.execution.pool import UnitPool
from engine.execution.pooling import TakeHidden
from engine.execution.rows import RowTable
from engine.execution.samples import DeviceSamples
from engine.execution.states import StateTable
from engine.models.transformers_model import TransformersModel
from predictor.limits import Limits


class TransformersDevice(PoolDevice):
    """`host_units`: units of the host tier. There is no hidden state to run from."""

    def __init__(self, model: TransformersModel, limits: Limits, *, host_units: int = 0) -> None:
        super().__init__(UnitPool.of(model.shape, limits, model.like, 0, host_units), RowTable(limits))
        self._model = model
        self._states = StateTable(model.states(), limits.max_num_seqs)
        self._cell_bytes = 2 * model.shape.kv_size * model.like.dtype.itemsize

    def restore(self, _units: IntArray, _starts: IntArray) -> None:
        """See CacheMover; nobody keeps hidden state here."""
        raise NotImplementedError

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples | None]:
        """See Device; the host samples."""
        assert take is None, "a vector is asked of a model that makes none"
        del masks
        pool, rows = self.pool, self.rows
        clear_begun_blocks(pool, rows, chunks)
        batch = arrange(chunks, rows, self._cell_bytes)
        layout = batch.layout
        ids, positions, keep = (
            torch.from_numpy(each).to(pool.device)
            for each in (rows.tokens[layout.token_rows, layout.positions], layout.positions, layout.sampled_tokens)
        )
        recur = self._states.of_step(layout, pool.device)
        adapt = self.adapters.of_step(rows.adapters[layout.token_rows], pool.device) if self.adapters else None
        return self._model.forward(ids, positions, PagedAttention(pool, rows, batch), keep, recur, adapt), None
