"""Facts about the machine: cores, features, copy rate, free memory, and the limits of control groups. Torch-free.

Every group from the process's own up to the root of the mount may set limits: systemd services, Slurm jobs and
containers set them below the root. The tightest one applies. Where the system gives no information (other than Linux),
defaults are conservative.
"""

import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from engine.errors import ConfigError

CGROUP_ROOT = Path("/")
"""Folder that contains `proc` and `sys`."""


def quota_processors() -> float | None:
    """Return the tightest CPU quota as a number of processors; None without one."""
    quotas = [quota for folder in _groups("cpu") if (quota := _group_quota(folder)) is not None]
    return min(quotas, default=None)


def group_memory() -> int | None:
    """Return the bytes left by the tightest memory limit; None without one.

    Inactive files in the page cache count as used but can be reclaimed. They are added back, so that a checkpoint that
    was read before does not reduce the result.
    """
    amounts = [amount for folder in _groups("memory") if (amount := _free(folder)) is not None]
    return min(amounts, default=None)


def read_entry(path: Path, name: str) -> int | None:
    """Return the number after `name` at the start of a line; None if there is none."""
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _group_quota(folder: Path) -> float | None:
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
    # In version 1 the total includes the children.
    inactive = read_entry(stat, "total_inactive_file ") or read_entry(stat, "inactive_file ") or 0
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
            yield root, CGROUP_ROOT / mount.lstrip("/"), controllers


def _lines(path: str) -> list[str]:
    try:
        return (CGROUP_ROOT / path).read_text().splitlines()
    except OSError:
        return []


BUS_RATE = 64e9
"""Upper bound in bytes/s of copies between a device and the host (PCIe 5.0 x16, one direction)."""

HOST_ENGINES = "TIDEMILL_HOST_ENGINES"
"""Environment variable with the number of engines that share the memory of the host."""

_CPUINFO = Path("/proc/cpuinfo")
_DEVICES = Path("/dev")
_DRIVER = Path("/proc/driver/nvidia/version")
_MEMINFO = Path("/proc/meminfo")
_FALLBACK = 2 * 1024**3  # if unknown
# Features that make half-precision matrix products faster than float32 ones, by their x86 and ARM names.
_FAST = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
_SHOWN = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimdhp", "bf16", "sve")


class Resources(NamedTuple):
    """Resources of a process.

    Attributes:
        processors: Processors to run on; empty: all.
        device: Visible CUDA device; "": all.
        engines: Number of engines that share the memory of the host.
    """

    processors: tuple[int, ...] = ()
    device: str = ""
    engines: int = 1

    @property
    def shown(self) -> str:
        """Description for logs."""
        if self.device:
            return f"CUDA device {self.device}"
        if self.processors:
            return f"processors {', '.join(map(str, self.processors))}"
        return "processors shared with other engines"

    def move_in(self, environment: MutableMapping[str, str]) -> None:
        """Apply the placement, before threads are started and before the device is used."""
        if self.processors and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.processors)
        if self.device:
            environment["CUDA_VISIBLE_DEVICES"] = self.device
        environment[HOST_ENGINES] = str(self.engines)


@dataclass(frozen=True, slots=True)
class Processor:
    """Physical and logical cores (`threads`) that this process may use; `features` in the kernel's names."""

    name: str
    cores: int
    threads: int
    features: frozenset[str]

    def is_fast(self, dtype: str) -> bool:
        """Return whether the processor computes in `dtype` at least as fast as in float32."""
        return dtype == "float32" or not _FAST[dtype].isdisjoint(self.features)

    @property
    def shown_features(self) -> list[str]:
        return [name for name in _SHOWN if name in self.features]


def read_processor(cpuinfo: str | None = None) -> Processor:
    """Return the processor as usable by this process (affinity and CPU quota included)."""
    threads = len(_allowed())
    threads = min(threads, _quota() or threads)
    mine = _usable(_read_cpuinfo() if cpuinfo is None else cpuinfo)
    places = {_core_of(entry) for entry in mine}
    first = mine[0] if mine else {}
    features = frozenset((first.get("flags") or first.get("Features") or "").split())
    name = first.get("model name") or platform.processor() or platform.machine()
    return Processor(name, max(1, min(len(places) or threads, threads)), threads, features)


def memcpy_rate() -> float:
    """Return the maximum rate in bytes/s of copies in host memory, with a buffer larger than the caches."""
    size = 1 << 25
    source, target = memoryview(bytearray(size)), memoryview(bytearray(size))
    seconds = []
    for _ in range(6):  # the first iteration commits the pages
        began = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - began)
    return size / min(seconds)


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _quota() -> int | None:
    """Return the number of whole processors of this process's CPU quota; None without one."""
    quota = quota_processors()
    return None if quota is None else max(1, int(quota))


def share_out(engines: int, device: str = "auto", cpuinfo: str | None = None) -> list[Resources]:
    """Return the placement of each engine: a CUDA device, or an equal part of the cores.

    `device` is as in `EngineConfig`. Threads of a core stay together. If there are more engines than cores, or the
    CPU quota is below the allowed processors, all engines share them. Raises ConfigError.
    """
    devices = [] if device == "cpu" else cuda_devices()
    if devices or device == "cuda":
        if len(devices) < engines:
            raise ConfigError(f"--engines {engines} needs as many CUDA devices; {len(devices)} can be seen")
        return [Resources(device=device, engines=engines) for device in devices[:engines]]
    cores = _cores(_read_cpuinfo() if cpuinfo is None else cpuinfo)
    if len(cores) < engines or (_quota() or len(cores)) < len(cores):
        return [Resources(engines=engines)] * engines
    part, rest = divmod(len(cores), engines)
    bounds = [index * part + min(index, rest) for index in range(engines + 1)]
    return [
        Resources(tuple(sorted(chain.from_iterable(cores[begin:end]))), engines=engines)
        for begin, end in pairwise(bounds)
    ]  # fmt: skip


def host_engines() -> int:
    """Return the number of engines that share the memory of this host, including this process's engine."""
    return int(os.environ.get(HOST_ENGINES, "1"))


def cuda_devices() -> list[str]:
    """Return the CUDA devices visible to child processes, in the format of CUDA_VISIBLE_DEVICES, without the driver."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return [str(index) for index, _ in enumerate(_DEVICES.glob("nvidia[0-9]*"))]


def cuda_driver() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text()) if _DRIVER.exists() else None
    return found and found[0]


def _read_cpuinfo() -> str:
    return _CPUINFO.read_text() if _CPUINFO.exists() else ""


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _usable(cpuinfo: str) -> list[dict[str, str]]:
    """Return the entries of /proc/cpuinfo for the processors that this process may use."""
    allowed = _allowed()
    entries = [_fields(block) for block in cpuinfo.split("\n\n") if block.strip()]
    return [entry for entry in entries if entry.get("processor", "").isdigit() and int(entry["processor"]) in allowed]


def _core_of(entry: Mapping[str, str]) -> tuple[str, str]:
    return entry.get("physical id", ""), entry.get("core id", entry["processor"])


def _cores(cpuinfo: str) -> list[list[int]]:
    """Return the processors of each core; cores of a socket are adjacent."""
    cores: dict[tuple[str, str], list[int]] = {}
    for entry in _usable(cpuinfo):
        cores.setdefault(_core_of(entry), []).append(int(entry["processor"]))
    by_socket = sorted(cores.items(), key=lambda item: (item[0][0], item[1]))
    return [processors for _, processors in by_socket] or [[number] for number in sorted(_allowed())]


def available_memory() -> int:
    """Return the bytes available to this process: those of the machine, or of its control groups if fewer."""
    kib = read_entry(_MEMINFO, "MemAvailable:")
    machine = None if kib is None else 1024 * kib
    return min((amount for amount in (machine, group_memory()) if amount is not None), default=_FALLBACK)
