"""POST /v1/responses."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import begin, read_body, respond
from gateway.chat import plan_chat
from gateway.context import context_of, tenant_of
from gateway.responses.events import ResponseFormat
from gateway.responses.translate import translate
from gateway.responses.wire import ResponsesRequest, without_ignored
from gateway.translation import told_in

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    context = context_of(request)
    context.lifecycle.check_accepting()
    context.admissions.check(tenant_of(request))
    body = await read_body(request, ResponsesRequest, without_ignored)
    translation = translate(body, context.tokenizer.chat_template_text)
    with told_in(translation.names):
        plan = await plan_chat(context, translation.chat, tenant_of(request), "resp_")
        generation = await begin(request, plan, chat=True)
    return await respond(request, generation, ResponseFormat(plan, body))
