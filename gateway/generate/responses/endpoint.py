"""POST /v1/responses."""

from gateway.context import GatewayContext
from gateway.generate.chat import plan_translated
from gateway.generate.endpoint import Endpoint
from gateway.generate.params import GenerationPlan
from gateway.generate.responses.events import ResponseFormat
from gateway.generate.responses.translate import translate
from gateway.generate.responses.wire import UNHONOURED, ResponsesRequest


async def _plan(context: GatewayContext, body: ResponsesRequest, tenant: str) -> GenerationPlan:
    return await plan_translated(context, translate(body, context.tokenizer.chat_template_text), tenant, "resp_")


RESPONSES = Endpoint(
    "/v1/responses", ResponsesRequest, UNHONOURED, "create_response", _plan,
    lambda _, body, plan, __: ResponseFormat(plan, body),
)  # fmt: skip
