"""An endpoint that asks the model, as a value, and how HTTP answers with one. `gateway.endpoints` is their table."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic

from starlette.requests import Request
from starlette.responses import Response

from gateway.context import GatewayContext, context_of, tenant_of
from gateway.generate.answering import BodyT, WholeFormat, begin, read_body, respond
from gateway.generate.params import GenerationPlan, Unhonoured
from gateway.generate.wire import parse_json, validate


@dataclass(frozen=True)
class JsonPost(Generic[BodyT]):
    """A path to which a JSON object is posted."""

    path: str
    body: type[BodyT]
    unhonoured: Unhonoured

    def parse(self, raw: bytes | bytearray) -> BodyT:
        """Raises InvalidRequestError."""
        return self.check(parse_json(raw))

    def check(self, fields: dict[str, Any]) -> BodyT:
        """Raises InvalidRequestError."""
        return validate(self.body, self.unhonoured.strip(fields))


@dataclass(frozen=True)
class Endpoint(JsonPost[BodyT]):
    """`plan(context, body, tenant)`: everything that can be wrong with a request is found there, before anything is
    queued. `format(context, body, plan, request_id)`: how its answer is spelled, an AnswerFormat if a body may ask for
    a stream; `request_id`: of the HTTP request, None for a line of a batch."""

    name: str
    plan: Callable[[GatewayContext, BodyT, str], Awaitable[GenerationPlan]]
    format: Callable[[GatewayContext, BodyT, GenerationPlan, str | None], WholeFormat]

    async def answer(self, request: Request) -> Response:
        # no docstring: OpenAPI would show it at every path
        context, tenant = context_of(request), tenant_of(request)
        context.lifecycle.check_accepting()
        context.admissions.check(tenant)
        body = await read_body(request, self.parse)
        plan = await self.plan(context, body, tenant)
        generation = await begin(request, plan)
        return await respond(request, generation, self.format(context, body, plan, request.state.request_id))
