"""The simulator against reality: the same small workload live on this machine, and simulated with its own profile.

A random 134.5 M Llama is served on one core, with a cache, limits and a budget that both sides share.
Three arms: online only, offline only, both. The simulator is given the latency profile that the server measured at its
start, and the time that passes on the host between two steps, measured on a burst of other requests before the arms.
A machine that others share is not equally fast all the time, so there are several rounds, each with a server, a profile
and arrivals of its own. Printed: P50 and mean of TTFT and TBT, offline tokens/s, live beside simulated (medians of the
rounds), and the median of the rounds' ratios (target: within 15 %) between the lowest and the highest.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.live import Watch, make_model_folder, plan_for, run, server
from benchmarks.machine import describe
from engine.limits import UNITS_PER_BLOCK, SchedulerConfig
from engine.scheduling.objective import StepObjective
from loadgen.arrivals import constant_rate, schedule
from loadgen.metrics import Slo, run_metrics
from loadgen.plan import Job, Windows
from loadgen.simulation.device import measured_device, read_profile
from loadgen.simulation.run import Policies, simulate
from loadgen.stats import stream
from loadgen.workloads import Workload, fixed
from predictor.budget import BudgetParams

ONLINE, OFFLINE = (128, 48), (256, 64)
"""Prompt and output tokens of a request."""
CONCURRENCY = 16
THREADS = 1
"""Of the model. The client and HTTP have the other core: each of their turns would lengthen a step that runs on all."""
NUM_BLOCKS, MODEL_LEN = 2048, 2048
MAX_SEQS, MAX_TOKENS = 64, 512
LIMITS = (
    f"--num-gpu-blocks-override={NUM_BLOCKS}", f"--max-model-len={MODEL_LEN}", f"--max-num-seqs={MAX_SEQS}",
    f"--max-num-batched-tokens={MAX_TOKENS}",
)  # fmt: skip
"""The server's flags for the limits that the simulator is given too."""
TBT_LIMIT = 0.25
WARM_UP, HOST_SECONDS, DRAIN = 5.0, 10.0, 15.0
BUDGET_SHARE = 0.8
"""The server's flat budget as a share of the TBT limit, while fewer than 200 online requests were seen."""
METRICS = ("ttft_p50", "ttft_mean", "tbt_p50", "tbt_mean", "offline_throughput")
TARGET = 0.15


Found = dict[tuple[str, str], tuple[float, float]]


def workload(rate: float, seconds: float, seed: int) -> Workload:
    """Poisson arrivals of one size beside more offline lines than can be done."""
    times = schedule(constant_rate(rate), "poisson", stream(seed, "arrivals"), duration=seconds)
    lines = Job(fixed(4000, *OFFLINE))
    return Workload("sim-vs-live", fixed(1, *ONLINE).at(times), (lines,), horizon=seconds)


def arms(made: Workload) -> dict[str, Workload]:
    return {"online only": replace(made, jobs=()), "offline only": replace(made, online=None), "both": made}


async def live(url: str, made: Workload, windows: Windows, seed: int, watch: Watch | None = None) -> Mapping[str, Any]:
    """Metrics of one arm over HTTP."""
    plan = plan_for(
        url,
        seed,
        online=made.online,
        jobs=made.jobs,
        offline_mode="flex" if made.jobs else "none",
        offline_concurrency=CONCURRENCY,
        windows=windows,
    )
    records = await run(plan, watch)
    found = run_metrics(records, windows.measured(records.ended_at), Slo())
    bad = sum(not record.ok for record in records.requests if record.service_class == "online")
    if bad:
        print(f"  {bad} online requests failed")
    return {**found["online"], "offline_throughput": found["offline"]["offline_throughput"]}


def measure_host(url: str, seconds: float) -> tuple[float, int]:
    """Return the seconds between two steps of a server that is never idle, from its counters at two moments of a burst,
    and the number of measured steps."""
    steps, spent = "tidemill_steps_total", "tidemill_step_seconds_total"
    watch = Watch((steps, spent), 0.05 * seconds)
    burst = Workload("host", None, (Job(fixed(4000, 64, 64)),))
    asyncio.run(live(url, burst, Windows(horizon=seconds), 99, watch))
    looks = np.array([[at, count, busy] for (at, count), (_, busy) in zip(*watch.seen.values(), strict=True)])
    inside = looks[(0.3 * seconds <= looks[:, 0]) & (looks[:, 0] <= 0.9 * seconds)]
    passed, count, busy = (inside[-1] - inside[0]).tolist()
    return (passed - busy) / count, int(count)


def simulated(profile: Path, host: float, made: Workload, windows: Windows, seed: int) -> Mapping[str, Any]:
    """Metrics of one arm on the virtual clock, with the server's limits and objective."""
    config = SchedulerConfig(
        num_units=UNITS_PER_BLOCK * NUM_BLOCKS,
        max_model_len=MODEL_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        enable_prefix_caching=False,
    )
    device = measured_device(read_profile(profile), config, host)
    objective = StepObjective(60.0, TBT_LIMIT, budget=BudgetParams("tidemill", BUDGET_SHARE * TBT_LIMIT))
    return simulate(device, made, windows, objective, seed, Policies(backlog=CONCURRENCY))


def show(arm: str, metric: str, pairs: Sequence[tuple[float, float]]) -> None:
    """One line: a metric of an arm, (live, simulated) of every round."""
    factor, unit = (1.0, "tok/s") if metric == "offline_throughput" else (1e3, "ms")
    live_, simulated_ = (factor * median(values) for values in zip(*pairs, strict=True))
    ratios = [theirs / ours for ours, theirs in pairs]
    spread = f"{median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
    verdict = "" if abs(median(ratios) - 1) <= TARGET else "  over 15 %"
    print(f"{arm:13} {metric:19} {live_:9.1f} {simulated_:10.1f} {unit:6} {spread}{verdict}", flush=True)


def measure_round(rate: float, seconds: float, seed: int) -> Found:
    """Serve and measure with a profile of its own, then simulate: (live, simulated) by arm and metric."""
    made = workload(rate, seconds, seed)
    windows = Windows(warmup=WARM_UP, horizon=seconds, drain=DRAIN)
    with tempfile.TemporaryDirectory() as name:
        make_model_folder(Path(name))
        kept = Path(name) / "profiles"
        slo = f"ttft_p99=60s,tbt_p99={TBT_LIMIT * 1e3:g}ms"
        with server(Path(name), THREADS, "--slo", slo, *LIMITS, cache=kept) as url:
            host, steps = measure_host(url, HOST_SECONDS)
            ours = {arm: asyncio.run(live(url, part, windows, seed)) for arm, part in arms(made).items()}
        paths = (kept / "tidemill" / "profiles").glob("*.json")
        (profile,) = (path for path in paths if not path.name.endswith(".load.json"))
        about = json.loads(profile.read_bytes())
        found = f"profile of {about['num_samples']} steps, held-out error {about['held_out_mape']:.1%}"
        print(f"seed {seed}: {found}; host {host * 1e3:.2f} ms a step ({steps} steps)", flush=True)
        theirs = {arm: simulated(profile, host, part, windows, seed) for arm, part in arms(made).items()}
    return {
        (arm, metric): (float(ours[arm][metric]), float(theirs[arm][metric]))
        for arm, part in arms(made).items()
        for metric in METRICS
        if (part.jobs if metric == "offline_throughput" else part.online)
    }


def main(argv: list[str] | None = None) -> None:
    """Serve, measure, simulate, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sim-vs-live", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.0, help="online requests a second")
    parser.add_argument("--seconds", type=float, default=35.0, help="length of an arm")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    print(f"sim-vs-live: random 134.5 M Llama, {args.rate} online requests/s; {describe()}", flush=True)
    rounds = [measure_round(args.rate, args.seconds, args.seed + i) for i in range(args.rounds)]
    print(f"{'arm':13} {'':19} {'live':>9} {'simulated':>10} {'':6} ratio")
    for arm, metric in rounds[0]:
        show(arm, metric, [found[arm, metric] for found in rounds])
