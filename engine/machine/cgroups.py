"""Memory and CPU limits of this process by control groups, versions 1 and 2.

Every group from the process's own up to the root of the mount may set limits: systemd services, Slurm jobs and
containers set them below the root. The tightest one applies.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
"""Folder that contains `proc` and `sys`."""


def processors() -> float | None:
    """Return the tightest CPU quota as a number of processors; None without one."""
    quotas = [quota for folder in _groups("cpu") if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def free_memory() -> int | None:
    """Return the bytes left by the tightest memory limit; None without one.

    Inactive files in the page cache count as used but can be reclaimed. They are added back, so that a checkpoint that
    was read before does not reduce the result.
    """
    amounts = [amount for folder in _groups("memory") if (amount := _free(folder)) is not None]
    return min(amounts, default=None)


def entry(path: Path, name: str) -> int | None:
    """Return the number after `name` at the start of a line; None if there is none."""
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        found = [_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = map(str, found)
    if quota in {"max", "None", "-1"} or not period.isdigit() or not int(period):
        return None
    return int(quota) / int(period)


def _free(folder: Path) -> int | None:
    """Return the bytes left in one group. Above `memory.high` the kernel reclaims and slows the processes down."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [limit for name in names if (limit := _number(folder / name)) is not None]
    current, usage = (_number(folder / name) for name in ("memory.current", "memory.usage_in_bytes"))
    used = usage if current is None else current
    if not limits or used is None:
        return None
    stat = folder / "memory.stat"
    inactive = entry(stat, "total_inactive_file ") or entry(stat, "inactive_file ") or 0  # version 1: with children
    return max(0, min(limits) - max(0, used - inactive))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups that may limit `controller`, from its own group upward."""
    own = dict(_own_groups())
    for root, mount, controllers in _mounts():
        name = controller if controller in controllers else ""
        if name in own and (name or not controllers):
            group = PurePosixPath(own[name])
            inside = group.relative_to(root) if group.is_relative_to(root) else group.relative_to("/")
            folder = mount / inside
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount))


def _own_groups() -> Iterator[tuple[str, str]]:
    """Yield each controller with the path of this process's group; the name of version 2 is ""."""
    for line in _lines("proc/self/cgroup"):
        _number_of_hierarchy, names, path = line.split(":", 2)
        yield from ((name, path) for name in names.split(","))


def _mounts() -> Iterator[tuple[str, Path, frozenset[str]]]:
    """Yield the group at the root, the folder and the options (controllers) of each mount; none for version 2."""
    for line in _lines("proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _source, options = after.split(" ", 2)
        if kind in {"cgroup", "cgroup2"}:
            root, mount = (word.replace("\\040", " ") for word in before.split()[3:5])
            controllers = frozenset(options.split(",") if kind == "cgroup" else ())
            yield root, ROOT / mount.lstrip("/"), controllers


def _lines(path: str) -> list[str]:
    try:
        return (ROOT / path).read_text().splitlines()
    except OSError:
        return []
