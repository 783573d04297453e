"""Placement of Python work: on the event loop, in threads, and at half speed beside model steps.

Each of a step's many small operations must reacquire the GIL, so a busy thread slows a step down many times. Background
work therefore sleeps as long as it has run.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import anyio.to_thread
from pydantic import BaseModel

from gateway.context import GatewayContext

ResultT = TypeVar("ResultT")

INLINE_PARTS = 256  # objects and list entries: planning takes about 10 us each
INLINE_CHARS = 32 * 1024  # characters of all strings
LONGEST_REST = 0.05
"""Maximum sleep in seconds."""


def is_large(body: Any) -> bool:
    """Return whether the body has more than INLINE_PARTS objects and list entries or INLINE_CHARS characters in total.
    Visits at most INLINE_PARTS objects and lists."""
    parts, chars = 0, 0
    waiting = [body]
    while waiting:
        value = waiting.pop()
        children: Iterable[Any] = ()
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, BaseModel):
            children = [child for child in value.__dict__.values() if child is not None]
            parts += 1
        elif isinstance(value, list | tuple | dict):
            parts += len(value)
            if isinstance(value, dict):
                children = [*value, *value.values()] if parts <= INLINE_PARTS else ()
            else:
                children = value
        if parts > INLINE_PARTS or chars > INLINE_CHARS:
            return True
        waiting.extend(children)
    return False


async def run_by_size(context: GatewayContext, body: BaseModel, work: Callable[[], ResultT]) -> ResultT:
    """Run work whose time grows with the body: at once for a small body, else in a thread, one request at a time."""
    if not is_large(body):
        return work()
    return await anyio.to_thread.run_sync(work, limiter=context.parse_thread)


async def run_text_work(context: GatewayContext, work: Callable[[], ResultT]) -> ResultT:
    """Run tokenization or similar work in a worker thread, at half speed for offline work."""
    paced = functools.partial(at_half_speed, work) if context.is_offline else work
    return await anyio.to_thread.run_sync(paced, limiter=context.text_threads)


def at_half_speed(work: Callable[[], ResultT]) -> ResultT:
    """Run `work`, then sleep for the same time. Blocking: call it in a thread, with work of a few milliseconds."""
    start = time.perf_counter()
    result = work()
    time.sleep(min(LONGEST_REST, time.perf_counter() - start))
    return result
