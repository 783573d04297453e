"""Prometheus metrics: histograms observed per output, and gauges and counters read from the engine at each scrape.

Each application has its own registry. The `vllm:*` aliases cover online work only, so that dashboards and autoscalers
for vLLM are not affected by batch work. Labels have a bounded set of values and contain no ids.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api import ColocationStats, EngineClient, EngineStats, FinishReason, RequestClass
from engine.process.causes import CAUSES
from gateway.telemetry.account import Account
from gateway.telemetry.fleet_metrics import engine_metrics, pipeline_metrics
from predictor.slo import SLO, nearest_rank

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


MAX_ENDED = 512
PREEMPTION_CAUSES = ("late", "memory", "online", "stall", "step_failure", "tenant")


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """Latencies of one complete answer in seconds."""

    ended: float
    """Time of the last token on the engine's clock."""
    ttft: float
    gap: float | None
    """P99 of the gaps between two tokens; see `nearest_rank`."""


class ClassMetrics:
    """Metrics of one service class, with the labels bound once, because gaps are observed for every output."""

    def __init__(self, metrics: "GatewayMetrics", label: str) -> None:
        self.ttft = metrics.ttft.labels(label)
        self.tbt = metrics.tbt.labels(label)
        self.e2e = metrics.e2e.labels(label)
        self.queue = metrics.queue.labels(label)
        self.prefill = metrics.prefill.labels(label)
        self.decode = metrics.decode.labels(label)
        self.prompt_tokens = metrics.prompt_tokens.labels(label)
        self.generated_tokens = metrics.generated_tokens.labels(label)
        self.ended = {reason: metrics.requests.labels(label, reason.value) for reason in FinishReason}
        self.answers: deque[EndedAnswer] = deque(maxlen=MAX_ENDED)
        self.totals = {"answers": 0, "prompt_tokens": 0, "output_tokens": 0}
        """Complete answers since the start, and the tokens of all that ended."""
        self._listeners = metrics.on_end

    def observe_end(self, account: Account) -> None:
        """Count an ended choice. Latencies are observed only for complete answers."""
        assert account.finish is not None
        self.ended[account.finish].inc()
        self.prompt_tokens.inc(account.num_prompt_tokens)
        self.generated_tokens.inc(account.num_tokens)
        self.totals["prompt_tokens"] += account.num_prompt_tokens
        self.totals["output_tokens"] += account.num_tokens
        for listener in self._listeners:
            listener(account)
        times = account.times
        if times is None or account.finish not in {FinishReason.STOP, FinishReason.LENGTH}:
            return
        self.totals["answers"] += 1
        end = times.finished if times.finished is not None else times.last_token
        if end is not None:
            self.e2e.observe(end - times.arrival)
        if times.first_scheduled is not None:
            self.queue.observe(times.first_scheduled - times.arrival)
        if times.first_scheduled is not None and times.first_token is not None:
            self.prefill.observe(times.first_token - times.first_scheduled)
        if times.first_token is not None and times.last_token is not None:
            self.decode.observe(times.last_token - times.first_token)
            self.answers.append(EndedAnswer(times.last_token, times.first_token - times.arrival, _p99(account.gaps)))


def _p99(gaps: Sequence[float]) -> float | None:
    return nearest_rank(gaps, 99.0) if gaps else None


class GatewayMetrics:
    """All metrics of one application. The callbacks in `on_end` are called for every choice that ended."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self.tbt = self._histogram("time_between_tokens_seconds", "Gap between two tokens.", _GAP_SECONDS)
        self.e2e = self._histogram("request_seconds", "Arrival to end.")
        self.queue = self._histogram("request_queue_seconds", "Arrival to first step.")
        self.prefill = self._histogram("request_prefill_seconds", "First step to first token.")
        self.decode = self._histogram("request_decode_seconds", "First token to last.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.", "class")
        self.generated_tokens = self._counter("generated_tokens", "Tokens of answers that ended.", "class")
        self.requests = self._counter("requests", "Requests that ended, by finish reason.", "class", "reason")
        self.responses = self._counter("http_responses", "HTTP responses by status.", "status")
        self.on_end: list[Callable[[Account], None]] = []
        self.log_dropped = self._counter("request_log_dropped_lines", "Request log lines that were dropped.")
        self.by_class = {c: ClassMetrics(self, c.value) for c in RequestClass}
        self.stats = EngineStats()
        self._client = client
        self.registry.register(EngineCollector(self))
        self.registry.register(VllmAliases(self, model_name, client))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"tidemill_{name}", text, ["class"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tidemill_{name}", text, labels, registry=self.registry)

    async def take_snapshot(self) -> None:
        """Read the engine's statistics."""
        self.stats = await self._client.stats()

    def render(self) -> bytes:
        """Return all metrics as of the last snapshot in the text format. Reads /proc: call it in a thread."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Metrics from the engine's statistics as of the last snapshot."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        yield _per_class("requests_running", "Requests in the running batch.", stats.running)
        yield _per_class("requests_waiting", "Waiting requests, including preempted ones.", stats.waiting)
        yield from _pool_metrics(stats)
        yield _total(
            "prefix_queried_tokens", "Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens
        )
        yield _total("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens)
        text = "Prompt tokens found in the prefix cache, by cache tier."
        tiers = CounterMetricFamily("tidemill_prefix_hit_tokens_by_tier", text, labels=["tier"])
        tiers.add_metric(["device"], stats.prefix_hit_tokens - stats.prefix_host_hit_tokens)
        tiers.add_metric(["host"], stats.prefix_host_hit_tokens)
        yield tiers
        yield _total("steps", "Model steps that succeeded.", stats.steps)
        yield _total("failed_steps", "Model steps that failed.", stats.failed_steps)
        yield _total(
            "refused_requests",
            "Online requests refused on arrival (429), not part of attainment.",
            stats.refused_requests,
        )
        yield _total("stalls", "Recoveries of the engine from a state without progress.", stats.stalls)
        yield _total("step_seconds", "Time in model steps.", stats.step_seconds)
        yield _total("prefill_tokens", "Prompt tokens computed.", stats.prefill_tokens)
        yield _total("decode_tokens", "Output tokens computed.", stats.decode_tokens)
        yield _total("forced_tokens", "Output tokens determined by a grammar alone.", stats.forced_tokens)
        yield _total(
            "offline_computed_tokens",
            "Prompt and output tokens computed for offline work.",
            stats.offline_computed_tokens,
        )
        yield _total("probe_tokens", "Tokens computed for the engine's self-tests.", stats.probe_tokens)
        restarts = CounterMetricFamily("tidemill_engine_restarts", "Engine processes that ended.", labels=["cause"])
        for cause in sorted({*CAUSES, *stats.restarts}):
            restarts.add_metric([cause], stats.restarts.get(cause, 0))
        yield restarts
        yield _total("resumed_requests", "Requests resumed in a new engine process.", stats.resumed_requests)
        preemptions = CounterMetricFamily("tidemill_preemptions", "Preemptions by cause.", labels=["cause"])
        for cause in sorted({*PREEMPTION_CAUSES, *stats.preemptions}):  # `rate` needs a sample at zero
            preemptions.add_metric([cause], stats.preemptions.get(cause, 0))
        yield preemptions
        yield _total("predicted_step_seconds", "Predicted time of the model steps.", stats.predicted_seconds)
        yield _total(
            "leftover_seconds",
            "Predicted time in steps with online work left for offline work.",
            stats.leftover_seconds,
        )
        yield _total("leftover_used_seconds", "Leftover time used by offline work.", stats.leftover_used_seconds)
        if stats.colocation is not None:
            yield from _colocation_metrics(stats.colocation)
        yield from engine_metrics(stats.engines)
        if stats.pipelines is not None:
            yield from pipeline_metrics(stats.pipelines)


def _colocation_metrics(stats: ColocationStats) -> Iterator[Metric]:
    """Yield metrics of the SLO and the offline budget; NaN where there is no data yet."""
    yield GaugeMetricFamily(
        "tidemill_slo_attainment", "Share of recently judged requests that met the SLO.", value=stats.attainment
    )
    objectives = {
        "attainment": "Share of recent requests at whose end the objective was met.",
        "value_seconds": "Current value of the objective over recent requests.",
        "bound_seconds": "Upper bound of the objective.",
    }
    for name, text in objectives.items():
        gauge = GaugeMetricFamily(f"tidemill_slo_objective_{name}", text, labels=["objective"])
        for standing in stats.objectives:
            gauge.add_metric([standing.objective], getattr(standing, name.removesuffix("_seconds")))
        yield gauge
    yield GaugeMetricFamily("tidemill_online_rate", "Recent online requests per second.", value=stats.online_rate)
    goal = SLO.parse(stats.slo).attainment_target if stats.slo else math.nan
    text = "Share of requests that are to meet the SLO."
    yield GaugeMetricFamily("tidemill_slo_attainment_target", text, value=goal)
    judged = CounterMetricFamily(
        "tidemill_slo_requests", "Online requests by whether they met the SLO.", labels=["good"]
    )
    judged.add_metric(["true"], stats.good_requests)
    judged.add_metric(["false"], stats.bad_requests)
    yield judged
    yield GaugeMetricFamily(
        "tidemill_latency_budget_seconds", "Latency budget of steps with offline work (L).", value=stats.latency_budget
    )
    yield GaugeMetricFamily(
        "tidemill_interference_weight", "Interference weight of offline work (lambda).", value=stats.interference_weight
    )
    yield GaugeMetricFamily(
        "tidemill_offline_share", "Share of the budget that offline work may use.", value=stats.offline_share
    )
    yield GaugeMetricFamily(
        "tidemill_offline_held",
        "1 while offline work is held because no budget would meet the SLO, else 0.",
        value=float(bool(stats.held)),
    )
    yield GaugeMetricFamily(
        "tidemill_predictor_mape",
        "Mean relative error of predicted step times, recent steps.",
        value=stats.predictor_mape,
    )
    yield GaugeMetricFamily(
        "tidemill_predictor_overrun",
        "Time by which steps with online work exceeded their predictions, as a share of the step time allowed.",
        value=stats.overrun,
    )
    refits = CounterMetricFamily("tidemill_model_refits", "New fits of the latency model.", labels=["outcome"])
    refits.add_metric(["adopted"], stats.model_refits)
    refits.add_metric(["refused"], stats.model_refits_refused)
    yield refits
    yield _total("offline_tokens", "Prompt and output tokens of offline requests.", stats.offline_tokens)
    yield _total("breaker_openings", "Openings of the circuit breaker.", stats.breaker_openings)
    breaker = GaugeMetricFamily(
        "tidemill_breaker_state", "1 for the current state of the circuit breaker.", labels=["state"]
    )
    for state in ("closed", "open", "half_open"):
        breaker.add_metric([state], float(state == stats.breaker))
    yield breaker


def _pool_metrics(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("tidemill_device_units", "Cache units in the pool.", value=stats.units_total)
    kinds = GaugeMetricFamily("tidemill_device_units_by_state", "Cache units by state.", labels=["state"])
    kinds.add_metric(["free"], stats.units_free)
    kinds.add_metric(["cached"], stats.units_cached)
    kinds.add_metric(["owned"], stats.units_owned)
    yield kinds
    yield GaugeMetricFamily("tidemill_host_units", "Cache units in the host tier.", value=stats.host_units_total)
    yield GaugeMetricFamily(
        "tidemill_host_units_used", "Cache units in use in the host tier.", value=stats.host_units_used
    )
    name, text = "tidemill_host_units_cached", "Cache units in the host tier with prefixes not used by any request."
    yield GaugeMetricFamily(name, text, value=stats.host_units_cached)
    yield GaugeMetricFamily("tidemill_hidden_blocks", "Blocks stored as hidden state.", value=stats.hidden_blocks)
    name, text = "tidemill_state_slots", "Slots for checkpoints of recurrent layers."
    yield GaugeMetricFamily(name, text, value=stats.state_slots_total)
    yield GaugeMetricFamily(
        "tidemill_state_slots_used", "Slots in use for checkpoints of recurrent layers.", value=stats.state_slots_used
    )
    moved = CounterMetricFamily(
        "tidemill_cache_units", "Cache units moved or restored, by operation.", labels=["operation"]
    )
    for operation in ("swap_out", "swap_in", "restore"):
        moved.add_metric([operation], stats.cache_units.get(operation, 0))
    yield moved


def _per_class(name: str, text: str, counts: dict[RequestClass, int]) -> Metric:
    gauge = GaugeMetricFamily(f"tidemill_{name}", text, labels=["class"])
    for request_class in RequestClass:
        gauge.add_metric([request_class.value], counts.get(request_class, 0))
    return gauge


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"tidemill_{name}", text, value=value)


class VllmAliases(Collector):
    """Online metrics under vLLM's names and labels. Cache metrics cover all work; as in vLLM, queries and hits count
    tokens."""

    def __init__(self, metrics: GatewayMetrics, model_name: str, client: EngineClient) -> None:
        self._metrics = metrics
        self._client = client
        self._model_name = model_name
        self._aliases: tuple[tuple[Histogram | Counter, str], ...] = (
            (metrics.ttft, "vllm:time_to_first_token_seconds"),
            (metrics.tbt, "vllm:inter_token_latency_seconds"),
            (metrics.tbt, "vllm:time_per_output_token_seconds"),
            (metrics.e2e, "vllm:e2e_request_latency_seconds"),
            (metrics.queue, "vllm:request_queue_time_seconds"),
            (metrics.prefill, "vllm:request_prefill_time_seconds"),
            (metrics.decode, "vllm:request_decode_time_seconds"),
            (metrics.prompt_tokens, "vllm:prompt_tokens"),
            (metrics.generated_tokens, "vllm:generation_tokens"),
            (metrics.requests, "vllm:request_success"),
        )

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        for name, counts in (("running", stats.running), ("waiting", stats.waiting)):
            gauge = GaugeMetricFamily(f"vllm:num_requests_{name}", f"Online requests {name}.", labels=["model_name"])
            gauge.add_metric([self._model_name], counts.get(RequestClass.ONLINE, 0))
            yield gauge
        yield from self._cache(stats)
        for source, name in self._aliases:
            for family in source.collect():
                yield self._renamed(family, name)

    def _cache(self, stats: EngineStats) -> Iterator[Metric]:
        names = ["model_name", "block_size", "num_gpu_blocks"]
        config = GaugeMetricFamily("vllm:cache_config_info", "The size of the cache, in labels.", labels=names)
        info = self._client.info
        blocks = info.cache_tokens // info.block_size if info.block_size else 0
        config.add_metric([self._model_name, str(info.block_size), str(blocks)], 1.0)
        yield config
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", labels=["model_name"]
        )
        usage.add_metric([self._model_name], stats.units_owned / stats.units_total if stats.units_total else 0.0)
        yield usage
        for name, text, tokens in (
            ("queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens),
            ("hits", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:prefix_cache_{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], tokens)
            yield counter

    def _renamed(self, family: Metric, name: str) -> Metric:
        alias = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            if sample.labels["class"] != RequestClass.ONLINE.value or sample.name.endswith("_created"):
                continue
            labels = {"model_name": self._model_name}
            labels |= {"le": sample.labels["le"]} if "le" in sample.labels else {}
            labels |= {"finished_reason": sample.labels["reason"]} if "reason" in sample.labels else {}
            alias.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
        return alias
