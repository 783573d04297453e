"""`--assert "online.slo_attainment>=0.99"`: expressions over a summary, for CI."""

import re
from collections.abc import Mapping
from typing import Any

from loadgen.errors import InputError

PATTERN = re.compile(r"^\s*([A-Za-z_][\w.]*)\s*(>=|<=|==|!=|>|<)\s*(-?[\d.]+(?:[eE][-+]?\d+)?|true|false)\s*$")


def check(summary: Mapping[str, Any], expression: str) -> str | None:
    """Return None if the expression holds, else the reason. A missing value does not hold."""
    path, operator, wanted = parse(expression)
    value = lookup(summary, path)
    if value is None:
        return f"{expression}: no value was measured"
    holds = {
        ">=": value >= wanted,
        "<=": value <= wanted,
        ">": value > wanted,
        "<": value < wanted,
        "==": value == wanted,
        "!=": value != wanted,
    }[operator]
    return None if holds else f"{expression}: it is {value:g}"


def parse(expression: str) -> tuple[str, str, float]:
    """(dotted name, operator, number); raises InputError for anything else."""
    found = PATTERN.match(expression)
    if found is None:
        raise InputError(f"cannot read the assertion {expression!r}: use NAME>=NUMBER")
    path, operator, number = found.groups()
    try:
        return path, operator, {"true": 1.0, "false": 0.0}[number] if number in ("true", "false") else float(number)
    except ValueError:
        raise InputError(f"cannot read the number in {expression!r}") from None


def lookup(summary: Mapping[str, Any], path: str) -> float | None:
    """The number at a dotted path, or under a bare name that occurs once; raises InputError for an unknown name."""
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
    """The value of a bare key in the sections of a summary, when exactly one section has it."""
    sections = [section for section in summary.values() if isinstance(section, Mapping) and name in section]
    if len(sections) != 1:
        raise InputError(f"the summary has {'no' if not sections else 'more than one'} value called {name!r}")
    return sections[0][name]
