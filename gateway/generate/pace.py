"""Python work in threads beside model steps: each of a step's many small operations needs the interpreter's lock again,
so a thread that never rests makes a step many times as long. Work that nobody waits for rests as long as it ran."""

import time
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")

LONGEST_REST = 0.05
"""Seconds."""


def at_half_speed(work: Callable[[], ResultT]) -> ResultT:
    """Do it, then rest for as long. Blocking: call it in a thread, with pieces of work of a few milliseconds."""
    start = time.perf_counter()
    result = work()
    time.sleep(min(LONGEST_REST, time.perf_counter() - start))
    return result
