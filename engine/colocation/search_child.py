"""Long computations in a child process: `engine.colocation.search`, with one JSON job on its input.

A child runs where a core would rest. Where none ever does it would never end, and the budget that needed no search
would stay for good: it has `IDLE_SECONDS`; then it is begun anew with the least weight among those that always get some
(about 1.5 % of a busy core), and after `NICE_SECONDS` of that it is given up. Nobody waits long for one that was
killed, for dying takes a moment on a core, too.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from engine.machine.child import python_module

IDLE_SECONDS, NICE_SECONDS = 300.0, 1800.0
DEATH_SECONDS = 1.0


class ChildError(Exception):
    """The child could not be started, failed, got no time or answered nonsense; one line that says why."""


class Turn(NamedTuple):
    """One try. `priority`: `idle`, `nice` or `usual` (see `engine.colocation.search`); `seconds` until it is killed."""

    priority: str
    seconds: float


TURNS = (Turn("idle", IDLE_SECONDS), Turn("nice", NICE_SECONDS))


async def run_child(job: dict[str, Any], turns: Sequence[Turn] = TURNS) -> Any:
    """Its answer, by the first turn that ends. Raises ChildError; cancelling kills it."""
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
