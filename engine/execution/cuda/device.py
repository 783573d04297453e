"""CudaDevice: persistent device state, our kernels, CUDA graphs by bucket, and tokens that stay on the device.

`forward` turns a step into one upload and one graph replay and comes back at once; operations of the cache go down the
same lane, transfers of the host tier down another (`engine.execution.cuda.swap`). Steps that run from hidden state, or
make vectors of it, do without a graph. With `kernels` from torch, or Triton's interpreter, the same class runs on the
CPU. Knows nothing of scheduling, requests or the order of a step's parts (`Runner`).
"""

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.execution.arrays import IntArray
from engine.execution.cuda.buffers import DrawInputs, StepBuffers, StepInputs
from engine.execution.cuda.draw import draw
from engine.execution.cuda.forward import Forward
from engine.execution.cuda.graphs import Graphs
from engine.execution.cuda.hidden import Projection, StepHidden
from engine.execution.cuda.kernels import Kernels
from engine.execution.cuda.limit import limit, without_masks
from engine.execution.cuda.shapes import Buckets
from engine.execution.cuda.swap import Swapper
from engine.execution.cuda.tables import DeviceTables
from engine.execution.hidden import has_hidden
from engine.execution.lane import Lane
from engine.execution.layout import decodes_first
from engine.execution.masks import FinishMasks
from engine.execution.pool import UnitPool
from engine.execution.pooling import TakeHidden
from engine.execution.rows import RowTable
from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights
from predictor.limits import Limits

log = logging.getLogger("tidemill.engine")

_NO_CHUNKS = np.zeros((0, 4), dtype=np.int64)


class CudaDevice:
    """`graphs`: capture one for every bucket now (CUDA only). Two steps may be in flight; use it from one thread.

    `scratch_blocks`: blocks of hidden state that one step may read or write; 0 refuses them altogether.
    `host_units`: units of the host tier. Raises ConfigError for scratch where the model's hidden state is no use."""

    pipeline_depth = 1

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kernels: Kernels,
        limits: Limits,
        *,
        graphs: bool,
        scratch_blocks: int = 0,
        host_units: int = 0,
    ) -> None:
        limits = replace(limits, max_num_batched_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs))
        assert limits.num_units * spec.num_layers < 2**31, "table entries are 32 bits wide"
        device = weights.embedding.device
        self.lane = Lane(device)
        self._kernels = kernels
        self.rows = RowTable(limits, hidden=scratch_blocks > 0)
        self.pool = UnitPool.of(spec, limits, weights.embedding, scratch_blocks, host_units)
        self._tables = DeviceTables(self.rows, self.pool)
        self._forward = Forward(spec, weights, kernels, self._tables, self.pool, limits)
        self._projection = Projection(self._forward, self.pool, limits)
        self._swapper = Swapper(self.pool, kernels, self.lane, Lane(device))
        self._buffers = StepBuffers(spec, limits, weights.embedding.dtype, device)
        self._buckets = Buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._graphs = Graphs(self._forward, self.lane)
        self._last_inputs: StepInputs | None = None
        self.restore = self._projection.restore
        self.swap_out, self.swap_in = self._swapper.swap_out, self._swapper.swap_in
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # weights and tables were written on another stream
        if graphs:
            self._capture()

    @property
    def num_graphs(self) -> int:
        """Captured step shapes; `num_shapes` where all went well."""
        return self._graphs.count

    @property
    def num_shapes(self) -> int:
        return len(self._buckets.all_shapes())

    def forward(
        self, chunks: IntArray, draws: bool, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Device. Nothing is waited for but what `masks` wait for, while the device runs."""
        rows, buffers, layout = self.rows, self._buffers, decodes_first(chunks)
        inputs = buffers.fill(self._buckets.fit(len(layout.positions), layout.num_decodes), layout, rows)
        wishes = buffers.fill_draw(layout, rows) if draws else None
        hidden = None
        if has_hidden(rows, chunks):
            hidden = StepHidden(self._projection, self._forward, rows, layout, inputs, self.pool.scratch_blocks)
        changes = self._tables.take_changes()
        buffers.fill_changes(*changes)
        buffers.upload()
        buffers.write_tables(self._tables.tables, *changes)
        if hidden is None and take is None:
            self._graphs.run(inputs)
        else:
            self._forward(inputs, hidden, None if take is None else partial(take, layout))
        self._last_inputs = inputs
        count = len(layout.sampled)
        logits, tokens = self._forward.logits[:count], self._forward.sampled[:count]
        limits = None if masks is None else masks()
        if limits is not None:
            tokens = limit(self._kernels, logits, tokens, limits)
        if wishes is not None:
            tokens = draw(logits, tokens, wishes)
        if limits is not None:
            tokens = without_masks(tokens, limits)
        if limits is not None or wishes is not None:
            self._forward.accept(inputs, tokens)
        return logits, self._forward.sampled[:count]

    def repeat_last(self) -> None:
        """Run the last step's forward pass again, as it is: for measuring what the device takes without the host."""
        assert self._last_inputs is not None, "no step was run yet"
        with torch.inference_mode(), self.lane.use():
            self._graphs.run(self._last_inputs)

    def run_padding(self, num_tokens: int, num_samples: int) -> None:
        """A step of `num_tokens` of padding with `num_samples` drawn at random: what the largest step allocates."""
        with torch.inference_mode(), self.lane.use():
            inputs = self._buffers.fill(self._buckets.exact(num_tokens, 0), decodes_first(_NO_CHUNKS), self.rows)
            self._buffers.upload()
            self._forward(inputs)
            rows = np.zeros(num_samples, dtype=np.int64)
            chunks = np.stack((rows, rows, rows + 1, rows + 1), axis=1)
            wishes = self._buffers.fill_draw(decodes_first(chunks), self.rows)
            wishes.top_p.fill_(0.5)
            every = (wishes.uniform, wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p, 1, True, True)
            draw(self._forward.logits[:num_samples], self._forward.sampled[:num_samples], DrawInputs(*every))
            self.lane.mark().synchronize()

    def _capture(self) -> None:
        """A graph for every bucket. Where the device refuses, steps run without: slower, and right."""
        empty = decodes_first(_NO_CHUNKS)
        with torch.inference_mode(), self.lane.use():
            try:
                for shape in self._buckets.all_shapes():
                    inputs = self._buffers.fill(shape, empty, self.rows)
                    self._buffers.upload()
                    self._graphs.capture(inputs)
            except RuntimeError as error:
                log.warning("CUDA graphs are off, small steps will be slow: %s", error)
                self._graphs = Graphs(self._forward, self.lane)
            self.lane.mark().synchronize()
