"""Estimate whether planning a request takes long enough to move it to a thread."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

INLINE_PARTS = 256  # objects and list entries: planning takes about 10 us each
INLINE_CHARS = 32 * 1024  # characters of all strings


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
