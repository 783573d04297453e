"""Facts about the machine: cores, features, how fast it copies. Reads /proc and the container's limits; torch-free.

Where the system says nothing (other than Linux), the answers are the cautious ones.
"""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

BUS_RATE = 64e9
"""Bytes/s that no copy between a device of its own memory and the host exceeds (PCIe 5.0 x16, one way)."""

_CPUINFO = Path("/proc/cpuinfo")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# Features that make half-precision matrix products faster than float32 ones, x86 and ARM names.
_FAST = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
_SHOWN = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimdhp", "bf16", "sve")


@dataclass(frozen=True, slots=True)
class Processor:
    """`cores`: physical ones this process may use; `features`: the kernel's names for what they can do."""

    name: str
    cores: int
    threads: int
    features: frozenset[str]

    def is_fast(self, dtype: str) -> bool:
        """Whether the processor computes in `dtype` at least as fast as in float32."""
        return dtype == "float32" or not _FAST[dtype].isdisjoint(self.features)

    @property
    def shown_features(self) -> list[str]:
        return [name for name in _SHOWN if name in self.features]


def read_processor(cpuinfo: str | None = None) -> Processor:
    """The processor as this process may use it (affinity and container limits counted)."""
    if cpuinfo is None:
        cpuinfo = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    entries = [_fields(block) for block in cpuinfo.split("\n\n") if block.strip()]
    mine = [entry for entry in entries if entry.get("processor", "").isdigit() and int(entry["processor"]) in allowed]
    places = {(entry.get("physical id"), entry.get("core id", entry["processor"])) for entry in mine}
    first = mine[0] if mine else {}
    features = frozenset((first.get("flags") or first.get("Features") or "").split())
    name = first.get("model name") or platform.processor() or platform.machine()
    cores = min(len(places) or len(allowed), _quota() or len(allowed))
    return Processor(name, max(cores, 1), len(allowed), features)


def memcpy_rate(size: int = 1 << 25, repeats: int = 5) -> float:
    """Bytes/s of copying a buffer larger than the caches within host memory, at its fastest."""
    source, target = memoryview(bytearray(size)), memoryview(bytearray(size))
    seconds = []
    for _ in range(repeats + 1):  # the first one commits the pages
        began = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - began)
    return size / min(seconds)


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _quota() -> int | None:
    """Whole processors that the container's quota is worth; None without one."""
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None
