"""`report.html`: one self-contained page (inline SVG and CSS, no script) for a run or a sweep.

Knows only summaries, records and timelines; the text is also well-formed XML, which is how it is tested.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from loadgen.metrics import in_window
from loadgen.records import RequestRecord
from loadgen.svg import Mark, Series, cdf, chart

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #66707d; --line: #dde2e8; --page: #ffffff; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa5b1; --line: #343c46; --page: #14181d; --bad: #ff8a80; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0; } td, th { padding: .2rem .8rem .2rem 0; text-align: left;
  border-bottom: 1px solid var(--line); vertical-align: top; } td.n, th.n { text-align: right;
  font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; margin: .6rem 0; } svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg text.title { font-weight: 600; font-size: 12px; } svg .grid { stroke: var(--line); }
svg line.mark { stroke: var(--bad); stroke-dasharray: 4 3; } svg text.mark { fill: var(--bad); }
.bad { color: var(--bad); font-weight: 600; } .soft, .empty { color: var(--soft); }
code { font-size: .9em; overflow-wrap: anywhere; }
"""

LATENCY_ROWS = (
    ("TTFT", "ttft", 1e3, "ms"),
    ("TTFT from sending", "ttft_sent", 1e3, "ms"),
    ("TTFT per prompt token", "normalized_ttft", 1e3, "ms"),
    ("TBT, all gaps", "tbt", 1e3, "ms"),
    ("TBT P99 of each request", "request_tbt_p99", 1e3, "ms"),
    ("TPOT", "tpot", 1e3, "ms"),
    ("End to end", "e2e", 1.0, "s"),
)


def run_page(
    summary: Mapping[str, Any], requests: Sequence[RequestRecord], columns: Mapping[str, NDArray[np.float64]]
) -> str:
    """The page of one run."""
    parts = [_verdict(summary), _facts(summary), _headline(summary)]
    for name in ("online", "offline"):
        if summary[name]["requests"]:
            parts += [f"<h2>Latency, {name}</h2>", _latency_table(summary[name])]
    parts += ["<h2>Over time</h2>", *_over_time(summary, columns)]
    parts += ["<h2>Distributions</h2>", *_distributions(summary, requests)]
    if summary["offline"]["jobs"]:
        parts += ["<h2>Batch jobs</h2>", _rows(summary["offline"]["jobs"])]
    parts += ["<h2>Honesty</h2>", _pairs(summary["honesty"])]
    return _page(f"tidemill bench: {summary['workload']['name']}", parts)


def sweep_page(summary: Mapping[str, Any]) -> str:
    """The page of a sweep: attainment and latency against rate, and the effective throughput."""
    points = sorted(summary["points"], key=lambda point: point["rate"])
    rates = [point["rate"] for point in points]
    levels = [Mark(level / 100, f"{level} %", horizontal=True) for level in (60, 90, 99)]
    attained = Series("SLO attainment", rates, [_number(point["slo_attainment"]) for point in points], points=True)
    parts = [chart("SLO attainment against rate", [attained], x="requests/s", y="share of requests", marks=levels)]
    for name, title in (("ttft_p99", "TTFT P99"), ("tbt_p99", "TBT P99")):
        values = [_number(point[name]) * 1e3 for point in points]
        parts.append(
            chart(f"{title} against rate", [Series(title, rates, values, points=True)], x="requests/s", y="ms")
        )
    found = {key: value for key, value in summary.items() if key.startswith("effective_throughput_")}
    parts += ["<h2>Effective throughput (requests/s)</h2>", _pairs(found), "<h2>Points</h2>", _rows(points)]
    return _page("tidemill bench: sweep", [_facts(summary), *parts])


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _page(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{escape(STYLE)}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _verdict(summary: Mapping[str, Any]) -> str:
    if summary["valid"]:
        return "<p>Valid: the client kept its schedule.</p>"
    items = "".join(f"<li>{escape(reason)}</li>" for reason in summary["invalid"])
    return f"<p class=\"bad\">INVALID: these figures may be the client's, not the server's.</p><ul>{items}</ul>"


def _facts(summary: Mapping[str, Any]) -> str:
    server, workload = summary["server"], summary["workload"]
    rows = {
        "server": f"{server.get('base_url', '')}{server.get('endpoint', '')}",
        "model": server.get("model", ""),
        "version": server.get("version"),
        "device": summary.get("device"),
        "seed / salt": f"{summary['seeds']['seed']} / {summary['seeds']['salt']}",
        "workload": "; ".join([workload["name"], *workload["notes"]]),
        "command": summary["command"],
    }
    return _pairs(rows)


def _headline(summary: Mapping[str, Any]) -> str:
    online, offline = summary["online"], summary["offline"]
    low, high = online["slo_attainment_interval"]
    attained = online["slo_attainment"]
    rows: dict[str, Any] = {}
    if online["requests"]:
        rows["SLO attainment"] = f"{attained:.4f} (95 %: {low:.4f} to {high:.4f}, {online['requests']} requests)"
        rows["online tokens/s (in, out)"] = f"{online['input_throughput']:.1f}, {online['output_throughput']:.1f}"
    rows["offline tokens/s (in + out)"] = f"{offline['offline_throughput']:.1f}"
    rows["all tokens/s"] = f"{summary['total']['throughput']:.1f}"
    extra = {**online, **summary["total"]}
    rows |= {key: value for key, value in extra.items() if key.startswith(("interference_", "harvest"))}
    return f"<h2>Result</h2>{_pairs(rows)}"


def _latency_table(section: Mapping[str, Any]) -> str:
    rows = ['<tr><th></th><th class="n">mean</th><th class="n">P50</th><th class="n">P99</th><th class="n">n</th></tr>']
    for title, name, factor, unit in LATENCY_ROWS:
        values = [section[f"{name}_{key}"] for key in ("mean", "p50", "p99")]
        cells = "".join(f'<td class="n">{_scaled(value, factor)}</td>' for value in values)
        count = section["counts"][name]
        rows.append(f'<tr><td>{title} ({unit})</td>{cells}<td class="n">{count}</td></tr>')
    return f"<table>{''.join(rows)}</table>"


def _scaled(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:.4g}"


def _over_time(summary: Mapping[str, Any], columns: Mapping[str, NDArray[np.float64]]) -> list[str]:
    t = columns["t"]
    window = summary["window"]
    marks = [Mark(window["start"], "measure"), Mark(window["end"], "end")]
    tokens = [
        Series("online", t, columns["online_tokens"]),
        Series("offline (harvested)", t, columns["offline_tokens"]),
    ]
    return [
        chart("Arrivals", [Series("online", t, columns["online_arrivals"])], x="seconds", y="requests/s", marks=marks),
        chart("Tokens delivered", tokens, x="seconds", y="tokens/s", marks=marks),
        chart("Open requests", [Series("online", t, columns["online_open"])], x="seconds", y="requests"),
    ]


def _distributions(summary: Mapping[str, Any], requests: Sequence[RequestRecord]) -> list[str]:
    window = summary["window"]["start"], summary["window"]["end"]
    chosen = in_window(requests, *window)
    limits = {"ttft": summary["slo"].get("ttft"), "tbt": summary["slo"].get("tbt_p99")}
    charts = []
    for name, title in (("ttft", "TTFT"), ("tbt", "TBT")):
        series = []
        for kind in ("online", "offline"):
            own = [record for record in chosen if record.service_class == kind]
            values = [record.ttft for record in own if record.ttft is not None]
            if name == "tbt":
                values = np.concatenate([*(record.gaps() for record in own), np.empty(0)]).tolist()
            series.append(cdf(kind, np.array(values) * 1e3))
        limit = limits[name]
        marks = [Mark(limit * 1e3, f"SLO {limit * 1e3:g} ms")] if limit else []
        charts.append(chart(f"{title}, cumulative", series, x="ms", y="share", marks=marks, log_x=True))
    return charts


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(str(key))}</td><td>{_cell(value)}</td></tr>" for key, value in values.items())
    return f"<table>{rows}</table>"


def _rows(items: Sequence[Mapping[str, Any]]) -> str:
    if not items:
        return '<p class="empty">none</p>'
    head = "".join(f"<th>{escape(str(key))}</th>" for key in items[0])
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in item.values())}</tr>" for item in items)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return '<span class="soft">-</span>'
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        return escape(", ".join(f"{key} {_plain(item)}" for key, item in value.items()))
    return escape(str(value))


def _plain(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
