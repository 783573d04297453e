"""Prometheus metrics: histograms observed as answers go out, gauges and counters read from the engine at each scrape.

One registry per application. The `vllm:*` aliases show online work only, so that dashboards and autoscalers made for
vLLM see what users wait for and not the batch work that fills the rest. Labels are bounded; no ids.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api import ColocationStats, EngineClient, EngineStats, FinishReason, RequestClass
from engine.process.causes import CAUSES
from gateway.telemetry.account import Account
from gateway.telemetry.fleet_metrics import engine_metrics, pipeline_metrics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


MAX_ENDED = 512
PREEMPTION_CAUSES = ("late", "memory", "online", "stall", "step_failure", "tenant")


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """Latencies of one answer that ran to its end, in seconds; `gap` is its longest one between two tokens, `ended` on
    the engine's clock."""

    ended: float
    ttft: float
    gap: float | None


class ClassMetrics:
    """The metrics of one service class, its labels bound once: `observe` is called for every token."""

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
        self._listeners = metrics.on_end

    def observe_end(self, account: Account) -> None:
        """Count an answer; the time spans only of one that ran to its end, as a cut-off one says nothing of speed."""
        assert account.finish is not None
        self.ended[account.finish].inc()
        self.prompt_tokens.inc(account.num_prompt_tokens)
        self.generated_tokens.inc(account.num_tokens)
        for listener in self._listeners:
            listener(account)
        times = account.times
        if times is None or account.finish not in {FinishReason.STOP, FinishReason.LENGTH}:
            return
        end = times.finished if times.finished is not None else times.last_token
        if end is not None:
            self.e2e.observe(end - times.arrival)
        if times.first_scheduled is not None:
            self.queue.observe(times.first_scheduled - times.arrival)
        if times.first_scheduled is not None and times.first_token is not None:
            self.prefill.observe(times.first_token - times.first_scheduled)
        if times.first_token is not None and times.last_token is not None:
            self.decode.observe(times.last_token - times.first_token)
            self.answers.append(EndedAnswer(times.last_token, times.first_token - times.arrival, account.longest_gap))


class GatewayMetrics:
    """All metrics of one application. `on_end` is told of every choice that ended."""

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
        self.log_dropped = self._counter("request_log_dropped_lines", "Lines that the request log could not take.")
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
        """Read the engine's figures."""
        self.stats = await self._client.stats()

    def render(self) -> bytes:
        """The text exposition of everything as of the last snapshot. Reads /proc: call it in a thread."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """The engine's own figures, one snapshot per scrape."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        yield _per_class("requests_running", "Requests in the running batch.", stats.running)
        yield _per_class("requests_waiting", "Requests waiting, preempted ones included.", stats.waiting)
        yield from _pool_metrics(stats)
        yield _total(
            "prefix_queried_tokens", "Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens
        )
        yield _total("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens)
        tiers = CounterMetricFamily("tidemill_prefix_hit_tokens_by_tier", "Those by where they lay.", labels=["tier"])
        tiers.add_metric(["device"], stats.prefix_hit_tokens - stats.prefix_host_hit_tokens)
        tiers.add_metric(["host"], stats.prefix_host_hit_tokens)
        yield tiers
        yield _total("steps", "Model steps that succeeded.", stats.steps)
        yield _total("failed_steps", "Model steps that failed.", stats.failed_steps)
        yield _total(
            "refused_requests", "Online requests refused on arrival (429), in no attainment.", stats.refused_requests
        )
        yield _total("stalls", "Times the engine stood still with work and had to recover.", stats.stalls)
        yield _total("step_seconds", "Time in model steps.", stats.step_seconds)
        yield _total("prefill_tokens", "Prompt tokens computed.", stats.prefill_tokens)
        yield _total("decode_tokens", "Output tokens computed.", stats.decode_tokens)
        yield _total("forced_tokens", "Output tokens that a grammar left no choice for.", stats.forced_tokens)
        yield _total("offline_computed_tokens", "Those of both that were offline work.", stats.offline_computed_tokens)
        yield _total("probe_tokens", "Computed besides: for the engine's own tests of itself.", stats.probe_tokens)
        restarts = CounterMetricFamily("tidemill_engine_restarts", "Engine processes that ended.", labels=["cause"])
        for cause in sorted({*CAUSES, *stats.restarts}):
            restarts.add_metric([cause], stats.restarts.get(cause, 0))
        yield restarts
        yield _total("resumed_requests", "Requests that went on in the next engine process.", stats.resumed_requests)
        preemptions = CounterMetricFamily("tidemill_preemptions", "Preemptions by cause.", labels=["cause"])
        for cause in sorted({*PREEMPTION_CAUSES, *stats.preemptions}):  # from zero on, so that a rate has a beginning
            preemptions.add_metric([cause], stats.preemptions.get(cause, 0))
        yield preemptions
        yield _total("predicted_step_seconds", "What the model steps were predicted to take.", stats.predicted_seconds)
        yield _total(
            "leftover_seconds", "Predicted time that online steps left to offline work.", stats.leftover_seconds
        )
        yield _total("leftover_used_seconds", "How much of it offline work was given.", stats.leftover_used_seconds)
        if stats.colocation is not None:
            yield from _colocation_metrics(stats.colocation)
        yield from engine_metrics(stats.engines)
        if stats.pipelines is not None:
            yield from pipeline_metrics(stats.pipelines)


def _colocation_metrics(stats: ColocationStats) -> Iterator[Metric]:
    """How the SLO is kept; NaN where nobody was judged, or nothing is known to judge by."""
    yield GaugeMetricFamily(
        "tidemill_slo_attainment", "Share of good requests, of the last ones judged.", value=stats.attainment
    )
    objectives = {
        "attainment": "Share of the last requests at whose end the objective was kept.",
        "value_seconds": "What the objective is about, over the last requests.",
        "bound_seconds": "What it may be at most.",
    }
    for name, text in objectives.items():
        gauge = GaugeMetricFamily(f"tidemill_slo_objective_{name}", text, labels=["objective"])
        for standing in stats.objectives:
            gauge.add_metric([standing.objective], getattr(standing, name.removesuffix("_seconds")))
        yield gauge
    yield GaugeMetricFamily("tidemill_online_rate", "Online requests a second of late.", value=stats.online_rate)
    judged = CounterMetricFamily("tidemill_slo_requests", "Online requests judged.", labels=["good"])
    judged.add_metric(["true"], stats.good_requests)
    judged.add_metric(["false"], stats.bad_requests)
    yield judged
    yield GaugeMetricFamily("tidemill_latency_budget_seconds", "L of the offline fill.", value=stats.latency_budget)
    yield GaugeMetricFamily(
        "tidemill_interference_weight", "Lambda of the offline fill.", value=stats.interference_weight
    )
    yield GaugeMetricFamily(
        "tidemill_offline_share", "Share of the budget that offline work may use.", value=stats.offline_share
    )
    yield GaugeMetricFamily(
        "tidemill_offline_held", "1 while no offline budget keeps the SLO.", value=float(bool(stats.held))
    )
    yield GaugeMetricFamily("tidemill_predictor_mape", "Mean relative error, recent steps.", value=stats.predictor_mape)
    yield GaugeMetricFamily(
        "tidemill_predictor_overrun",
        "Time by which steps beside chat overran their predictions, as a share of what a step may take.",
        value=stats.overrun,
    )
    refits = CounterMetricFamily("tidemill_model_refits", "New fits of the latency model.", labels=["outcome"])
    refits.add_metric(["adopted"], stats.model_refits)
    refits.add_metric(["refused"], stats.model_refits_refused)
    yield refits
    yield _total("offline_tokens", "Prompt and output tokens of offline requests.", stats.offline_tokens)
    yield _total("breaker_openings", "How often the circuit breaker opened.", stats.breaker_openings)
    breaker = GaugeMetricFamily("tidemill_breaker_state", "1 for the state the breaker is in.", labels=["state"])
    for state in ("closed", "open", "half_open"):
        breaker.add_metric([state], float(state == stats.breaker))
    yield breaker


def _pool_metrics(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("tidemill_device_units", "Cache units in the pool.", value=stats.units_total)
    kinds = GaugeMetricFamily("tidemill_device_units_by_state", "Cache units by what they hold.", labels=["state"])
    kinds.add_metric(["free"], stats.units_free)
    kinds.add_metric(["cached"], stats.units_cached)
    kinds.add_metric(["owned"], stats.units_owned)
    yield kinds
    yield GaugeMetricFamily("tidemill_host_units", "Cache units in the host tier.", value=stats.host_units_total)
    yield GaugeMetricFamily("tidemill_host_units_used", "Those that hold something.", value=stats.host_units_used)
    name, text = "tidemill_host_units_cached", "Those of them that hold prefixes which nobody uses now."
    yield GaugeMetricFamily(name, text, value=stats.host_units_cached)
    yield GaugeMetricFamily("tidemill_hidden_blocks", "Blocks run from hidden state.", value=stats.hidden_blocks)
    name, text = "tidemill_state_slots", "Slots for checkpoints of recurrent layers."
    yield GaugeMetricFamily(name, text, value=stats.state_slots_total)
    yield GaugeMetricFamily("tidemill_state_slots_used", "Those that hold one.", value=stats.state_slots_used)
    moved = CounterMetricFamily("tidemill_cache_units", "Cache units moved or restored.", labels=["operation"])
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
    """The online share of our metrics once more, under the names and with the label that vLLM uses. The cache is one:
    its figures are of all work; queries and hits are tokens, as with vLLM."""

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
