"""One run of Apt-Serve's evaluation: a policy and a cache on a machine under one load, and the latencies of its
requests."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.experiments.machine import Machine
from benchmarks.experiments.replay import Recording, Scenario, Setting, make_core, online_arrivals
from benchmarks.figures import percentile
from engine.limits import UNITS_PER_BLOCK, UNLIMITED_QUEUE
from engine.scheduling.report import report_stats
from engine.virtual import VirtualDriver, VirtualRun
from loadgen import traces, workloads
from loadgen.arrivals import Process
from loadgen.simulation.device import with_hidden
from loadgen.simulation.gpu import fit_device, int8_share
from loadgen.simulation.run import Metrics, Row, rows_of

HOST_BYTES = 64 * 2**30


@dataclass(frozen=True, slots=True)
class Load:
    """A workload with its SLOs in seconds (the paper's Table 3) and the rates (requests/s) it is run at; `bursts`:
    those at which arrivals also come in bursts. `scale`: requests of a point beside those of other loads; short answers
    need more to fill as much time. `means`: mean prompt and output tokens to which the lengths are scaled."""

    workload: str
    ttft: float
    tbt: float
    rates: tuple[float, ...]
    bursts: tuple[float, ...] = ()
    scale: int = 1
    means: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy on a cache: `kv`, `hidden` (KV and hidden state), `host` (KV, and a host tier for the preempted),
    `both`, or `int8`."""

    name: str
    policy: str
    cache: str = "kv"


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
    machine = _in_8_bits(machine, cache)
    model, device, config = machine.spec.model, machine.device, machine.config
    shape = device.model
    unit_bytes = int(config.block_size * device.kv_bytes_per_token) // UNITS_PER_BLOCK
    costs = device.cache_costs()
    predictor = replace(machine.predictor, transferred=device.transfer_seconds(1), **costs.coefficients())
    config = replace(config, unit_bytes=unit_bytes, max_queue_time=UNLIMITED_QUEUE)
    if cache in {"host", "both"}:
        config = replace(config, host_units=HOST_BYTES // unit_bytes)
    if cache in {"hidden", "both"}:
        if shape.hidden_size > shape.num_kv_heads * shape.head_dim:
            raise ValueError(f"hidden state of {model} takes more than half the room of its K and V")
        config = with_hidden(config, costs, shape.num_layers)
    return replace(machine, config=config, predictor=predictor)


def _in_8_bits(machine: Machine, cache: str) -> Machine:
    """Return the machine with a cache of 8 bits if `cache` says so; scales take their part of the memory."""
    if cache != "int8":
        return machine
    device = replace(machine.device, cell_share=int8_share(machine.device.model))
    config = replace(machine.config, num_units=device.num_units(machine.config.block_size))
    return replace(machine, device=device, config=config, predictor=fit_device(device, config, config.seed)[0])


def requests_of(
    load: Load, rate: float, cv: float, count: int, seed: int, data: Path | None, limit: int
) -> tuple[Row, ...]:
    """The arrivals of one point: the same lengths at every rate, Poisson at a CV of 1, else gamma."""
    process: Process = "poisson" if cv == 1.0 else "gamma"
    options = workloads.Options(rate=rate, count=count, seed=seed, data=data, process=process, cv=cv, offline_lines=0)
    made = workloads.build(load.workload, options)
    online = made.online
    assert online is not None, "the workload has no online part"
    if load.means is not None:
        prompts, outputs = load.means
        online = traces.scale(online, prompts / online.input_tokens.mean(), outputs / online.output_tokens.mean())
    return rows_of(online, limit)


def run_point(point: Point) -> Metrics:
    """Run one point to its end; deterministic."""
    machine, load = point.machine, point.load
    setting = Setting(online_policy=point.arm.policy, ttft=load.ttft, tbt=load.tbt)
    core = make_core(machine, Scenario(point.rows), setting)
    runner = Recording(machine.runner(point.seed))
    run = VirtualDriver(core, runner, online_arrivals(point.rows, machine.config.max_model_len)).run(math.inf)
    stats = report_stats(core.state)
    worked = [work for features, _ in runner.steps if any(work := features.cache_work)]
    cache_seconds = sum(machine.device.cache_work_seconds(*work) for work in worked)
    needed = sum(prompt + output - 1 for _, prompt, output in point.rows)
    return {
        **attained(run, load),
        "preemptions": float(sum(stats.preemptions.values())),
        "recomputed": (stats.prefill_tokens + stats.decode_tokens) / needed - 1.0,
        "cache_work": cache_seconds / max(sum(seconds for _, seconds in runner.steps), 1e-9),
        "steps": float(run.steps),
        "end": run.end,
    }


def attained(run: VirtualRun, load: Load) -> Metrics:
    """Attainment as the load generator counts it, and latencies of all requests; one without a first token has waited
    until the end."""
    first = np.array([r.token_times[0] - r.arrival.at if r.token_times else run.end - r.arrival.at for r in run.online])
    gaps = [np.diff(r.token_times) for r in run.online]
    tails = np.array([percentile(each, 99.0) for each in gaps])
    in_time = first <= load.ttft
    smooth = tails <= load.tbt
    ended = np.array([r.ended is not None for r in run.online])
    pooled = np.concatenate(gaps)
    good = int((in_time & smooth & ended).sum())
    found = {"requests": float(len(first)), "good": float(good), "slo_attainment": good / len(first)}
    found |= {"ttft_attainment": float(in_time.mean()), "tbt_attainment": float(smooth.mean())}
    for name, values in (("ttft", first), ("tbt", pooled), ("tbt_p99_per_request", tails)):
        found[f"{name}_mean"] = float(values.mean()) if values.size else 0.0
        found[f"{name}_p50"] = percentile(values, 50.0)
        found[f"{name}_p99"] = percentile(values, 99.0)
    return found
