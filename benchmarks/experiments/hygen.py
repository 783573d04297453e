"""HyGen's evaluation (§5.2): offline throughput and interference at a tolerated interference, by policy.

Azure conversations thinned to a rate beside arXiv lengths, Llama-2-7B on A100-40GB. Parameters are chosen with a margin
on one window of the trace, for a P99 confirmed on two further draws of its requests, and reported on the next one:

- `online-only`, `sarathi++` (no latency control);
- `hygen-star`: offline work at a fixed rate, `hygen`: one flat latency budget, both tuned for the target;
- `tidemill`: budgets with the weight of the metric besides the flat ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.drawing import Series
from benchmarks.experiments.machine import Machine, MachineSpec, build_machine
from benchmarks.experiments.replay import ONLINE_ONLY, Each, Replays, Scenario, Setting
from benchmarks.experiments.surface import Family, Surface, Target, interference
from benchmarks.experiments.table import Result, average, figure, mean, ratios
from engine.colocation.replay import step_range
from engine.scheduling.objective import UNLIMITED
from loadgen import lengths, traces
from loadgen.simulation.run import rows_of
from predictor.budget import BudgetParams

METRICS = ("ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99")
FLAT, RATE = ("flat",), ("rate",)
TBT_MEAN = {3.0: "tbt_mean", 4.0: "tbt_mean d4"}
"""Families of the mean-TBT rule by δ: λ·δ decides beside how many online decodes an offline decode is worth it, λ how
long a chunk is, so that one without the other jumps from one to the next number of decodes."""
TIDEMILL_FAMILIES = (*FLAT, *TBT_MEAN.values(), "tbt_p99", "ttft_mean")
TUNED = {"hygen-star": RATE, "hygen": FLAT, "tidemill": TIDEMILL_FAMILIES}

MACHINE = MachineSpec("llama-2-7b", "a100-40gb")


BESIDE = Target("ttft_p99", 0.08)
"""The second target beside a tolerated mean TBT (HyGen, Figure 13)."""


@dataclass(frozen=True, slots=True)
class Config:
    """`rate`: online requests/s of the trace `online`. Windows in seconds; `margin`: share of the tolerance used on the
    first window.

    `several`: tolerances of the mean TBT, each kept at once with `beside`. `searched`: the families to explore.
    """

    machine: MachineSpec = MACHINE
    online: lengths.Lengths = lengths.AZURE_CONV
    rate: float = 1.0
    window: float = 1200.0
    warm_up: float = 30.0
    cool_down: float = 30.0
    tolerances: tuple[float, ...] = (0.05, 0.2, 0.5)
    margin: float = 0.8
    offline_lines: int = 4000
    several: tuple[float, ...] = (0.1, 0.5)
    beside: Target = BESIDE
    searched: tuple[str, ...] = (*RATE, *TIDEMILL_FAMILIES)


CONFIG = Config()
SHORT = replace(CONFIG, window=240.0)

FURTHER = ("further 1", "further 2")
FURTHER_SEED = 1000
"""Further draws of the requests of the first window, on which a P99 is confirmed, and the factor of their seeds."""
GOLDEN = 0.618
"""The windows of seeds begin at multiples of this share of the trace (modulo 1): well apart for any number of seeds."""
Say = Callable[[str], None]


def scenarios(config: Config, data: Path | None, seed: int) -> dict[str, Scenario]:
    """The window on which parameters are chosen, further draws of its requests, and the next one: each seed's part of a
    trace thinned by the seed."""
    source = lengths.arrivals(config.online, seed, data)
    trace = traces.to_rate(source, config.rate, seed)
    offline = lengths.sample(lengths.ARXIV, config.offline_lines, seed, data, "offline")
    limit = config.machine.max_model_len
    span = config.warm_up + config.window + config.cool_down
    room = max(0.0, trace.span - 2 * span)
    begin = room * (seed * GOLDEN % 1.0)
    found = {}
    drawn = {
        name: traces.to_rate(source, config.rate, FURTHER_SEED * (seed + 1) + i) for i, name in enumerate(FURTHER, 1)
    }
    for name in ("chosen", *FURTHER, "reported"):
        at = begin + (name == "reported") * span
        rows = rows_of(traces.window(drawn.get(name, trace), at, at + span), limit)
        end = config.warm_up + config.window
        found[name] = Scenario(rows, rows_of(offline, limit), config.warm_up, end, span)
    return found


def families(machine: Machine, config: Config) -> list[Family]:
    """The families to explore: at most 60 replays a window, the online-only one and the one without limit included.

    Flat budgets are spread by their excess over the smallest step: beside online work all of a tight tolerance lies
    within a millisecond of it.
    """
    low, high = step_range(machine.predictor, machine.config)
    most = high - low
    made = [
        flat_family(low, most, 8, 15),
        Family("rate", lambda value: Setting(UNLIMITED, value), 0.01, 4.0 * config.rate, 5, 9, METRICS),
    ]
    for delta, name in TBT_MEAN.items():
        make = partial(_weighted, high, delta)
        grid, runs = (4, 10) if delta == 3.0 else (2, 4)
        made.append(Family(name, make, 1.0 / delta, 8.0 / delta, grid, runs, ("tbt_mean",)))
    make = partial(_ruled, low, "tbt_p99")
    made.append(Family("tbt_p99", make, most / 8, most, 3, 4, ("tbt_p99",)))
    make = partial(_ruled, low, "ttft_mean")
    made.append(Family("ttft_mean", make, most / 8, most, 3, 4, ("ttft_mean", "ttft_p99")))
    return [family for family in made if family.name in config.searched]


def flat_family(low: float, most: float, grid: int, runs: int, **options: Any) -> Family:
    """Flat budgets of low + x for x up to `most` seconds; `options` go to the setting."""

    def make(excess: float) -> Setting:
        return Setting(BudgetParams("hygen", low + excess), **options)

    return Family("flat", make, most / 64, most, grid, runs, METRICS)


def _weighted(limit: float, delta: float, lam: float) -> Setting:
    return Setting(BudgetParams("tidemill", limit, lam, delta, "tbt_mean"))


def _ruled(low: float, rule: str, excess: float) -> Setting:
    return Setting(BudgetParams("tidemill", low + excess, rule=rule))


def targets(config: Config) -> list[Target]:
    return [Target(metric, tolerance) for metric in METRICS for tolerance in config.tolerances]


def run_seed(config: Config, data: Path | None, seed: int, each: Each, say: Say) -> list[Result]:
    machine = build_machine(config.machine, seed)
    say(f"seed {seed}: predictor MAPE {machine.mape:.2%} (hygen features {machine.mape_hygen:.2%})")
    replays = Replays(machine, scenarios(config, data, seed), seed, each)
    first = explore(machine, config, replays)
    say(f"seed {seed}: {len(first.points)} replays of the window on which parameters are chosen")
    further = [Surface(partial(replays.on, name), first.online_only) for name in FURTHER]
    chosen = choices(first, config, further)
    second = Surface(partial(replays.on, "reported"), first.online_only)
    distinct = [setting for by_targets in chosen.values() for setting in by_targets.values()]
    second.replay([second.online_only, Setting(UNLIMITED), *distinct])
    say(f"seed {seed}: {len(second.points)} replays of the window that is reported")
    describe = partial(_result, config, second, machine, seed)
    results = [describe("online-only", (), second.online_only), describe("sarathi++", (), Setting(UNLIMITED))]
    for policy, by_targets in chosen.items():
        results += [describe(policy, wanted, setting) for wanted, setting in by_targets.items()]
    return results


def explore(machine: Machine, config: Config, replays: Replays) -> Surface:
    """The surface of the first window, all families."""
    surface = Surface(partial(replays.on, "chosen"), Setting(ONLINE_ONLY))
    surface.replay([surface.online_only, Setting(UNLIMITED)])
    for family in families(machine, config):
        surface.explore(family, targets(config), config.margin)
    return surface


Wanted = tuple[Target, ...]
"""Targets that a setting was chosen for, all at once."""


def choices(first: Surface, config: Config, further: Sequence[Surface]) -> dict[str, dict[Wanted, Setting]]:
    """The setting of each policy for each target, and of ours and the flat budget for two targets at once."""
    single: list[Wanted] = [(target,) for target in targets(config)]
    both: list[Wanted] = [(config.beside, Target("tbt_mean", tolerance)) for tolerance in config.several]
    chosen: dict[str, dict[Wanted, Setting]] = {}
    for policy, names in TUNED.items():
        wanted = single if policy == "hygen-star" else [*single, *both]
        chosen[policy] = {}
        for item in wanted:
            is_p99 = any(target.metric.endswith("_p99") for target in item)
            chosen[policy][item] = first.choose(item, config.margin, names, further if is_p99 else ())
    return chosen


def _result(
    config: Config, surface: Surface, machine: Machine, seed: int, policy: str, wanted: Wanted, setting: Setting
) -> Result:
    metrics: dict[str, Any] = dict(surface.points[setting])
    metrics |= {f"interference_{key}": interference(metrics, surface.base, key) for key in METRICS}
    described: dict[str, Any] = {"workload": "hygen", "rate": config.rate, "params": asdict(setting.budget)}
    described["offline_rate"] = setting.offline_rate
    if wanted:
        described |= {"metric": wanted[-1].metric, "tolerance": wanted[-1].tolerance}
        metrics["kept"] = all(surface.keeps(setting, target) for target in wanted)
    if len(wanted) > 1:
        described["beside"] = {target.metric: target.tolerance for target in wanted[:-1]}
    metrics |= {"predictor_mape": machine.mape, "predictor_mape_hygen": machine.mape_hygen}
    return Result("hygen", policy, described, seed, metrics)


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: means over the seeds, each target's policies side by side. Factors are means over the seeds of
    one seed's throughput ÷ that of the fixed rate and of the flat budget."""
    header = ["metric", "tolerance", "policy", "offline tok/s", "lowest", "highest"]
    header += ["x hygen-star", "x hygen", "interference", "seeds kept"]
    rows: list[list[Any]] = []
    for policy in ("online-only", "sarathi++"):
        found = [result for result in results if result.policy == policy]
        worst = max(mean(found, f"interference_{metric}") for metric in METRICS)
        rows.append(["worst of 4", None, policy, *_spread(found), None, None, worst, ""])
    keys = dict.fromkeys(_key(result) for result in results if "metric" in result.setting)
    for key in sorted(keys):
        group = [result for result in results if "metric" in result.setting and _key(result) == key]
        for policy in dict.fromkeys(result.policy for result in group):
            found = [result for result in group if result.policy == policy]
            kept = f"{sum(bool(r.metrics['kept']) for r in found)}/{len(found)}"
            factors = [
                None if name == policy else average(ratios(group, "offline_throughput", policy, name))
                for name in ("hygen-star", "hygen")
            ]
            shown = mean(found, f"interference_{found[0].setting['metric']}")
            rows.append([key[0], key[1], policy, *_spread(found), *factors, shown, kept])
    return header, rows


def _key(result: Result) -> tuple[str, float]:
    """Return the metric (with the targets beside it) and the tolerance."""
    beside = result.setting.get("beside", {})
    name = " and ".join([result.setting["metric"], *(f"{key} {value:g}" for key, value in beside.items())])
    return name, result.setting["tolerance"]


def _spread(found: Sequence[Result]) -> tuple[float, float, float]:
    values = [float(result.metrics["offline_throughput"] or 0.0) for result in found]
    return mean(found, "offline_throughput"), min(values), max(values)


def figures(results: Sequence[Result]) -> dict[str, str]:
    """Offline throughput against tolerance, one figure per metric; bars from the lowest to the highest seed."""
    found = {}
    for metric in METRICS:
        series = []
        for policy in TUNED:
            mine = [r for r in results if r.policy == policy and r.setting.get("metric") == metric]
            mine = [r for r in mine if "beside" not in r.setting]
            tolerances = sorted({r.setting["tolerance"] for r in mine})
            spreads = [_spread([r for r in mine if r.setting["tolerance"] == t]) for t in tolerances]
            if tolerances:
                means, lows, highs = zip(*spreads, strict=True)
                series.append(Series(policy, [100 * t for t in tolerances], means, points=True, low=lows, high=highs))
        found[f"hygen-{metric}"] = figure(f"{metric}: offline tokens/s", series, "tolerance, %", "tokens/s")
    return found
