"""`tidemill simulate`: workloads through the engine's own scheduler, planner and policies on a virtual clock.

Three uses: one run of a named workload on a simulated device, an experiment of a paper over seeds (`--experiment`), and
how fast the simulator itself is (`--speed`). Needs neither a GPU nor torch. Times in seconds, throughput in tokens/s.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.core import EngineCore
from engine.errors import TidemillError
from engine.execution.device_specs import DEVICES, MODELS
from engine.request import EngineRequest, SamplingParams
from engine.scheduling.policies import ONLINE_POLICIES, find_policy
from engine.virtual import Arrival, VirtualDriver
from loadgen import workloads
from loadgen.errors import InputError
from loadgen.experiments import hygen, larry, llmd
from loadgen.experiments.machine import MachineSpec, build_machine
from loadgen.experiments.replay import UNLIMITED, Metrics, Scenario, Setting, replay, rows_of
from loadgen.experiments.table import Result, render, write_table
from predictor.budget import BudgetParams

SPEED_RUNNING = 64
SPEED_OUTPUT = 200


class Experiment(NamedTuple):
    """An experiment: its checked-in configurations, what runs one seed of it, and how its rows are shown."""

    config: Any
    short: Any
    run_seed: Callable[..., list[Result]]
    summary: Callable[[Sequence[Result]], tuple[list[str], list[list[Any]]]]
    figures: Callable[[Sequence[Result]], dict[str, str]]


EXPERIMENTS = {
    "hygen": Experiment(hygen.CONFIG, hygen.SHORT, hygen.run_seed, hygen.summary, hygen.figures),
    "larry": Experiment(larry.CONFIG, larry.SHORT, larry.run_seed, larry.summary, larry.figures),
    "llmd-491": Experiment(llmd.CONFIG, llmd.SHORT, llmd.run_seed, llmd.summary, llmd.figures),
}


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    made = argparse.ArgumentParser(prog="tidemill simulate", description=__doc__.split("\n", 1)[0])
    what = made.add_mutually_exclusive_group()
    what.add_argument("--experiment", choices=sorted(EXPERIMENTS), help="an experiment of a paper, over seeds")
    what.add_argument("--workload", choices=sorted(workloads.WORKLOADS), default="hygen", help="one run of a workload")
    what.add_argument("--speed", action="store_true", help="measure the simulator: simulated requests a second")
    made.add_argument("--traces", type=Path, help="folder of the public traces (default: synthetic stand-ins)")
    made.add_argument("--out", type=Path, help="folder for table.json and figures")
    made.add_argument("--seeds", type=int, default=1, help="seeds 0 ... N-1 of an experiment (default 1)")
    made.add_argument("--seed", type=int, default=0, help="seed of a single run, or the first of an experiment")
    made.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes for replays")
    made.add_argument("--short", action="store_true", help="short windows: a look, no result")
    made.add_argument("--window", type=float, help="measured seconds of a trace (experiments hygen and larry)")
    made.add_argument("--model", choices=sorted(MODELS), default="llama-2-7b", help="model shape of a single run")
    made.add_argument("--device", choices=sorted(DEVICES), default="a100-40gb", help="device of a single run")
    made.add_argument("--rate", type=float, help="requests/s of a single run (default: the workload's own)")
    made.add_argument("--duration", type=float, default=300.0, help="seconds of arrivals of a single run")
    made.add_argument("--max-num-seqs", type=int, default=128, help="most requests in one step")
    made.add_argument("--max-num-batched-tokens", type=int, default=512, help="most tokens in one step")
    made.add_argument("--max-model-len", type=int, help="longest prompt plus output (default: the model's)")
    made.add_argument(
        "--online-policy", default="fcfs", help=f"{', '.join(ONLINE_POLICIES)}; larry:ALPHA sets its weight"
    )
    made.add_argument("--latency-budget", type=float, help="L in ms: how long a step with offline work may be")
    made.add_argument("--no-offline", action="store_true", help="leave the workload's offline part out")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (2: it could not be understood)."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.speed:
            return _speed()
        if arguments.experiment is not None:
            return _experiment(arguments)
        return _single(arguments)
    except (InputError, TidemillError) as error:
        print(f"tidemill simulate: {error}", file=sys.stderr)
        return 2


def _experiment(arguments: argparse.Namespace) -> int:
    experiment = EXPERIMENTS[arguments.experiment]
    config = experiment.short if arguments.short else experiment.config
    if arguments.traces is not None and not arguments.traces.is_dir():
        raise InputError(f"{arguments.traces} is no folder")
    if arguments.window is not None:
        if not hasattr(config, "window") or not 0.0 < arguments.window < math.inf:
            raise InputError("--window takes seconds, for the experiments hygen and larry")
        config = replace(config, window=arguments.window)
    if arguments.seeds < 1 or arguments.workers < 1:
        raise InputError("--seeds and --workers must be at least 1")
    began = time.monotonic()
    results: list[Result] = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        results += experiment.run_seed(config, arguments.traces, seed, arguments.workers, _say)
        if arguments.out is not None:  # after every seed: what was computed is kept when the rest is interrupted
            write_table(results, arguments.out, experiment.figures(results))
            _say(f"table.json and figures in {arguments.out}")
    print(render(*experiment.summary(results)))
    _say(f"{time.monotonic() - began:.0f} s")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _single(arguments: argparse.Namespace) -> int:
    find_policy(arguments.online_policy)
    limit = arguments.max_model_len or MODELS[arguments.model].max_model_len
    options = workloads.Options(
        rate=arguments.rate, duration=arguments.duration, seed=arguments.seed, data=arguments.traces
    )
    made = workloads.build(arguments.workload, options)
    spec = MachineSpec(
        arguments.model, arguments.device, arguments.max_num_seqs, arguments.max_num_batched_tokens, limit
    )
    try:
        machine = build_machine(spec, arguments.seed)
    except ValueError as error:
        raise InputError(str(error)) from None
    online = rows_of(made.online, limit) if made.online is not None else ()
    offline = tuple(row for job in made.jobs for row in rows_of(job.lines, limit))
    budget = UNLIMITED
    if arguments.no_offline:
        offline = ()
    elif arguments.latency_budget is not None:
        budget = BudgetParams("hygen", arguments.latency_budget / 1e3)
    end = arguments.duration
    scenario = Scenario(online, offline, measure_end=end, end=math.inf if online and not offline else end)
    began = time.process_time()
    metrics = replay(machine, scenario, Setting(budget, online_policy=arguments.online_policy), arguments.seed)
    _show(arguments, made.notes, metrics, machine.mape, time.process_time() - began)
    return 0


def _show(
    arguments: argparse.Namespace, notes: Sequence[str], metrics: Metrics, mape: float, cpu_seconds: float
) -> None:
    for note in notes:
        print(f"note: {note}")
    print(render(("metric", "value"), sorted(metrics.items())))
    print(f"predictor MAPE {mape:.2%}; {cpu_seconds:.1f} s of CPU")
    if arguments.out is not None:
        setting = {"model": arguments.model, "device": arguments.device, "rate": arguments.rate}
        setting |= {"latency_budget": arguments.latency_budget, "duration": arguments.duration}
        write_table(
            [Result(arguments.workload, arguments.online_policy, setting, arguments.seed, metrics)], arguments.out, {}
        )


def measure_speed(requests: int = 1024) -> tuple[float, int]:
    """(simulated requests per second of CPU time, steps) at 64 running requests of 200 output tokens each."""
    spec = MachineSpec("llama-2-7b", "a100-80gb", SPEED_RUNNING)
    machine = build_machine(spec)
    sampling = SamplingParams(max_tokens=SPEED_OUTPUT)
    arrivals = [Arrival(0.0, EngineRequest(f"r{i}", (1,) * 128, sampling)) for i in range(requests)]
    driver = VirtualDriver(EngineCore(machine.config, model=machine.predictor), machine.runner(0), arrivals)
    began = time.process_time()
    steps = driver.run(math.inf).steps
    return requests / (time.process_time() - began), steps


def _speed() -> int:
    rates = sorted(measure_speed()[0] for _ in range(3))
    print(
        f"{rates[1]:.0f} simulated requests/s of one core ({rates[0]:.0f} to {rates[2]:.0f}, 3 runs of 1,024 requests; "
        f"{SPEED_RUNNING} running, {SPEED_OUTPUT} output tokens each)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
