"""How much of the processor's cores other work leaves to threads that never rest; torch-free."""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

QUIET_SHARE = 0.85
"""Of their time that threads get in quiet, at least: an interrupt now and then takes a few per cent."""

_SECONDS = 0.3
_GLANCE = 0.1
PATIENCE = 2.0
"""Seconds that a start waits for other work to end, its own server's imports above all."""
_PIECE = bytes(1 << 20)  # hashed without Python's lock, in about 3 ms


def processor_share(threads: int, seconds: float = _SECONDS) -> float:
    """Processor time over wall time of so many threads that never rest, measured for `seconds`."""
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(_spend, [seconds] * threads))
    return sum(spent for spent, _ in parts) / sum(passed for _, passed in parts)


def wait_for_quiet(
    threads: int, patience: float = PATIENCE, look: Callable[[int, float], float] = processor_share
) -> bool:
    """Until so many busy threads get what they get in quiet; False if `patience` seconds of looking ended first."""
    return any(look(threads, _GLANCE) >= QUIET_SHARE for _ in range(max(1, round(patience / _GLANCE))))


def _spend(seconds: float) -> tuple[float, float]:
    """Processor and wall seconds of one busy thread."""
    spent, began = time.thread_time(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        hashlib.sha256(_PIECE)
    return time.thread_time() - spent, time.perf_counter() - began
