"""The screen of `tidemill top`, for a live terminal and for a single report.

Text from the server (model, reasons, batches) is untrusted: `plain` escapes it, and it is never parsed as markup.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from gateway.commands.batch_client import expected_end, token_counts
from gateway.commands.top.figures import (
    NOTHING,
    UNICODE,
    Glyphs,
    bar,
    count,
    duration,
    glyphs_for,
    percent,
    plain,
    seconds,
    shortened,
    spark,
)
from gateway.commands.top.history import History, Snapshot
from predictor.slo import SLO, SLOError, nearest_rank

LABEL = 9
NOTE = 34
ANSWERS = 60.0
"""Width in columns of the labels at the left and of the notes at the right of a spark line."""
RECENT = 10.0
"""Seconds over which rates are averaged."""
FEWEST_ROWS = 3
_COLOURS = {"online": "cyan", "offline": "yellow", "good": "green", "bad": "bold red", "warn": "yellow"}
_BREAKER = {"closed": "good", "open": "bad", "half_open": "warn"}


@dataclass
class Picture:
    """The content of the screen; rich renders it."""

    url: str
    history: History = field(default_factory=History)
    model: str = ""
    version: str = ""
    batches: Sequence[Mapping[str, Any]] | None = None
    """Objects of `/v1/batches`; None if the server has no batch API or they are not loaded yet."""
    trouble: str = ""
    """Reason why the figures are missing or out of date."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = glyphs_for(options.encoding)
        height = options.height  # of a terminal; None for a report of any length
        tall = 3 if height is not None and height >= 34 else 2
        yield from _lines_above(self, options.max_width, glyphs, tall)
        if self.batches is not None:
            used = 14 + 2 * tall + len((self.history.latest or {}).get("objectives", ()))
            rows = len(self.batches) if height is None else max(FEWEST_ROWS, height - used)
            yield from _batches(self.batches, rows, options.max_width, glyphs, time_of(self.history))


def time_of(history: History) -> float:
    """Return the server's time in the latest snapshot, or the local time if there is none."""
    return history.latest["time"] if history.latest is not None else time.time()


def _lines_above(picture: Picture, width: int, glyphs: Glyphs, tall: int) -> RenderResult:
    yield _head(picture, width)
    now = picture.history.latest
    if now is None:
        return
    grid = Table.grid(expand=True)
    grid.add_column(width=LABEL, style="dim", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis" if glyphs is UNICODE else "crop")
    _promise(grid, now)
    grid.add_row()
    _rates(grid, picture.history, width - LABEL, glyphs, tall)
    _latencies(grid, picture.history, now, width - LABEL, glyphs)
    grid.add_row()
    _engine(grid, picture.history, now, glyphs)
    yield grid


def _head(picture: Picture, width: int) -> Text:
    now = picture.history.latest
    if picture.trouble:
        state, style = plain(picture.trouble), _COLOURS["bad"]
    elif now is None:
        state, style = "no figures", _COLOURS["warn"]
    elif now["ready"]:
        state, style = "ready", _COLOURS["good"]
    else:
        state, style = plain(now["reason"] or "not ready"), _COLOURS["bad"]
    title = f"tidemill {plain(picture.version)}  {plain(picture.model)}".rstrip()
    text = Text(f"{shortened(title, width // 2)}  {shortened(picture.url, width // 3)}", style="bold")
    room = width - text.cell_len - 2
    if len(state) <= room:
        return text + Text("  ") + Text(state, style=style)
    return text + Text("\n") + Text(shortened(state, width), style=style)


def _promise(grid: Table, now: Snapshot) -> None:
    share, target = now["attainment"], now["attainment_target"]
    style = "" if share is None else _COLOURS["good" if share >= (target or 0.99) else "bad"]
    text = Text("no objective is set")
    if now["slo"]:
        text = Text(percent(share), style=style) + Text(f" of the last chats kept {plain(now['slo'])}")
    grid.add_row("promise", text.append(f"; {count(now['refused'])} refused" if now["refused"] else "", style=""))
    for each in now["objectives"]:
        name, figures, colour = standing(each)
        grid.add_row("", Text(f"{name} ".ljust(9)) + Text(figures, style=colour))


def standing(each: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the name, text and colour of an objective, as the server measured it over the last chats."""
    service, _, key = plain(each["objective"]).partition("=")[0].rpartition(":")
    metric, _, statistic = key.partition("_")
    name = f"{service} {metric.upper()} {statistic if statistic == 'mean' else statistic.upper()}".lstrip()
    value, bound = each["value"], each["bound"]
    if value is None or bound is None:
        return name, seconds(value), ""
    kept = "" if each["attainment"] is None else f", kept by {percent(each['attainment'])}"
    return name, f"{seconds(value)} of {seconds(bound)}{kept}", _COLOURS["good" if value <= bound else "bad"]


def _rates(grid: Table, history: History, width: int, glyphs: Glyphs, tall: int) -> None:
    cells, span = max(10, width - NOTE), history.span()
    lanes = dict(zip(("online", "offline"), history.rates(cells, span), strict=True))
    top = max([1.0, *(rate for lane in lanes.values() for rate in lane if rate is not None)])
    for (name, lane), rate in zip(lanes.items(), history.last_rates(), strict=True):
        lines = spark(lane, top, glyphs, tall)
        for number, line in enumerate(lines):
            last = number == len(lines) - 1
            note = f" {count(rate)} tokens/s in + out" if last else f" last {duration(span)}, top {count(top)}/s"
            shown = note if last or (name == "online" and number == 0) else ""
            grid.add_row(name if last else "", Text(line, style=_COLOURS[name]) + Text(shown))
    if rates := history.answer_rates(ANSWERS):
        answers, output, prompts = rates
        grid.add_row("answers", f"{count(answers)}/s offline: {count(output)} output, {count(prompts)} prompt tokens/s")


def _latencies(grid: Table, history: History, now: Snapshot, width: int, glyphs: Glyphs) -> None:
    for label, name, metric in (("TTFT", "ttft", "ttft"), ("TBT max", "gap", "tbt")):
        limit = limit_of(now["slo"], metric)
        cells = max(10, width - NOTE)
        worst = history.worst(name, cells, history.span())
        values = history.values(name)
        top = max([(limit or 0.0) * 1.25, 0.001, *(v for v in worst if v is not None)])
        if limit is not None:
            top = min(top, 3 * limit)
        line = Text(spark(worst, top, glyphs)[0], style=_COLOURS["online"])
        for cell, value in enumerate(worst):
            if limit is not None and value is not None and value > limit:
                line.stylize(_COLOURS["bad"], cell, cell + 1)
        grid.add_row(label, line + Text(" ") + _latency_note(values, limit))


def _latency_note(values: Sequence[float], limit: float | None) -> Text:
    if not values:
        return Text("no chat yet")
    high = nearest_rank(values, 99)
    text = Text(f"P50 {seconds(nearest_rank(values, 50))} P99 ")
    missed = limit is not None and high > limit
    text.append(seconds(high), style="" if limit is None else _COLOURS["bad" if missed else "good"])
    return text.append("" if limit is None else f" of {seconds(limit)}")


def limit_of(slo: str | None, metric: str) -> float | None:
    """Return the strictest limit of an SLO on a metric, seconds, or None if there is none."""
    try:
        return SLO.parse(slo).limit_of(metric) if slo else None
    except SLOError:  # a newer server may have other objectives
        return None


def _engine(grid: Table, history: History, now: Snapshot, glyphs: Glyphs) -> None:
    steps = history.change("steps", RECENT)
    measured, predicted = (
        (history.change(name, RECENT) or 0.0) / steps if steps else None
        for name in ("step_seconds", "predicted_seconds")
    )
    grid.add_row("steps", Text(f"{seconds(measured)} measured, {seconds(predicted)} planned with a safety margin"))
    leftover, used = history.change("leftover_seconds", RECENT), history.change("leftover_used_seconds", RECENT)
    share = percent(used / leftover, 0) if leftover and used is not None else NOTHING
    breaker = now["breaker"]
    grid.add_row(
        "budget",
        Text(f"{seconds(now['latency_budget'])}, leftover used {share}, breaker ")
        + Text(plain(breaker or NOTHING).replace("_", " "), style=_COLOURS.get(_BREAKER.get(str(breaker), ""), "")),
    )
    queues = (
        f"{name} {count(now['running'][name])} running, {count(now['waiting'][name])} waiting"
        for name in ("online", "offline")
    )
    grid.add_row("requests", Text("; ".join(queues)))
    if engines := now.get("engines"):  # more than one; an older server omits the key
        for number, engine in enumerate(engines):
            style = "" if engine["state"] == "ready" else _COLOURS["bad"]
            grid.add_row("" if number else "engines", Text(_one_of(engine, history), style=style))
    grid.add_row("cache", _pool(now["units"], glyphs))


def _one_of(engine: Mapping[str, Any], history: History) -> str:
    """Format one engine of several: requests, tokens/s and cache, or the reason why it is not ready."""
    if engine["state"] != "ready":
        return f"{engine['engine']}  {plain(engine['trouble'] or engine['state'])}"
    online, offline = history.engine_rates(engine["engine"], RECENT)
    units, partner = engine.get("units", {}), engine.get("pipeline_with")
    if partner is not None and not units.get("total"):
        return f"{engine['engine']}  computes its layers for engine {partner}"
    used = units["owned"] / units["total"] if units.get("total") else None
    return (
        f"{engine['engine']}  {count(engine['running'])} running, {count(engine['waiting'])} waiting, "
        f"online {count(online)} + offline {count(offline)} tokens/s in + out, cache {percent(used, 0)}"
        + (f", one pipeline with engine {partner}" if partner is not None else "")
    )


def _pool(units: Mapping[str, Any], glyphs: Glyphs) -> Text:
    total = units["total"] or 1
    owned, cached = (round(20 * units[name] / total) for name in ("owned", "cached"))
    text = Text(glyphs.full * owned, style="cyan")
    text.append(glyphs.full * cached if glyphs is UNICODE else "+" * cached, style="blue")
    text.append(glyphs.light * (20 - owned - cached), style="dim")
    text.append(f" in use {percent(units['owned'] / total, 0)}, prefixes {percent(units['cached'] / total, 0)}")
    if units["hidden_blocks"]:
        text.append(f", {count(units['hidden_blocks'])} blocks of hidden state")
    if units["host_total"]:
        text.append(f", host {percent(units['host_used'] / units['host_total'], 0)}")
    return text


def _batches(batches: Sequence[Mapping[str, Any]], rows: int, width: int, glyphs: Glyphs, now: float) -> RenderResult:
    yield Text()
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim", show_edge=False)
    table.add_column("batch", width=20, no_wrap=True)
    table.add_column("state", width=11, no_wrap=True)
    table.add_column("progress", ratio=1, no_wrap=True)
    table.add_column("failed", width=7, justify="right", no_wrap=True)
    table.add_column("left", width=12, justify="right", no_wrap=True)
    room = max(6, width - 80 + 12)
    for batch in batches[:rows]:
        table.add_row(*_batch(batch, room, glyphs, now))
    yield table
    if foot := _batches_foot(batches, rows):
        yield Text(foot, style="dim")


def _batches_foot(batches: Sequence[Mapping[str, Any]], rows: int) -> str:
    """Return the number of batches that are not shown, and the tokens of those that run."""
    if not batches:
        return "no batch yet"
    parts = [f"and {len(batches) - rows} more"] if len(batches) > rows else []
    running = [token_counts(batch) for batch in batches if batch["status"] == "in_progress"]
    if any(left is not None for _, left in running):
        done, more = sum(tokens for tokens, _ in running), sum(left or 0 for _, left in running)
        parts.append(f"running: {count(done)} tokens done, about {count(more)} left")
    return "; ".join(parts)


def _batch(batch: Mapping[str, Any], room: int, glyphs: Glyphs, now: float) -> tuple[Text, ...]:
    counts = batch.get("request_counts") or {}
    total, completed, failed = (counts.get(name) or 0 for name in ("total", "completed", "failed"))
    done = completed + failed
    progress = Text(bar(done / total if total else 0.0, room, glyphs), style=_COLOURS["offline"])
    progress.append(f" {count(done)}/{count(total)}", style="default")
    left = time_left(batch, now)
    return (
        Text(shortened(batch["id"], 20)),
        Text(shortened(batch["status"], 11).replace("_", " ")),
        progress,
        Text(count(failed) if failed else "", style=_COLOURS["bad"]),
        Text("" if left is None else duration(left)),
    )


def time_left(batch: Mapping[str, Any], now: float) -> float | None:
    """Return the seconds until the end of a batch that the server expects; None if it does not know."""
    end = expected_end(batch) if batch["status"] == "in_progress" else None
    return None if end is None else max(0.0, end - now)
