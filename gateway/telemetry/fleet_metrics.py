"""Metrics per engine of a fleet. All other metrics are totals over the engines.

These metrics have names of their own and a label `engine`: the same name with and without the label would be counted
twice in sums.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.api import EngineState, EngineView, PipelineStats


def engine_metrics(engines: Sequence[EngineView]) -> Iterator[Metric]:
    """Yield a sample per engine; nothing for a single engine."""
    ready = GaugeMetricFamily("tidemill_engine_ready", "1 for an engine that is ready, else 0.", labels=["engine"])
    requests = GaugeMetricFamily(
        "tidemill_engine_requests", "Requests in each engine.", labels=["engine", "class", "state"]
    )
    units = GaugeMetricFamily("tidemill_engine_units", "Cache units of each engine.", labels=["engine", "state"])
    harvest = GaugeMetricFamily(
        "tidemill_engine_harvest",
        "Offline tokens per second of each engine while batch lines wait.",
        labels=["engine"],
    )
    routed = CounterMetricFamily("tidemill_engine_routed_requests", "Requests routed to an engine.", labels=["engine"])
    moved = CounterMetricFamily(
        "tidemill_engine_moved_requests", "Requests moved away from an engine that failed.", labels=["engine"]
    )
    for view in engines:
        name = str(view.engine)
        ready.add_metric([name], float(view.state is EngineState.READY))
        for state, counts in (("running", view.stats.running), ("waiting", view.stats.waiting)):
            for request_class, count in counts.items():
                requests.add_metric([name, request_class.value, state], count)
        for state in ("free", "cached", "owned"):
            units.add_metric([name, state], getattr(view.stats, f"units_{state}"))
        harvest.add_metric([name], view.harvest)
        routed.add_metric([name], view.routed)
        moved.add_metric([name], view.moved)
    yield from (ready, requests, units, harvest, routed, moved)


def pipeline_metrics(stats: PipelineStats) -> Iterator[Metric]:
    """Yield metrics of parameter dropping, where engines give up layers for cache."""
    yield GaugeMetricFamily(
        "tidemill_fleet_pipelines", "Pairs of engines that run as one pipeline.", value=len(stats.pairs)
    )
    yield GaugeMetricFamily(
        "tidemill_fleet_memory_short",
        "1 while online requests lack memory and no further engine can give up layers, else 0.",
        value=float(stats.too_little),
    )
    for name, value, text in (
        ("drops", stats.drops, "Pipelines formed by engines short of memory."),
        ("restores", stats.restores, "Pipelines turned back into engines with all layers."),
        ("drop_failures", stats.failures, "Failed drops, restores and pipelines; all layers were restored."),
    ):
        yield CounterMetricFamily(f"tidemill_fleet_{name}", text, value=value)


def shown(engines: Sequence[EngineView]) -> list[dict[str, Any]]:
    """Return the state of each engine for /ready, the web page and `tidemill top`; empty for a single engine."""
    return [
        {
            "engine": view.engine,
            "state": view.state.value,
            "trouble": view.trouble,
            "running": sum(view.stats.running.values()),
            "waiting": sum(view.stats.waiting.values()),
            "computed_tokens": view.stats.prefill_tokens + view.stats.decode_tokens,
            "offline_tokens": view.stats.offline_computed_tokens,
            "units": {"total": view.stats.units_total, "owned": view.stats.units_owned},
            "routed": view.routed,
            "moved": view.moved,
            "pipeline_with": view.partner,
        }
        for view in engines
    ]
