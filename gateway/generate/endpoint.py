"""Description of an endpoint that runs the model. `gateway.endpoints` lists all endpoints."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic

from starlette.requests import Request
from starlette.responses import Response

from gateway.context import GatewayContext, context_of, key_of, tenant_of
from gateway.generate.answering import BodyT, WholeFormat, begin, read_body, respond
from gateway.generate.params import GenerationPlan, Unhonoured
from gateway.generate.promises import promise_of
from gateway.generate.wire import parse_json, validate
from predictor.slo import parse_slo

PROMISE_HEADER = "x-tidemill-promise"
"""Response header with the class and limits of a request, unless they are the default ones."""


@dataclass(frozen=True)
class JsonPost(Generic[BodyT]):
    """A path that accepts a JSON object by POST."""

    path: str
    body: type[BodyT]
    unhonoured: Unhonoured

    def parse(self, raw: bytes | bytearray) -> BodyT:
        """Parse and validate a body. Raises InvalidRequestError."""
        return self.check(parse_json(raw))

    def check(self, fields: dict[str, Any]) -> BodyT:
        """Validate the fields of a body. Raises InvalidRequestError."""
        return validate(self.body, self.unhonoured.strip(fields))


@dataclass(frozen=True)
class ModelEndpoint(JsonPost[BodyT]):
    """An endpoint that runs the model."""

    name: str
    plan: Callable[[GatewayContext, BodyT, str], Awaitable[GenerationPlan]]
    """`plan(context, body, tenant)` detects all errors of a request before it is submitted."""
    format: Callable[[GatewayContext, BodyT, GenerationPlan, str | None], WholeFormat]
    """`format(context, body, plan, request_id)` returns the response format: an AnswerFormat if streams are supported.
    `request_id`: id of the HTTP request, None for a batch line."""

    async def answer(self, request: Request) -> Response:
        # no docstring, because OpenAPI would show it for every path
        context, tenant = context_of(request), tenant_of(request)
        context.lifecycle.check_accepting()
        context.admissions.check(tenant)
        body = await read_body(request, self.parse)
        promise = None
        if body.service_tier != "flex":
            promise = promise_of(request.headers, body, key_of(request), parse_slo(context.client.info.slo))
        if promise is not None:
            context = replace(context, promise=promise)
        plan = (await self.plan(context, body, tenant)).promised(promise, body.service_tier)
        generation = await begin(request, plan)
        response = await respond(request, generation, self.format(context, body, plan, request.state.request_id))
        if promise is not None:
            response.headers[PROMISE_HEADER] = str(promise)
        return response
