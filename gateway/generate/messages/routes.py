"""POST /v1/messages and /v1/messages/count_tokens."""

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import context_of, tenant_of
from gateway.generate.answering import begin, read_body, respond
from gateway.generate.chat import count_prompt, plan_chat
from gateway.generate.messages.events import MessageFormat
from gateway.generate.messages.translate import translate
from gateway.generate.messages.wire import CountRequest, MessagesRequest, without_ignored
from gateway.generate.translation import told_in

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """What is asked for and does not fit into the context may be shorter: the API has a stop reason for it."""
    context = context_of(request)
    context.lifecycle.check_accepting()
    context.admissions.check(tenant_of(request))
    body = await read_body(request, MessagesRequest, without_ignored)
    translation = translate(body, context.tokenizer.chat_template_text)
    with told_in(translation.names):
        plan = await plan_chat(context, translation.chat, tenant_of(request), "msg_", clip=True)
        generation = await begin(request, plan, chat=True)
    return await respond(request, generation, MessageFormat(plan, body, request.state.request_id))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """How long the prompt of a message would be. Nothing is queued."""
    context = context_of(request)
    context.lifecycle.check_accepting()
    body = await read_body(request, CountRequest, without_ignored)
    translation = translate(body, context.tokenizer.chat_template_text)
    with told_in(translation.names):
        number = await count_prompt(context, translation.chat)
    return Response(orjson.dumps({"input_tokens": number}), media_type="application/json")
