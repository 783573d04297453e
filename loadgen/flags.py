"""The flags of `tidemill bench run|sweep|compare|trace`; names as in `vllm bench serve` where they exist."""

import argparse
from pathlib import Path

from loadgen.formats import READERS
from loadgen.workloads import WORKLOADS


def parser() -> argparse.ArgumentParser:
    """The parser of `tidemill bench`."""
    top = argparse.ArgumentParser(
        prog="tidemill bench",
        description="Measure any OpenAI-style server: online requests and batch jobs side by side.",
        epilog="Exit codes: 0 done, 1 an assertion failed or an error, 2 INVALID run or wrong flags, 130 Ctrl-C.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="run|sweep|compare|trace")
    run = commands.add_parser("run", help="one run", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sweep = commands.add_parser(
        "sweep",
        help="runs at several rates, or a search for the knee",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for command in (run, sweep):
        _server(command)
        _workload(command)
        _online(command)
        _offline(command)
        _windows(command)
        _output(command)
    _baselines(run)
    _sweep(sweep)
    _compare(commands.add_parser("compare", help="two runs (or folders of runs, one a seed), with intervals"))
    _trace(commands.add_parser("trace", help="show, change and convert a trace"))
    return top


def _server(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("server")
    group.add_argument("--base-url", default=None, help="address of the server, before /v1")
    group.add_argument("--host", default="127.0.0.1", help="used when --base-url is not given")
    group.add_argument("--port", type=int, default=8000, help="used when --base-url is not given")
    group.add_argument("--endpoint", default="/v1/completions", help="/v1/completions or /v1/chat/completions")
    group.add_argument("--model", default="", help="default: the first model the server lists")
    group.add_argument("--api-key", default=None, help="default: the variable OPENAI_API_KEY")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="an extra header")
    group.add_argument("--extra-body", default="", metavar="JSON", help="fields added to every request body")
    group.add_argument("--request-timeout", type=float, default=600.0, help="seconds for one request")
    group.add_argument("--ready-check-timeout-sec", type=float, default=30.0, help="seconds to wait for the server")
    group.add_argument("--num-warmups", type=int, default=2, help="requests sent before the clock starts")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="force the output length"
    )
    group.add_argument(
        "--continuous-usage",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for usage in each chunk (exact tokens per chunk)",
    )
    group.add_argument("--device", default=None, help="what the server runs on, for the report")


def _workload(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("workload")
    add_workload(group)
    group.add_argument("--max-model-len", type=int, default=None, help="cut requests to fit this context")
    group.add_argument(
        "--prompt-mode", default="auto", choices=["auto", "ids", "text"], help="auto: ids on completions"
    )
    group.add_argument("--token-id-range", default="16:250", metavar="LOW:HIGH", help="token ids of made-up prompts")
    group.add_argument(
        "--salt", type=int, default=None, help="default: fresh, so that no prefix of an old run is cached"
    )


def add_workload(group: argparse._ArgumentGroup, *more: str, default: str = "random") -> None:
    """Add the workload flags of HTTP and simulated runs. `more`: further names of --data-dir."""
    group.add_argument(
        "--workload", default=None, choices=list(WORKLOADS), help=f"default: {default}, or trace with --trace"
    )
    group.add_argument("--data-dir", *more, type=Path, default=None, help="folder of the public data sets")
    group.add_argument("--trace", type=Path, default=None, help="a trace or prompt file to replay")
    group.add_argument("--trace-format", default=None, choices=list(READERS), help="default: recognised")
    group.add_argument("--trace-ops", default="", help="window=0:600,thin=0.5,stretch=2,repeat=3,jitter=1,scale=0.5:1")
    group.add_argument(
        "--rate-by", default="thin", choices=["thin", "stretch"], help="how a trace meets --request-rate"
    )
    group.add_argument("--random-input-len", type=int, default=1024, help="prompt tokens of `random`")
    group.add_argument("--random-output-len", type=int, default=128, help="output tokens of `random`")
    group.add_argument("--random-prefix-len", type=int, default=0, help="shared prefix tokens of `random`")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths spread by this share")
    group.add_argument("--length-scale", type=float, default=1.0, help="multiplies all lengths")
    group.add_argument("--seed", type=int, default=0, help="arrivals, lengths and text each have a stream of it")


def _online(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("online requests")
    add_arrivals(group)
    group.add_argument("--max-concurrency", type=int, default=None, help="most open online requests")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="the SLO: ttft:500 tbt_p99:100 (tpot, e2e)"
    )
    group.add_argument("--workers", type=int, default=1, help="client processes")


def add_arrivals(group: argparse._ArgumentGroup, *more: str) -> None:
    """When online requests come. `more`: further names of --request-rate."""
    group.add_argument("--num-prompts", type=int, default=None, help="number of online requests")
    group.add_argument(
        "--request-rate", *more, type=float, default=None, help="requests/s; inf: as fast as slots are free"
    )
    group.add_argument("--duration", type=float, default=None, help="seconds of the schedule")
    group.add_argument("--arrival", default=None, choices=["constant", "poisson", "gamma"], help="default: poisson")
    group.add_argument("--cv", type=float, default=None, help="gamma: coefficient of variation of the gaps")
    group.add_argument("--burstiness", type=float, default=None, help="gamma: its shape (1/cv²), as in vLLM")
    group.add_argument(
        "--rate-curve",
        default=None,
        help="steps:90@15,90@1 | sine:mean=,amplitude=,period= | burst:... | envelope:FILE",
    )


def _offline(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("offline work")
    group.add_argument("--only", default=None, choices=["online", "offline"], help="leave the other class out")
    group.add_argument(
        "--offline-mode", default="batch", choices=["batch", "flex"], help="batch jobs, or requests of a service tier"
    )
    add_lines(group)
    group.add_argument("--offline-concurrency", type=int, default=64, help="flex: requests kept open")
    group.add_argument("--offline-service-tier", default="flex", help="flex: the tier sent; none: no such field")
    group.add_argument("--poll-interval", type=float, default=1.0, help="batch: seconds between polls")
    group.add_argument(
        "--wait-offline", action=argparse.BooleanOptionalAction, default=None, help="run until the jobs are done"
    )


def add_lines(group: argparse._ArgumentGroup) -> None:
    """What the jobs are."""
    group.add_argument("--offline-lines", type=int, default=None, help="lines of each job")
    group.add_argument("--offline-trace", type=Path, default=None, help="lengths or prompts of the offline lines")
    group.add_argument("--completion-window", default="24h", help="batch: the window asked for")


def _windows(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("windows")
    group.add_argument("--warmup", type=float, default=0.0, help="seconds of the schedule that are not measured")
    group.add_argument("--cooldown", type=float, default=0.0, help="seconds at the schedule's end, not measured")
    group.add_argument("--drain", type=float, default=60.0, help="seconds to wait for answers after the schedule")


def _output(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("output")
    group.add_argument("--result-dir", type=Path, default=Path("bench-results"), help="parent of new run folders")
    group.add_argument("--output", type=Path, default=None, help="the run folder itself")
    group.add_argument("--label", default="", help="kept in the summary")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="kept in the summary")
    group.add_argument("--assert", dest="assertions", action="append", default=[], metavar="NAME>=NUMBER")
    group.add_argument("--disable-tqdm", "--quiet", dest="quiet", action="store_true", help="no progress line")


def _baselines(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("baselines")
    group.add_argument("--online-baseline", type=Path, default=None, help="an online-only run: adds interference")
    group.add_argument("--offline-baseline", type=Path, default=None, help="an offline-only run: adds harvest")


def _sweep(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sweep")
    group.add_argument("--request-rates", default=None, metavar="R,R,...", help="the rates to run at")
    group.add_argument("--find-knee", action="store_true", help="bracket and bisect to 2 %% (from --request-rate)")
    group.add_argument("--levels", default="90", metavar="60,90,99", help="attainment levels (%%) to search for")


def _compare(command: argparse.ArgumentParser) -> None:
    command.add_argument("first", type=Path, metavar="A")
    command.add_argument("second", type=Path, metavar="B")
    command.add_argument("--rounds", type=int, default=1000, help="bootstrap rounds")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _trace(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path)
    command.add_argument("--trace-format", default=None, choices=list(READERS))
    command.add_argument("--trace-ops", default="", help="window=, thin=, stretch=, repeat=, jitter=, scale=")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--output", type=Path, default=None, help="write .csv or .jsonl (or .gz of each)")
