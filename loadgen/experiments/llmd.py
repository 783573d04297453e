"""The co-location scenario of llm-d's issue 491: a burst of chat beside batch jobs.

90 s at 15 requests/s, then 90 s at 1 request/s, 512 tokens in and 128 out, and three jobs of 1,000 such lines that are
there from the start. `fcfs`: jobs queue like chat; `sarathi++`: online first, without latency control; `hygen` and
`tidemill`: the budget is chosen on other arrivals of the same rates, for a tolerated P99 TTFT; `online-only`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadgen import workloads
from loadgen.arrivals import RateCurve, parse_curve
from loadgen.experiments import hygen
from loadgen.experiments.machine import Machine, MachineSpec, build_machine
from loadgen.experiments.pool import Replays
from loadgen.experiments.replay import ONLINE_ONLY, UNLIMITED, Scenario, Setting, rows_of
from loadgen.experiments.surface import Family, Surface, Target, interference
from loadgen.experiments.table import Result, figure, mean
from loadgen.svg import Series

OTHER_ARRIVALS = 1000
BURST = 90.0
FAMILIES = {"hygen": ("flat",), "tidemill": ("flat", "ttft_mean")}

MACHINE = MachineSpec("llama-3-8b", "h100", max_num_seqs=256, max_num_batched_tokens=1024)


@dataclass(frozen=True, slots=True)
class Config:
    """`tolerance`: of the P99 TTFT of the burst over chat alone; `lines`: of each of the three jobs."""

    machine: MachineSpec = MACHINE
    lines: int = 1000
    tolerance: float = 0.1
    margin: float = 0.8
    phase: float = BURST
    rates: tuple[float, float] = (15.0, 1.0)


CONFIG = Config()
SHORT = replace(CONFIG, lines=300, phase=30.0)


def scenarios(config: Config, seed: int) -> dict[str, Scenario]:
    """`chosen`: other arrivals; `reported`: this seed's; `jobs`: the same, run until the jobs have ended.

    Latency is that of the burst, throughput that of both phases: the burst is measured, the run goes on.
    """
    found = {}
    for name, number in (("chosen", OTHER_ARRIVALS + seed), ("reported", seed)):
        options = workloads.Options(
            seed=number, curve=_curve(config), duration=2 * config.phase, offline_lines=config.lines
        )
        made = workloads.build("llmd-491", options)
        assert made.online is not None
        limit = config.machine.max_model_len
        offline = tuple(row for job in made.jobs for row in rows_of(job.lines, limit))
        found[name] = Scenario(rows_of(made.online, limit), offline, 0.0, config.phase, finite=True)
    return found


def _curve(config: Config) -> RateCurve:
    steps = ",".join(f"{config.phase:g}@{rate:g}" for rate in config.rates)
    return parse_curve(f"steps:{steps}")


def families(machine: Machine) -> list[Family]:
    low, high = hygen.step_range(machine)
    made = {family.name: family for family in hygen.families(machine, hygen.CONFIG)}
    return [
        replace(made["flat"], low=low, high=high, grid=7, runs=14, metrics=("ttft_p99",)),
        replace(made["ttft_mean"], low=low, high=high, grid=5, runs=8, metrics=("ttft_p99",)),
    ]


def run_seed(config: Config, _data: Path | None, seed: int, workers: int, say: Callable[[str], None]) -> list[Result]:
    """All rows of one seed."""
    machine = build_machine(config.machine, seed)
    target = Target("ttft_p99", config.tolerance)
    with Replays(machine, scenarios(config, seed), seed, workers) as replays:
        first = Surface(lambda settings: replays.on("chosen", settings), Setting(ONLINE_ONLY))
        first.replay([first.online_only])
        for family in families(machine):
            first.explore(family, [target], config.margin, batch=workers)
        say(f"seed {seed}: {len(first.points)} replays to choose the budget")
        arms = {"online-only": first.online_only, "fcfs": Setting(mixed=True), "sarathi++": Setting(UNLIMITED)}
        arms |= {policy: first.choose(target, config.margin, names) for policy, names in FAMILIES.items()}
        second = Surface(lambda settings: replays.on("reported", settings), first.online_only)
        second.replay(list(arms.values()))
    return [_result(policy, setting, second, target, seed) for policy, setting in arms.items()]


def _result(policy: str, setting: Setting, surface: Surface, target: Target, seed: int) -> Result:
    metrics: dict[str, Any] = dict(surface.points[setting])
    for key in ("ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99"):
        metrics[f"interference_{key}"] = interference(metrics, surface.base, key)
    metrics["kept"] = surface.keeps(setting, target)
    described = {"tolerance": target.tolerance, "metric": target.metric, "params": asdict(setting.budget)}
    return Result("llmd-491", policy, described, seed, metrics)


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: means over the seeds; ratios to chat alone."""
    header = [
        "policy",
        "burst ttft p50 ms",
        "burst ttft p99 ms",
        "x alone",
        "tbt p99 ms",
        "offline tok/s",
        "all done s",
    ]
    base = mean([r for r in results if r.policy == "online-only"], "ttft_p99")
    rows = []
    for policy in dict.fromkeys(r.policy for r in results):
        mine = [r for r in results if r.policy == policy]
        p50, p99, tbt = (1e3 * mean(mine, key) for key in ("ttft_p50", "ttft_p99", "tbt_p99"))
        ratio = p99 / (1e3 * base) if base else None
        rows.append([policy, p50, p99, ratio, tbt, mean(mine, "offline_throughput"), mean(mine, "end")])
    return header, rows


def figures(results: Sequence[Result]) -> dict[str, str]:
    """Offline throughput in the burst against the burst's P99 TTFT, one point per policy."""
    series = []
    for policy in dict.fromkeys(r.policy for r in results if r.policy != "online-only"):
        mine = [r for r in results if r.policy == policy]
        point = 1e3 * mean(mine, "ttft_p99"), mean(mine, "offline_throughput")
        series.append(Series(policy, [point[0]], [point[1]], points=True))
    title = "llmd-491: harvested tokens in the burst against its P99 TTFT"
    return {"llmd-491": figure(title, series, "P99 TTFT, ms", "offline tokens/s", log_x=True)}
