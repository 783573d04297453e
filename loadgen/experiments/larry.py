"""LARRY's evaluation (§6, Figures 7-9): time to first token by online policy and load, no offline work.

Azure chat and code conversations stretched to a rate, Llama-3-8B on A100-40GB. The paper takes its arrivals from
another trace; here both arrivals and lengths are those of the conversations. Requests ask for more tokens than they
take (`max_tokens`), as clients do: `no-preempt` pays for it, `trail+` alone knows the true lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadgen import lengths, traces
from loadgen.experiments.machine import MachineSpec, build_machine
from loadgen.experiments.pool import Replays
from loadgen.experiments.replay import Scenario, Setting, rows_of
from loadgen.experiments.table import Result, figure, mean
from loadgen.svg import Series

POLICIES = {
    "fcfs": "fcfs",
    "no-preempt": "no-preempt",
    "random": "random",
    "trail+": "srpt-oracle",
    "larry": "larry:0.01",
    "larry a=0.1": "larry:0.1",
    "larry a=1": "larry:1",
}
SOURCES = {"chat": lengths.AZURE_CONV, "code": lengths.AZURE_CODE}

MACHINE = MachineSpec("llama-3-8b", "a100-40gb", max_num_seqs=256, max_model_len=8192)


@dataclass(frozen=True, slots=True)
class Config:
    """`rates`: requests/s at load factor 1, where the queue is neither empty nor growing all the time."""

    machine: MachineSpec = MACHINE
    rates: tuple[tuple[str, float], ...] = (("chat", 7.0), ("code", 2.5))
    factors: tuple[float, ...] = (0.8, 0.9, 1.0, 1.1, 1.2)
    window: float = 600.0
    warm_up: float = 30.0


CONFIG = Config()
SHORT = replace(CONFIG, window=180.0, factors=(0.9, 1.0, 1.1))


def scenario(config: Config, data: Path | None, workload: str, rate: float, seed: int) -> Scenario:
    """The seed's own part of the trace, at `rate`; the run goes on until every request has ended."""
    source = lengths.arrivals(SOURCES[workload], seed, data)
    span = (config.warm_up + config.window) * rate / source.rate
    begin = (seed * span) % max(source.span - span, 1.0)
    part = traces.window(source, begin, begin + span)
    rows = rows_of(traces.stretch(part, source.rate / rate), config.machine.max_model_len)
    return Scenario(rows, (), config.warm_up)


def run_seed(config: Config, data: Path | None, seed: int, workers: int, say: Callable[[str], None]) -> list[Result]:
    """All rows of one seed."""
    machine = build_machine(config.machine, seed)
    points = [(name, factor, factor * rate) for name, rate in config.rates for factor in config.factors]
    cases = {f"{name}@{factor:g}": scenario(config, data, name, rate, seed) for name, factor, rate in points}
    results = []
    with Replays(machine, cases, seed, workers) as replays:
        for name, factor, rate in points:
            settings = [Setting(online_policy=policy) for policy in POLICIES.values()]
            for policy, metrics in zip(POLICIES, replays.on(f"{name}@{factor:g}", settings), strict=True):
                setting = {"workload": name, "factor": factor, "rate": rate, "policy": POLICIES[policy]}
                results.append(Result("larry", policy, setting, seed, metrics))
            say(f"seed {seed}: {name} at {rate:.3g} requests/s")
    return results


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: means over the seeds; the ratios are fcfs ÷ the policy."""
    header = [
        "workload",
        "factor",
        "policy",
        "ttft p50 s",
        "ttft p95 s",
        "ttft p99 s",
        "norm p50 ms",
        "p50 gain",
        "p95 gain",
    ]
    rows: list[list[Any]] = []
    for workload, factor in dict.fromkeys((r.setting["workload"], r.setting["factor"]) for r in results):
        group = [r for r in results if (r.setting["workload"], r.setting["factor"]) == (workload, factor)]
        base = {key: mean([r for r in group if r.policy == "fcfs"], key) for key in ("ttft_p50", "ttft_p95")}
        for policy in POLICIES:
            mine = [r for r in group if r.policy == policy]
            p50, p95, p99 = (mean(mine, f"ttft_{key}") for key in ("p50", "p95", "p99"))
            gains = [base["ttft_p50"] / p50 if p50 else None, base["ttft_p95"] / p95 if p95 else None]
            rows.append([workload, factor, policy, p50, p95, p99, 1e3 * mean(mine, "normalized_ttft_p50"), *gains])
    return header, rows


def figures(results: Sequence[Result]) -> dict[str, str]:
    """P50 and P95 TTFT against the load factor; `no-preempt` and `random` are left to the table."""
    found = {}
    for workload in dict.fromkeys(r.setting["workload"] for r in results):
        for key in ("ttft_p50", "ttft_p95"):
            series = []
            for policy in ("fcfs", "trail+", "larry", "larry a=1"):
                mine = [r for r in results if (r.policy, r.setting["workload"]) == (policy, workload)]
                factors = sorted({r.setting["factor"] for r in mine})
                values = [mean([r for r in mine if r.setting["factor"] == factor], key) for factor in factors]
                series.append(Series(policy, factors, values, points=True))
            title = f"{workload}: {key.replace('_', ' ').upper()}"
            found[f"larry-{workload}-{key[-3:]}"] = figure(title, series, "load factor", "seconds")
    return found
