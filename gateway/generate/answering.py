"""Request reading, admission and responses, streamed or not, common to all generating endpoints.

An `AnswerFormat` defines the JSON of an endpoint's chunks and responses.

Python work runs on the event loop, in threads, or at half speed beside model steps: each of a step's many small
operations must reacquire the GIL, so a busy thread slows a step down many times. Background work therefore sleeps as
long as it has run.
"""

import asyncio
import functools
import hashlib
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import anyio.to_thread
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.errors import TidemillError
from engine.panics import as_error
from engine.turns import Turns
from gateway.context import GatewayContext, ServerContext, context_of, key_of, server_of, tenant_of, tier_of
from gateway.generate.answer_parser import OutputDelta
from gateway.generate.choices import Generation
from gateway.generate.params import Caller, GenerationPlan, promise_of
from gateway.generate.validation import JsonPost
from gateway.generate.wire import ModelBody
from gateway.http.errors import ApiError, log_unexpected, to_api_error
from gateway.http.sse import EventStream, run_while_connected
from gateway.models import Model
from predictor.slo import parse_slo

ResultT = TypeVar("ResultT")

LONGEST_REST = 0.05
"""Maximum sleep in seconds."""


async def run_text_work(context: GatewayContext, work: Callable[[], ResultT]) -> ResultT:
    """Run tokenization or similar work in a worker thread, at half speed for offline work."""
    paced = functools.partial(at_half_speed, work) if context.is_offline else work
    return await anyio.to_thread.run_sync(paced, limiter=context.text_threads)


def at_half_speed(work: Callable[[], ResultT]) -> ResultT:
    """Run `work`, then sleep for the same time. Blocking: call it in a thread, with work of a few milliseconds."""
    start = time.perf_counter()
    result = work()
    time.sleep(min(LONGEST_REST, time.perf_counter() - start))
    return result


INLINE_BYTES = 32 * 1024  # larger bodies are parsed in a thread
CHARS_PER_TOKEN = 4  # estimate for prompts before tokenization
CHARS_PER_PROMPT = 16  # added to each prompt of a list
INLINE_ANSWER_PARTS = 2000  # deltas, tokens with logprobs, parts of vectors; each takes 1 to 30 us
_PART_BYTES = 64  # bytes of a vector that count as one part
READ_INLINE = 2000  # longer prompts, in characters, are tokenized in a thread
PROMISE_HEADER = "x-tidemill-promise"
"""Response header with the class and limits of a request, unless they are the default ones."""

BodyT = TypeVar("BodyT", bound=ModelBody)


class WholeFormat(Protocol):
    """Format of the non-streamed responses of an API."""

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the response; `choices[i]` are the deltas of choice i."""
        ...


class AnswerFormat(WholeFormat, Protocol):
    """Format of the responses of an API. A stream consists of `opening`, chunks, and either `closing` or `failure`."""

    def opening(self) -> bytes:
        """Return the events before the first token, possibly none."""
        ...

    def chunk(self, delta: OutputDelta, usage: dict[str, Any] | None) -> bytes:
        """Return the events of a delta; `usage` is given if the client wants it in every chunk."""
        ...

    def closing(self, usage: dict[str, Any]) -> bytes:
        """Return the events that end a stream, including its usage."""
        ...

    def failure(self, error: ApiError, usage: dict[str, Any]) -> bytes:
        """Return the events that end a stream after an error."""
        ...


async def read_body(request: Request, parse: Callable[[bytearray], BodyT]) -> BodyT:
    """Read and parse the body. A missing service tier defaults to the suffix of the model name (`MODEL:flex`) or the
    tier of the API key. Raises ApiError 415 or InvalidRequestError."""
    body = await read_json(request, parse)
    if body.service_tier in (None, "auto"):
        model = server_of(request).models.find(body.model)
        body.service_tier = (model and model.tier) or tier_of(request)
    if body.service_tier == "flex":  # do not plan a burst of requests in one round of the event loop
        await Turns.of_loop().take()
    return body


async def read_json(request: Request, parse: Callable[[bytearray], ResultT]) -> ResultT:
    """Read and parse the body. Large bodies are parsed in a thread one at a time, because each holds the GIL for up to
    about 10 ms. Raises ApiError 415 and the exceptions of `parse`."""
    raw = await read_raw(request)
    if len(raw) <= INLINE_BYTES:
        return parse(raw)
    return await anyio.to_thread.run_sync(parse, raw, limiter=server_of(request).parse_thread)


async def read_raw(request: Request) -> bytearray:
    """Read the body. The content type must be application/json, which foreign web pages cannot send without a CORS
    preflight. Large bodies take turns with one piece per round of the event loop: sixteen concurrent bodies of 4 MB
    would otherwise block the loop for 10 to 30 ms per round. Raises ApiError 415."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415)
    check_encoding(request)
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > INLINE_BYTES:
            async with server_of(request).body_turn:
                await asyncio.sleep(0)
    return raw


def check_encoding(request: Request) -> None:
    """Raise ApiError 415 for a compressed body."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "Content-Encoding is not supported; send the request body uncompressed.")


async def begin(request: Request, plan: GenerationPlan) -> Generation:
    """Submit a plan as soon as its tenant's quota allows.

    Raises ApiError if the quota refuses it, ClientDisconnect if the client disconnects while waiting, and the
    exceptions of Generation.begin."""
    context = context_of(request)
    admissions = context.admissions
    place = admissions.enter(tenant_of(request), len(plan.requests), plan.max_tokens)
    try:
        if not place.granted.is_set():
            leave = partial(admissions.leave, place)
            if not await run_while_connected(request.receive, place.granted.wait, leave):
                raise ClientDisconnect
        generation = await Generation.begin(plan, context.client, context.tokenizer, context.metrics)
    except BaseException:
        admissions.leave(place)
        raise
    generation.on_end = partial(admissions.leave, place)
    return generation


async def respond(request: Request, generation: Generation, shape: WholeFormat) -> Response:
    """Return the response for a generation, which is aborted if the client disconnects. `shape` must be an AnswerFormat
    for a stream."""
    if generation.plan.stream:
        answer_format = cast(AnswerFormat, shape)
        events = stream_events(generation, answer_format)
        return EventStream(events, generation.abort, partial(generation.write_directly, answer_format.chunk))
    try:
        answer = await run_while_connected(request.receive, lambda: collect(generation, shape), generation.abort)
    finally:
        generation.abort()
    if answer is None:
        return Response(status_code=499)  # not sent: the connection is closed
    return Response(orjson.dumps(answer), media_type="application/json")


async def collect(generation: Generation, shape: WholeFormat) -> dict[str, Any]:
    """Return the complete answer, built in a thread if it is large. Raises the error of the first choice that fails."""
    choices: list[list[OutputDelta]] = [[] for _ in generation.choices]
    num_parts = 0
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.index].append(delta)
            num_parts += 1 + len(delta.logprobs) + len(delta.embedding) // _PART_BYTES
    if num_parts <= INLINE_ANSWER_PARTS:
        return shape.whole(choices, generation.usage())
    return await anyio.to_thread.run_sync(shape.whole, choices, generation.usage())


async def stream_events(generation: Generation, shape: AnswerFormat) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error ends the stream with the events of `failure`."""
    options = generation.plan.stream_options
    usage: Callable[[], dict[str, Any] | None] = generation.usage if options.in_every_chunk else lambda: None
    try:
        if opening := shape.opening():
            yield opening
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if events := shape.chunk(delta, usage()):
                    yield events
        yield shape.closing(generation.usage())
    except BaseException as raised:  # the client must be able to distinguish any error from a normal end
        error = as_error(raised)
        if not isinstance(error, TidemillError):
            log_unexpected(error)
        yield shape.failure(to_api_error(error), generation.usage())


def choose_model(context: GatewayContext, body: ModelBody) -> Model:
    """Return the model of a request, and name it in a body that names none. Raises ApiError 404."""
    body.model = body.model or context.models.first
    return find_model(context, body.model)


def caller_of(context: GatewayContext, body: ModelBody, tenant: str, prefix: str, salt: str | None = None) -> Caller:
    """Return the identity of a request to a served model; see `choose_model`. `prefix`: prefix of the response id;
    `salt`: the client's own salt of the prefix cache, which tenants never share."""
    adapter = choose_model(context, body).adapter
    shared_by = tenant if salt is None else f"{tenant}\0{salt}"
    cache_salt = hmac.digest(context.salt_secret, shared_by.encode(), hashlib.sha256)[:16]
    return Caller(f"{prefix}{uuid.uuid4().hex}", cache_salt, tenant, adapter)


def find_model(context: ServerContext, name: str) -> Model:
    """Return a served model. Raises ApiError 404."""
    model = context.models.find(name)
    if model is None:
        message = f"The model does not exist on this server, which serves {context.models.summary()}."
        raise ApiError(404, message, param="model", code="model_not_found")
    return model


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
        context.check_room(tenant)
        body = await read_body(request, self.parse)
        promise = None
        if body.service_tier != "flex":
            promise = promise_of(request.headers, body, key_of(request), parse_slo(context.client.info.slo))
        plan = (await self.plan(context, body, tenant)).promised(promise, body.service_tier)
        generation = await begin(request, plan)
        response = await respond(request, generation, self.format(context, body, plan, request.state.request_id))
        if promise is not None:
            response.headers[PROMISE_HEADER] = str(promise)
        return response
