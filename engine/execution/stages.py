"""A runner that can be one stage of a pipeline of engines: it releases layers that another engine holds, uses their
memory for additional cache units, and loads them again later (KunServe §4).

The leader keeps the first layers, the embedding and the head. It runs every step, samples, and keeps the state of rows.
The other engines run their layers on the data that it sends (chunks, block tables, hidden state) and return the hidden
state of sampled tokens. Units have the same numbers on all engines; the caller moves the past of requests.

Any device that can run a range of layers works (`StagedDevice`).

Split a batch into micro-batches of a pipeline by predicted cost (KunServe §4.3, Figures 10-11).

A stage idles if one micro-batch takes longer than the next. The number of tokens does not determine the time: a chunk
late in a prompt reads all tokens before it, and a decode reads its whole context. A batch is therefore halved so that
both sides have the same predicted cost, and the halves again, down to a minimum number of tokens. Each micro-batch is
charged the constant of a step once (Equation 1 in the paper charges it to each chunk).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.errors import ConfigError
from engine.execution.masks import FinishMasks
from engine.execution.runner import Device, FinishForward, Runner
from engine.machine.child import Link
from engine.models.decoder import Decoder
from engine.models.weights import LayerWeights, ResidentLayers, matrices
from engine.scheduling.output import Collect, SchedulerOutput
from predictor.features import BatchFeatures, LatencyPredictor, Reach

GRAIN = 16
"""Chunks are cut at multiples of this number of tokens."""


class BatchPiece(NamedTuple):
    """Tokens [start, start + length) of `item`, a sequence of the batch. A decode has length 1 and is never cut."""

    item: int
    start: int
    length: int


MicroBatch = list[BatchPiece]


def balanced(
    pieces: Sequence[BatchPiece], model: LatencyPredictor, *, stages: int, min_tokens: int
) -> list[MicroBatch]:
    """Halve the pieces, in order, repeatedly into micro-batches of equal predicted cost.

    All micro-batches are halved until there is one per stage, and further while the halves have at least `min_tokens`
    tokens on average. All are halved equally often, so that their costs stay equal.
    """
    tokens = sum(piece.length for piece in pieces)
    batches, count = ([list(pieces)] if pieces else []), 1
    while batches and (count < stages or tokens >= 2 * count * min_tokens):
        halves = [half for batch in batches for half in _halve(batch, model) if half]
        if len(halves) == len(batches):
            break
        batches, count = halves, 2 * count
    return batches


def quickest(pieces: Sequence[BatchPiece], model: LatencyPredictor, *, stages: int, most: int = 4) -> list[MicroBatch]:
    """Return the batch as 1, 2, ... `most` micro-batches, whichever is predicted to leave the pipeline first.

    The stages have equal parts of the layers. A few decodes stay together, because each half would read all weights.
    """
    best, least, count = [list(pieces)], cost(pieces, model), 2
    while count <= most:
        batches = balanced(pieces, model, stages=count, min_tokens=sum(piece.length for piece in pieces))
        seconds = max(cost(batch, model) for batch in batches) * (len(batches) + stages - 1) / stages
        if seconds < least:
            best, least = batches, seconds
        count *= 2
    return best


def cost(pieces: Sequence[BatchPiece], model: LatencyPredictor) -> float:
    """Return the predicted seconds of one micro-batch through all layers, without other micro-batches."""
    features = BatchFeatures(model.reach)
    for _, start, length in pieces:
        features.add_chunk(start, length)
    return model.predict(features)


def _halve(batch: MicroBatch, model: LatencyPredictor) -> tuple[MicroBatch, MicroBatch]:
    """Cut a micro-batch so that both sides cost nearly the same. If it cannot be cut, the second half is empty.

    Costs grow with tokens, so the cut is found by bisection.
    """
    if sum(piece.length for piece in batch) == 1:
        return batch, []
    reach = model.reach
    rows = np.array([_row(piece, reach) for piece in batch])
    sums = np.concatenate((np.zeros_like(rows[:1]), rows.cumsum(axis=0)))

    def gap(index: int, tokens: int) -> float:
        """Return the cost of the part before token `tokens` of piece `index`, minus the cost of the remainder."""
        left, right = sums[index], sums[-1] - sums[index]
        if tokens:
            _, start, length = batch[index]
            rest = BatchPiece(0, start + tokens, length - tokens)
            left = left + _row(BatchPiece(0, start, tokens), reach)
            right = right - rows[index] + _row(rest, reach)
        before, after = (BatchFeatures.from_row(each.tolist()) for each in (left, right))
        return model.predict(before) - model.predict(after)

    low, high = 0, len(batch)  # find the last piece boundary at which the left side does not cost more
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gap(middle, 0) <= 0.0 else (low, middle)
    parts, best = (batch[low].length - 1) // GRAIN, 0
    while best < parts:
        middle = (best + parts + 1) // 2
        best, parts = (middle, parts) if gap(low, middle * GRAIN) <= 0.0 else (best, middle - 1)
    ends = [(low, best * GRAIN), (low, min((best + 1) * GRAIN, batch[low].length))]
    index, tokens = min(ends, key=lambda end: abs(gap(*end)) if end[1] < batch[low].length else abs(gap(low + 1, 0)))
    return cut(batch, sum(piece.length for piece in batch[:index]) + tokens)


def cut(batch: Sequence[BatchPiece], tokens: int) -> tuple[MicroBatch, MicroBatch]:
    """Return the first `tokens` tokens and the remainder."""
    first: MicroBatch = []
    for index, piece in enumerate(batch):
        if tokens < piece.length:
            if tokens:
                first.append(BatchPiece(piece.item, piece.start, tokens))
                piece = BatchPiece(piece.item, piece.start + tokens, piece.length - tokens)
            return first, [piece, *batch[index + 1 :]]
        first.append(piece)
        tokens -= piece.length
    return first, []


def _row(piece: BatchPiece, reach: Reach) -> tuple[int, ...]:
    features = BatchFeatures(reach)
    features.add_chunk(piece.start, piece.length)
    return features.row()


LoadLayers = Callable[[Sequence[int]], list[LayerWeights]]
"""Loads layers, by ascending index, as they were at the start, and refills released layers
(`ResidentLayers.refill`). Raises ModelLoadError."""
_END = b"end"


class StageError(RuntimeError):
    """A step failed on another engine of the pipeline."""


@runtime_checkable
class StagedDevice(Device, Protocol):
    """A device that runs a range of layers and can lead the stages after it. `beyond` runs the layers after these on
    the next engine of a pipeline."""

    decoder: Decoder
    beyond: "NextStage | None"

    def begin_forward(self, chunks: IntArray, masks: FinishMasks | None) -> FinishForward:
        """Run this stage of a step, as `forward` does, and return a function that waits for the other stages."""

    def keep(self, layers: range) -> None:
        """Run only these layers from now on. The pool is already arranged for them; other weights may be released."""

    def pass_through(self, chunks: IntArray, hidden: Tensor, wanted: IntArray) -> Tensor:
        """Run the next part of a step that another device began, with the data of `NextStage.send`, chunk i in row i.

        Returns the wanted hidden states, on the host.
        """


class PipelineRunner:
    """An `engine.scheduling.output.ModelRunner` whose layers can be dropped; `load` loads them again.

    Only `launch` and `prepare_restore` may be called while a step is in flight. `layer_bytes` are the weights of a
    layer, `unit_layer_bytes` is one layer's part of a unit.
    """

    def __init__(self, runner: Runner[Any], load: LoadLayers) -> None:
        if refusal := cannot_drop(runner):
            raise ConfigError(f"layers cannot be dropped: {refusal}")
        self._runner = runner
        self._device: StagedDevice = runner.device
        self._layers = cast(ResidentLayers, self._device.decoder.weights.layers)
        self._load = load
        self._loaded: dict[int, LayerWeights] = {}
        slices = self._device.pool.slices
        self.num_layers = len(self._layers)
        self.layer_bytes = sum(matrix.data().nbytes for matrix in matrices(self._layers[0]))
        self.unit_layer_bytes = slices.shape[1] * slices.itemsize

    def launch(self, output: SchedulerOutput) -> Collect:
        """See ModelRunner. As a leader, raises LinkLostError, or StageError if another engine failed."""
        return self._runner.launch(output)

    def lost(self) -> str | None:
        """See Runner."""
        return self._runner.lost()

    def drop(self, keep: range, num_units: int) -> None:
        """Release the weights of all layers outside `keep` and arrange the pool for `num_units` units of those.

        Existing units keep their contents for these layers. Raises ValueError, without changes, if there is too little
        memory.
        """
        if not (len(keep) and keep.start >= 0 and keep.stop <= self.num_layers):
            raise ValueError(f"layers {keep} are not in a model of {self.num_layers} layers")
        if absent := [index for index in self._layers.absent if index in keep]:
            raise ValueError(f"layers {absent} are not loaded")
        pool, needed = self._device.pool, self._device.pool.bytes_of(keep, num_units)
        self._loaded.clear()  # loaded weights may occupy the memory of new units
        with torch.inference_mode(), self._device.stream.use():
            self._layers.give_up(sorted(set(range(self.num_layers)) - set(keep) - set(self._layers.absent)), needed)
            pool.relay(keep, num_units)
            self._device.keep(keep)

    def prepare_restore(self, num_units: int) -> None:
        """Load absent layers into the memory of units from `num_units` on, which must be unused.

        Shortens `restore`; may run in a thread beside steps. Raises ModelLoadError.
        """
        self._device.pool.give_back(max(num_units, 0))
        if absent := [index for index in self._layers.absent if index not in self._loaded]:
            self._loaded.update(zip(absent, self._load(absent), strict=True))

    def restore(self, num_units: int) -> None:
        """Load all layers and arrange the pool for `num_units` units, which keep the contents of layers held here.

        May be called at any time; it cancels a pipeline. Raises ModelLoadError, without changes.
        """
        pool, every, absent = self._device.pool, range(self.num_layers), self._layers.absent
        self.prepare_restore(num_units)
        self._device.beyond = self._runner.begin_forward = None
        with torch.inference_mode(), self._device.stream.use():
            if pool.layers != every or pool.num_units != num_units:
                pool.relay(every, num_units)
            for index in absent:
                self._layers[index] = self._loaded[index]
            self._loaded.clear()
            self._device.keep(every)

    def read_past(self, units: Sequence[int], layers: range) -> bytes:
        """Return K and V of whole units for layers held here. Raises ValueError for other layers."""
        with torch.inference_mode(), self._device.stream.use():
            past = self._device.pool.past(np.array(units, dtype=np.int64), layers)
            return bytes(_bytes_of(past))

    def write_past(self, units: Sequence[int], layers: range, data: bytes | bytearray | memoryview) -> None:
        """Write a result of `read_past` to as many units and the same layers. Raises ValueError for a wrong size."""
        if len(data) != len(units) * len(layers) * self.unit_layer_bytes:
            raise ValueError(f"{len(data)} bytes do not match {len(units)} units of {len(layers)} layers")
        pool = self._device.pool
        if data:
            with torch.inference_mode(), self._device.stream.use():
                values = torch.frombuffer(bytearray(data), dtype=pool.slices.dtype)
                pool.put_past(np.array(units, dtype=np.int64), layers, values)

    def lead(self, link: Link, model: LatencyPredictor | None = None) -> None:
        """Lead: run the layers held here and send the rest over the link, from the next step on.

        Also for an engine that follows another and lacks the last layer. With `model`, which predicts steps of a whole
        engine, a step runs as micro-batches if two concurrent stages are faster.
        """
        beyond = self._device.beyond = NextStage(self._device, link, model)
        self._runner.begin_forward = lambda *step: (self._device.begin_forward(*step), lambda: beyond.elsewhere)

    def hand_over(self, units: Sequence[int], layers: range, data: bytes) -> None:
        """As a leader, write K and V to units of the follower before its next step. Raises LinkLostError."""
        assert self._device.beyond is not None, "no stage follows"
        head = {"units": units, "layers": (layers.start, layers.stop)}
        _send(self._device.beyond.link, head, [data])

    def fetch(self, request_id: str, units: Sequence[int]) -> None:
        """As a leader, write a past that the follower has kept to the same units on both engines.

        Without units the follower forgets it. Raises LinkLostError.
        """
        beyond = self._device.beyond
        assert beyond is not None, "no stage follows"
        with torch.inference_mode(), self._device.stream.use():
            self._runner.finish_begun()  # the follower answers in order
        _send(beyond.link, {"past": request_id, "units": units}, [b""])
        data = beyond.link.receive()
        if units:
            self.write_past(units, self._device.pool.layers, data)

    def end_lead(self) -> None:
        """Tell the follower that no steps follow. The link stays usable. Raises LinkLostError."""
        beyond, self._device.beyond, self._runner.begin_forward = self._device.beyond, None, None
        if beyond is not None:
            beyond.link.send(_END)

    def follow(self, link: Link, kept: dict[str, list[tuple[range, bytes]]] | None = None) -> None:
        """Run steps for the leader until it ends, and write the pasts that it delivers.

        `kept`: parts of pasts by request: those of the layers held here, and those for the leader. Raises
        LinkLostError, and StageError if the device is lost.
        """
        device = self._device
        tokens = device.rows.tokens  # unused here, but native kernels check the tokens of a chunk
        tokens[tokens < 0] = 0
        for step in _steps(link):
            if isinstance(step, _Delivery):
                self._take_delivery(link, step, kept or {})
                continue
            began = perf_counter()
            try:
                with torch.inference_mode(), device.stream.use():
                    device.rows.mirror(step.tables, step.is_long)
                    result, failure = device.pass_through(step.chunks, step.hidden, step.wanted), ""
            except Exception as error:  # the leader waits for an answer in any case
                result, failure = torch.empty(0), str(error) or type(error).__name__
            head = {"failure": failure, "parts": result.shape, "number": step.number}
            _send(link, head | {"seconds": perf_counter() - began}, [_bytes_of(result)])
            if failure and (lost := device.stream.lost()) is not None:
                raise StageError(f"the device is lost: {lost}")
        device.rows.num_blocks[:] = 0

    def _take_delivery(self, link: Link, past: "_Delivery", kept: dict[str, list[tuple[range, bytes]]]) -> None:
        if past.layers is not None:
            self.write_past(past.units, past.layers, past.data)
            return
        for layers, data in kept.pop(past.request_id):
            if layers != self._device.pool.layers:
                link.send(data)
            elif past.units:
                self.write_past(past.units, layers, data)


def cannot_drop(runner: Runner[Any]) -> str | None:
    """Return why the runner's layers cannot be dropped; None if they can."""
    device = runner.device
    if not isinstance(device, StagedDevice):
        return "only layers of native models can be dropped"
    pool, layers = device.pool, device.decoder.weights.layers
    if not isinstance(layers, ResidentLayers):
        return "streamed layers take no memory that the cache could use"
    if pool.scratch_blocks or len(pool.host_units):
        return "hidden state and the host tier need units of all layers"
    if len(layers) < 2:
        return "the model has only one layer"
    if device.adapters:
        return "adapters apply to all layers"
    return None if pool.spare_bytes else "the cache was created without addresses for more units"


@dataclass(frozen=True, slots=True)
class _Step:
    """One micro-batch.

    Attributes:
        chunks: [n, 4], of rows 0 to n - 1.
        tables: [2, n, blocks] of K and V.
        is_long: [n], see `RowTable`.
        hidden: [parts, T, H].
        wanted: [R], tokens whose hidden state is returned.
    """

    number: int
    chunks: IntArray
    tables: IntArray
    is_long: npt.NDArray[np.bool_]
    hidden: Tensor
    wanted: IntArray


@dataclass(frozen=True, slots=True)
class _Delivery:
    """K and V for units of a follower: `data` of `layers`, or if `layers` is None the kept parts of a request."""

    request_id: str
    units: tuple[int, ...]
    layers: range | None
    data: bytearray


class NextStage:
    """The engine that runs the layers that a device lacks, over a link, while the device continues.

    `model`: see `PipelineRunner.lead`.

    Attributes:
        elsewhere: Seconds that the other stages took for the last step, less those for which this stage waited for it.
    """

    def __init__(self, device: StagedDevice, link: Link, model: LatencyPredictor | None) -> None:
        self._rows = device.rows
        self._model = model
        self.link = link
        self._number = 0
        self.elsewhere = 0.0
        self._sent: list[tuple[int, torch.dtype]] = []

    def cut(self, chunks: IntArray, *, whole: bool) -> list[IntArray]:
        """Begin a step: split its chunks [n, 4] into micro-batches, where one may continue a chunk of an earlier one.

        `whole`: return a single batch.
        """
        self._sent.clear()  # left over from a failed step
        if whole or self._model is None or (chunks[:, 2] == 1).all():
            return [chunks]  # decodes of other steps are under way beside those of this one
        pieces = [BatchPiece(index, start, length) for index, (_, start, length, _) in enumerate(chunks.tolist())]
        return [_chunks_of(batch, chunks) for batch in quickest(pieces, self._model, stages=2)]

    def send(self, chunks: IntArray, hidden: Tensor, wanted: IntArray) -> None:
        """Send chunks [n, 4] as in `Device.forward` with their hidden state `hidden [parts, T, H]`, chunk by chunk.

        The parts are addends, as the device keeps them. The answer contains the tokens `wanted [R]`.
        """
        rows, self._number = self._rows, self._number + 1
        blocks = int(rows.num_blocks[chunks[:, 0]].max())
        tables = rows.tables[:2, chunks[:, 0], :blocks]
        renamed = np.column_stack((np.arange(len(chunks)), chunks[:, 1:]))
        dtype = str(hidden.dtype).removeprefix("torch.")
        head = {"number": self._number, "blocks": blocks, "parts": hidden.shape, "dtype": dtype}
        self._sent.append((self._number, hidden.dtype))
        parts = [each.tobytes() for each in (renamed, tables, wanted, rows.is_long[chunks[:, 0]])]
        _send(self.link, head, [*parts, _bytes_of(hidden)])

    def answers(self) -> Callable[[], list[Tensor]]:
        """Return a function that waits for the answers to each `send` since the last call.

        It returns the hidden states [parts, R, H] after the last layer, in order, and raises StageError, after all
        answers have arrived, if one failed. Call the functions of several steps in the order of the steps.
        """
        sent, self._sent = self._sent, []
        return partial(self._receive, sent)

    def _receive(self, sent: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        found, failures, began, seconds = [], [], perf_counter(), 0.0
        for number, dtype in sent:
            while (answer := json.loads(self.link.receive()))["number"] != number:
                self.link.receive()
            data = self.link.receive()
            seconds += answer["seconds"]
            if answer["failure"]:
                failures.append(answer["failure"])
            else:
                found.append(_tensor(data, dtype, answer["parts"]))
        self.elsewhere = seconds - (perf_counter() - began)
        if failures:
            raise StageError(f"a step failed on the next engine of the pipeline: {failures[0]}")
        return found


def _chunks_of(batch: Sequence[BatchPiece], chunks: IntArray) -> IntArray:
    """Return a micro-batch as chunks [n, 4]; only the last piece of a chunk samples."""
    part = np.array([(*chunks[item, :1], start, length, chunks[item, 3]) for item, start, length in batch])
    ends = chunks[[piece.item for piece in batch], 1:3].sum(axis=1)
    part[:, 3] *= part[:, 1] + part[:, 2] == ends
    return part


def _steps(link: Link) -> Iterator[_Step | _Delivery]:
    """Yield steps and deliveries until the end.

    A thread reads ahead, because the sender must never wait for its answers to be read, which would be a deadlock.
    """
    came: SimpleQueue[_Step | _Delivery | Exception | None] = SimpleQueue()

    def read() -> None:
        try:
            while (head := link.receive()) != _END:
                came.put(_receive_step(link, head))
            came.put(None)
        except Exception as error:  # the consumer must not wait for ever
            came.put(error)

    reader = Thread(target=read, name="stage-reader", daemon=True)
    reader.start()
    while (step := came.get()) is not None:
        if isinstance(step, Exception):
            raise step
        yield step
    reader.join()


def _receive_step(link: Link, head: bytearray) -> _Step | _Delivery:
    about = json.loads(head)
    if "units" in about:
        layers = range(*about["layers"]) if "layers" in about else None
        return _Delivery(about.get("past", ""), tuple(about["units"]), layers, link.receive())
    chunks, tables, wanted = (np.frombuffer(link.receive(), dtype=np.int64) for _ in range(3))
    is_long = np.frombuffer(link.receive(), dtype=np.bool_)
    hidden = _tensor(link.receive(), getattr(torch, about["dtype"]), about["parts"])
    chunks = chunks.reshape(-1, 4)
    return _Step(about["number"], chunks, tables.reshape(2, len(chunks), about["blocks"]), is_long, hidden, wanted)


def _send(link: Link, head: dict[str, Any], parts: Sequence[bytes | memoryview]) -> None:
    link.send(json.dumps(head).encode())
    for part in parts:
        link.send(part)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: np.ndarray = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return array.data


def _tensor(data: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not data:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(*shape)
