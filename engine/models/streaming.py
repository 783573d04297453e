"""Layer streaming: matrices pass through a few buffers in every step, in the order of the model (HybridServe §2.4;
FlexGen's layer-wise streaming).

While a layer computes, the next streamed layers are read into free buffers. The first layer follows the last one, so
that reading continues between steps. Resident layers are distributed evenly between streamed ones, to give reads time.
An unexpected order (a failed step, a range of layers) only discards the reads in progress. Norms and biases stay in
memory. A `Transport` reads from a file or from page-locked host memory.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.errors import WeightReadError
from engine.models.weights import LayerWeights, matrices

ALIGNMENT = 64
"""Alignment in bytes of a matrix within its layer, for cache lines and vector loads."""


class Transport(Protocol):
    """Stores layers outside compute memory and copies them into buffers. `place` numbers the layers from 0."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """At least two buffers, [bytes of a layer] uint8 each."""

    def keep(self, place: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Store a layer as (offset, bytes) parts; not while reads are in progress. Raises ConfigError."""

    def begin(self, place: int, buffer: int) -> None:
        """Start to read a layer into a buffer that is used only by work launched before `release`."""

    def wait(self, buffer: int) -> None:
        """Make work launched from now on see the last read of the buffer. Raises WeightReadError."""

    def release(self, buffer: int) -> None:
        """Mark that only work launched until now reads the buffer."""

    def seconds(self) -> float:
        """Measure the seconds to read one layer, as a mean over several."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Flight(NamedTuple):
    place: int
    buffer: int


class StreamedLayers:
    """A LayerSource that reads `streamed` layers through `transport` and keeps the others in memory.

    Layers are used one at a time, by a single thread.
    """

    def __init__(self, layers: Iterator[LayerWeights], streamed: tuple[int, ...], transport: Transport) -> None:
        self.streamed = streamed
        self._transport = transport
        self._places = {index: place for place, index in enumerate(streamed)}
        self._layers: list[LayerWeights] = []
        self._stayed_bytes = 0
        for index, layer in enumerate(layers):
            self._layers.append(self._keep(index, layer))
        self._free = deque(range(len(transport.buffers)))
        self._ahead: deque[_Flight] = deque()
        self._next = 0

    def _keep(self, index: int, layer: LayerWeights) -> LayerWeights:
        if index not in self._places:
            self._stayed_bytes += sum(matrix.data().nbytes for matrix in matrices(layer))
            return layer
        data = [matrix.data() for matrix in matrices(layer)]
        at, parts = 0, []
        for part in data:
            parts.append((at, part))
            at += aligned(part.nbytes)
        self._transport.keep(self._places[index], parts)
        return _moved(layer, self._transport.buffers[0], [part.nbytes for part in data])

    @property
    def held_bytes(self) -> int:
        return self._stayed_bytes + sum(buffer.nbytes for buffer in self._transport.buffers)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerWeights]:
        return iter(self._layers)

    def __getitem__(self, index: int, /) -> LayerWeights:
        return self._layers[index]

    @contextmanager
    def use(self, index: int, /) -> Iterator[LayerWeights]:
        """See LayerSource."""
        layer = self._layers[index]
        if index not in self._places:
            yield layer
            return
        flight = self._expect(self._places[index])
        try:
            self._transport.wait(flight.buffer)
            sizes = [matrix.data().nbytes for matrix in matrices(layer)]
            yield _moved(layer, self._transport.buffers[flight.buffer], sizes)
        finally:
            self._transport.release(flight.buffer)
            self._free.append(flight.buffer)
            self._read_ahead()

    def _expect(self, place: int) -> _Flight:
        """Return the read of this layer; start it if it is not the next one in progress."""
        if not self._ahead or self._ahead[0].place != place:
            self._drop_ahead()
            self._next = place
            self._read_ahead()
        return self._ahead.popleft()

    def _read_ahead(self) -> None:
        while self._free:
            flight = _Flight(self._next, self._free.popleft())
            self._transport.begin(flight.place, flight.buffer)
            self._ahead.append(flight)
            self._next = (self._next + 1) % len(self.streamed)

    def _drop_ahead(self) -> None:
        while self._ahead:
            flight = self._ahead.popleft()
            with suppress(WeightReadError):  # the read is discarded
                self._transport.wait(flight.buffer)
            self._free.append(flight.buffer)


def _moved(layer: LayerWeights, buffer: Tensor, sizes: Sequence[int]) -> LayerWeights:
    """Return the layer with its matrices placed consecutively in a buffer."""
    at, parts = 0, []
    for size in sizes:
        parts.append(buffer[at : at + size])
        at += aligned(size)
    qkv, out, up, down = (matrix.on(part) for matrix, part in zip(matrices(layer), parts, strict=True))
    return replace(layer, qkv=qkv, out=out, up=up, down=down)
