"""Line charts as inline SVG text: axes, ticks, a legend, marked limits. Numbers in, one `<svg>` element out.

Colours come from CSS variables of the page (with fall-backs), so that one file serves light and dark screens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import ArrayLike, NDArray

WIDTH, HEIGHT = 720.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 34.0, 44.0
COLOURS = ("#2a6fbb", "#c8553d", "#3a8f5c", "#8a5ab5", "#9a7b1f")
MAX_POINTS = 600

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: `x` and `y` of equal length, in data units; `points` draws a dot at each value as well."""

    name: str
    x: ArrayLike
    y: ArrayLike
    points: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A limit: a vertical line at `at` (horizontal when `horizontal`) with a label."""

    at: float
    label: str
    horizontal: bool = False


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(max(value, self.low)) if self.log else value
        return self.start + (min(max(at, low), high) - low) / (high - low) * (self.end - self.start)


def chart(
    title: str, series: Sequence[Series], *, x: str, y: str, marks: Sequence[Mark] = (), log_x: bool = False
) -> str:
    """One chart; `x` and `y` are the axis labels (with units). Without any value it says so."""
    columns = [(item, *_clean(item, log_x)) for item in series]
    columns = [column for column in columns if column[1].size]
    if not columns:
        return f'<p class="empty">{escape(title)}: nothing was measured.</p>'
    xs = np.concatenate([column[1] for column in columns] + [np.array([m.at for m in marks if not m.horizontal])])
    ys = np.concatenate([column[2] for column in columns] + [np.array([m.at for m in marks if m.horizontal])])
    across = _range(xs, LEFT, WIDTH - RIGHT, log=log_x)
    up = _range(np.append(ys, 0.0), HEIGHT - BOTTOM, TOP, log=False)
    parts = [f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>']
    parts += _axes(across, up, x, y)
    for mark in marks:
        parts += _mark(mark, across, up)
    for number, (item, xs_of, ys_of) in enumerate(columns):
        parts += _line(item, xs_of, ys_of, across, up, COLOURS[number % len(COLOURS)])
    parts += _legend([column[0].name for column in columns])
    body = "\n".join(parts)
    label = escape(title, {'"': "&quot;"})
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}">\n{body}\n</svg>'
    )


def cdf(name: str, values: ArrayLike) -> Series:
    """The cumulative distribution of `values` as a series from 0 to 1, thinned to a few hundred points."""
    array = np.sort(np.asarray(values, dtype=np.float64))
    if array.size == 0:
        return Series(name, [], [])
    index = np.unique(np.linspace(0, array.size - 1, min(array.size, 400)).astype(np.int64))
    return Series(name, array[index], (index + 1) / array.size)


def _clean(item: Series, log_x: bool) -> tuple[Floats, Floats]:
    x, y = np.asarray(item.x, dtype=np.float64), np.asarray(item.y, dtype=np.float64)
    keep = np.isfinite(x) & np.isfinite(y)
    if log_x:
        keep &= x > 0
    x, y = x[keep], y[keep]
    if x.size > MAX_POINTS:
        # Means of equal runs: a long timeline keeps its level, where picking every n-th would alias its bursts.
        runs = np.array_split(np.arange(x.size), MAX_POINTS)
        x, y = np.array([x[run].mean() for run in runs]), np.array([y[run].mean() for run in runs])
    return x, y


def _range(values: Floats, start: float, end: float, *, log: bool) -> _Scale:
    values = values[values > 0] if log else values
    low, high = float(values.min()), float(values.max())
    if log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
        return _Scale(low, high if high > low else low * 10, start, end, log=True)
    return _Scale(low, high if high > low else low + 1.0, start, end)


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) that cover [low, high]."""
    rough = (high - low) / wanted
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _axes(across: _Scale, up: _Scale, x: str, y: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    if across.log:
        decades = range(round(math.log10(across.low)), round(math.log10(across.high)) + 1)
        x_ticks = [10.0**decade for decade in decades]
    else:
        x_ticks = ticks(across.low, across.high)
    parts = []
    for value in x_ticks:
        at = across(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{value:g}</text>')
    for value in ticks(up.low, up.high, 5):
        at = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    centre = (TOP + bottom) / 2
    parts.append(f'<text transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">{escape(y)}</text>')
    return parts


def _mark(mark: Mark, across: _Scale, up: _Scale) -> list[str]:
    bottom = HEIGHT - BOTTOM
    if mark.horizontal:
        at = up(mark.at)
        line = f'<line class="mark" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>'
        return [line, f'<text class="mark" x="{LEFT + 4}" y="{at - 4:.1f}">{escape(mark.label)}</text>']
    at = across(mark.at)
    line = f'<line class="mark" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>'
    anchor = "end" if at > (LEFT + WIDTH - RIGHT) / 2 else "start"
    shift = -4 if anchor == "end" else 4
    place = f'x="{at + shift:.1f}" y="{bottom - 6}" text-anchor="{anchor}"'
    return [line, f'<text class="mark" {place}>{escape(mark.label)}</text>']


def _line(item: Series, x: Floats, y: Floats, across: _Scale, up: _Scale, colour: str) -> list[str]:
    pairs = [(across(float(a)), up(float(b))) for a, b in zip(x, y, strict=True)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in pairs)
    parts = [f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}"/>']
    if item.points:
        for (a, b), value_x, value_y in zip(pairs, x, y, strict=True):
            tip = escape(f"{item.name}: {value_x:g}, {value_y:g}")
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.2" fill="{colour}"><title>{tip}</title></circle>')
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts, at = [], WIDTH - RIGHT
    for number, name in reversed(list(enumerate(names))):
        at -= 6.4 * len(name)
        parts.append(f'<text x="{at:.1f}" y="16">{escape(name)}</text>')
        at -= 16
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{at:.1f}" y="8" width="10" height="10" fill="{colour}"/>')
        at -= 12
    return parts
