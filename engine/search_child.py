"""Long computations in a child process of low priority: `python -m engine.search` with one JSON job on its input."""

import asyncio
import json
import os
from typing import Any

from engine.child import python_module

NICENESS = 10


class ChildError(Exception):
    """The child could not be started, failed or answered nonsense; one line that says why."""


async def run_child(job: dict[str, Any]) -> Any:
    """Its answer. Raises ChildError; cancelling kills it."""
    try:
        process = await asyncio.create_subprocess_exec(
            *python_module("engine.search"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=lambda: os.nice(NICENESS) and None,
        )
    except OSError as error:
        raise ChildError(error.strerror or str(error)) from None
    try:
        answer, errors = await process.communicate(json.dumps(job).encode())
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ChildError(last[0][:200])
    try:
        return json.loads(answer)
    except ValueError:
        raise ChildError("it answered no JSON") from None
