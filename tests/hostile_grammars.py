"""Grammars that cost more than they weigh, as requests state them."""

import json
from typing import Any

from benchmarks.hostile import grammars
from engine.forms import Grammar

SIZE = 250_000
"""Bytes, just within the limit of a grammar."""


def schema(value: Any) -> Grammar:
    return Grammar("json", json.dumps(value))


def lark(text: str) -> Grammar:
    return Grammar("grammar", text)


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


def rules(count: int, first: str, rule: str, last: str) -> Grammar:
    return lark(first + "".join(rule.format(i, i + 1) for i in range(count)) + last.format(count))


def hostile() -> dict[str, Grammar]:
    """Return all grammars by name."""
    return {each.name: Grammar(each.kind, each.make(SIZE)) for each in grammars()}  # type: ignore[arg-type]
