"""HyGen's evaluation (§5.2): offline throughput and interference at a tolerated interference, by policy.

Azure conversations thinned to a rate beside arXiv lengths, Llama-2-7B on A100-40GB. Parameters are chosen with a margin
on one window of the trace and reported on the next one:

- `online-only`, `sarathi++` (no latency control);
- `hygen-star`: offline work at a fixed rate, `hygen`: one flat latency budget, both tuned for the target;
- `tidemill`: budgets with the weight of the metric besides the flat ones;
- `oracle`: tidemill's choices with true step times.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadgen import lengths, traces
from loadgen.experiments.machine import Machine, MachineSpec, build_machine
from loadgen.experiments.pool import Replays
from loadgen.experiments.replay import ONLINE_ONLY, UNLIMITED, Scenario, Setting, rows_of
from loadgen.experiments.surface import Family, Surface, Target, interference
from loadgen.experiments.table import Result, figure, mean
from loadgen.svg import Series
from predictor.budget import BudgetParams
from predictor.features import BatchFeatures

METRICS = ("ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99")
TIDEMILL_FAMILIES = ("flat", "tbt_mean", "tbt_mean_short", "tbt_p99", "ttft_mean")
TUNED = {"hygen-star": ("rate",), "hygen": ("flat",), "tidemill": TIDEMILL_FAMILIES}

MACHINE = MachineSpec("llama-2-7b", "a100-40gb")


@dataclass(frozen=True, slots=True)
class Config:
    """`rate`: online requests/s. Windows in seconds; `margin`: share of the tolerance used on the first window."""

    machine: MachineSpec = MACHINE
    rate: float = 1.0
    window: float = 600.0
    warm_up: float = 30.0
    cool_down: float = 30.0
    tolerances: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5)
    margin: float = 0.8
    offline_lines: int = 4000


CONFIG = Config()
SHORT = replace(CONFIG, window=240.0, tolerances=(0.05, 0.2, 0.5))

Say = Callable[[str], None]


def scenarios(config: Config, data: Path | None, seed: int) -> dict[str, Scenario]:
    """The window on which parameters are chosen, and the next one."""
    trace = traces.to_rate(lengths.arrivals(lengths.AZURE_CONV, seed, data), config.rate, seed)
    offline = lengths.sample(lengths.ARXIV, config.offline_lines, seed, data, "offline")
    limit = config.machine.max_model_len
    span = config.warm_up + config.window + config.cool_down
    room = max(0.0, trace.span - 2 * span)
    begin = 0.0 if config.window >= trace.span / 3 else (seed * 2 * span) % max(room, 1.0)
    found = {}
    for index, name in enumerate(("chosen", "reported")):
        at = begin + index * span
        rows = rows_of(traces.window(trace, at, at + span), limit)
        end = config.warm_up + config.window
        found[name] = Scenario(rows, rows_of(offline, limit), config.warm_up, end, span)
    return found


def families(machine: Machine, config: Config) -> list[Family]:
    """What is explored: at most 60 replays a window, the online-only one and the one without limit included."""
    low, high = step_range(machine)

    def budget(rule: str, lam: bool = False, limit: float = high) -> Callable[[float], Setting]:
        if lam:
            return lambda value: Setting(BudgetParams("tidemill", limit, value, 4.0, rule))
        return lambda value: Setting(BudgetParams("hygen" if rule == "flat" else "tidemill", value, rule=rule))

    offline_limit = 8.0 * config.rate
    return [
        Family("flat", budget("flat"), low, high, 9, 18, METRICS),
        Family("rate", lambda value: Setting(UNLIMITED, value), 0.005, offline_limit, 8, 14, METRICS),
        Family("tbt_mean", budget("tbt_mean", lam=True), 0.05, 64.0, 6, 9, ("tbt_mean",)),
        Family("tbt_mean_short", budget("tbt_mean", True, (low * high) ** 0.5), 0.05, 64.0, 5, 6, ("tbt_mean",)),
        Family("tbt_p99", budget("tbt_p99"), low, high, 4, 6, ("tbt_p99",)),
        Family("ttft_mean", budget("ttft_mean"), low, high, 4, 5, ("ttft_mean", "ttft_p99")),
    ]


def step_range(machine: Machine) -> tuple[float, float]:
    """Seconds of the smallest step, and twice those of a full one: the range of L."""
    smallest, largest = BatchFeatures(), BatchFeatures()
    smallest.add_decodes(1, 1)
    largest.add_chunk(0, machine.config.max_num_batched_tokens)
    return machine.predictor.predict(smallest), 2.0 * machine.predictor.predict(largest)


def targets(config: Config) -> list[Target]:
    return [Target(metric, tolerance) for metric in METRICS for tolerance in config.tolerances]


def run_seed(config: Config, data: Path | None, seed: int, workers: int, say: Say) -> list[Result]:
    """All rows of one seed."""
    machine = build_machine(config.machine, seed)
    say(f"seed {seed}: predictor MAPE {machine.mape:.2%}")
    with Replays(machine, scenarios(config, data, seed), seed, workers) as replays:
        first = explore(machine, config, replays)
        say(f"seed {seed}: {len(first.points)} replays of the window on which parameters are chosen")
        chosen = choices(first, config)
        second = Surface(lambda settings: replays.on("reported", settings), Setting(ONLINE_ONLY))
        distinct = [setting for by_target in chosen.values() for setting in by_target.values()]
        second.replay([second.online_only, Setting(UNLIMITED), *distinct])
        say(f"seed {seed}: {len(second.points)} replays of the window that is reported")
    results = [_result("online-only", None, second.online_only, second, seed, machine.mape)]
    results.append(_result("sarathi++", None, Setting(UNLIMITED), second, seed, machine.mape))
    for policy, by_target in chosen.items():
        results += [_result(policy, target, s, second, seed, machine.mape) for target, s in by_target.items()]
    return results


def explore(machine: Machine, config: Config, replays: Replays) -> Surface:
    """The surface of the first window, all families."""
    surface = Surface(lambda settings: replays.on("chosen", settings), Setting(ONLINE_ONLY))
    surface.replay([surface.online_only, Setting(UNLIMITED)])
    for family in families(machine, config):
        surface.explore(family, targets(config), config.margin, batch=replays.workers)
    return surface


def choices(surface: Surface, config: Config) -> dict[str, dict[Target, Setting]]:
    """The setting of each policy for each target; the oracle tries tidemill's choices with true step times."""
    chosen = {
        policy: {target: surface.choose(target, config.margin, names) for target in targets(config)}
        for policy, names in TUNED.items()
    }
    tail = [target for target in targets(config) if target.metric == "tbt_p99"]
    candidates = [replace(chosen["tidemill"][target], oracle=True) for target in tail]
    candidates = [setting for setting in dict.fromkeys(candidates) if setting.budget != ONLINE_ONLY]
    surface.replay(candidates)
    surface.members["oracle"] = dict(enumerate(candidates))
    chosen["oracle"] = {target: surface.choose(target, config.margin, ("oracle",)) for target in tail}
    return chosen


def _result(policy: str, target: Target | None, setting: Setting, surface: Surface, seed: int, mape: float) -> Result:
    metrics: dict[str, Any] = dict(surface.points[setting])
    metrics |= {f"interference_{key}": interference(metrics, surface.base, key) for key in METRICS}
    described: dict[str, Any] = {"params": asdict(setting.budget), "offline_rate": setting.offline_rate}
    if target is not None:
        described |= {"metric": target.metric, "tolerance": target.tolerance}
        metrics["kept"] = surface.keeps(setting, target)
    metrics["predictor_mape"] = mape
    return Result("hygen", policy, described, seed, metrics)


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: means over the seeds, each target's policies side by side."""
    header = ["metric", "tolerance", "policy", "offline tok/s", "x hygen-star", "interference", "seeds kept"]
    rows: list[list[Any]] = []
    for policy in ("online-only", "sarathi++"):
        found = [result for result in results if result.policy == policy]
        worst = max(mean(found, f"interference_{metric}") for metric in METRICS)
        rows.append(["worst of 4", None, policy, mean(found, "offline_throughput"), None, worst, ""])
    keys = dict.fromkeys((r.setting["metric"], r.setting["tolerance"]) for r in results if "metric" in r.setting)
    for metric, tolerance in sorted(keys):
        group = [r for r in results if (r.setting.get("metric"), r.setting.get("tolerance")) == (metric, tolerance)]
        star = mean([r for r in group if r.policy == "hygen-star"], "offline_throughput")
        for policy in dict.fromkeys(r.policy for r in group):
            found = [r for r in group if r.policy == policy]
            throughput = mean(found, "offline_throughput")
            kept = f"{sum(bool(r.metrics['kept']) for r in found)}/{len(found)}"
            ratio = throughput / star if star else None
            rows.append([metric, tolerance, policy, throughput, ratio, mean(found, f"interference_{metric}"), kept])
    return header, rows


def figures(results: Sequence[Result]) -> dict[str, str]:
    """Offline throughput against tolerance, one figure per metric."""
    found = {}
    for metric in METRICS:
        series = []
        for policy in (*TUNED, "oracle"):
            mine = [r for r in results if r.policy == policy and r.setting.get("metric") == metric]
            tolerances = sorted({r.setting["tolerance"] for r in mine})
            means = [mean([r for r in mine if r.setting["tolerance"] == t], "offline_throughput") for t in tolerances]
            if tolerances:
                series.append(Series(policy, [100 * t for t in tolerances], means, points=True))
        found[f"hygen-{metric}"] = figure(f"{metric}: offline tokens/s", series, "tolerance, %", "tokens/s")
    return found
