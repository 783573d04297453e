"""POST /v1/responses."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import context_of, tenant_of
from gateway.generate.answering import begin, read_body, respond
from gateway.generate.chat import plan_chat
from gateway.generate.responses.events import ResponseFormat
from gateway.generate.responses.translate import translate
from gateway.generate.responses.wire import ResponsesRequest, without_ignored
from gateway.generate.translation import told_in

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
