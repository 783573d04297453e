"""CPU time of threads: read from /proc (Linux), and the share that busy threads get. Torch-free."""

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
"""Indices in /proc/PID/stat after the name of the command, counted from the state."""
QUIET_SHARE = 0.85
"""Minimum share of busy threads on an idle machine; interrupts take a few per cent."""

_SECONDS = 0.3
_GLANCE = 0.1
PATIENCE = 2.0
"""Maximum wait in seconds for other work to end at start, mainly imports of this server."""
_PIECE = bytes(1 << 20)  # hashing releases the interpreter lock and takes about 3 ms


class ThreadActivity(NamedTuple):
    """Seconds of CPU time and of waiting for a CPU (None: not counted by the kernel) since the thread began.

    `state` is a letter, see proc_pid_stat(5).
    """

    cpu: float
    waited: float | None
    state: str


class Activity(NamedTuple):
    """Threads by number, at time `at` of the monotonic clock."""

    at: float
    threads: Mapping[int, ThreadActivity]


def read_activity(pids: Iterable[int]) -> Activity | None:
    """Read all threads of processes except the calling thread; None if /proc is unavailable."""
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
        return None  # the thread has ended
    try:
        cpu, waited, _slices = (folder / "schedstat").read_text().split()
    except (OSError, ValueError):
        return ThreadActivity(ticks / _TICK, None, state)
    return ThreadActivity(int(cpu) / 1e9, int(waited) / 1e9, state)


def processor_share(threads: int, seconds: float = _SECONDS) -> float:
    """Return CPU time over wall time of busy threads, measured for `seconds`."""
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(_spend, [seconds] * threads))
    return sum(spent for spent, _ in parts) / sum(passed for _, passed in parts)


def wait_for_quiet(
    threads: int, patience: float = PATIENCE, look: Callable[[int, float], float] = processor_share
) -> bool:
    """Wait until busy threads get QUIET_SHARE; return False after about `patience` seconds."""
    return any(look(threads, _GLANCE) >= QUIET_SHARE for _ in range(max(1, round(patience / _GLANCE))))


def _spend(seconds: float) -> tuple[float, float]:
    """Return CPU and wall seconds of one busy thread."""
    spent, began = time.thread_time(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        hashlib.sha256(_PIECE)
    return time.thread_time() - spent, time.perf_counter() - began
