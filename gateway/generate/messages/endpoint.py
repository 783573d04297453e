"""POST /v1/messages and /v1/messages/count_tokens."""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import GatewayContext, context_of
from gateway.generate.answering import ModelEndpoint, read_body
from gateway.generate.chat import plan_translated, prompt_ids
from gateway.generate.messages.events import MessageFormat
from gateway.generate.messages.translate import translate
from gateway.generate.messages.wire import UNHONOURED, CountRequest, MessagesRequest, PromptBody
from gateway.generate.params import GenerationPlan
from gateway.generate.threads import run_by_size
from gateway.generate.translation import Translation, told_in
from gateway.generate.validation import JsonPost


async def _plan(context: GatewayContext, body: MessagesRequest, tenant: str) -> GenerationPlan:
    translation = await _translation(context, body)
    return await plan_translated(context, translation, tenant, "msg_", clip=True)


async def _translation(context: GatewayContext, body: PromptBody) -> Translation:
    template, reasons = context.tokenizer.chat_template_text, context.thought_marks is not None
    return await run_by_size(context, body, lambda: translate(body, template, reasons))


MESSAGES = ModelEndpoint(
    "/v1/messages", MessagesRequest, UNHONOURED, "create_message", _plan,
    lambda _, body, plan, request_id: MessageFormat(plan, body, request_id),
)  # fmt: skip
COUNT_TOKENS = JsonPost("/v1/messages/count_tokens", CountRequest, UNHONOURED)


async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a message. Nothing is queued."""
    context = context_of(request)
    context.lifecycle.check_accepting()
    translation = await _translation(context, await read_body(request, COUNT_TOKENS.parse))
    with told_in(translation.names):
        number = len(await prompt_ids(context, translation.chat))
    return Response(orjson.dumps({"input_tokens": number}), media_type="application/json")
