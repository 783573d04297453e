"""Writes docker/grafana/dashboards/tidemill.json: `python tools/grafana_dashboard.py [--check]`.

Panels name metrics of the application's own registry; a name that is not there is an error, so the dashboard cannot
drift from what the server shows. `--check` compares with the file and changes nothing.
"""

import dataclasses
import json
import re
import sys
import typing
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.api import (  # noqa: E402
    ColocationStats,
    EngineClient,
    EngineState,
    EngineStats,
    EngineView,
    PipelineStats,
    RequestClass,
)
from gateway.batch.forecast import Forecast  # noqa: E402
from gateway.batch.metrics import BatchCollector  # noqa: E402
from gateway.batch.tenants import Ownership  # noqa: E402
from gateway.batch.worker import BatchWorker  # noqa: E402
from gateway.telemetry.metrics import GatewayMetrics  # noqa: E402

TARGET = ROOT / "docker" / "grafana" / "dashboards" / "tidemill.json"
WIDTH, HEIGHT = 8, 8
_NAME = re.compile(r"\b(?:tidemill_\w+|vllm:\w+|process_\w+)")


def _rate(metric: str, selector: str = "", by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum "
    return f"{grouped}(rate({metric}{selector}[$__rate_interval]))"


def _quantile(rank: float, metric: str, service_class: str) -> str:
    buckets = f'{metric}_bucket{{class="{service_class}"}}'
    return f"histogram_quantile({rank}, sum by (le) (rate({buckets}[$__rate_interval])))"


def _mean_step(counter: str) -> str:
    return f"{_rate(counter)} / {_rate('tidemill_steps_total')}"


PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Objective met, last minute", "percentunit", (("chats", "tidemill_slo_attainment"),)),
    (
        "Tokens per second",
        "short",
        (
            (
                "chat",
                f"{_rate('tidemill_prefill_tokens_total')} + {_rate('tidemill_decode_tokens_total')}"
                f" - {_rate('tidemill_offline_computed_tokens_total')}",
            ),
            ("batch", _rate("tidemill_offline_computed_tokens_total")),
        ),
    ),
    (
        "Requests",
        "short",
        (
            ("{{class}} running", "tidemill_requests_running"),
            ("{{class}} waiting", "tidemill_requests_waiting"),
        ),
    ),
    (
        "Time to first token, chat",
        "s",
        tuple(
            (f"P{int(100 * q)}", _quantile(q, "tidemill_time_to_first_token_seconds", "online")) for q in (0.5, 0.99)
        ),
    ),
    (
        "Time between tokens, chat",
        "s",
        tuple(
            (f"P{int(100 * q)}", _quantile(q, "tidemill_time_between_tokens_seconds", "online")) for q in (0.5, 0.99)
        ),
    ),
    (
        "Time in the queue",
        "s",
        tuple((f"{c} P99", _quantile(0.99, "tidemill_request_queue_seconds", c)) for c in ("online", "offline")),
    ),
    (
        "Step time, mean",
        "s",
        (
            ("measured", _mean_step("tidemill_step_seconds_total")),
            ("predicted", _mean_step("tidemill_predicted_step_seconds_total")),
            ("latency budget", "tidemill_latency_budget_seconds"),
        ),
    ),
    ("Prediction error", "percentunit", (("mean relative error", "tidemill_predictor_mape"),)),
    (
        "Leftover given to batch work",
        "percentunit",
        (("share", f"{_rate('tidemill_leftover_used_seconds_total')} / {_rate('tidemill_leftover_seconds_total')}"),),
    ),
    ("Circuit breaker", "short", (("{{state}}", "tidemill_breaker_state"),)),
    ("Cache units", "short", (("{{state}}", "tidemill_device_units_by_state"),)),
    (
        "Host tier and hidden state",
        "short",
        (("host units used", "tidemill_host_units_used"), ("hidden blocks", "tidemill_hidden_blocks")),
    ),
    (
        "Prefix cache hits",
        "percentunit",
        (
            (
                "share of prompt tokens",
                f"{_rate('tidemill_prefix_hit_tokens_total')} / {_rate('tidemill_prefix_queried_tokens_total')}",
            ),
        ),
    ),
    ("Preemptions per second", "short", (("{{cause}}", _rate("tidemill_preemptions_total", by="cause")),)),
    ("Batch jobs", "short", (("{{state}}", "tidemill_batch_jobs"),)),
    ("Batch lines per second", "short", (("{{outcome}}", _rate("tidemill_batch_lines_total", by="outcome")),)),
    ("HTTP responses per second", "short", (("{{status}}", _rate("tidemill_http_responses_total", by="status")),)),
    ("Failed steps per second", "short", (("failed", _rate("tidemill_failed_steps_total")),)),
    ("Resident memory", "bytes", (("server", "process_resident_memory_bytes"),)),
)


def registry_families() -> list[tuple[str, str, tuple[str, ...], str]]:
    """(name, type, labels, help) of everything that /metrics can show, by name."""
    client = SimpleNamespace(info=SimpleNamespace(block_size=0, cache_tokens=0))
    metrics = GatewayMetrics(cast(EngineClient, client), "model")
    one = EngineView(0, EngineState.READY, None, 0, 0, 0.0, EngineStats(running={RequestClass.ONLINE: 0}))
    pipelines = PipelineStats((), 0, 0, 0, False)
    metrics.stats = EngineStats(colocation=_filled(ColocationStats), engines=(one,), pipelines=pipelines)
    forecast = Forecast(lambda: None)
    feeder = SimpleNamespace(retries=Counter(), num_paused=0)
    ended: Counter[bool] = Counter()
    worker = SimpleNamespace(states={}, lines_ended=ended, storage_fault=lambda: None, forecast=forecast, feeder=feeder)
    ownership = SimpleNamespace(unreachable=[])
    metrics.registry.register(BatchCollector(cast(BatchWorker, worker), cast(Ownership, ownership)))
    found = []
    for family in metrics.registry.collect():
        labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
        found.append((family.name, family.type, tuple(labels), family.documentation))
    return sorted(found)


def registry_names() -> set[str]:
    """Every sample name that /metrics can show."""
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {name + ending for name, kind, _, _ in registry_families() for ending in endings.get(kind, ("",))}


def _filled(kind: type[Any]) -> Any:
    """An instance of a dataclass whose fields without a default hold empty values."""
    hints = typing.get_type_hints(kind)
    needed = [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory]
    empty: dict[Any, Any] = {str: "", float: 0.0, int: 0, bool: False}
    return kind(**{name: empty.get(hints[name], () if "tuple" in str(hints[name]) else None) for name in needed})


def dashboard(known: set[str]) -> dict[str, Any]:
    """The dashboard as Grafana reads it. Raises ValueError for a name that the server does not show."""
    panels = []
    for number, (title, unit, queries) in enumerate(PANELS):
        for _, query in queries:
            unknown = {name for name in _NAME.findall(query) if name not in known}
            if unknown:
                raise ValueError(f"panel '{title}': the server has no metric {', '.join(sorted(unknown))}")
        panels.append(
            {
                "id": number + 1,
                "title": title,
                "type": "timeseries",
                "datasource": {"type": "prometheus", "uid": "prometheus"},
                "gridPos": {"h": HEIGHT, "w": WIDTH, "x": WIDTH * (number % 3), "y": HEIGHT * (number // 3)},
                "fieldConfig": {"defaults": {"unit": unit, "custom": {"fillOpacity": 12}}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend}
                    for i, (legend, query) in enumerate(queries)
                ],
            }
        )
    return {
        "uid": "tidemill",
        "title": "tidemill",
        "tags": ["tidemill"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": panels,
    }


def main(words: list[str]) -> int:
    text = json.dumps(dashboard(registry_names()), indent=1) + "\n"
    if "--check" in words:
        if TARGET.read_text() == text:
            return 0
        print("docker/grafana: the dashboard is not what its script writes: run `make docs` and commit it")
        return 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
