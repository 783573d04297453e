"""Texts that `serve` prints when the server listens, drains and has stopped."""

import logging

from engine import __version__
from engine.api import EngineInfo, SamplingDefaults
from gateway.context import GatewayContext
from predictor.slo import SLO, UNITS, Objective

status = logging.getLogger("tidemill.status")
"""Logger of the texts; the log level of the server does not apply to it."""

LABEL = 17
_METRICS = {"ttft": "first token", "tbt": "gap between tokens", "tpot": "time per token"}


def listening_text(context: GatewayContext, url: str) -> str:
    """Return the block for a server that listens at `url`."""
    colocation = context.metrics.stats.colocation
    batches, lines = context.lifecycle.unfinished()
    rows = {
        "chat and batches": f"{url}/v1",
        "page": url,
        "model": model_text(context.models.first, context.info),
        "room": f"cache {context.info.cache_tokens:,} tokens, context {context.info.max_model_len:,} tokens",
        "sampling": _sampling_text(context.info.sampling),
        "promise": promise_text(SLO.parse(colocation.slo)) if colocation is not None and colocation.slo else "",
        "unfinished": f"{count_text(batches, 'batch', 'batches')}, {lines:,} lines left" if batches else "",
    }
    block = "".join(f"\n  {label:<{LABEL}} {text}" for label, text in rows.items() if text)
    return f"tidemill {__version__} is ready{block}\ntidemill: listening on {url}"


def draining_text(chats: int, seconds: float) -> str:
    """Return the line for a server that was asked to stop. `seconds`: maximum time for the running chats to end."""
    left = f"{count_text(chats, 'chat', 'chats')} may take up to {seconds:.0f} s" if chats else "no chat is running"
    return f"tidemill: draining: {left}; a second signal (Ctrl-C) exits at once"


def stopped_text(batches: int) -> str:
    """Return the line for a server that has stopped. `batches`: number of unfinished batches."""
    rest = f"; the next start continues {count_text(batches, 'batch', 'batches')}" if batches else ""
    return f"tidemill: stopped{rest}"


def model_text(name: str, info: EngineInfo) -> str:
    """Return the model's name, architecture, size, precision and device."""
    return f"{name} ({info.architecture}, {info.num_parameters:,} parameters, {info.dtype} on {info.device})"


def promise_text(slo: SLO) -> str:
    """Return an SLO in words, e.g. "first token within 1 s, gap between tokens within 100 ms, for 99 % of chats"."""
    tolerances = set(slo.tolerances().values())
    if len(tolerances) == 1 and len(slo.tolerances()) == len(slo.objectives) > 1:
        return f"chats at most {tolerances.pop() * 100:g} % slower than without batch work"
    groups: dict[str, list[str]] = {}
    for each in slo.objectives:
        scope = f", for {each.percentile} % of chats" if each.per_request else ""
        groups.setdefault(scope, []).append(_objective_text(each))
    return "; ".join(", ".join(texts) + scope for scope, texts in groups.items())


def _objective_text(objective: Objective) -> str:
    name = _METRICS[objective.metric]
    if not objective.per_request:
        name = f"{'mean' if objective.percentile is None else f'P{objective.percentile}'} {name}"
    if objective.limit is not None:
        return f"{name} within {time_text(objective.limit)}"
    assert objective.tolerance is not None
    return f"{name} at most {objective.tolerance * 100:g} % longer than without batch work"


def time_text(seconds: float) -> str:
    """Format a duration with its unit, e.g. "100 ms"."""
    unit = next(unit for unit in ("s", "ms", "us") if seconds >= UNITS[unit] or unit == "us")
    return f"{seconds / UNITS[unit]:g} {unit}"


def _sampling_text(sampling: SamplingDefaults) -> str:
    values = ", ".join(f"{name} {value}" for name, value in sampling._asdict().items() if value is not None)
    return f"{values} (generation_config.json)" if values else ""


def count_text(number: int, one: str, many: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many}"
