"""Facts about the machine: cores, features, copy rate, free memory. Reads /proc and `cgroups`; torch-free.

Where the system gives no information (other than Linux), defaults are conservative.
"""

import os
import platform
import re
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError
from engine.machine import cgroups

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


def memcpy_rate(size: int = 1 << 25, repeats: int = 5) -> float:
    """Return the maximum rate in bytes/s of copies in host memory, with a buffer larger than the caches."""
    source, target = memoryview(bytearray(size)), memoryview(bytearray(size))
    seconds = []
    for _ in range(repeats + 1):  # the first iteration commits the pages
        began = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - began)
    return size / min(seconds)


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _quota() -> int | None:
    """Return the number of whole processors of this process's CPU quota; None without one."""
    quota = cgroups.processors()
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
    kib = cgroups.entry(_MEMINFO, "MemAvailable:")
    machine = None if kib is None else 1024 * kib
    return min((amount for amount in (machine, cgroups.free_memory()) if amount is not None), default=_FALLBACK)
