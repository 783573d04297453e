"""TorchDevice: memory and forward pass in torch operators, also of steps from hidden state (see `ScratchPlan`).

Tuned for the CPU, correct on every torch device. It takes no steps ahead: calls complete in order, and the host
samples.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.attention import ChunkGroups, PagedAttention, arrange, clear_begun_blocks
from engine.execution.layout import Layout
from engine.execution.masks import FinishMasks
from engine.execution.pool import PoolOptions, UnitPool
from engine.execution.pooling import TakeHidden
from engine.execution.rows import SLICES_PER_SCRATCH_BLOCK, RowTable, ScratchPlan, has_hidden
from engine.execution.sampler import DeviceSamples
from engine.execution.stream import DeviceStream
from engine.limits import Limits
from engine.models.attention import HeadProjection, manners_of
from engine.models.decoder import Attend, Decoder
from engine.models.lora import Adapters, Delta, Site
from engine.models.torch_ops import Rotary
from engine.models.weights import LayerSource, LayerWeights

if TYPE_CHECKING:
    from engine.execution.stages import NextStage

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


class PoolDevice:
    """Common base of devices in torch operators: a pool, its rows, and copies to and from the host tier."""

    pipeline_depth = 0

    def __init__(self, pool: UnitPool, rows: RowTable) -> None:
        self.pool, self.rows, self.adapters = pool, rows, Adapters()
        self.stream = DeviceStream(torch.device("cpu"))  # a no-op stream on any device: work uses the current stream

    def adapt(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        """See Device."""
        self.adapters.put(number, deltas)

    def swap_out(self, pairs: IntArray) -> None:
        """See CacheMover."""
        for source, target in pairs.tolist():
            self.pool.host_units[target].copy_(self.pool.units[source])

    def swap_in(self, pairs: IntArray) -> None:
        """See CacheMover."""
        for source, target in pairs.tolist():
            self.pool.units[target].copy_(self.pool.host_units[source])


class TorchDevice(PoolDevice):
    """A Device for native models. Raises ConfigError for scratch if the model cannot use hidden state as a cache.

    Attributes:
        beyond: Runs the following layers on the next engine of a pipeline.
    """

    def __init__(self, decoder: Decoder, limits: Limits, **pool: Unpack[PoolOptions]) -> None:
        spec, weights = decoder.spec, decoder.weights
        hidden = pool.get("scratch_blocks", 0) > 0
        super().__init__(UnitPool.of(spec, limits, weights.embedding, **pool), RowTable(limits, hidden=hidden))
        self.decoder = decoder
        self.layers = range(spec.num_layers)
        self.beyond: NextStage | None = None
        self._heads = HeadProjection(spec, weights, hidden=hidden)
        self._cell_bytes = 2 * spec.kv_size * weights.embedding.dtype.itemsize

    def restore(self, units: IntArray, starts: IntArray) -> None:
        """See CacheMover."""
        restore(self._heads, self.pool, self.decoder.weights.layers, units, starts)

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples | None]:
        """See Device; the host samples."""
        del masks
        if self.beyond is not None and take is None:
            return self._run_pipeline(self.beyond, chunks), None
        if self.beyond is not None:
            (chunks,) = self.beyond.cut(chunks, whole=True)
        layout, x = self._begin(chunks)
        if self.beyond is not None:
            self.beyond.send(layout.chunks, x[None], np.arange(len(x)))
            ((x,),) = self.beyond.receive()
        if take is not None:
            take(layout, self.decoder.normed(x), self.decoder.head)
        return self._logits(layout, x), None

    def _logits(self, layout: Layout, x: Tensor) -> Tensor:
        """Return the logits of samples [S, vocab] from hidden state [T, H]."""
        if not layout.sampled.size:
            return x[:0]
        return self.decoder.logits(x.index_select(0, torch.from_numpy(layout.sampled_tokens).to(x.device)))

    def _begin(self, chunks: IntArray) -> tuple[Layout, Tensor]:
        """Run embedding and local layers; return the hidden state [T, H]."""
        batch, hidden = self._plan(chunks)
        layout, device = batch.layout, self.pool.device
        attend = self._attend(batch, hidden)
        token_ids = torch.from_numpy(self.rows.tokens[layout.token_rows, layout.positions]).to(device)
        x = self.decoder.embed(token_ids, torch.from_numpy(layout.positions).to(device))
        adapt = self.adapters.of_step(self.rows.adapters[layout.token_rows], device) if self.adapters else None
        return layout, self.decoder.run(x, attend, self.layers, adapt)

    def _run_pipeline(self, beyond: "NextStage", chunks: IntArray) -> Tensor:
        """Return the logits [S, vocab] from this device and the stages after it, one micro-batch after the other."""
        for part in beyond.cut(chunks, whole=False):
            layout, x = self._begin(part)
            beyond.send(layout.chunks, x[None], layout.sampled_tokens)
        x = torch.cat([x for (x,) in beyond.receive()])
        return self.decoder.logits(x) if len(x) else x

    def keep(self, layers: range) -> None:
        """Run only these layers from now on. The pool is already arranged for them; other weights may be released."""
        self.layers = layers

    def pass_through(self, chunks: IntArray, hidden: Tensor, wanted: IntArray) -> Tensor:
        """Run the next part of a step that another device began, with the data of `NextStage.send`, chunk i in row i.

        Returns the wanted hidden states.
        """
        batch, _ = self._plan(chunks)
        layout, chunk = batch.layout, batch.layout.token_rows
        firsts = np.cumsum(chunks[:, 2]) - chunks[:, 2]
        # Reorder tokens for attention, and back.
        came = torch.from_numpy(firsts[chunk] + layout.positions - chunks[chunk, 1])
        x = self.decoder.run(hidden[0].index_select(0, came), self._attend(batch, None), self.layers)
        x = torch.empty_like(x).index_copy_(0, came, x)[None]
        if self.beyond is not None:
            self.beyond.send(chunks, x, wanted)
            return self.beyond.receive()[0]
        return x.index_select(1, torch.from_numpy(wanted))

    def _plan(self, chunks: IntArray) -> tuple[ChunkGroups, HiddenPlan | None]:
        """Return the layout of the step, and the projection of hidden state of its rows (None: there is none)."""
        pool, rows = self.pool, self.rows
        scratch = ScratchPlan(rows, chunks, pool.scratch_blocks) if has_hidden(rows, chunks) else None
        if scratch is not None:
            scratch.enter(rows)
            pool.clear(scratch.beyond(rows, chunks))
        clear_begun_blocks(pool, rows, chunks)
        batch = arrange(chunks, rows, self._cell_bytes)
        if scratch is None:
            return batch, None
        return batch, HiddenPlan(self._heads, pool, rows, chunks, scratch, batch.layout)

    def _attend(self, batch: ChunkGroups, hidden: HiddenPlan | None) -> Attend:
        layout = batch.layout
        paged = PagedAttention(self.pool, self.rows, batch)
        positions, is_long = (
            torch.from_numpy(each).to(self.pool.device)
            for each in (layout.positions, self.rows.is_long[layout.token_rows])
        )
        rotary = self._heads.rotary(positions, is_long)
        first, spec, streamed = self.layers.start, self.decoder.spec, self.decoder.weights.layers.streamed
        manners = manners_of(spec, self.decoder.weights.layers)

        def attend(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
            if hidden is not None:
                if index in streamed:
                    self._heads.hold(index, layer)
                hidden(index, x)
            return paged(index - first, *self._heads.qkv(layer, x, rotary[index]), manners[index])

        return attend
