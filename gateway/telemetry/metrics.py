"""Prometheus metrics of requests, their aliases under vLLM's names, and the lag of the event loop.

Each application has its own registry. The `vllm:*` aliases cover online work only, so that dashboards and autoscalers
for vLLM are not affected by batch work. Labels have a bounded set of values and contain no ids.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api import FinishReason, RequestClass
from engine.client import EngineClient, EngineStats
from gateway.telemetry.account import Account, EngineTime
from gateway.telemetry.engine_metrics import EngineCollector
from predictor.slo import nearest_rank

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


MAX_ENDED = 512


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
        self.engine_time = EngineTime(lambda: self.stats)
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
        self.registry.register(EngineCollector(lambda: self.stats))
        self.registry.register(VllmAliases(self, model_name, client))

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"tidemill_{name}", text, ["class"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tidemill_{name}", text, labels, registry=self.registry)

    async def take_snapshot(self) -> None:
        """Read the engine's statistics."""
        self.stats = await self._client.stats()

    def render(self) -> bytes:
        """Return all metrics as of the last snapshot in the text format. Reads /proc: call it in a thread."""
        return generate_latest(self.registry)


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
            online = counts.get(RequestClass.ONLINE, 0)
            yield self._one(GaugeMetricFamily, f"num_requests_{name}", f"Online requests {name}.", online)
        yield from self._cache(stats)
        yield self._adapters(stats)
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
        usage = stats.units_owned / stats.units_total if stats.units_total else 0.0
        yield self._one(GaugeMetricFamily, "kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", usage)
        for name, text, tokens in (
            ("queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens),
            ("hits", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens),
        ):
            yield self._one(CounterMetricFamily, f"prefix_cache_{name}", text, tokens)

    def _adapters(self, stats: EngineStats) -> Metric:
        """Return vLLM's metric for routing by adapter; its value is the time, by which readers find the newest."""
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters of online requests.", labels=labels)
        if names := self._client.info.adapters:
            counts = (stats.running_adapters, stats.waiting_adapters)
            lists = [",".join(names[number - 1] for number in sorted(each)) for each in counts]
            family.add_metric([str(len(names)), *lists], time.time())
        return family

    def _one(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

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


LAG_INTERVAL = 0.1
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopLag:
    """Measure ten times per second by how much a timer fires late; see `BackgroundWork`.

    Lag while the thread waits for a CPU core means that the machine is overloaded. The rest is caused by the server
    itself: a slow callback, or another thread that holds the GIL. The kernel's scheduler statistics separate the two.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = _histogram(registry, "tidemill_loop_lag_seconds", "Lag of the server's event loop.")
        text = "Lag of the event loop without waits for a CPU core (all lag where the system does not report waits)."
        self._own = _histogram(registry, "tidemill_loop_own_lag_seconds", text)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-loop-lag")

    async def stop(self) -> None:
        """Stop measuring. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        loop, core = asyncio.get_running_loop(), CoreWaits()
        while True:
            due, waited = loop.time() + LAG_INTERVAL, core.seconds()
            await asyncio.sleep(LAG_INTERVAL)
            lag = max(0.0, loop.time() - due)
            self._lag.observe(lag)
            self._own.observe(max(0.0, lag - (core.seconds() - waited)))


class CoreWaits:
    """Time that the creating thread has waited for a CPU core."""

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def seconds(self) -> float:
        """Return the total wait since the thread's start in seconds; 0 on systems other than Linux."""
        with suppress(OSError, ValueError, IndexError):
            return int(self._file.read_text().split()[1]) / 1e9
        return 0.0


def _histogram(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(name, text, buckets=_LAG_SECONDS, registry=registry)
