"""Formatting for a terminal: durations, percentages, spark lines and bars; escaping of untrusted text."""

import math
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

NOTHING = "-"


class Glyphs(NamedTuple):
    """Characters for charts."""

    levels: str  # of a spark line, from lowest to full height
    full: str  # filled cell of a bar
    light: str  # empty cell of a bar


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "█", "░")
ASCII = Glyphs(".:-=+*%#", "#", ".")


def glyphs_for(encoding: str) -> Glyphs:
    return UNICODE if encoding.lower().replace("-", "").startswith("utf") else ASCII


def plain(text: object) -> str:
    """Return untrusted text as one line: control, escape and direction characters become '?'."""
    return "".join("?" if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in str(text))


def shortened(text: object, cells: int) -> str:
    """Return `plain(text)`, shortened to at most `cells` terminal columns."""
    safe = plain(text)
    return safe if cell_len(safe) <= cells else set_cell_size(safe, cells - 2).rstrip() + ".."


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    if value < 1:
        return f"{value * 1000:.1f} ms" if value < 0.01 else f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else duration(value)


def duration(value: float | None) -> str:
    """Format whole seconds: `40 s`, `3 min 5 s`, `2 h 1 min`, `3 d 4 h`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    whole = max(0, round(value))
    for size, unit, rest, lower in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            more = whole % size // rest
            return f"{whole // size} {unit}" + (f" {more} {lower}" if more else "")
    return f"{whole} s"


def count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def percent(share: float | None, digits: int = 1) -> str:
    if share is None or not math.isfinite(share):
        return NOTHING
    return f"{100 * share:.{digits}f}".removesuffix(".0") + " %"


def spark(values: Sequence[float | None], top: float, glyphs: Glyphs, rows: int = 1) -> list[str]:
    """Draw one column per value, scaled from 0 to `top`; None and 0 are blank. Return `rows` lines, top line first."""
    size = len(glyphs.levels)
    heights = [0 if not v else max(1, round(min(1.0, v / top) * size * rows)) for v in values]
    lines = []
    for row in reversed(range(rows)):
        parts = [min(size, max(0, height - row * size)) for height in heights]
        lines.append("".join(" " if part == 0 else glyphs.levels[part - 1] for part in parts))
    return lines


def bar(share: float, cells: int, glyphs: Glyphs) -> str:
    filled = round(min(1.0, max(0.0, share)) * cells)
    return glyphs.full * filled + glyphs.light * (cells - filled)
