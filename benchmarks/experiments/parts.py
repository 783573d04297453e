"""What HyGen's evaluation shows beside its main comparison (§5.3, §5.4), on the same trace and machine:

- `predictor`: the error of both feature sets, and of true times without their noise, on the steps of a replay;
- `rates`: offline throughput by online rate; at the middle rate also with latency models of other devices (`profile`)
  and with the paper's features;
- `psm`: offline lines with long common prefixes, in prefix order and in order of arrival.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments import hygen
from benchmarks.experiments.machine import Machine, TrueLatency, build_machine, mean_error
from benchmarks.experiments.pool import Replays
from benchmarks.experiments.replay import ONLINE_ONLY, Setting, recorded_steps
from benchmarks.experiments.surface import Family, Surface, Target, interference
from benchmarks.experiments.table import Result, figure, mean
from engine.colocation.replay import step_range
from loadgen.stats import stream
from loadgen.svg import Series
from predictor.budget import BudgetParams
from predictor.features import LatencyPredictor

FOREIGN = ("a40", "h100")
"""Devices whose latency models stand in for the machine's own."""


@dataclass(frozen=True, slots=True)
class Config:
    """`base`: machine, windows and margin. `groups` of `lines` offline lines share a prefix each, like the questions of
    one subject behind its examples; `budget`: L of the runs that compare something else, in seconds."""

    base: hygen.Config = field(default_factory=lambda: replace(hygen.CONFIG, window=300.0))
    window: float = 300.0
    rates: tuple[float, ...] = (0.5, 1.0, 1.5)
    targets: tuple[Target, ...] = (Target("tbt_p99", 0.05), Target("tbt_mean", 0.05))
    budget: float = 0.03
    groups: int = 57
    lines: int = 3000

    def at(self, rate: float) -> hygen.Config:
        return replace(self.base, rate=rate, window=self.window)


CONFIG = Config()
SHORT = replace(CONFIG, window=60.0, rates=(1.0,), lines=500)


def run_seed(config: Config, data: Path | None, seed: int, workers: int, say: Callable[[str], None]) -> list[Result]:
    """All rows of one seed."""
    machine = build_machine(config.base.machine, seed)
    for name in FOREIGN:
        machine.profiles[name] = build_machine(replace(config.base.machine, device=name), seed).predictor
    results = predictor_rows(machine, config, data, seed)
    say(f"seed {seed}: predictor")
    middle = config.rates[len(config.rates) // 2]
    for rate in config.rates:
        profiles = ("", "hygen", *FOREIGN) if rate == middle else ("",)
        results += rate_rows(machine, config, data, seed, workers, rate, profiles)
        say(f"seed {seed}: {rate:g} requests/s")
    results += psm_rows(config, data, seed, workers)
    say(f"seed {seed}: prefix order")
    return results


def predictor_rows(machine: Machine, config: Config, data: Path | None, seed: int) -> list[Result]:
    """MAPE on the steps of one replay with offline work, none of which any model was fitted to."""
    scenario = hygen.scenarios(config.at(config.base.rate), data, seed)["chosen"]
    steps = recorded_steps(machine, scenario, Setting(BudgetParams("hygen", config.budget)), seed)
    models: dict[str, LatencyPredictor] = {"full": machine.predictor, "hygen": machine.profile("hygen")}
    models["true"] = TrueLatency(machine.device)
    models |= {name: machine.profile(name) for name in FOREIGN}
    rows = []
    for name, model in models.items():
        metrics = {"predictor_mape": mean_error(model, steps), "steps": float(len(steps))}
        setting = {"part": "predictor", "profile": name}
        rows.append(Result("hygen-parts", "oracle" if name == "true" else "tidemill", setting, seed, metrics))
    return rows


def families(model: LatencyPredictor, machine: Machine, profile: str) -> list[Family]:
    """A small search for both targets; L in the range of the model that the scheduler believes."""
    low, high = step_range(model, machine.config)
    flat = hygen.flat_family(low, (high - low) / 2, 5, 9, profile=profile)

    def weighted(lam: float) -> Setting:
        return Setting(BudgetParams("tidemill", high, lam, 3.0, "tbt_mean"), profile=profile)

    return [flat, Family("tbt_mean", weighted, 0.3, 1.2, 3, 4, ("tbt_mean",))]


def rate_rows(
    machine: Machine, config: Config, data: Path | None, seed: int, workers: int, rate: float, profiles: Sequence[str]
) -> list[Result]:
    """Throughput at one online rate, with the latency models called `profiles`."""
    at = config.at(rate)
    online_only = Setting(ONLINE_ONLY)
    rows = []
    with Replays(machine, hygen.scenarios(at, data, seed), seed, workers) as replays:
        first = Surface(partial(replays.on, "chosen"), online_only)
        second = Surface(partial(replays.on, "reported"), online_only)
        first.replay([online_only])
        for profile in profiles:
            first.members = {}
            for family in families(machine.profile(profile), machine, profile):
                first.explore(family, config.targets, at.margin, hygen.BATCH)
            for policy, names in (("hygen", ("flat",)), ("tidemill", ("flat", "tbt_mean"))):
                for target in config.targets:
                    setting = first.choose(target, at.margin, names)
                    second.replay([online_only, setting])
                    rows.append(_rate_row(second, target, setting, policy, profile, rate, seed))
    return rows


def _rate_row(
    surface: Surface, target: Target, setting: Setting, policy: str, profile: str, rate: float, seed: int
) -> Result:
    metrics: dict[str, Any] = dict(surface.points[setting])
    metrics |= {f"interference_{key}": interference(metrics, surface.base, key) for key in hygen.METRICS}
    metrics["kept"] = surface.keeps(setting, target)
    described = {"part": "rates", "workload": "hygen", "rate": rate, "profile": profile or "full"}
    described |= {"metric": target.metric, "tolerance": target.tolerance, "params": asdict(setting.budget)}
    return Result("hygen-parts", policy, described, seed, metrics)


def prefix_lines(config: Config, seed: int) -> tuple[tuple[tuple[float, int, int], ...], tuple[tuple[int, int], ...]]:
    """Offline rows, and (group, shared tokens) of each: lines of all groups in random order.

    Every group has a prefix of 300 to 2,500 tokens (even in the logarithm), a line adds a question of 40 to 200 tokens
    and is answered in 4: the shape of five-shot multiple choice over `groups` subjects.
    """
    random = stream(seed, "prefix lines")
    shared = np.rint(np.exp(random.uniform(np.log(300), np.log(2500), config.groups))).astype(int)
    groups = random.integers(config.groups, size=config.lines)
    questions = random.integers(40, 200, size=config.lines)
    rows = tuple((0.0, int(shared[group] + extra), 4) for group, extra in zip(groups, questions, strict=True))
    return rows, tuple((int(group), int(shared[group])) for group in groups)


def psm_rows(config: Config, data: Path | None, seed: int, workers: int) -> list[Result]:
    """One budget, two orders of the offline lines. Prompts count whole, found in the cache or not."""
    machine = build_machine(replace(config.base.machine, prefix_caching=True), seed)
    rows, shared = prefix_lines(config, seed)
    online = hygen.scenarios(config.at(config.base.rate), data, seed)["chosen"]
    scenario = replace(online, offline=rows, shared=shared)
    budget = BudgetParams("hygen", config.budget)
    orders = ("psm", "fcfs")
    with Replays(machine, {"prefixes": scenario}, seed, workers) as replays:
        found = replays.on("prefixes", [Setting(budget, offline_policy=order) for order in orders])
    described = {"part": "psm", "workload": "prefixes", "rate": config.base.rate, "params": asdict(budget)}
    return [
        Result("hygen-parts", "tidemill", {**described, "offline_policy": order}, seed, dict(metrics))
        for order, metrics in zip(orders, found, strict=True)
    ]


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: means over the seeds."""
    header = ["part", "what", "policy", "target", "offline tok/s", "interference", "seeds kept", "MAPE %"]
    rows: list[list[Any]] = []
    for key in dict.fromkeys(map(_key, results)):
        mine = [result for result in results if _key(result) == key]
        part, what, policy, target = key
        throughput = mean(mine, "offline_throughput") if part != "predictor" else None
        shown = kept = None
        if part == "rates":
            shown = mean(mine, f"interference_{mine[0].setting['metric']}")
            kept = f"{sum(bool(r.metrics['kept']) for r in mine)}/{len(mine)}"
        mape = 100 * mean(mine, "predictor_mape") if part == "predictor" else None
        rows.append([part, what, policy, target, throughput, shown, kept, mape])
    return header, rows


def _key(result: Result) -> tuple[str, str, str, str]:
    setting = result.setting
    part = str(setting["part"])
    what = {"predictor": "profile", "rates": "rate", "psm": "offline_policy"}[part]
    shown = f"{setting[what]:g}/s, profile {setting['profile']}" if part == "rates" else str(setting[what])
    target = f"{setting['metric']} {setting['tolerance']:g}" if "metric" in setting else ""
    return part, shown, result.policy, target


def figures(results: Sequence[Result]) -> dict[str, str]:
    """Offline throughput against the online rate."""
    series = []
    own = [r for r in results if r.setting["part"] == "rates" and r.setting["profile"] == "full"]
    for policy, metric in dict.fromkeys((r.policy, r.setting["metric"]) for r in own):
        mine = [r for r in own if (r.policy, r.setting["metric"]) == (policy, metric)]
        rates = sorted({r.setting["rate"] for r in mine})
        values = [mean([r for r in mine if r.setting["rate"] == rate], "offline_throughput") for rate in rates]
        series.append(Series(f"{policy}, {metric}", rates, values, points=True))
    return {"hygen-rates": figure("5 %: offline tokens/s", series, "online requests/s", "tokens/s")}
