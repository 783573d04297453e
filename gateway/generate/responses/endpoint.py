"""POST /v1/responses."""

from gateway.context import GatewayContext
from gateway.generate.chat import plan_translated
from gateway.generate.endpoint import ModelEndpoint
from gateway.generate.params import GenerationPlan
from gateway.generate.responses.events import ResponsesFormat
from gateway.generate.responses.translate import translate
from gateway.generate.responses.wire import UNHONOURED, ResponsesRequest
from gateway.generate.threads import run_by_size


async def _plan(context: GatewayContext, body: ResponsesRequest, tenant: str) -> GenerationPlan:
    translation = await run_by_size(context, body, lambda: translate(body))
    return await plan_translated(context, translation, tenant, "resp_")


RESPONSES = ModelEndpoint(
    "/v1/responses", ResponsesRequest, UNHONOURED, "create_response", _plan,
    lambda _, body, plan, __: ResponsesFormat(plan, body),
)  # fmt: skip
