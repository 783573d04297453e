"""`python -m benchmarks pressure --virtual`: every policy on every cache under a short memory, on a virtual clock.

The simulator builds core, limits, admission and latency model as `tidemill serve` does. Rates are
multiples of the answers a second of a burst, by arrival with a cache of 16 bits. Every arm serves the same requests. A
cell holds the requests of all seeds; refused ones count as missed.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.figures import percentile
from benchmarks.frame import Table
from engine.client import EngineStats
from engine.colocation.waits import ArrivalWaits
from engine.config import EngineConfig
from engine.limits import UNLIMITED_QUEUE
from engine.virtual import VirtualRecord
from loadgen import lengths
from loadgen.arrivals import constant_rate, schedule
from loadgen.plan import Windows
from loadgen.simulation.device import named_device
from loadgen.simulation.planner import measured
from loadgen.simulation.run import Policies, Ran, run_workload
from loadgen.stats import stream, wilson
from loadgen.traces import Trace, scale
from loadgen.workloads import Workload, fixed
from predictor.budget import DEFAULT_CLASS, BudgetParams
from predictor.slo import SLO

MACHINES = {"demo": ("llama-2-7b", "a100-40gb"), "gqa": ("llama-3-8b", "rtx-4090")}
"""Model and device for each kind of model: as many KV heads as heads, and a quarter as many."""
POLICIES = ("fcfs", "apt", "goodput", "goodput-strict")
HOST, INT8 = {"swap_space": 16.0}, {"kv_cache_dtype": "int8"}
CACHES: dict[str, dict[str, object]] = {
    "16 bits": {},
    "16 bits, host": {**HOST},
    "int8": {**INT8},
    "int8, host": {**HOST, **INT8},
}
BURST = 400
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Cell:
    """An arm under one rate, all seeds together. Times in seconds; `work`: tokens of one pass over all answers."""

    records: Sequence[VirtualRecord]
    stats: Sequence[EngineStats]
    good: int
    work: int

    @property
    def attained(self) -> float:
        """Return the share of requests within the SLO."""
        return self.good / len(self.records)


TABLE = Table({
    "model, rate, policy, cache": "44", "requests": "d", "refused": "d", "attained": ".1%", "low": ".1%", "high": ".1%",
    "TTFT P50": "8.3f", "P99 s": "7.2f", "TBT P99 ms": "8.0f", "preempted": "d", "recomputed": ".1%", "out": "d",
    "in": "d", "restored": "d",
})  # fmt: skip


def run_virtual(args: Namespace, slo: SLO) -> None:
    """Run every cell and print it, then the share within the SLO by policy and cache."""
    print(TABLE.heading)
    cells: dict[tuple[str, float], dict[tuple[str, str], Cell]] = {}
    for model in args.model:
        base = 1.0 if args.rate else burst_rate(model, slo, args)
        rates = args.rate or [load * base for load in args.load]
        for rate in rates:
            group = cells.setdefault((model, rate), {})
            for policy, cache, flags in arms(model):
                if f"{policy}, {cache}" not in args.arms:
                    continue
                group[policy, cache] = cell = run_cell(model, slo, args, rate, policy, flags)
                print(TABLE.line(f"{model} {rate:.2f}/s, {policy}, {cache}", *figures(cell)), flush=True)
    print_matrix(cells)


def arms(model: str) -> list[tuple[str, str, dict[str, object]]]:
    """Return policy, cache and further settings of each arm. Hidden state needs as many KV heads as heads."""
    hidden: dict[str, object] = {"overload": "hidden"}
    found = [(policy, cache, dict(flags)) for cache, flags in CACHES.items() for policy in POLICIES]
    if model == "demo":
        found += [(policy, "16 bits, hidden", hidden) for policy in POLICIES[1:]]
        found += [(policy, "16 bits, hidden, host", hidden | CACHES["16 bits, host"]) for policy in POLICIES[1:]]
    return found


def requests(args: Namespace, count: int, rate: float, seed: int) -> Trace:
    """Return Poisson arrivals (`rate` infinite: at once) of the lengths that the flags ask for."""
    times = np.zeros(count)
    if math.isfinite(rate):
        times = np.asarray(schedule(constant_rate(rate), "poisson", stream(seed, "arrivals"), count=count))
    return lengths_of(args, count, seed).at(times)


def lengths_of(args: Namespace, count: int, seed: int) -> Trace:
    """Return `count` lengths: all equal, or with the spread of ShareGPT around the same means."""
    if args.lengths != "chat":
        return fixed(count, args.prompt, args.output)
    drawn = lengths.sample(lengths.SHAREGPT, count, seed, None, "online")
    return scale(drawn, args.prompt / drawn.input_tokens.mean(), args.output / drawn.output_tokens.mean())


def run_once(model: str, slo: SLO, trace: Trace, seed: int, policy: str, **flags: object) -> Ran:
    """Serve a trace to its end on the simulated machine."""
    shape, device = MACHINES[model]
    config = EngineConfig(online_policy=policy, slo=str(slo), max_model_len=CONTEXT, **flags)  # type: ignore[arg-type]
    machine = named_device(shape, device, config, seed=seed)
    last = float(trace.arrived_at[-1]) or 1.0
    waits = ArrivalWaits.of(slo, machine.model, [(DEFAULT_CLASS, n) for n in trace.input_tokens], len(trace) / last)
    objective = waits.objective(slo, BudgetParams("hygen", 0.0), searched=True)
    made = Workload("pressure", trace, horizon=last)
    return run_workload(
        machine, made, Windows(drain=math.inf, horizon=last), objective, seed, Policies(policy), drain=True
    )


def burst_rate(model: str, slo: SLO, args: Namespace) -> float:
    """Return the answers a second of requests that all came at once, by arrival with a cache of 16 bits."""
    trace = requests(args, BURST, math.inf, 100)
    ran = run_once(model, slo, trace, 100, "fcfs", max_queue_time=UNLIMITED_QUEUE)
    return BURST / ran.run.end


def run_cell(model: str, slo: SLO, args: Namespace, rate: float, policy: str, flags: dict[str, object]) -> Cell:
    """Run all seeds of an arm at a rate."""
    records: list[VirtualRecord] = []
    stats, good, work = [], 0, 0
    for seed in range(1, args.seeds + 1):
        trace = requests(args, args.requests, rate, seed)
        ran = run_once(model, slo, trace, seed, policy, **flags)
        good += measured(ran, slo).judged[DEFAULT_CLASS][0]
        records += ran.run.online
        stats.append(ran.stats)
        done = [r for r in ran.run.online if r.ended is not None and not r.rejected]
        work += sum(len(r.arrival.request.prompt_token_ids) + len(r.token_times) - 1 for r in done)
    return Cell(records, stats, good, work)


def figures(cell: Cell) -> list[float]:
    """Return the columns of the table behind the name."""
    first = [r.ttft for r in cell.records if r.ttft is not None]
    gaps = np.concatenate([r.gaps for r in cell.records])
    computed = sum(s.prefill_tokens + s.decode_tokens for s in cell.stats)
    moved = [sum(s.cache_units.get(name, 0) for s in cell.stats) for name in ("swap_out", "swap_in", "restore")]
    return [
        len(cell.records), sum(r.rejected for r in cell.records), cell.attained,
        *wilson(cell.good, len(cell.records)), percentile(first, 50), percentile(first, 99),
        percentile(gaps, 99) * 1e3, sum(sum(s.preemptions.values()) for s in cell.stats), computed / cell.work - 1.0,
        *moved,
    ]  # fmt: skip


def print_matrix(cells: dict[tuple[str, float], dict[tuple[str, str], Cell]]) -> None:
    """Print the share within the SLO: a row for each policy and cache, a column for each model and rate."""
    named = {f"{model} {rate:.2f}/s": group for (model, rate), group in cells.items()}
    table = Table({"policy, cache": "38", **dict.fromkeys(named, "10.1%"), "mean": "10.1%"})
    print(f"\n{table.heading}")
    for arm in dict.fromkeys(arm for group in named.values() for arm in group):
        if all(arm in group for group in named.values()):
            shares = [group[arm].attained for group in named.values()]
            print(table.line(", ".join(arm), *shares, sum(shares) / len(shares)))
