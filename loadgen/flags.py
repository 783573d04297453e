"""Flags of `tidemill bench run`, named as in `vllm bench serve` where that has the same flag."""

import argparse
from pathlib import Path

from loadgen.formats import READERS
from loadgen.workloads import WORKLOADS


def parser() -> argparse.ArgumentParser:
    """Return the parser of `tidemill bench`."""
    top = argparse.ArgumentParser(
        prog="tidemill bench",
        description="Measure an OpenAI-compatible server under online requests and batch jobs.",
        epilog="Exit codes: 0 success, 1 error, 2 INVALID run or invalid flags, 130 Ctrl-C.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="run")
    run = commands.add_parser("run", help="measure one run", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for add in (_server, _workload, _online, _offline, _windows, _output):
        add(run)
    return top


def _server(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("server")
    group.add_argument("--base-url", default=None, help="URL of the server without /v1")
    group.add_argument("--host", default="127.0.0.1", help="host of the server if --base-url is not set")
    group.add_argument("--port", type=int, default=8000, help="port of the server if --base-url is not set")
    group.add_argument("--endpoint", default="/v1/completions", help="/v1/completions or /v1/chat/completions")
    group.add_argument("--model", default="", help="name of the model; default: the first one of the server")
    group.add_argument("--api-key", default=None, help="API key; default: $OPENAI_API_KEY")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="additional header")
    group.add_argument("--extra-body", default="", metavar="JSON", help="fields added to every request body")
    group.add_argument("--request-timeout", type=float, default=600.0, help="time limit of a request, seconds")
    group.add_argument("--ready-check-timeout-sec", type=float, default=30.0, help="wait for the server, seconds")
    group.add_argument("--num-warmups", type=int, default=2, help="requests sent before the run starts")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="force the requested output length"
    )
    group.add_argument(
        "--continuous-usage",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="request usage in each chunk, for exact token counts per chunk",
    )
    group.add_argument("--device", default=None, help="device of the server, for the report")


def _workload(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("workload")
    add_workload(group)
    group.add_argument("--max-model-len", type=int, default=None, help="context that requests are cut to, tokens")
    group.add_argument(
        "--prompt-mode",
        default="auto",
        choices=["auto", "ids", "text"],
        help="form of prompts; auto: ids for completions",
    )
    group.add_argument("--token-id-range", default="16:250", metavar="LOW:HIGH", help="token ids of generated prompts")
    group.add_argument(
        "--salt", type=int, default=None, help="seed of prompt text; default: random, to avoid cached prefixes"
    )


def add_workload(group: argparse._ArgumentGroup, *more: str, default: str = "random") -> None:
    """Add the flags of the workload. `more` has further names of --data-dir."""
    group.add_argument(
        "--workload", default=None, choices=list(WORKLOADS), help=f"workload; default: {default}, or trace with --trace"
    )
    group.add_argument("--data-dir", *more, type=Path, default=None, help="folder with the public data sets")
    group.add_argument("--trace", type=Path, default=None, help="trace or prompt file to replay")
    group.add_argument(
        "--trace-format", default=None, choices=list(READERS), help="format of the trace; default: detected"
    )
    group.add_argument("--trace-ops", default="", help="window=0:600,thin=0.5,stretch=2,jitter=1,scale=0.5:1")
    group.add_argument(
        "--rate-by", default="thin", choices=["thin", "stretch"], help="adjustment of a trace to --request-rate"
    )
    group.add_argument("--random-input-len", type=int, default=1024, help="prompt tokens of `random`")
    group.add_argument("--random-output-len", type=int, default=128, help="output tokens of `random`")
    group.add_argument("--random-prefix-len", type=int, default=0, help="shared prefix tokens of `random`")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="relative spread of the lengths")
    group.add_argument("--length-scale", type=float, default=1.0, help="factor of all lengths")
    group.add_argument("--seed", type=int, default=0, help="seed of arrivals, lengths and text")


def _online(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("online requests")
    add_arrivals(group)
    group.add_argument("--max-concurrency", type=int, default=None, help="maximum open online requests")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="SLO, ms, e.g. ttft:500 tbt_p99:100 (also tpot, e2e)",
    )
    group.add_argument("--workers", type=int, default=1, help="client processes")


def add_arrivals(group: argparse._ArgumentGroup, *more: str) -> None:
    """Add the flags of the arrivals. `more` has further names of --request-rate."""
    group.add_argument("--num-prompts", type=int, default=None, help="number of online requests")
    group.add_argument("--request-rate", *more, type=float, default=None, help="requests/s; inf: closed loop")
    group.add_argument("--duration", type=float, default=None, help="length of the schedule, seconds")
    group.add_argument(
        "--arrival", default=None, choices=["constant", "poisson", "gamma"], help="arrival process; default: poisson"
    )
    group.add_argument("--cv", type=float, default=None, help="gamma: coefficient of variation of the gaps; default: 1")
    group.add_argument("--burstiness", type=float, default=None, help="gamma: shape (1/cv²), as in vLLM")
    group.add_argument(
        "--rate-curve",
        default=None,
        help="rate over time: steps:90@15,90@1 | sine:mean=,amplitude=,period= | burst:... | envelope:FILE",
    )


def _offline(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("offline work")
    group.add_argument("--only", default=None, choices=["online", "offline"], help="run this class only")
    group.add_argument(
        "--offline-mode", default="batch", choices=["batch", "flex"], help="batch jobs, or requests with a service tier"
    )
    add_lines(group)
    group.add_argument("--offline-concurrency", type=int, default=64, help="flex: number of open requests")
    group.add_argument("--offline-service-tier", default="flex", help="flex: service tier of requests; none: unset")
    group.add_argument("--poll-interval", type=float, default=1.0, help="batch: interval of polls, seconds")
    group.add_argument(
        "--wait-offline",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="continue the run until the jobs are done",
    )


def add_lines(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the batch jobs."""
    group.add_argument("--offline-lines", type=int, default=None, help="number of lines per job")
    group.add_argument("--offline-trace", type=Path, default=None, help="lengths or prompts of the offline lines")
    group.add_argument("--completion-window", default="24h", help="batch: completion window")


def _windows(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("windows")
    group.add_argument("--warmup", type=float, default=0.0, help="unmeasured start of the schedule, seconds")
    group.add_argument("--cooldown", type=float, default=0.0, help="unmeasured end of the schedule, seconds")
    group.add_argument("--drain", type=float, default=60.0, help="wait for answers after the schedule, seconds")


def _output(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("output")
    group.add_argument("--result-dir", type=Path, default=Path("bench-results"), help="parent folder of run folders")
    group.add_argument("--output", type=Path, default=None, help="run folder; default: a new one in --result-dir")
    group.add_argument("--label", default="", help="label in the summary")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="metadata in the summary")
    group.add_argument("--disable-tqdm", "--quiet", dest="quiet", action="store_true", help="no progress line")
