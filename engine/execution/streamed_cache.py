"""A cache that lies outside compute memory and passes through it layer by layer, beside streamed weights (HybridServe
§4.2).

The blocks of running requests are in a `CacheStore`: a file beside a CPU, page-locked memory beside a GPU. Compute
memory holds BUFFERS buffers, each with one layer of every unit, so that units keep their numbers and kernels their
block tables. Layer l always passes through buffer l % BUFFERS. A step loads the blocks that its requests read; when it
has attended in a layer, it stores the blocks that it wrote, and then loads a further layer into the buffer.

The buffers hold the whole pool, because they are 3 / layers of its size: with 48 layers, a pool of 16 times the memory.
Mini-batches of requests (§4.3.3) would only shrink the buffers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.rows import RowTable

BUFFERS = 3
"""Number of buffers: one is computed with while one is filled and one is emptied."""
GAP_BYTES = 128 * 1024
"""Unneeded bytes that are read along between two blocks; another read, or copy, would take as long."""

Span = tuple[int, int]
"""First slice of a buffer, and the one after the last."""


class CacheStore(Protocol):
    """Memory of a streamed cache. All calls are in the order of the steps; `layer` selects the buffer, too.

    Attributes:
        alignment: Every span begins and ends at a multiple of it, in bytes.
    """

    alignment: int

    def attach(self, buffers: Tensor, num_layers: int) -> None:
        """Create the memory for `num_layers` layers of the size of a buffer; `buffers` [BUFFERS, slices, bytes] uint8
        hold layers in passage. Raises ConfigError."""

    def load(self, layer: int, spans: Sequence[Span]) -> None:
        """Start to copy slices into the buffer, behind all earlier uses of it."""

    def wait(self, layer: int) -> None:
        """Make work launched from now on see the loaded slices. Raises StreamingError."""

    def save(self, layer: int, spans: Sequence[Span]) -> None:
        """Start to copy slices back, behind all work launched until now."""

    def settle(self) -> None:
        """Wait until the copies of `save` cannot fail any more. Raises StreamingError."""


OpenStore = Callable[[], CacheStore]


class StreamedCache:
    """The buffers of a pool of `num_units` units, and the plan of the step in progress.

    Attributes:
        slots: Slices of a buffer: one per unit, the zero unit, and padding to aligned spans.
        paused: Nothing is loaded or saved: for measurements.
    """

    def __init__(self, store: CacheStore, num_units: int, slice_bytes: int, num_layers: int) -> None:
        self._store, self._num_layers = store, num_layers
        self._per_span = store.alignment // math.gcd(store.alignment, slice_bytes)
        self._gap = max(1, GAP_BYTES // slice_bytes)
        self.slots = -(-(num_units + 1) // self._per_span) * self._per_span
        self._slices: Tensor | None = None
        self._loads: list[Span] = []
        self._saves: list[Span] = []
        self._cleared: Tensor | None = None
        self._runs = self.paused = False

    def attach(self, slices: Tensor) -> None:
        """Set the memory of the buffers, [BUFFERS * slots, elements], initially zero. Raises ConfigError."""
        self._slices = slices.view(BUFFERS, self.slots, -1)
        self._store.attach(self._slices.view(torch.uint8), self._num_layers)

    def place(self, layer: int) -> int:
        """Return the first slice of the buffer of a layer."""
        return layer % BUFFERS * self.slots

    def begin(self, rows: RowTable, chunks: IntArray) -> None:
        """Start a step of chunks [n, >=3]: load the blocks that they read, layer by layer."""
        read, written = step_units(rows, chunks)
        if self._per_span > 1:  # a span is saved as a whole
            read = np.concatenate((read, written))
        self._loads, self._saves = self._spans(read, self._gap), self._spans(written, 0)
        self._cleared, self._runs = None, not self.paused
        for layer in range(min(BUFFERS, self._num_layers)) if self._runs else ():
            self._store.load(layer, self._loads)

    def clear(self, units: Tensor) -> None:
        """Zero units [n] in each layer of the step in progress, when it has been loaded."""
        self._cleared = units

    @contextmanager
    def use(self, layer: int) -> Iterator[None]:
        """Have the blocks of a layer in its buffer for work launched inside the context; a no-op outside of steps."""
        if not self._runs:
            yield
            return
        assert self._slices is not None
        self._store.wait(layer)
        if self._cleared is not None:
            self._slices[layer % BUFFERS].index_fill_(0, self._cleared, 0)
        try:
            yield
        finally:  # the buffer is used again, even after a failed step
            self._store.save(layer, self._saves)
        if layer + BUFFERS < self._num_layers:
            self._store.load(layer + BUFFERS, self._loads)
        if layer + 1 == self._num_layers:
            self._runs = False
            self._store.settle()

    def _spans(self, units: IntArray, gap: int) -> list[Span]:
        """Return the aligned spans that cover units [n], joined over gaps of up to `gap` slices."""
        if not units.size:
            return []
        firsts = np.unique(units // self._per_span) * self._per_span
        cuts = np.flatnonzero(np.diff(firsts) > self._per_span + gap)
        starts = firsts[np.concatenate(([0], cuts + 1))]
        ends = firsts[np.concatenate((cuts, [len(firsts) - 1]))] + self._per_span
        return list(zip(starts.tolist(), ends.tolist(), strict=True))


def step_units(rows: RowTable, chunks: IntArray) -> tuple[IntArray, IntArray]:
    """Return the units with earlier tokens that chunks [n, >=3] read, and the units that they write."""
    members, starts, ends = chunks[:, 0], chunks[:, 1], chunks[:, 1] + chunks[:, 2]
    num_past, num_blocks = -(-starts // rows.block_size), -(-ends // rows.block_size)
    blocks = np.arange(num_blocks.max(initial=0))
    past = (blocks >= rows.num_unseen(starts)[:, None]) & (blocks < num_past[:, None])
    new = (blocks >= (starts // rows.block_size)[:, None]) & (blocks < num_blocks[:, None])
    units = rows.units_of(members, len(blocks))
    read, written = (units[:, used].ravel() for used in (past, new))
    return read[read >= 0], written[written >= 0]
