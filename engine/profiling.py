"""Measures step shapes on a real runner, for the start-up sweep of `predictor.sweep` (HyGen §4.2, training data).

Rows and units are handed out by hand; the core is not involved, so the runner must be idle. Torch-free.
"""

from itertools import count

from engine.api import SamplingParams
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.scheduling.output import Chunk, ModelRunner, NewRequest, SchedulerOutput
from predictor.limits import UNITS_PER_BLOCK, Limits
from predictor.sweep import StepShape

DRAWN = SamplingParams(max_tokens=1)
"""Temperature 1, as requests have it that say nothing: drawing is part of a step's time."""


class ShapeRunner:
    """Runs one shape again and again; a new shape writes its rows first, in a step of its own that is not measured.

    `vocab_size` bounds the made-up tokens. Call `close` before the runner serves requests.
    """

    def __init__(self, runner: ModelRunner, limits: Limits, vocab_size: int) -> None:
        self._runner = runner
        self._limits = limits
        self._vocab_size = vocab_size
        self._step_ids = count()
        self._shape: StepShape | None = None
        self._chunks: tuple[Chunk, ...] = ()

    def measure(self, shape: StepShape) -> float:
        """Seconds of one step of this shape, deltas and sampling included."""
        if shape != self._shape:
            self._write(shape)
        return self._runner.launch(SchedulerOutput(next(self._step_ids), self._chunks))().latency

    def close(self) -> None:
        """Release every row."""
        rows = tuple(chunk.row for chunk in self._chunks)
        self._shape, self._chunks = None, ()
        if rows:
            self._run_released(rows)

    def _run_released(self, rows: tuple[int, ...]) -> None:
        """A step cannot be empty, so the rows go with a one-token step in row 0, released by whoever comes next."""
        entry = CacheEntry(CacheKind.KV, Tier.DEVICE, tuple(range(UNITS_PER_BLOCK)))
        new = NewRequest(0, "profile-end", (0,), 1, DRAWN, (entry,))
        self._runner.launch(SchedulerOutput(next(self._step_ids), (Chunk(0, 0, 1, True),), (new,), (), rows))()

    def _write(self, shape: StepShape) -> None:
        released = tuple(chunk.row for chunk in self._chunks)
        spans = [(shape.decode_context - 1, 1)] * shape.num_decodes + list(shape.chunks)
        units = count()
        new_requests = []
        for row, (start, length) in enumerate(spans):
            entries = tuple(
                CacheEntry(CacheKind.KV, Tier.DEVICE, tuple(next(units) for _ in range(UNITS_PER_BLOCK)))
                for _ in range(-(-(start + length) // self._limits.block_size))
            )
            tokens = tuple((row * 7919 + i * 31) % self._vocab_size for i in range(start + length))
            new_requests.append(NewRequest(row, f"profile-{row}", tokens, len(tokens), DRAWN, entries))
        self._shape = shape
        self._chunks = tuple(Chunk(row, start, length, True) for row, (start, length) in enumerate(spans))
        output = SchedulerOutput(next(self._step_ids), self._chunks, tuple(new_requests), (), released)
        self._runner.launch(output)()
