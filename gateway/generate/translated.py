"""Endpoints of other APIs, whose requests are translated to chat requests: /v1/messages, /v1/responses, and those that
count prompt tokens only."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import GatewayContext, context_of
from gateway.generate.answering import BodyT, ModelEndpoint, read_body
from gateway.generate.chat import plan_chat, prompt_ids
from gateway.generate.messages import request as messages
from gateway.generate.messages.events import MessageFormat
from gateway.generate.messages.request import CountRequest, MessagesRequest, PromptBody
from gateway.generate.params import GenerationPlan
from gateway.generate.responses import request as responses
from gateway.generate.responses.events import ResponsesFormat
from gateway.generate.responses.request import ResponsesRequest
from gateway.generate.threads import run_by_size
from gateway.generate.translation import Translation, told_in
from gateway.generate.validation import JsonPost


async def _from_message(context: GatewayContext, body: PromptBody) -> Translation:
    template, reasons = context.tokenizer.chat_template_text, context.thought_marks is not None
    return await run_by_size(context, body, lambda: messages.translate(body, template, reasons))


async def _from_response(context: GatewayContext, body: ResponsesRequest) -> Translation:
    return await run_by_size(context, body, lambda: responses.translate(body))


async def _plan_message(context: GatewayContext, body: MessagesRequest, tenant: str) -> GenerationPlan:
    return await _plan(context, await _from_message(context, body), tenant, "msg_", clip=True)


async def _plan_response(context: GatewayContext, body: ResponsesRequest, tenant: str) -> GenerationPlan:
    return await _plan(context, await _from_response(context, body), tenant, "resp_")


async def _plan(
    context: GatewayContext, translation: Translation, tenant: str, prefix: str, clip: bool = False
) -> GenerationPlan:
    with told_in(translation.names):
        plan = await plan_chat(context, translation.chat, tenant, prefix, clip)
    return dataclasses.replace(plan, names=translation.names)


MESSAGES = ModelEndpoint(
    "/v1/messages", MessagesRequest, messages.UNHONOURED, "create_message", _plan_message,
    lambda _, body, plan, request_id: MessageFormat(plan, body, request_id),
)  # fmt: skip
RESPONSES = ModelEndpoint(
    "/v1/responses", ResponsesRequest, responses.UNHONOURED, "create_response", _plan_response,
    lambda context, body, plan, _: ResponsesFormat(plan, body, context.tokenizer),
)  # fmt: skip
COUNT_TOKENS = JsonPost("/v1/messages/count_tokens", CountRequest, messages.UNHONOURED)
INPUT_TOKENS = JsonPost("/v1/responses/input_tokens", ResponsesRequest, responses.UNHONOURED)


async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a message. Nothing is queued."""
    return await _count(request, COUNT_TOKENS, _from_message)


async def input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a response. Nothing is queued."""
    return await _count(request, INPUT_TOKENS, _from_response, object="response.input_tokens")


async def _count(
    request: Request,
    post: JsonPost[BodyT],
    translate: Callable[[GatewayContext, BodyT], Awaitable[Translation]],
    **fields: Any,
) -> Response:
    context = context_of(request)
    context.lifecycle.check_accepting()
    translation = await translate(context, await read_body(request, post.parse))
    with told_in(translation.names):
        number = len(await prompt_ids(context, translation.chat))
    return Response(orjson.dumps({**fields, "input_tokens": number}), media_type="application/json")
