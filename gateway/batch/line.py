"""Execute a batch line like a request to its endpoint, without HTTP: in the offline class, with one final output.

`read_head` estimates the sizes of a batch's lines and answers from its first lines.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from engine.api import EngineRequest, Lane, RequestClass
from engine.errors import InvalidRequestError
from engine.turns import Turns
from gateway.batch.run import LineSizes
from gateway.context import GatewayContext
from gateway.endpoints import ENDPOINTS
from gateway.generate.answering import ModelEndpoint, collect, run_text_work
from gateway.generate.choices import Generation
from gateway.generate.params import GenerationPlan
from gateway.http.json_text import load_json
from gateway.store.objects import Usage
from gateway.telemetry.account import EngineTime

INLINE_LINE = 8 * 1024
"""Maximum bytes of a line that is validated on the event loop (0.1 ms): a thread hop would cost more."""

HEAD_BYTES = 64 * 1024
HEAD_ANSWERS = 64
"""Maximum number of lines whose answer limits are kept, for as long as the batch is unfinished."""
ANSWER_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields of the validated bodies, the first that is set counts."""


class LineAnswer(NamedTuple):
    """The response that HTTP would have given, and its token usage."""

    status: int
    body: dict[str, Any]
    usage: Usage = Usage()


class LineOrigin(NamedTuple):
    """Origin of a line."""

    tenant: str
    job: str
    """Batch id."""
    deadline: float
    """End of the completion window in Unix seconds."""
    lane: Lane = Lane.BATCH
    length: int | None = None
    """Length in bytes, if known."""


class LineRunner:
    """Run lines on the engine without delaying online requests.

    Long prompts are tokenized in a separate thread at half speed, and only a few lines start per round of the event
    loop.
    """

    def __init__(self, context: GatewayContext) -> None:
        self._context = dataclasses.replace(context, text_threads=anyio.CapacityLimiter(1), is_offline=True)

    async def run(self, endpoint: str, body: dict[str, Any], origin: LineOrigin) -> LineAnswer:
        """Return the answer. Failures raise, and the caller decides whether the line runs again. Cancelling ends the
        line in the engine."""
        context, model = self._context, ENDPOINTS[endpoint]
        if origin.length is not None and origin.length <= INLINE_LINE:
            await Turns.of_loop().take()
            asked = model.check(body)
        else:
            asked = await run_text_work(context, lambda: model.check(body))
        plan = _offline(await model.plan(context, asked, origin.tenant), origin)
        generation = await Generation.begin(plan, context.client, context.tokenizer, context.metrics)
        try:
            answer = await collect(generation, model.format(context, asked, plan, None))
        finally:
            generation.abort()
        return LineAnswer(200, answer, _usage(generation.usage(), context.metrics.engine_time))


def _usage(used: dict[str, Any], engine_time: EngineTime) -> Usage:
    cached = used["prompt_tokens_details"]["cached_tokens"]
    thoughts = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    prompt, output = used["prompt_tokens"], used["completion_tokens"]
    return Usage(prompt, cached, output, thoughts, engine_time.charge(prompt - cached, output))


def _offline(plan: GenerationPlan, origin: LineOrigin) -> GenerationPlan:
    """Return the plan in the offline class, whatever service tier the line asks for. Tokens are only reported at the
    end, unless stop strings must be checked."""
    offline, final_only = RequestClass.OFFLINE, not plan.stop

    def move(request: EngineRequest) -> EngineRequest:
        return dataclasses.replace(
            request,
            request_class=offline,
            deadline=origin.deadline,
            final_only=final_only,
            job=origin.job,
            lane=origin.lane,
        )

    requests, scoring = tuple(map(move, plan.requests)), tuple(map(move, plan.scoring))
    return dataclasses.replace(plan, requests=requests, scoring=scoring, request_class=offline)


def read_head(path: Path, endpoint: str) -> LineSizes | None:
    """Return the mean length and the answer limits of the first lines, or None if no whole line can be read. Blocking.

    A line that `endpoint` would refuse gets an error row without any model work, so its answer limit is 0.
    """
    try:
        with path.open("rb") as file:
            data = file.read(HEAD_BYTES)
    except OSError:
        return None
    whole = data if len(data) < HEAD_BYTES else data[: data.rfind(b"\n") + 1]
    lines = [line for line in whole.split(b"\n") if line.strip()]
    evenly = lines[:: math.ceil(len(lines) / HEAD_ANSWERS) or 1]
    answers = tuple(_answer_limit(line, ENDPOINTS[endpoint]) for line in evenly)
    length = sum(len(line) + 1 for line in lines) / max(1, len(lines))
    return LineSizes(length, answers) if lines else None


def _answer_limit(line: bytes, endpoint: ModelEndpoint[Any]) -> float:
    """Return the maximum number of tokens in the answer to a line: infinity without a limit, 0 for an invalid line."""
    try:
        body = endpoint.check(load_json(line)["body"])
    except (InvalidRequestError, ValueError, TypeError, KeyError, AttributeError):
        return 0.0
    limit = next((most for name in ANSWER_LIMITS if (most := getattr(body, name, None)) is not None), math.inf)
    return float(limit * (getattr(body, "n", None) or 1))
