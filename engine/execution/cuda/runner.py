"""CudaRunner: the runner for GPUs. A step is launched without waiting for the one before it.

`launch` turns a SchedulerOutput into one upload and one graph replay and comes back at once; what it returns waits for
the tokens. Sampled tokens stay on the device, where the next step reads them: it can be scheduled and launched before
the host has seen them (a request that has ended by then costs one token too many, which the core drops). Penalties and
log-probabilities need the host's eyes: a step with such rows waits for the steps before it.

Operations of the cache go down the same lane, transfers of the host tier down another (`engine.execution.cuda.swap`).
Steps that run from hidden state do without a graph.

With `kernels` from torch, or Triton's interpreter, the same class runs on the CPU. Knows nothing of scheduling or text.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.execution.cuda.buffers import DrawInputs, Layout, StepBuffers, StepInputs, lay_out
from engine.execution.cuda.draw import draw
from engine.execution.cuda.forward import Forward
from engine.execution.cuda.graphs import Graphs
from engine.execution.cuda.hidden import Projection, StepHidden
from engine.execution.cuda.kernels import Kernels
from engine.execution.cuda.lane import Lane, Mark, pinned
from engine.execution.cuda.operations import run_operations
from engine.execution.cuda.rows import UNKNOWN, Int32Array, IntArray, Rows
from engine.execution.cuda.shapes import Buckets
from engine.execution.cuda.swap import Swapper
from engine.execution.hidden import has_hidden
from engine.execution.pool import UnitPool
from engine.execution.sampler import SampleInput, sample
from engine.models.spec import ModelSpec, hidden_offer
from engine.models.weights import ModelWeights
from engine.request import TokenLogprobs
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput

log = logging.getLogger("tidemill.engine")

_RESULTS = 3  # host buffers for tokens: of the steps in flight, and one to spare


@dataclass(slots=True)
class _Sampled:
    """A launched step's samples: where their tokens belong, and when `tokens [n]` (on the host) will hold them."""

    rows: IntArray
    ends: IntArray
    generations: IntArray
    tokens: Int32Array
    arrived: Mark
    logprobs: list[TokenLogprobs | None] | None = None


class CudaRunner:
    """Executes steps on one device. `num_units`: units of the pool (a KV block takes two). `graphs`: capture one for
    every bucket now (CUDA only). At most two steps may be launched and not collected; launch from one thread.

    `scratch_blocks`: blocks of hidden state that one step may read or write; 0 refuses them altogether. `host_units`:
    units of the host tier. Raises ConfigError for scratch where the model's hidden state is no use as a cache."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kernels: Kernels,
        *,
        num_units: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        graphs: bool,
        scratch_blocks: int = 0,
        host_units: int = 0,
    ) -> None:
        device, dtype = weights.embedding.device, weights.embedding.dtype
        max_tokens = max(max_num_batched_tokens, max_num_seqs)
        assert num_units * spec.num_layers < 2**31, "table entries are 32 bits wide"
        self.scratch_blocks, self.host_units = scratch_blocks, host_units
        self._lane = Lane(device)
        self._rows = Rows(max_num_seqs, max_model_len, block_size, spec.num_layers, device, hidden=scratch_blocks > 0)
        self._pool = _make_pool(spec, num_units, block_size, weights.embedding, scratch_blocks, host_units)
        self._forward = Forward(
            spec, weights, kernels, self._rows, self._pool.cells.view(-1, block_size, spec.num_kv_heads, spec.head_dim),
            scratch_base=self._pool.scratch_base, max_tokens=max_tokens, max_samples=max_num_seqs,
            max_model_len=max_model_len,
        )  # fmt: skip
        self._projection = Projection(self._forward, self._pool, max_tokens, max_model_len)
        self._swapper = Swapper(self._pool, kernels, self._lane, Lane(device))
        self._buffers = StepBuffers(spec, max_tokens, max_num_seqs, dtype, device)
        self._buckets = Buckets(max_num_seqs, max_tokens)
        self._graphs = Graphs(self._forward, self._lane)
        self._results = deque(pinned(max_num_seqs, torch.int32, device) for _ in range(_RESULTS))
        self._unsettled: deque[_Sampled] = deque()
        self._last_end = 0.0
        self._last_inputs: StepInputs | None = None
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

    def launch(self, output: SchedulerOutput) -> Collect:
        """Start one step; the result waits for it (call it in launch order, from any thread)."""
        began = time.perf_counter()
        with torch.inference_mode(), self._lane.use():
            self._settle(all_but=_RESULTS - 2)
            self._rows.apply(output)
            run_operations(output.operations, self._projection, self._swapper)
            sampled = self._run(output)
            arrived = self._lane.mark() if sampled is None else sampled.arrived
        return lambda: self._collect(output, sampled, arrived, began)

    def repeat_last(self) -> None:
        """Run the last step's forward pass again, as it is: for measuring what the device takes without the host."""
        assert self._last_inputs is not None, "no step was run yet"
        with torch.inference_mode(), self._lane.use():
            self._graphs.run(self._last_inputs)

    def run_padding(self, num_tokens: int, num_samples: int) -> None:
        """A step of `num_tokens` of padding with `num_samples` drawn at random: what the largest step allocates."""
        with torch.inference_mode(), self._lane.use():
            layout = lay_out(np.zeros((0, 4), dtype=np.int64))
            inputs = self._buffers.fill(self._buckets.exact(num_tokens, 0), layout, self._rows)
            self._buffers.upload()
            self._forward(inputs)
            rows = np.zeros(num_samples, dtype=np.int64)
            chunks = np.stack((rows, rows, rows + 1, rows + 1), axis=1)
            wishes = self._buffers.fill_draw(lay_out(chunks), self._rows)
            wishes.top_p.fill_(0.5)
            every = (wishes.uniform, wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p, 1, True, True)
            draw(self._forward.logits[:num_samples], self._forward.sampled[:num_samples], DrawInputs(*every))
            self._lane.mark().synchronize()

    def _capture(self) -> None:
        """A graph for every bucket. Where the device refuses, steps run without: slower, and right."""
        empty = lay_out(np.zeros((0, 4), dtype=np.int64))
        with torch.inference_mode(), self._lane.use():
            try:
                for shape in self._buckets.all_shapes():
                    inputs = self._buffers.fill(shape, empty, self._rows)
                    self._buffers.upload()
                    self._graphs.capture(inputs)
            except RuntimeError as error:
                log.warning("CUDA graphs are off, small steps will be slow: %s", error)
                self._graphs = Graphs(self._forward, self._lane)
            self._lane.mark().synchronize()

    def _run(self, output: SchedulerOutput) -> _Sampled | None:
        """Upload, forward pass and sampling; None without a sample."""
        chunks = np.array(output.chunks, dtype=np.int64).reshape(-1, 4)
        ends = chunks[:, 1] + chunks[:, 2]
        rows = self._rows
        assert (ends <= rows.num_blocks[chunks[:, 0]] * rows.block_size).all(), "a block table is too short"
        layout = lay_out(chunks)
        by_host = layout.sampled.size and self._needs_host(layout.sample_rows)
        draws = not by_host and layout.sampled.size and not rows.sampling.greedy[layout.sample_rows].all()
        shape = self._buckets.fit(layout.num_tokens, layout.num_decodes) if len(chunks) else None
        inputs = None if shape is None else self._buffers.fill(shape, layout, rows)
        wishes = self._buffers.fill_draw(layout, rows) if draws else None
        observe = None if inputs is None else self._observe(layout, inputs)
        changes = rows.take_changes()
        self._buffers.fill_changes(*changes)
        self._buffers.upload()
        self._buffers.write_tables(rows.tables, *changes)
        if inputs is None:
            return None
        if observe is None:
            self._graphs.run(inputs)
        else:
            self._forward(inputs, observe)
        self._last_inputs = inputs
        if not layout.sampled.size:
            return None
        if by_host:
            return self._sample_on_host(inputs, layout)
        if wishes is not None:
            count = len(layout.sampled)
            tokens = draw(self._forward.logits[:count], self._forward.sampled[:count], wishes)
            self._forward.accept(inputs, tokens)
        return self._fetch(layout)

    def _observe(self, layout: Layout, inputs: StepInputs) -> StepHidden | None:
        """What the layers of a step with hidden blocks do before they attend; None without such blocks."""
        if not has_hidden(self._rows, layout.chunks):
            return None
        tokens, blocks = inputs.shape.tokens, self.scratch_blocks
        return StepHidden(self._projection, self._forward, self._rows, layout, tokens, blocks)

    def _needs_host(self, rows: IntArray) -> bool:
        table = self._rows.sampling
        return bool(table.edits[rows].any() or (table.num_logprobs[rows] >= 0).any())

    def _fetch(self, layout: Layout) -> _Sampled:
        """Send the tokens on their way to the host."""
        count, rows, ends = len(layout.sampled), layout.sample_rows, layout.sample_ends
        target = self._results[0][:count]
        self._results.rotate(-1)
        arrived = self._lane.fetch(self._forward.sampled[:count], target)
        self._rows.tokens[rows, ends] = UNKNOWN
        sampled = _Sampled(rows, ends, self._rows.generation[rows], target.numpy(), arrived)
        self._unsettled.append(sampled)
        return sampled

    def _sample_on_host(self, inputs: StepInputs, layout: Layout) -> _Sampled:
        """Sampling that looks at earlier tokens or at whole distributions; waits for the device."""
        self._settle(all_but=0)
        rows, ends, table = layout.sample_rows, layout.sample_ends, self._rows
        places = zip(rows.tolist(), ends.tolist(), strict=True)
        known = [table.tokens[row, :end].astype(np.int64) for row, end in places]
        logits = self._forward.logits[: len(rows)]
        # the sampler may work in place on what is float32 already
        logits = logits.clone() if logits.dtype == torch.float32 else logits
        tokens, logprobs = sample(logits, table.sampling, SampleInput(rows, table.num_prompt[rows], known))
        self._forward.accept(inputs, _to(tokens, logits))
        sampled = _Sampled(rows, ends, table.generation[rows], tokens.astype(np.int32), self._lane.mark(), logprobs)
        table.settle(rows, ends, sampled.generations, sampled.tokens)
        return sampled

    def _settle(self, all_but: int) -> None:
        """Note the tokens of the oldest steps on the host, waiting for them if need be."""
        while len(self._unsettled) > all_but:
            step = self._unsettled.popleft()
            step.arrived.synchronize()
            self._rows.settle(step.rows, step.ends, step.generations, step.tokens)

    def _collect(
        self, output: SchedulerOutput, sampled: _Sampled | None, arrived: Mark, began: float
    ) -> ModelRunnerOutput:
        arrived.synchronize()
        ended = time.perf_counter()
        # a step launched behind another begins when that one ends
        latency, self._last_end = ended - max(began, self._last_end), ended
        if sampled is None:
            return ModelRunnerOutput(output.step_id, [], None, latency)
        return ModelRunnerOutput(output.step_id, sampled.tokens.tolist(), sampled.logprobs, latency)


def _make_pool(
    spec: ModelSpec, num_units: int, block_size: int, like: Tensor, scratch_blocks: int, host_units: int
) -> UnitPool:
    """Raises ConfigError for scratch where hidden state is not offered. `like`: a tensor of its type and device."""
    if scratch_blocks and (refusal := hidden_offer(spec).refusal):
        raise ConfigError(refusal)
    return UnitPool(
        num_units, num_layers=spec.num_layers, block_size=block_size, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, dtype=like.dtype, device=like.device, scratch_blocks=scratch_blocks,
        num_host_units=host_units,
    )  # fmt: skip


def _to(tokens: IntArray, like: Tensor) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int32)).to(like.device)
