"""Parts of a self-contained HTML page: style, tiles and tables, as well-formed XML."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

STYLE = """
:root { color-scheme: light; --ink: #1c2430; --soft: #5f6b78; --line: #dfe4ea; --page: #ffffff; --bad: #b3261e;
  --good: #1f7a4a; --shade: #f4f6f8; }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.45rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0; }
.tiles { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0; }
.tile { flex: 1 1 9rem; border: 1px solid var(--line); border-radius: 8px; padding: .6rem .9rem; }
.tile b { display: block; font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3; }
.tile span { color: var(--soft); font-size: .85rem; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; } td, th { padding: .22rem 1.1rem .22rem 0; text-align: left;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.key { color: var(--soft); white-space: nowrap; }
svg { display: block; width: 100%; height: auto; margin: .9rem 0; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg text.title { font-weight: 600; font-size: 13px; } svg text.axis { fill: var(--soft); }
svg .grid { stroke: var(--line); } svg .shade { fill: var(--shade); }
svg line.mark { stroke: var(--bad); stroke-dasharray: 4 3; } svg text.mark { fill: var(--bad); }
.bad { color: var(--bad); font-weight: 600; } .good { color: var(--good); font-weight: 600; }
.soft, .empty { color: var(--soft); }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """Return the document."""
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{escape(STYLE)}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
    """Return tiles for the main figures: (name, value, text below the value)."""
    drawn = [
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(more)}</span></div>'
        for name, value, more in items
    ]
    return f'<div class="tiles">{"".join(drawn)}</div>'


def pairs(values: Mapping[str, Any]) -> str:
    """Return a table of names and values."""
    rows = "".join(
        f'<tr><td class="key">{escape(str(key))}</td><td>{cell(value)}</td></tr>' for key, value in values.items()
    )
    return f"<table>{rows}</table>"


def rows(items: Sequence[Mapping[str, Any]], *, turned: bool = False) -> str:
    """Return a table with a row per item, or with a column per item if `turned`."""
    if not items:
        return '<p class="empty">none</p>'
    if turned:
        lines = [
            f'<tr><td class="key">{escape(str(key))}</td>{"".join(_td(item[key]) for item in items)}</tr>'
            for key in items[0]
        ]
        return f'<div class="wide"><table>{"".join(lines)}</table></div>'
    head = "".join(f'<th class="n">{escape(str(key))}</th>' for key in items[0])
    body = "".join(f"<tr>{''.join(_td(value) for value in item.values())}</tr>" for item in items)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _td(value: Any) -> str:
    return f'<td class="n">{cell(value)}</td>'


def cell(value: Any) -> str:
    """Format a value; None and NaN become "-"."""
    if value is None or value != value:
        return '<span class="soft">-</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return escape(", ".join(f"{key} {plain(item)}" for key, item in value.items()))
    return escape(plain(value))


def plain(value: Any) -> str:
    """Format a number with four significant digits; from 1000 on, as a whole number with thousands separators."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
