"""Line charts as SVG: axes, ticks, legend and marked limits, with CSS for light and dark mode."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import ArrayLike, NDArray

WIDTH, HEIGHT = 720.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 34.0, 44.0
COLOURS = ("#2a6fbb", "#c8553d", "#3a8f5c", "#8a5ab5", "#9a7b1f")
CHARACTER = 8.2
"""Width of a character in a legend, of text up to 15 high."""

STYLE = (
    "svg { font-family: system-ui, sans-serif; fill: #1f2328; } .title { font-weight: 600; } "
    ".grid { stroke: #8884; } line.mark { stroke: #c8321f; stroke-dasharray: 4 3; } "
    "text.mark { fill: #c8321f; } @media (prefers-color-scheme: dark) { svg { fill: #d5dbe1; } "
    "line.mark { stroke: #ff7b6b; } text.mark { fill: #ff7b6b; } }"
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart."""

    name: str
    x: ArrayLike  # data units, as long as `y`
    y: ArrayLike
    points: bool = False  # draw a dot at each value as well
    fill: bool = False  # tint the area below
    dots: bool = False  # draw small dots only, one per value
    low: ArrayLike = ()  # ends of error bars
    high: ArrayLike = ()
    colour: str = ""  # default: by the position in the chart


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled limit: a horizontal line at `at`."""

    at: float
    label: str


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
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    marks: Sequence[Mark] = (),
    log_x: bool = False,
    top: float = 0.0,
    span: tuple[float, float] | None = None,
) -> str:
    """Return a chart, or a paragraph that says so if there are no values.

    `x` and `y` are axis labels with units. The y axis covers 0, `top` and the values; the x axis covers
    `span` and the values.
    """
    columns = [(item, *_clean(item, log_x)) for item in series]
    columns = [column for column in columns if column[1].size]
    if not columns:
        return f'<p class="empty">{escape(title)}: no measurements.</p>'
    xs = np.concatenate([*(column[1] for column in columns), span or ()])
    heights = [value for _, _, value in columns] + [np.ravel(item.high) for item, _, _ in columns]
    ys = np.concatenate([*heights, [0.0, top], [mark.at for mark in marks]])
    across = _range(xs, LEFT, WIDTH - RIGHT, log=log_x)
    up = _range(ys[np.isfinite(ys)], HEIGHT - BOTTOM, TOP, log=False)
    parts = [f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>', *_axes(across, up, x, y)]
    colours = [column[0].colour or COLOURS[number % len(COLOURS)] for number, column in enumerate(columns)]
    for (item, xs_of, ys_of), colour in zip(columns, colours, strict=True):
        parts += _line(item, xs_of, ys_of, across, up, colour)
    for number, mark in enumerate(marks):
        parts += _mark(mark, up, number)
    parts += _legend([column[0].name for column in columns], colours)
    body = "\n".join(parts)
    label = escape(title, {'"': "&quot;"})
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}">\n{body}\n</svg>'
    )


def document(charts: Sequence[str], text: float = 11.0) -> str:
    """Return a stand-alone SVG file with charts below each other and the style that a page would provide.

    `text` is the height of the text where a chart is WIDTH wide.
    """
    size = f'width="{WIDTH:g}" height="{HEIGHT:g}"'
    parts = (each.replace("<svg ", f'<svg y="{i * HEIGHT:g}" {size} ', 1) for i, each in enumerate(charts))
    box = f"0 0 {WIDTH:g} {HEIGHT * len(charts):g}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-size="{text:g}"><style>{STYLE}</style>\n'
        f"{''.join(parts)}\n</svg>\n"
    )


def _clean(item: Series, log_x: bool) -> tuple[Floats, Floats]:
    x, y = np.asarray(item.x, dtype=np.float64), np.asarray(item.y, dtype=np.float64)
    keep = np.isfinite(x) & np.isfinite(y)
    if log_x:
        keep &= x > 0
    return x[keep], y[keep]


def _range(values: Floats, start: float, end: float, *, log: bool) -> _Scale:
    values = values[values > 0] if log else values
    low, high = float(values.min()), float(values.max())
    if log:
        high = _round_up(high)
        low = _round_down(max(low, high / 1000))  # a few values near zero must not compress the rest
        return _Scale(low, high if high > low else low * 10, start, end, log=True)
    return _Scale(low, high if high > low else low + 1.0, start, end)


def _round_down(value: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is not above `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (5, 2, 1) if power * factor <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * (1 - 1e-9))


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    step = _round_up((high - low) / wanted)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 13) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten in [low, high], or only the powers if there are more than `most`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(found) <= most:
            break
    return found


def _axes(across: _Scale, up: _Scale, x: str, y: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    x_ticks = log_ticks(across.low, across.high) if across.log else ticks(across.low, across.high)
    parts = []
    for value in x_ticks:
        at = across(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{value:g}</text>')
    for value in ticks(up.low, up.high, 5):
        at = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + bottom) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    turned = f'transform="translate(14 {centre}) rotate(-90)"'
    parts.append(f'<text class="axis" {turned} text-anchor="middle">{escape(y)}</text>')
    return parts


def _mark(mark: Mark, up: _Scale, number: int) -> list[str]:
    at = up(mark.at)
    # The label of a line at the top is below it, outside the title. Labels are side by side, as levels are close.
    place = f'x="{LEFT + 4 + 40 * number}" y="{at + (12 if at < TOP + 12 else -4):.1f}"'
    return [
        f'<line class="mark" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>',
        f'<text class="mark" {place}>{escape(mark.label)}</text>',
    ]


def _line(item: Series, x: Floats, y: Floats, across: _Scale, up: _Scale, colour: str) -> list[str]:
    pairs = [(across(float(a)), up(float(b))) for a, b in zip(x, y, strict=True)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in pairs)
    if item.dots:
        circles = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.2"/>' for a, b in pairs]
        return [f'<g fill="{colour}" fill-opacity="0.75">', *circles, "</g>"]
    parts = []
    if item.fill:
        floor = f"{pairs[-1][0]:.1f},{up(0.0):.1f} {pairs[0][0]:.1f},{up(0.0):.1f}"
        parts.append(f'<polygon fill="{colour}" fill-opacity="0.15" stroke="none" points="{path} {floor}"/>')
    parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}"/>')
    parts += _bars(item, across, up, colour)
    if item.points:
        for (a, b), value_x, value_y in zip(pairs, x, y, strict=True):
            tip = escape(f"{item.name}: {value_x:g}, {value_y:g}")
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.2" fill="{colour}"><title>{tip}</title></circle>')
    return parts


def _bars(item: Series, across: _Scale, up: _Scale, colour: str) -> list[str]:
    if not np.size(item.low):
        return []
    parts = []
    for value, low, high in zip(np.ravel(item.x), np.ravel(item.low), np.ravel(item.high), strict=True):
        at, top, end = across(float(value)), up(float(high)), up(float(low))
        parts.append(f'<line stroke="{colour}" x1="{at:.1f}" y1="{top:.1f}" x2="{at:.1f}" y2="{end:.1f}"/>')
        parts += [
            f'<line stroke="{colour}" x1="{at - 4:.1f}" y1="{edge:.1f}" x2="{at + 4:.1f}" y2="{edge:.1f}"/>'
            for edge in (top, end)
        ]
    return parts


def _legend(names: Sequence[str], colours: Sequence[str]) -> list[str]:
    parts, at = [], WIDTH - RIGHT
    for name, colour in reversed(list(zip(names, colours, strict=True))):
        at -= CHARACTER * len(name)
        parts.append(f'<text x="{at:.1f}" y="16">{escape(name)}</text>')
        at -= 16
        parts.append(f'<rect x="{at:.1f}" y="8" width="10" height="10" fill="{colour}"/>')
        at -= 12
    return parts
