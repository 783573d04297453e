"""POST /v1/responses and /v1/responses/input_tokens."""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import GatewayContext, context_of
from gateway.generate.answering import ModelEndpoint, read_body
from gateway.generate.chat import plan_translated, prompt_ids
from gateway.generate.params import GenerationPlan
from gateway.generate.responses.events import ResponsesFormat
from gateway.generate.responses.translate import translate
from gateway.generate.responses.wire import UNHONOURED, ResponsesRequest
from gateway.generate.threads import run_by_size
from gateway.generate.translation import told_in
from gateway.generate.validation import JsonPost


async def _plan(context: GatewayContext, body: ResponsesRequest, tenant: str) -> GenerationPlan:
    translation = await run_by_size(context, body, lambda: translate(body))
    return await plan_translated(context, translation, tenant, "resp_")


RESPONSES = ModelEndpoint(
    "/v1/responses", ResponsesRequest, UNHONOURED, "create_response", _plan,
    lambda context, body, plan, _: ResponsesFormat(plan, body, context.tokenizer),
)  # fmt: skip
INPUT_TOKENS = JsonPost("/v1/responses/input_tokens", ResponsesRequest, UNHONOURED)


async def input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a response. Nothing is queued."""
    context = context_of(request)
    context.lifecycle.check_accepting()
    body = await read_body(request, INPUT_TOKENS.parse)
    translation = await run_by_size(context, body, lambda: translate(body))
    with told_in(translation.names):
        number = len(await prompt_ids(context, translation.chat))
    counted = {"object": "response.input_tokens", "input_tokens": number}
    return Response(orjson.dumps(counted), media_type="application/json")
