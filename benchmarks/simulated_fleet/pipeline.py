"""A pipeline of simulated engines, each with some of the layers, and the links between them (KunServe §4.2, §4.3).

A step is cut into micro-batches, which pass the stages one behind the other; the next step's follow without a pause
where the tokens that they need are there. A stage takes its share of the roofline's time for the whole model, the last
one the output head as well. Knows nothing of requests.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.simulated_fleet.fleet import Flight
from engine.execution.stages import BatchPiece, MicroBatch
from engine.scheduling.output import ModelRunnerOutput, SchedulerOutput
from loadgen.simulation.gpu import NOISE, SIMULATED_TOKEN, SimulatedDevice, SimulatedRunner

LATENCY = 2e-5
"""Seconds until a message of no size is there."""
CHUNK_SECONDS = 0.02
"""How long the transfer of cache or weights keeps a link before it looks whether activations wait: about a stage."""

Former = Callable[[Sequence[BatchPiece]], list[MicroBatch]]


@dataclass(slots=True)
class Transfer:
    """Cache or weights on their way. `ends_at` moves while activations go first."""

    ends_at: float


class Link:
    """What one engine sends to others, bytes/s. `coordinated`: activations go first, between two chunks of a transfer;
    else they queue behind all transfers."""

    def __init__(self, bandwidth: float, *, coordinated: bool = True) -> None:
        self._bandwidth = bandwidth
        self._coordinated = coordinated
        self._transfers: deque[Transfer] = deque()
        self._began = 0.0

    def transfer(self, now: float, num_bytes: float) -> Transfer:
        """Send cache or weights behind all that is on its way."""
        self._forget(now)
        if not self._transfers:
            self._began = now
        start = self._transfers[-1].ends_at if self._transfers else now
        self._transfers.append(Transfer(start + num_bytes / self._bandwidth + LATENCY))
        return self._transfers[-1]

    def activations(self, at: float, num_bytes: float) -> float:
        """Send activations at `at`; when they are there."""
        seconds = num_bytes / self._bandwidth + LATENCY
        waiting = [transfer for transfer in self._transfers if transfer.ends_at > at]
        if not waiting or at < self._began:
            return at + seconds
        if not self._coordinated:
            return waiting[-1].ends_at + seconds
        for transfer in waiting:
            transfer.ends_at += seconds
        chunk = CHUNK_SECONDS - math.fmod(at - self._began, CHUNK_SECONDS)
        return at + min(chunk, waiting[-1].ends_at - seconds - at) + seconds

    def _forget(self, now: float) -> None:
        while self._transfers and self._transfers[0].ends_at <= now:
            self._transfers.popleft()


@dataclass(slots=True)
class Bubbles:
    """Stage-seconds in which a pipeline computed, and those in which it had a step in flight."""

    busy: float = 0.0
    span: float = 0.0

    @property
    def share(self) -> float:
        """Of the time in which there was work, how much the stages stood still."""
        return 1.0 - self.busy / self.span if self.span else 0.0


class PipelineRunner:
    """Stages of layers `kept`, one engine each, whose activations go over `links`. `bubbles`: the sum of stalls."""

    def __init__(
        self,
        device: SimulatedDevice,
        kept: Sequence[range],
        links: Sequence[Link],
        form: Former,
        bubbles: Bubbles,
        seed: int,
    ) -> None:
        self._device = device
        self._kept = kept
        self._links = links
        self._form = form
        self._bubbles = bubbles
        self._noise = SimulatedRunner(device, noise=NOISE, seed=seed)
        self._num_layers = sum(map(len, kept))
        self._free = [0.0] * len(kept)
        self._ready: dict[int, float] = {}
        self._end = 0.0

    def launch(self, output: SchedulerOutput, now: float) -> Flight:
        """Pass the step's micro-batches through the stages, those first whose tokens are there first."""
        for row in output.released_rows:
            self._ready.pop(row, None)
        chunks = output.chunks
        order = sorted(range(len(chunks)), key=lambda index: self._ready.get(chunks[index].row, 0.0))
        pieces = [BatchPiece(index, chunks[index].start, chunks[index].length) for index in order]
        times: dict[int, float] = {}
        begin = max(now, self._end)
        for batch in self._form(pieces):
            sampled = [p.item for p in batch if chunks[p.item].sample and _ends(p, chunks[p.item])]
            needed = max((self._ready.get(chunks[p.item].row, 0.0) for p in batch), default=0.0)
            end = self._pass(batch, len(sampled), max(now, needed))
            for item in sampled:
                times[chunks[item].row] = end
            self._end = max(self._end, end)
        self._ready.update(times)
        self._bubbles.span += len(self._kept) * max(0.0, self._end - begin)
        tokens = [SIMULATED_TOKEN] * sum(chunk.sample for chunk in chunks)
        result = ModelRunnerOutput(output.step_id, tokens, None, self._end - now)
        return Flight(result, self._free[0], self._end, times)

    def _pass(self, batch: MicroBatch, samples: int, ready: float) -> float:
        """When a micro-batch that is there at `ready` leaves the last stage."""
        model = self._device.model
        tokens = sum(piece.length for piece in batch)
        for stage, link in enumerate(self._links):
            last = stage == len(self._links) - 1
            seconds = self._noise.noisy(self.stage_seconds(batch, stage, samples if last else 0))
            ready = self._free[stage] = max(ready, self._free[stage]) + seconds
            self._bubbles.busy += seconds
            if not last:
                ready = link.activations(ready, tokens * model.hidden_size * model.bytes_per_value)
        return ready

    def stage_seconds(self, batch: MicroBatch, stage: int, samples: int) -> float:
        """One micro-batch on one stage, without noise."""
        device, spec = self._device, self._device.device
        tokens = context = pairs = 0
        for _, start, length in batch:
            tokens += length
            context += start + length
            if length > 1:
                pairs += length * start + length * (length + 1) // 2
        host = spec.host_seconds + len(batch) * spec.sequence_seconds
        layers = device.step_seconds(tokens, len(batch), 0, context, pairs) - host
        return host + layers * len(self._kept[stage]) / self._num_layers + device.head_seconds(samples)


def _ends(piece: BatchPiece, chunk: tuple[int, int, int, bool]) -> bool:
    """Whether a piece is the last of its chunk."""
    return piece.start + piece.length == chunk[1] + chunk[2]
