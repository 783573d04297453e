"""Runner: turns a SchedulerOutput into cache operations, a forward pass, and tokens, for all backends.

The runner owns the rows and applies deltas in the order documented in `engine.scheduling.output`. Memory, copies and
the forward pass belong to the `Device`.

If the device takes steps ahead, `launch` returns while the step runs. Sampled tokens stay on the device, where the next
step reads them before the host has seen them. A request that has ended by then costs one token too many, which the core
drops. A request whose next tokens turn out to be forced has computed the first; the sample behind it is
dropped. If sampling is left to the host, a step waits for the previous steps. Grammar masks always wait for them, while
the forward pass runs.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.api import NEVER, TokenLogprobs
from engine.arrays import Int32Array, IntArray
from engine.cache.blocks import CacheAction, CacheKind, CacheOperation, Tier
from engine.errors import InvalidRequestError
from engine.execution.masks import MAX_FORCED, PATIENCE, FinishMasks, RowMasks, StepMasks, masked
from engine.execution.pool import UnitPool
from engine.execution.pooling import RowPools, StepPools, TakeHidden
from engine.execution.rows import UNKNOWN, RowTable, chunk_array
from engine.execution.sampler import LOGPROB_COLUMNS, DeviceSamples, SampleInput, sample
from engine.execution.stream import DeviceStream, Mark, pinned
from engine.forms import Grammar
from engine.models.lora import Adapters, Delta, Site
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:  # running a model does not need the grammar compiler
    from engine.structured.compiler import GrammarCompiler


def run_operations(device: "Device", operations: Sequence[CacheOperation]) -> None:
    """Run, or launch, the operations of one step in order."""
    for action, group in groupby(operations, key=lambda operation: operation.action):
        batch = list(group)
        if action is CacheAction.RESTORE:
            device.restore(_restored_units(batch), np.array([each.start for each in batch], dtype=np.int64))
        elif action is CacheAction.SWAP_IN:
            device.swap_in(_swapped_units(batch, Tier.HOST, Tier.DEVICE))
        else:
            device.swap_out(_swapped_units(batch, Tier.DEVICE, Tier.HOST))


def _restored_units(batch: Sequence[CacheOperation]) -> IntArray:
    for each in batch:
        assert (each.source.kind, each.source.tier) == (CacheKind.HIDDEN, Tier.DEVICE), "only hidden state is restored"
        assert (each.target.kind, each.target.tier) == (CacheKind.KV, Tier.DEVICE), "a restore writes K and V"
    return np.array([each.source.units + each.target.units for each in batch], dtype=np.int64)


def _swapped_units(batch: Sequence[CacheOperation], source: Tier, target: Tier) -> IntArray:
    pairs: list[tuple[int, int]] = []
    for each in batch:
        assert (each.source.tier, each.target.tier) == (source, target), "a swap moves a block to the other tier"
        assert each.source.kind is each.target.kind, "a swap keeps the kind"
        pairs.extend(zip(each.source.units, each.target.units, strict=True))
    return np.array(pairs, dtype=np.int64)


class Device(Protocol):
    """Backend-specific part of a runner: memory, and operations that run in order in `stream`.

    `pipeline_depth` is the number of steps whose tokens may be unknown to the host when the next step is launched.
    """

    rows: RowTable
    pool: UnitPool
    stream: DeviceStream
    pipeline_depth: int
    adapters: Adapters

    def restore(self, units: IntArray, starts: IntArray) -> None:
        """Project K and V of blocks [n], full or not, with `units [n, 3]` (hidden state, K, V) and first positions
        `starts [n]`."""

    def swap_out(self, pairs: IntArray) -> None:
        """Copy device units to host units [n, 2]; later work may overwrite the device units."""

    def swap_in(self, pairs: IntArray) -> None:
        """Copy host units to device units [n, 2], before later work reads them."""

    def adapt(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        """Make a LoRA adapter available to rows."""

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples | None]:
        """Run chunks [n, 4] (row, start, length, sample) over the rows' tokens and tables, and write their cache.

        A row's UNKNOWN token is read from the device's own sample. The next call may overwrite the results.

        Args:
            masks: Called during the forward pass to get the masks of the samples.
            take: Called with the hidden states of the step.

        Returns:
            Logits [S, vocab] and samples in the order of the sampling chunks, chosen by the sampling parameters of
            their rows; INVALID_TOKEN if logits are not finite. None for the samples: the host samples and masks.
        """


DeviceT = TypeVar("DeviceT", bound=Device)


@dataclass(slots=True)
class _Samples:
    """Result of a launched step: target positions, and host buffers that are valid once `arrived` is passed."""

    rows: IntArray
    ends: IntArray
    generations: IntArray
    tokens: Int32Array
    arrived: Mark
    logprobs: Callable[[], list[TokenLogprobs | None]] | None = None
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


FinishForward = Callable[[], tuple[Tensor, DeviceSamples | None]]
"""Waits for the other stages of a step and returns the result of `Device.forward`."""
BeginForward = Callable[[IntArray, FinishMasks | None], tuple[FinishForward, Callable[[], float]]]
"""Begins a step in this stage. Returns its end, and a function that returns the seconds of the other stages after it,
less the seconds for which the end has waited."""


@dataclass(slots=True, eq=False)
class _BegunStep:
    """A step that passes the other stages of a pipeline.

    Attributes:
        rows: The rows that it samples.
        seconds: Its time in all stages, without waits.
    """

    rows: frozenset[int]
    finish: Callable[[], _Samples | None]
    elsewhere: Callable[[], float]
    seconds: float = 0.0
    samples: _Samples | None = None
    error: Exception | None = None


class Runner(Generic[DeviceT]):
    """Executes steps on one device; an `engine.scheduling.output.ModelRunner`."""

    def __init__(self, device: DeviceT) -> None:
        self.device = device
        self._rows = device.rows
        # Host buffers for tokens and their log-probabilities: one per step in flight, and a spare.
        depth, size = device.pipeline_depth, device.rows.num_rows * (1 + LOGPROB_COLUMNS)
        self._results = deque(pinned(size, torch.int32, device.pool.device) for _ in range(depth + 2))
        self._unsettled: deque[_Samples] = deque()
        self.begin_forward: BeginForward | None = None
        """Begins a forward pass whose end other stages compute; None: the device computes all of it."""
        self._begun: deque[_BegunStep] = deque()
        self._last_end = 0.0
        self._drafted = False
        self.masks: RowMasks | None = None
        self.grammars: GrammarCompiler | None = None
        self._pools = RowPools(device.rows)

    def can_enforce(self, grammar: Grammar) -> bool:
        """Return whether rows may have this grammar; compiles it if so."""
        try:
            if self.grammars is not None:
                self.grammars.compile(grammar)
        except InvalidRequestError:
            return False
        return self.grammars is not None

    def enforce(self, grammars: "GrammarCompiler", max_forced: int = MAX_FORCED, patience: float = PATIENCE) -> None:
        """Accept requests with grammars and budgets from now on. `max_forced`, `patience`: see `RowMasks`."""
        self.grammars = grammars
        self.masks = RowMasks(self._rows, grammars, patience, max_forced=max_forced)

    def lost(self) -> str | None:
        """Return, after a failed step, why the device cannot run further steps; None if it can."""
        return self.device.stream.lost()

    def launch(self, output: SchedulerOutput) -> Collect:
        """Start one step; if the device takes no steps ahead, return when it has ended.

        In a pipeline, return when the step has left this stage. Its result is completed when it is collected, or before
        a step that needs its tokens.
        """
        began, device = time.perf_counter(), self.device
        with torch.inference_mode(), device.stream.use():
            if any(self._needs(step, output) for step in self._begun):
                self.finish_begun()
            # Samples behind a wrong draft must not be stored after those of later steps.
            self._settle(all_but=0 if self._drafted else device.pipeline_depth)
            self._drafted = bool(output.drafts)
            self._rows.apply(output)
            run_operations(device, output.operations)
            chunks = chunk_array(output.chunks)
            pools = self._pools.begin(chunks)
            if self.begin_forward is not None and pools is None and len(chunks):
                step = self._begin(chunks, self.begin_forward)
                step.seconds = time.perf_counter() - began
                return partial(self._collect_begun, output.step_id, step)
            self.finish_begun()  # stages answer in order
            samples = self._run(chunks, pools) if len(chunks) else None
            arrived = device.stream.mark() if samples is None or pools is not None else samples.arrived
        return partial(self._collect, output.step_id, samples, pools, arrived, began)

    @staticmethod
    def _needs(step: _BegunStep, output: SchedulerOutput) -> bool:
        """Return whether a later step reads or replaces a row that `step` samples."""
        read = (chunk.row for chunk in output.chunks)
        return not step.rows.isdisjoint((*output.released_rows, *(new.row for new in output.new_requests), *read))

    def _begin(self, chunks: IntArray, begin: BeginForward) -> _BegunStep:
        where, ends, every = self._sampled(chunks)
        masks = self._begin_masks(where, ends, alone=every and not self.device.pipeline_depth)
        finish, elsewhere = begin(chunks, masks)
        step = _BegunStep(frozenset(where.tolist()), lambda: self._choose(*finish(), where, ends, masks), elsewhere)
        self._begun.append(step)
        return step

    def finish_begun(self) -> None:
        """Complete all begun steps. An error is raised when its step is collected."""
        while self._begun:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step, began = self._begun.popleft(), time.perf_counter()
        try:
            step.samples = step.finish()
        except Exception as error:
            step.error = error
        step.seconds += time.perf_counter() - began + step.elsewhere()

    def _collect_begun(self, step_id: int, step: _BegunStep) -> ModelRunnerOutput:
        with torch.inference_mode(), self.device.stream.use():
            while step in self._begun:  # later steps stay under way
                self._finish_oldest()
            if step.error is not None:
                raise step.error
            arrived = self.device.stream.mark() if step.samples is None else step.samples.arrived
        found = self._collect(step_id, step.samples, None, arrived, time.perf_counter())
        return replace(found, latency=step.seconds)

    def _sampled(self, chunks: IntArray) -> tuple[IntArray, IntArray, bool]:
        """Return rows and ends of the sampling chunks of `chunks [n, 4]`, and whether all chunks sample."""
        where, starts, lengths, sampled = chunks.T.copy()
        ends, every = starts + lengths, bool(sampled.all())
        assert (ends <= self._rows.num_blocks[where] * self._rows.block_size).all(), "a block table is too short"
        return (where, ends, True) if every else (where[sampled > 0], ends[sampled > 0], False)

    def _run(self, chunks: IntArray, pools: StepPools | None) -> _Samples | None:
        """Run the forward pass and sample; return None without samples."""
        where, ends, every = self._sampled(chunks)
        masks = self._begin_masks(where, ends, alone=every and not self.device.pipeline_depth)
        return self._choose(*self.device.forward(chunks, masks, pools), where, ends, masks)

    def _choose(
        self, logits: Tensor, samples: DeviceSamples | None, where: IntArray, ends: IntArray, masks: FinishMasks | None
    ) -> _Samples | None:
        """Sample from the result of a forward pass; return None without samples."""
        if not where.size:
            return None
        if samples is None:
            return self._sample(logits, where, ends, masks)
        return self._fetch(samples, where, ends, None if masks is None else masks())

    def _begin_masks(self, where: IntArray, ends: IntArray, alone: bool) -> FinishMasks | None:
        """Begin the masks of a step at once if its past is known, else on request. They are computed once."""
        if (self._rows.sampling.masked_from[where] == NEVER).all() or not masked(self._rows, where, ends).any():
            return None
        assert self.masks is not None, "a request has a grammar, but grammars are not enabled (`enforce`)"
        if not self._unsettled:
            return cache(self.masks.start(where, ends, alone))

        @cache
        def finish() -> StepMasks:
            assert self.masks is not None
            self._settle(all_but=0)
            return self.masks.start(where, ends, alone)()

        return finish

    def _sample(self, logits: Tensor, where: IntArray, ends: IntArray, masks: FinishMasks | None) -> _Samples:
        """Sample on the host; waits for the device."""
        self._settle(all_but=0)
        rows = self._rows
        known = [rows.tokens[row, :end] for row, end in zip(where.tolist(), ends.tolist(), strict=True)]
        batch = SampleInput(where, rows.num_prompt[where], known)
        allowed = None if masks is None else masks()
        tokens, logprobs = sample(logits, rows.sampling, batch, allowed)
        generations = rows.generation[where]
        forced = self._write(where, ends, np.maximum(tokens, 0), allowed)
        read = None if logprobs is None else lambda: logprobs
        return _Samples(where, ends, generations, tokens.astype(np.int32), self.device.stream.mark(), read, forced)

    def _write(
        self, where: IntArray, ends: IntArray, tokens: IntArray, allowed: StepMasks | None
    ) -> Mapping[int, tuple[int, ...]]:
        """Write tokens [n] sampled at `ends [n]` of rows `where [n]`, and the tokens forced after them, to the rows."""
        # A step taken ahead may have computed the first of the forced tokens.
        sought = ends >= self._rows.known_to[where]
        if sought.all():
            self._rows.tokens[where, ends] = tokens
        else:
            self._rows.tokens[where[sought], ends[sought]] = tokens[sought]
        if allowed is None:
            return {}
        for at, run in allowed.forced.items():
            self._rows.force(int(where[at]), int(ends[at]) + 1, run)
        return allowed.forced

    def _fetch(self, sampled: DeviceSamples, where: IntArray, ends: IntArray, allowed: StepMasks | None) -> _Samples:
        """Start the copy of tokens [n] and log-probabilities to the host."""
        count, results, logprobs = len(where), self._results[0], None
        self._results.rotate(-1)
        if (wanted := sampled.logprobs) is not None:
            packed = results[self._rows.num_rows :][: wanted.packed.numel()].view(wanted.packed.shape)
            self.device.stream.copy(wanted.packed, packed)
            logprobs = partial(wanted.read, packed.numpy(), results[:count].numpy())
        fetched = results[:count]
        arrived = self.device.stream.fetch(sampled.tokens, fetched)
        forced = self._write(where, ends, np.full(count, UNKNOWN), allowed)
        tokens, generations = fetched.numpy(), self._rows.generation[where]
        samples = _Samples(where, ends, generations, tokens, arrived, logprobs, forced)
        self._unsettled.append(samples)
        return samples

    def _settle(self, all_but: int) -> None:
        """Store the tokens of all but the newest steps in their rows, waiting for them if necessary."""
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
        trial = pools is not None and pools.scores
        ended = time.perf_counter()
        # A step launched behind another begins when the other ends.
        latency, self._last_end = ended - max(began, self._last_end), ended
        if samples is None:
            return ModelRunnerOutput(step_id, [], None, latency, {}, pooled, trial)
        logprobs = None if samples.logprobs is None else samples.logprobs()
        tokens = samples.tokens.tolist()
        forced = {at: run for at, run in samples.forced.items() if tokens[at] >= 0}
        return ModelRunnerOutput(step_id, tokens, logprobs, latency, forced, pooled, trial)
