"""HTTP part in vLLM's API server: priorities by service tier, `/tidemill/slo`, and gauges.

The tier `flex` becomes a priority.

vLLM loads it if `VLLM_PLUGINS` names `tidemill`.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from tidemill_vllm.status import read_status

FLEX_PRIORITY = 10
"""Priority of a request with the service tier `flex`, unless it states one."""
PRIORITY_HEADER = b"x-vllm-priority"
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class FlexTier:
    """ASGI middleware that adds vLLM's priority header to requests with `"service_tier": "flex"`.

    The body passes on unchanged. A body that names no service tier is not parsed.
    """

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        is_post = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(_PATHS)
        if not is_post or any(name == PRIORITY_HEADER for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        messages = [message := await receive()]
        while message["type"] == "http.request" and message.get("more_body"):
            messages.append(message := await receive())
        body = b"".join(each.get("body", b"") for each in messages if each["type"] == "http.request")
        if _is_flex(body):
            headers = [*scope["headers"], (PRIORITY_HEADER, str(FLEX_PRIORITY).encode())]
            scope = {**scope, "headers": headers}
        replay = iter(messages)

        async def again() -> Message:
            return next(replay, None) or await receive()

        await self._app(scope, again, send)


def _is_flex(body: bytes) -> bool:
    if b'"service_tier"' not in body:
        return False
    try:
        stated = json.loads(body)
    except ValueError:
        return False
    return isinstance(stated, dict) and stated.get("service_tier") == "flex" and not stated.get("priority")


class Gauges:
    """Collector of prometheus_client: the names of `tidemill serve`, so that its dashboard shows this server."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; nothing while no status is known."""
        from prometheus_client.core import GaugeMetricFamily as Gauge

        status = read_status(self._instance)
        if status is None:
            return
        text = "Share of recently judged requests of a service class that met their promise."
        attained = Gauge("tidemill_slo_class_attainment", text, labels=["slo_class"])
        for name, own in status["classes"].items():
            if own["attainment"] is not None:
                attained.add_metric([name], own["attainment"])
        yield attained
        for name, text, value in (
            ("slo_attainment", "Share of recently judged requests that met the SLO.", status["attainment"]),
            ("offline_share", "Share of the budget that offline work may use.", status["share"]),
            (
                "offline_tokens_per_second",
                "Tokens of offline requests per second.",
                status["offline_tokens_per_second"],
            ),
            ("predictor_mape", "Mean relative error of predicted step times, recent steps.", status["model_error"]),
        ):
            if value is not None:
                yield Gauge(f"tidemill_{name}", text, value=value)


class Endpoint:
    """The plugin that vLLM loads."""

    name = "tidemill"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add the route and the middleware."""
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def slo(request: Request) -> JSONResponse:
            status = read_status(getattr(request.app.state, "tidemill_instance", ""))
            if status is None:
                text = "no status: the engine was idle for 30 s, or its scheduler is not tidemill_vllm.Scheduler"
                return JSONResponse({"error": {"message": text}}, 503)
            return JSONResponse(status)

        app.add_api_route("/tidemill/slo", slo, methods=["GET"])
        app.add_middleware(FlexTier)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ARG002 (vLLM's signature)
        """Remember which engine's status to show, and register the gauges."""
        if engine_client is None:
            return
        instance = str(getattr(engine_client.vllm_config, "instance_id", ""))
        state.tidemill_instance = instance
        from prometheus_client import REGISTRY

        REGISTRY.register(Gauges(instance))
