"""The headline on one device: chats kept beside offline tokens/s, by the planner, by static budgets, and offline alone.

A static budget is the policy of vLLM with priorities and a tuned `max_num_batched_tokens`, on the same engine and its
kernels: chats come first, and offline work fills each step up to so many tokens, whatever the step takes. A promise
that no step can break makes our planner do so.
"""

import asyncio
import importlib
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.setup import Setup
from benchmarks.gpu.table import ALONE, RATE_UNIT, Row, failure

RATE, TTFT, TBT = 8, 0.5, 0.05
"""Chats a second, and their limits in seconds."""
PROMISE = (f"--slo=ttft_p99={TTFT * 1e3:g}ms,tbt_p99={TBT * 1e3:g}ms",)
UNBOUNDED = ("--slo=ttft_p99=300s,tbt_p99=10s", "--max-queue-time=none")


def _static(tokens: int, setup: Setup) -> Iterator[Row]:
    flags = (*UNBOUNDED, f"--max-num-batched-tokens={tokens}", "--profile-seconds=0")  # no prediction matters
    return _arms(setup, flags, {f"static budget of {tokens:,} tokens": True})


def _arms(setup: Setup, flags: tuple[str, ...], arms: Mapping[str, bool]) -> Iterator[Row]:
    """Run arms (name -> whether there are chats) on one server, after seconds of the same load that do not count."""
    live, loads = (importlib.import_module(f"benchmarks.{name}") for name in ("live", "loads"))
    rate, seconds, learning = setup.size(RATE, 2), setup.size(20, 8), setup.size(4, 2)
    load = {"outstanding": setup.size(256, 4), "job_rate": setup.size(60_000, 2_000)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = {"vocab_size": setup.size(128_256, 2_560), "bos_token_id": 0, "eos_token_id": 1}
        live.make_model_folder(folder, setup.config("8B") | ids)
        more = ("--no-self-test", f"--state-dir={name}/state", *flags)  # part 1 of the plan tests kernels
        try:
            with live.server(folder, 0, *more) as url:
                warm = [index / rate for index in range(rate * learning)]
                asyncio.run(loads.run_arm(url, warm, learning, "flex", 0, **load))
                for title, chats in arms.items():
                    arrivals = loads.poisson(loads.processes.constant_rate(rate), seconds, 1) if chats else []
                    yield _row(title, asyncio.run(loads.run_arm(url, arrivals, seconds, "flex", 1, **load)), loads)
        except SystemExit as ended:  # of a server that does not start
            yield failure(", ".join(arms), str(ended))


def _row(title: str, run: Any, loads: Any) -> Row:
    """Return the offline tokens/s of a run, prompts counted, with the chats in the note."""
    chats = loads.judged([run])
    kept = sum(map(loads.slo_of(TTFT, TBT).good, chats))
    percentile = importlib.import_module("benchmarks.figures").percentile
    first = percentile([each.ttft for each in chats if each.ttft is not None], 99) * 1e3
    gap = percentile([gap for each in chats for gap in each.gaps()], 99) * 1e3
    note = f"{kept} of {len(chats)} chats kept, TTFT P99 {first:.0f} ms, TBT P99 {gap:.0f} ms" if chats else "no chats"
    return Row(title, RATE_UNIT, run.offline_rate, note=f"{note}; {run.offline_lines:.1f} lines/s")


def check_headline(setup: Setup) -> Iterator[Row]:
    return _arms(setup, (*PROMISE, f"--profile-seconds={setup.size(10, 1)}"), {"tidemill": True, ALONE: False})


check_static_128, check_static_256, check_static_512, check_static_2048 = (
    partial(_static, tokens) for tokens in (128, 256, 512, 2048)
)
