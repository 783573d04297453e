"""Apt-Serve's evaluation (§6, Figures 8, 9 and 11, Tables 4 and 5): SLO attainment by policy, cache, rate, burstiness.

OPT-13B on A100-40GB with the lengths of `apt-chat`, `apt-code` and `apt-sum`. Every arm serves the same requests, from
an empty machine until the last one has ended, as in the paper; no request is refused early. `fcfs` fills its steps with
chunks of prompts, so it stands for the paper's Sarathi-Serve.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.drawing import Series
from benchmarks.experiments.apt_point import Arm, Load, Point, requests_of, run_point, with_cache
from benchmarks.experiments.machine import MachineSpec, build_machine
from benchmarks.experiments.replay import Each
from benchmarks.experiments.table import Result, figure, mean
from loadgen.stats import wilson

ARMS = (
    Arm("fcfs", "fcfs"),
    Arm("random", "random"),
    Arm("larry", "larry"),
    Arm("apt-kv", "apt:0"),
    Arm("apt-hybrid", "apt:0", "hidden"),
    Arm("apt-both", "apt:0", "both"),
    Arm("apt-decay", "apt:0.4", "hidden"),
    Arm("goodput-kv", "goodput-strict"),
    Arm("goodput-hybrid", "goodput-strict", "hidden"),
    Arm("goodput-decay", "goodput", "hidden"),
)
"""The arms of `apt` are the paper's Apt-Serve-S (§6.7). `apt-decay` and `goodput-decay`: a request that has missed its
SLO keeps 0.4 of its value (§6.6)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One machine, its loads and the arms that are compared on it."""

    machine: MachineSpec
    loads: tuple[Load, ...]
    arms: tuple[Arm, ...]


OPT = MachineSpec("opt-13b", "a100-40gb", max_num_seqs=256, max_model_len=2048)


@dataclass(frozen=True, slots=True)
class Config:
    """`requests` a point; `cvs`: coefficients of variation of the arrivals at the burst rates (Poisson has 1)."""

    parts: tuple[Part, ...] = (
        Part(
            OPT,
            (
                Load("apt-chat", 1.0, 1.0, (0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.3, 1.8), (0.5, 0.8)),
                Load("apt-code", 0.5, 0.5, (25.0, 35.0, 42.0, 50.0, 60.0, 75.0, 95.0), (35.0,), 4),
                Load("apt-sum", 4.0, 1.0, (0.6, 0.8, 1.0, 1.2, 1.5, 1.8, 2.4), (1.0, 1.5)),
            ),
            ARMS,
        ),
    )
    requests: int = 1000
    cvs: tuple[float, ...] = (5.0, 10.0)


CONFIG = Config()


def shortened(config: Config) -> Config:
    """Every other rate, one burst, few requests."""
    parts = [
        replace(part, loads=tuple(replace(load, rates=load.rates[::2], bursts=load.bursts[:1]) for load in part.loads))
        for part in config.parts
    ]
    return replace(config, parts=tuple(parts), requests=200, cvs=config.cvs[:1])


SHORT = shortened(CONFIG)
VLLM_MEANS = (161.0, 338.0)
"""Mean prompt and answer of ShareGPT in vLLM's evaluation, which the paper follows; prompts of the file are longer."""
CHATS = Config(
    parts=(
        Part(
            OPT,
            (Load("apt-chat", 1.0, 1.0, (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0), means=VLLM_MEANS),),
            tuple(arm for arm in ARMS if arm.name in {"fcfs", "random", "apt-kv", "apt-hybrid", "goodput-kv"}),
        ),
    ),
    cvs=(),
)
"""Chats of the paper's lengths (`apt-serve-chat`)."""
CHATS_SHORT = shortened(CHATS)
LLAMA_POLICIES = {"fcfs": "fcfs", "apt": "apt:0", "goodput": "goodput-strict"}


def llama_arms(*caches: str) -> tuple[Arm, ...]:
    """Return every policy on each cache; `fcfs` never starts a request from hidden state."""
    pairs = [(policy, cache) for policy in LLAMA_POLICIES for cache in caches if (policy, cache) != ("fcfs", "hybrid")]
    return tuple(
        Arm(f"{name}-{cache}", LLAMA_POLICIES[name], "hidden" if cache == "hybrid" else cache) for name, cache in pairs
    )


LLAMAS = Config(
    parts=(
        Part(
            MachineSpec("llama-2-7b", "a100-40gb", max_num_seqs=256, max_model_len=4096),
            (Load("apt-chat", 1.0, 1.0, (2.0, 3.0, 4.0, 5.0, 6.5), (3.0,)),),
            llama_arms("kv", "hybrid", "host", "int8"),
        ),
        Part(
            MachineSpec("llama-3-8b", "rtx-4090", max_num_seqs=256, max_model_len=8192),
            (Load("apt-chat", 1.0, 1.0, (1.0, 1.5, 2.0, 2.5, 3.0, 4.0), (1.5,)),),
            llama_arms("kv", "host", "int8"),
        ),
    ),
)
"""Llamas whose memory is short before their compute: as many KV heads as heads and rotary embeddings, so that hidden
state is projected in every step; and a quarter as many, where 8 bits take the place of hidden state."""
LLAMAS_SHORT = shortened(replace(LLAMAS, parts=LLAMAS.parts[1:], cvs=()))


def points(config: Config, data: Path | None, seed: int) -> list[Point]:
    found = []
    for part in config.parts:
        limit = part.machine.max_model_len
        plain = build_machine(part.machine, seed)
        machines = {arm.name: with_cache(plain, arm.cache) for arm in part.arms}
        for load in part.loads:
            cases = [(rate, 1.0) for rate in load.rates] + [(rate, cv) for rate in load.bursts for cv in config.cvs]
            for rate, cv in cases:
                rows = requests_of(load, rate, cv, load.scale * config.requests, seed, data, limit)
                found += [Point(machines[arm.name], load, rate, cv, arm, rows, seed) for arm in part.arms]
    return found


def run_seed(config: Config, data: Path | None, seed: int, each: Each, say: Callable[[str], None]) -> list[Result]:
    results: list[Result] = []
    asked = points(config, data, seed)
    for point, metrics in zip(asked, each(run_point, asked), strict=True):
        load, model = point.load, point.machine.spec.model
        setting = {"model": model, "workload": load.workload, "rate": point.rate, "cv": point.cv}
        setting |= {"ttft": load.ttft, "tbt": load.tbt, "online_policy": point.arm.policy, "cache": point.arm.cache}
        results.append(Result("apt-serve", point.arm.name, setting, seed, metrics))
        if point is asked[-1] or asked[len(results)].rows is not point.rows:
            say(f"seed {seed}: {model}, {load.workload} at {point.rate:g} requests/s, CV {point.cv:g}")
    return results


# --- table and figures: attainment pooled over seeds, and the rates that keep one

SHARES = (0.9, 0.6)
"""Attainments at which the paper compares rates."""
Key = tuple[str, str, float, float]


def _key(result: Result) -> Key:
    setting = result.setting
    return setting["model"], setting["workload"], setting["cv"], setting["rate"]


def pooled_attainment(results: Sequence[Result]) -> tuple[float, float, float]:
    """Attainment over the requests of all seeds, with its 95 % interval."""
    good, count = (int(sum(r.metrics[key] or 0.0 for r in results)) for key in ("good", "requests"))
    return (good / count if count else 0.0, *wilson(good, count))


def curve(results: Sequence[Result], policy: str, model: str, workload: str) -> list[tuple[float, float]]:
    """(rate, attainment) of a policy under Poisson arrivals, by rate."""
    mine = [r for r in results if r.policy == policy and _key(r)[:3] == (model, workload, 1.0)]
    rates = sorted({r.setting["rate"] for r in mine})
    return [(rate, pooled_attainment([r for r in mine if r.setting["rate"] == rate])[0]) for rate in rates]


def effective_rate(curve: Sequence[tuple[float, float]], share: float) -> float | None:
    """The highest rate with at least `share` attained, linear between the rates that were run; None when not even the
    lowest has it. Where the highest has it, that rate: the true one is no lower."""
    kept = [index for index, (_, attainment) in enumerate(curve) if attainment >= share]
    if not kept:
        return None
    last = kept[-1]
    if last == len(curve) - 1:
        return curve[last][0]
    (low, before), (high, after) = list(pairwise(curve))[last]
    return low + (high - low) * (before - share) / (before - after)


HEADER = ("model", "workload", "rate", "cv", "policy", "attained %", "low", "high", "ttft p50 s", "p99 s")
MORE = ("tbt p99 s", "recomputed %", "cache work %", "rate at 90 %", "at 60 %")


def summary(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: pooled attainment with its interval, other figures as means over the seeds. The rates that keep
    an attainment stand beside the lowest rate of a policy."""
    rows: list[list[Any]] = []
    seen: set[tuple[str, str, str]] = set()
    for key in dict.fromkeys(map(_key, results)):
        model, workload, cv, rate = key
        group = [r for r in results if _key(r) == key]
        for policy in dict.fromkeys(r.policy for r in group):
            mine = [r for r in group if r.policy == policy]
            shares = [100.0 * share for share in pooled_attainment(mine)]
            latency = [mean(mine, name) for name in ("ttft_p50", "ttft_p99", "tbt_p99")]
            work = [100.0 * mean(mine, name) for name in ("recomputed", "cache_work")]
            rates: list[float | None] = [None, None]
            if (model, workload, policy) not in seen:
                rates = [effective_rate(curve(results, policy, model, workload), share) for share in SHARES]
            seen.add((model, workload, policy))
            rows.append([model, workload, rate, cv, policy, *shares, *latency, *work, *rates])
    return [*HEADER, *MORE], rows


DRAWN = ("fcfs", "fcfs-kv", "larry", "apt-kv", "apt-hybrid", "apt-host", "goodput-kv", "goodput-hybrid", "goodput-host")


def figures(results: Sequence[Result]) -> dict[str, str]:
    """Attainment against the rate, and against the burstiness at each burst rate; base lines beside the best few."""
    found = {}
    for model, workload in dict.fromkeys(_key(r)[:2] for r in results):
        group = [r for r in results if _key(r)[:2] == (model, workload)]
        policies = [policy for policy in DRAWN if any(r.policy == policy for r in group)]
        title = f"{model}, {workload}: SLO attainment"
        curves = [(policy, curve(group, policy, model, workload)) for policy in policies]
        lines = [Series(name, [x for x, _ in line], [y for _, y in line], points=True) for name, line in curves]
        found[f"{model}-{workload}-rate"] = figure(title, lines, "requests/s", "share")
        for rate in dict.fromkeys(r.setting["rate"] for r in group if r.setting["cv"] != 1.0):
            bursts = [r for r in group if r.setting["rate"] == rate]
            cvs = sorted({r.setting["cv"] for r in bursts})
            lines = [Series(policy, cvs, [_at(bursts, policy, cv) for cv in cvs], points=True) for policy in policies]
            found[f"{model}-{workload}-cv-{rate:g}"] = figure(f"{title} at {rate:g}/s", lines, "CV", "share")
    return found


def _at(results: Sequence[Result], policy: str, cv: float) -> float:
    return pooled_attainment([r for r in results if r.policy == policy and r.setting["cv"] == cv])[0]
