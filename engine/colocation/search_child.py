"""Runs long computations in a low-priority child process, so that they take no time from steps.

`python -m engine.colocation.search_child PRIORITY PARENT` reads a pickled function with its arguments and notes from
standard input. It writes frames (`engine.machine.link`) to standard output, each a pickled (is result, value). It exits
with its parent process PARENT.

Even at idle priority a child slows down steps that use all cores. A stopped child does not, so a child beside such
steps is stopped for most of the time in which chats run (`Duty`).

A child first runs at idle priority. If it gets at most LEAST_SHARE of a core in IDLE_SECONDS, not counting the time in
which it is stopped, the machine has no idle core. Then another child continues from the notes of the first at a low
regular priority, and is never stopped, until it is done. Only CPU time bounds a child: the kernel ends it after
CPU_SECONDS. The wait for a killed child is bounded, because exiting takes CPU time, too.
"""

import asyncio
import math
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeVar

from engine.machine.activity import read_activity
from engine.machine.link import framed, read_frame
from engine.machine.processes import end_with, python_module

T = TypeVar("T")
IDLE_SECONDS, LEAST_SHARE = 60.0, 0.1
BUSY_SHARE, BURST, LOOK_SECONDS = 0.03, 2.0, 0.05
"""Share of the time in which a child runs beside chats, the least seconds at once, and the interval of decisions.

Few long bursts meet fewer chats than many short ones.
"""
CPU_SECONDS = 300
DEATH_SECONDS = 1.0
NICENESS = {"idle": 19, "low": 10}


class ChildError(Exception):
    """The child could not be started, failed or used too much CPU time; one line with the reason."""


class Turn(NamedTuple):
    """One attempt.

    `priority`: `idle`, `low` or `usual` (see `step_aside`). The next attempt continues if this one gets at most `share`
    of a core in `seconds`.
    """

    priority: str
    seconds: float = math.inf
    share: float = LEAST_SHARE


class Duty:
    """Decides when a child runs: always without chats; beside chats for BUSY_SHARE of the time, BURST at once."""

    def __init__(self) -> None:
        self.runs = True
        self._credit = 0.0

    def decide(self, busy: bool, passed: float) -> bool:
        """Return whether the child runs from now on. `busy`: chats run; `passed`: seconds since the last decision."""
        if busy:
            used = passed if self.runs else 0.0
            self._credit = min(self._credit + BUSY_SHARE * passed - used, BURST)
        self.runs = not busy or self._credit >= (LOOK_SECONDS if self.runs else BURST)
        return self.runs


TURNS = (Turn("idle", IDLE_SECONDS), Turn("low"))


async def run_child(
    function: Callable[..., T],
    *arguments: Any,
    turns: Sequence[Turn] = TURNS,
    keeps_notes: bool = False,
    busy: Callable[[], bool] = lambda: False,
    **options: Any,
) -> T:
    """Return `function(*arguments, **options)` from the first attempt that completes.

    Raises ChildError. Cancelling kills the child.

    Args:
        function: Function of a module.
        keeps_notes: The function has an argument `notes`, a list. Values that an attempt appends to it are in the list
            of the next attempt.
        busy: Returns whether chats run, which the child must not slow down.
    """
    notes: list[Any] | None = [] if keeps_notes else None
    for turn in turns:
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                return await _run((partial(function, **options), arguments, notes), turn, busy, limit)
    raise ChildError(f"no core had time for it within {sum(turn.seconds for turn in turns):.0f} s")


async def _run(
    job: tuple[Callable[..., T], Sequence[Any], list[Any] | None],
    turn: Turn,
    busy: Callable[[], bool],
    limit: asyncio.Timeout,
) -> T:
    try:
        process = await asyncio.create_subprocess_exec(
            *python_module("engine.colocation.search_child", turn.priority, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ChildError(error.strerror or str(error)) from None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    watch = asyncio.create_task(_watch(process, turn, busy, limit))
    try:
        process.stdin.write(pickle.dumps(job))
        process.stdin.close()
        with suppress(asyncio.IncompleteReadError):
            while True:
                is_result, value = pickle.loads(await read_frame(process.stdout))
                if is_result:
                    return value  # type: ignore[no-any-return]
                assert job[2] is not None
                job[2].append(value)
        raise ChildError(_reason(await process.wait(), (await errors).decode(errors="replace")))
    finally:
        watch.cancel()
        errors.cancel()
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), DEATH_SECONDS)


async def _watch(
    process: asyncio.subprocess.Process, turn: Turn, busy: Callable[[], bool], limit: asyncio.Timeout
) -> None:
    """Stop and continue the process by its duty. End the attempt if the process gets too little of a core."""
    clock, duty = asyncio.get_running_loop().time, Duty()
    allowed = spent = passed = 0.0
    looked = clock()
    while process.returncode is None:
        ran = duty.runs
        if duty.decide(turn.priority == "idle" and busy(), passed) is not ran:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT if duty.runs else signal.SIGSTOP)
        began = clock()
        await asyncio.sleep(LOOK_SECONDS)
        passed = clock() - began
        allowed += passed if duty.runs else 0.0
        if clock() - looked >= turn.seconds and allowed >= min(turn.seconds, BURST):
            activity = read_activity([process.pid])
            before, spent = spent, 0.0 if activity is None else sum(each.cpu for each in activity.threads.values())
            if spent - before <= turn.share * allowed:
                limit.reschedule(clock())
                return
            looked, allowed = clock(), 0.0


def _reason(code: int, errors: str) -> str:
    if code == -signal.SIGXCPU:
        return f"it used {CPU_SECONDS} s of CPU time"
    return (errors.strip().splitlines()[-1:] or ["no message"])[0][:200]


class _Notes(list[Any]):
    """Notes that are sent to the parent process as they are made."""

    def append(self, value: Any) -> None:
        super().append(value)
        _send(sys.stdout.buffer, (False, value))


def _send(stream: BinaryIO, frame: tuple[bool, Any]) -> None:
    stream.write(framed(pickle.dumps(frame)))
    stream.flush()


def step_aside(priority: str) -> None:
    """Lower the priority of this process.

    `idle`: run only on idle cores. `low`: a small regular share; a step waits for each of its threads, so that niceness
    alone takes time from steps. Any other value: keep the priority.
    """
    if priority in NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS[priority])
    if priority == "idle" and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    priority, parent = sys.argv[1:]
    end_with(int(parent))
    step_aside(priority)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    function, arguments, notes = pickle.load(sys.stdin.buffer)
    more = {} if notes is None else {"notes": _Notes(notes)}
    _send(sys.stdout.buffer, (True, function(*arguments, **more)))


if __name__ == "__main__":
    main()
