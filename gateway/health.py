"""GET /health (the process and its engine live), /ready (send work here), /version, /metrics and /v1/models."""

from typing import Any

import anyio.to_thread
import orjson
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from engine.client import ColocationStats, EngineState, EngineStats
from engine.errors import EngineUnavailableError
from gateway.context import sees_all, server_of
from gateway.generate.answering import find_model
from gateway.http.errors import ApiError, speaks_anthropic, timestamp
from gateway.models import Model
from gateway.telemetry.engine_metrics import shown as engines_shown

router = APIRouter()
_PROMISE = (
    "slo", "attainment", "latency_budget", "budget_origin", "rule", "interference_weight", "decode_value", "learned",
    "offline_share", "share_limit", "breaker", "model_refits", "refit_errors",
    "baseline_noise",
)  # fmt: skip
"""Fields of `ColocationStats` in the answer of /ready."""


@router.get("/health")
async def health(request: Request) -> Response:
    if server_of(request).client.state is EngineState.DEAD:
        raise EngineUnavailableError("The engine is not running.", retry_after=5.0)
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get("/ready")
async def ready(request: Request) -> Response:
    context = server_of(request)
    context.lifecycle.check_accepting()
    if context.client.state is not EngineState.READY:
        trouble = context.client.trouble
        reason = f": {trouble}" if trouble is not None else ""
        raise EngineUnavailableError(f"The engine is not ready{reason}.", retry_after=5.0)
    stats = await context.client.stats()
    fault = await context.lifecycle.storage_fault()
    troubles = {"storage": fault, "batches": context.lifecycle.batch_trouble()}
    found = {name: text for name, text in troubles.items() if text is not None}
    answer: dict[str, Any] = {"status": "degraded" if found else "ok", **found}
    if (notice := context.lifecycle.ask_notice()) is not None:
        answer["storage_notice"] = notice
    if fallbacks := context.client.info.fallbacks:
        answer["kernels"] = fallbacks
    if not sees_all(request):
        return Response(orjson.dumps(answer), media_type="application/json")
    if stats.engines:
        answer["engines"] = engines_shown(stats.engines)
    if stats.colocation is not None:
        answer["colocation"] = _promise(stats, stats.colocation)
    return Response(orjson.dumps(answer), media_type="application/json")


def _promise(stats: EngineStats, colocation: ColocationStats) -> dict[str, Any]:
    """Return the state of the SLO and the offline budget."""
    shown: dict[str, Any] = {
        **{name: getattr(colocation, name) for name in _PROMISE},
        "predictor_overrun": colocation.overrun,
        "refused_requests": stats.refused_requests,
        "margins": {str(tokens): margin for tokens, margin in colocation.margins.items()},
        "plans": stats.plans,
        "knapsack": stats.knapsack,
        "lanes": {"waiting": stats.lanes_waiting, "started": stats.lanes_started},
        "objectives": {
            each.objective: {name: getattr(each, name) for name in ("value", "bound", "attainment")}
            for each in colocation.objectives
        },
    }
    if len(colocation.classes) > 1:
        shown["classes"] = {
            each.name: {
                "promise": each.promise,
                "attainment": each.attainment,
                "good": colocation.class_good[each.name],
                "bad": colocation.class_bad[each.name],
                "refused": colocation.class_refused[each.name],
            }
            for each in colocation.classes
        }
    if colocation.held:
        shown["held"] = colocation.held
    elif colocation.breaker_cause:
        shown["breaker_cause"] = colocation.breaker_cause
    return shown


@router.get("/version")
async def show_version(request: Request) -> Response:
    return Response(orjson.dumps({"version": request.app.version}), media_type="application/json")


@router.get("/metrics")
async def show_metrics(request: Request) -> Response:
    check_sees_all(request)
    metrics = server_of(request).metrics
    await metrics.take_snapshot()
    return Response(await anyio.to_thread.run_sync(metrics.render), media_type=CONTENT_TYPE_LATEST)


def check_sees_all(request: Request) -> None:
    """Raise ApiError 403 for a key that may not read metrics of all tenants."""
    if not sees_all(request):
        message = "Metrics cover all tenants; use a key with the role 'metrics' or 'operator'."
        raise ApiError(403, message, code="metrics_forbidden")


def _model_object(request: Request, name: str, model: Model) -> dict[str, Any]:
    """Return a model in OpenAI's form, or in Anthropic's for its clients."""
    context = server_of(request)
    length = context.client.info.max_model_len
    if speaks_anthropic(request.scope):
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": timestamp(context.created),
            "lifecycle": "active",
            "max_input_tokens": length,
            "max_tokens": length,
        }
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "tidemill",
        "root": model.root,
        "parent": model.parent,
        "max_model_len": length,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List all models on one page."""
    data = [_model_object(request, name, found) for name, found in server_of(request).models.listed()]
    answer: dict[str, Any] = {"object": "list", "data": data}
    if speaks_anthropic(request.scope):
        answer = {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return Response(orjson.dumps(answer), media_type="application/json")


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    found = find_model(server_of(request), model)
    return Response(orjson.dumps(_model_object(request, model, found)), media_type="application/json")
