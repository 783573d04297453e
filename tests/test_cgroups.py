"""Limits of control groups: the tightest on the path of this process, in both versions."""

import os
from pathlib import Path

import pytest

from engine.machine import facts

GIB = 2**30
UNLIMITED_V1 = str(2**63 - 4096)
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "33 31 0:30 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V1_CPU = r"34 31 0:31 {root} /sys/fs/cgroup/cpu\040time rw - cgroup cgroup rw,cpu,cpuacct"
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


def v1(root: str = "/") -> list[str]:
    return [V1_MEMORY.format(root=root), V1_CPU.format(root=root), HYBRID]


CASES: dict[str, tuple[list[str], list[str], dict[str, str], float | None, int | None]] = {
    # mounts, groups, files below /sys/fs/cgroup, processors, free bytes
    "v2, container with a namespace": (
        [V2], ["0::/"], {"cpu.max": "150000 100000", "memory.max": str(4 * GIB), "memory.current": str(GIB)},
        1.5, 3 * GIB,
    ),
    "v2, systemd service: the limits of the slice are tighter": (
        [V2], ["0::/system.slice/tidemill.service"],
        {
            "system.slice/tidemill.service/cpu.max": "400000 100000", "system.slice/cpu.max": "200000 100000",
            "system.slice/tidemill.service/memory.max": "max", "system.slice/memory.max": str(6 * GIB),
            "system.slice/tidemill.service/memory.current": "7", "system.slice/memory.current": str(2 * GIB),
        },
        2.0, 4 * GIB,
    ),
    "v2, MemoryHigh slows the service down before MemoryMax ends it": (
        [V2], ["0::/a.service"],
        {"a.service/memory.max": "9000", "a.service/memory.high": "5000", "a.service/memory.current": "1000"},
        None, 4000,
    ),
    "v2, no limits": ([V2], ["0::/user.slice"], {"user.slice/cpu.max": "max 100000", "memory.max": "max"}, None, None),
    "v2, inactive files can be reclaimed": (
        [V2], ["0::/"],
        {"memory.max": "8000", "memory.current": "7000", "memory.stat": "anon 2000\ninactive_file 4500\n"},
        None, 5500,
    ),
    "v2, more is used than allowed": ([V2], ["0::/"], {"memory.max": "8", "memory.current": "9"}, None, 0),
    "v1, Slurm: a step of a job": (
        v1(), ["9:memory:/slurm/job_7/step_0", "3:cpu,cpuacct:/slurm/job_7/step_0", "0::/"],
        {
            "memory/slurm/job_7/memory.limit_in_bytes": "5000", "memory/slurm/job_7/memory.usage_in_bytes": "3000",
            "memory/slurm/job_7/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            "memory/slurm/job_7/step_0/memory.limit_in_bytes": UNLIMITED_V1,
            "memory/slurm/job_7/step_0/memory.usage_in_bytes": "3000",
            "cpu time/slurm/job_7/cpu.cfs_quota_us": "300000", "cpu time/slurm/job_7/cpu.cfs_period_us": "100000",
            "cpu time/slurm/job_7/step_0/cpu.cfs_quota_us": "-1",
            "cpu time/slurm/job_7/step_0/cpu.cfs_period_us": "100000",
        },
        3.0, 2500,
    ),
    "v1, container: the mount begins at its group": (
        v1("/docker/0a"), ["9:memory:/docker/0a", "3:cpuacct,cpu:/docker/0a"],
        {
            "memory/memory.limit_in_bytes": "4000", "memory/memory.usage_in_bytes": "1000",
            "cpu time/cpu.cfs_quota_us": "50000", "cpu time/cpu.cfs_period_us": "100000",
        },
        0.5, 3000,
    ),
    "v1, container: only the mount is seen, not its name": (
        v1("/kubepods/pod1"), ["9:memory:/../elsewhere"],
        {"memory/memory.limit_in_bytes": "4000", "memory/memory.usage_in_bytes": "1000"},
        None, 3000,
    ),
    "no control groups": ([], [], {}, None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_tightest_limit_applies(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts, groups, files, processors, free = CASES[case]
    proc = tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text("".join(f"{line}\n" for line in ["23 1 8:1 / / rw - ext4 /dev/sda1 rw", *mounts]))
    if groups:
        (proc / "cgroup").write_text("".join(f"{line}\n" for line in groups))
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    monkeypatch.setattr(facts, "CGROUP_ROOT", tmp_path)
    assert facts.quota_processors() == processors and facts.group_memory() == free

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    threads = 4 if processors is None else max(1, int(processors))
    found = facts.read_processor("")
    assert (found.cores, found.threads) == (threads, threads)
    assert all(bool(place.processors) == (threads == 4) for place in facts.share_out(2, "cpu", ""))
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8388608 kB\n")
    monkeypatch.setattr(facts, "_MEMINFO", tmp_path / "meminfo")
    assert facts.available_memory() == (8 * GIB if free is None else free)
    (tmp_path / "meminfo").unlink()
    assert facts.available_memory() == (2 * GIB if free is None else free)
