"""SAL's evaluation (LARRY §7, Figures 10-11): a fleet of engines behind a router, by router and online policy.

Azure chat and code conversations and ShareGPT's lengths at a rate per engine, Llama-3-8B on A100-40GB, at most 1,024
tokens a step as in the paper; fleets of equal engines, and one whose second half is slower. Each seed takes its own
part of a trace. The paper's arrivals are another trace's; here they are those of the conversations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.experiments.machine import Machine, MachineSpec, build_machine
from benchmarks.experiments.replay import Each, online_arrivals, part_of_trace
from benchmarks.experiments.table import Result, average, gains, mean, ratios
from benchmarks.simulated_fleet.fleet import ROUTERS, FleetDriver, Server, launcher_of
from engine.core import EngineCore
from engine.scheduling.objective import StepObjective
from engine.scheduling.policies import find_policy
from engine.scheduling.report import report_stats
from loadgen import lengths
from loadgen.simulation.run import Metrics, Row, measure, rows_of
from loadgen.stats import stream
from predictor.features import BatchFeatures

SOURCES = {"chat": lengths.AZURE_CONV, "code": lengths.AZURE_CODE, "sharegpt": lengths.SHAREGPT}
MACHINE = MachineSpec("llama-3-8b", "a100-40gb", max_num_seqs=256, max_num_batched_tokens=1024, max_model_len=8192)


class Fleet(NamedTuple):
    """Devices by name, one an engine, with policies and workloads."""

    name: str
    devices: tuple[str, ...]
    policies: tuple[str, ...] = ("larry", "goodput")
    workloads: tuple[str, ...] = ("chat", "code")


FLEETS = (
    Fleet("4", ("a100-40gb",) * 4, workloads=("chat", "code", "sharegpt")),
    Fleet("8", ("a100-40gb",) * 8, policies=("larry",)),
    Fleet("2+2 slow", ("a100-40gb",) * 2 + ("a40",) * 2),
)


@dataclass(frozen=True, slots=True)
class Config:
    """`rates`: requests/s for each engine of the first device; a slower one adds less, by its full step.
    `ttft`: the objective in seconds of online policies that have one."""

    machine: MachineSpec = MACHINE
    fleets: tuple[Fleet, ...] = FLEETS
    rates: tuple[tuple[str, float], ...] = (("chat", 6.5), ("code", 1.5), ("sharegpt", 2.4))
    routers: tuple[str, ...] = tuple(ROUTERS)
    window: float = 80.0
    warm_up: float = 15.0
    ttft: float = 1.0


CONFIG = Config()
SHORT = replace(CONFIG, fleets=FLEETS[:1], window=20.0)


class Task(NamedTuple):
    config: Config
    fleet: Fleet
    rows: tuple[Row, ...]
    policy: str
    router: str
    seed: int


@cache
def machine_of(spec: MachineSpec, device: str, seed: int) -> Machine:
    """The machine on another device."""
    return build_machine(replace(spec, device=device), seed)


def step_seconds(machine: Machine) -> float:
    """A full step of one prompt's chunk, by the machine's own latency model."""
    features = BatchFeatures()
    features.add_chunk(0, machine.config.max_num_batched_tokens)
    return machine.predictor.predict(features)


def speed(config: Config, fleet: Fleet, seed: int) -> float:
    """How many engines of its first device the fleet is worth."""
    first, *_ = steps = [step_seconds(machine_of(config.machine, device, seed)) for device in fleet.devices]
    return sum(first / step for step in steps)


def rows_for(config: Config, data: Path | None, workload: str, rate: float, seed: int) -> tuple[Row, ...]:
    """The seed's own part of a trace, stretched to `rate`; ShareGPT has lengths alone, which arrive by chance."""
    count = max(1, round(rate * (config.warm_up + config.window)))
    limit = config.machine.max_model_len
    if workload == "sharegpt":
        drawn = lengths.sample(SOURCES[workload], count, seed, data, "online")
        gaps = stream(seed, "fleet arrivals").exponential(1.0 / rate, count)
        return rows_of(drawn.at(np.cumsum(gaps)), limit)
    return part_of_trace(lengths.arrivals(SOURCES[workload], seed, data), rate, count, seed, limit)


def servers_of(task: Task) -> list[Server]:
    """The fleet, each engine with its own noise."""
    config, found = task.config, []
    objective = StepObjective(ttft=config.ttft) if task.policy != "larry" else StepObjective()
    for number, device in enumerate(task.fleet.devices):
        machine = machine_of(config.machine, device, task.seed)
        policy = find_policy(task.policy)
        core = EngineCore(machine.config, online_policy=policy, offline_policy="fcfs", objective=objective)
        runner = launcher_of(machine.runner(1000 * task.seed + number))
        found.append(Server(number, core, runner, step_seconds(machine)))
    return found


def run_task(task: Task) -> Metrics:
    """One run, measured; `busy_spread`: how long the busiest engine ran ÷ the mean."""
    arrivals = online_arrivals(task.rows, task.config.machine.max_model_len)
    servers = servers_of(task)
    driver = FleetDriver(servers, ROUTERS[task.router], arrivals, seed=task.seed)
    found = measure(driver.run(), task.config.warm_up, arrivals[-1].at)
    stats = [report_stats(server.core.state) for server in servers]
    found["preemptions"] = float(sum(sum(stat.preemptions.values()) for stat in stats))
    busy = [stat.step_seconds for stat in stats]
    found["busy_spread"] = max(busy) / (sum(busy) / len(busy))
    return found


def run_seed(config: Config, data: Path | None, seed: int, each: Each, say: Callable[[str], None]) -> list[Result]:
    results: list[Result] = []
    for fleet in config.fleets:
        worth = speed(config, fleet, seed)
        for workload, rate in config.rates:
            if workload not in fleet.workloads:
                continue
            rows = rows_for(config, data, workload, rate * worth, seed)
            tasks = [
                Task(config, fleet, rows, policy, name, seed) for policy in fleet.policies for name in config.routers
            ]
            for task, metrics in zip(tasks, each(run_task, tasks), strict=True):
                setting = {"workload": workload, "fleet": fleet.name, "online_policy": task.policy, "rate": rate}
                results.append(Result("sal", task.router, setting, seed, metrics))
            say(f"seed {seed}: {workload} on {fleet.name} engines at {rate * worth:.3g} requests/s")
    return results


COLUMNS = ("ttft_p50", "ttft_p95", "ttft_p99", "normalized_ttft_p50", "tbt_p50", "tbt_p99", "e2e_p50", "e2e_p95")
HEADER = (
    "workload",
    "rate",
    "engines",
    "policy",
    "router",
    "ttft p50 s",
    "p95",
    "p99",
    "norm p50 ms",
    "tbt p50 ms",
    "p99 ms",
)
GAINS = ("tgt p50 s", "p95 s", "ttft p50 gain", "p95 gain", "p99 gain", "tgt p50 gain", "p99 / rr", "p99 / p2c")
Group = tuple[str, float, str, str]


def group_of(result: Result) -> Group:
    """Return the key of runs that are compared."""
    setting = result.setting
    return setting["workload"], setting["rate"], setting["fleet"], setting["online_policy"]


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: means over the seeds. A gain is the best of the other routers' ÷ SAL's (mean of the seeds' own,
    above 1: SAL is better); the last two are SAL's P99 TTFT ÷ that of round-robin and of p2c.
    """
    rows: list[list[Any]] = []
    for group in dict.fromkeys(map(group_of, results)):
        members = [r for r in results if group_of(r) == group]
        for router in dict.fromkeys(r.policy for r in members):
            mine = [r for r in members if r.policy == router]
            values = [mean(mine, key) * (1e3 if "norm" in key or "tbt" in key else 1.0) for key in COLUMNS]
            more: list[float | None] = [None] * 6
            if router == "sal":
                more[:4] = [
                    average(gains(members, mine, key)) for key in ("ttft_p50", "ttft_p95", "ttft_p99", "e2e_p50")
                ]
                more[4:] = [average(ratios(members, "ttft_p99", router, rival)) for rival in ("round-robin", "p2c")]
            rows.append([*group, router, *values, *more])
    return [*HEADER, *GAINS], rows
