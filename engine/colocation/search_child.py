"""Long computations in a child process: `engine.colocation.search`, with one JSON job on its input."""

import asyncio
import json
from typing import Any

from engine.machine.child import python_module


class ChildError(Exception):
    """The child could not be started, failed or answered nonsense; one line that says why."""


async def run_child(job: dict[str, Any]) -> Any:
    """Its answer. Raises ChildError; cancelling kills it."""
    try:
        process = await asyncio.create_subprocess_exec(
            *python_module("engine.colocation.search"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
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
