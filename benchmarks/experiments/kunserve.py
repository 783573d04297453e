"""KunServe's evaluation (§5.2-§5.4): a fleet whose memory overflows in a burst, by remedy.

Qwen-2.5-14B on A100-80GB, 200 Gbit/s between engines, as the paper's cluster A; lengths of ShareGPT and of Azure's
chats, Poisson arrivals with one burst. The cache is a share of the free memory, so that memory runs short before time
does. All arms run first come, first served, behind SAL:

- `recompute`, `swap`: a preempted request loses its cache, or keeps it on the host; `migrate`: running requests leave a
  server with a queue for the one that has most room; `pipeline`: half the layers from the start, on pairs;
- `kunserve`: drop, exchange, lookahead and restore; and the same without one of the last three.

A request violates an SLO of scale N if its TTFT or its mean gap exceeds N times the least P50 of the arms that drop no
layers (§5.2, "SLO attainment"). `kunserve-bursts` has a second burst behind the first (§5.4).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.experiments.machine import Machine, MachineSpec, build_machine
from benchmarks.experiments.replay import Each, online_arrivals
from benchmarks.experiments.table import Result, average, mean, ratios
from benchmarks.figures import percentile
from benchmarks.simulated_fleet.fleet import ROUTERS, FleetDriver
from benchmarks.simulated_fleet.overload import Means, OverloadedFleet
from loadgen import lengths
from loadgen.arrivals import RateCurve, schedule
from loadgen.simulation.run import Metrics, Row, measure, rows_of
from loadgen.stats import stream

SOURCES = {"sharegpt": lengths.SHAREGPT, "chat": lengths.AZURE_CONV}
ARMS = (
    Means("recompute"),
    Means("swap", host_gib=64.0),
    Means("migrate", migrate=True),
    Means("pipeline", pipeline=2, lookahead=False),
    Means("kunserve", drop=True),
    Means("no lookahead", drop=True, lookahead=False),
    Means("uncoordinated", drop=True, coordinated=False),
    Means("no restore", drop=True, restore=False),
)
OURS = "kunserve"
SCALES = (5, 10)
"""SLO scales of the paper's chats and of its document summaries."""
MACHINE = MachineSpec("qwen2.5-14b", "a100-80gb", max_num_seqs=512, max_num_batched_tokens=1024, max_model_len=8192)


class Load(NamedTuple):
    """Requests/s for each engine, before and behind the burst and in it."""

    workload: str
    base: float
    burst: float


@dataclass(frozen=True, slots=True)
class Config:
    """`cache`: share of the cache that would fit. `phases`: seconds before, in and behind each burst, all measured.
    `link`: bytes/s; `min_tokens`: of a micro-batch, on average."""

    machine: MachineSpec = MACHINE
    engines: int = 4
    cache: float = 0.45
    loads: tuple[Load, ...] = (Load("sharegpt", 0.8, 2.6), Load("chat", 2.0, 5.5))
    phases: tuple[float, ...] = (15.0, 20.0, 45.0)
    arms: tuple[Means, ...] = ARMS
    link: float = 25e9
    min_tokens: int = 512


CONFIG = Config()
SHORT = replace(CONFIG, engines=2, phases=(10.0, 15.0, 30.0), loads=(Load("sharegpt", 0.8, 2.8),))
"""The burst overflows the cache: recompute preempts."""
BURSTS = replace(
    CONFIG, phases=(15.0, 15.0, 60.0, 15.0, 45.0), loads=(Load("sharegpt", 0.5, 3.2),), arms=(*ARMS[:2], *ARMS[4::3])
)
BURSTS_SHORT = replace(BURSTS, engines=2, phases=(5.0, 15.0, 60.0, 15.0, 20.0))


class Task(NamedTuple):
    config: Config
    rows: tuple[Row, ...]
    means: Means
    seed: int


@cache
def machine_of(spec: MachineSpec, share: float, seed: int) -> Machine:
    """The machine with a share of its cache."""
    machine = build_machine(spec, seed)
    return replace(machine, config=replace(machine.config, num_units=int(share * machine.config.num_units)))


def rows_for(config: Config, data: Path | None, load: Load, seed: int) -> tuple[Row, ...]:
    """Arrivals with bursts in every second phase, and lengths drawn from the data set."""
    rates = config.engines * np.array([load.burst if index % 2 else load.base for index in range(len(config.phases))])
    curve = RateCurve(np.array(config.phases), rates)
    times = schedule(curve, "poisson", stream(seed, "burst arrivals"), duration=curve.period)
    drawn = lengths.sample(SOURCES[load.workload], len(times), seed, data, "online")
    return rows_of(drawn.at(times), config.machine.max_model_len)


Latencies = list[tuple[float, float]]
"""TTFT and mean gap of each request, seconds."""


def run_task(task: Task) -> tuple[Metrics, Latencies]:
    """One run to the end of its last request, measured over all requests."""
    config = task.config
    machine = machine_of(config.machine, config.cache, task.seed)
    fleet = OverloadedFleet(
        machine, config.engines, task.means, link=config.link, min_tokens=config.min_tokens, seed=task.seed
    )
    arrivals = online_arrivals(task.rows, config.machine.max_model_len)
    driver = FleetDriver(fleet.servers, ROUTERS["sal"], arrivals, seed=task.seed, on_report=fleet.watch)
    fleet.bind(driver)
    ran = driver.run()
    found = measure(ran, 0.0, sum(config.phases))
    tally = fleet.tally
    found["preemptions"] = float(fleet.preemptions)
    found["bubbles"] = tally.bubbles.share
    found["peak"] = tally.peak
    found["drops"], found["restores"], found["too_little"] = tally.drops, tally.restores, tally.too_little
    found["dropped_share"] = tally.seconds_dropped / (config.engines * driver.now)
    found["stall_mean"] = tally.stalled / tally.moved if tally.moved else 0.0
    found["makespan"] = driver.now
    ended = [record for record in ran.online if record.ttft is not None]
    return found, [(record.ttft or 0.0, sum(record.gaps) / max(1, len(record.gaps))) for record in ended]


def violations(found: Sequence[Latencies], rivals: Sequence[Latencies]) -> list[Metrics]:
    """Return of each run the share of requests that violate the SLO of each scale, `rivals` set the P50s."""
    medians = [min(percentile([each[key] for each in run], 50.0) for run in rivals) for key in (0, 1)]
    return [
        {
            f"violations_{scale}": sum(any(a > scale * b for a, b in zip(each, medians, strict=True)) for each in run)
            / max(1, len(run))
            for scale in SCALES
        }
        for run in found
    ]


def run_seed(config: Config, data: Path | None, seed: int, each: Each, say: Callable[[str], None]) -> list[Result]:
    results: list[Result] = []
    for load in config.loads:
        rows = rows_for(config, data, load, seed)
        tasks = [Task(config, rows, means, seed) for means in config.arms]
        ran = each(run_task, tasks)
        rivals = [latencies for task, (_, latencies) in zip(tasks, ran, strict=True) if not task.means.drop]
        broken = violations([latencies for _, latencies in ran], rivals)
        for task, (metrics, _), shares in zip(tasks, ran, broken, strict=True):
            setting = {"workload": load.workload, "base": load.base, "burst": load.burst, "engines": config.engines}
            results.append(Result("kunserve", task.means.name, setting, seed, metrics | shares))
        say(f"seed {seed}: {load.workload}, {load.base:g} and {load.burst:g} requests/s an engine")
    return results


HEADER = ("workload", "arm", "ttft p50 s", "p95", "p99", "tbt p50 ms", "p99 ms", "tokens/s", "done after s", "peak %")
MORE = (
    "SLO x5 broken %",
    "x10 %",
    "preempted",
    "drops",
    "restores",
    "in pipelines %",
    "bubbles %",
    "stall s",
    "p99 ttft / ours",
)


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: means over the seeds. The last column: the P99 TTFT ÷ that of `kunserve`, mean of the seeds'
    own; above 1 kunserve is better."""
    rows: list[list[Any]] = []
    for workload in dict.fromkeys(r.setting["workload"] for r in results):
        members = [r for r in results if r.setting["workload"] == workload]
        for arm in dict.fromkeys(r.policy for r in members):
            mine = [r for r in members if r.policy == arm]
            ttft = [mean(mine, f"ttft_{key}") for key in ("p50", "p95", "p99")]
            tbt = [1e3 * mean(mine, key) for key in ("tbt_p50", "tbt_p99")]
            row = [workload, arm, *ttft, *tbt, mean(mine, "total_throughput"), mean(mine, "makespan")]
            row += [100 * mean(mine, key) for key in ("peak", *(f"violations_{scale}" for scale in SCALES))]
            row += [*(mean(mine, key) for key in ("preemptions", "drops", "restores"))]
            row += [100 * mean(mine, "dropped_share"), 100 * mean(mine, "bubbles"), mean(mine, "stall_mean")]
            rows.append([*row, average(ratios(members, "ttft_p99", arm, OURS))])
    return [*HEADER, *MORE], rows
