"""`tidemill bench compare A B`: differences between two arms with 95 % intervals, interference, and harvest.

An arm is a run folder or a folder of runs, one per seed. Attainment is pooled over seeds. If both arms have the same
requests (same seeds, same indices), differences are paired by request. Latencies are resampled by request.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen import folder
from loadgen.metrics import Slo, harvest, in_window, interference
from loadgen.records import RequestRecord
from loadgen.stats import Clustered, Statistic, bootstrap_difference, weighted_mean, weighted_percentile, wilson

Floats = NDArray[np.float64]
Key = tuple[int, int]
"""(seed, request index), which identifies a request in both arms."""
Interval = Callable[[Clustered, Clustered, Statistic], tuple[float, float]]
"""Interval of the difference of a statistic between two arms."""

ENOUGH = 300
STATISTICS: tuple[tuple[str, Statistic], ...] = (
    ("mean", weighted_mean),
    ("p50", weighted_percentile(50)),
    ("p99", weighted_percentile(99)),
)


@dataclass(frozen=True, slots=True)
class Arm:
    """The runs of an arm: summaries, and online requests of the measure windows."""

    name: str
    summaries: tuple[dict[str, Any], ...]
    requests: dict[Key, RequestRecord]
    slo: Slo

    @classmethod
    def read(cls, path: Path) -> "Arm":
        """Read all runs under `path`."""
        summaries = []
        requests: dict[Key, RequestRecord] = {}
        for run in folder.runs_under(path):
            summary = folder.read_summary(run)
            summaries.append(summary)
            window = summary["window"]["start"], summary["window"]["end"]
            online = [item for item in folder.read_requests(run) if item.service_class == "online"]
            for record in in_window(online, *window):
                requests[summary["seeds"]["seed"], record.index] = record
        return cls(path.name or str(path), tuple(summaries), requests, Slo(tuple(summaries[0]["slo"].items())))

    def mean(self, section: str, name: str) -> float | None:
        """Return the mean of a summary value over the runs, or None if a run lacks it."""
        values = [summary[section].get(name) for summary in self.summaries]
        return None if any(value is None for value in values) else float(np.mean(values))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the comparison."""

    metric: str
    first: float | None
    second: float | None
    difference: float | None  # second - first
    low: float | None = None  # 95 % interval of the difference; None: no interval
    high: float | None = None

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def compare(first: Arm, second: Arm, *, rounds: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Return `{"rows", "paired", "notes", "interference", "harvest"}`. The SLO of the first arm applies to both."""
    keys_first, keys_second = list(first.requests), list(second.requests)
    paired = bool(keys_first) and _same_requests(first, second)
    ours = [first.requests[key] for key in keys_first]
    theirs = [second.requests[key] for key in (keys_first if paired else keys_second)]
    rows = []
    interval = partial(bootstrap_difference, paired=paired, rounds=rounds, seed=seed)
    if ours and theirs:
        rows.append(_attainment(ours, theirs, first.slo, interval))
        for name, values in (("ttft", _ttft), ("tbt", lambda record: record.gaps()), ("e2e", _e2e)):
            left, right = Clustered.of([values(r) for r in ours]), Clustered.of([values(r) for r in theirs])
            rows += _latency_rows(name, left, right, interval)
    rows += _throughput(first, second)
    return {
        "rows": rows,
        "paired": paired,
        "notes": _notes(first, second, paired=paired),
        "interference": _interference(first, second),
        "harvest": _harvest(first, second),
    }


def _same_requests(first: Arm, second: Arm) -> bool:
    """Return whether both arms have the same requests, with the same requested lengths."""
    asked = (
        {key: (record.input_asked, record.output_asked) for key, record in arm.requests.items()}
        for arm in (first, second)
    )
    return next(asked) == next(asked)


def _ttft(record: RequestRecord) -> Floats:
    return np.array([] if record.ttft is None else [record.ttft], dtype=np.float64)


def _e2e(record: RequestRecord) -> Floats:
    return np.array([record.e2e] if record.ok and record.e2e is not None else [], dtype=np.float64)


def _attainment(ours: Sequence[RequestRecord], theirs: Sequence[RequestRecord], slo: Slo, interval: Interval) -> Row:
    good = [np.array([[float(slo.good(record))] for record in side]) for side in (ours, theirs)]
    left, right = (Clustered.of(list(side)) for side in good)
    low, high = interval(left, right, weighted_mean)
    first, second = (float(side.mean()) for side in good)
    return Row("slo_attainment", first, second, second - first, low, high)


def _latency_rows(name: str, left: Clustered, right: Clustered, interval: Interval) -> list[Row]:
    rows = []
    for label, statistic in STATISTICS:
        values = [statistic(side, np.ones(side.clusters, dtype=np.int64)) for side in (left, right)]
        if any(math.isnan(value) for value in values):
            before, after = (None if math.isnan(value) else value for value in values)
            rows.append(Row(f"{name}_{label}", before, after, None))
            continue
        low, high = interval(left, right, statistic)
        rows.append(Row(f"{name}_{label}", values[0], values[1], values[1] - values[0], low, high))
    return rows


def _throughput(first: Arm, second: Arm) -> list[Row]:
    rows = []
    for section, name in (
        ("offline", "offline_throughput"),
        ("online", "output_throughput"),
        ("total", "throughput"),
    ):
        left, right = first.mean(section, name), second.mean(section, name)
        difference = None if left is None or right is None else right - left
        rows.append(Row(f"{section}.{name}", left, right, difference))
    return rows


def _notes(first: Arm, second: Arm, *, paired: bool) -> list[str]:
    notes = []
    for arm in (first, second):
        if arm.requests and len(arm.requests) < ENOUGH:
            notes.append(f"{arm.name}: {len(arm.requests)} online requests; a claim needs {ENOUGH} per arm")
        if any(not summary["valid"] for summary in arm.summaries):
            notes.append(f"{arm.name}: contains an INVALID run")
        if any(summary.get("interrupted") for summary in arm.summaries):
            notes.append(f"{arm.name}: contains an interrupted run")
        if len({summary["seeds"]["seed"] for summary in arm.summaries}) < len(arm.summaries):
            notes.append(f"{arm.name}: two runs have the same seed; one is ignored")
    if first.requests and second.requests and first.slo != second.slo:
        notes.append(f"the arms have different SLOs; the SLO of {first.name} is applied to both")
    if not paired and first.requests and second.requests:
        notes.append("the arms have different requests; differences are not paired")
    if first.requests and second.requests and _asked(first) != _asked(second):
        said = "; ".join(f"{arm.name}: {_asked(arm)}" for arm in (first, second))
        notes.append(f"the arms have different workloads, which affects the differences ({said})")
    for arm in (arm for arm in (first, second) if arm.requests):
        good = sum(first.slo.good(record) for record in arm.requests.values())
        low, high = wilson(good, len(arm.requests))
        notes.append(f"{arm.name}: {good} of {len(arm.requests)} good, Wilson {low:.4f} to {high:.4f}")
    return notes


def _asked(arm: Arm) -> str:
    """Describe the online requests of an arm: workloads, mean lengths and rate."""
    requests = arm.requests.values()
    prompt, answer = (
        sum(getattr(r, name) for r in requests) / len(requests) for name in ("input_asked", "output_asked")
    )
    rates = [summary.get("honesty", {}).get("intended_rate") for summary in arm.summaries]
    rate = f", {np.mean(rates):.3g} requests/s" if all(rates) else ""
    names = sorted({str(summary.get("workload", {}).get("name", "")) for summary in arm.summaries})
    return f"{', '.join(names)} with {prompt:.0f} tokens in, {answer:.0f} out{rate}"


def _interference(first: Arm, second: Arm) -> dict[str, float | None] | None:
    """Return the interference of the second arm, or None unless only the second arm ran offline work."""
    if first.mean("offline", "offline_throughput") or not second.mean("offline", "offline_throughput"):
        return None
    names = ("ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99")
    sections = [{name: arm.mean("online", name) for name in names} for arm in (second, first)]
    return interference(*sections) if first.requests else None


def _harvest(first: Arm, second: Arm) -> float | None:
    """Return the harvest of the second arm, or None unless only the first arm is without online requests."""
    if first.requests or not second.requests:
        return None
    sections = [{"total": {"throughput": arm.mean("total", "throughput")}} for arm in (second, first)]
    return harvest(*sections)
