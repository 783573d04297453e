"""What of several engines is shown one by one; everything else is of all together, so that it reads as of one.

Gauges and counters of their own names with a label `engine`: a name that were there with and without the label would be
counted twice in every sum.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.api import EngineState, EngineView, PipelineStats


def engine_metrics(engines: Sequence[EngineView]) -> Iterator[Metric]:
    """One sample per engine; none where there is one engine."""
    ready = GaugeMetricFamily("tidemill_engine_ready", "With several engines: 1 for one that is.", labels=["engine"])
    requests = GaugeMetricFamily(
        "tidemill_engine_requests", "Requests in each of several engines.", labels=["engine", "class", "state"]
    )
    units = GaugeMetricFamily(
        "tidemill_engine_units", "Cache units of each of several engines.", labels=["engine", "state"]
    )
    harvest = GaugeMetricFamily(
        "tidemill_engine_harvest",
        "Offline tokens a second of each of several engines, while lines wait.",
        labels=["engine"],
    )
    routed = CounterMetricFamily("tidemill_engine_routed_requests", "Requests routed to an engine.", labels=["engine"])
    moved = CounterMetricFamily(
        "tidemill_engine_moved_requests", "Requests taken from it as it was gone.", labels=["engine"]
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
    """Where engines may give up layers for cache."""
    yield GaugeMetricFamily(
        "tidemill_fleet_pipelines", "Pairs of engines that compute as one pipeline.", value=len(stats.pairs)
    )
    yield GaugeMetricFamily(
        "tidemill_fleet_memory_short",
        "1 while memory for online requests is short and no further engine can give up layers.",
        value=float(stats.too_little),
    )
    for name, value, text in (
        ("drops", stats.drops, "Pipelines that engines short of memory became."),
        ("restores", stats.restores, "Pipelines that became engines with all layers again."),
        ("drop_failures", stats.failures, "Changes and pipelines that failed; engines were made whole again."),
    ):
        yield CounterMetricFamily(f"tidemill_fleet_{name}", text, value=value)


def shown(engines: Sequence[EngineView]) -> list[dict[str, Any]]:
    """Each engine for /ready, the page and `tidemill top`; nothing where there is one."""
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
