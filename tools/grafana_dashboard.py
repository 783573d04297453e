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
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.api import RequestClass  # noqa: E402
from engine.client import (  # noqa: E402
    ClassStanding,
    ColocationStats,
    EngineClient,
    EngineState,
    EngineStats,
    EngineView,
    PipelineStats,
)
from gateway.batch.forecast import Forecast  # noqa: E402
from gateway.batch.metrics import BatchCollector  # noqa: E402
from gateway.batch.notices import Notifier  # noqa: E402
from gateway.batch.tenants import TenantExchange  # noqa: E402
from gateway.batch.worker import BatchWorker  # noqa: E402
from gateway.http.keys import UNLIMITED, Admissions  # noqa: E402
from gateway.telemetry.account import Account  # noqa: E402
from gateway.telemetry.metrics import GatewayMetrics  # noqa: E402
from gateway.telemetry.tenant_metrics import TenantCollector  # noqa: E402
from predictor.slo import Standing  # noqa: E402

TARGET = ROOT / "docker" / "grafana" / "dashboards" / "tidemill.json"
_METRIC = re.compile(r"\b((?:tidemill|vllm:|process)_?\w+)(?:\{([^}]*)\})?(?=[^\w=\"]|$)")
_NAME = re.compile(r"\b(?:tidemill_\w+|vllm:\w+|process_\w+)")


def _rate(metric: str, selector: str = "", by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum "
    return f"{grouped}(rate({metric}{selector}[$__rate_interval]))"


def _quantile(rank: float, metric: str, service_class: str) -> str:
    buckets = f'{metric}_bucket{{class="{service_class}"}}'
    return f"histogram_quantile({rank}, sum by (le) (rate({buckets}[$__rate_interval])))"


def _mean_step(counter: str) -> str:
    return f"{_rate(counter)} / {_rate('tidemill_steps_total')}"


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `queries`: pairs of legend and PromQL; `columns`: width, of 24; `steps`: thresholds, (value, color)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""
    kind: str = "timeseries"
    columns: int = 8
    rows: int = 8
    steps: tuple[tuple[float | None, str], ...] = ()
    stacked: bool = False


GOAL = "tidemill_slo_attainment_target"
GREEN_ABOVE_0 = ((None, "red"), (0.0, "green"))
RED_ABOVE_0 = ((None, "green"), (1.0, "red"))


def _stat(title: str, unit: str, query: str, about: str, steps: tuple[tuple[float | None, str], ...] = ()) -> Panel:
    return Panel(title, unit, (("", query),), about, "stat", 4, 5, steps)


def _limit(metric: str) -> tuple[str, str]:
    return "limit {{objective}}", f'tidemill_slo_objective_bound_seconds{{objective=~"{metric}.*"}}'


def _latency(title: str, metric: str, objective: str) -> Panel:
    ranks = tuple((f"P{int(100 * q)}", _quantile(q, metric, "online")) for q in (0.5, 0.99))
    return Panel(title, "s", (*ranks, _limit(objective)), "Chats only; the limit is that of --slo.")


PROMISE = (
    _stat(
        "Chats within their limits",
        "percentunit",
        "tidemill_slo_attainment",
        "Share of the last 200 chats, of at most ten minutes, that met every limit of the SLO.",
    ),
    _stat(
        "Above the goal by",
        "percentunit",
        f"tidemill_slo_attainment - {GOAL}",
        "Negative: the promise is broken.",
        GREEN_ABOVE_0,
    ),
    _stat(
        "Batch output tokens, 24 h",
        "short",
        'sum(increase(tidemill_generated_tokens_total{class="offline"}[24h]))',
        "Output tokens of batch lines and flex requests that ended.",
    ),
    _stat(
        "Batch lines, 24 h",
        "short",
        'sum(increase(tidemill_batch_lines_total{outcome="completed"}[24h]))',
        "Lines that were answered.",
    ),
    _stat(
        "Queue empty at",
        "dateTimeAsLocal",
        "1000 * (max(tidemill_batch_eta_timestamp_seconds) > 0)",
        "Expected end of the last batch in progress. Empty: no batch, or its end is unknown.",
    ),
    _stat(
        "Batches at risk",
        "short",
        "sum(tidemill_batch_jobs_at_risk)",
        "Batches that may miss their window.",
        RED_ABOVE_0,
    ),
    _latency("Time to first token, chat", "tidemill_time_to_first_token_seconds", "ttft"),
    _latency("Time between tokens, chat", "tidemill_time_between_tokens_seconds", "(tbt|tpot)"),
    Panel(
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
        "Prompt and output tokens computed.",
        stacked=True,
    ),
    Panel(
        "Batch work",
        "short",
        (
            ("lines/s, {{outcome}}", _rate("tidemill_batch_lines_total", by="outcome")),
            ("output tokens/s", _rate("tidemill_generated_tokens_total", '{class="offline"}')),
            ("prompt tokens/s", _rate("tidemill_prompt_tokens_total", '{class="offline"}')),
        ),
        "Of lines and flex requests that ended.",
    ),
    Panel("Tokens left in batches", "short", (("left", "tidemill_batch_remaining_tokens"),), "Estimated."),
    Panel(
        "Room for batch work beside chats",
        "percentunit",
        (
            ("share of the budget", "tidemill_offline_share"),
            ("held", "tidemill_offline_held"),
        ),
        "Below 100 % after missed limits; held while no budget would meet the SLO.",
    ),
)
ENGINE = (
    Panel(
        "Requests",
        "short",
        (
            ("{{class}} running", "tidemill_requests_running"),
            ("{{class}} waiting", "tidemill_requests_waiting"),
        ),
    ),
    Panel(
        "Time in the queue",
        "s",
        tuple((f"{c} P99", _quantile(0.99, "tidemill_request_queue_seconds", c)) for c in ("online", "offline")),
    ),
    Panel(
        "Step time, mean",
        "s",
        (
            ("measured", _mean_step("tidemill_step_seconds_total")),
            ("planned, with safety margin", _mean_step("tidemill_predicted_step_seconds_total")),
            ("latency budget", "tidemill_latency_budget_seconds"),
        ),
    ),
    Panel("Error of predicted step times", "percentunit", (("mean relative error", "tidemill_predictor_mape"),)),
    Panel(
        "Leftover given to batch work",
        "percentunit",
        (("share", f"{_rate('tidemill_leftover_used_seconds_total')} / {_rate('tidemill_leftover_seconds_total')}"),),
    ),
    Panel(
        "Circuit breaker",
        "short",
        (("{{state}}", "tidemill_breaker_state"),),
        "open: batch work pauses beside chats; half_open: it returns; closed: it runs.",
        "state-timeline",
    ),
    Panel("Cache units", "short", (("{{state}}", "tidemill_device_units_by_state"),), stacked=True),
    Panel(
        "Host tier and hidden state",
        "short",
        (
            ("host units used", "tidemill_host_units_used"),
            ("hidden blocks", "tidemill_hidden_blocks"),
        ),
    ),
    Panel(
        "Prefix cache hits",
        "percentunit",
        (
            (
                "share of prompt tokens",
                f"{_rate('tidemill_prefix_hit_tokens_total')} / {_rate('tidemill_prefix_queried_tokens_total')}",
            ),
        ),
    ),
    Panel("Preemptions per second", "short", (("{{cause}}", _rate("tidemill_preemptions_total", by="cause")),)),
    Panel("Batches", "short", (("{{state}}", "tidemill_batch_jobs"),)),
    Panel("HTTP responses per second", "short", (("{{status}}", _rate("tidemill_http_responses_total", by="status")),)),
    Panel(
        "Failed steps, 1 h",
        "short",
        (("", "sum(increase(tidemill_failed_steps_total[1h]))"),),
        "",
        "stat",
        steps=RED_ABOVE_0,
    ),
    Panel("Resident memory", "bytes", (("server", "process_resident_memory_bytes"),)),
)


MECHANISMS = (
    Panel(
        "Requests within their promise, by class",
        "percentunit",
        (
            ("{{slo_class}}", "tidemill_slo_class_attainment"),
            ("limit {{slo_class}}", "tidemill_slo_class_attainment_target"),
        ),
        "Dashed: the share that the class promises.",
    ),
    Panel(
        "Requests of each class per second",
        "short",
        (
            ("{{slo_class}} missed", _rate("tidemill_slo_class_bad_requests_total", by="slo_class")),
            ("{{slo_class}} refused", _rate("tidemill_slo_class_refused_requests_total", by="slo_class")),
        ),
    ),
    Panel(
        "Plans of batch work per second",
        "short",
        (("{{outcome}}", _rate("tidemill_offline_plans_total", by="outcome")),),
        "late: a step found no plan ready.",
    ),
    Panel(
        "Budget searches, 1 h",
        "short",
        (
            ("searches {{outcome}}", "sum by (outcome) (increase(tidemill_budget_searches_total[1h]))"),
            ("baselines {{outcome}}", "sum by (outcome) (increase(tidemill_budget_baselines_total[1h]))"),
            ("refits {{outcome}}", "sum by (outcome) (increase(tidemill_model_refits_total[1h]))"),
            ("breaker openings", "sum(increase(tidemill_breaker_openings_total[1h]))"),
        ),
    ),
    Panel(
        "Rule of the fill, and its bound",
        "short",
        (("{{rule}}", "tidemill_offline_rule"), ("bound by {{limit}}", "tidemill_offline_share_limit")),
        "flat or priced; evidence, brake or breaker bound the share of the budget.",
        "state-timeline",
    ),
    Panel("Waiting batch work by lane", "short", (("{{lane}}", "tidemill_offline_lane_waiting"),), stacked=True),
    Panel(
        "Knapsack decisions per second",
        "short",
        (("{{form}}", _rate("tidemill_knapsack_decisions_total", by="form")),),
        "When memory is short: started from K and V, from hidden state, or passed over.",
    ),
    Panel(
        "Cache units moved per second",
        "short",
        (("{{operation}}", _rate("tidemill_cache_units_total", by="operation")),),
    ),
    Panel(
        "Drafts",
        "short",
        (
            ("verified per second", _rate("tidemill_drafted_tokens_total")),
            ("right per second", _rate("tidemill_accepted_tokens_total")),
        ),
    ),
)
FLEET = (
    Panel(
        "Requests by engine",
        "short",
        (("{{engine}} {{class}} {{state}}", "tidemill_engine_requests"),),
    ),
    Panel(
        "Routed and moved requests per second",
        "short",
        (
            ("{{engine}} routed", _rate("tidemill_engine_routed_requests_total", by="engine")),
            ("{{engine}} moved away", _rate("tidemill_engine_moved_requests_total", by="engine")),
        ),
    ),
    Panel(
        "Layers dropped",
        "short",
        (
            ("pipelines", "tidemill_fleet_pipelines"),
            ("memory short", "tidemill_fleet_memory_short"),
            ("drops, 1 h", "sum(increase(tidemill_fleet_drops_total[1h]))"),
            ("restores, 1 h", "sum(increase(tidemill_fleet_restores_total[1h]))"),
            ("failures, 1 h", "sum(increase(tidemill_fleet_drop_failures_total[1h]))"),
        ),
    ),
)
TENANTS = (
    Panel(
        "Tokens per second by tenant",
        "short",
        (("{{tenant}} {{class}}", _rate("tidemill_tenant_tokens_total", by="tenant, class")),),
        "Prompt and output.",
        stacked=True,
    ),
    Panel("Requests present by tenant", "short", (("{{tenant}} {{state}}", "tidemill_tenant_present_requests"),)),
    Panel(
        "Refused by their tenant's limits, per second",
        "short",
        (("{{tenant}}", _rate("tidemill_tenant_refused_requests_total", by="tenant")),),
    ),
)
FOLDED = {"Tenants": TENANTS, "Engine": ENGINE, "Mechanisms": MECHANISMS, "Several engines": FLEET}


def registry_families() -> list[tuple[str, str, tuple[str, ...], str]]:
    """(name, type, labels, help) of everything that /metrics can show, by name."""
    client = SimpleNamespace(info=SimpleNamespace(block_size=0, cache_tokens=0, adapters=("name",)))
    metrics = GatewayMetrics(cast(EngineClient, client), "model")
    one = EngineView(0, EngineState.READY, None, 0, 0, 0.0, EngineStats(running={RequestClass.ONLINE: 0}))
    pipelines = PipelineStats((), 0, 0, 0, False)
    kept, counts = ClassStanding("default", "ttft_p99=1s", 1.0), {"default": 0}
    standing = Standing("ttft_p99=1s", 0.5, 1.0, 1.0)
    colocation = dataclasses.replace(
        _filled(ColocationStats), slo="ttft_p99=1s", classes=(kept,), objectives=(standing,), class_good=counts,
        class_bad=counts, class_refused=counts,
    )  # fmt: skip
    metrics.stats = EngineStats(colocation=colocation, engines=(one,), pipelines=pipelines)
    forecast = Forecast(EngineStats)
    feeder = SimpleNamespace(retries=Counter(), num_paused=0)
    ended: Counter[bool] = Counter()
    worker = SimpleNamespace(states={}, lines_ended=ended, storage_fault=lambda: None, forecast=forecast, feeder=feeder)
    tenants, notifier = SimpleNamespace(unreachable=[]), SimpleNamespace(attempts=Counter())
    metrics.registry.register(
        BatchCollector(cast(BatchWorker, worker), cast(TenantExchange, tenants), cast(Notifier, notifier))
    )
    admissions = Admissions(lambda _: UNLIMITED)
    admissions.enter("tenant", 1, 1)
    admissions.refused["tenant"] = 1
    tenants = TenantCollector(admissions.refused, admissions.loads)
    request = SimpleNamespace(tenant="tenant", request_class=RequestClass.ONLINE)
    tenants.observe_end(cast(Account, SimpleNamespace(request=request, num_prompt_tokens=1, num_tokens=1)))
    metrics.registry.register(tenants)
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


SOURCE = {"type": "prometheus", "uid": "${datasource}"}
INSTANCE = 'instance=~"$instance"'


def _of_instance(query: str) -> str:
    """Restrict every metric of a query to the instances chosen in the dashboard."""
    return _METRIC.sub(lambda found: f"{found[1]}{{{INSTANCE}{', ' + found[2] if found[2] else ''}}}", query)


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 12} | ({"stacking": {"mode": "normal"}} if panel.stacked else {})
    if panel.steps:
        steps = [{"value": value, "color": color} for value, color in panel.steps]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    dashed = {"id": "custom.lineStyle", "value": {"fill": "dash"}}
    limits = {"matcher": {"id": "byRegexp", "options": "/^limit/"}, "properties": [dashed]}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": SOURCE,
        "gridPos": {"h": panel.rows, "w": panel.columns, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": [limits] if panel.kind == "timeseries" else []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": _of_instance(query), "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries)
        ],
    }


def _laid_out(panels: Sequence[Panel], number: int, y: int) -> list[dict[str, Any]]:
    """Place panels in rows of 24 columns, from `y` on."""
    placed, x, height = [], 0, 0
    for panel in panels:
        if x + panel.columns > 24:
            x, y, height = 0, y + height, 0
        placed.append(_panel(panel, number + len(placed), x, y))
        x, height = x + panel.columns, max(height, panel.rows)
    return placed


def _bottom(panels: Sequence[dict[str, Any]]) -> int:
    return max(int(panel["gridPos"]["y"] + panel["gridPos"]["h"]) for panel in panels)


def dashboard(known: set[str]) -> dict[str, Any]:
    """The dashboard as Grafana reads it. Raises ValueError for a name that the server does not show."""
    for panel in (*PROMISE, *chain(*FOLDED.values())):
        unknown = {name for _, query in panel.queries for name in _NAME.findall(query) if name not in known}
        if unknown:
            raise ValueError(f"panel '{panel.title}': the server has no metric {', '.join(sorted(unknown))}")
    first = _laid_out(PROMISE, 1, 0)
    number, y = len(PROMISE) + 1, _bottom(first)
    rows = []
    for title, panels in FOLDED.items():
        inner = _laid_out(panels, number + 1, y + 1)
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        rows.append({"id": number, "title": title, "type": "row", "collapsed": True, "gridPos": place, "panels": inner})
        number, y = number + 1 + len(panels), _bottom(inner)
    instances = {"name": "instance", "label": "instance", "type": "query", "datasource": SOURCE, "multi": True,
                 "includeAll": True, "query": "label_values(tidemill_steps_total, instance)", "refresh": 2,
                 "current": {"text": "All", "value": "$__all"}}  # fmt: skip
    return {
        "uid": "tidemill",
        "title": "tidemill",
        "tags": ["tidemill"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"},
                instances,
            ]
        },
        "panels": [*first, *rows],
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
