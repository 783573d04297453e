"""POST /v1/chat/completions."""

import dataclasses
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from engine.text.tokenizer import Tokenizer
from gateway.context import GatewayContext
from gateway.generate.answer_form import AnswerForm, form_of, read_form
from gateway.generate.answer_parser import OutputDelta
from gateway.generate.answering import ModelEndpoint, caller_of, choose_model, run_by_size, run_text_work
from gateway.generate.completions import CompletionStream, chat_logprobs
from gateway.generate.params import GenerationPlan, chat_plan, check_texts
from gateway.generate.tool_decoders import Call
from gateway.generate.validation import UNHONOURED
from gateway.generate.wire import ChatCompletionRequest
from gateway.http.sse import END

PROMPT_END = 8  # last tokens of the prompt that are searched for the opening mark of reasoning


async def plan_chat(
    context: GatewayContext, body: ChatCompletionRequest, tenant: str, prefix: str = "chatcmpl-", clip: bool = False
) -> GenerationPlan:
    """See `ModelEndpoint.plan`. Also used for requests translated from other APIs. `prefix`: prefix of the response id;
    `clip`: see `chat_plan`."""
    caller, info = caller_of(context, body, tenant, prefix, body.cache_salt), context.info
    form = await run_by_size(context, body, _reader(context, body))

    def plan() -> GenerationPlan:
        tokenizer = context.tokenizer
        token_ids = _encode(context, form)
        prompt_end = tokenizer.decode(token_ids[-PROMPT_END:], skip_special_tokens=False)
        rules = form.rules(prompt_end, tokenizer.atomic_tokens, form_of(body))
        plan = chat_plan(body, token_ids, info, caller, rules.grammar, rules.thinking, clip)
        return dataclasses.replace(plan, parsing=rules.parsing, continues=form.continues)

    # always in a thread: the time of a chat template does not follow from the length of the messages
    return await run_text_work(context, plan)


async def prompt_ids(context: GatewayContext, body: ChatCompletionRequest) -> list[int]:
    """Return the prompt's token ids of a chat request. Raises the same exceptions as `plan_chat`."""
    choose_model(context, body)
    read = _reader(context, body, generates=False)
    return await run_text_work(context, lambda: _encode(context, read()))


def _reader(
    context: GatewayContext, body: ChatCompletionRequest, *, generates: bool = True
) -> Callable[[], AnswerForm]:
    template = context.tokenizer.chat_template_text
    return partial(read_form, body, context.tool_format, context.thought_marks, template, generates=generates)


def _encode(context: GatewayContext, form: AnswerForm) -> list[int]:
    """Return the token ids of the prompt. Slow."""
    check_texts(form.texts, context.tokenizer, context.client.info, "messages")
    return context.tokenizer.encode_chat(form.messages, tools=form.tools, **form.options)


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
