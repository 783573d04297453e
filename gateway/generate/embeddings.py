"""POST /v1/embeddings: one vector per text, pooled from the model's last hidden states."""

import base64
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema

from engine.api import SamplingParams
from engine.client import EngineInfo
from engine.errors import InvalidRequestError
from engine.forms import EmbeddingSpec
from gateway.context import GatewayContext
from gateway.generate.answer_parser import OutputDelta
from gateway.generate.answering import ModelEndpoint, caller_of
from gateway.generate.completions import encode_prompts, plan_by_length
from gateway.generate.params import GenerationPlan, check_prompt
from gateway.generate.validation import UNHONOURED
from gateway.generate.wire import ModelBody, as_prompts, prompt_schema

MAX_INPUTS = 2048
NOTHING_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0)


class EmbeddingRequest(ModelBody):
    """POST /v1/embeddings. `input` is normalized to a list of strings and lists of token ids."""

    input: Annotated[
        Any, BeforeValidator(partial(as_prompts, most=MAX_INPUTS)), WithJsonSchema(prompt_schema(MAX_INPUTS))
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=2**31 - 1)


async def plan_embeddings(context: GatewayContext, body: EmbeddingRequest, tenant: str) -> GenerationPlan:
    """See `ModelEndpoint.plan`."""
    caller = caller_of(context, body, tenant, "embd-")
    info, kind = context.client.info, body.request_class
    pooling = embedding_spec(info, body).pooling

    def plan() -> GenerationPlan:
        prompts = encode_prompts(context, body.input, "input")
        for prompt in prompts:
            check_prompt(prompt.token_ids, 0, info, "input")
        requests = tuple(
            caller.request(number, prompt.token_ids, NOTHING_SAMPLED, kind, pooling=pooling, final_only=True)
            for number, prompt in enumerate(prompts)
        )
        return GenerationPlan(caller.response_id, body.model, prompts, requests, kind)

    return await plan_by_length(context, body.input, plan)


def embedding_spec(info: EngineInfo, body: EmbeddingRequest) -> EmbeddingSpec:
    """Return the model's pooling. Raises InvalidRequestError if the model has none or `dimensions` is too large."""
    spec = info.embedding
    if spec is None or spec.pooling is None:
        why = "" if spec is None else f" ({spec.origin})"
        message = f"This model does not support embeddings{why}."
        raise InvalidRequestError(message, param="model", code="unsupported_parameter")
    if body.dimensions is not None and body.dimensions > spec.size:
        message = f"'dimensions' must be at most {spec.size}, the size of this model's vectors."
        raise InvalidRequestError(message, param="dimensions")
    return spec


class EmbeddingFormat:
    """Format of embeddings, in the order of the texts."""

    def __init__(self, body: EmbeddingRequest, plan: GenerationPlan, spec: EmbeddingSpec) -> None:
        self._plan = plan
        self._spec = spec
        self._size = body.dimensions or spec.size
        self._as_base64 = body.encoding_format == "base64"

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        """See WholeFormat.whole."""
        vectors = [self._vector(deltas[-1].embedding) for deltas in choices]
        used = {name: usage[name] for name in ("prompt_tokens", "total_tokens", "prompt_tokens_details")}
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
            ],
            "model": self._plan.model,
            "service_tier": self._plan.service_tier,
            "usage": used,
        }

    def _vector(self, raw: bytes) -> Any:
        """Return a vector for JSON, truncated to `dimensions` and then renormalized if the model normalizes."""
        vector = np.frombuffer(raw, dtype="<f4")[: self._size]
        if self._spec.normalizes:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        vector = np.ascontiguousarray(vector, dtype="<f4")
        if self._as_base64:
            return base64.b64encode(vector.tobytes()).decode()
        return orjson.Fragment(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))


EMBEDDINGS = ModelEndpoint(
    "/v1/embeddings", EmbeddingRequest, UNHONOURED, "create_embeddings", plan_embeddings,
    lambda context, body, plan, _: EmbeddingFormat(body, plan, embedding_spec(context.client.info, body)),
)  # fmt: skip
