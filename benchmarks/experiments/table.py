"""Results of an experiment: rows, a printed table, `table.json` and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.drawing import Series, chart, document


@dataclass(frozen=True, slots=True)
class Result:
    """One row of a table: the metrics of a policy under a setting with one seed."""

    experiment: str
    policy: str
    setting: Mapping[str, Any]
    seed: int
    metrics: Mapping[str, float | bool | None]


def write_table(results: Sequence[Result], folder: Path, figures: Mapping[str, str]) -> None:
    """Write `table.json` and one `.svg` per figure to `folder`, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    (folder / "table.json").write_bytes(orjson.dumps(list(results), option=option))
    for name, figure in figures.items():
        (folder / f"{name}.svg").write_text(figure, encoding="utf-8")


def figure(title: str, series: Sequence[Series], x: str, y: str, *, log_x: bool = False) -> str:
    """Return a chart as a standalone SVG file."""
    return document([chart(title, series, x=x, y=y, log_x=log_x)])


def render(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return aligned columns of text, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(header, widths, strict=True)).rstrip()]
    for row, values in zip(cells, rows, strict=True):
        parts = [
            text.rjust(width) if isinstance(value, (int, float)) and not isinstance(value, bool) else text.ljust(width)
            for text, width, value in zip(row, widths, values, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def mean(results: Sequence[Result], key: str) -> float:
    """Return the mean of a metric over rows; 0 without rows."""
    values = [float(result.metrics[key] or 0.0) for result in results]
    return sum(values) / len(values) if values else 0.0


def ratios(results: Sequence[Result], key: str, policy: str, other: str) -> list[float]:
    """Return, by seed, a metric of `policy` ÷ that of `other`, where the latter is not 0."""
    rivals = {r.seed: float(r.metrics[key] or 0.0) for r in results if r.policy == other}
    mine = [r for r in results if r.policy == policy and rivals.get(r.seed)]
    return [float(r.metrics[key] or 0.0) / rivals[r.seed] for r in mine]


def gains(results: Sequence[Result], mine: Sequence[Result], key: str) -> list[float]:
    """Return, by seed, the least value of a metric among all other policies ÷ that of `mine`."""
    found = []
    for result in mine:
        rivals = [float(r.metrics[key] or 0.0) for r in results if r.seed == result.seed and r.policy != result.policy]
        if rivals and result.metrics[key]:
            found.append(min(rivals) / float(result.metrics[key] or 1.0))
    return found


def average(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    return sum(values) / len(values) if values else None
