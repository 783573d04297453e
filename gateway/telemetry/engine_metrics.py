"""Metrics read from the engine's statistics at each scrape, and helpers to build them.

Metrics per engine of a fleet have names of their own and a label `engine`: the same name with and without the label
would be counted twice in sums. All other metrics are totals over the engines.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api import Lane, RequestClass
from engine.client import ColocationStats, EngineState, EngineStats, EngineView, PipelineStats
from engine.process.suspects import CAUSES
from predictor.slo import SLO

PREEMPTION_CAUSES = ("late", "memory", "online", "stall", "step_failure", "tenant")
LANES = tuple(lane.name.lower() for lane in Lane)


def gauge(name: str, text: str, value: float | None) -> Metric:
    """Return a gauge without labels and without a sample for None; `name` is without the prefix `tidemill_`."""
    return GaugeMetricFamily(f"tidemill_{name}", text, value=value)


def total(name: str, text: str, value: float) -> Metric:
    """Return a counter without labels."""
    return CounterMetricFamily(f"tidemill_{name}", text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with a sample per value of its label."""
    family = GaugeMetricFamily(f"tidemill_{name}", text, labels=[label])
    for value, sample in values.items():
        family.add_metric([value], sample)
    return family


def totals(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with a sample per value of its label."""
    family = CounterMetricFamily(f"tidemill_{name}", text, labels=[label])
    for value, sample in values.items():
        family.add_metric([value], sample)
    return family


class EngineCollector(Collector):
    """Metrics from the statistics that `stats` returns."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield _per_class("requests_running", "Requests in the running batch.", stats.running)
        yield _per_class("requests_waiting", "Waiting requests, including preempted ones.", stats.waiting)
        yield from _cache(stats)
        yield from _work(stats)
        if stats.colocation is not None:
            yield from _slo(stats.colocation)
            yield from _offline_budget(stats.colocation)
        yield from _fleet(stats.engines)
        if stats.pipelines is not None:
            yield from _pipelines(stats.pipelines)


def _per_class(name: str, text: str, counts: Mapping[RequestClass, int]) -> Metric:
    return gauges(name, text, "class", {kind.value: counts.get(kind, 0) for kind in RequestClass})


def _cache(stats: EngineStats) -> Iterator[Metric]:
    states = {state: getattr(stats, f"units_{state}") for state in ("free", "cached", "owned")}
    yield gauge("device_units", "Cache units in the pool.", stats.units_total)
    yield gauges("device_units_by_state", "Cache units by state.", "state", states)
    yield gauge("host_units", "Cache units in the host tier.", stats.host_units_total)
    yield gauge("host_units_used", "Cache units in use in the host tier.", stats.host_units_used)
    text = "Cache units in the host tier with prefixes not used by any request."
    yield gauge("host_units_cached", text, stats.host_units_cached)
    yield gauge("hidden_blocks", "Blocks stored as hidden state.", stats.hidden_blocks)
    yield gauge("state_slots", "Slots for snapshots of recurrent layers.", stats.state_slots_total)
    yield gauge("state_slots_used", "Slots in use for snapshots of recurrent layers.", stats.state_slots_used)
    moved = {name: stats.cache_units.get(name, 0) for name in ("swap_out", "swap_in", "restore")}
    yield totals("cache_units", "Cache units moved or restored, by operation.", "operation", moved)
    yield total("prefix_queried_tokens", "Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens)
    yield total("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens)
    text, host = "Prompt tokens found in the prefix cache, by cache tier.", stats.prefix_host_hit_tokens
    tiers = {"device": stats.prefix_hit_tokens - host, "host": host}
    yield totals("prefix_hit_tokens_by_tier", text, "tier", tiers)


def _work(stats: EngineStats) -> Iterator[Metric]:
    yield total("steps", "Model steps that succeeded.", stats.steps)
    yield total("failed_steps", "Model steps that failed.", stats.failed_steps)
    text = "Online requests refused on arrival (429), not part of attainment."
    yield total("refused_requests", text, stats.refused_requests)
    yield total("stalls", "Recoveries of the engine from a state without progress.", stats.stalls)
    yield total("step_seconds", "Time in model steps.", stats.step_seconds)
    yield total("prefill_tokens", "Prompt tokens computed.", stats.prefill_tokens)
    yield total("decode_tokens", "Output tokens computed.", stats.decode_tokens)
    yield total("forced_tokens", "Output tokens determined by a grammar alone.", stats.forced_tokens)
    yield total("drafted_tokens", "Guessed tokens that a step verified.", stats.drafted_tokens)
    yield total("accepted_tokens", "Guessed tokens that were right.", stats.accepted_tokens)
    text = "Prompt and output tokens computed for offline work."
    yield total("offline_computed_tokens", text, stats.offline_tokens)
    yield total("probe_tokens", "Tokens computed for the engine's self-tests.", stats.probe_tokens)
    yield totals("engine_restarts", "Engine processes that ended.", "cause", _by_cause(CAUSES, stats.restarts))
    yield total("resumed_requests", "Requests resumed in a new engine process.", stats.resumed_requests)
    yield totals("preemptions", "Preemptions by cause.", "cause", _by_cause(PREEMPTION_CAUSES, stats.preemptions))
    yield total("predicted_step_seconds", "Predicted time of the model steps.", stats.predicted_seconds)
    text = "Predicted time in steps with online work left for offline work."
    yield total("leftover_seconds", text, stats.leftover_seconds)
    yield total("leftover_used_seconds", "Leftover time used by offline work.", stats.leftover_used_seconds)
    text = "Plans of offline work by outcome; late: a step found none ready."
    yield totals("offline_plans", text, "outcome", _by_cause(("made", "continued", "late"), stats.plans))
    text = "Decisions of the online policy's knapsack on waiting requests, by form."
    yield totals("knapsack_decisions", text, "form", _by_cause(("kv", "compact", "passed_over"), stats.knapsack))
    text = "Waiting offline requests by lane."
    yield gauges("offline_lane_waiting", text, "lane", _by_cause(LANES, stats.lanes_waiting))
    yield totals("offline_lane_starts", "Offline requests started.", "lane", _by_cause(LANES, stats.lanes_started))


def _by_cause(known: Iterable[str], counts: Mapping[str, int]) -> dict[str, float]:
    """Return the counts with zeros for known causes, because `rate` needs a sample at zero."""
    return {cause: counts.get(cause, 0) for cause in sorted({*known, *counts})}


def _slo(stats: ColocationStats) -> Iterator[Metric]:
    """Yield metrics of the SLO; NaN where there is no data yet."""
    yield gauge("slo_attainment", "Share of recently judged requests that met the SLO.", stats.attainment)
    for name, text in (
        ("attainment", "Share of recent requests at whose end the objective was met."),
        ("value_seconds", "Current value of the objective over recent requests."),
        ("bound_seconds", "Upper bound of the objective."),
    ):
        standings = {each.objective: getattr(each, name.removesuffix("_seconds")) for each in stats.objectives}
        yield gauges(f"slo_objective_{name}", text, "objective", standings)
    yield gauge("online_rate", "Recent online requests per second.", stats.online_rate)
    goal = SLO.parse(stats.slo).attainment_target if stats.slo else math.nan
    yield gauge("slo_attainment_target", "Share of requests that are to meet the SLO.", goal)
    judged = {"true": stats.good_requests, "false": stats.bad_requests}
    yield totals("slo_requests", "Online requests by whether they met the SLO.", "good", judged)
    text = "Share of recently judged requests of a service class that met their promise."
    yield gauges("slo_class_attainment", text, "slo_class", {each.name: each.attainment for each in stats.classes})
    text, goals = "Share of requests of a service class that are to meet their promise.", class_targets(stats)
    yield gauges("slo_class_attainment_target", text, "slo_class", goals)
    for kind, text in {"good": "met their promise", "bad": "missed their promise", "refused": "got a 429"}.items():
        counts = getattr(stats, f"class_{kind}")
        yield totals(f"slo_class_{kind}_requests", f"Requests of a service class that {text}.", "slo_class", counts)


def class_targets(stats: ColocationStats) -> dict[str, float]:
    """Return the share of good requests that each class promises; a class without limits on requests has none."""
    goals = {each.name: SLO.parse(each.promise).attainment_target for each in stats.classes if each.promise}
    return {name: goal for name, goal in goals.items() if goal is not None}


def _offline_budget(stats: ColocationStats) -> Iterator[Metric]:
    yield gauge("latency_budget_seconds", "Latency budget of steps with offline work (L).", stats.latency_budget)
    yield gauge("interference_weight", "Interference weight of offline work (lambda).", stats.interference_weight)
    yield gauge("offline_share", "Share of the budget that offline work may use.", stats.offline_share)
    text = "Random variation without offline work of the value that a tolerance bounds, as a share."
    yield gauges("baseline_noise", text, "objective", stats.baseline_noise)
    text = "1 while offline work is held because no budget would meet the SLO, else 0."
    yield gauge("offline_held", text, float(bool(stats.held)))
    yield gauge("predictor_mape", "Mean relative error of predicted step times, recent steps.", stats.predictor_mape)
    text = "Time by which steps with online work exceeded their predictions, as a share of the step time allowed."
    yield gauge("predictor_overrun", text, stats.overrun)
    refits = {"adopted": stats.model_refits, "refused": stats.model_refits_refused}
    yield totals("model_refits", "New fits of the latency model.", "outcome", refits)
    text = "Mean relative error of the latency model before and after the last refit."
    yield gauges("model_refit_error", text, "model", stats.refit_errors)
    for name, text in {"searches": "Budget searches", "baselines": "Online-only replays for a tolerance"}.items():
        counts = {outcome: stats.learned.get(f"{name}_{outcome}", 0) for outcome in ("made", "failed")}
        yield totals(f"budget_{name}", f"{text} by outcome.", "outcome", counts)
    yield total("budget_search_seconds", "Time in budget searches.", stats.learned.get("search_seconds", 0.0))
    margins = {str(tokens): margin for tokens, margin in stats.margins.items()}
    yield gauges("step_margin_seconds", "Safety margin of predicted step times, by tokens.", "tokens", margins)
    yield gauge("decode_value", "Value of an offline decode against a prompt token (delta).", stats.decode_value)
    text = "1 for the rule of the offline fill in force."
    yield gauges("offline_rule", text, "rule", {stats.rule: 1.0})
    text = "1 for what bounds the offline share."
    yield gauges("offline_share_limit", text, "limit", {stats.share_limit: 1.0})
    yield total("offline_tokens", "Prompt and output tokens of offline requests.", stats.offline_tokens)
    yield total("breaker_openings", "Openings of the circuit breaker.", stats.breaker_openings)
    states = {state: float(state == stats.breaker) for state in ("closed", "open", "half_open")}
    yield gauges("breaker_state", "1 for the current state of the circuit breaker.", "state", states)


def _fleet(engines: Sequence[EngineView]) -> Iterator[Metric]:
    """Yield a sample per engine; nothing for a single engine."""
    requests = GaugeMetricFamily(
        "tidemill_engine_requests", "Requests in each engine.", labels=["engine", "class", "state"]
    )
    units = GaugeMetricFamily("tidemill_engine_units", "Cache units of each engine.", labels=["engine", "state"])
    for view in engines:
        name = str(view.engine)
        for state, counts in (("running", view.stats.running), ("waiting", view.stats.waiting)):
            for request_class, count in counts.items():
                requests.add_metric([name, request_class.value, state], count)
        for state in ("free", "cached", "owned"):
            units.add_metric([name, state], getattr(view.stats, f"units_{state}"))

    def each(value: Callable[[EngineView], float]) -> dict[str, float]:
        return {str(view.engine): value(view) for view in engines}

    ready = each(lambda view: float(view.state is EngineState.READY))
    yield gauges("engine_ready", "1 for an engine that is ready, else 0.", "engine", ready)
    yield from (requests, units)
    text = "Offline tokens per second of each engine while batch lines wait."
    yield gauges("engine_harvest", text, "engine", each(lambda view: view.harvest))
    text = "Requests routed to an engine."
    yield totals("engine_routed_requests", text, "engine", each(lambda view: view.routed))
    text = "Requests moved away from an engine that failed."
    yield totals("engine_moved_requests", text, "engine", each(lambda view: view.moved))


def _pipelines(stats: PipelineStats) -> Iterator[Metric]:
    """Yield metrics of parameter dropping, where engines give up layers for cache."""
    yield gauge("fleet_pipelines", "Pairs of engines that run as one pipeline.", len(stats.pairs))
    text = "1 while online requests lack memory and no further engine can give up layers, else 0."
    yield gauge("fleet_memory_short", text, float(stats.too_little))
    yield total("fleet_drops", "Pipelines formed by engines short of memory.", stats.drops)
    yield total("fleet_restores", "Pipelines turned back into engines with all layers.", stats.restores)
    text = "Failed drops, restores and pipelines; all layers were restored."
    yield total("fleet_drop_failures", text, stats.failures)


def shown(engines: Sequence[EngineView]) -> list[dict[str, Any]]:
    """Return the state of each engine for /ready and the web page; empty for a single engine."""
    return [
        {
            "engine": view.engine,
            "state": view.state.value,
            "trouble": view.trouble,
            "running": sum(view.stats.running.values()),
            "waiting": sum(view.stats.waiting.values()),
            "computed_tokens": view.stats.prefill_tokens + view.stats.decode_tokens,
            "offline_tokens": view.stats.offline_tokens,
            "units": {"total": view.stats.units_total, "owned": view.stats.units_owned},
            "routed": view.routed,
            "moved": view.moved,
            "pipeline_with": view.partner,
        }
        for view in engines
    ]
