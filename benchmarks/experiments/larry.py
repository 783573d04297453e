"""LARRY's evaluation (§6, Figures 7-9): time to first token by online policy and load, no offline work.

Azure chat and code conversations stretched to a rate, Llama-3-8B on A100-40GB. The paper takes its arrivals from
another trace; here both arrivals and lengths are those of the conversations. Requests ask for more tokens than they
take (`max_tokens`), as clients do: `no-preempt` pays for it, `trail+` alone knows the true lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.drawing import Series
from benchmarks.experiments.machine import MachineSpec, build_machine
from benchmarks.experiments.replay import Each, Replays, Scenario, Setting, part_of_trace
from benchmarks.experiments.table import Result, average, figure, gains, mean
from engine.limits import UNLIMITED_QUEUE
from loadgen import lengths

PAPER_ALPHAS = (1.0, 500.0, 1000.0)
"""α of the paper's Figure 9."""
SERVED_TTFT, SERVED_TBT = 1.0, 0.1
"""Objectives in seconds of the arm "served": `tidemill serve --online-policy larry --max-queue-time none` with the
default SLO. With a maximum wait a server refuses requests in an overload and starts the oldest ones first."""
SOURCES = {"chat": lengths.AZURE_CONV, "code": lengths.AZURE_CODE}

MACHINE = MachineSpec("llama-3-8b", "a100-40gb", max_num_seqs=256, max_model_len=8192)


@dataclass(frozen=True, slots=True)
class Config:
    """`rates`: requests/s at load factor 1, where the queue is neither empty nor growing all the time."""

    machine: MachineSpec = MACHINE
    rates: tuple[tuple[str, float], ...] = (("chat", 7.0), ("code", 1.5))
    factors: tuple[float, ...] = (0.9, 1.0, 1.1)
    window: float = 1200.0
    warm_up: float = 30.0


CONFIG = Config()
SHORT = replace(CONFIG, window=180.0)


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy and its description in the table."""

    policy: str
    setting: Setting
    described: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """What tells it from the other arms of its policy."""
        return " ".join([self.policy, *(f"{key} {value:g}" for key, value in self.described)])


def arms() -> list[Arm]:
    """Return all policies, LARRY with each α of the paper and once as a server runs it."""
    made = [
        Arm("fcfs", Setting(online_policy="fcfs")),
        Arm("no-preempt", Setting(online_policy="no-preempt")),
        Arm("random", Setting(online_policy="random")),
        Arm("trail+", Setting(online_policy="srpt-oracle")),
    ]
    made += [Arm("larry", Setting(online_policy=f"larry:{a:g}"), (("alpha", a),)) for a in PAPER_ALPHAS]
    served = Setting(online_policy="larry", ttft=SERVED_TTFT, tbt=SERVED_TBT, max_queue_time=UNLIMITED_QUEUE)
    return [*made, Arm("larry", served, (("alpha", PAPER_ALPHAS[0]), ("served_ttft", SERVED_TTFT)))]


def scenario(config: Config, data: Path | None, workload: str, rate: float, seed: int) -> Scenario:
    """Return the seed's own part of the trace, stretched to `rate`; the run goes on until every request has ended."""
    source, span = lengths.arrivals(SOURCES[workload], seed, data), config.warm_up + config.window
    rows = part_of_trace(source, rate, max(1, round(rate * span)), seed, config.machine.max_model_len)
    return Scenario(rows, (), config.warm_up)


def run_seed(config: Config, data: Path | None, seed: int, each: Each, say: Callable[[str], None]) -> list[Result]:
    machine = build_machine(config.machine, seed)
    compared = arms()
    points = [(name, factor, factor * rate) for name, rate in config.rates for factor in config.factors]
    cases = {f"{name}@{factor:g}": scenario(config, data, name, rate, seed) for name, factor, rate in points}
    results = []
    replays = Replays(machine, cases, seed, each)
    for name, factor, rate in points:
        found = replays.on(f"{name}@{factor:g}", [arm.setting for arm in compared])
        for arm, metrics in zip(compared, found, strict=True):
            setting = {"workload": f"larry-{name}", "factor": factor, "rate": rate, **dict(arm.described)}
            setting["online_policy"] = arm.setting.online_policy
            results.append(Result("larry", arm.policy, setting, seed, metrics))
        say(f"seed {seed}: {name} at {rate:.3g} requests/s")
    return results


def _arm_of(result: Result) -> str:
    described = [(key, result.setting[key]) for key in ("alpha", "served_ttft") if key in result.setting]
    return Arm(result.policy, Setting(), tuple(described)).name


HEADER = ("workload", "factor", "policy", "ttft p50 s", "p95 s", "p99 s", "per token p50 ms", "p95 ms", "e2e s")
GAINS = ("p50 gain", "lowest", "highest", "p95 gain", "per token gain", "per token p95 gain")


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: means over the seeds. A gain is the least of the policies that are not LARRY ÷ this one's (mean
    over seeds; lowest and highest seed), so above 1 it beats the next best."""
    rows: list[list[Any]] = []
    for workload, factor in dict.fromkeys((r.setting["workload"], r.setting["factor"]) for r in results):
        group = [r for r in results if (r.setting["workload"], r.setting["factor"]) == (workload, factor)]
        for name in dict.fromkeys(map(_arm_of, group)):
            mine = [r for r in group if _arm_of(r) == name]
            ttft = [mean(mine, f"ttft_{key}") for key in ("p50", "p95", "p99")]
            shown = [1e3 * mean(mine, f"normalized_ttft_{key}") for key in ("p50", "p95")] + [mean(mine, "e2e_mean")]
            p50 = gains(group, mine, "ttft_p50") if mine[0].policy == "larry" else []
            others = [average(gains(group, mine, key)) for key in OTHERS]
            row = [workload, factor, name, *ttft, *shown]
            rows.append(
                [*row, sum(p50) / len(p50), min(p50), max(p50), *others] if p50 else [*row, *[None] * len(GAINS)]
            )
    return [*HEADER, *GAINS], rows


OTHERS = ("ttft_p95", "normalized_ttft_p50", "normalized_ttft_p95")


def figures(results: Sequence[Result]) -> dict[str, str]:
    """P50 and P95 TTFT against the load factor; `no-preempt` and `random` are left to the table."""
    found = {}
    for workload in dict.fromkeys(r.setting["workload"] for r in results):
        for key in ("ttft_p50", "ttft_p95"):
            series = []
            for arm in (
                "fcfs",
                "trail+",
                "larry alpha 1",
                "larry alpha 1000",
                f"larry alpha 1 served_ttft {SERVED_TTFT:g}",
            ):
                mine = [r for r in results if (_arm_of(r), r.setting["workload"]) == (arm, workload)]
                factors = sorted({r.setting["factor"] for r in mine})
                values = [mean([r for r in mine if r.setting["factor"] == factor], key) for factor in factors]
                series.append(Series(arm, factors, values, points=True))
            title = f"{workload}: {key.replace('_', ' ').upper()}"
            found[f"{workload}-{key[-3:]}"] = figure(title, series, "load factor", "seconds")
    return found
