"""The figure of a run of co-location: chats against their limits, and the output of both classes below."""

from collections.abc import Sequence

import numpy as np

from benchmarks.drawing import Floats, Mark, Series, chart, document
from benchmarks.loads import Run, output_events
from loadgen.stats import nearest_rank

BIN = 3.0
"""Width of a point of the lower panel, seconds."""
TEXT = 15.0
"""Height of the text; the figure is 720 wide."""
TTFT_COLOUR, TBT_COLOUR, BATCH_COLOUR = "#2a8fa3", "#9a66c9", "#e2a33a"
"""Legible on a light and on a dark ground."""


def draw(run: Run, ttft: float, tbt: float) -> str:
    """Return an SVG file of two panels over one time axis.

    The upper panel shows each chat's TTFT and P99 gap as a share of their limits, `ttft` and `tbt` in seconds. The
    lower panel shows the output tokens/s of batch work and of chats.
    """
    span = (0.0, run.seconds)
    firsts = [(record.scheduled_at, record.ttft / ttft) for record in run.online if record.ttft is not None]
    gaps = [(record.scheduled_at, nearest_rank(own, 99) / tbt) for record in run.online if len(own := record.gaps())]
    above = chart(
        "Each chat, % of its limit",
        [_dots(f"TTFT (limit {_time(ttft)})", firsts, TTFT_COLOUR), _dots(f"TBT ({_time(tbt)})", gaps, TBT_COLOUR)],
        x="",
        y="% of the limit",
        marks=[Mark(100.0, "limit")],
        span=span,
        top=120.0,
    )
    middles, batch = rate(run.offline_output, run.seconds)
    _, chats = rate([event for record in run.online for event in output_events(record)], run.seconds)
    below = chart(
        "Output tokens/s",
        [
            Series("batch work", middles, batch, fill=True, colour=BATCH_COLOUR),
            Series("chats", middles, chats, colour=TTFT_COLOUR),
        ],
        x="seconds",
        y="output tokens/s",
        span=span,
    )
    return document([above, below], text=TEXT)


def rate(events: Sequence[tuple[float, float]], seconds: float) -> tuple[Floats, Floats]:
    """Return the middles of the whole bins in [0, seconds] and the tokens/s in each."""
    edges = np.arange(0.0, seconds + 1e-9, BIN)
    counts, _ = np.histogram([at for at, _ in events], bins=edges, weights=[tokens for _, tokens in events])
    return edges[:-1] + BIN / 2, np.asarray(counts / BIN, dtype=np.float64)


def _dots(name: str, values: Sequence[tuple[float, float]], colour: str) -> Series:
    return Series(name, [at for at, _ in values], [100 * share for _, share in values], dots=True, colour=colour)


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"
