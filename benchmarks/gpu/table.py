"""The rows of the check and how they are shown."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `floor`: the limit of the machine, `anchor`: figures of other engines, `target`: the goal, all
    in `unit`. `lower`: whether less is better. `measured` None: it failed, and `note` says how."""

    metric: str
    unit: str
    measured: float | None
    target: float | None = None
    floor: float | None = None
    anchor: str = ""
    lower: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None where nothing is asked for."""
        if self.measured is None:
            return False
        if self.target is None:
            return None
        return self.measured <= self.target if self.lower else self.measured >= self.target

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "met": self.met})


def row_from_json(line: str) -> Row:
    fields = json.loads(line)
    del fields["met"]
    return Row(**fields)


def failure(metric: str, reason: str) -> Row:
    return Row(metric, "", None, note=reason)


def render(rows: Iterable[Row]) -> str:
    """The table as text, one line a row."""
    lines = [("metric", "floor", "anchor", "target", "measured", "")]
    for row in rows:
        sign = "<=" if row.lower else ">="
        verdict = {True: "ok", False: "MISSED", None: ""}[row.met]
        measured = "failed" if row.measured is None else f"{_short(row.measured)} {row.unit}"
        target = "" if row.target is None else f"{sign} {_short(row.target)}"
        floor = "" if row.floor is None else _short(row.floor)
        note = f"  {row.note}" if row.note else ""
        lines.append((row.metric, floor, row.anchor, target, measured, verdict + note))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


ALONE, RATE_UNIT = "offline work alone", "offline tok/s"
"""Arm that is the limit of all arms in this unit."""


def result_of(rows: Sequence[Row], about: Mapping[str, str]) -> dict[str, Any]:
    """Return rows as a result file of `benchmarks.result_tables`."""
    titles = {"": "left", "measured": "right", "target": "right", "limit": "right", "note": "left"}
    alone = next((row.measured for row in rows if row.metric == ALONE), None)
    source = {"command": "make gpu-check ARGS=--ordered", "commit": "", "machine": about["device"]}
    lines = []
    for row in rows:
        value = "failed" if row.measured is None else f"{_short(row.measured)} {row.unit}".strip()
        limit = alone if row.unit == RATE_UNIT else row.floor
        limits = ("–" if each is None else _short(each) for each in (row.target, limit))
        lines.append(
            {**source, "date": about["date"], "cells": [row.metric, value, *limits, row.note.replace("|", "/")]}
        )
    return {"columns": [{"title": name, "align": side} for name, side in titles.items()], "rows": lines}


def _short(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2e}"
