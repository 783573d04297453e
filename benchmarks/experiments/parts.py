"""What HyGen's evaluation shows beside its main comparison (§5.3, §5.4), on the same trace and machine:

- `predictor`: the error of both feature sets, and of true times without their noise, on the steps of a replay;
- `rates`: all four metrics at a tolerance of 5 % by online rate (Figures 8 and 15); at the middle rate also with
  latency models of other devices (`profile`); and Mistral-7B under Mooncake's requests (Figure 11);
- `profiler`: the tolerated mean TBT itself as the budget, and the budget that the search finds for it (Figure 6);
- `psm`: offline lines with long common prefixes, in prefix order and in order of arrival.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.experiments import hygen
from benchmarks.experiments.machine import Machine, MachineSpec, build_machine, mean_error, true_seconds
from benchmarks.experiments.replay import ONLINE_ONLY, Each, Replays, Setting, recorded_steps
from benchmarks.experiments.surface import Family, Surface, Target, interference
from benchmarks.experiments.table import Result, mean
from engine.colocation.replay import step_range
from loadgen import lengths
from loadgen.stats import stream
from predictor.budget import BudgetParams
from predictor.features import LatencyPredictor

FOREIGN = ("a40", "h100")
"""Devices whose latency models stand in for the machine's own."""
NAIVE = "budget is the SLO"
MOONCAKE = lengths.Lengths(
    (13, 22, 30, 277, 11587, 23175, 38611, 48904, 66456, 191373, 191378),
    (1, 2, 4, 11, 69, 250, 389, 519, 768, 813, 893),
    "mooncake_synthetic.jsonl.gz",
)
"""Long prompts of Mooncake's synthetic trace."""
MISTRAL = MachineSpec("mistral-7b", "a100-40gb", max_model_len=32768)


@dataclass(frozen=True, slots=True)
class Config:
    """`base`: machine, windows and margin. `groups` of `lines` offline lines share a prefix each, like the questions of
    one subject behind its examples; `budget`: L of the runs that compare something else, in seconds. `profiles`: other
    latency models to search with at the middle rate; `promises`: tolerated mean TBT of the profiler's rows; `mooncake`:
    online rate of the other model and trace, requests/s."""

    base: hygen.Config = field(default_factory=lambda: replace(hygen.CONFIG, window=300.0))
    window: float = 300.0
    rates: tuple[float, ...] = (0.5, 1.0, 1.5)
    targets: tuple[Target, ...] = tuple(Target(metric, 0.05) for metric in hygen.METRICS)
    profiles: tuple[str, ...] = FOREIGN
    promises: tuple[float, ...] = (0.05, 0.2, 0.5)
    mooncake: float | None = 0.15
    budget: float = 0.03
    groups: int = 57
    lines: int = 3000

    def at(self, rate: float) -> hygen.Config:
        return replace(self.base, rate=rate, window=self.window)

    def cases(self) -> "list[Case]":
        """The loads that budgets are searched for."""
        middle = self.rates[len(self.rates) // 2]
        found = [Case("hygen", self.at(rate)) for rate in self.rates if rate != middle]
        found.append(Case("hygen", self.at(middle), ("", *self.profiles), self.promises))
        if self.mooncake is not None:
            at = replace(self.at(self.mooncake), machine=MISTRAL, online=MOONCAKE)
            found.append(Case("mooncake", at))
        return found


class Case(NamedTuple):
    """An online load, the latency models to search with, and the promises to compare with a search."""

    workload: str
    at: hygen.Config
    profiles: tuple[str, ...] = ("",)
    promises: tuple[float, ...] = ()


CONFIG = Config()
SHORT = replace(CONFIG, window=60.0, rates=(1.0,), lines=500, mooncake=None)


def run_seed(config: Config, data: Path | None, seed: int, each: Each, say: Callable[[str], None]) -> list[Result]:
    machine = build_machine(config.base.machine, seed)
    for name in FOREIGN:
        machine.profiles[name] = build_machine(replace(config.base.machine, device=name), seed).predictor
    results = predictor_rows(machine, config, data, seed)
    say(f"seed {seed}: predictor")
    for case in config.cases():
        own = machine if case.at.machine == config.base.machine else build_machine(case.at.machine, seed)
        results += case_rows(own, config.targets, case, data, seed, each)
        say(f"seed {seed}: {case.workload}, {case.at.rate:g} requests/s")
    results += psm_rows(config, data, seed, each)
    say(f"seed {seed}: prefix order")
    return results


def predictor_rows(machine: Machine, config: Config, data: Path | None, seed: int) -> list[Result]:
    """MAPE on the steps of one replay with offline work, unseen by every fit."""
    scenario = hygen.scenarios(config.at(config.base.rate), data, seed)["chosen"]
    steps = recorded_steps(machine, scenario, Setting(BudgetParams("hygen", config.budget)), seed)
    models = {"full": machine.predictor.predict, "hygen": machine.hygen.predict}
    models["true"] = partial(true_seconds, machine.device)
    models |= {name: machine.profile(name).predict for name in FOREIGN}
    rows = []
    for name, predict in models.items():
        metrics = {"predictor_mape": mean_error(predict, steps), "steps": float(len(steps))}
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


def case_rows(
    machine: Machine, targets: Sequence[Target], case: Case, data: Path | None, seed: int, each: Each
) -> list[Result]:
    """Throughput at each target with each latency model, and the promises beside the budgets found for them."""
    online_only, margin = Setting(ONLINE_ONLY), case.at.margin
    promised = [Target("tbt_mean", tolerance) for tolerance in case.promises]
    rows = []
    replays = Replays(machine, hygen.scenarios(case.at, data, seed), seed, each)
    first = Surface(partial(replays.on, "chosen"), online_only)
    second = Surface(partial(replays.on, "reported"), online_only)
    for surface in (first, second):
        surface.replay([online_only])
    for profile in case.profiles:
        first.members = {}
        for family in families(machine.profile(profile), machine, profile):
            first.explore(family, [*targets, *(() if profile else promised)], margin)
        for policy, names in (("hygen", ("flat",)), ("tidemill", ("flat", "tbt_mean"))):
            for target in targets:
                setting = first.choose(target, margin, names)
                rows.append(_row("rates", case, second, target, setting, policy, profile, seed))
        if not profile:
            rows += [row for target in promised for row in _promise_rows(case, first, second, target, seed)]
    return rows


def _promise_rows(case: Case, first: Surface, second: Surface, target: Target, seed: int) -> list[Result]:
    """A promised mean TBT taken as the budget of a step, and the flat budget that a search finds for it."""
    naive = Setting(BudgetParams("hygen", (1.0 + target.tolerance) * second.base[target.metric]))
    found = first.choose(target, case.at.margin, ("flat",))
    return [
        _row("profiler", case, second, target, setting, policy, "", seed)
        for policy, setting in ((NAIVE, naive), ("hygen", found))
    ]


def _row(
    part: str, case: Case, surface: Surface, target: Target, setting: Setting, policy: str, profile: str, seed: int
) -> Result:
    surface.replay([setting])
    metrics: dict[str, Any] = dict(surface.points[setting])
    metrics |= {f"interference_{key}": interference(metrics, surface.base, key) for key in hygen.METRICS}
    metrics["kept"] = surface.keeps(setting, target)
    described = {"part": part, "workload": case.workload, "rate": case.at.rate, "profile": profile or "full"}
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


def psm_rows(config: Config, data: Path | None, seed: int, each: Each) -> list[Result]:
    """One budget, two orders of the offline lines. Prompts count whole, found in the cache or not."""
    machine = build_machine(replace(config.base.machine, prefix_caching=True), seed)
    rows, shared = prefix_lines(config, seed)
    online = hygen.scenarios(config.at(config.base.rate), data, seed)["chosen"]
    scenario = replace(online, offline=rows, shared=shared)
    budget = BudgetParams("hygen", config.budget)
    orders = ("psm", "fcfs")
    replays = Replays(machine, {"prefixes": scenario}, seed, each)
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
        if part in ("rates", "profiler"):
            shown = mean(mine, f"interference_{mine[0].setting['metric']}")
            kept = f"{sum(bool(r.metrics['kept']) for r in mine)}/{len(mine)}"
        mape = 100 * mean(mine, "predictor_mape") if part == "predictor" else None
        rows.append([part, what, policy, target, throughput, shown, kept, mape])
    return header, rows


def _key(result: Result) -> tuple[str, str, str, str]:
    setting = result.setting
    part = str(setting["part"])
    if part in ("rates", "profiler"):
        shown = f"{setting['workload']} {setting['rate']:g}/s, profile {setting['profile']}"
    else:
        shown = str(setting["profile" if part == "predictor" else "offline_policy"])
    target = f"{setting['metric']} {setting['tolerance']:g}" if "metric" in setting else ""
    return part, shown, result.policy, target
