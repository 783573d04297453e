"""`tidemill bench run`: measure a server and write a run report.

Exit codes: 0 success; 1 no request succeeded or the server cannot be measured; 2 the run is INVALID or a flag is
invalid; 130 interrupted, with results written.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from loadgen import InputError, ServerError, flags, report
from loadgen.metrics import Slo
from loadgen.report import LiveLine
from loadgen.runner import execute, prepare

DONE, FAILED, INVALID, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. Errors are printed in one line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = flags.parser().parse_args(arguments)
    try:
        return _run(args, report.command_line(arguments))
    except InputError as error:
        print(f"tidemill bench: {error}", file=sys.stderr)
        return INVALID
    except (ServerError, OSError) as error:
        print(f"tidemill bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(args: argparse.Namespace, command: str) -> int:
    made, slo = flags.workload(args), Slo.parse(args.goodput)
    asked, wait = flags.plan(args, made), args.ready_check_timeout_sec
    plan, server = prepare(asked, args.prompt_mode, wait, args.num_warmups, _say)
    for note in made.notes:
        _say(note)
    line = LiveLine(plan.windows.horizon, quiet=args.quiet)
    records = execute(plan, line.show)
    line.close()
    version = server["version"] if isinstance(server["version"], dict) else {}
    about = {
        "command": command,
        "label": args.label,
        "metadata": {key: value for key, _, value in (item.partition("=") for item in args.metadata)},
        "server": server,
        "device": args.device or version.get("device") or "not stated",
        "workload": flags.describe(made, plan),
    }
    summary = report.summarise(records, plan, slo, about)
    path = args.output or report.default_folder(args.result_dir, made.name)
    report.write(path, summary, records)
    report.show(report.tables(summary))
    print(f"written: {path / 'summary.json'}")
    return _verdict(summary)


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr)


def _verdict(summary: dict[str, Any]) -> int:
    """Print the reasons why the run failed, is invalid or incomplete, and return the exit code."""
    for reason in summary["invalid"]:
        print(f"INVALID: {reason}", file=sys.stderr)
    if summary["interrupted"]:
        print("INTERRUPTED: the report has the measurements up to the interruption", file=sys.stderr)
        return INTERRUPTED
    online = summary["online"]
    if online["requests"] and not online["outcomes"].get("ok"):
        print("FAILED: no online request succeeded", file=sys.stderr)
        return FAILED
    return DONE if summary["valid"] else INVALID
