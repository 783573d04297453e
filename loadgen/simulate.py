"""`tidemill simulate`: workloads through the engine's own scheduler, planner and policies on a virtual clock.

Two uses: the capacity planner (`--slo`), and one run of a workload on a simulated device. Needs neither a GPU nor
torch. Times in seconds, throughput in tokens/s.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from engine.config import EngineConfig
from engine.errors import ConfigError, TidemillError
from engine.scheduling.objective import UNLIMITED, StepObjective
from engine.scheduling.policies import find_policy
from gateway.commands.flags import add_flags, flags_of, given
from gateway.config import ServerConfig
from loadgen import assemble, flags, workloads
from loadgen.errors import InputError
from loadgen.plan import Windows
from loadgen.simulation import report
from loadgen.simulation.device import Simulated, named_device, profiled_device
from loadgen.simulation.planner import Question, answer
from loadgen.simulation.run import Policies, shares_prefixes, simulate
from loadgen.simulation.specs import DEVICES, MODELS
from loadgen.simulation.table import Result, render, write_table
from loadgen.workloads import Workload
from predictor.budget import BudgetParams
from predictor.slo import SLO, SLOError

MIN_EVALUATIONS = 10
SECONDS = 300.0
"""Of traffic, by default."""
PLAN_LINES = 2000
NOT_SERVING = frozenset({"model", "revision", "device", "dtype", "load_format", "profile_dir", "profile_seconds"})
"""Fields of `EngineConfig` that say where a live engine finds its model, its machine and its measurements."""


def parser() -> argparse.ArgumentParser:
    """The command's flags; those of serving are generated from `EngineConfig`, as those of `tidemill serve` are."""
    made = argparse.ArgumentParser(prog="tidemill simulate", description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    machine = made.add_argument_group("machine")
    machine.add_argument("--model", help=f"a checkpoint's folder, or one of {', '.join(sorted(MODELS))}")
    machine.add_argument("--device", default="a100-40gb", help=f"one of {', '.join(sorted(DEVICES))}")
    machine.add_argument("--profile", type=Path, help="a latency profile measured by `tidemill profile`, as the device")
    machine.add_argument("--host-ms", type=float, default=0.0, help="time on the host between two steps")
    machine.add_argument(
        "--num-blocks",
        dest="num_gpu_blocks_override",
        default=argparse.SUPPRESS,
        help="another name of --num-gpu-blocks-override",
    )
    _serving(made)
    flags.add_workload(made.add_argument_group("traffic"), "--traces", default="hygen")
    arrivals = made.add_argument_group("arrivals")
    flags.add_arrivals(arrivals, "--rate")
    flags.add_lines(made.add_argument_group("offline work"))
    plan = made.add_argument_group("what is replayed")
    plan.add_argument(
        "--latency-budget", type=float, help="L in ms: how long a step with offline work may be (no search)"
    )
    plan.add_argument(
        "--fill-policy", choices=("tidemill", "hygen"), default="tidemill",
        help="how offline work is sized; hygen: one flat budget (default tidemill)",
    )  # fmt: skip
    plan.add_argument("--no-offline", action="store_true", help="leave the offline work out")
    plan.add_argument("--evaluations", type=int, default=16, help="with --slo: replays of the search (default 16)")
    plan.add_argument("--json", action="store_true", help="with --slo: print the answer as JSON")
    plan.add_argument("--out", type=Path, help="folder for table.json and figures")
    return made


def _serving(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("serving", "as for tidemill serve; --slo asks what the machine gives under it")
    serving = [flag for flag in flags_of(EngineConfig) if flag.field not in NOT_SERVING and flag.field != "seed"]
    add_flags(group, serving)  # type: ignore[arg-type]  # a group takes arguments as a parser does
    group.add_argument("--config", metavar="FILE.yaml", help="a server's file of settings")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (2: it could not be understood)."""
    arguments = parser().parse_args(argv)
    try:
        return _replay(arguments)
    except (InputError, TidemillError) as error:
        print(f"tidemill simulate: {error}", file=sys.stderr)
        return 2


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """What one run or plan is made of. `slo` is None where none was stated; `named`: the model in a serve command."""

    config: EngineConfig
    slo: SLO | None
    traffic: Workload
    device: Simulated
    named: str
    seconds: float


def _replay(arguments: argparse.Namespace) -> int:
    asked = _asked(arguments)
    if asked.slo is not None:
        return _plan(arguments, asked, asked.slo)
    if arguments.json:
        raise InputError("--json is for plans: state an SLO (--slo)")
    return _single(arguments, asked)


def _asked(arguments: argparse.Namespace) -> Asked:
    said = given(_without_machine(arguments), (EngineConfig, ServerConfig))
    serving = {flag.field for flag in flags_of(EngineConfig)} - NOT_SERVING
    chosen = {name: value for name, value in said.items() if name in serving}
    config = EngineConfig(**chosen | {"seed": arguments.seed})
    find_policy(config.online_policy)
    slo = None
    if "slo" in chosen:
        try:
            slo = SLO.parse(config.slo)
        except SLOError as error:
            raise ConfigError(f"--slo: {error}") from None
    seconds = arguments.duration or SECONDS
    traffic = _traffic(arguments, seconds, planned=slo is not None)
    # Where no prompt shares anything there is nothing to find, and hashing made-up prompts costs as much as a step.
    run_with = config if shares_prefixes(traffic) else replace(config, enable_prefix_caching=False)
    if arguments.host_ms < 0:
        raise InputError("--host-ms cannot be negative")
    host = arguments.host_ms / 1e3
    model = arguments.model or said.get("model") or "llama-2-7b"
    if arguments.profile is not None:
        device = profiled_device(arguments.profile, run_with, host)
    else:
        device = named_device(model, arguments.device, run_with, host)
    named = model if arguments.profile is None and model not in MODELS else "MODEL"
    return Asked(config, slo, traffic, device, named, seconds)


def _without_machine(arguments: argparse.Namespace) -> argparse.Namespace:
    """The flags without --model and --device, which name simulated ones here."""
    return argparse.Namespace(**{k: v for k, v in vars(arguments).items() if k not in NOT_SERVING | {"seed"}})


def _traffic(arguments: argparse.Namespace, seconds: float, *, planned: bool) -> Workload:
    assemble.check_workload(arguments)
    lines = arguments.offline_lines
    if planned and lines is None and arguments.offline_trace is None:
        lines = PLAN_LINES
    options = replace(assemble.options(arguments), duration=seconds, offline_lines=lines)
    made = workloads.build(assemble.name_of(arguments, "hygen"), options)
    made = workloads.clipped(made, arguments.length_scale, None)
    jobs = tuple(replace(job, completion_window=arguments.completion_window) for job in made.jobs)
    return replace(made, jobs=() if arguments.no_offline else jobs)


def _plan(arguments: argparse.Namespace, asked: Asked, slo: SLO) -> int:
    """Print the answer of the capacity planner."""
    made = asked.traffic
    seconds = asked.seconds if made.horizon is None else min(asked.seconds, made.horizon)
    if arguments.evaluations < MIN_EVALUATIONS:
        raise InputError(f"--evaluations must be at least {MIN_EVALUATIONS}")
    budget = None
    if arguments.latency_budget is not None:
        budget = BudgetParams(arguments.fill_policy, arguments.latency_budget / 1e3)
    question = Question(
        asked.device, made, asked.config, slo, seconds, arguments.evaluations, budget, arguments.seed,
        arguments.fill_policy,
    )  # fmt: skip
    began = time.monotonic()
    found = answer(question, _say)
    _say(f"{time.monotonic() - began:.0f} s")
    notes = (*made.notes, *asked.device.notes)
    if arguments.json:
        print(orjson.dumps(report.document(found, asked.named, notes), option=orjson.OPT_INDENT_2).decode())
    else:
        print(report.show(found, asked.named, notes))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        content = orjson.dumps(report.document(found, asked.named, notes), option=orjson.OPT_INDENT_2)
        (arguments.out / "plan.json").write_bytes(content)
    return 0


def _single(arguments: argparse.Namespace, asked: Asked) -> int:
    """One run without an SLO: everything that was measured."""
    made, budget = asked.traffic, UNLIMITED
    if arguments.latency_budget is not None:
        budget = BudgetParams("hygen", arguments.latency_budget / 1e3)
    windows = Windows(horizon=asked.seconds) if made.online is None or made.jobs else Windows()
    began = time.process_time()
    config, objective = asked.config, StepObjective(budget=budget)
    policies = Policies(config.online_policy, config.offline_policy)
    metrics = simulate(asked.device, made, windows, objective, arguments.seed, policies)
    for note in (*made.notes, *asked.device.notes):
        print(f"note: {note}")
    print(render(("metric", "value"), sorted(metrics.items())))
    print(f"predictor MAPE {asked.device.mape:.2%}; {time.process_time() - began:.1f} s of CPU")
    if arguments.out is not None:
        setting = {"model": asked.device.model_name, "device": asked.device.name, "rate": arguments.request_rate}
        setting |= {"latency_budget": arguments.latency_budget, "duration": asked.seconds}
        write_table([Result(made.name, config.online_policy, setting, arguments.seed, metrics)], arguments.out, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
