"""Conversion of validated bodies to engine requests, and the promise to a request.

The promise follows from headers, body and API key and the classes of `--slo`.

The class is the first of: `tidemill.class` in the body, the header of llm-d's gateway that names an objective, the
service tiers `priority` and `scale` (class `premium`), the first class of the key. Limits are those of the class, or
those that the request states: headers as llm-d sends them, or the body. With an API key no limit is tighter than the
bound on the key's line or, without one, the limit of the class. A server without keys refuses limits below a part of
the class's; requests with tighter limits than their class are served by them and judged by those of the class.
"""

import dataclasses
import functools
import math
import secrets
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from engine.api import EngineRequest, Lane, RequestClass, SamplingParams
from engine.client import EngineInfo
from engine.errors import ContextLengthError, InvalidRequestError
from engine.forms import Grammar, Pooling, ThinkingBudget
from gateway.generate.answer_parser import Parsing
from gateway.generate.wire import ChatCompletionRequest, CompletionRequest, GenerationBody, ModelBody, StreamOptions
from gateway.http.errors import ApiError
from gateway.http.keys import Key
from predictor.budget import DEFAULT_CLASS, Promise
from predictor.slo import SLO

CLASS_HEADER = "x-gateway-inference-objective"
LIMITS = {
    "ttft": ("x-slo-ttft-ms", "ttft_ms"),
    "tbt": ("x-slo-tpot-ms", "tpot_ms"),
    "e2e": ("x-slo-e2e-ms", "e2e_ms"),
}
"""Header and body field of each limit, in milliseconds."""
PREMIUM = "premium"
PREMIUM_TIERS = ("priority", "scale")


def promise_of(headers: Mapping[str, str], body: ModelBody, key: Key | None, slo: SLO) -> Promise | None:
    """Return the promise to a request, or None if it is the one that the engine keeps by default.

    `key`: None if the server requires no keys. Raises InvalidRequestError for an unknown class or an invalid limit, and
    ApiError 403 for a class that the key does not have.
    """
    known = _promises(slo)
    usual = known[_class_of(headers, body, key, known)]
    ttft, tbt, e2e = (_limit(metric, headers, body, key, usual.limit(metric)) for metric in LIMITS)
    is_tighter = ttft < usual.ttft or tbt < usual.tbt or e2e < usual.e2e
    promise = Promise(usual.service, ttft, tbt, e2e, is_stated=key is None and is_tighter)
    return None if promise == known[DEFAULT_CLASS] and math.isinf(promise.e2e) else promise


LEAST_SECONDS = 1e-3
TIGHTEST = 10
"""Least limit that a request may state: absolute, and the class's divided by this. No model computes a token in less
time, and every step beside a request that is always late would have no room for offline work."""


@functools.lru_cache(maxsize=8)
def _promises(slo: SLO) -> dict[str, Promise]:
    """Return the promise of every class."""
    return {name: slo.promise(name) for name, _ in slo.by_class}


def _class_of(headers: Mapping[str, str], body: ModelBody, key: Key | None, known: Collection[str]) -> str:
    allowed = list(known) if key is None else [name for name in key.classes or (DEFAULT_CLASS,) if name in known]
    asked = body.tidemill.class_ if body.tidemill is not None else None
    if asked is not None:
        if asked not in known:
            raise InvalidRequestError(f"'tidemill.class' must be one of {', '.join(known)}.", param="tidemill.class")
        if asked not in allowed:
            message = f"This key may not use the class '{asked}'; it has {', '.join(allowed)}."
            raise ApiError(403, message, param="tidemill.class", code="class_forbidden")
        return asked
    named = headers.get(CLASS_HEADER)
    if named in allowed:
        return named
    if body.service_tier in PREMIUM_TIERS and PREMIUM in allowed:
        return PREMIUM
    return allowed[0] if key is not None and allowed else DEFAULT_CLASS


def _limit(metric: str, headers: Mapping[str, str], body: ModelBody, key: Key | None, usual: float) -> float:
    """Return a limit in seconds. `usual`: that of the class."""
    header, name = LIMITS[metric]
    stated = _milliseconds(header, headers[header]) if header in headers else None
    if stated is None and body.tidemill is not None:
        stated = getattr(body.tidemill, name)
    wanted = usual if stated is None else stated / 1e3
    if key is not None:
        return max(wanted, dict(key.bounds).get(metric, usual))
    least = max(LEAST_SECONDS, usual / TIGHTEST if usual < math.inf else 0.0)
    if wanted < least:
        param = header if header in headers else f"tidemill.{name}"
        raise InvalidRequestError(f"'{param}' must be at least {least * 1e3:g} on this server.", param=param)
    return wanted


def _milliseconds(header: str, text: str) -> float | None:
    """Return the value of a header; None for 0, which states no limit."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise InvalidRequestError(f"'{header}' must be a number of milliseconds.", param=header)
    return value or None


COMPLETION_MAX_TOKENS = 16
LEAST_TOP_P = 1e-6
"""Value for `top_p` 0, with which only the most likely token remains."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token ids, and the source text if the prompt was sent as text."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The engine requests of one HTTP request, with the settings for its response. Independent of the API."""

    response_id: str
    model: str
    prompts: tuple[TokenizedPrompt, ...]
    requests: tuple[EngineRequest, ...]
    """`requests[p * n + i]` is choice i of prompt p."""
    request_class: RequestClass
    n: int = 1
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    num_logprobs: int | None = None
    """See SamplingParams.logprobs."""
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    parsing: Parsing | None = None
    """Parser settings; None: the answers are plain text."""
    continues: bool = False
    """The answer continues the text of the prompt."""
    include_stop: bool = False
    """The text of the answer includes its stop string."""
    skip_special_tokens: bool = True
    scoring: tuple[EngineRequest, ...] = ()
    """Requests for the log-probabilities of the prompts' tokens, one per prompt, which precede the answers."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Client's names of the fields of a translated request, see `translation`."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens: all prompts and their maximum outputs."""
        requests = (*self.requests, *self.scoring)
        return sum(len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests)

    tier: str = "default"
    """Service tier of an online request in the response."""

    @property
    def service_tier(self) -> str:
        """The service tier in the response."""
        return "flex" if self.request_class is RequestClass.OFFLINE else self.tier

    def promised(self, promise: Promise | None, tier: str | None) -> "GenerationPlan":
        """Return the plan with a promise to its requests. `tier`: service tier that the request asked for."""
        if promise is None:
            return self
        granted = tier if tier in PREMIUM_TIERS and promise.service == PREMIUM else self.tier
        requests, scoring = (
            tuple(dataclasses.replace(request, promise=promise) for request in group)
            for group in (self.requests, self.scoring)
        )
        return dataclasses.replace(self, requests=requests, scoring=scoring, tier=granted)


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity of a request."""

    response_id: str
    cache_salt: bytes
    """Separates the prefix caches of tenants."""
    tenant: str = ""
    adapter: int = 0
    """Number of the LoRA adapter."""

    def request(
        self,
        number: int,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        request_class: RequestClass,
        *,
        pooling: Pooling | None = None,
        final_only: bool = False,
    ) -> EngineRequest:
        """Return the engine request `number` of this request. Batch lines get their lane later."""
        return EngineRequest(
            f"{self.response_id}-{number}",
            prompt_ids,
            sampling,
            request_class,
            self.cache_salt,
            final_only=final_only,
            tenant=self.tenant,
            lane=Lane.FLEX,
            pooling=pooling,
            adapter=self.adapter,
        )


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """Rules of an answer."""

    parsing: Parsing | None = None
    """Parser settings; None: the answers are plain text."""
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None


def chat_plan(
    body: ChatCompletionRequest,
    token_ids: Sequence[int],
    info: EngineInfo,
    caller: Caller,
    rules: AnswerRules,
    clip: bool,
) -> GenerationPlan:
    """Plan one prompt. The default maximum length of the answer is the rest of the context. `clip`: reduce a larger
    `max_tokens` to the rest of the context instead of raising."""
    prompt = TokenizedPrompt(tuple(token_ids))
    room = info.max_model_len - len(prompt.token_ids)
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, room)
    if clip:
        max_tokens = min(max_tokens, max(1, room))
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    plan = _plan(body, (prompt,), (max_tokens,), num_logprobs, info, caller, "messages", rules)
    return dataclasses.replace(plan, continues=bool(body.continue_final_message))


def completion_plan(
    body: CompletionRequest, prompts: Sequence[TokenizedPrompt], info: EngineInfo, caller: Caller, rules: AnswerRules
) -> GenerationPlan:
    """Plan several prompts. The default maximum length is OpenAI's, but at most the rest of the context."""
    rooms = [max(1, info.max_model_len - len(prompt.token_ids)) for prompt in prompts]
    lengths = [min(COMPLETION_MAX_TOKENS, room) if body.max_tokens is None else body.max_tokens for room in rooms]
    plan = _plan(body, tuple(prompts), tuple(lengths), body.logprobs, info, caller, "prompt", rules)
    generates, shows_scores = body.max_tokens != 0, body.echo and body.logprobs is not None
    if not (info.scores_prompts or (generates and not shows_scores)):
        param = "echo" if shows_scores else "max_tokens"
        message = f"'{param}': log-probabilities of prompts need the own layers (--model-impl)."
        raise InvalidRequestError(message, param=param, code="unsupported_parameter")
    scoring: tuple[EngineRequest, ...] = ()
    if generates and shows_scores:
        firsts = plan.requests[:: plan.n]
        scoring = tuple(
            dataclasses.replace(request, request_id=f"{request.request_id}-scores", pooling=Pooling.SCORES)
            for request in firsts
        )
    return dataclasses.replace(plan, continues=True, scoring=scoring)


def _plan(
    body: GenerationBody,
    prompts: tuple[TokenizedPrompt, ...],
    max_tokens: tuple[int, ...],
    num_logprobs: int | None,
    info: EngineInfo,
    caller: Caller,
    param: str,
    rules: AnswerRules,
) -> GenerationPlan:
    n, stop = body.n or 1, tuple(body.stop or ())
    request_class = body.request_class
    # a background answer needs no intermediate outputs, unless stop strings must be checked
    final_only = request_class is RequestClass.OFFLINE and not body.stream and not stop
    grammar = rules.grammar and dataclasses.replace(rules.grammar, tenant=caller.tenant)
    fields = {**_sampling_fields(body, num_logprobs, info), "grammar": grammar, "thinking": rules.thinking}
    requests: list[EngineRequest] = []
    for prompt, length in zip(prompts, max_tokens, strict=True):
        check_prompt(prompt.token_ids, length, info, param)
        for seed in _seeds(body.seed, prompt.token_ids, n):
            sampling = SamplingParams(max_tokens=max(1, length), seed=seed, **fields)
            request = caller.request(len(requests), prompt.token_ids, sampling, request_class, final_only=final_only)
            requests.append(request if length else dataclasses.replace(request, pooling=Pooling.SCORES))
    return GenerationPlan(
        response_id=caller.response_id,
        model=body.model,
        prompts=prompts,
        n=n,
        requests=tuple(requests),
        request_class=request_class,
        stop=stop,
        min_tokens=body.min_tokens or 0,
        num_logprobs=num_logprobs,
        return_token_ids=bool(body.return_token_ids),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        stream=bool(body.stream),
        stream_options=body.stream_options or StreamOptions(),
        parsing=rules.parsing,
    )


def _seeds(seed: int | None, token_ids: Sequence[int], n: int) -> list[int]:
    """Return the engine's seeds of `n` choices: without a seed random, else a digest of seed, prompt and choice.

    One seed in all lines of a batch therefore gives independent random numbers, and choices do not overlap.
    """
    if seed is None:
        return [secrets.randbits(63) for _ in range(n)]
    start = blake2b(array("q", [seed, *token_ids]).tobytes(), digest_size=8, person=b"seed")
    seeds = []
    for choice in range(n):
        each = start.copy()
        each.update(choice.to_bytes(8, "little"))
        seeds.append(int.from_bytes(each.digest(), "little", signed=True))
    return seeds


def _sampling_fields(body: GenerationBody, num_logprobs: int | None, info: EngineInfo) -> dict[str, Any]:
    stop_ids = frozenset(body.stop_token_ids or ())
    _check_ids(stop_ids, info, "stop_token_ids")
    given = {
        name: value
        for name in (
            "min_tokens",
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )
        if (value := getattr(body, name)) is not None
    }
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)  # -1 means off in vLLM
    if body.top_p == 0:
        given["top_p"] = LEAST_TOP_P
    defaults = {name: value for name, value in info.sampling._asdict().items() if value is not None}
    return {
        **defaults,
        **given,
        "logit_bias": _logit_bias(body.logit_bias or {}, info),
        "logprobs": num_logprobs,
        "stop_token_ids": stop_ids if body.ignore_eos else stop_ids | info.eos_token_ids,
    }


def _logit_bias(bias: Mapping[str, float], info: EngineInfo) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError("The keys of 'logit_bias' must be token ids.", param="logit_bias")
        pairs[int(key)] = value
    _check_ids(pairs, info, "logit_bias")
    return tuple(pairs.items())


def _check_ids(ids: Collection[int], info: EngineInfo, param: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < info.vocab_size:
        message = f"'{param}' contains an unknown token id; this model has ids from 0 to {info.vocab_size - 1}."
        raise InvalidRequestError(message, param=param)


def check_prompt(token_ids: Sequence[int], max_tokens: int, info: EngineInfo, param: str) -> None:
    """Raise InvalidRequestError for an empty prompt or unknown token ids, and ContextLengthError for a long prompt."""
    if not token_ids:
        raise InvalidRequestError("The prompt is empty.", param=param)
    if len(token_ids) + max_tokens > info.max_model_len:
        raise ContextLengthError(
            f"This model's context is {info.max_model_len} tokens; the prompt has {len(token_ids)} tokens and "
            f"{max_tokens} output tokens are requested.",
            param=param,
        )
    _check_ids(token_ids, info, param)
