"""`tidemill simulate`: workloads through the engine's own scheduler, planner and policies on a virtual clock.

Three uses: one run of a named workload on a simulated device, an experiment of a paper over seeds (`--experiment`), and
how fast the simulator itself is (`--speed`). Needs neither a GPU nor torch. Times in seconds, throughput in tokens/s.
"""

import argparse
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.errors import TidemillError
from engine.execution.device_specs import DEVICES, MODELS
from engine.execution.simulated import SIMULATED_TOKEN
from engine.request import EngineRequest, RequestClass, SamplingParams
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import Collect, ModelRunner, SchedulerOutput
from engine.scheduling.policies import ONLINE_POLICIES, find_policy
from engine.virtual import Arrival, PredictedRunner, VirtualDriver, step_features
from loadgen import workloads
from loadgen.errors import InputError
from loadgen.experiments import apt, apt_table, hybridserve, hybridserve_table, hygen, larry, llmd, parts
from loadgen.experiments.machine import MachineSpec, build_machine
from loadgen.experiments.replay import OUTPUT_CAP, UNLIMITED, Metrics, Scenario, measure, rows_of
from loadgen.experiments.table import Result, render, write_table
from loadgen.plan import FIRST_OFFLINE, Windows
from loadgen.prompts import PromptMaker, TokenIds
from loadgen.traces import Content, Trace
from loadgen.workloads import Workload
from predictor.budget import BudgetParams
from predictor.model import LatencyPredictor
from predictor.online import OnlineModel
from predictor.profile import Profile, ProfileError, ProfileKey

MAX_NOISE = 0.3
UNITS_PER_BLOCK = 2
SPEED_RUNNING = 64
SPEED_OUTPUT = 200


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a workload runs on: limits, the latency model that the scheduler believes, a runner, the model's error."""

    config: SchedulerConfig
    model: LatencyPredictor
    runner: ModelRunner
    mape: float


class ProfiledRunner:
    """Steps take what a profile measured on a real machine says, with the profile's own error as noise.

    `host_seconds` pass between two steps on the host (HTTP, detokenizing, the loop), where no step in flight hides
    them. `model` learns from every step as in the live engine. Deterministic per seed.
    """

    def __init__(self, profile: Profile, model: OnlineModel, host_seconds: float, seed: int) -> None:
        self._inner = PredictedRunner(profile.model)
        self._model = model
        self._host_seconds = host_seconds
        # The mean absolute error of a normal distribution is 0.8 of its standard deviation.
        self._noise = min(profile.held_out_mape, MAX_NOISE) / 0.8
        self._random = random.Random(seed)

    def launch(self, output: SchedulerOutput) -> Collect:
        """The step with its time, host included."""
        result = self._inner.launch(output)()
        taken = result.latency * max(0.5, 1.0 + self._noise * self._random.gauss(0.0, 1.0))
        self._model.observe(step_features(output), taken)
        result = replace(result, latency=taken + self._host_seconds)
        return lambda: result


def measured_device(path: Path, config: SchedulerConfig, host_seconds: float, seed: int) -> Simulated:
    """The machine that the profile in `path` was measured on. Raises InputError when it is no profile."""
    try:
        key = ProfileKey(**json.loads(path.read_bytes())["key"])
        profile = Profile.load(path, key)
    except (OSError, ValueError, KeyError, TypeError, ProfileError) as error:
        raise InputError(f"{path} is no latency profile: {error}") from None
    model = OnlineModel.of(profile)
    return Simulated(config, model, ProfiledRunner(profile, model, host_seconds, seed), profile.held_out_mape)


def shares_prefixes(made: Workload) -> bool:
    """Whether any prompt of the workload has a part that others may share."""
    traces = [job.lines for job in made.jobs] + ([made.online] if made.online is not None else [])
    return any(content.segments for trace in traces for content in trace.content)


def simulate(
    device: Simulated,
    made: Workload,
    windows: Windows,
    objective: StepObjective,
    seed: int,
    *,
    online_policy: str = "fcfs",
    offline_concurrency: int | None = None,
) -> Metrics:
    """Run a workload; metrics by the names of the load generator's reports, and `prefix_hits` (share of tokens).

    With prefix caching, prompts are the token ids that the load generator would send, else all tokens are alike. Jobs
    whose lines share prefixes end with their last line; others start over until the horizon.
    `offline_concurrency`: offline requests kept open (default: twice what fits a step).
    """
    config, shared = device.config, shares_prefixes(made)
    maker = PromptMaker(TokenIds(), "completions", seed, 0) if config.enable_prefix_caching else None
    core = EngineCore(
        config,
        online_policy=online_policy,
        offline_policy="psm" if maker is not None else "fcfs",  # without a cache the tree has nothing to order by
        model=device.model,
        objective=objective,
    )
    limit, online = config.max_model_len, RequestClass.ONLINE
    end = math.inf if windows.horizon is None else windows.horizon
    arrivals = [] if made.online is None else list(_requests(made.online, "n", maker, limit, online))
    jobs = [job.lines for job in made.jobs if len(job.lines)] if objective.budget.latency_budget > 0 else []
    endless = not shared and math.isfinite(end)
    offline = (arrival.request for arrival in _lines(jobs, maker, limit, endless=endless)) if jobs else None
    measured = (windows.warmup, end - windows.cooldown)
    backlog = offline_concurrency or 2 * config.max_num_seqs
    run = VirtualDriver(core, device.runner, arrivals, offline, backlog=backlog, window=measured).run(end)
    stats = core.stats()
    hits = stats.prefix_hit_tokens / stats.prefix_queried_tokens if stats.prefix_queried_tokens else 0.0
    return {**measure(run, Scenario((), (), *measured)), "prefix_hits": hits}


def _lines(jobs: Sequence[Trace], maker: PromptMaker | None, limit: int, *, endless: bool) -> Iterator[Arrival]:
    for turn in itertools.count():
        first = FIRST_OFFLINE
        for number, job in enumerate(jobs):
            yield from _requests(job, f"f{turn}.{number}.", maker, limit, RequestClass.OFFLINE, first)
            first += len(job)
        if not endless:
            return


def _requests(
    trace: Trace, name: str, maker: PromptMaker | None, limit: int, request_class: RequestClass, first: int = 0
) -> Iterator[Arrival]:
    """The requests of a trace, prompts numbered from `first` as the load generator numbers them.

    Their true length is hidden from the scheduler: they end at a stop token that is masked until then.
    """
    for index, (at, prompt, output) in enumerate(rows_of(trace, limit)):
        cap = max(output, min(OUTPUT_CAP, limit - prompt))
        sampling = SamplingParams(max_tokens=cap, min_tokens=output, stop_token_ids=frozenset({SIMULATED_TOKEN}))
        tokens = (1,) * prompt
        if maker is not None:
            shown = Content(segments=trace.content_of(index).segments)
            tokens = tuple(maker.fields(first + index, prompt, shown)["prompt"])
        yield Arrival(at, EngineRequest(f"{name}{index}", tokens, sampling, request_class))


class Experiment(NamedTuple):
    """An experiment: its checked-in configurations, what runs one seed of it, and how its rows are shown."""

    config: Any
    short: Any
    run_seed: Callable[..., list[Result]]
    summary: Callable[[Sequence[Result]], tuple[list[str], list[list[Any]]]]
    figures: Callable[[Sequence[Result]], dict[str, str]]


EXPERIMENTS = {
    "apt-serve": Experiment(apt.CONFIG, apt.SHORT, apt.run_seed, apt_table.summary, apt_table.figures),
    "hybridserve": Experiment(
        hybridserve.CONFIG,
        hybridserve.SHORT,
        hybridserve.run_seed,
        hybridserve_table.summary,
        hybridserve_table.figures,
    ),
    "hygen": Experiment(hygen.CONFIG, hygen.SHORT, hygen.run_seed, hygen.summary, hygen.figures),
    "hygen-parts": Experiment(parts.CONFIG, parts.SHORT, parts.run_seed, parts.summary, parts.figures),
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
    made.add_argument("--window", type=float, help="measured seconds of a trace (not llmd-491)")
    made.add_argument("--model", choices=sorted(MODELS), default="llama-2-7b", help="model shape of a single run")
    made.add_argument("--device", choices=sorted(DEVICES), default="a100-40gb", help="device of a single run")
    made.add_argument("--rate", type=float, help="requests/s of a single run (default: the workload's own)")
    made.add_argument("--duration", type=float, default=300.0, help="seconds of arrivals of a single run")
    made.add_argument("--profile", type=Path, help="a latency profile measured by `tidemill profile`, as the device")
    made.add_argument("--host-ms", type=float, default=0.0, help="with --profile: time on the host between two steps")
    made.add_argument("--num-blocks", type=int, default=4096, help="with --profile: KV blocks of the cache")
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
            raise InputError("--window takes seconds, for experiments on a trace")
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
    options = workloads.Options(
        rate=arguments.rate, duration=arguments.duration, seed=arguments.seed, data=arguments.traces
    )
    made = workloads.build(arguments.workload, options)
    budget = UNLIMITED
    if arguments.no_offline:
        made = replace(made, jobs=())
    elif arguments.latency_budget is not None:
        budget = BudgetParams("hygen", arguments.latency_budget / 1e3)
    device = _measured_device(arguments, made) if arguments.profile is not None else _named_device(arguments, made)
    end = arguments.duration
    windows = Windows(horizon=end) if made.online is None or made.jobs else Windows()
    began = time.process_time()
    objective = StepObjective(budget=budget)
    metrics = simulate(device, made, windows, objective, arguments.seed, online_policy=arguments.online_policy)
    _show(arguments, made.notes, metrics, device.mape, time.process_time() - began)
    return 0


def _named_device(arguments: argparse.Namespace, made: Workload) -> Simulated:
    limit = arguments.max_model_len or MODELS[arguments.model].max_model_len
    seqs, tokens = arguments.max_num_seqs, arguments.max_num_batched_tokens
    spec = MachineSpec(arguments.model, arguments.device, seqs, tokens, limit, prefix_caching=shares_prefixes(made))
    try:
        machine = build_machine(spec, arguments.seed)
    except ValueError as error:
        raise InputError(str(error)) from None
    return Simulated(machine.config, machine.predictor, machine.runner(arguments.seed), machine.mape)


def _measured_device(arguments: argparse.Namespace, made: Workload) -> Simulated:
    config = SchedulerConfig(
        num_units=UNITS_PER_BLOCK * arguments.num_blocks,
        max_model_len=arguments.max_model_len or 2048,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_num_waiting=1_000_000,
        enable_prefix_caching=shares_prefixes(made),
        seed=arguments.seed,
    )
    return measured_device(arguments.profile, config, arguments.host_ms / 1e3, arguments.seed)


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
