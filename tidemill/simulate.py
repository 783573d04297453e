"""`tidemill simulate`: run workloads through the engine's scheduler, planner and policies on a virtual clock.

With `--slo` it plans capacity, else it runs a workload once on a simulated device. It needs neither a GPU nor torch.
Times are in seconds, throughput in tokens/s.

`tidemill worth` estimates the value of the batch work that a machine does beside its chats: it runs the planner once
for each SLO, on the same traffic.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from engine.config import EngineConfig, parse_slo
from engine.errors import TidemillError
from engine.scheduling.objective import UNLIMITED, StepObjective
from engine.scheduling.queues import OFFLINE_POLICIES
from engine.speculation.trace import DraftTraces, read_traces
from gateway.config import ServerConfig
from loadgen import InputError, flags, workloads
from loadgen.plan import Windows
from loadgen.simulation.device import Simulated, free_chat, named_device, profiled_device, read_profile, with_drafts
from loadgen.simulation.gpu import DEVICES, MODELS
from loadgen.simulation.planner import Answer, Question, answer
from loadgen.simulation.policies import find_policy
from loadgen.simulation.run import Policies, shares_prefixes, simulate
from loadgen.workloads import Workload
from predictor.budget import BudgetParams
from predictor.slo import SLO
from tidemill import plan_report
from tidemill.flags import add_flags, flags_of, given

MIN_EVALUATIONS = 10
SECONDS = 300.0
"""Default length of the traffic, seconds."""
PLAN_LINES = 2000
NOT_SERVING = frozenset({"model", "revision", "device", "dtype", "load_format", "profile_dir", "profile_seconds"})
"""Fields of `EngineConfig` for the model, machine and profile of a real engine, which a simulation does not use."""


def parser() -> argparse.ArgumentParser:
    """Return the parser. Flags of serving are generated from `EngineConfig`, as for `tidemill serve`."""
    made = argparse.ArgumentParser(prog="tidemill simulate", description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    _machine(made.add_argument_group("machine"))
    _serving(made)
    flags.add_workload(made.add_argument_group("traffic"), "--traces", default="hygen")
    flags.add_arrivals(made.add_argument_group("arrivals"), "--rate")
    flags.add_lines(made.add_argument_group("offline work"))
    plan = made.add_argument_group("simulation")
    plan.add_argument(
        "--latency-budget", type=float, help="maximum time of a step with offline work, ms (default: searched)"
    )
    plan.add_argument(
        "--fill-policy", choices=("tidemill", "hygen"), default="tidemill",
        help="sizing of offline work; hygen: one flat budget (default tidemill)",
    )  # fmt: skip
    plan.add_argument(
        "--offline-policy", choices=OFFLINE_POLICIES, default="psm",
        help="order of offline work; psm: shared prefixes first (default psm)",
    )  # fmt: skip
    plan.add_argument("--no-offline", action="store_true", help="run without offline work")
    plan.add_argument("--evaluations", type=int, default=16, help="with --slo: replays of the search (default 16)")
    plan.add_argument("--json", action="store_true", help="with --slo: print the plan as JSON")
    plan.add_argument("--out", type=Path, help="folder for table.json, with --slo plan.json")
    return made


def _machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help=f"folder of a checkpoint, or one of {', '.join(sorted(MODELS))}")
    group.add_argument("--device", default="a100-40gb", help=f"one of {', '.join(sorted(DEVICES))}")
    group.add_argument("--profile", type=Path, help="latency profile of `tidemill profile` to use as the device")
    group.add_argument("--host-ms", type=float, default=0.0, help="host time between two steps, ms (default 0)")
    group.add_argument(
        "--num-blocks",
        dest="num_gpu_blocks_override",
        default=argparse.SUPPRESS,
        help="same as --num-gpu-blocks-override",
    )
    group.add_argument(
        "--acceptance", type=Path, metavar="FILE",
        help="outcomes of drafts: the .load.json of a server beside its profile (default: that of --profile, if it has "
        "drafts; else as measured in free chat of the packaged model)",
    )  # fmt: skip


def _serving(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("serving", "as for tidemill serve; --slo plans the capacity under an SLO")
    serving = [flag for flag in flags_of(EngineConfig) if flag.field not in NOT_SERVING]
    add_flags(group, serving)  # type: ignore[arg-type]  # a group takes arguments as a parser does
    group.add_argument("--config", metavar="FILE.yaml", help="settings file of a server")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 2 for any error."""
    arguments = parser().parse_args(argv)
    try:
        return _replay(arguments)
    except (InputError, TidemillError) as error:
        print(f"tidemill simulate: {error}", file=sys.stderr)
        return 2


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """The parsed flags of a run or plan."""

    config: EngineConfig
    slo: SLO | None  # None: a single run
    traffic: Workload
    device: Simulated
    named: str  # model in the printed `tidemill serve` command
    seconds: float


def _replay(arguments: argparse.Namespace) -> int:
    asked = ask(arguments)
    if asked.slo is not None:
        return _plan(arguments, asked, asked.slo)
    if arguments.json:
        raise InputError("--json needs --slo")
    return _single(arguments, asked)


def ask(arguments: argparse.Namespace) -> Asked:
    """Read the traffic and the machine. Raise InputError or ConfigError for an invalid flag or file."""
    flagged = {k: v for k, v in vars(arguments).items() if k not in NOT_SERVING}  # --model, --device: simulated ones
    settings = given(argparse.Namespace(**flagged), (EngineConfig, ServerConfig))
    said = {name: each.value for name, each in settings.items()}
    serving = {flag.field for flag in flags_of(EngineConfig)} - NOT_SERVING
    chosen = {name: value for name, value in said.items() if name in serving}
    config = EngineConfig(**chosen)
    find_policy(config.online_policy)
    slo = SLO.parse(config.slo) if "slo" in chosen else None
    seconds = arguments.duration or SECONDS
    traffic = _traffic(arguments, seconds, planned=slo is not None)
    # Without shared prefixes, hashing the generated prompts would be wasted; it takes as long as a step.
    run_with = config if shares_prefixes(traffic) else replace(config, enable_prefix_caching=False)
    if arguments.host_ms < 0:
        raise InputError("--host-ms must not be negative")
    host = arguments.host_ms / 1e3
    model = arguments.model or said.get("model") or "llama-2-7b"
    if arguments.profile is not None:
        device = profiled_device(arguments.profile, run_with, host, arguments.seed)
    else:
        device = named_device(model, arguments.device, run_with, host, arguments.seed)
    if drafts := _drafts(arguments, config):
        device = with_drafts(device, *drafts)
    named = model if arguments.profile is None and model not in MODELS else "MODEL"
    return Asked(config, slo, traffic, device, named, seconds)


def _drafts(arguments: argparse.Namespace, config: EngineConfig) -> tuple[DraftTraces, str] | None:
    """Return the outcomes of drafts and their origin; None if the server would draft nothing."""
    profile, given_file = arguments.profile, arguments.acceptance
    by_default = profile is not None and read_profile(profile).key.is_cpu
    if config.speculation == "off" or (config.speculation == "auto" and not by_default):
        if given_file is not None:
            raise InputError("--acceptance needs --speculation on, because auto drafts only on a CPU's --profile")
        return None
    beside = None if profile is None else profile.with_suffix(".load.json")
    for file in (given_file, beside):
        try:
            if file is not None:
                return read_traces(file), f"as recorded in {file}"
        except (OSError, ValueError) as error:
            if file is given_file:
                raise InputError(f"{file} has no outcomes of drafts: {error}") from None
    return free_chat(), "as in free chat of the packaged model (--acceptance FILE: as on your server)"


def _traffic(arguments: argparse.Namespace, seconds: float, *, planned: bool) -> Workload:
    flags.check_workload(arguments)
    lines = arguments.offline_lines
    if planned and lines is None and arguments.offline_trace is None:
        lines = PLAN_LINES
    options = replace(flags.options(arguments), duration=seconds, offline_lines=lines)
    made = workloads.build(flags.name_of(arguments, "hygen"), options)
    made = workloads.clipped(made, arguments.length_scale, None)
    jobs = tuple(replace(job, completion_window=arguments.completion_window) for job in made.jobs)
    return replace(made, jobs=() if arguments.no_offline else jobs)


def question_of(arguments: argparse.Namespace, asked: Asked, slo: SLO) -> Question:
    """Return the planner's question for one SLO. Raise InputError for an invalid flag."""
    made = asked.traffic
    seconds = asked.seconds if made.horizon is None else min(asked.seconds, made.horizon)
    if arguments.evaluations < MIN_EVALUATIONS:
        raise InputError(f"--evaluations must be at least {MIN_EVALUATIONS}")
    budget = None
    if arguments.latency_budget is not None:
        budget = BudgetParams(arguments.fill_policy, arguments.latency_budget / 1e3)
    return Question(
        asked.device, made, asked.config, slo, seconds, arguments.evaluations, budget, arguments.seed,
        arguments.fill_policy, arguments.offline_policy,
    )  # fmt: skip


def _plan(arguments: argparse.Namespace, asked: Asked, slo: SLO) -> int:
    """Print the capacity of the machine on this traffic under the SLO."""
    began = time.monotonic()
    found = answer(question_of(arguments, asked, slo), say)
    say(f"{time.monotonic() - began:.0f} s")
    notes = (*asked.traffic.notes, *asked.device.notes)
    document = plan_report.document(found, asked.named, notes)
    if arguments.json:
        print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        print(plan_report.show(found, asked.named, notes))
    if arguments.out is not None:
        _write(arguments.out / "plan.json", document)
    return 0


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _single(arguments: argparse.Namespace, asked: Asked) -> int:
    """Run the workload once without an SLO and print all metrics."""
    made, budget = asked.traffic, UNLIMITED
    if arguments.latency_budget is not None:
        budget = BudgetParams("hygen", arguments.latency_budget / 1e3)
    windows = Windows(horizon=asked.seconds) if made.online is None or made.jobs else Windows()
    began = time.process_time()
    config, objective = asked.config, StepObjective(budget=budget)
    policies = Policies(config.online_policy, arguments.offline_policy)
    metrics = simulate(asked.device, made, windows, objective, arguments.seed, policies)
    for note in (*made.notes, *asked.device.notes):
        print(f"note: {note}")
    width = max(map(len, metrics))
    for name, value in sorted(metrics.items()):
        print(f"{name:{width}}  {value:10.4g}")
    print(f"predictor MAPE {asked.device.mape:.2%}; {time.process_time() - began:.1f} s of CPU")
    if arguments.out is not None:
        setting = {"model": asked.device.model_name, "device": asked.device.name, "rate": arguments.request_rate}
        setting |= {"latency_budget": arguments.latency_budget, "duration": asked.seconds}
        row = {"experiment": made.name, "policy": config.online_policy, "setting": setting}
        _write(arguments.out / "table.json", [row | {"seed": arguments.seed, "metrics": metrics}])
    return 0


HOUR, MILLION = 3600.0, 1e6
_EPILOG = (
    "All other flags of `tidemill simulate` describe the machine, the traffic and the offline lines as they do there."
)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million prompt and output tokens, and the rent of the GPU for an hour, in one currency."""

    prompt: float
    output: float
    rent: float | None

    def value(self, prompt: float, output: float) -> float:
        return (prompt * self.prompt + output * self.output) / MILLION


@dataclass(frozen=True, slots=True)
class Hourly:
    """Offline work beside the chats in one hour. `kept`: whether the SLO holds."""

    slo: str
    kept: bool
    lines: float
    prompt_tokens: float
    output_tokens: float
    value: float | None


def worth_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that `tidemill simulate` does not have."""
    made = argparse.ArgumentParser(
        prog="tidemill worth",
        description="Estimate the value of the batch work that a machine does beside its chats under one or more SLOs.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    made.add_argument("--slo", action="append", help=f"SLO; repeatable (default: {EngineConfig().slo})")
    made.add_argument("--price-in", type=float, metavar="P", help="price of a million prompt tokens")
    made.add_argument("--price-out", type=float, metavar="Q", help="price of a million output tokens")
    made.add_argument("--gpu-hour", type=float, metavar="R", help="rent of the GPU for an hour, in the same currency")
    made.add_argument("--json", action="store_true", help="print the rows and assumptions as JSON")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to a file as well")
    return made


def worth_main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 2 for any error."""
    own, others = worth_parser().parse_known_args(argv)
    try:
        return _run(own, parser().parse_args(others))
    except (InputError, TidemillError) as error:
        print(f"tidemill worth: {error}", file=sys.stderr)
        return 2


def _run(own: argparse.Namespace, arguments: argparse.Namespace) -> int:
    prices = _prices(own)
    slos = [parse_slo(text) for text in own.slo or [EngineConfig().slo]]
    arguments.slo = str(slos[0])
    asked = ask(arguments)
    if not asked.traffic.jobs:
        raise InputError("without offline lines nothing is left to value; leave out --no-offline")
    answers = []
    for slo in slos:
        print(f"{slo}:", file=sys.stderr, flush=True)
        answers.append(answer(question_of(arguments, asked, slo), say))
    rows = [hourly(found, prices) for found in answers]
    notes = _assumptions(answers[-1], prices, (*asked.traffic.notes, *asked.device.notes))
    document = {"rows": rows, "rent": prices.rent if prices else None, "assumptions": notes}
    text = orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
    print(text if own.json else show(rows, prices, answers[-1], notes))
    if own.out is not None:
        own.out.write_text(text + "\n")
    return 0


def _prices(own: argparse.Namespace) -> Prices | None:
    given = [price for price in (own.price_in, own.price_out, own.gpu_hour) if price is not None]
    if any(not 0.0 <= price < float("inf") for price in given):
        raise InputError("prices must not be negative")
    if (own.price_in is None) != (own.price_out is None):
        raise InputError("--price-in and --price-out belong together")
    if own.price_in is None:
        if own.gpu_hour is not None:
            raise InputError("--gpu-hour needs --price-in and --price-out")
        return None
    return Prices(own.price_in, own.price_out, own.gpu_hour)


def hourly(found: Answer, prices: Prices | None) -> Hourly:
    """Return the offline work of an hour; nothing if not even the chats alone keep the SLO."""
    beside = found.beside
    scale = HOUR / beside.seconds
    output = beside.offline_output_tokens * scale
    prompt = beside.offline_tokens * scale - output
    value = None if prices is None else prices.value(prompt, output)
    return Hourly(str(found.question.slo), found.kept, beside.offline_lines * scale, prompt, output, value)


def show(rows: Sequence[Hourly], prices: Prices | None, found: Answer, notes: Sequence[str]) -> str:
    """Return the table and its assumptions as text."""
    machine = found.question.machine
    titles = ["SLO", "kept", "lines/h", "prompt tokens/h", "output tokens/h"]
    titles += ["value/h"] if prices else []
    titles += ["of the rent"] if prices and prices.rent else []
    table = [titles]
    for row in rows:
        cells = [row.slo, "yes" if row.kept else "NO"]
        cells += [f"{each:,.0f}" for each in (row.lines, row.prompt_tokens, row.output_tokens)]
        if row.value is not None and prices is not None:
            cells += [f"{row.value:,.2f}"]
            cells += [f"{row.value / prices.rent:.0%}"] if prices.rent else []
        table.append(cells)
    head = f"What one {machine.name} with {machine.model_name} gives beside its chats, estimated:"
    return "\n".join([head, "", plan_report.aligned(table), "", "Assumptions:", *(f"- {note}" for note in notes)])


def _assumptions(found: Answer, prices: Prices | None, notes: Sequence[str]) -> list[str]:
    question, online = found.question, found.question.traffic.online
    lines = [
        "the machine is simulated by the server's own scheduler; HTTP and tokenization are not included",
        f"the latency model is {question.machine.mape:.1%} off on this device's step times",
    ]
    if online is not None and found.alone is not None:
        lines.append(
            f"chats: {question.traffic.name}, {found.alone.requests / found.alone.seconds:.3g} a second, on average "
            f"{online.input_tokens.mean():.0f} prompt and {online.output_tokens.mean():.0f} output tokens, at all hours"
        )
    for job in question.traffic.jobs:
        size = f"{job.lines.input_tokens.mean():.0f} prompt and {job.lines.output_tokens.mean():.0f} output tokens"
        lines.append(f"batch lines: on average {size}; there is always a line to run")
    if prices is not None:
        lines.append(f"prices: {prices.prompt:g} and {prices.output:g} for a million prompt and output tokens")
    return [*lines, *notes]
