"""From a plan to an HTTP answer, streamed or whole: what chat and completions have in common.

Knows nothing of the shapes of their chunks; those are an `AnswerFormat`.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, cast

import anyio.to_thread
import orjson
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.api import RequestClass
from engine.errors import TidemillError
from engine.turns import Turns
from gateway.context import GatewayContext, context_of, tenant_of, tier_of
from gateway.generate.body_size import is_large
from gateway.generate.choices import Delta, Generation
from gateway.generate.pace import at_half_speed
from gateway.generate.params import GenerationPlan
from gateway.generate.wire import ModelBody
from gateway.http.errors import ApiError, log_unexpected, to_api_error
from gateway.http.quotas import Admissions, Place
from gateway.http.sse import EventStream, run_while_connected
from gateway.models import Model

INLINE_BYTES = 32 * 1024  # parsing more than this takes long enough for a thread to be worth it
CHARS_PER_TOKEN = 4  # a guess, for prompts that are not read
INLINE_ANSWER_PARTS = 2000  # deltas, tokens with logprobs, pieces of vectors; each takes 1 to 30 us
_PART_BYTES = 64  # of a vector
READ_INLINE = 2000  # characters that are tokenized on the event loop

BodyT = TypeVar("BodyT", bound=ModelBody)
ResultT = TypeVar("ResultT")


class WholeFormat(Protocol):
    """How one API spells an answer in one piece."""

    def whole(self, choices: list[list[Delta]], usage: dict[str, Any]) -> dict[str, Any]:
        """`choices[i]` are the deltas of choice i."""
        ...


class AnswerFormat(WholeFormat, Protocol):
    """How one API spells its answers. Of a stream: `opening` once, then chunks, then one of `closing` and `failure`."""

    def opening(self) -> bytes:
        """The events before the first token; b"": there are none."""
        ...

    def chunk(self, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        """A delta as events; `usage` where the client wants it in every chunk."""
        ...

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The events that end a stream, and say what it used."""
        ...

    def failure(self, error: ApiError, usage: dict[str, Any]) -> bytes:
        """The events of a stream that breaks off."""
        ...


async def read_body(request: Request, parse: Callable[[bytearray], BodyT]) -> BodyT:
    """The request's body; where it names no service tier it has the one that its model's name ends with
    (`MODEL:flex`), or its key's. Raises ApiError 415 or InvalidRequestError."""
    body = await read_json(request, parse)
    if body.service_tier in (None, "auto"):
        model = context_of(request).models.find(body.model)
        body.service_tier = (model and model.tier) or tier_of(request)
    if body.service_tier == "flex":  # many that come at once must not be planned in one round of the event loop
        await Turns.of_loop().take()
    return body


async def read_json(request: Request, parse: Callable[[bytearray], ResultT]) -> ResultT:
    """The request's body, parsed. Large ones are parsed in a thread and one at a time: each keeps the interpreter from
    others for up to some 10 ms, and several at a time would be felt. Raises ApiError 415 and what `parse` raises."""
    raw = await _read_raw(request)
    if len(raw) <= INLINE_BYTES:
        return parse(raw)
    return await anyio.to_thread.run_sync(parse, raw, limiter=context_of(request).parse_thread)


async def _read_raw(request: Request) -> bytearray:
    """The request's body, put together as it comes, insisting on its content type: a web page of another origin cannot
    send that without asking first. Large ones take turns, a piece in a round of the event loop, and whose piece waits
    is not read meanwhile: sixteen of 4 MB at once kept the loop for 10 to 30 ms a round. Raises ApiError 415."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415)
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "The request body must be sent as it is, without a Content-Encoding.")
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > INLINE_BYTES:
            async with context_of(request).body_turn:
                await asyncio.sleep(0)
    return raw


async def run_by_size(context: GatewayContext, body: BaseModel, work: Callable[[], ResultT]) -> ResultT:
    """Do work that takes time for every part of a body: at once, or in a thread where the body is large, one request
    at a time."""
    if not is_large(body):
        return work()
    return await anyio.to_thread.run_sync(work, limiter=context.parse_thread)


async def check_room(context: GatewayContext, body: ModelBody, num_chars: int, tenant: str) -> None:
    """Before a prompt of about so many characters is read: would it be queued? A short one is read in less time than
    it takes to ask an engine in another process, which refuses it by itself. Raises QueueFullError or
    EngineUnavailableError."""
    if num_chars <= READ_INLINE:
        return
    offline = context.is_offline or body.service_tier == "flex"
    tokens = num_chars // CHARS_PER_TOKEN
    await context.client.check_room(RequestClass.OFFLINE if offline else RequestClass.ONLINE, tokens, tenant)


async def run_text_work(context: GatewayContext, work: Callable[[], ResultT]) -> ResultT:
    """Tokenize in a worker thread."""
    paced = functools.partial(at_half_speed, work) if context.is_offline else work
    return await anyio.to_thread.run_sync(paced, limiter=context.text_threads)


async def begin(request: Request, plan: GenerationPlan) -> Generation:
    """Queue what was planned, once the quota of its tenant has a place for it.

    Raises ApiError for what the quota refuses, ClientDisconnect if the client left while it waited, and what
    Generation.begin raises."""
    context = context_of(request)
    admissions = context.admissions
    place = admissions.enter(tenant_of(request), len(plan.requests), plan.max_tokens)
    try:
        if not place.granted.is_set():
            await _wait_for(request, place, admissions)
        context.lifecycle.check_accepting()
        generation = await Generation.begin(plan, context.client, context.tokenizer, context.metrics)
    except BaseException:
        admissions.leave(place)
        raise
    generation.on_end = functools.partial(admissions.leave, place)
    return generation


async def _wait_for(request: Request, place: Place, admissions: Admissions) -> None:
    async def granted() -> None:
        await place.granted.wait()

    if not await run_while_connected(request.receive, granted, functools.partial(admissions.leave, place)):
        raise ClientDisconnect


async def respond(request: Request, generation: Generation, shape: WholeFormat) -> Response:
    """The response that carries a generation to its client, and ends it when the client leaves. `shape`: an
    AnswerFormat where the plan is of a stream."""
    if generation.plan.stream:
        return EventStream(stream_events(generation, cast(AnswerFormat, shape)), generation.abort)
    answer: list[dict[str, Any]] = []

    async def work() -> None:
        answer.append(await collect(generation, shape))

    try:
        if not await run_while_connected(request.receive, work, generation.abort):
            return Response(status_code=499)  # for nobody: the connection is closed
    finally:
        generation.abort()
    return Response(orjson.dumps(answer[0]), media_type="application/json")


async def collect(generation: Generation, shape: WholeFormat) -> dict[str, Any]:
    """The whole answer; a large one is put together in a thread. Raises the error of the first choice that fails."""
    choices: list[list[Delta]] = [[] for _ in generation.choices]
    num_parts = 0
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.index].append(delta)
            num_parts += 1 + len(delta.logprobs) + len(delta.embedding) // _PART_BYTES
    if num_parts <= INLINE_ANSWER_PARTS:
        return shape.whole(choices, generation.usage())
    return await anyio.to_thread.run_sync(shape.whole, choices, generation.usage())


async def stream_events(generation: Generation, shape: AnswerFormat) -> AsyncGenerator[bytes, None]:
    """The events of a stream. After an error in mid-stream nothing comes but the event that tells of it."""
    options = generation.plan.stream_options
    usage: Callable[[], dict[str, Any] | None] = (
        generation.usage if options.continuous_usage_stats else functools.partial(_nothing)
    )
    try:
        if opening := shape.opening():
            yield opening
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if events := shape.chunk(delta, usage()):
                    yield events
        yield shape.closing(generation.usage())
    except Exception as error:  # whatever it is, the client must be able to tell it from the end
        if not isinstance(error, TidemillError):
            log_unexpected(error)
        yield shape.failure(to_api_error(error), generation.usage())


def _nothing() -> None:
    return None


def find_model(context: GatewayContext, name: str) -> Model:
    """Raises ApiError 404 for a model that is not served here."""
    model = context.models.find(name)
    if model is None:
        raise ApiError(404, "This server has no such model.", param="model", code="model_not_found")
    return model
