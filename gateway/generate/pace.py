"""Throttling of Python work in threads beside model steps.

Each of a step's many small operations must reacquire the GIL, so a busy thread slows a step down many times. Background
work therefore sleeps as long as it has run.
"""

import time
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")

LONGEST_REST = 0.05
"""Maximum sleep in seconds."""


def at_half_speed(work: Callable[[], ResultT]) -> ResultT:
    """Run `work`, then sleep for the same time. Blocking: call it in a thread, with work of a few milliseconds."""
    start = time.perf_counter()
    result = work()
    time.sleep(min(LONGEST_REST, time.perf_counter() - start))
    return result
