"""Assertions over a summary, for CI: `--assert "online.slo_attainment>=0.99"`."""

import operator
import re
from collections.abc import Mapping
from typing import Any

from loadgen import InputError

COMPARE = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq, "!=": operator.ne
}  # fmt: skip
PATTERN = re.compile(r"^\s*([A-Za-z_][\w.]*)\s*(>=|<=|==|!=|>|<)\s*(-?[\d.]+(?:[eE][-+]?\d+)?|true|false)\s*$")


def check(summary: Mapping[str, Any], expression: str) -> str | None:
    """Return None if the expression holds, else a message. An expression over a missing value does not hold."""
    path, symbol, wanted = parse(expression)
    value = lookup(summary, path)
    if value is None:
        return f"{expression}: the summary has no value"
    return None if COMPARE[symbol](value, wanted) else f"{expression}: the value is {value:g}"


def parse(expression: str) -> tuple[str, str, float]:
    """Return (dotted name, operator, number). Raise InputError for an invalid expression."""
    found = PATTERN.match(expression)
    if found is None:
        raise InputError(f"invalid assertion {expression!r}; use NAME>=NUMBER")
    path, symbol, number = found.groups()
    try:
        return path, symbol, {"true": 1.0, "false": 0.0}[number] if number in ("true", "false") else float(number)
    except ValueError:
        raise InputError(f"invalid number in assertion {expression!r}") from None


def lookup(summary: Mapping[str, Any], path: str) -> float | None:
    """Return the number at a dotted path or under a name that occurs once. Raise InputError for an unknown name."""
    node: Any = summary
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            node = _anywhere(summary, path)
            break
        node = node[part]
    if node is None or isinstance(node, int | float):
        return None if node is None else float(node)
    raise InputError(f"{path} is not a number in the summary")


def _anywhere(summary: Mapping[str, Any], name: str) -> Any:
    """Return the value of a key that exactly one section of the summary has. Raise InputError otherwise."""
    sections = [section for section in summary.values() if isinstance(section, Mapping) and name in section]
    if len(sections) != 1:
        raise InputError(
            f"the summary has {'no' if not sections else 'more than one'} value {name!r}; use SECTION.NAME"
        )
    return sections[0][name]
