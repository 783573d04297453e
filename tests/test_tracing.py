"""OpenTelemetry spans: one for each choice, on the trace of its request, and nothing that costs a request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from fake_engine import MODEL, Served
from fixtures import StartServer, http_server
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from support.lazy import openai

from engine.api import EngineRequest, FinishReason, SamplingParams
from engine.client import EngineStats
from engine.errors import ConfigError
from engine.forms import Pooling
from gateway.batch.line import LineOrigin, LineRunner
from gateway.telemetry.account import Account
from gateway.telemetry.tracing import BASE_ENDPOINT, TRACES_ENDPOINT, Traces, attributes_of, find_endpoint

SECRET = "a-prompt-that-nobody-may-read"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(BaseHTTPRequestHandler):
    received: list[bytes]

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Address and bodies of a collector of traces."""
    received: list[bytes] = []
    with http_server(type("Collecting", (Collector,), {"received": received})) as address:
        yield f"{address}/v1/traces", received


async def spans_of(served: Served, received: list[bytes]) -> list[Span]:
    """Return the spans after the last one was sent."""
    *_, add = served.app.state.context.metrics.on_end
    traces = add.__self__
    assert isinstance(traces, Traces)
    assert await asyncio.to_thread(traces._provider.force_flush)
    assert not any(SECRET.encode() in body for body in received)
    found = [ExportTraceServiceRequest.FromString(body) for body in received]
    return [span for each in found for r in each.resource_spans for s in r.scope_spans for span in s.spans]


def attributes(span: Span) -> dict[str, Any]:
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


def client(served: Served, **headers: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, default_headers=headers)


async def test_a_span_for_each_choice_on_the_trace_of_its_request(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as (url, received):
        monkeypatch.setenv(TRACES_ENDPOINT, url)
        served = await start_server("hello world")
        async with client(served, traceparent=f"00-{TRACE}-{PARENT}-01") as api:
            whole = await api.completions.create(model=MODEL, prompt=SECRET, n=2, max_tokens=5)
        async with client(served) as api:
            chat = await api.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": SECRET}], service_tier="flex", stream=True
            )
            chunks = [chunk async for chunk in chat]
        first, second, third = await spans_of(served, received)
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in (first, second)} == {(TRACE, PARENT)}
    assert third.trace_id.hex() != TRACE and not third.parent_span_id
    assert [span.name for span in (first, third)] == [f"text_completion {MODEL}", f"chat {MODEL}"]
    said = attributes(first)
    assert said["gen_ai.response.id"] == whole.id and said["gen_ai.request.max_tokens"] == 5
    assert said["gen_ai.response.finish_reasons"] == ["stop"] and said["tidemill.tier"] == "default"
    assert whole.usage is not None and said["gen_ai.usage.input_tokens"] == whole.usage.prompt_tokens
    total = said["gen_ai.usage.output_tokens"] + attributes(second)["gen_ai.usage.output_tokens"]
    assert total == whole.usage.completion_tokens
    assert attributes(third)["tidemill.tier"] == "flex" and attributes(third)["gen_ai.response.id"] == chunks[0].id
    for span in (first, second, third):
        (event,) = span.events
        assert span.start_time_unix_nano < event.time_unix_nano and event.name == "first token"
        assert span.start_time_unix_nano < span.end_time_unix_nano


async def test_lines_of_a_batch_and_failures(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, received):
        monkeypatch.setenv(TRACES_ENDPOINT, url)
        served = await start_server("hello world again", fail_after=2)
        async with client(served) as api:
            with pytest.raises(openai.APIError):
                await api.completions.create(model=MODEL, prompt=SECRET)
        runner = LineRunner(served.app.state.context)
        body = {"model": MODEL, "prompt": SECRET}
        await runner.run("/v1/completions", body, LineOrigin("acme", "batch_1", 1e12))
        failed, *lines = await spans_of(served, received)
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert attributes(failed)["http.response.status_code"] == 500
    assert lines and {attributes(line)["tidemill.tier"] for line in lines} == {"batch"}


async def test_a_collector_that_is_gone_costs_no_request(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BASE_ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")  # seconds; the exporter tries again until then
    served = await start_server("hello world")
    async with client(served) as api:
        answers = [await api.completions.create(model=MODEL, prompt="x") for _ in range(3)]
    assert {answer.choices[0].finish_reason for answer in answers} == {"stop"}


@pytest.mark.parametrize(
    ("response_id", "pooling", "name"),
    [("chatcmpl-1", None, "chat"), ("cmpl-1", None, "text_completion"), ("embd-1", Pooling.LAST, "embeddings")],
)
def test_a_span_says_what_was_asked_for(response_id: str, pooling: Pooling | None, name: str) -> None:
    account = Account(EngineRequest("r", (1, 2), SamplingParams(max_tokens=1), pooling=pooling), response_id, 0)
    account.end(FinishReason.STOP, 200)
    assert attributes_of(account, MODEL, EngineStats())["gen_ai.operation.name"] == name


@pytest.mark.parametrize("name", [TRACES_ENDPOINT, BASE_ENDPOINT])
@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_an_endpoint_is_an_http_address(name: str, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an HTTP URL, not {endpoint!r}"):
        find_endpoint({name: endpoint})


def test_opentelemetry_s_variables_name_the_collector() -> None:
    own, base = "http://a:1/spans", "https://b:2/otel/"
    assert find_endpoint({}) is None and find_endpoint({TRACES_ENDPOINT: "", BASE_ENDPOINT: ""}) is None
    assert find_endpoint({BASE_ENDPOINT: base}) == "https://b:2/otel/v1/traces"
    assert find_endpoint({TRACES_ENDPOINT: own, BASE_ENDPOINT: base}) == own


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install --editable .*\[otel\]"):
        Traces("http://localhost:4318/v1/traces", MODEL, "1", lambda: None)  # type: ignore[arg-type,return-value]
