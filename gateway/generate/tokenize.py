"""POST /tokenize and /detokenize, with the bodies and responses of vLLM. Nothing is queued."""

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequestError
from gateway.context import GatewayContext, context_of
from gateway.generate.answering import choose_model, read_body, run_text_work
from gateway.generate.completions import prompt_ids
from gateway.generate.validation import UNHONOURED, JsonPost, parse_json
from gateway.generate.wire import ChatCompletionRequest, ModelBody, TokenId

MAX_TOKENS = 2**20


class TokenizeRequest(ModelBody):
    """POST /tokenize of a prompt as in /v1/completions."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest):
    """POST /tokenize of messages as in /v1/chat/completions."""

    return_token_strs: bool | None = None


class DetokenizeRequest(ModelBody):
    """POST /detokenize."""

    tokens: list[TokenId] = Field(max_length=MAX_TOKENS, fail_fast=True)


TOKENIZE = JsonPost("/tokenize", TokenizeRequest, UNHONOURED)
TOKENIZE_CHAT = JsonPost("/tokenize", TokenizeChatRequest, UNHONOURED)
DETOKENIZE = JsonPost("/detokenize", DetokenizeRequest, UNHONOURED)


def _parse(raw: bytes | bytearray) -> TokenizeRequest | TokenizeChatRequest:
    fields = parse_json(raw)
    return TOKENIZE.check(fields) if "prompt" in fields else TOKENIZE_CHAT.check(fields)


async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt, or of messages in the chat template."""
    context = context_of(request)
    context.lifecycle.check_accepting()
    body = await read_body(request, _parse)
    if isinstance(body, TokenizeRequest):
        ids = await _encode(context, body)
    else:
        ids = await prompt_ids(context, body)
    names = [context.tokenizer.token_name(token_id) for token_id in ids] if body.return_token_strs else None
    length = context.client.info.max_model_len
    answer = {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": names}
    return Response(orjson.dumps(answer), media_type="application/json")


async def _encode(context: GatewayContext, body: TokenizeRequest) -> list[int]:
    choose_model(context, body)
    context.tokenizer.check_length((body.prompt,), context.client.info.max_model_len, "prompt")
    adds = body.add_special_tokens is not False
    return await run_text_work(context, lambda: context.tokenizer.encode(body.prompt, add_special_tokens=adds))


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, with special tokens."""
    context = context_of(request)
    context.lifecycle.check_accepting()
    body = await read_body(request, DETOKENIZE.parse)
    choose_model(context, body)
    if body.tokens and max(body.tokens) >= context.client.info.vocab_size:
        message = f"'tokens' contains an unknown id; this model has ids below {context.client.info.vocab_size}."
        raise InvalidRequestError(message, param="tokens")
    text = await run_text_work(context, lambda: context.tokenizer.decode(body.tokens, skip_special_tokens=False))
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")
