"""How much memory this machine, or the container, has left. Reads /proc and the container's limits; torch-free."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_FALLBACK = 2 * 1024**3  # available memory where nobody tells


def available_memory() -> int:
    """Bytes this process may still take: the machine's, or its container's if that is less."""
    candidates = [amount for amount in (_machine_memory(), _cgroup_memory()) if amount is not None]
    return min(candidates, default=_FALLBACK)


def _machine_memory() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _cgroup_memory() -> int | None:
    """What the container's limit leaves; None without a limit (cgroup v2 only).

    Files in the page cache that nobody uses count as used there, and make way: a checkpoint that was read before must
    not look like memory that is taken.
    """
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return None
    return limit - max(0, used - _idle_files())


def _idle_files() -> int:
    """Bytes of files in the page cache that were not used lately."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
