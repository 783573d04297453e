"""Runner: a SchedulerOutput becomes operations of the cache, a forward pass, and tokens. All that backends share.

It owns the rows and applies the deltas in the order that `engine.scheduling.output` documents; memory, copies and the
forward pass are the device's (`Device`). Where a device takes steps ahead, `launch` comes back while the step runs, and
sampled tokens stay on the device, where the next step reads them before the host has seen them (a request that has
ended by then costs one token too many, which the core drops; one whose next tokens turn out to be forced has computed
the first of them, and what was sampled behind it is dropped). Where the device leaves sampling to the host, a step
waits for the steps before it; the masks of grammars do so everywhere, while its forward pass runs. Knows nothing of
scheduling, prefix sharing or text.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.api import TokenLogprobs
from engine.arrays import Int32Array, IntArray
from engine.errors import InvalidRequestError
from engine.execution.lane import Lane, Mark, pinned
from engine.execution.layout import chunk_array
from engine.execution.masks import MAX_FORCED, PATIENCE, FinishMasks, RowMasks, StepMasks, masked
from engine.execution.operations import CacheMover, run_operations
from engine.execution.pool import UnitPool
from engine.execution.pooling import RowPools, StepPools, TakeHidden
from engine.execution.rows import UNKNOWN, RowTable
from engine.execution.sampler import SampleInput, sample
from engine.execution.samples import LOGPROB_COLUMNS, DeviceSamples
from engine.grammar import Grammar
from engine.models.lora import Adapters, Delta, Site
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:  # running a model needs none of what compiles grammars
    from engine.structured.compiler import GrammarCompiler


class Device(CacheMover, Protocol):
    """A backend's half of a runner: its memory, and what runs on it, in order, in `lane`.

    `pipeline_depth`: steps whose tokens may still be unknown to the host when the next one is launched.
    """

    rows: RowTable
    pool: UnitPool
    lane: Lane
    pipeline_depth: int
    adapters: Adapters

    def adapt(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        """Rows may have this LoRA adapter from now on."""

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples | None]:
        """Run chunks [n, 4] (row, start, length, sample) over the rows' tokens and tables, and write their cache.

        Gives, in the order of the chunks that sample, logits [S, vocab] and tokens [S] int32, INVALID_TOKEN where
        logits are not finite: as their rows wish, and where `masks` allow it, which are asked for when the forward pass
        is under way. None for the samples: the host is to sample, and to mask. The next call may overwrite both. `take`
        is called with the step's hidden states. Where a row's token is UNKNOWN the device reads the one it sampled.
        """


class OtherRanks(Protocol):
    """Where each layer is divided among ranks: all but the first one, which is this runner's device.

    `pids`: the numbers of their processes.
    """

    @property
    def pids(self) -> list[int]: ...

    def begin(self, output: SchedulerOutput, rows: RowTable) -> None:
        """Have them run a step of the first rank's, whose `rows` know it already. Raises LinkLostError."""

    def end(self) -> None:
        """The first rank has launched its part of what was begun."""

    def lost(self) -> str | None:
        """After a step that failed: why there is no further one of all ranks; None if there is."""

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call it, from another thread, when one of them is gone, with why."""

    def close(self) -> None:
        """They end. Any thread may call it, again, too."""


DeviceT = TypeVar("DeviceT", bound=Device)


@dataclass(slots=True)
class _Samples:
    """Of a launched step: where its tokens belong, and when `tokens [n]` will hold them; `logprobs` reads theirs."""

    rows: IntArray
    ends: IntArray
    generations: IntArray
    tokens: Int32Array
    arrived: Mark
    logprobs: Callable[[], list[TokenLogprobs | None]] | None = None
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class Runner(Generic[DeviceT]):
    """Executes steps on one device; an `engine.scheduling.output.ModelRunner`."""

    def __init__(self, device: DeviceT) -> None:
        self.device = device
        self._rows = device.rows
        # host buffers for tokens and their log-probabilities: of the steps in flight, and one to spare
        depth, size = device.pipeline_depth, device.rows.num_rows * (1 + LOGPROB_COLUMNS)
        self._results = deque(pinned(size, torch.int32, device.pool.device) for _ in range(depth + 2))
        self._unsettled: deque[_Samples] = deque()
        self._last_end = 0.0
        self.masks: RowMasks | None = None
        self.grammars: GrammarCompiler | None = None
        self.ranks: OtherRanks | None = None
        self._pools = RowPools(device.rows)

    def can_enforce(self, grammar: Grammar) -> bool:
        """Whether rows may have this grammar; it is ready then."""
        try:
            if self.grammars is not None:
                self.grammars.compile(grammar)
        except InvalidRequestError:
            return False
        return self.grammars is not None

    def enforce(self, grammars: "GrammarCompiler", max_forced: int = MAX_FORCED, patience: float = PATIENCE) -> None:
        """Take requests with grammars and budgets from now on. `max_forced`, `patience`: see `RowMasks`."""
        self.grammars = grammars
        self.masks = RowMasks(self._rows, grammars, patience, max_forced=max_forced)

    def lost(self) -> str | None:
        """After a step that failed: why the device runs no further one; None if it does."""
        return (None if self.ranks is None else self.ranks.lost()) or self.device.lane.lost()

    def launch(self, output: SchedulerOutput) -> Collect:
        """Start one step; where nothing is taken ahead it has ended when this returns."""
        began, device = time.perf_counter(), self.device
        with torch.inference_mode(), device.lane.use():
            self._settle(all_but=device.pipeline_depth)
            self._rows.apply(output)
            if self.ranks is not None:
                self.ranks.begin(output, self._rows)
            run_operations(device, output.operations)
            chunks = chunk_array(output.chunks)
            pools = self._pools.begin(chunks)
            samples = self._run(chunks, pools) if len(chunks) else None
            arrived = device.lane.mark() if samples is None or pools is not None else samples.arrived
            if self.ranks is not None:
                self.ranks.end()
        return partial(self._collect, output.step_id, samples, pools, arrived, began)

    def _run(self, chunks: IntArray, pools: StepPools | None) -> _Samples | None:
        """Forward pass and sampling; None without a sample."""
        rows = self._rows
        ends = chunks[:, 1] + chunks[:, 2]
        assert (ends <= rows.num_blocks[chunks[:, 0]] * rows.block_size).all(), "a block table is too short"
        sampled = np.flatnonzero(chunks[:, 3])
        where, ends = chunks[sampled, 0], ends[sampled]
        masks = self._begin_masks(where, ends, alone=len(sampled) == len(chunks) and not self.device.pipeline_depth)
        logits, samples = self.device.forward(chunks, masks, pools)
        if not sampled.size:
            return None
        if samples is None:
            return self._sample(logits, where, ends, masks)
        return self._fetch(samples, where, ends, None if masks is None else masks())

    def _begin_masks(self, where: IntArray, ends: IntArray, alone: bool) -> FinishMasks | None:
        """Begin the masks of a step whose past is known; of others, when somebody asks for them. They are made once."""
        if not masked(self._rows, where, ends).any():
            return None
        assert self.masks is not None, "a request with a grammar was taken that nobody can enforce"
        if not self._unsettled:
            return cache(self.masks.start(where, ends, alone))

        @cache
        def finish() -> StepMasks:
            assert self.masks is not None
            self._settle(all_but=0)
            return self.masks.start(where, ends, alone)()

        return finish

    def _sample(self, logits: Tensor, where: IntArray, ends: IntArray, masks: FinishMasks | None) -> _Samples:
        """Sampling by the host; waits for the device."""
        self._settle(all_but=0)
        rows = self._rows
        known = [rows.tokens[row, :end] for row, end in zip(where.tolist(), ends.tolist(), strict=True)]
        batch = SampleInput(where, rows.num_prompt[where], known)
        allowed = None if masks is None else masks()
        tokens, logprobs = sample(logits, rows.sampling, batch, allowed)
        generations = rows.generation[where]
        sought = ends >= rows.known_to[where]  # a step ahead may have computed the first of what was forced behind it
        rows.tokens[where[sought], ends[sought]] = np.maximum(tokens, 0)[sought]
        forced = self._note_forced(where, ends, allowed)
        read = None if logprobs is None else lambda: logprobs
        return _Samples(where, ends, generations, tokens.astype(np.int32), self.device.lane.mark(), read, forced)

    def _note_forced(self, where: IntArray, ends: IntArray, allowed: StepMasks | None) -> Mapping[int, tuple[int, ...]]:
        """What must follow samples at `ends [n]` of rows `where [n]` stands in their rows from now on."""
        if allowed is None:
            return {}
        for at, run in allowed.forced.items():
            self._rows.force(int(where[at]), int(ends[at]) + 1, run)
        return allowed.forced

    def _fetch(self, sampled: DeviceSamples, where: IntArray, ends: IntArray, allowed: StepMasks | None) -> _Samples:
        """Send tokens [n], and what belongs to them, on their way to the host."""
        count, results, logprobs = len(where), self._results[0], None
        self._results.rotate(-1)
        if (wanted := sampled.logprobs) is not None:
            packed = results[self._rows.num_rows :][: wanted.packed.numel()].view(wanted.packed.shape)
            self.device.lane.copy(wanted.packed, packed)
            logprobs = partial(wanted.read, packed.numpy(), results[:count].numpy())
        arrived = self.device.lane.fetch(sampled.tokens, results[:count])
        rows = self._rows
        sought = ends >= rows.known_to[where]
        rows.tokens[where[sought], ends[sought]] = UNKNOWN
        forced = self._note_forced(where, ends, allowed)
        tokens = results[:count].numpy()
        samples = _Samples(where, ends, rows.generation[where], tokens, arrived, logprobs, forced)
        self._unsettled.append(samples)
        return samples

    def _settle(self, all_but: int) -> None:
        """Note the tokens of the oldest steps in their rows, waiting for them if need be."""
        while len(self._unsettled) > all_but:
            step = self._unsettled.popleft()
            step.arrived.synchronize()
            self._rows.settle(step.rows, step.ends, step.generations, step.tokens)

    def _collect(
        self, step_id: int, samples: _Samples | None, pools: StepPools | None, arrived: Mark, began: float
    ) -> ModelRunnerOutput:
        arrived.synchronize()
        with torch.inference_mode():
            pooled = {} if pools is None else pools.fetch()
        ended = time.perf_counter()
        # a step launched behind another begins when that one ends
        latency, self._last_end = ended - max(began, self._last_end), ended
        if samples is None:
            return ModelRunnerOutput(step_id, [], None, latency, {}, pooled)
        logprobs = None if samples.logprobs is None else samples.logprobs()
        tokens = samples.tokens.tolist()
        forced = {at: run for at, run in samples.forced.items() if tokens[at] >= 0}
        return ModelRunnerOutput(step_id, tokens, logprobs, latency, forced, pooled)
