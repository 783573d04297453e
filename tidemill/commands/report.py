"""`tidemill report`: the chats, batch work and pauses of the last hours, in a few lines."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.client import TERMINAL, ServerClient
from tidemill.progress import duration_text, eta_text

MAX_BATCHES = 100
"""Number of newest batches in a report."""


def report(client: ServerClient, hours: int, price_in: float, price_out: float) -> str:
    """Ask a server, and return the text. Prices are those of a million tokens. Raises ChatError."""
    minutes = client.call("GET", "/dashboard/timeline", hours=hours)["minutes"]
    batches = list(client.batches(MAX_BATCHES))
    return report_text(minutes, batches, time.time(), hours, price_in, price_out)


def report_text(
    minutes: Sequence[Mapping[str, Any]],
    batches: Sequence[Mapping[str, Any]],
    now: float,
    hours: int,
    price_in: float = 0.0,
    price_out: float = 0.0,
) -> str:
    """Return the report on minutes of the server's timeline and its newest batches. `now`: Unix seconds."""
    sums = Counter[str]()
    pauses = Counter[str]()
    for minute in minutes:
        sums.update({name: value for name, value in minute.items() if isinstance(value, int)})
        pauses[minute["why"]] += minute["paused"]
    chats = sums["good"] + sums["bad"]
    kept = f"{sums['good'] / chats:.1%} of {chats:,} chats within their limits" if chats else "no chat"
    refused = f", {sums['refused']:,} refused" if sums["refused"] else ""
    worth = (sums["prompt"] * price_in + sums["output"] * price_out) / 1e6
    tokens = f"{sums['output']:,} output and {sums['prompt']:,} prompt tokens"
    tokens += f", worth {worth:,.2f}" if worth else ""
    paused = [f"{duration_text(seconds)} ({why})" for why, seconds in pauses.most_common(3) if seconds >= 1]
    return "\n".join((
        f"since {time.strftime('%a %H:%M', time.localtime(now - hours * 3600))}: {kept}{refused}",
        f"batch work: {sums['answers']:,} answers, {tokens}",
        f"paused for chats: {'; '.join(paused) or 'never'}",
        f"batches: {_batches(batches, now, hours)}",
    ))  # fmt: skip


def _batches(batches: Sequence[Mapping[str, Any]], now: float, hours: int) -> str:
    ended = Counter(each["status"] for each in batches if _ended_at(each) >= now - hours * 3600)
    parts = [f"{count} {state}" for state, count in ended.items()]
    for each in batches:
        if each["status"] not in TERMINAL:
            left = eta_text(each, now)
            parts.append(f"{each['id']} {each['status']}" + (f", {left}" if left else ""))
    return "; ".join(parts) or "none"


def _ended_at(batch: Mapping[str, Any]) -> float:
    """Return the Unix time at which a batch ended, -1 while it has not."""
    return next((float(batch[f"{state}_at"]) for state in sorted(TERMINAL) if batch.get(f"{state}_at")), -1.0)
