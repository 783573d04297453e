"""POST /v1/embeddings: one vector per text, pooled from the model's last hidden states."""

import base64
import uuid
from typing import Any

import numpy as np
import orjson

from engine.api import EngineInfo, EngineRequest, Lane, RequestClass, SamplingParams
from engine.errors import InvalidRequestError
from engine.forms import EmbeddingSpec
from gateway.context import GatewayContext
from gateway.generate.answering import CHARS_PER_TOKEN, READ_INLINE, ModelEndpoint, check_room, choose_model
from gateway.generate.choices import OutputDelta
from gateway.generate.completions import encode_prompt
from gateway.generate.params import Caller, GenerationPlan, TokenizedPrompt, check_prompt, check_texts
from gateway.generate.threads import is_large, run_text_work
from gateway.generate.validation import UNHONOURED
from gateway.generate.wire import EmbeddingRequest, StreamOptions

NOTHING_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0)


async def plan_embeddings(context: GatewayContext, body: EmbeddingRequest, tenant: str) -> GenerationPlan:
    """See `ModelEndpoint.plan`."""
    adapter = choose_model(context, body).adapter
    spec = embedding_spec(context.client.info, body)
    lengths = [len(text) if isinstance(text, str) else CHARS_PER_TOKEN * len(text) for text in body.input]
    await check_room(context, body, sum(lengths), tenant)
    caller = Caller(f"embd-{uuid.uuid4().hex}", context.cache_salt(tenant), tenant, adapter)

    def plan() -> GenerationPlan:
        info = context.client.info
        for text in body.input:
            if isinstance(text, str):
                check_texts((text,), context.tokenizer, info, "input")
        prompts = tuple(encode_prompt(context.tokenizer, text) for text in body.input)
        for prompt in prompts:
            check_prompt(prompt.token_ids, 0, info, "input")
        return _plan(body, prompts, caller, spec)

    at_once = sum(lengths) <= READ_INLINE and not is_large(body)
    return plan() if at_once else await run_text_work(context, plan)


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


def _plan(
    body: EmbeddingRequest, prompts: tuple[TokenizedPrompt, ...], caller: Caller, spec: EmbeddingSpec
) -> GenerationPlan:
    request_class = RequestClass.OFFLINE if body.service_tier == "flex" else RequestClass.ONLINE
    requests = tuple(
        EngineRequest(
            f"{caller.response_id}-{index}",
            prompt.token_ids,
            NOTHING_SAMPLED,
            request_class,
            caller.cache_salt,
            final_only=True,
            tenant=caller.tenant,
            lane=Lane.FLEX,
            pooling=spec.pooling,
            adapter=caller.adapter,
        )
        for index, prompt in enumerate(prompts)
    )
    return GenerationPlan(
        response_id=caller.response_id,
        model=body.model,
        prompts=prompts,
        n=1,
        requests=requests,
        request_class=request_class,
        stop=(),
        min_tokens=0,
        num_logprobs=None,
        return_token_ids=False,
        stream=False,
        stream_options=StreamOptions(),
    )


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
