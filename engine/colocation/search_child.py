"""Runs long computations in a child process: `engine.colocation.search` with one JSON job on its standard input.

A child first runs at idle priority. On a machine without idle cores it would never finish, and the initial budget would
stay forever. After `IDLE_SECONDS` it is therefore restarted at the lowest normal priority (about 1.5 % of a busy core),
and after `NICE_SECONDS` more it is given up. The wait for a killed child is bounded, because exiting takes CPU time,
too.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from engine.machine.processes import python_module

IDLE_SECONDS, NICE_SECONDS = 300.0, 1800.0
DEATH_SECONDS = 1.0


class ChildError(Exception):
    """The child could not be started, failed, got no CPU time or returned invalid output; one line with the reason."""


class Turn(NamedTuple):
    """One attempt.

    `priority`: `idle`, `nice` or `usual` (see `engine.colocation.search`); `seconds` until it is killed.
    """

    priority: str
    seconds: float


TURNS = (Turn("idle", IDLE_SECONDS), Turn("nice", NICE_SECONDS))


async def run_child(job: dict[str, Any], turns: Sequence[Turn] = TURNS) -> Any:
    """Return the child's answer from the first attempt that completes.

    Raises ChildError. Cancelling kills the child.
    """
    for priority, seconds in turns:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await _run(job, priority)
    raise ChildError(f"no core had time for it within {sum(turn.seconds for turn in turns):.0f} s")


async def _run(job: dict[str, Any], priority: str) -> Any:
    try:
        process = await asyncio.create_subprocess_exec(
            *python_module("engine.colocation.search", priority, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ChildError(error.strerror or str(error)) from None
    try:
        answer, errors = await process.communicate(json.dumps(job).encode())
    finally:
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), DEATH_SECONDS)
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ChildError(last[0][:200])
    try:
        return json.loads(answer)
    except ValueError:
        raise ChildError("it answered no JSON") from None
