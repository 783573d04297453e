"""How much of the processor's cores other work leaves to threads that never rest; torch-free."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

QUIET_SHARE = 0.85
"""Of their time that threads get in quiet, at least: an interrupt now and then takes a few per cent."""

_SECONDS = 0.3
_PIECE = bytes(1 << 20)  # hashed without Python's lock, in about 3 ms


def processor_share(threads: int, seconds: float = _SECONDS) -> float:
    """Processor time over wall time of so many threads that never rest, measured for `seconds`."""
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(_spend, [seconds] * threads))
    return sum(spent for spent, _ in parts) / sum(passed for _, passed in parts)


def _spend(seconds: float) -> tuple[float, float]:
    """Processor and wall seconds of one busy thread."""
    spent, began = time.thread_time(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        hashlib.sha256(_PIECE)
    return time.thread_time() - spent, time.perf_counter() - began
