"""Apt-Serve's evaluation (§6, Figures 8 and 9, Tables 4 and 5): SLO attainment by policy, cache, rate and burstiness.

OPT-13B on A100-40GB with the lengths of `apt-chat`, `apt-code` and `apt-sum`; then Llama-3-8B, whose hidden state is
larger than its K and V and so refused: there the host tier takes its place. Every arm serves the same requests, from an
empty machine until the last one has ended, as in the paper; nobody is refused early. `fcfs` fills its steps with chunks
of prompts, so it stands for the paper's Sarathi-Serve rather than for its vLLM.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from engine.cache.pool import UNITS_PER_KV_BLOCK
from engine.core import EngineCore
from engine.execution.simulated import SIMULATED_TOKEN
from engine.request import EngineRequest, SamplingParams
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import ModelRunnerOutput, SchedulerOutput
from engine.virtual import Arrival, VirtualDriver, VirtualRun
from loadgen import workloads
from loadgen.arrivals import Process
from loadgen.experiments.machine import Machine, MachineSpec, build_machine
from loadgen.experiments.replay import OUTPUT_CAP, Metrics, Row, rows_of
from loadgen.experiments.table import Result, figure
from loadgen.stats import nearest_rank, wilson
from loadgen.svg import Series

HIDDEN_SHARE = 2
"""KV blocks in the pool for every block that a step may run from hidden state, as in the live engine."""
HOST_BYTES = 64 * 2**30
RESTORED_TOKENS = 1024
"""Tokens at which the cost of restoring one is measured."""
COMPACT_TOKENS = 8192
"""Tokens at which that of running one from hidden state is: about what runs from it under pressure. Reading W_k and W_v
once more is the larger part of it for few tokens, and no reason against many."""
SHARES = (0.9, 0.6)
"""Attainments at which the paper compares rates."""


@dataclass(frozen=True, slots=True)
class Load:
    """A workload with its SLOs in seconds (the paper's Table 3) and the rates (requests/s) it is run at; `bursts`:
    those at which arrivals also come in bursts. `scale`: requests of a point beside those of other loads; short answers
    need more to fill as much time."""

    workload: str
    ttft: float
    tbt: float
    rates: tuple[float, ...]
    bursts: tuple[float, ...] = ()
    scale: int = 1


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy on a cache: `kv`, `hidden` (KV and hidden state) or `host` (KV, and a host tier for the preempted)."""

    name: str
    policy: str
    cache: str = "kv"


LARRY = "larry:0.001"
"""The paper's α of 1, which weighs seconds against blocks, over the blocks of the pool (see the experiment `larry`)."""
ARMS = (
    Arm("fcfs", "fcfs"),
    Arm("random", "random"),
    Arm("larry", LARRY),
    Arm("apt-kv", "apt:0"),
    Arm("apt-hybrid", "apt:0", "hidden"),
    Arm("apt-decay", "apt:0.4", "hidden"),
    Arm("goodput-kv", "goodput"),
    Arm("goodput-hybrid", "goodput", "hidden"),
    Arm("goodput-decay", "goodput:0.4", "hidden"),
)
"""`apt-decay` and `goodput-decay`: those that have missed their SLO keep 0.4 of their value (§6.6)."""
HOST_ARMS = (
    Arm("fcfs", "fcfs"),
    Arm("fcfs-host", "fcfs", "host"),
    Arm("apt-kv", "apt:0"),
    Arm("apt-host", "apt:0", "host"),
    Arm("goodput-kv", "goodput"),
    Arm("goodput-host", "goodput", "host"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One machine, its loads and the arms that are compared on it."""

    machine: MachineSpec
    loads: tuple[Load, ...]
    arms: tuple[Arm, ...]


OPT = MachineSpec("opt-13b", "a100-40gb", max_num_seqs=256, max_model_len=2048)
LLAMA = MachineSpec("llama-3-8b", "a100-40gb", max_num_seqs=256, max_model_len=8192)


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
        Part(LLAMA, (Load("apt-chat", 1.0, 1.0, (2.0, 3.0, 4.0, 5.0, 6.5), (3.0,)),), HOST_ARMS),
    )
    requests: int = 1000
    cvs: tuple[float, ...] = (5.0, 10.0)


CONFIG = Config()


def shortened(config: Config) -> Config:
    """Every other rate, one burst, few requests."""
    parts = [
        replace(part, loads=tuple(replace(each, rates=each.rates[::2], bursts=each.bursts[:1]) for each in part.loads))
        for part in config.parts
    ]
    return replace(config, parts=tuple(parts), requests=200, cvs=config.cvs[:1])


SHORT = shortened(CONFIG)


@dataclass(frozen=True, slots=True)
class Point:
    """One run: an arm on its machine under `load` at one rate and burstiness; a row for every request."""

    machine: Machine
    load: Load
    rate: float
    cv: float
    arm: Arm
    rows: tuple[Row, ...]
    seed: int


def with_cache(machine: Machine, cache: str) -> Machine:
    """The machine with hidden state or a host tier, and with the costs of both in its latency model.

    The scratch area that hidden state is projected into (K and V of one layer) is taken out of the pool. Raises
    ValueError where hidden state is not smaller than K and V.
    """
    model, device, config = machine.spec.model, machine.device, machine.config
    shape = device.model
    unit_bytes = config.block_size * shape.kv_bytes_per_token // UNITS_PER_KV_BLOCK
    rho = max(0.0, device.cache_work_seconds(COMPACT_TOKENS) / COMPACT_TOKENS)
    restored = device.cache_work_seconds(restored_tokens=RESTORED_TOKENS) / RESTORED_TOKENS
    predictor = replace(machine.predictor, compact=rho, restored=restored, transferred=device.transfer_seconds(1))
    config = replace(config, unit_bytes=unit_bytes, refuse_late=False)
    if cache == "host":
        config = replace(config, host_units=HOST_BYTES // unit_bytes)
    if cache == "hidden":
        if shape.hidden_size > shape.num_kv_heads * shape.head_dim:
            raise ValueError(f"hidden state of {model} takes more than half the room of its K and V")
        # Every HIDDEN_SHARE blocks of KV come with the K and V of one more block, for one layer.
        units = int(config.num_units / (1 + 1 / (HIDDEN_SHARE * shape.num_layers)))
        scratch = units // UNITS_PER_KV_BLOCK // HIDDEN_SHARE
        config = replace(config, num_units=units, scratch_blocks=scratch, rho=rho)
    return replace(machine, config=config, predictor=predictor)


def requests_of(
    load: Load, rate: float, cv: float, count: int, seed: int, data: Path | None, limit: int
) -> tuple[Row, ...]:
    """The arrivals of one point: the same lengths at every rate, Poisson at a CV of 1, else gamma."""
    process: Process = "poisson" if cv == 1.0 else "gamma"
    options = workloads.Options(rate=rate, count=count, seed=seed, data=data, process=process, cv=cv, offline_lines=0)
    made = workloads.build(load.workload, options)
    assert made.online is not None, "the workload has no online part"
    return rows_of(made.online, limit)


class _Watched:
    """A runner that adds up how long its steps took and what of that was cache work."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self._inner = machine.runner(seed)
        self._device = machine.device
        self.seconds = self.cache_seconds = 0.0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = self._inner.execute(output)
        self.seconds += result.latency
        if any(output.cache_work):
            self.cache_seconds += self._device.cache_work_seconds(*output.cache_work)
        return result


def run_point(point: Point) -> Metrics:
    """Run one point to its end; deterministic."""
    machine, load = point.machine, point.load
    core = EngineCore(
        machine.config,
        online_policy=point.arm.policy,
        offline_policy="fcfs",
        model=machine.predictor,
        objective=StepObjective(load.ttft, load.tbt),
    )
    runner = _Watched(machine, point.seed)
    run = VirtualDriver(core, runner, _arrivals(point.rows, machine.config.max_model_len)).run(math.inf)
    stats = core.stats()
    needed = sum(prompt + output - 1 for _, prompt, output in point.rows)
    return {
        **attained(run, load),
        "preemptions": float(sum(stats.preemptions.values())),
        "recomputed": (stats.prefill_tokens + stats.decode_tokens) / needed - 1.0,
        "cache_work": runner.cache_seconds / max(runner.seconds, 1e-9),
        "steps": float(run.steps),
        "end": run.end,
    }


def _arrivals(rows: Sequence[Row], limit: int) -> Iterator[Arrival]:
    for index, (at, prompt, output) in enumerate(rows):
        cap = max(output, min(OUTPUT_CAP, limit - prompt))
        sampling = SamplingParams(max_tokens=cap, min_tokens=output, stop_token_ids=frozenset({SIMULATED_TOKEN}))
        yield Arrival(at, EngineRequest(f"n{index}", (1,) * prompt, sampling))


def attained(run: VirtualRun, load: Load) -> Metrics:
    """Attainment as the load generator counts it, and latencies of all requests; one without a first token has waited
    until the end."""
    first = np.array([r.token_times[0] - r.arrival.at if r.token_times else run.end - r.arrival.at for r in run.online])
    gaps = [np.diff(r.token_times) for r in run.online]
    tails = np.array([nearest_rank(each, 99.0) if each.size else 0.0 for each in gaps])
    in_time = first <= load.ttft
    smooth = tails <= load.tbt
    ended = np.array([r.ended is not None for r in run.online])
    pooled = np.concatenate(gaps)
    good = int((in_time & smooth & ended).sum())
    found = {"requests": float(len(first)), "good": float(good), "slo_attainment": good / len(first)}
    found |= {"ttft_attainment": float(in_time.mean()), "tbt_attainment": float(smooth.mean())}
    for name, values in (("ttft", first), ("tbt", pooled), ("tbt_p99_per_request", tails)):
        found[f"{name}_mean"] = float(values.mean()) if values.size else 0.0
        found[f"{name}_p50"] = nearest_rank(values, 50.0) if values.size else 0.0
        found[f"{name}_p99"] = nearest_rank(values, 99.0) if values.size else 0.0
    return found


def points(config: Config, data: Path | None, seed: int) -> list[Point]:
    """All runs of a seed."""
    found = []
    for part in config.parts:
        plain = build_machine(part.machine, seed)
        machines = {cache: with_cache(plain, cache) for cache in dict.fromkeys(arm.cache for arm in part.arms)}
        limit = part.machine.max_model_len
        for load in part.loads:
            cases = [(rate, 1.0) for rate in load.rates] + [(rate, cv) for rate in load.bursts for cv in config.cvs]
            for rate, cv in cases:
                rows = requests_of(load, rate, cv, load.scale * config.requests, seed, data, limit)
                found += [Point(machines[arm.cache], load, rate, cv, arm, rows, seed) for arm in part.arms]
    return found


def run_seed(config: Config, data: Path | None, seed: int, workers: int, say: Callable[[str], None]) -> list[Result]:
    """All rows of one seed."""
    results: list[Result] = []
    asked = points(config, data, seed)
    for point, metrics in zip(asked, _run_all(asked, workers), strict=True):
        load, model = point.load, point.machine.spec.model
        setting = {"model": model, "workload": load.workload, "rate": point.rate, "cv": point.cv}
        setting |= {"ttft": load.ttft, "tbt": load.tbt, "online_policy": point.arm.policy, "cache": point.arm.cache}
        results.append(Result("apt-serve", point.arm.name, setting, seed, metrics))
        if point is asked[-1] or asked[len(results)].rows is not point.rows:
            say(f"seed {seed}: {model}, {load.workload} at {point.rate:g} requests/s, CV {point.cv:g}")
    return results


def _run_all(asked: Sequence[Point], workers: int) -> Iterator[Metrics]:
    if workers == 1:
        yield from map(run_point, asked)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield from pool.map(run_point, asked)


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
            latency = [_mean(mine, name) for name in ("ttft_p50", "ttft_p99", "tbt_p99")]
            work = [100.0 * _mean(mine, name) for name in ("recomputed", "cache_work")]
            rates: list[float | None] = [None, None]
            if (model, workload, policy) not in seen:
                rates = [effective_rate(curve(results, policy, model, workload), share) for share in SHARES]
            seen.add((model, workload, policy))
            rows.append([model, workload, rate, cv, policy, *shares, *latency, *work, *rates])
    return [*HEADER, *MORE], rows


def _mean(results: Sequence[Result], key: str) -> float:
    return sum(float(r.metrics[key] or 0.0) for r in results) / len(results)


DRAWN = ("fcfs", "larry", "apt-kv", "apt-hybrid", "apt-host", "goodput-kv", "goodput-hybrid", "goodput-host")


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
