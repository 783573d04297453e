"""Processor time of threads: read from /proc, and measured as the share that busy threads get. Torch-free."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_UTIME, _STIME = 11, 12
"""Places in /proc/PID/stat behind the name of the command, from 0 for the state."""
QUIET_SHARE = 0.85
"""Of their time that threads get in quiet, at least: an interrupt now and then takes a few per cent."""

_SECONDS = 0.3
_GLANCE = 0.1
PATIENCE = 2.0
"""Seconds that a start waits for other work to end, its own server's imports above all."""
_PIECE = bytes(1 << 20)  # hashed without Python's lock, in about 3 ms


class ThreadActivity(NamedTuple):
    """Seconds since the thread began: on a core, and waiting for one (None: the kernel does not count). `state`: one
    letter, see proc_pid_stat(5)."""

    cpu: float
    waited: float | None
    state: str


class Activity(NamedTuple):
    """`threads` by number at the time `at` on the monotonic clock."""

    at: float
    threads: Mapping[int, ThreadActivity]


def read_activity(pids: Iterable[int]) -> Activity | None:
    """Read all threads of processes but the calling one; None where /proc does not tell."""
    own = threading.get_native_id()
    found: dict[int, ThreadActivity] = {}
    for pid in pids:
        tasks = Path(f"/proc/{pid}/task")
        try:
            numbers = [int(name) for name in os.listdir(tasks)]
        except OSError:
            continue
        for number in numbers:
            if number != own and (thread := _read_thread(tasks / str(number))) is not None:
                found[number] = thread
    return Activity(time.monotonic(), found) if found else None


def _read_thread(folder: Path) -> ThreadActivity | None:
    try:
        state, *fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        ticks = int(fields[_UTIME - 1]) + int(fields[_STIME - 1])
    except (OSError, ValueError, IndexError):
        return None  # it has ended
    try:
        cpu, waited, _slices = (folder / "schedstat").read_text().split()
    except (OSError, ValueError):
        return ThreadActivity(ticks / _TICK, None, state)
    return ThreadActivity(int(cpu) / 1e9, int(waited) / 1e9, state)


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
