"""POST /v1/completions: prompts as text or token ids."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from engine.text.tokenizer import Tokenizer
from gateway.context import GatewayContext
from gateway.generate.answering import CHARS_PER_TOKEN, READ_INLINE, ModelEndpoint, caller_of, check_room
from gateway.generate.completion_format import CompletionLogprobs, CompletionStream, ScoredToken, read_scores
from gateway.generate.deltas import OutputDelta
from gateway.generate.params import (
    GenerationPlan,
    TokenizedPrompt,
    check_completion,
    check_texts,
    completion_plan,
)
from gateway.generate.structured import grammar_of, is_structured
from gateway.generate.threads import is_large, run_text_work
from gateway.generate.validation import UNHONOURED
from gateway.generate.wire import CompletionRequest, ModelBody
from gateway.http.sse import END


async def plan_completion(context: GatewayContext, body: CompletionRequest, tenant: str) -> GenerationPlan:
    """See `ModelEndpoint.plan`."""
    caller = caller_of(context, body, tenant, "cmpl-", body.cache_salt)
    check_completion(body)

    def plan() -> GenerationPlan:
        prompts = encode_prompts(context, body.prompt, "prompt", is_raw=body.add_special_tokens is False)
        return completion_plan(body, prompts, context.info, caller, grammar_of(body))

    return await plan_by_length(context, body, body.prompt, tenant, plan, is_fast=not is_structured(body))


async def plan_by_length(
    context: GatewayContext,
    body: ModelBody,
    prompts: Sequence[str | list[int]],
    tenant: str,
    plan: Callable[[], GenerationPlan],
    is_fast: bool = True,
) -> GenerationPlan:
    """Check the room for prompts, then plan: at once for short prompts in a small body, else in a thread. `is_fast`:
    the rest of the plan is fast. Raises the exceptions of `check_room` and `plan`."""
    num_chars = sum(len(prompt) if isinstance(prompt, str) else CHARS_PER_TOKEN * len(prompt) for prompt in prompts)
    await check_room(context, body, num_chars, tenant)
    at_once = is_fast and num_chars <= READ_INLINE and not is_large(body)
    return plan() if at_once else await run_text_work(context, plan)


def encode_prompts(
    context: GatewayContext, prompts: Sequence[str | list[int]], param: str, is_raw: bool = False
) -> tuple[TokenizedPrompt, ...]:
    """Tokenize prompts; `is_raw`: without the tokens that the tokenizer adds. Raises ContextLengthError."""
    tokenizer = context.tokenizer
    for prompt in prompts:
        if isinstance(prompt, str):
            check_texts((prompt,), tokenizer, context.client.info, param)
    return tuple(
        TokenizedPrompt(tuple(tokenizer.encode(prompt, add_special_tokens=not is_raw)), prompt)
        if isinstance(prompt, str)
        else TokenizedPrompt(tuple(prompt))
        for prompt in prompts
    )


class CompletionFormat(CompletionStream):
    """Format of text completions; choice i of prompt p has index p * n + i. With `echo` each choice starts with its
    prompt, and `logprobs` with the tokens of the prompt."""

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer, echo: bool) -> None:
        super().__init__(plan, tokenizer, "text_completion")
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + self._usage_part(None) + b"}" + END
        self._echoed = [_echo_text(tokenizer, prompt) if echo else "" for prompt in plan.prompts]
        self._echoes = echo
        self._logprobs: list[CompletionLogprobs] = []
        if plan.num_logprobs is not None:
            self._logprobs = [self._encoder(index) for index in range(len(plan.requests))]

    def _encoder(self, index: int) -> CompletionLogprobs:
        if not self._echoes:
            return CompletionLogprobs(self._tokenizer, self._prompt_ids(index))
        is_text = self._plan.prompts[index // self._plan.n].text is not None
        return CompletionLogprobs(self._tokenizer, (), skip_special_tokens=is_text)

    def chunk(self, delta: OutputDelta, usage: dict[str, Any] | None) -> bytes:
        """See AnswerFormat.chunk."""
        index = delta.index
        is_first, self._is_open[index] = not self._is_open[index], True
        text = self._echoed[index // self._plan.n] + delta.text if is_first else delta.text
        is_plain = not delta.token_ids and not delta.logprobs and not delta.embedding
        if delta.finish_reason is None and usage is None and is_plain:
            return b'%b,"choices":[{"index":%d,"text":%b%b' % (self._start, index, orjson.dumps(text), self._plain_end)
        choice = {"index": index, "text": text, **self._details(delta)}
        if self._plan.return_token_ids:
            choice["prompt_token_ids"] = self._prompt_ids(index) if is_first else None
        return b'%b,"choices":[%b]%b}%b' % (self._start, orjson.dumps(choice), self._usage_part(usage), END)

    def _details(self, delta: OutputDelta) -> dict[str, Any]:
        scored: list[ScoredToken] = list(delta.logprobs)
        if delta.embedding and self._echoes:
            scored = [*read_scores(self._prompt_ids(delta.index), delta.embedding), *scored]
        is_cut = delta.finish_reason is not None and self._plan.requests[0].pooling is not None
        details: dict[str, Any] = {
            "logprobs": self._logprobs[delta.index].add(scored) if self._logprobs else None,
            "finish_reason": "length" if is_cut else delta.finish_reason,
        }
        return {**details, "token_ids": list(delta.token_ids)} if self._plan.return_token_ids else details

    def _prompt_ids(self, index: int) -> list[int]:
        return list(self._plan.requests[index].prompt_token_ids)

    def _choice(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        joined = OutputDelta(
            index,
            self._echoed[index // self._plan.n] + "".join([delta.text for delta in deltas]),
            [token_id for delta in deltas for token_id in delta.token_ids],
            [pair for delta in deltas for pair in delta.logprobs],
            deltas[-1].finish_reason,
            embedding=deltas[0].embedding,
        )
        choice = {"index": index, "text": joined.text, **self._details(joined)}
        if self._plan.return_token_ids:
            choice["prompt_token_ids"] = self._prompt_ids(index)
        return choice


def _echo_text(tokenizer: Tokenizer, prompt: TokenizedPrompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


COMPLETIONS = ModelEndpoint(
    "/v1/completions", CompletionRequest, UNHONOURED, "create_completion", plan_completion,
    lambda context, body, plan, _: CompletionFormat(plan, context.tokenizer, bool(body.echo)),
)  # fmt: skip
