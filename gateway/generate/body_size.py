"""Tells whether a request's body holds so much that its plan belongs in a thread. The count itself is bounded."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

INLINE_PARTS = 256  # objects and entries of lists: a plan takes about 10 us for each
INLINE_CHARS = 32 * 1024  # of all strings


def is_large(body: Any) -> bool:
    """Whether the body holds more than INLINE_PARTS parts or INLINE_CHARS characters, at any depth and in any field.
    At most INLINE_PARTS objects and lists are visited."""
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
