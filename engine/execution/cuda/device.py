"""CudaDevice: persistent device state, kernels, CUDA graphs by bucket, and tokens that stay on the device.

`forward` turns a step into one upload and one graph replay, and returns at once. A step that decodes the rows of the
last one again uploads changes of block tables only. Cache operations use the same stream, transfers of the host tier
others (`engine.execution.cuda.swap`). Steps that project hidden state, compute embeddings, or have both prompts and
adapters run without a graph. With torch kernels, or Triton's interpreter, the class also runs on the CPU.

LoRA adapters for CUDA graphs: a table of addresses by slot, to which the rows of a step refer.

A graph reads the slots of rows in every step, so that one graph serves rows of any adapters. Adapters without a free
slot, or with too high a rank, get no slot; steps with such rows run without a graph.

Sampling on the device: the equivalent of `engine.execution.sampler` without synchronisation.

Order: logit bias and minimum length (a list of edits), penalties (a history per row on the device), grammar masks,
draws, log-probabilities, each only if a row of the step uses it. Nothing depends on values that only the device knows,
so the next step can be launched before this one has ended.

A CUDA device as one stage of a pipeline of engines: a range of layers, without graphs, between two hidden states in
page-locked host memory (KunServe §4).

Steps have the shapes of their buckets, so that they use the same kernels as the graphs of a whole engine.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from torch import Tensor

from engine.api import MAX_LOGPROBS, SamplingParams
from engine.arrays import Int32Array, IntArray
from engine.execution.cuda.buffers import (
    Buckets,
    PaddedShape,
    RepeatedStep,
    StepBuffers,
    StepInputs,
    StepWishes,
    send,
)
from engine.execution.cuda.forward import DeviceTables, Forward, Graphs, StepHidden, long_from
from engine.execution.cuda.swap import Swapper
from engine.execution.masks import FinishMasks, StepMasks
from engine.execution.pool import PoolOptions, UnitPool
from engine.execution.pooling import TakeHidden
from engine.execution.rows import Layout, RowTable, decodes_first, has_hidden
from engine.execution.sampler import DeviceSamples, RowLogprobs
from engine.execution.stream import DeviceStream, Mark, pinned
from engine.limits import Limits
from engine.models.attention import HeadSizes
from engine.models.lora import Adapters, Delta, Site, StepAdapters
from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights
from engine.scheduling.output import LATE_TOKEN, UNMASKED_TOKEN
from engine.triton_kernels import Kernels, configs

if TYPE_CHECKING:
    from engine.execution.runner import FinishForward
    from engine.execution.stages import NextStage


NUM_SLOTS = 63  # plus slot 0 for no adapter, so that parts of the table start at multiples of 16 bytes
LARGEST_RANK = 192
"""Maximum rank of a site, for example rank 64 for each of q, k and v."""
SLOTS = ("qkv", "out", "up", "down")
"""Adapted matrices of a layer, in the order of `matrices`."""


class SlottedAdapters(Adapters):
    """Adapters with slots. Slot 0 is no adapter. Without `taken` there are no adapters and no table."""

    def __init__(self, spec: ModelSpec, max_rows: int, device: torch.device, *, taken: bool) -> None:
        super().__init__()
        self.taken = taken
        sites = [Site(layer, name) for layer in range(spec.num_layers) for name in SLOTS]
        self._places = {site: place for place, site in enumerate(sites)}
        self._slots: dict[int, int] = {}
        self._free = list(range(NUM_SLOTS, 0, -1)) if taken else []
        widest = max(spec.hidden_size, spec.q_size, spec.intermediate_size)
        count, rows = (len(sites), max_rows) if taken else (0, 0)
        self.table = torch.zeros((count, NUM_SLOTS + 1, 3), dtype=torch.int64, device=device)
        parts = -(-widest // configs.LORA_SPLIT), rows, LARGEST_RANK
        self.partial = torch.zeros(parts, dtype=torch.float32, device=device)

    def put(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        super().put(number, deltas)
        if not self._free or max((len(delta.a) for delta in deltas.values()), default=0) > LARGEST_RANK:
            return
        entries = np.zeros((len(self._places), 3), dtype=np.int64)
        for site, delta in deltas.items():
            assert delta.a.is_contiguous() and delta.b.is_contiguous(), "kernels need contiguous matrices"
            entries[self._places[site]] = delta.a.data_ptr(), delta.b.data_ptr(), len(delta.a)
        slot = self._slots[number] = self._free.pop()
        self.table[:, slot].copy_(send(entries, self.table.device))

    def slots_of(self, numbers: IntArray) -> IntArray | None:
        """Return the slots of the adapters [T]; None if one has no slot."""
        found = [self._slots.get(number, -1) if number else 0 for number in numbers.tolist()]
        return None if -1 in found else np.array(found, dtype=np.int64)

    def table_of(self, site: Site) -> Tensor:
        """Return addresses and ranks [slots, 3] of the adapters of a site."""
        return self.table[self._places[site]]


class StepSlots(StepAdapters):
    """Adapters of a step by table; they apply to all layers, because the host does not know the rows."""

    def __init__(self, adapters: SlottedAdapters, slots: Tensor, kernels: Kernels) -> None:
        """Use the slots [T] of rows in the device tensor `slots`."""
        super().__init__((), len(slots))
        self._adapters, self._slots, self._kernels = adapters, slots, kernels

    def has(self, site: Site) -> bool:  # noqa: ARG002
        return True

    def add(self, site: Site, x: Tensor, y: Tensor) -> None:
        self._kernels.lora_add(x, y, self._slots, self._adapters.table_of(site), self._adapters.partial)


class Sampling:
    """Sampling of one device.

    `history [rows, vocab]` int32 as in `engine.triton_kernels.draw` takes 4 bytes per row and token.
    """

    def __init__(
        self, rows: RowTable, kernels: Kernels, buffers: StepBuffers, vocab: int, device: torch.device
    ) -> None:
        self._rows, self._kernels, self._buffers = rows, kernels, buffers
        self._history = torch.zeros((rows.num_rows, vocab), dtype=torch.int32, device=device)
        self._loaded = np.full(rows.num_rows, -1, dtype=np.int64)  # generation whose history is on the device

    def begin(self, layout: Layout) -> StepWishes:
        """Write the parameters of a step's samples to the host side of the buffers, before the upload."""
        where = layout.sampled_rows
        if not len(where):
            return StepWishes()
        ends = layout.positions[layout.sampled_tokens] + 1
        # Tokens that were not sampled here are missing in the history, which is then rebuilt.
        self._loaded[where[layout.lengths[layout.sampled] > 1]] = -1
        return self._buffers.fill_wishes(where, ends, self._rows, self._history.shape[1])

    def choose(self, raw: Tensor, greedy: Tensor, wishes: StepWishes, masks: StepMasks | None) -> DeviceSamples:
        """Return tokens [S] int32 of logits [S, vocab] with argmax `greedy` (negative: not finite), after the upload.

        Masks are applied in place if no log-probabilities are wanted.
        """
        logits, tokens, kernels = raw, greedy, self._kernels
        if wishes.edits or wishes.penalties:
            logits = raw.to(torch.float32, copy=True)
        elif masks is not None and wishes.logprobs:
            logits = raw.clone()
        self._edit(logits, wishes)
        masked = masks is not None and len(masks.places) > 0
        if masks is not None and masked:
            places = send(masks.places.astype(np.int32), logits.device)
            kernels.token_mask(logits, places, send(masks.bits, logits.device))
        if logits is not raw or masked:
            tokens = _best(logits, greedy)
        if wishes.draws is not None:
            tokens = kernels.draw(logits, tokens, *wishes.draws)
        if masks is not None:
            tokens = _without_masks(tokens, masks)
        if wishes.penalties is not None:
            kernels.count_tokens(self._history, wishes.penalties.rows, wishes.penalties.places, tokens)
        return DeviceSamples(tokens, _logprobs(raw, tokens, wishes))

    def _edit(self, logits: Tensor, wishes: StepWishes) -> None:
        for index, values in wishes.edits:
            logits.view(-1).index_add_(0, index, values)
        penalties = wishes.penalties
        if penalties is None:
            return
        loads = self._loads(penalties.host_rows, penalties.host_ends)
        if loads is not None:
            rows, places, values = (send(part, logits.device) for part in loads)
            self._history.index_fill_(0, rows, 0)
            self._history.view(-1).index_copy_(0, places, values)
        self._kernels.penalise(logits, penalties.places, penalties.rows, self._history, penalties.values)

    def _loads(self, where: IntArray, ends: IntArray) -> tuple[IntArray, IntArray, Int32Array] | None:
        """Return the histories to load: rows sampled for the first time, or after forced tokens.

        Returns rows [n] to clear, flat indices [m] into the history, and values [m]; None if there are none. All tokens
        of such rows are known.
        """
        rows = self._rows
        new = self._loaded[where] != rows.generation[where]
        if not new.any():
            return None
        places, values = [], []
        for row, end in zip(where[new].tolist(), ends[new].tolist(), strict=True):
            tokens, first = rows.tokens[row, :end], int(rows.num_prompt[row])
            assert (tokens >= 0).all(), "all tokens of a new history must be known"
            ids, inverse = np.unique(tokens, return_inverse=True)
            said = 2 * np.bincount(inverse[first:], minlength=len(ids))
            said[np.unique(inverse[:first])] += 1
            places.append(row * self._history.shape[1] + ids)
            values.append(said.astype(np.int32))
        self._loaded[where[new]] = rows.generation[where[new]]
        return where[new], np.concatenate(places), np.concatenate(values)


def _best(logits: Tensor, greedy: Tensor) -> Tensor:
    """Return the argmax [S] int32 of changed logits; negative where the raw logits were not finite, because a mask may
    hide a NaN."""
    best, tokens = logits.max(dim=-1)
    return torch.where((greedy < 0) | ~best.isfinite(), greedy.clamp(max=-1), tokens.to(torch.int32))


def _without_masks(tokens: Tensor, masks: StepMasks) -> Tensor:
    """Replace tokens [S] at places without a mask by the reason."""
    for places, reason in ((masks.late, LATE_TOKEN), (masks.failed, UNMASKED_TOKEN)):
        if len(places):
            tokens = tokens.index_fill(0, send(places.astype(np.int32), tokens.device).long(), reason)
    return tokens


def _logprobs(raw: Tensor, tokens: Tensor, wishes: StepWishes) -> RowLogprobs | None:
    wanted = wishes.logprobs
    if wanted is None:
        return None
    rows, chosen = raw.index_select(0, wanted.places), tokens.index_select(0, wanted.places)
    return RowLogprobs.of(rows, chosen, wanted.host_places, wanted.counts)


class Stage:
    """Stage of a `forward` that runs in `stream`.

    `fill` writes a step and sends it to the device. `max_tokens` is the maximum number of tokens of a step.
    """

    def __init__(
        self, forward: Forward, stream: DeviceStream, fill: Callable[[Layout], StepInputs], max_tokens: int
    ) -> None:
        self._forward, self._stream, self._fill = forward, stream, fill
        self._weights, self._max_tokens = forward.decoder.weights, max_tokens
        self._in: Tensor | None = None
        self._out: Tensor | None = None
        self._entered: Mark | None = None

    def lead(self, beyond: "NextStage", chunks: IntArray, take: TakeHidden | None) -> Callable[[], Tensor]:
        """Run chunks [n, 4] here. Return a function that returns their sampled hidden state [S, H] on the host.

        All micro-batches are launched before the first one is sent on, which happens when it has ended.
        """
        layouts, begun = [], []
        for part in beyond.cut(chunks, whole=take is not None):
            layouts.append(decodes_first(part))
            inputs = self._fill(layouts[-1])
            begun.append(self._forward.through(inputs, self._forward.embed(inputs))[: len(layouts[-1].positions)])
        for layout, hidden in zip(layouts, self._leave(begun), strict=True):
            wanted = layout.sampled_tokens if take is None else np.arange(len(hidden))
            beyond.send(layout.chunks, hidden[None], wanted)
        answers = beyond.answers()

        def receive() -> Tensor:
            came = torch.cat([hidden[0] for hidden in answers()])
            if take is None:
                return came
            decoder = self._forward.decoder
            take(layouts[0], decoder.normed(self.enter(came, len(came))), decoder.head)
            return came[torch.from_numpy(layouts[0].sampled_tokens)]

        return receive

    def pass_through(self, beyond: "NextStage | None", chunks: IntArray, hidden: Tensor, wanted: IntArray) -> Tensor:
        """See StagedDevice."""
        layout = decodes_first(chunks)
        inputs, chunk = self._fill(layout), layout.token_rows
        firsts = np.cumsum(chunks[:, 2]) - chunks[:, 2]
        # Reorder tokens for attention, and back.
        came = firsts[chunk] + layout.positions - chunks[chunk, 1]
        x = self._forward.through(inputs, self.enter(hidden[0], inputs.shape.tokens, came))
        back = np.empty_like(came)
        back[came] = np.arange(len(came))
        leaving = back if beyond is not None else back[wanted]
        (left,) = self._leave([x.index_select(0, send(leaving, x.device))])
        if beyond is None:
            return left[None]
        beyond.send(chunks, left[None], wanted)
        return beyond.answers()()[0]

    def enter(self, hidden: Tensor, rows: int, order: IntArray | None = None) -> Tensor:
        """Copy hidden state [n, H], reordered by `order [n]`, from the host to the device, padded with zeros to `rows`
        rows."""
        if self._entered is not None:
            self._entered.synchronize()  # the staging memory is free again
        self._in = self._passing() if self._in is None else self._in
        passing = self._in[: len(hidden)]
        if order is None:
            passing.copy_(hidden)
        else:
            torch.index_select(hidden, 0, torch.from_numpy(order), out=passing)
        found = self._weights.embedding.new_zeros((rows, hidden.shape[1]))
        self._stream.copy(passing, found[: len(hidden)])
        self._entered = self._stream.mark()
        return found

    def _leave(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield hidden states [n, H] on the host as they arrive; valid until the next call."""
        self._out = self._passing() if self._out is None else self._out
        at, left = 0, list[tuple[Tensor, Mark]]()
        for part in parts:
            passing = self._out[at : at + len(part)]
            left.append((passing, self._stream.fetch(part, passing)))
            at += len(part)
        for passing, mark in left:
            mark.synchronize()
            yield passing

    def _passing(self) -> Tensor:
        width = self._weights.embedding.shape[1]
        size = self._max_tokens * width
        return pinned(size, self._weights.embedding.dtype, self._weights.embedding.device).view(-1, width)


log = logging.getLogger("tidemill.engine")

_NO_CHUNKS = np.zeros((0, 4), dtype=np.int64)
_EVERYTHING = SamplingParams(1, presence_penalty=1.0, logprobs=MAX_LOGPROBS, top_p=0.5, logit_bias=((0, 0.0),))
_WISHES = (_EVERYTHING, SamplingParams(1), SamplingParams(1, temperature=0.0))
"""Parameters with and without edits of the logits, and draws, which select different kernels."""


class CudaDevice:
    """A StagedDevice for CUDA. Two steps may be in flight. Use it from one thread. Raises ConfigError like
    `UnitPool.of`.

    Args:
        kernels: Triton kernels or their torch twins.
        graphs: Capture a graph for every bucket now (CUDA only).
        adapted: Whether LoRA adapters may be added.

    Attributes:
        tables: Block tables and last tokens on the device.
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
        self._swapper = Swapper(self.pool, kernels, self.stream, out=DeviceStream(device), back=DeviceStream(device))
        second = long_from(spec.rope, limits.max_model_len)
        self._buffers = StepBuffers(HeadSizes.of(spec), limits, weights.embedding.dtype, device, second)
        self._sampling = Sampling(self.rows, kernels, self._buffers, spec.vocab_size, device)
        self._buckets = Buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._kernels, self._max_tokens = kernels, limits.max_num_batched_tokens
        self.decoder = self._forward.decoder
        self.beyond: NextStage | None = None
        self._stage = Stage(self._forward, self.stream, self._fill_and_upload, limits.max_num_batched_tokens)
        self._graphs = Graphs(self._run, self.stream)
        self._last: RepeatedStep | None = None
        self._slotted = SlottedAdapters(spec, limits.max_num_seqs, device, taken=adapted)
        self.adapters: Adapters = self._slotted
        self.restore = self._forward.restore
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
            return self._begin_pipeline(self.beyond, chunks, masks, take)()
        self.pool.begin(self.rows, chunks)
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
            hidden = StepHidden.of(self._forward, self._buffers, inputs, rows, layout, self.pool.scratch_blocks)
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

    def begin_forward(self, chunks: IntArray, masks: FinishMasks | None) -> "FinishForward":
        """See StagedDevice."""
        assert self.beyond is not None, "no stage follows"
        return self._begin_pipeline(self.beyond, chunks, masks, None)

    def _begin_pipeline(
        self, beyond: "NextStage", chunks: IntArray, masks: FinishMasks | None, take: TakeHidden | None
    ) -> Callable[[], tuple[Tensor, DeviceSamples]]:
        receive, layout = self._stage.lead(beyond, chunks, take), decodes_first(chunks)

        def finish() -> tuple[Tensor, DeviceSamples]:
            came, inputs = receive(), self._fill(layout)
            wishes = self._sampling.begin(layout)
            self._upload()
            self._forward.begin(inputs)
            if len(came):
                self._forward.finish(inputs, self._stage.enter(came, inputs.shape.samples))
            return self._choose(inputs, len(layout.sampled), wishes, masks)

        return finish

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
        if self.decoder.spec.experts is not None:
            self.run_padding(self._max_tokens, 1)  # products of many rows have other tiles than those of few
        shape, none = self._buckets.exact(2, 1), np.zeros(0, dtype=np.int64)
        bits = np.full((1, -(-self._forward.logits.shape[1] // 32)), -1, dtype=np.int32)
        masks = StepMasks(np.zeros(1, dtype=np.int64), bits, np.zeros(1, dtype=np.int64), none)
        with torch.inference_mode(), self.stream.use():
            for params, masked in product(_WISHES, (None, masks)):
                inputs, hidden = self._buffers.fill(shape, decodes_first(_NO_CHUNKS), self.rows), None
                if self.pool.scratch_blocks:
                    hidden = StepHidden.padding(self._forward, inputs)
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
