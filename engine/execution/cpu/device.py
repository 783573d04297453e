"""TorchDevice: memory and forward pass in torch's own operators.

Tuned for the CPU, correct on every torch device. Nothing is taken ahead: each call is in order behind those before it,
and the host samples. Knows nothing of requests, sampling or the order of a step's parts (`Runner`).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.attention import Batch, PagedAttention, arrange, clear_begun_blocks
from engine.execution.cpu.hidden import HiddenPlan, restore
from engine.execution.hidden import ScratchPlan, has_hidden
from engine.execution.lane import Lane
from engine.execution.layout import Layout
from engine.execution.masks import FinishMasks
from engine.execution.pool import UnitPool
from engine.execution.pooling import TakeHidden
from engine.execution.rows import RowTable
from engine.execution.samples import DeviceSamples
from engine.models.decoder import Attend, Decoder
from engine.models.heads import Heads
from engine.models.lora import Adapters, Delta, Site
from engine.models.manner import Manner
from engine.models.weights import LayerWeights
from predictor.limits import Limits


class Beyond(Protocol):
    """What runs the layers that a device does not have, on other engines, while this one goes on."""

    def cut(self, chunks: IntArray, *, whole: bool) -> list[IntArray]:
        """Begin a step: its chunks [n, 4] as micro-batches, in order: one may go on with a chunk of an earlier one.
        `whole`: they are wanted as one."""

    def send(self, chunks: IntArray, hidden: Tensor, wanted: IntArray) -> None:
        """Run chunks [n, 4] as in `Device.forward`, whose hidden state in front of those layers is `hidden [parts, T,
        H]`, chunk by chunk; parts are addends, as the device keeps them. Wanted are tokens [R]."""

    def receive(self) -> list[Tensor]:
        """Of each `send` since the last call, in order: the hidden state [parts, R, H] behind the last layer."""


class PoolDevice:
    """What devices in torch's operators have in common: a pool, its rows, copies to the host tier and back."""

    pipeline_depth = 0

    def __init__(self, pool: UnitPool, rows: RowTable) -> None:
        self.pool, self.rows, self.adapters = pool, rows, Adapters()
        self.lane = Lane(torch.device("cpu"))  # on any device: the current stream

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
    """`scratch_blocks`: blocks of hidden state that one step may read or write; 0 refuses them altogether.
    `host_units`: units of the host tier. `cell_type`: of K and V in 8 bits. `spare_bytes`: see UnitPool. Raises
    ConfigError for scratch where the model's hidden state is no use.

    `layers`: those it runs; `beyond`: what runs the ones behind them, on the next engine of a pipeline."""

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        *,
        scratch_blocks: int = 0,
        host_units: int = 0,
        cell_type: torch.dtype | None = None,
        spare_bytes: int = 0,
    ) -> None:
        spec, weights = decoder.spec, decoder.weights
        super().__init__(
            UnitPool.of(
                spec,
                limits,
                weights.embedding,
                scratch_blocks,
                host_units,
                cell_type=cell_type,
                spare_bytes=spare_bytes,
            ),
            RowTable(limits, hidden=scratch_blocks > 0),
        )
        self.decoder = decoder
        self.layers = range(spec.num_layers)
        self.beyond: Beyond | None = None
        self._heads = Heads(spec, weights, limits.max_model_len, hidden=scratch_blocks > 0)
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
            take(layout, self.decoder.normed(x))
        return self._logits(layout, x), None

    def _logits(self, layout: Layout, x: Tensor) -> Tensor:
        """Of what is sampled [S, vocab] of hidden state [T, H]."""
        if not layout.sampled.size:
            return x[:0]
        return self.decoder.logits(x.index_select(0, torch.from_numpy(layout.sampled_tokens).to(x.device)))

    def join(self, share: Callable[[Tensor], None]) -> None:
        """See RankDevice: no token is on the device alone."""

    def follow(self, chunks: IntArray, *, whole: bool) -> None:
        """See RankDevice. It is whole at any rate."""
        del whole
        layout, x = self._begin(chunks)
        if self.decoder.weights.gather is not None:
            self._logits(layout, x)

    def _begin(self, chunks: IntArray) -> tuple[Layout, Tensor]:
        """The embedding, and the layers that are here: hidden state [T, H]."""
        batch, hidden = self._plan(chunks)
        layout, device = batch.layout, self.pool.device
        attend = self._attend(batch, hidden)
        token_ids = torch.from_numpy(self.rows.tokens[layout.token_rows, layout.positions]).to(device)
        x = self.decoder.embed(token_ids, torch.from_numpy(layout.positions).to(device))
        adapt = self.adapters.of_step(self.rows.adapters[layout.token_rows], device) if self.adapters else None
        return layout, self.decoder.run(x, attend, self.layers, adapt)

    def _run_pipeline(self, beyond: Beyond, chunks: IntArray) -> Tensor:
        """Logits [S, vocab] by this device and what is beyond, a micro-batch behind the other."""
        for part in beyond.cut(chunks, whole=False):
            layout, x = self._begin(part)
            beyond.send(layout.chunks, x[None], layout.sampled_tokens)
        x = torch.cat([x for (x,) in beyond.receive()])
        return self.decoder.logits(x) if len(x) else x

    def keep(self, layers: range) -> None:
        """Run these layers alone from now on. The pool is laid out for them already; weights of others may be gone."""
        self.layers = layers

    def pass_through(self, chunks: IntArray, hidden: Tensor, wanted: IntArray) -> Tensor:
        """The next part of a step that another device began, as `Beyond.send` has it, where chunk i is of row i; gives
        what is wanted of it."""
        batch, _ = self._plan(chunks)
        layout, chunk = batch.layout, batch.layout.token_rows
        firsts = np.cumsum(chunks[:, 2]) - chunks[:, 2]
        # tokens in the order in which attention wants them, and back
        came = torch.from_numpy(firsts[chunk] + layout.positions - chunks[chunk, 1])
        x = self.decoder.run(hidden[0].index_select(0, came), self._attend(batch, None), self.layers)
        x = torch.empty_like(x).index_copy_(0, came, x)[None]
        if self.beyond is not None:
            self.beyond.send(chunks, x, wanted)
            return self.beyond.receive()[0]
        return x.index_select(1, torch.from_numpy(wanted))

    def _plan(self, chunks: IntArray) -> tuple[Batch, HiddenPlan | None]:
        """Return the step's layout, and how the hidden state of its rows is projected (None: there is none)."""
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

    def _attend(self, batch: Batch, hidden: HiddenPlan | None) -> Attend:
        layout = batch.layout
        paged = PagedAttention(self.pool, self.rows, batch)
        rotary = self._heads.rotary(torch.from_numpy(layout.positions).to(self.pool.device))
        first, spec, streamed = self.layers.start, self.decoder.spec, self.decoder.weights.layers.streamed
        manners = [Manner(spec.scale, spec.window_of(index), spec.softcap) for index in range(spec.num_layers)]

        def attend(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
            if hidden is not None:
                if index in streamed:
                    self._heads.hold(index, layer)
                hidden(index, x)
            return paged(index - first, *self._heads.qkv(layer, x, rotary[index]), manners[index])

        return attend
