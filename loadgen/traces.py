"""Traces of arrival times and lengths, and their operators: `window, thin, stretch, repeat, jitter, scale`.

A trace is columnar and immutable; operators return a new one. `loadgen.formats` reads and writes files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from loadgen import InputError
from loadgen.stats import stream

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Segment = tuple[int, int]
"""(stream id, tokens): a run of prompt tokens. Equal ids have equal tokens up to the shorter length."""

PREFIX_BLOCK = 512
"""Number of tokens per hash id in a Mooncake trace."""


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a prompt. With `text` or `messages`, the token count in the trace is an estimate."""

    segments: tuple[Segment, ...] = ()  # shared runs of tokens; the rest of the prompt is unique
    text: str | None = None  # sent as it is
    messages: tuple[tuple[str, str], ...] = ()  # (role, text), sent as they are


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    arrived_at: Floats  # float64[n], seconds from the start, sorted; zeros unless `timed`
    input_tokens: Ints  # int64[n]
    output_tokens: Ints  # int64[n]
    content: tuple[Content, ...] = ()  # one per request, or empty
    timed: bool = True  # False: lengths only
    span: float = 0.0  # seconds that the trace covers
    notes: tuple[str, ...] = ()  # changes and estimates, for the report

    def __len__(self) -> int:
        return len(self.arrived_at)

    @property
    def rate(self) -> float:
        """Requests/s over the span; 0 for a trace without times."""
        return len(self) / self.span if self.span > 0 else 0.0

    @property
    def blocks(self) -> bool:
        """Whether every shared segment, except the last of a prompt, is a complete prefix block."""
        return all(size == PREFIX_BLOCK for item in self.content for _, size in item.segments[:-1])

    def content_of(self, index: int) -> Content:
        """Return the content of a request; empty if the trace has lengths only."""
        return self.content[index] if self.content else Content()

    def take(self, index: NDArray[np.int64]) -> "Trace":
        """Return the requests at `index`, in that order, with their times."""
        content = tuple(self.content[i] for i in index) if self.content else ()
        return replace(
            self,
            arrived_at=self.arrived_at[index],
            input_tokens=self.input_tokens[index],
            output_tokens=self.output_tokens[index],
            content=content,
        )

    def at(self, times: Floats) -> "Trace":
        """Return a trace at absolute `times` with the lengths and contents of this one, repeated as needed."""
        if len(self) == 0:
            raise InputError("the trace is empty")
        taken = self.take(np.arange(len(times), dtype=np.int64) % len(self))
        return replace(taken, arrived_at=times, timed=True, span=float(times[-1]) if len(times) else 0.0)

    def noted(self, *notes: str) -> "Trace":
        """Return the same trace with additional notes."""
        return replace(self, notes=(*self.notes, *notes))


def build(
    arrived_at: Floats | None,
    input_tokens: Ints,
    output_tokens: Ints,
    content: tuple[Content, ...] = (),
    notes: tuple[str, ...] = (),
) -> Trace:
    """Build a trace from columns. Rows are sorted by time (stable) and times shifted to start at 0."""
    if arrived_at is None or len(arrived_at) == 0:
        zeros = np.zeros(len(input_tokens))
        return Trace(zeros, input_tokens, output_tokens, content, arrived_at is not None, 0.0, notes)
    if not np.isfinite(arrived_at).all():
        raise InputError("an arrival time is not a finite number")
    order = np.argsort(arrived_at, kind="stable")
    moved = arrived_at - arrived_at.min()
    trace = Trace(moved, input_tokens, output_tokens, content, True, float(moved.max()), notes)
    return trace.take(order.astype(np.int64))


def window(trace: Trace, start: float, end: float) -> Trace:
    """Return the requests with start <= arrived_at < end, with times relative to `start`."""
    if not 0 <= start < end:
        raise InputError("window needs 0 <= start < end")
    index = np.flatnonzero((trace.arrived_at >= start) & (trace.arrived_at < end)).astype(np.int64)
    kept = trace.take(index)
    return replace(kept, arrived_at=kept.arrived_at - start, span=max(0.0, min(end, trace.span) - start))


def thin(trace: Trace, keep: float, seed: int) -> Trace:
    """Keep each request with probability `keep`, which preserves the shape over time and the bursts."""
    if not 0 < keep <= 1:
        raise InputError(f"thin needs a share in (0, 1], not {keep:g}; use stretch for a higher rate")
    kept = stream(seed, "thin").random(len(trace)) < keep
    return trace.take(np.flatnonzero(kept).astype(np.int64))


def stretch(trace: Trace, factor: float) -> Trace:
    """Multiply every time by `factor`; above 1 is slower."""
    if not (math.isfinite(factor) and factor > 0):
        raise InputError("stretch needs a positive factor")
    return replace(trace, arrived_at=trace.arrived_at * factor, span=trace.span * factor)


def jitter(trace: Trace, width: float, seed: int) -> Trace:
    """Add uniform noise in [0, width) seconds to every time and sort again, e.g. to undo times rounded down."""
    if not (math.isfinite(width) and width >= 0):
        raise InputError("jitter needs a width >= 0")
    moved = trace.arrived_at + stream(seed, "jitter").uniform(0.0, 1.0, len(trace)) * width
    order = np.argsort(moved, kind="stable").astype(np.int64)
    return replace(replace(trace, arrived_at=moved).take(order), span=trace.span + width)


def scale(trace: Trace, inputs: float, outputs: float | None = None) -> Trace:
    """Multiply input and output lengths, to at least one token each; shared segments are scaled as inputs."""
    outputs = inputs if outputs is None else outputs
    if not (0 < inputs < math.inf and 0 < outputs < math.inf):
        raise InputError("scale needs positive factors")
    content = tuple(
        replace(item, segments=tuple((name, max(1, round(size * inputs))) for name, size in item.segments))
        for item in trace.content
    )
    return replace(
        trace,
        input_tokens=_scaled(trace.input_tokens, inputs),
        output_tokens=_scaled(trace.output_tokens, outputs),
        content=content,
    )


def _scaled(lengths: Ints, factor: float) -> Ints:
    scaled: Ints = np.maximum(1, np.rint(lengths * factor)).astype(np.int64)
    return scaled


def to_rate(trace: Trace, rate: float, seed: int, by: str = "thin") -> Trace:
    """Return the trace at `rate` requests/s, by "thin" (drop requests at random) or "stretch" (scale the times)."""
    if trace.rate <= 0:
        raise InputError("the trace has no times; choose an arrival process with --arrival")
    if by == "stretch":
        return stretch(trace, trace.rate / rate)
    if rate > trace.rate * (1 + 1e-9):
        raise InputError(
            f"the trace has {trace.rate:.3g} requests/s; thinning cannot reach {rate:g}, use --rate-by stretch"
        )
    return thin(trace, min(1.0, rate / trace.rate), seed)


def apply(trace: Trace, operators: str, seed: int) -> Trace:
    """Apply operators of the command line, left to right, e.g. `window=0:600,thin=0.5,stretch=2,scale=0.5:1`."""
    table: dict[str, Callable[..., Trace]] = {
        "window": window,
        "thin": lambda t, keep: thin(t, keep, seed),
        "stretch": stretch,
        "jitter": lambda t, width: jitter(t, width, seed),
        "scale": scale,
    }
    for part in filter(None, (piece.strip() for piece in operators.split(","))):
        name, _, values = part.partition("=")
        if name not in table:
            raise InputError(f"unknown trace operator {name!r}; use {', '.join(table)}")
        try:
            trace = table[name](trace, *[float(value) for value in values.split(":")]).noted(part)
        except (TypeError, ValueError) as error:
            raise InputError(f"operator {part!r}: {error}") from None
    return trace
