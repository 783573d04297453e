"""Flags of `tidemill bench run`, named as in `vllm bench serve` where that has the same flag; a workload and a plan
from these flags. Reads files, but sends no requests."""

import argparse
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from loadgen import InputError, ServerError, workloads
from loadgen.arrivals import Process, parse_curve
from loadgen.plan import Plan, Target, TokenIds, Windows, window_seconds
from loadgen.traces import READERS, read
from loadgen.workloads import WORKLOADS, Options, Workload


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
    group.add_argument("--base-url", help="URL of the server without /v1")
    group.add_argument("--host", default="127.0.0.1", help="host of the server if --base-url is not set")
    group.add_argument("--port", type=int, default=8000, help="port of the server if --base-url is not set")
    group.add_argument("--endpoint", default="/v1/completions", help="/v1/completions or /v1/chat/completions")
    group.add_argument("--model", default="", help="name of the model; default: the first one of the server")
    group.add_argument("--api-key", help="API key; default: $OPENAI_API_KEY")
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
    group.add_argument("--device", help="device of the server, for the report")


def _workload(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("workload")
    add_workload(group)
    group.add_argument("--max-model-len", type=int, help="context that requests are cut to, tokens")
    group.add_argument(
        "--prompt-mode",
        default="auto",
        choices=["auto", "ids", "text"],
        help="form of prompts; auto: ids for completions",
    )
    group.add_argument("--token-id-range", default="16:250", metavar="LOW:HIGH", help="token ids of generated prompts")
    group.add_argument("--salt", type=int, help="seed of prompt text; default: random, to avoid cached prefixes")


def add_workload(group: argparse._ArgumentGroup, *more: str, default: str = "random") -> None:
    """Add the flags of the workload. `more` has further names of --data-dir."""
    group.add_argument(
        "--workload", choices=list(WORKLOADS), help=f"workload; default: {default}, or trace with --trace"
    )
    group.add_argument("--data-dir", *more, type=Path, help="folder with the public data sets")
    group.add_argument("--trace", type=Path, help="trace or prompt file to replay")
    group.add_argument("--trace-format", choices=list(READERS), help="format of the trace; default: detected")
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
    group.add_argument("--max-concurrency", type=int, help="maximum open online requests")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="SLO, ms, e.g. ttft:500 tbt_p99:100 (also tpot, e2e)",
    )


def add_arrivals(group: argparse._ArgumentGroup, *more: str) -> None:
    """Add the flags of the arrivals. `more` has further names of --request-rate."""
    group.add_argument("--num-prompts", type=int, help="number of online requests")
    group.add_argument("--request-rate", *more, type=float, help="requests/s; inf: closed loop")
    group.add_argument("--duration", type=float, help="length of the schedule, seconds")
    group.add_argument("--arrival", choices=["constant", "poisson", "gamma"], help="arrival process; default: poisson")
    group.add_argument("--cv", type=float, help="gamma: coefficient of variation of the gaps; default: 1")
    group.add_argument("--burstiness", type=float, help="gamma: shape (1/cv²), as in vLLM")
    group.add_argument(
        "--rate-curve", help="rate over time: steps:90@15,90@1 | sine:mean=,amplitude=,period= | burst:..."
    )


def _offline(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("offline work")
    group.add_argument("--only", choices=["online", "offline"], help="run this class only")
    group.add_argument(
        "--offline-mode", default="batch", choices=["batch", "flex"], help="batch jobs, or requests with a service tier"
    )
    add_lines(group)
    group.add_argument("--offline-concurrency", type=int, default=64, help="flex: number of open requests")
    group.add_argument("--offline-service-tier", default="flex", help="flex: service tier of requests; none: unset")
    group.add_argument("--poll-interval", type=float, default=1.0, help="batch: interval of polls, seconds")
    group.add_argument(
        "--wait-offline", action=argparse.BooleanOptionalAction, help="continue the run until the jobs are done"
    )


def add_lines(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the batch jobs."""
    group.add_argument("--offline-lines", type=int, help="number of lines per job")
    group.add_argument("--offline-trace", type=Path, help="lengths or prompts of the offline lines")
    group.add_argument("--completion-window", default="24h", help="batch: completion window")


def _windows(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("windows")
    group.add_argument("--warmup", type=float, default=0.0, help="unmeasured start of the schedule, seconds")
    group.add_argument("--cooldown", type=float, default=0.0, help="unmeasured end of the schedule, seconds")
    group.add_argument("--drain", type=float, default=60.0, help="wait for answers after the schedule, seconds")


def _output(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("output")
    group.add_argument("--result-dir", type=Path, default=Path("bench-results"), help="parent folder of run folders")
    group.add_argument("--output", type=Path, help="run folder; default: a new one in --result-dir")
    group.add_argument("--label", default="", help="label in the summary")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="metadata in the summary")
    group.add_argument("--disable-tqdm", "--quiet", dest="quiet", action="store_true", help="no progress line")


def workload(args: argparse.Namespace) -> Workload:
    """Check the flags and build the workload. Raise InputError for invalid values."""
    _check(args)
    chosen = options(args)
    made = workloads.clipped(workloads.build(name_of(args), chosen), args.length_scale, args.max_model_len)
    if args.only == "online":
        made = replace(made, jobs=())
    if args.only == "offline":
        made = replace(made, online=None, closed_loop=False, horizon=chosen.duration)
    if made.online is None and not made.jobs:
        raise InputError("the workload has no requests of this class; set --offline-lines or leave out --only")
    return made


def plan(args: argparse.Namespace, made: Workload) -> Plan:
    """Return the plan of a run, before the server is asked for its model. Raise InputError for invalid values."""
    low, _, high = args.token_id_range.partition(":")
    if not (low.isdigit() and high.isdigit()):
        raise InputError(f"--token-id-range must be LOW:HIGH, not {args.token_id_range}")
    return Plan(
        target=target(args),
        online=made.online,
        closed_loop=made.closed_loop,
        max_concurrency=args.max_concurrency,
        jobs=tuple(replace(job, completion_window=args.completion_window) for job in made.jobs),
        offline_mode=args.offline_mode if made.jobs else "none",
        offline_concurrency=args.offline_concurrency,
        offline_tier=None if args.offline_service_tier == "none" else args.offline_service_tier,
        wait_offline=made.wait_offline if args.wait_offline is None else args.wait_offline,
        poll_every=args.poll_interval,
        windows=Windows(args.warmup, args.cooldown, args.drain, made.horizon),
        source=TokenIds(int(low), int(high)),
        seed=args.seed,
        salt=secrets.randbits(31) if args.salt is None else args.salt,
        ignore_eos=args.ignore_eos,
        continuous_usage=args.continuous_usage,
        extra_body=_extra_body(args.extra_body),
    )


def _check(args: argparse.Namespace) -> None:
    check_workload(args)
    _check_numbers(args, ("max_concurrency", "offline_concurrency", "poll_interval", "request_timeout"))
    _check_numbers(args, ("warmup", "cooldown", "drain", "num_warmups"), zero=True)
    if args.max_model_len is not None and args.max_model_len < 2:
        raise InputError("--max-model-len must be at least 2, a prompt and an output token")


def check_workload(args: argparse.Namespace) -> None:
    """Check the flags of the workload. Raise InputError for invalid values."""
    _check_numbers(args, ("num_prompts", "duration", "request_rate", "length_scale"))
    _check_numbers(args, ("random_input_len", "random_output_len"))
    _check_numbers(args, ("random_prefix_len", "offline_lines"), zero=True)
    if not 0 <= args.random_range_ratio < 1:
        raise InputError("--random-range-ratio must be in [0, 1)")
    try:
        window_seconds(args.completion_window)
    except ServerError as error:
        raise InputError(str(error)) from None


def _check_numbers(args: argparse.Namespace, names: Sequence[str], *, zero: bool = False) -> None:
    """Raise InputError unless the given numbers are positive or, with `zero`, not negative."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not (value >= 0 if zero else value > 0):
            raise InputError(f"--{name.replace('_', '-')} {'must not be negative' if zero else 'must be positive'}")


def target(args: argparse.Namespace) -> Target:
    """Return the server under test."""
    pairs = [header.partition("=") for header in args.header]
    if any(not equals for _, equals, _ in pairs):
        raise InputError("--header must be NAME=VALUE")
    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise InputError(f"--base-url {base} must begin with http:// or https://")
    return Target(
        base_url=base.removesuffix("/v1"),
        endpoint="/" + args.endpoint.lstrip("/"),
        model=args.model,
        api_key=os.environ.get("OPENAI_API_KEY", "") if args.api_key is None else args.api_key,
        headers=tuple((name, value) for name, _, value in pairs),
        timeout=args.request_timeout,
    )


def options(args: argparse.Namespace) -> Options:
    process, cv = _process(args)
    curve = parse_curve(args.rate_curve) if args.rate_curve else None
    if curve is not None and args.request_rate is not None and math.isfinite(args.request_rate):
        curve = curve.scaled(args.request_rate)
    return Options(
        rate=args.request_rate,
        duration=args.duration,
        count=args.num_prompts,
        process=process,
        cv=cv,
        curve=curve,
        seed=args.seed,
        data=args.data_dir,
        trace=read(args.trace, args.trace_format) if args.trace else None,
        trace_ops=args.trace_ops,
        rate_by=args.rate_by,
        input_tokens=args.random_input_len,
        output_tokens=args.random_output_len,
        prefix_tokens=args.random_prefix_len,
        range_ratio=args.random_range_ratio,
        offline_lines=args.offline_lines,
        offline_trace=read(args.offline_trace) if args.offline_trace else None,
    )


def _process(args: argparse.Namespace) -> tuple[Process, float]:
    if args.cv is not None and args.burstiness is not None:
        raise InputError("--cv and --burstiness set the same value; remove one")
    cv = args.cv if args.cv is not None else 1.0
    if args.burstiness is not None:
        if not args.burstiness > 0:
            raise InputError("--burstiness must be positive")
        cv = 1.0 / math.sqrt(args.burstiness)
    if not cv > 0:
        raise InputError("--cv must be positive")
    process: Process = args.arrival or ("poisson" if args.cv is None and args.burstiness is None else "gamma")
    return process, cv


def _extra_body(text: str) -> dict[str, Any]:
    try:
        loaded = orjson.loads(text or "{}")
    except orjson.JSONDecodeError as error:
        raise InputError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise InputError("--extra-body must be a JSON object")
    return loaded


def name_of(args: argparse.Namespace, default: str = "random") -> str:
    if args.workload is not None:
        return str(args.workload)
    return "trace" if args.trace else default


def describe(made: Workload, plan: Plan) -> dict[str, Any]:
    """Return the `workload` section of a summary."""
    online = made.online
    return {
        "name": made.name,
        "notes": list(made.notes),
        "online_requests": len(online) if online else 0,
        "online_input_tokens": int(online.input_tokens.sum()) if online else 0,
        "online_output_tokens": int(online.output_tokens.sum()) if online else 0,
        "closed_loop": made.closed_loop,
        "jobs": [len(job.lines) for job in made.jobs],
        "offline_mode": plan.offline_mode,
        "offline_input_tokens": int(np.sum([job.lines.input_tokens.sum() for job in made.jobs])),
        "offline_output_tokens": int(np.sum([job.lines.output_tokens.sum() for job in made.jobs])),
        "windows": {"warmup": plan.windows.warmup, "cooldown": plan.windows.cooldown, "drain": plan.windows.drain},
        "horizon": plan.windows.horizon,
    }
