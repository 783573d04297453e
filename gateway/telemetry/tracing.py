"""OpenTelemetry tracing: a span per ended choice, sent to a collector over OTLP. Needs the extra `otel`.

A span is created when its choice ends, and is a child of the trace in the request's `traceparent` header. Attributes
follow the semantic conventions for generative AI where they exist, and contain no prompt, answer or key. Spans wait in
a bounded queue for a sender thread: a slow or unreachable collector loses spans but does not affect requests.
"""

import asyncio
import logging
import time
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import ConfigError
from engine.machine.extras import install_command
from gateway.telemetry.account import Account
from gateway.telemetry.request_log import line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.client import EngineStats

STOP_SECONDS = 5.0
"""Maximum wait for the collector at shutdown."""
TRACES_ENDPOINT, BASE_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_CARRIED = ("traceparent", "tracestate")
_carrier: ContextVar[dict[str, str]] = ContextVar("carrier")


class TraceHeaders:
    """Middleware that stores the trace headers of a request for its task."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            _carrier.set({name: headers[name] for name in _CARRIED if name in headers})
        await self._app(scope, receive, send)


class Traces:
    """Send spans. Leaving the async context sends the remaining spans.

    Args:
        endpoint: URL of the collector for spans, such as http://localhost:4318/v1/traces.
        model: name of the model in the API.

    Raises ConfigError without the extra `otel`.
    """

    def __init__(self, endpoint: str, model: str, version: str, stats: "Callable[[], EngineStats]") -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            missing = "a collector is named, and OpenTelemetry is missing"
            raise ConfigError(f"{missing}; run {install_command('otel')}") from None
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        resource = Resource.create({"service.name": "tidemill", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("tidemill", version)
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._model, self._stats = model, stats

    def add(self, account: Account) -> None:
        """Queue the span of an ended choice. Call it in the task of the request; does not block."""
        ended = time.time_ns()
        began = ended - int(account.seconds * 1e9)
        attributes = attributes_of(account, self._model, self._stats())
        name = f"{attributes['gen_ai.operation.name']} {self._model}"
        parent = self._propagator.extract(_carrier.get({}))
        span = self._tracer.start_span(name, parent, self._kind, attributes, start_time=began)
        if account.ttft is not None:
            span.add_event("first token", timestamp=began + int(account.ttft * 1e9))
        if account.status >= 500:
            span.set_status(self._failed)
        span.end(ended)

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._provider.shutdown), STOP_SECONDS)


def find_endpoint(environment: "Mapping[str, str]") -> str | None:
    """Return the collector's URL for spans from OpenTelemetry's environment variables, or None if none is set.

    Raises ConfigError for an invalid URL."""
    name, endpoint = TRACES_ENDPOINT, environment.get(TRACES_ENDPOINT, "")
    if not endpoint:
        name, base = BASE_ENDPOINT, environment.get(BASE_ENDPOINT, "")
        endpoint = base and f"{base.rstrip('/')}/v1/traces"
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{name} must be an HTTP URL, not {environment[name]!r}")
    return endpoint


def attributes_of(account: Account, model: str, stats: "EngineStats") -> dict[str, Any]:
    """Return the attributes of a span; times in seconds. For names outside `gen_ai` see the request log."""
    line, sampling = line_of(account, stats), account.request.sampling
    named: dict[str, Any] = {
        "gen_ai.operation.name": _operation(account),
        "gen_ai.provider.name": "tidemill",
        "gen_ai.request.model": model,
        "gen_ai.response.id": account.response_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.finish_reasons": (line["finish"],),
        "gen_ai.usage.input_tokens": line["prompt_tokens"],
        "gen_ai.usage.output_tokens": line["output_tokens"],
        "http.response.status_code": line["status"],
    }
    ours = ("tier", "choice", "tenant", "cached_tokens", "queue", "ttft", "tbt_mean", "tbt_max", "preemptions")
    named |= {f"tidemill.{name}": line[name] for name in (*ours, "beside_offline", "slo_met", "why")}
    return {name: value for name, value in named.items() if value is not None}


def _operation(account: Account) -> str:
    if account.response_id.startswith("embd-"):
        return "embeddings"
    return "text_completion" if account.response_id.startswith("cmpl-") else "chat"
