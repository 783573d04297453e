"""`tidemill bench run|sweep`: measure a server and write run folders.

Exit codes: 0 success; 1 an assertion failed or the server cannot be measured; 2 the run is INVALID or a flag is
invalid; 130 interrupted, with results written.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen import InputError, ServerError, assemble, checks, flags, folder, report, terminal
from loadgen.assemble import Setup
from loadgen.folder import About
from loadgen.metrics import harvest, interference
from loadgen.plan import Plan
from loadgen.session import Session, prepare, warm_up
from loadgen.terminal import LiveLine
from loadgen.workers import execute

DONE, FAILED, INVALID, INTERRUPTED = 0, 1, 2, 130
LEVELS = (60, 90, 99)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. Errors are printed in one line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = flags.parser().parse_args(arguments)
    try:
        return (_run if args.command == "run" else _sweep)(args, folder.command_line(arguments))
    except InputError as error:
        print(f"tidemill bench: {error}", file=sys.stderr)
        return INVALID
    except (ServerError, OSError) as error:
        print(f"tidemill bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


@dataclass(slots=True)
class Bench:
    """Runs of a workload on a prepared server, at one rate or several."""

    setup: Setup
    session: Session
    command: str
    warmed: bool = False

    def run(self, path: Path, rate: float | None = None) -> dict[str, Any]:
        """Execute a run, write it to the folder `path`, and return its summary."""
        made = self.setup.workload(rate)
        plan = self.setup.plan(made, self.session)
        args = self.setup.args
        if not self.warmed:
            warm_up(plan, args.num_warmups, self.session.server["models"])
            self.warmed = True
        for note in made.notes:
            print(f"  {note}", file=sys.stderr)
        line = LiveLine(plan.windows.horizon, quiet=args.quiet)
        records = execute(plan, args.workers, line.show)
        line.close()
        summary = folder.summarise(records, plan, self.setup.slo, self.about(assemble.describe(made, plan)))
        _baselines(args, summary)
        folder.write(path, summary, records)
        return summary

    def about(self, workload: dict[str, Any]) -> About:
        """Return the description of the run for its summary."""
        args = self.setup.args
        pairs = tuple((key, value) for key, _, value in (item.partition("=") for item in args.metadata))
        version = self.session.server.get("version")
        named = version.get("device") if isinstance(version, dict) else None
        device = args.device or named or "not stated"
        return About(self.command, self.session.server, device, workload, args.label, pairs)

    def plan(self) -> Plan:
        """Return the plan at the rate of the flags."""
        return self.setup.plan(self.setup.workload(), self.session)


def _bench(args: argparse.Namespace, command: str) -> Bench:
    setup = assemble.setup(args)
    for expression in args.assertions:
        checks.parse(expression)
    made = setup.workload()
    setup.windows(made)
    calibrate = assemble.needs_calibration(made)
    wait = args.ready_check_timeout_sec
    session = prepare(setup.target, args.prompt_mode, setup.ids, wait, calibrate=calibrate, say=_say)
    return Bench(setup, session, command)


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr)


def _run(args: argparse.Namespace, command: str) -> int:
    bench = _bench(args, command)
    path = args.output or folder.default_folder(args.result_dir, bench.setup.workload().name)
    summary = bench.run(path)
    terminal.show(report.run_tables(summary))
    print(f"written: {path / 'summary.json'}")
    return _verdict(summary, args.assertions)


def _verdict(summary: dict[str, Any], assertions: Sequence[str]) -> int:
    failed, unknown = [], []
    for item in assertions:
        try:
            failed += [problem] if (problem := checks.check(summary, item)) is not None else []
        except InputError as error:
            unknown.append(str(error))
    for problem in failed:
        print(f"ASSERTION FAILED {problem}", file=sys.stderr)
    for reason in summary.get("invalid", []):
        print(f"INVALID: {reason}", file=sys.stderr)
    if summary.get("interrupted"):
        print("INTERRUPTED: the report has the measurements up to the interruption", file=sys.stderr)
        return INTERRUPTED
    if unknown:
        raise InputError("; ".join(unknown))
    online = summary.get("online", {})
    if online.get("requests") and not online["outcomes"].get("ok"):
        print("FAILED: no online request succeeded", file=sys.stderr)
        return FAILED
    if not summary.get("valid", True):
        return INVALID
    return FAILED if failed else DONE


def _baselines(args: argparse.Namespace, summary: dict[str, Any]) -> None:
    """Add interference and harvest relative to --online-baseline and --offline-baseline to the summary."""
    online, offline = getattr(args, "online_baseline", None), getattr(args, "offline_baseline", None)
    if online is not None:
        summary["online"] |= interference(summary["online"], folder.read_summary(online)["online"])
    if offline is not None:
        summary["total"]["harvest"] = harvest(summary, folder.read_summary(offline))


def _sweep(args: argparse.Namespace, command: str) -> int:
    if not args.goodput:
        raise InputError("a sweep needs an SLO: --goodput ttft:500 tbt_p99:100")
    rates = _numbers(args.request_rates)
    if not rates or any(not 0 < rate < float("inf") for rate in rates):
        raise InputError("--request-rates needs positive numbers, e.g. 1,2,4")
    bench = _bench(args, command)
    path = args.output or folder.default_folder(args.result_dir, "sweep")
    found = _Points(bench, path)
    try:
        for rate in rates:
            found.measure(rate)
    except KeyboardInterrupt:
        found.interrupted = True
    summary = _sweep_summary(bench, found)
    path.mkdir(parents=True, exist_ok=True)
    (path / "summary.json").write_bytes(folder.to_json(summary))
    terminal.show(report.sweep_tables(summary))
    print(f"written: {path / 'summary.json'}")
    return _verdict(summary, args.assertions)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InputError(f"{text!r} is not a comma-separated list of numbers: {error}") from None


class _Points:
    """The measured points of a sweep, each with a run folder."""

    def __init__(self, bench: Bench, path: Path) -> None:
        self.bench = bench
        self.path = path
        self.points: list[dict[str, Any]] = []
        self.attained: dict[float, float] = {}
        self.interrupted = False

    def measure(self, rate: float) -> float:
        """Run at `rate` and return the attainment. Raise KeyboardInterrupt after an interrupted run is written."""
        print(f"rate {rate:.4g}/s", file=sys.stderr)
        summary = self.bench.run(self.path / f"rate-{rate:.4g}", rate)
        online = summary["online"]
        names = ("slo_attainment", "slo_attainment_interval", "ttft_p99", "tbt_p99", "requests")
        throughput = summary["total"]["throughput"]
        point = {"rate": rate, **{name: online[name] for name in names}, "throughput": throughput}
        if online["requests"]:  # none if the run was interrupted before the first request
            self.points.append(point | {"valid": summary["valid"], "invalid": summary["invalid"]})
        if summary["interrupted"]:
            raise KeyboardInterrupt
        attainment = 0.0 if online["slo_attainment"] is None else float(online["slo_attainment"])
        self.attained[rate] = attainment
        return attainment


def _sweep_summary(bench: Bench, found: _Points) -> dict[str, Any]:
    plan = bench.plan()
    invalid = [f"at {point['rate']:.4g}/s: {reason}" for point in found.points for reason in point["invalid"]]
    levels = {level: effective(found.attained, level / 100) for level in LEVELS}
    return {
        **folder.heading("sweep", plan, bench.about(assemble.describe(bench.setup.workload(), plan))),
        "slo": dict(bench.setup.slo.limits),
        "points": found.points,
        **{f"effective_throughput_{level}": value for level, value in levels.items()},
        "valid": not invalid,
        "invalid": invalid,
        "interrupted": found.interrupted,
    }


def effective(points: dict[float, float], level: float) -> float | None:
    """Return the highest measured rate with attainment >= `level` below the first one that fails, or None."""
    best = None
    for rate in sorted(points):
        if points[rate] < level:
            break
        best = rate
    return best
