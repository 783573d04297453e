"""`python -m benchmarks experiments NAME`: an experiment of a paper on the virtual clock, over seeds.

Needs neither a GPU nor torch. Times in seconds, throughput in tokens/s.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.experiments import apt, hybridserve, hygen, kunserve, larry, orderings, parts, sal
from benchmarks.experiments.replay import side_by_side
from benchmarks.experiments.table import Result, render, write_table
from engine.errors import TidemillError
from loadgen import InputError


class Experiment(NamedTuple):
    config: Any
    """The checked-in configuration."""
    short: Any
    """The same with short windows."""
    run_seed: Callable[..., list[Result]]
    """All rows of one seed."""
    summary: Callable[[Sequence[Result]], tuple[list[str], list[list[Any]]]]
    figures: Callable[[Sequence[Result]], dict[str, str]]


def _of(module: ModuleType, config: Any, short: Any) -> Experiment:
    return Experiment(config, short, module.run_seed, module.summary, getattr(module, "figures", lambda _: {}))


EXPERIMENTS = {
    "apt-serve": _of(apt, apt.CONFIG, apt.SHORT),
    "apt-serve-llama": _of(apt, apt.LLAMAS, apt.LLAMAS_SHORT),
    "apt-serve-chat": _of(apt, apt.CHATS, apt.CHATS_SHORT),
    "hybridserve": _of(hybridserve, hybridserve.CONFIG, hybridserve.SHORT),
    "hygen": _of(hygen, hygen.CONFIG, hygen.SHORT),
    "hygen-parts": _of(parts, parts.CONFIG, parts.SHORT),
    "kunserve": _of(kunserve, kunserve.CONFIG, kunserve.SHORT),
    "kunserve-bursts": _of(kunserve, kunserve.BURSTS, kunserve.BURSTS_SHORT),
    "larry": _of(larry, larry.CONFIG, larry.SHORT),
    "sal": _of(sal, sal.CONFIG, sal.SHORT),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    made = argparse.ArgumentParser(prog="python -m benchmarks experiments", description=__doc__, allow_abbrev=False)
    made.add_argument("name", choices=sorted(EXPERIMENTS), metavar="NAME", help=", ".join(sorted(EXPERIMENTS)))
    made.add_argument("--traces", dest="data_dir", type=Path, metavar="DIR", help="folder of the public traces")
    made.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    made.add_argument("--seeds", type=int, default=1, help="number of seeds (default 1)")
    made.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes for replays")
    sizes = made.add_mutually_exclusive_group()
    sizes.add_argument("--short", action="store_true", help="short windows: a look, not a result")
    sizes.add_argument(
        "--quick", action="store_true", help="the paper's orderings in seconds; exit code 1 if one fails"
    )
    made.add_argument("--window", type=float, help="measured seconds of a trace")
    made.add_argument("--out", type=Path, help="folder for table.json and figures")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (1: an ordering of `--quick` fails, 2: the arguments are wrong)."""
    arguments = parser().parse_args(argv)
    try:
        return 0 if all(each.holds for each in _run(arguments)) else 1
    except (InputError, TidemillError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> list[orderings.Ordering]:
    experiment = EXPERIMENTS[arguments.name]
    config = experiment.short if arguments.short else experiment.config
    if arguments.quick:
        quick = orderings.QUICK[arguments.name]
        config, arguments.seeds = quick.config, max(arguments.seeds, quick.seeds)
        if arguments.data_dir is not None and quick.traced is not None:
            config = replace(config, window=quick.traced)
    if arguments.data_dir is not None and not arguments.data_dir.is_dir():
        raise InputError(f"{arguments.data_dir} is not a folder")
    if arguments.window is not None:
        if not hasattr(config, "window") or not 0.0 < arguments.window < math.inf:
            raise InputError("--window takes seconds, for experiments on a trace")
        config = replace(config, window=arguments.window)
    if arguments.seeds < 1 or arguments.workers < 1:
        raise InputError("--seeds and --workers must be at least 1")
    began = time.monotonic()
    results: list[Result] = []
    with side_by_side(arguments.workers) as each:
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            results += experiment.run_seed(config, arguments.data_dir, seed, each, _say)
            if arguments.out is not None:  # after every seed: an interruption keeps the finished rows
                write_table(results, arguments.out, experiment.figures(results))
                _say(f"table.json and figures in {arguments.out}")
    print(render(*experiment.summary(results)))
    found = orderings.QUICK[arguments.name].orderings(results) if arguments.quick else []
    for claim in found:
        print(f"{'yes' if claim.holds else 'NO ':3}  {claim.claim}: {claim.low:.4g}, {claim.high:.4g}", flush=True)
    _say(f"{time.monotonic() - began:.0f} s")
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
