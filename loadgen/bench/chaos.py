"""A server of the demo model under streams and a batch while its engine process is killed, hangs and fails: what its
clients notice. Exits 1 when a promise is broken. `make chaos`.

Greedy answers are compared with those that the same server gave undisturbed. A pause counts without the time in which
there was no engine: from a fault until /ready is 200 again.
"""

import argparse
import asyncio
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from engine.process.sabotage import VARIABLE
from loadgen.bench import chaos_load as load
from loadgen.bench.chaos_faults import Saboteur
from loadgen.bench.machine import describe

FLAGS = ("--slo", "ttft_p99=120s", "--max-queue-time", "none", "--dtype", "float32", "--profile-seconds", "5")
POLICY = ("--max-engine-deaths", "1000000", "--max-restart-delay", "0")
LAG = "tidemill_loop_lag_seconds_bucket"
NOTICED = 0.3
"""Seconds: a shorter gap in a stream is no pause."""
WARM_SHARE = 0.2
"""Of the run, before memory is compared."""
DRAIN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Promise:
    """`kept`: None for what is only shown. `timing`: it depends on how busy the machine is."""

    name: str
    value: str
    limit: str = ""
    kept: bool | None = None
    timing: bool = False


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """`tidemill serve` of the demo model with faults on demand; its URL and number."""
    (folder / "chaos").mkdir()
    log = folder / "log"
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--state-dir", str(folder / "state")]
    command += ["--profile-dir", str(folder), *FLAGS, *POLICY]
    environment = {**os.environ, VARIABLE: str(folder / "chaos")}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield _address(process, log), process.pid
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if "listening on http://" in line:
                return line.rsplit(" ", 1)[1].rstrip("/")
        time.sleep(0.1)
    raise SystemExit(log.read_text()[-4000:])


def resident(pid: int) -> int:
    """Bytes of the server process itself."""
    (row,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmRSS")]
    return 1024 * int(row.split()[1])


async def watch_memory(pid: int, seen: list[int]) -> None:
    """Once a second, until cancelled."""
    while True:
        seen.append(await asyncio.to_thread(resident, pid))
        await asyncio.sleep(1.0)


async def read_lag(session: aiohttp.ClientSession) -> dict[float, float]:
    """How often the event loop was at most so late."""
    async with session.get("/metrics") as response:
        page = await response.text()
    rows = [row for row in page.splitlines() if row.startswith(LAG)]
    return {float(row.split('le="')[1].split('"')[0]): float(row.rsplit(" ", 1)[1]) for row in rows}


def lag_within(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """The bound that this share of the looks between the two kept; a bucket's upper end."""
    total = after[float("inf")] - before[float("inf")]
    return min(bound for bound in after if after[bound] - before[bound] >= share * total)


def pauses(gaps: Sequence[tuple[float, float]], down: Sequence[tuple[float, float]]) -> list[float]:
    """Of the gaps that a reader notices and that a fault touched: how long they were beyond the time without engine."""
    found = []
    for start, end in gaps:
        without = sum(max(0.0, min(end, back) - max(start, gone)) for gone, back in down)
        if end - start > NOTICED and without:
            found.append(max(0.0, end - start - without))
    return found


async def run(url: str, pid: int, folder: Path, options: argparse.Namespace) -> list[Promise]:
    """The whole of it: answers undisturbed, the storm, and what became of the work."""
    dice = random.Random(options.seed)
    prompts = load.make_prompts(dice, options.streams, 24)
    line_prompts = load.make_prompts(dice, load.LINE_PROMPTS, 12)
    outcome, memory = load.Outcome(), list[int]()
    no_limit = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=no_limit, connector=aiohttp.TCPConnector(limit=0)) as session:
        undisturbed = await asyncio.gather(*[load.stream(session, p, load.STREAM_TOKENS) for p in prompts])
        expected = [answer.tokens for answer in undisturbed]
        texts = [await load.text_of(session, prompt) for prompt in line_prompts]
        assert all(len(tokens) == load.STREAM_TOKENS for tokens in expected), "undisturbed answers are not whole"
        before = await read_lag(session)
        batch = await load.submit_batch(session, line_prompts, options.lines)
        watching = asyncio.create_task(watch_memory(pid, memory))
        saboteur = Saboteur(session, folder / "state", folder / "chaos", dice)
        done = asyncio.Event()
        async with asyncio.TaskGroup() as streams:
            for number in range(options.streams):
                streams.create_task(load.keep_streaming(session, prompts, expected, number, done, outcome))
            await saboteur.run(time.monotonic() + options.seconds)
            done.set()
        state = await load.wait_batch(session, batch, time.monotonic() + DRAIN_SECONDS)
        watching.cancel()
        await load.count_rows(session, state, texts, options.lines, outcome)
        lag = before, await read_lag(session)
        async with session.get("/metrics") as response:
            page = await response.text()
    _show_faults(saboteur, outcome, state, page)
    return [*_promises(outcome, saboteur), *_timings(outcome, saboteur, lag, memory)]


def _show_faults(saboteur: Saboteur, outcome: load.Outcome, state: dict[str, Any], page: str) -> None:
    print("faults: " + ", ".join(f"{count} {name}" for name, count in saboteur.faults.items()))
    causes = [row for row in page.splitlines() if row.startswith("tidemill_engine_restarts_total{")]
    print("engine processes that ended: " + ", ".join(row[len("tidemill_engine_restarts_total") :] for row in causes))
    print(f"batch: {state['status']}; streams that broke: {dict(outcome.errors)}; poison: {dict(saboteur.poison)}")
    if saboteur.wrong:
        print(f"hostile bodies that were not refused: {dict(saboteur.wrong)}")


def _promises(outcome: load.Outcome, saboteur: Saboteur) -> list[Promise]:
    counts = {
        "broken streams": outcome.broken,
        "streams with differing tokens": outcome.differing,
        "rows lost": outcome.lost,
        "rows doubled": outcome.doubled,
        "rows failed": outcome.failed,
        "rows with differing text": outcome.rows_differing,
        "hostile bodies not refused": saboteur.wrong.total(),
        "poisoned requests not ended by engine_error": saboteur.poison.total() - saboteur.poison["engine_error"],
    }
    shown = [Promise("streams", str(outcome.streams)), Promise("rows", str(outcome.rows))]
    return [*shown, *(Promise(name, str(count), "0", count == 0) for name, count in counts.items())]


def _timings(
    outcome: load.Outcome, saboteur: Saboteur, lag: tuple[dict[float, float], dict[float, float]], memory: list[int]
) -> list[Promise]:
    def timed(name: str, value: float, limit: float, unit: str) -> Promise:
        return Promise(name, f"{value:.3g} {unit}", f"{limit:g} {unit}", value <= limit, timing=True)

    found = pauses(outcome.gaps, saboteur.down) or [0.0]
    without = [end - start for start, end in saboteur.down] or [0.0]
    warm = memory[int(WARM_SHARE * len(memory))]
    return [
        Promise("time without engine, median", f"{median(without):.3g} s"),
        timed("pause beyond it, median", median(found), 1.0, "s"),
        timed("pause beyond it, worst", max(found), 3.0, "s"),
        timed("/ready green 2 s into failing steps", saboteur.late_status, 0, "times"),
        timed("loop lag, P99 at most", 1e3 * lag_within(*lag, 0.99), 20.0, "ms"),
        timed("loop lag, worst at most", 1e3 * lag_within(*lag, 1.0), 50.0, "ms"),
        timed("memory of the server grew by", (max(memory) - warm) / 2**20, 256.0, "MiB"),
    ]


def show(promises: Sequence[Promise], *, loose: bool) -> bool:
    """Print the table; whether every promise was kept. `loose`: those of time are only shown."""
    kept = True
    for promise in promises:
        counts = promise.kept is not None and not (loose and promise.timing)
        verdict = "" if promise.kept is None else "kept" if promise.kept else "BROKEN" if counts else "missed"
        kept = kept and not (counts and not promise.kept)
        print(f"  {promise.name:45} {promise.value:>12} {promise.limit:>10}  {verdict}".rstrip())
    return kept


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults come (default 600)")
    parser.add_argument("--seed", type=int, help="the same faults and prompts again (default: drawn, and printed)")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--lines", type=int, help="of the batch (default: two a second)")
    parser.add_argument("--loose", action="store_true", help="do not fail for times, which a busy machine stretches")
    options = parser.parse_args(argv)
    options.seed = secrets.randbits(32) if options.seed is None else options.seed
    options.lines = max(20, int(2 * options.seconds)) if options.lines is None else options.lines
    print(
        f"chaos: --seed {options.seed} --seconds {options.seconds:g}, {options.streams} streams of "
        f"{load.STREAM_TOKENS} tokens, {options.lines} lines of {load.LINE_TOKENS}; {describe()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="tidemill-chaos-") as name, server(Path(name)) as (url, pid):
        promises = asyncio.run(run(url, pid, Path(name), options))
    if not show(promises, loose=options.loose):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
