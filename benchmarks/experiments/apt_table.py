"""The tables and figures of Apt-Serve's evaluation: attainment pooled over seeds, and the rates that keep one."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.drawing import Series
from benchmarks.experiments.table import Result, figure
from loadgen.stats import wilson

SHARES = (0.9, 0.6)
"""Attainments at which the paper compares rates."""
Key = tuple[str, str, float, float]


def _key(result: Result) -> Key:
    setting = result.setting
    return setting["model"], setting["workload"], setting["cv"], setting["rate"]


def pooled_attainment(results: Sequence[Result]) -> tuple[float, float, float]:
    """Attainment over the requests of all seeds, with its 95 % interval."""
    good, count = (int(sum(r.metrics[key] or 0.0 for r in results)) for key in ("good", "requests"))
    return (good / count if count else 0.0, *wilson(good, count))


def curve(results: Sequence[Result], policy: str, model: str, workload: str) -> list[tuple[float, float]]:
    """(rate, attainment) of a policy under Poisson arrivals, by rate."""
    mine = [r for r in results if r.policy == policy and _key(r)[:3] == (model, workload, 1.0)]
    rates = sorted({r.setting["rate"] for r in mine})
    return [(rate, pooled_attainment([r for r in mine if r.setting["rate"] == rate])[0]) for rate in rates]


def effective_rate(curve: Sequence[tuple[float, float]], share: float) -> float | None:
    """The highest rate with at least `share` attained, linear between the rates that were run; None when not even the
    lowest has it. Where the highest has it, that rate: the true one is no lower."""
    kept = [index for index, (_, attainment) in enumerate(curve) if attainment >= share]
    if not kept:
        return None
    last = kept[-1]
    if last == len(curve) - 1:
        return curve[last][0]
    (low, before), (high, after) = list(pairwise(curve))[last]
    return low + (high - low) * (before - share) / (before - after)


HEADER = ("model", "workload", "rate", "cv", "policy", "attained %", "low", "high", "ttft p50 s", "p99 s")
MORE = ("tbt p99 s", "recomputed %", "cache work %", "rate at 90 %", "at 60 %")


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: pooled attainment with its interval, other figures as means over the seeds. The rates that keep
    an attainment stand beside the lowest rate of a policy."""
    rows: list[list[Any]] = []
    seen: set[tuple[str, str, str]] = set()
    for key in dict.fromkeys(map(_key, results)):
        model, workload, cv, rate = key
        group = [r for r in results if _key(r) == key]
        for policy in dict.fromkeys(r.policy for r in group):
            mine = [r for r in group if r.policy == policy]
            shares = [100.0 * share for share in pooled_attainment(mine)]
            latency = [_mean(mine, name) for name in ("ttft_p50", "ttft_p99", "tbt_p99")]
            work = [100.0 * _mean(mine, name) for name in ("recomputed", "cache_work")]
            rates: list[float | None] = [None, None]
            if (model, workload, policy) not in seen:
                rates = [effective_rate(curve(results, policy, model, workload), share) for share in SHARES]
            seen.add((model, workload, policy))
            rows.append([model, workload, rate, cv, policy, *shares, *latency, *work, *rates])
    return [*HEADER, *MORE], rows


def _mean(results: Sequence[Result], key: str) -> float:
    return sum(float(r.metrics[key] or 0.0) for r in results) / len(results)


DRAWN = ("fcfs", "fcfs-kv", "larry", "apt-kv", "apt-hybrid", "apt-host", "goodput-kv", "goodput-hybrid", "goodput-host")


def figures(results: Sequence[Result]) -> dict[str, str]:
    """Attainment against the rate, and against the burstiness at each burst rate; base lines beside the best few."""
    found = {}
    for model, workload in dict.fromkeys(_key(r)[:2] for r in results):
        group = [r for r in results if _key(r)[:2] == (model, workload)]
        policies = [policy for policy in DRAWN if any(r.policy == policy for r in group)]
        title = f"{model}, {workload}: SLO attainment"
        curves = [(policy, curve(group, policy, model, workload)) for policy in policies]
        lines = [Series(name, [x for x, _ in line], [y for _, y in line], points=True) for name, line in curves]
        found[f"{model}-{workload}-rate"] = figure(title, lines, "requests/s", "share")
        for rate in dict.fromkeys(r.setting["rate"] for r in group if r.setting["cv"] != 1.0):
            bursts = [r for r in group if r.setting["rate"] == rate]
            cvs = sorted({r.setting["cv"] for r in bursts})
            lines = [Series(policy, cvs, [_at(bursts, policy, cv) for cv in cvs], points=True) for policy in policies]
            found[f"{model}-{workload}-cv-{rate:g}"] = figure(f"{title} at {rate:g}/s", lines, "CV", "share")
    return found


def _at(results: Sequence[Result], policy: str, cv: float) -> float:
    return pooled_attainment([r for r in results if r.policy == policy and r.setting["cv"] == cv])[0]
