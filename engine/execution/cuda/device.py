"""CudaDevice: persistent device state, kernels, CUDA graphs by bucket, and tokens that stay on the device.

`forward` turns a step into one upload and one graph replay, and returns at once. A step that decodes the rows of the
last one again uploads changes of block tables only. Cache operations use the same stream, transfers of the host tier
others (`engine.execution.cuda.swap`). Steps that project hidden state, compute embeddings, or have both prompts and
adapters run without a graph. With torch kernels, or Triton's interpreter, the class also runs on the CPU.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from torch import Tensor

from engine.api import MAX_LOGPROBS, SamplingParams
from engine.arrays import IntArray
from engine.execution.cuda.adapters import SlottedAdapters, StepSlots
from engine.execution.cuda.buffers import HeadSizes, RepeatedStep, StepBuffers, StepInputs, StepWishes, send
from engine.execution.cuda.forward import DeviceTables, Forward, Graphs, long_from
from engine.execution.cuda.hidden import Projection, StepHidden
from engine.execution.cuda.sampling import Sampling
from engine.execution.cuda.shapes import Buckets, PaddedShape
from engine.execution.cuda.stage import Stage
from engine.execution.cuda.swap import Swapper
from engine.execution.layout import Layout, decodes_first
from engine.execution.masks import FinishMasks, StepMasks
from engine.execution.pool import PoolOptions, UnitPool
from engine.execution.pooling import TakeHidden
from engine.execution.rows import RowTable, has_hidden
from engine.execution.sampler import DeviceSamples
from engine.execution.stream import DeviceStream
from engine.limits import Limits
from engine.models.lora import Adapters, Delta, Site
from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights
from engine.triton_kernels import Kernels, configs

if TYPE_CHECKING:
    from engine.execution.stages import NextStage

log = logging.getLogger("tidemill.engine")

_NO_CHUNKS = np.zeros((0, 4), dtype=np.int64)
_EVERYTHING = SamplingParams(1, presence_penalty=1.0, logprobs=MAX_LOGPROBS, top_p=0.5, logit_bias=((0, 0.0),))
_WISHES = (_EVERYTHING, SamplingParams(1), SamplingParams(1, temperature=0.0))
"""Parameters with and without edits of the logits, and draws, which select different kernels."""


class CudaDevice:
    """A Device for CUDA. Two steps may be in flight. Use it from one thread.

    Raises ConfigError for scratch if the model cannot use hidden state as a cache.

    Args:
        kernels: Triton kernels or their torch twins.
        graphs: Capture a graph for every bucket now (CUDA only).
        adapted: Whether LoRA adapters may be added.

    Attributes:
        tables: Block tables and last tokens on the device.
        beyond: Runs the following layers on the next engine of a pipeline.
    """

    pipeline_depth = 1

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kernels: Kernels,
        limits: Limits,
        *,
        graphs: bool,
        adapted: bool = False,
        **pool: Unpack[PoolOptions],
    ) -> None:
        limits = replace(limits, max_num_batched_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs))
        device = weights.embedding.device
        self.stream = DeviceStream(device)
        self.rows = RowTable(limits, hidden=pool.get("scratch_blocks", 0) > 0)
        self.pool = UnitPool.of(spec, limits, weights.embedding, **pool)
        assert len(self.pool.slices) < 2**31, "table entries have 32 bits"
        self.tables = DeviceTables(self.rows, self.pool)
        self._forward = Forward(spec, weights, kernels, self.tables, self.pool, limits)
        self._projection = Projection(self._forward, self.pool, limits)
        self._swapper = Swapper(self.pool, kernels, self.stream, out=DeviceStream(device), back=DeviceStream(device))
        second = long_from(spec.rope, limits.max_model_len)
        self._buffers = StepBuffers(HeadSizes.of(spec), limits, weights.embedding.dtype, device, second)
        self._sampling = Sampling(self.rows, kernels, self._buffers, spec.vocab_size, device)
        self._buckets = Buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._kernels = kernels
        self.decoder = self._forward.decoder
        self.beyond: NextStage | None = None
        self._stage = Stage(self._forward, self.stream, self._fill_and_upload, limits.max_num_batched_tokens)
        self._graphs = Graphs(self._run, self.stream)
        self._last: RepeatedStep | None = None
        self._slotted = SlottedAdapters(spec, limits.max_num_seqs, device, taken=adapted)
        self.adapters: Adapters = self._slotted
        self.restore = self._projection.restore
        self.swap_out, self.swap_in = self._swapper.swap_out, self._swapper.swap_in
        if configs.is_cuda(device):
            torch.cuda.synchronize(device)  # weights and tables were written on another stream
            self.warm_up()
        if graphs:
            self._capture()

    def adapt(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        """See Device. Call it between two steps."""
        with torch.inference_mode(), self.stream.use():
            self.adapters.put(number, deltas)

    @property
    def adapted(self) -> bool:
        """Whether LoRA adapters may be added."""
        return self._slotted.taken

    @property
    def num_graphs(self) -> int:
        """Number of captured step shapes; `num_shapes` if all succeeded."""
        return self._graphs.count

    @property
    def num_shapes(self) -> int:
        return len(self._captured())

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples]:
        """See Device. Waits only for masks, while the device runs, and for other stages of a pipeline."""
        if self.beyond is not None:
            return self._run_pipeline(self.beyond, chunks, masks, take)
        last = self._repeat(chunks) if masks is None and take is None else None
        if last is not None:
            self._graphs.run(last.inputs)
            result = last.result or self._choose(last.inputs, last.count, last.wishes, None)
            self._last = last
            return result
        rows, layout = self.rows, decodes_first(chunks)
        inputs = self._fill(layout)
        wishes, numbers = self._sampling.begin(layout), rows.adapters[layout.token_rows]
        hidden, adapt, by_slots = None, None, False
        if has_hidden(rows, chunks):
            hidden = StepHidden.of(
                self._projection, self._forward, self._buffers, inputs, rows, layout, self.pool.scratch_blocks
            )
        if numbers.any():
            slots = None
            if hidden is None and take is None and not inputs.shape.prefill:
                slots = self._slotted.slots_of(numbers)
            if slots is None:
                adapt = self.adapters.of_step(numbers, self.pool.device, send)
            else:
                by_slots = True
                self._buffers.fill_slots(inputs.shape, slots)
        self._upload()
        if hidden is None and take is None and adapt is None:
            self._graphs.run(inputs, adapted=by_slots)
        else:
            self._forward(inputs, hidden, None if take is None else partial(take, layout), adapt)
        result = self._choose(inputs, len(layout.sampled), wishes, masks)
        if hidden is None and take is None and masks is None and not numbers.any():
            self._last = self._buffers.repeatable(layout, wishes, inputs, rows.version)
            if self._last is not None and wishes == StepWishes():
                self._last.result = result
        return result

    def _repeat(self, chunks: IntArray) -> RepeatedStep | None:
        """Begin a step that repeats the last one; return None if chunks [n, 4] do not.

        It becomes `_last` again when it has been launched without an error.
        """
        last, self._last = self._last, None
        if last is None or not last.repeats(chunks, self.rows, self._buffers.fills):
            return None
        self._upload(last.steps)
        return last

    def _choose(
        self, inputs: StepInputs, count: int, wishes: StepWishes, masks: FinishMasks | None
    ) -> tuple[Tensor, DeviceSamples]:
        """Return the result of `forward` from the logits of `count` samples on the device."""
        logits, greedy = self._forward.logits[:count], self._forward.sampled[:count]
        samples = self._sampling.choose(logits, greedy, wishes, None if masks is None else masks())
        if samples.tokens is not greedy:
            self._forward.accept(inputs, samples.tokens)
        return logits, DeviceSamples(greedy, samples.logprobs)

    def keep(self, layers: range) -> None:
        """Run only these layers from now on; graphs apply to all layers. The pool is already arranged for them."""
        self._forward.layers = layers
        self.tables.relaid(self.pool.num_layers)

    def pass_through(self, chunks: IntArray, hidden: Tensor, wanted: IntArray) -> Tensor:
        """See Stage. Raises ValueError for a unit outside the pool, which would be a fatal error on the device."""
        blocks = -(-(chunks[:, 1] + chunks[:, 2]) // self.rows.block_size)
        tables = self.rows.tables[:2, : len(chunks), : int(blocks.max())]
        read = tables[:, np.arange(tables.shape[2]) < blocks[:, None]]
        if read.size and not 0 <= int(read.min()) <= int(read.max()) < self.pool.num_units:
            raise ValueError(f"a unit is outside the pool of {self.pool.num_units} units")
        return self._stage.pass_through(self.beyond, chunks, hidden, wanted)

    def _run_pipeline(
        self, beyond: "NextStage", chunks: IntArray, masks: FinishMasks | None, take: TakeHidden | None
    ) -> tuple[Tensor, DeviceSamples]:
        """See `forward`."""
        came, layout = self._stage.lead(beyond, chunks, take), decodes_first(chunks)
        inputs = self._fill(layout)
        wishes = self._sampling.begin(layout)
        self._upload()
        self._forward.begin(inputs)
        if len(came):
            self._forward.finish(inputs, self._stage.enter(came, inputs.shape.samples))
        return self._choose(inputs, len(layout.sampled), wishes, masks)

    def _fill_and_upload(self, layout: Layout) -> StepInputs:
        """Begin a step of which only parts of the forward pass run."""
        inputs = self._fill(layout)
        self._upload()
        self._forward.begin(inputs)
        return inputs

    def _run(self, inputs: StepInputs, *, adapted: bool) -> None:
        """Run the part of a step that graphs capture."""
        self._forward(inputs, adapt=StepSlots(self._slotted, inputs.slots, self._kernels) if adapted else None)

    def _captured(self) -> list[tuple[PaddedShape, bool]]:
        """Return the shapes to capture: every bucket, and the decode buckets again with the adapters of slots."""
        every = self._buckets.all_shapes()
        adapted = [shape for shape in every if not shape.prefill] if self._slotted.taken else []
        return [*((shape, False) for shape in every), *((shape, True) for shape in adapted)]

    def _fill(self, layout: Layout) -> StepInputs:
        """Write a step to the host side of the buffers."""
        return self._buffers.fill(self._buckets.fit(len(layout.positions), layout.num_decodes), layout, self.rows)

    def _upload(self, steps: int = 0) -> None:
        """Send the step and the changes of the tables, or the changes alone, `steps` after the step."""
        changes = self.tables.take_changes()
        self._buffers.fill_changes(*changes)
        self._buffers.upload(steps)
        self._buffers.write_tables(self.tables.tables, *changes)

    def run_padding(self, num_tokens: int, num_samples: int) -> None:
        """Run `num_tokens` of padding with `num_samples` samples and all sampling features, for the peak of memory.

        Only while no row holds a request.
        """
        with torch.inference_mode(), self.stream.use():
            inputs = self._buffers.fill(self._buckets.exact(num_tokens, 0), decodes_first(_NO_CHUNKS), self.rows)
            self._run_padding(inputs, num_samples, _EVERYTHING)
            self.stream.mark().synchronize()

    def _run_padding(
        self,
        inputs: StepInputs,
        num_samples: int,
        params: SamplingParams,
        masks: StepMasks | None = None,
        hidden: StepHidden | None = None,
    ) -> None:
        rows = np.arange(num_samples)
        for row in rows.tolist():
            self.rows.sampling.write(row, params)
        wishes = self._sampling.begin(decodes_first(np.stack((rows, rows * 0, rows * 0 + 1, rows * 0 + 1), axis=1)))
        self._buffers.upload()
        self._forward(inputs, hidden)
        logits, greedy = self._forward.logits[:num_samples], self._forward.sampled[:num_samples]
        samples = self._sampling.choose(logits, greedy, wishes, masks)
        self._forward.accept(inputs, samples.tokens)

    def warm_up(self) -> None:
        """Compile every variant of every kernel: it takes seconds, during which no token would be produced. The pool
        must be unused."""
        shape, none = self._buckets.exact(2, 1), np.zeros(0, dtype=np.int64)
        bits = np.full((1, -(-self._forward.logits.shape[1] // 32)), -1, dtype=np.int32)
        masks = StepMasks(np.zeros(1, dtype=np.int64), bits, np.zeros(1, dtype=np.int64), none)
        with torch.inference_mode(), self.stream.use():
            for params, masked in product(_WISHES, (None, masks)):
                inputs, hidden = self._buffers.fill(shape, decodes_first(_NO_CHUNKS), self.rows), None
                if self.pool.scratch_blocks:
                    hidden = StepHidden.padding(self._projection, self._forward, inputs)
                self._run_padding(inputs, 1, params, masked, hidden)
            inputs = self._buffers.fill(self._buckets.fit(1, 1), decodes_first(_NO_CHUNKS), self.rows)
            self._buffers.upload()
            self._forward.begin(inputs)
            if self._slotted.taken:
                self._run(inputs, adapted=True)
            if self.pool.scratch_blocks:
                self.restore(np.array([[self.pool.zero_unit, 0, 1]]), np.zeros(1, dtype=np.int64))
            if len(self.pool.host_units):
                pair = np.zeros((1, 2), dtype=np.int64)
                self.swap_out(pair)
                self.swap_in(pair)
            self.pool.units[:2].zero_()
            self.stream.mark().synchronize()

    def _capture(self) -> None:
        """Capture a graph for every bucket. Steps without a graph are slower."""
        empty, refused = decodes_first(_NO_CHUNKS), None
        with torch.inference_mode(), self.stream.use():
            for shape, adapted in self._captured():
                inputs = self._buffers.fill(shape, empty, self.rows)
                self._buffers.upload()
                try:
                    refused = self._graphs.capture(inputs, adapted=adapted) or refused
                except RuntimeError as error:
                    refused = error.with_traceback(None)  # the traceback would keep allocated tensors alive
                # After a lack of memory, smaller graphs may still fit.
                if refused and not isinstance(refused, torch.OutOfMemoryError):
                    break
            self.stream.mark().synchronize()
        if refused:
            text = "captured %d of %d CUDA graphs; other steps are slow: %s"
            log.warning(text, self.num_graphs, self.num_shapes, refused)
