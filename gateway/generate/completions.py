"""POST /v1/completions, prompts as text or token ids, and POST /v1/chat/completions."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson

from engine.api import TokenLogprobs
from engine.errors import InvalidRequestError
from engine.text.detokenizer import detokenizer_for
from engine.text.tokenizer import Tokenizer
from gateway.context import GatewayContext
from gateway.generate.answer_form import check_stream_options, form_of, grammar_of, is_structured, read_form
from gateway.generate.answer_parser import OutputDelta
from gateway.generate.answering import (
    CHARS_PER_PROMPT,
    CHARS_PER_TOKEN,
    READ_INLINE,
    ModelEndpoint,
    caller_of,
    choose_model,
    run_text_work,
)
from gateway.generate.params import AnswerRules, Caller, GenerationPlan, TokenizedPrompt, chat_plan, completion_plan
from gateway.generate.tool_formats import Call
from gateway.generate.validation import UNHONOURED
from gateway.generate.wire import MAX_PROMPTS, ChatCompletionRequest, CompletionRequest
from gateway.http.errors import ApiError
from gateway.http.sse import DONE, END, event

_FLOOR = -9999.0  # OpenAI's value for "very unlikely"; JSON has no infinity
_PIECE = 64  # tokens encoded at a time


ScoredToken = tuple[int, TokenLogprobs | None]
"""A token with its log-probabilities; None for the first token of a prompt."""


class CompletionStream:
    """Base class; see AnswerFormat. `kind`: the `object` field of a chunk."""

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer, kind: str) -> None:
        self._plan, self._tokenizer = plan, tokenizer
        self._head: dict[str, Any] = {
            "id": plan.response_id,
            "object": kind,
            "created": int(time.time()),
            "model": plan.model,
            "service_tier": plan.service_tier,
        }
        self._start = b"data: " + orjson.dumps(self._head)[:-1]
        self._is_open = [False] * len(plan.requests)

    def _usage_part(self, usage: dict[str, Any] | None) -> bytes:
        if usage is not None:
            return b',"usage":' + orjson.dumps(usage)
        return b',"usage":null' if self._plan.stream_options.include_usage else b""

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._head["object"].removesuffix(".chunk"),
            "choices": [self._choice(index, deltas) for index, deltas in enumerate(choices)],
            "usage": usage,
        }

    def _choice(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        """Return choice `index` of a whole response."""
        raise NotImplementedError

    def opening(self) -> bytes:
        return b""

    def closing(self, usage: dict[str, Any]) -> bytes:
        if not self._plan.stream_options.include_usage:
            return DONE
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": usage}) + END + DONE

    def failure(self, error: ApiError, usage: dict[str, Any]) -> bytes:  # noqa: ARG002
        """Return the error event, without [DONE], so that clients do not mistake it for a normal end."""
        return event(error.envelope)


def chat_logprobs(tokenizer: Tokenizer, pairs: Sequence[tuple[int, TokenLogprobs]]) -> list[orjson.Fragment]:
    """Return the `content` list of a chat choice's `logprobs`. The `bytes` of all tokens concatenate to the text."""
    return _in_pieces(
        pairs,
        lambda token_id, logprobs: {
            **_chat_token(tokenizer, token_id, logprobs.logprob),
            "top_logprobs": [_chat_token(tokenizer, i, value) for i, value in logprobs.top],
        },
    )


def read_scores(token_ids: Sequence[int], scores: bytes) -> list[ScoredToken]:
    """Return the tokens of a prompt with the log-probabilities in `scores`, see `Pooling.SCORES`."""
    table = np.frombuffer(scores, dtype="<f4").reshape(len(token_ids), -1)
    best = table.shape[1] // 2
    found = [
        TokenLogprobs(row[0], tuple(zip(map(int, row[1 + best :]), row[1 : 1 + best], strict=True)))
        for row in table[1:].tolist()
    ]
    return list(zip(token_ids, [None, *found], strict=True))


def _in_pieces(pairs: Sequence[ScoredToken], entry: Callable[[int, Any], Any]) -> list[orjson.Fragment]:
    """Encode the entries of a JSON list in pieces, because encoding a long answer at once would hold the GIL for tenths
    of a second."""
    pieces = (pairs[start : start + _PIECE] for start in range(0, len(pairs), _PIECE))
    return [orjson.Fragment(orjson.dumps([entry(*pair) for pair in piece])[1:-1]) for piece in pieces]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {"token": piece.decode("utf-8", "replace"), "logprob": max(logprob, _FLOOR), "bytes": list(piece)}


class CompletionLogprobs:
    """Encoder of the `logprobs` objects of one completion choice. `text_offset` counts from the start of the text that
    is returned, which follows the tokens `context`."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer_for(tokenizer, context, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def add(self, pairs: Sequence[ScoredToken]) -> dict[str, Any]:
        """Return the object for the next tokens."""
        offsets = []
        for token_id, _ in pairs:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token_id,)))
        return {
            "tokens": [self._name(token_id) for token_id, _ in pairs],
            "token_logprobs": [None if found is None else max(found.logprob, _FLOOR) for _, found in pairs],
            "top_logprobs": _in_pieces(pairs, self._top),
            "text_offset": offsets,
        }

    def _top(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        """Return the top tokens and the chosen one by text; of tokens with the same text the likeliest is kept."""
        if logprobs is None:
            return None
        found: dict[str, float] = {}
        for other, value in (*logprobs.top, (token_id, logprobs.logprob)):
            found.setdefault(self._name(other), max(value, _FLOOR))
        return found

    def _name(self, token_id: int) -> str:
        """Return the text of a token, or `bytes:\\x..` for incomplete characters, as OpenAI does."""
        piece = self._tokenizer.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _check(body: CompletionRequest) -> None:
    """Check combinations of fields of a completion request. Raises InvalidRequestError."""
    check_stream_options(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("'best_of' is not supported.", param="best_of", code="unsupported_parameter")
    if len(body.prompt) * (body.n or 1) > MAX_PROMPTS:
        message = f"A request can have at most {MAX_PROMPTS} choices in total; send fewer prompts or lower 'n'."
        raise InvalidRequestError(message, param="n")


async def plan_completion(context: GatewayContext, body: CompletionRequest, tenant: str) -> GenerationPlan:
    """See `ModelEndpoint.plan`."""
    caller = caller_of(context, body, tenant, "cmpl-", body.cache_salt)
    _check(body)

    def plan() -> GenerationPlan:
        prompts = encode_prompts(context, body.prompt, "prompt", is_raw=body.add_special_tokens is False)
        return completion_plan(body, prompts, context.info, caller, AnswerRules(grammar=grammar_of(body)))

    return await plan_by_length(context, body.prompt, plan, is_fast=not is_structured(body))


async def plan_by_length(
    context: GatewayContext,
    prompts: Sequence[str | list[int]],
    plan: Callable[[], GenerationPlan],
    is_fast: bool = True,
) -> GenerationPlan:
    """Plan at once for few and short prompts, else in a thread. `is_fast`: the rest of the plan is fast. Raises the
    exceptions of `plan`."""
    sizes = (len(prompt) if isinstance(prompt, str) else CHARS_PER_TOKEN * len(prompt) for prompt in prompts)
    at_once = is_fast and CHARS_PER_PROMPT * len(prompts) + sum(sizes) <= READ_INLINE
    return plan() if at_once else await run_text_work(context, plan)


def encode_prompts(
    context: GatewayContext, prompts: Sequence[str | list[int]], param: str, is_raw: bool = False
) -> tuple[TokenizedPrompt, ...]:
    """Tokenize prompts; `is_raw`: without the tokens that the tokenizer adds. Raises ContextLengthError."""
    tokenizer = context.tokenizer
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer.check_length((prompt,), context.client.info.max_model_len, param)
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


PROMPT_END = 8  # last tokens of the prompt that are searched for the opening mark of reasoning


async def plan_chat(context: GatewayContext, body: ChatCompletionRequest, tenant: str) -> GenerationPlan:
    """See `ModelEndpoint.plan`."""
    caller = caller_of(context, body, tenant, "chatcmpl-", body.cache_salt)
    # also for short messages: the time of a chat template does not follow from their length
    return await run_text_work(context, lambda: read_chat(context, body, caller))


def read_chat(
    context: GatewayContext, body: ChatCompletionRequest, caller: Caller, clip: bool = False
) -> GenerationPlan:
    """Return the plan of a chat, which may be translated from another API. Slow. `clip`: see `chat_plan`."""
    tokenizer, info = context.tokenizer, context.info
    form = read_form(body, context.tool_format, context.thought_marks, tokenizer.chat_template_text)
    token_ids = form.encode(tokenizer, info.max_model_len)
    prompt_end = tokenizer.decode(token_ids[-PROMPT_END:], skip_special_tokens=False)
    rules = form.rules(prompt_end, tokenizer.atomic_tokens, form_of(body))
    return chat_plan(body, token_ids, info, caller, rules, clip)


async def prompt_ids(context: GatewayContext, body: ChatCompletionRequest) -> list[int]:
    """Return the prompt's token ids of a chat request. Raises the same exceptions as `plan_chat`."""
    choose_model(context, body)

    def encode() -> list[int]:
        tokenizer = context.tokenizer
        template = tokenizer.chat_template_text
        form = read_form(body, context.tool_format, context.thought_marks, template, generates=False)
        return form.encode(tokenizer, context.client.info.max_model_len)

    return await run_text_work(context, encode)


class ChatFormat(CompletionStream):
    """Format of chat completions. The constant parts of a chunk are encoded once per answer."""

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer) -> None:
        super().__init__(plan, tokenizer, "chat.completion.chunk")
        self._starts = [self._start + b',"choices":[{"index":%d,"delta":{' % i for i in range(plan.n)]
        # before the first token of each choice
        prompt_ids = orjson.dumps(list(plan.prompts[0].token_ids)) if plan.return_token_ids else b""
        extra = b',"prompt_token_ids":' + prompt_ids if prompt_ids else b""
        self._opening = [self._start + extra + start.removeprefix(self._start) for start in self._starts]
        self._num_calls = [0] * plan.n
        self._plain_end = b'},"logprobs":null,"finish_reason":null}]' + self._usage_part(None) + b"}" + END

    def chunk(self, delta: OutputDelta, usage: dict[str, Any] | None) -> bytes:
        """See AnswerFormat.chunk."""
        index = delta.index
        shows_text = delta.text or not (delta.reasoning or delta.calls)
        if self._is_open[index]:
            shows_text = delta.text or (shows_text and delta.finish_reason is None)
            start = self._starts[index] + (b'"content":' + orjson.dumps(delta.text) if shows_text else b"")
        else:
            self._is_open[index] = True
            content = orjson.dumps(delta.text) if shows_text else b"null"
            start = self._opening[index] + b'"role":"assistant","content":' + content
        if delta.reasoning or delta.calls:
            start = self._with_parts(start, delta)
        if delta.finish_reason is None and usage is None and not delta.token_ids and not delta.logprobs:
            return start + self._plain_end
        return start + self._end(delta, usage)

    def _with_parts(self, start: bytes, delta: OutputDelta) -> bytes:
        """Add reasoning and calls to the beginning of a chunk."""
        parts: dict[str, Any] = _reasoning(delta.reasoning)
        if delta.calls:
            first = self._num_calls[delta.index]
            self._num_calls[delta.index] += len(delta.calls)
            parts["tool_calls"] = [{"index": first + i, **_tool_call(call)} for i, call in enumerate(delta.calls)]
        return start + (b"" if start.endswith(b"{") else b",") + orjson.dumps(parts)[1:-1]

    def _end(self, delta: OutputDelta, usage: dict[str, Any] | None) -> bytes:
        parts = [b'},"logprobs":', orjson.dumps(self._logprobs([delta])), b',"finish_reason":']
        parts.append(orjson.dumps(delta.finish_reason))
        if self._plan.return_token_ids:
            parts += [b',"token_ids":', orjson.dumps(list(delta.token_ids))]
        return b"".join([*parts, b"}]", self._usage_part(usage), b"}", END])

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        """See AnswerFormat.whole."""
        answer = super().whole(choices, usage)
        if self._plan.return_token_ids:
            answer["prompt_token_ids"] = list(self._plan.prompts[0].token_ids)
        return answer

    def _choice(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        text = "".join([delta.text for delta in deltas])
        calls = [_tool_call(call) for delta in deltas for call in delta.calls]
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        message |= {"refusal": None, **_reasoning("".join([delta.reasoning for delta in deltas]))}
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(deltas),
            "finish_reason": deltas[-1].finish_reason,
        }
        if self._plan.return_token_ids:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice

    def _logprobs(self, deltas: list[OutputDelta]) -> dict[str, Any] | None:
        if self._plan.num_logprobs is None:
            return None
        pairs = [pair for delta in deltas for pair in delta.logprobs]
        return {"content": chat_logprobs(self._tokenizer, pairs), "refusal": None}


def _reasoning(text: str) -> dict[str, Any]:
    """Return reasoning under both names that clients use."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _tool_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


CHAT = ModelEndpoint(
    "/v1/chat/completions", ChatCompletionRequest, UNHONOURED, "create_chat_completion", plan_chat,
    lambda context, _, plan, __: ChatFormat(plan, context.tokenizer),
)  # fmt: skip
