"""What the threads of processes have done, as Linux tells it in /proc: time on a core, time waiting for one, state."""

import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_UTIME, _STIME = 11, 12
"""Places in /proc/PID/stat behind the name of the command, from 0 for the state."""


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
