"""Case 491 of llm-d's batch gateway in its present form: bursts of chats beside three batch jobs.

Ten cycles of 90 s at 15 requests/s and 90 s at 1 request/s, 512 tokens in and 128 out, two cycles of warm-up; three
jobs that are there from the start, with windows of 30 minutes, 2 hours and 24 hours, 512-token lines and log-normal
answers (500 tokens on average, standard deviation 400). The issue has 1,000 lines in each job; a H100 answers these in
the first cycle, so the jobs have 5,000 lines here. Rows of its table: `S0` has chats alone, `S1` no gateway (lines
arrive as chats, evenly over the run). `sarathi++`: online first, without latency control; `hygen` and `tidemill`: the
budget is chosen for a tolerated P99 TTFT on other bursts of the same rate and confirmed on yet others, several each.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.experiments import hygen
from benchmarks.experiments.machine import Machine, MachineSpec, build_machine
from benchmarks.experiments.pool import Replays
from benchmarks.experiments.replay import ONLINE_ONLY, Scenario, Setting
from benchmarks.experiments.surface import Evaluate, Family, Surface, Target, interference
from benchmarks.experiments.table import Result, mean
from engine.scheduling.objective import UNLIMITED
from loadgen import workloads
from loadgen.arrivals import RateCurve, parse_curve
from loadgen.simulation.run import Metrics, rows_of

OTHER_ARRIVALS = 1000
DRAWS = 2
"""Bursts on which the budget is chosen, and as many on which it is confirmed."""
MAX_CONFIRMATIONS = 4
BURST = 90.0
WINDOWS = (1800.0, 7200.0, 86400.0)
"""Seconds that each job has."""
FAMILIES = {"hygen": ("flat",), "tidemill": ("flat", "ttft_mean")}

MACHINE = MachineSpec("llama-3-8b", "h100", max_num_seqs=256, max_num_batched_tokens=1024)


@dataclass(frozen=True, slots=True)
class Config:
    """`tolerance`: of the P99 TTFT over chat alone; `lines`: of each of the three jobs; `cycles`: reported."""

    machine: MachineSpec = MACHINE
    lines: int = 5000
    tolerance: float = 0.1
    margin: float = 0.8
    phase: float = BURST
    rates: tuple[float, float] = (15.0, 1.0)
    cycles: int = 10


CONFIG = Config()
SHORT = replace(CONFIG, lines=500, phase=30.0, cycles=4)


def scenarios(config: Config, seed: int) -> dict[str, Scenario]:
    """`chosen-N` and `confirmed-N`: bursts with other arrivals, cut when they end; `reported`: all cycles with this
    seed's arrivals, run until the jobs have ended.

    Latency and throughput of `reported` are those from the first burst after the warm-up to the end of the last; one of
    16 chats in that time arrives between bursts.
    """
    found = {"reported": _scenario(config, seed, config.cycles)}
    for index in range(DRAWS):
        for place, name in enumerate(("chosen", "confirmed")):
            other = _scenario(config, OTHER_ARRIVALS * (1 + place * DRAWS + index) + seed, 1)
            found[f"{name}-{index}"] = replace(other, end=config.phase + CUT)
    return found


CUT = 5.0
"""Seconds after a burst in which its last requests get their first tokens."""


def _scenario(config: Config, number: int, cycles: int) -> Scenario:
    duration = 2 * cycles * config.phase
    options = workloads.Options(
        seed=number, curve=_curve(config, cycles), duration=duration, offline_lines=config.lines
    )
    made = workloads.build("llmd-491", options)
    assert made.online is not None
    limit = config.machine.max_model_len
    offline = tuple(row for job in made.jobs for row in rows_of(job.lines, limit))
    warm_up = 2 * config.phase * warm_up_cycles(cycles)
    windows = WINDOWS if cycles > 1 else ()
    return Scenario(
        rows_of(made.online, limit), offline, warm_up, duration - config.phase, finite=True, windows=windows
    )


def warm_up_cycles(cycles: int) -> int:
    """Return the cycles that are not measured: a fifth, at least one; none of a single burst."""
    return max(1, cycles // 5) if cycles > 1 else 0


def averaged(replays: Replays, name: str) -> Evaluate:
    """Replays a batch on all draws called `name`; the mean over them of every metric."""

    def evaluate(settings: Sequence[Setting]) -> list[Metrics]:
        draws = [replays.on(f"{name}-{index}", settings) for index in range(DRAWS)]
        return [{key: sum(m[key] for m in each) / DRAWS for key in each[0]} for each in zip(*draws, strict=True)]

    return evaluate


def confirm(first: Surface, second: Surface, target: Target, margin: float, names: Sequence[str]) -> Setting:
    """The best of `names` on the first draws that also keeps the whole tolerance on the second; else online only.

    Settings within 5 % of a failed budget are not tried: they would fail as well (`predictor.budget`).
    """
    found = [s for name in names for s in first.members[name].values() if first.keeps(s, target, margin)]
    found.sort(key=lambda setting: -first.points[setting]["offline_throughput"])
    failed: list[float] = []
    for setting in found:
        if any(
            max(setting.budget.latency_budget / other, other / setting.budget.latency_budget) < 1.05 for other in failed
        ):
            continue
        second.replay([second.online_only, setting])
        if second.keeps(setting, target):
            return setting
        failed.append(setting.budget.latency_budget)
        if len(failed) == MAX_CONFIRMATIONS:
            break
    return first.online_only


def _curve(config: Config, cycles: int) -> RateCurve:
    steps = ",".join(f"{config.phase:g}@{rate:g}" for rate in config.rates * cycles)
    return parse_curve(f"steps:{steps}")


def families(machine: Machine) -> list[Family]:
    """Flat budgets and those that add nothing beside a waiting prompt."""
    made = {family.name: family for family in hygen.families(machine, hygen.CONFIG)}
    return [
        replace(made["flat"], high=made["flat"].high / 3, grid=4, runs=7, metrics=("ttft_p99",)),
        replace(made["ttft_mean"], grid=3, runs=4, metrics=("ttft_p99",)),
    ]


def run_seed(config: Config, _data: Path | None, seed: int, workers: int, say: Callable[[str], None]) -> list[Result]:
    """All rows of one seed."""
    machine = build_machine(config.machine, seed)
    target = Target("ttft_p99", config.tolerance)
    online_only = Setting(ONLINE_ONLY)
    with Replays(machine, scenarios(config, seed), seed, workers) as replays:
        first = Surface(averaged(replays, "chosen"), online_only)
        first.replay([online_only])
        for family in families(machine):
            first.explore(family, [target], config.margin, hygen.BATCH)
        say(f"seed {seed}: {len(first.points)} settings on {DRAWS} bursts each to choose the budget")
        second = Surface(averaged(replays, "confirmed"), online_only)
        arms = {"S0": online_only, "S1": Setting(mixed=2 * config.cycles * config.phase)}
        arms["sarathi++"] = Setting(UNLIMITED)
        for policy, names in FAMILIES.items():
            arms[policy] = confirm(first, second, target, config.margin, names)
        say(f"seed {seed}: {max(len(second.points) - 1, 0)} settings on {DRAWS} more bursts to confirm it")
        third = Surface(lambda settings: replays.on("reported", settings), online_only)
        third.replay(list(arms.values()))
    return [_result(policy, setting, third, target, seed) for policy, setting in arms.items()]


def _result(policy: str, setting: Setting, surface: Surface, target: Target, seed: int) -> Result:
    metrics: dict[str, Any] = dict(surface.points[setting])
    for key in ("ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99"):
        metrics[f"interference_{key}"] = interference(metrics, surface.base, key)
    metrics["kept"] = surface.keeps(setting, target)
    described = {
        "workload": "llmd-491",
        "tolerance": target.tolerance,
        "metric": target.metric,
        "params": asdict(setting.budget),
    }
    return Result("llmd-491", policy, described, seed, metrics)


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: the columns of the issue's table, then the tail, its ratio to `S0` (mean, lowest and highest
    seed) and the end of the last line; means over the seeds."""
    rows: list[list[Any]] = []
    for policy in dict.fromkeys(r.policy for r in results):
        mine = [r for r in results if r.policy == policy]
        times = [1e3 * mean(mine, key) for key in ("ttft_p50", "ttft_p95", "tbt_p50", "tbt_p95")]
        batch = [mean(mine, "offline_throughput"), 100 * mean(mine, "lines_kept")] if policy != "S0" else [None, None]
        ratios = [1.0 + float(r.metrics["interference_ttft_p99"] or 0.0) for r in mine]
        tail = [1e3 * mean(mine, "ttft_p99"), sum(ratios) / len(ratios), min(ratios), max(ratios)]
        rows.append([policy, *times, *batch, *tail, mean(mine, "lines_done") if policy != "S0" else None])
    return list(HEADER), rows


HEADER = (
    "scenario",
    "TTFT p50 ms",
    "TTFT p95",
    "ITL p50",
    "ITL p95",
    "batch tok/s",
    "batch SLO completion %",
    "TTFT p99",
    "x S0",
    "lowest",
    "highest",
    "lines done s",
)
