"""Answers beside processes that never rest: decode rate and longest gap of one stream, and a long prompt.

A step on several threads waits for the last of them: a thread that has lost its core costs more than its share. Of N
cores beside M such processes a fair share is N / (N + M) of the quiet rate; 1 / (1 + M) where the kernel shares cores
among sessions first (autogroups, `sched_autogroup_enabled`): each process is a session of its own. One server for the
whole run; the situations take turns, round by round, and a quiet one is among them: what counts is the ratio to it.
Figures are medians of the rounds, the longest gap is that of all rounds.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import live
from benchmarks.frame import Table, in_turn
from benchmarks.machine import describe
from benchmarks.serving import SLO, at_once
from loadgen.records import RequestRecord

PROMPT, OUTPUT = 64, 96
LONG_PROMPT = 2_000
REQUESTS = 4
"""Answers of a round, one after the other."""
SETTLE = 1.0
"""Seconds after neighbours have come."""
SITUATIONS = (0, 2, 6, 8)
"""Processes that never rest."""

TABLE = Table({
    "neighbours": "10d", "tok/s": "7.1f", "of quiet": "8.2f", "fair share": "10.2f", "longest gap, ms": "15.0f",
    "quiet steps": "11.1f", "prompt, s": "9.2f", "times quiet": "11.1f",
})  # fmt: skip

AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


@dataclass(slots=True)
class Situation:
    """Rounds beside so many neighbours: tokens/s, all gaps, and TTFTs of the long prompt, in seconds."""

    neighbours: int
    rates: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prompts: list[float] = field(default_factory=list)

    def add(self, answers: Sequence[RequestRecord], prompt: RequestRecord) -> None:
        """What a round has given."""
        gaps = [float(gap) for answer in answers for gap in answer.gaps()]
        self.rates.append(len(gaps) / sum(gaps))
        self.gaps += gaps
        self.prompts.append(prompt.ttft_sent or 0.0)


@contextmanager
def restless(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that compute all the time, of usual priority, each in a session of its own: where the kernel
    shares the cores among sessions first (autogroups), those of one session would count as one."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        time.sleep(SETTLE)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_round(url: str, situation: Situation, seed: int) -> None:
    """A round: answers one after the other, then the long prompt."""
    with restless(situation.neighbours):
        answers = []
        for number in range(REQUESTS):
            answers += asyncio.run(at_once(url, 1, PROMPT, OUTPUT, 100 * seed + number))
        (prompt,) = asyncio.run(at_once(url, 1, LONG_PROMPT, 1, 100 * seed + 50))
    situation.add(answers, prompt)


def shares_among_sessions() -> bool:
    """Whether this kernel shares cores among sessions first."""
    return AUTOGROUPS.exists() and AUTOGROUPS.read_text().strip() == "1"


def fair_share(neighbours: int, cores: int, *, sessions: bool) -> float:
    """What a server that works on all cores gets of them, beside processes with a session each. `sessions`: cores are
    shared among these first."""
    return 1.0 / (1 + neighbours) if sessions else cores / (cores + neighbours)


def report(situations: Sequence[Situation], cores: int, *, sessions: bool) -> None:
    """The table; the first situation is the quiet one."""
    quiet = situations[0]
    rate, step, prompt = median(quiet.rates), median(quiet.gaps), median(quiet.prompts)
    print(TABLE.heading)
    for each in situations:
        speed, longest, long = median(each.rates), max(each.gaps), median(each.prompts)
        fair = fair_share(each.neighbours, cores, sessions=sessions)
        cells = (each.neighbours, speed, speed / rate, fair, longest * 1e3, longest / step, long, long / prompt)
        print(TABLE.line(*cells))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks neighbours", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each situation (default: 3)")
    parser.add_argument("--threads", type=int, default=0, help="of the server (default: its own choice)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    args = parser.parse_args(argv)
    sessions, cores = shares_among_sessions(), len(os.sched_getaffinity(0))
    model = f"random 134.5 M Llama, {args.dtype}, {PROMPT}/{OUTPUT}, a prompt of {LONG_PROMPT:,}"
    about = "cores are shared among sessions first" if sessions else "cores are shared among threads"
    print(f"neighbours: {model}; {about}; {describe()}", flush=True)
    situations = [Situation(count) for count in SITUATIONS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        live.make_model_folder(folder)
        kept = ("--state-dir", str(folder / "state"))
        with live.server(folder, args.threads, *SLO, "--dtype", args.dtype, *kept) as url:
            asyncio.run(at_once(url, 1, PROMPT, OUTPUT, 0))
            for number in range(args.rounds):
                for situation in in_turn(situations, number):
                    measure_round(url, situation, len(situations) * number + situation.neighbours + 1)
    report(situations, cores, sessions=sessions)


if __name__ == "__main__":
    main()
