"""Drives a runner by hand-made steps, as a scheduler would that changes its mind about the cache all the time.

With a decoder the runner is a real one, without one the checking fake. Units come from a real BlockPool; every free
unit and all scratch is filled with NaN before each step, so that a read of unwritten memory shows in
the logits.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from devices import device_of
from fakes.runner import FakeRunner
from integrity import check_pool
from native_build import native

from engine.api import SamplingParams
from engine.arrays import IntArray
from engine.cache.blocks import (
    BlockPool,
    CacheAction,
    CacheBlock,
    CacheEntry,
    CacheKind,
    CacheOperation,
    Tier,
    extend_hashes,
)
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.device import NativeDevice, Sampled
from engine.execution.cuda.device import CudaDevice
from engine.execution.runner import Runner
from engine.limits import Limits
from engine.models.decoder import Decoder
from engine.scheduling.output import AppendedEntries, Chunk, NewRequest, ReplacedEntry, SchedulerOutput

BLOCK = 4
ROWS = 6
VOCAB = 97
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


class RecordingDecoder(Decoder):
    """Keeps the logits of the last step."""

    last: torch.Tensor | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.last = super().logits(hidden)
        return self.last


class RecordingNative(NativeDevice):
    """Keeps its logits where a driver looks for them."""

    def run(self, chunks: IntArray, *, logits: bool, **stage: Any) -> Sampled:
        result = super().run(chunks, logits=True, **stage)
        self.decoder.last = None if result.logits is None else result.logits.clone()  # type: ignore[attr-defined]
        return Sampled(result.best, result.best_ids, result.logits if logits else None)


def recording_device(backend: str, decoder: RecordingDecoder, limits: Limits, **options: Any) -> Any:
    """Build a device of the backend; the logits of its steps are found by `HandDriver`."""
    if backend == "torch":
        return TorchDevice(decoder, limits, **options)
    if backend == "cuda":
        return device_of(backend, decoder.spec, decoder.weights, limits, **options)
    return RecordingNative(decoder, native(), limits, **options)


@dataclass(slots=True, eq=False)
class Live:
    """One request; `row` is -1 while it is parked."""

    prompt: list[int]
    num_outputs: int
    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    blocks: list[CacheBlock] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    row: int = -1
    fresh: bool = False

    @property
    def ended(self) -> bool:
        return len(self.token_ids) == len(self.prompt) + self.num_outputs


class HandDriver:
    """`kinds`: what new blocks may be; `calm`: nothing is ever parked or converted."""

    def __init__(
        self,
        decoder: RecordingDecoder | None,
        seed: int,
        *,
        kinds: tuple[CacheKind, ...] = (CacheKind.KV,),
        num_units: int = 90,
        host_units: int = 0,
        scratch_blocks: int = 0,
        calm: bool = False,
        backend: str = "torch",
    ) -> None:
        self.decoder = decoder
        self.rng = np.random.default_rng(seed)
        self.kinds = kinds
        self.calm = calm
        self.scratch_blocks = scratch_blocks
        self.pool, self.host = BlockPool(num_units), BlockPool(host_units, Tier.HOST)
        self.runner: Runner[Any] | FakeRunner
        limits = Limits(ROWS, 96, 128, num_units, BLOCK)
        tiers = {"scratch_blocks": scratch_blocks, "host_units": host_units}
        if decoder is None:
            self.runner = FakeRunner(block_size=BLOCK, vocab_size=VOCAB, **tiers)
        else:
            self.runner = Runner(recording_device(backend, decoder, limits, **tiers))
        self.live: list[Live] = []
        self.free_rows = list(range(ROWS))
        self.released: list[int] = []
        self.step_id = 0
        self.seen: set[str] = set()

    def add(self, prompt: list[int], num_outputs: int) -> Live:
        request = Live(prompt, num_outputs, list(prompt))
        self.live.append(request)
        return request

    def run(self, max_steps: int = 1000) -> None:
        """Until every request has ended; nothing may be left allocated."""
        for _ in range(max_steps):
            if not self.live:
                break
            self.step()
        assert not self.live, "the requests do not end"
        self._check_integrity()
        assert self.pool.num_available_units == self.pool.num_units
        assert self.host.num_free_units == self.host.num_units

    def step(self) -> None:
        """One step of random decisions, executed and confirmed."""
        self._operations: list[CacheOperation] = []
        self._new: list[Live] = []
        self._appended: list[AppendedEntries] = []
        self._replaced: list[ReplacedEntry] = []
        self._chunks: list[tuple[Chunk, Live]] = []
        self._in_scratch: set[CacheEntry] = set()
        for request in self.rng.permutation(np.array(self.live, dtype=object)).tolist():
            self._decide(request)
        if not self._chunks:
            self._give_up(self.live[self.rng.integers(len(self.live))])
            self.seen.add("recompute")
        self._poison()
        for request in self._execute():
            if request.ended:
                self._give_up(request)
                self.live.remove(request)
        self.pool.complete_step(self.step_id)
        self.host.complete_step(self.step_id)
        self.step_id += 1
        self._check_integrity()

    def _check_integrity(self) -> None:
        held = [block for request in self.live for block in request.blocks]
        check_pool(self.pool, (block for block in held if block.on_device))
        check_pool(self.host, (block for block in held if not block.on_device))

    def _release(self, block: CacheBlock) -> None:
        (self.pool if block.on_device else self.host).release(block, self.step_id)

    def _execute(self) -> list[Live]:
        released, self.released = tuple(self.released), []
        output = SchedulerOutput(
            self.step_id,
            tuple(chunk for chunk, _ in self._chunks),
            tuple(self._whole(request) for request in self._new),
            tuple(self._appended),
            released,
            replaced=tuple(self._replaced),
            operations=tuple(self._operations),
        )
        result = self.runner.launch(output)()
        samples = [request for chunk, request in self._chunks if chunk.sample]
        for index, (request, token) in enumerate(zip(samples, result.token_ids, strict=True)):
            request.token_ids.append(token)
            if self.decoder is not None:
                request.logits.append(self._logits()[index].float().clone())
        for chunk, request in self._chunks:
            request.computed = chunk.start + chunk.length
            self._publish(request)
        return samples

    def _logits(self) -> torch.Tensor:
        """Of the last step's samples."""
        if isinstance(self.runner, Runner) and isinstance(self.runner.device, CudaDevice):
            return self.runner.device._forward.logits
        assert self.decoder is not None and self.decoder.last is not None
        return self.decoder.last

    def _decide(self, request: Live) -> None:
        if request.row < 0:
            if not self.free_rows or not self._resume(request):
                return
        elif not self.calm and self.rng.random() < 0.12:
            self._park(request)
            return
        if not self.calm and self.rng.random() < 0.3:
            self._restore_some(request)
        self._add_chunk(request)

    def _resume(self, request: Live) -> bool:
        """Give the request a row, with prefix hits if it is new, its blocks back from the host if it was parked."""
        if not request.blocks:
            extend_hashes(request.hashes, request.token_ids, BLOCK, b"")
            for block_hash in request.hashes[: (len(request.token_ids) - 1) // BLOCK]:
                if (block := self.pool.find(block_hash)) is None:
                    break
                self.pool.acquire(block, online=True)
                request.blocks.append(block)
                self.seen.add(f"hit {block.entry.kind.value}")
            request.computed = len(request.blocks) * BLOCK
        for index, block in enumerate(request.blocks):
            if block.entry.tier is Tier.HOST and not self._move(request, index, CacheAction.SWAP_IN):
                return False  # restored blocks stay: blocks of a parked request lie where they lie
        request.row = self.free_rows.pop()
        self._new.append(request)
        return True

    def _park(self, request: Live) -> None:
        """Take the row; each block goes to the host, or stays."""
        stays = self.rng.random() < 0.3
        for index in range(len(request.blocks)):
            if not stays or self.rng.random() < 0.5:
                self._move(request, index, CacheAction.SWAP_OUT)
        self._leave_row(request)

    def _restore_some(self, request: Live) -> None:
        for index, block in enumerate(request.blocks):
            if block.entry.kind is CacheKind.HIDDEN and self.rng.random() < 0.5:
                moved = self._move(request, index, CacheAction.RESTORE)
                if moved and request not in self._new:
                    self._replaced.append(ReplacedEntry(request.row, index, request.blocks[index].entry))

    def _move(self, request: Live, index: int, action: CacheAction) -> bool:
        source = request.blocks[index]
        kind = CacheKind.KV if action is CacheAction.RESTORE else source.entry.kind
        target = (self.host if action is CacheAction.SWAP_OUT else self.pool).allocate(kind, online=True)
        if target is None:
            return False
        self._operations.append(CacheOperation(action, source.entry, target.entry, index * BLOCK))
        request.blocks[index] = target
        self._release(source)
        self.seen.add(f"{action.value} {source.entry.kind.value}")
        return True

    def _add_chunk(self, request: Live) -> None:
        left = len(request.token_ids) - request.computed
        length = left if left == 1 else int(self.rng.integers(1, min(left, 11) + 1))
        added: list[CacheBlock] = []
        while (len(request.blocks) + len(added)) * BLOCK < request.computed + length:
            block = self.pool.allocate(self.kinds[self.rng.integers(len(self.kinds))], online=True)
            if block is None:
                break
            added.append(block)
        length = min(length, (len(request.blocks) + len(added)) * BLOCK - request.computed)
        used = (request.blocks + added)[: -(-(request.computed + max(length, 0)) // BLOCK)]
        scratch = {block.entry for block in used if block.entry.kind is CacheKind.HIDDEN} | self._in_scratch
        if length > 0 and len(scratch) <= self.scratch_blocks:
            self._in_scratch = scratch
            end = request.computed + length
            chunk = Chunk(request.row, request.computed, length, end == len(request.token_ids))
            self._chunks.append((chunk, request))
        if added and request not in self._new:
            self._appended.append(AppendedEntries(request.row, tuple(block.entry for block in added)))
        request.blocks.extend(added)

    def _give_up(self, request: Live) -> None:
        for block in reversed(request.blocks):
            self._release(block)
        request.blocks, request.computed = [], 0
        if request.row >= 0:
            self._leave_row(request)

    def _leave_row(self, request: Live) -> None:
        if request in self._new:
            self._new.remove(request)
        self._replaced = [each for each in self._replaced if each.row != request.row]
        self._appended = [each for each in self._appended if each.row != request.row]
        self.released.append(request.row)
        self.free_rows.append(request.row)
        request.row = -1

    def _publish(self, request: Live) -> None:
        extend_hashes(request.hashes, request.token_ids, BLOCK, b"")
        for index in range(request.computed // BLOCK):
            self.pool.publish(request.blocks[index], request.hashes[index])

    @staticmethod
    def _whole(request: Live) -> NewRequest:
        entries = tuple(block.entry for block in request.blocks)
        return NewRequest(request.row, "r", tuple(request.token_ids), len(request.prompt), GREEDY, entries)

    def _poison(self) -> None:
        if isinstance(self.runner, FakeRunner):
            return
        device = self.runner.device.pool
        device.units[torch.tensor(self.pool._free, dtype=torch.int64)] = math.nan
        device.host_units[torch.tensor(self.host._free, dtype=torch.int64)] = math.nan
        device.slices[device.scratch_base :] = math.nan
