"""Runs long computations in a low-priority child process, so that they take no time from steps.

`python -m engine.colocation.search_child PRIORITY PARENT` reads a pickled function with its arguments from standard
input, and writes the pickled result to standard output. It exits with its parent process PARENT.

A child first runs at idle priority. On a machine without idle cores it would never finish, and the initial budget would
stay forever. After `IDLE_SECONDS` it is therefore restarted at the lowest normal priority (about 1.5 % of a busy core),
and after `NICE_SECONDS` more it is given up. The wait for a killed child is bounded, because exiting takes CPU time,
too.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

from engine.machine.processes import end_with, python_module

T = TypeVar("T")
IDLE_SECONDS, NICE_SECONDS = 300.0, 1800.0
DEATH_SECONDS = 1.0
NICENESS = 19


class ChildError(Exception):
    """The child could not be started, failed or got no CPU time; one line with the reason."""


class Turn(NamedTuple):
    """One attempt.

    `priority`: `idle`, `nice` or `usual` (see `step_aside`); `seconds` until it is killed.
    """

    priority: str
    seconds: float


TURNS = (Turn("idle", IDLE_SECONDS), Turn("nice", NICE_SECONDS))


async def run_child(function: Callable[..., T], *arguments: Any, turns: Sequence[Turn] = TURNS) -> T:
    """Return `function(*arguments)` from the first attempt that completes. The function must be one of a module.

    Raises ChildError. Cancelling kills the child.
    """
    job = pickle.dumps((function, arguments))
    for priority, seconds in turns:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return cast(T, pickle.loads(await _run(job, priority)))
    raise ChildError(f"no core had time for it within {sum(turn.seconds for turn in turns):.0f} s")


async def _run(job: bytes, priority: str) -> bytes:
    try:
        process = await asyncio.create_subprocess_exec(
            *python_module("engine.colocation.search_child", priority, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ChildError(error.strerror or str(error)) from None
    try:
        answer, errors = await process.communicate(job)
    finally:
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), DEATH_SECONDS)
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ChildError(last[0][:200])
    return answer


def step_aside(priority: str) -> None:
    """Lower the priority of this process.

    `idle`: run only on idle cores. `nice`: the smallest regular share; a niceness alone still takes CPU time, and a
    step waits for each of its threads. Any other value: keep the priority.
    """
    if priority in ("idle", "nice"):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    if priority == "idle" and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    priority, parent = sys.argv[1:]
    end_with(int(parent))
    step_aside(priority)
    function, arguments = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(function(*arguments)))


if __name__ == "__main__":
    main()
