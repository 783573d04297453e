"""Counts the work of a function without a clock: lines of Python that it executes and bytes that it allocates.

Bytes are counted line by line as the peak above the line's beginning, so that texts which are joined again and again
count again and again, although only the last one stays."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

SLACK = 1.25  # above proportional growth


class Work(NamedTuple):
    lines: int
    bytes: int


def count_work(function: Callable[[], object]) -> Work:
    """Run the function once."""
    lines = allocated = 0
    begun = 0

    def trace(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal lines, allocated, begun
        current, peak = tracemalloc.get_traced_memory()
        allocated += max(0, peak - begun)
        tracemalloc.reset_peak()
        begun = current
        lines += event == "line"
        return trace

    before = sys.gettrace()
    tracemalloc.start()
    try:
        begun = tracemalloc.get_traced_memory()[0]
        sys.settrace(trace)
        function()
        trace(sys._getframe(), "return", None)
    finally:
        sys.settrace(before)
        tracemalloc.stop()
    return Work(lines, allocated)


def assert_linear(prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """The work of `prepare(n)` for n, 2n and 4n grows no faster than n. What `prepare` itself does is not counted."""
    prepare(size)()  # one-time work: caches, compiled patterns
    one, two, four = (count_work(prepare(size * factor)) for factor in (1, 2, 4))
    for kind in Work._fields:
        counts = [getattr(work, kind) for work in (one, two, four)]
        assert counts[1] <= 2 * SLACK * counts[0] + 4096, (kind, counts)
        assert counts[2] <= 4 * SLACK * counts[0] + 8192, (kind, counts)
