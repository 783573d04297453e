"""GET /v1/models and /v1/models/{id}. One model under one or several names."""

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import GatewayContext, context_of
from gateway.generate.answering import check_model

router = APIRouter()


def _model_object(context: GatewayContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "tidemill",
        "root": context.model_names[0],
        "max_model_len": context.client.info.max_model_len,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    context = context_of(request)
    data = [_model_object(context, name) for name in context.model_names]
    return Response(orjson.dumps({"object": "list", "data": data}), media_type="application/json")


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    context = context_of(request)
    check_model(context, model)
    return Response(orjson.dumps(_model_object(context, model)), media_type="application/json")
