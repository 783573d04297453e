"""/v1/chat/completions on a real server, with the official client, around a scripted engine."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from batch_tools import client_of
from fake_engine import MODEL, Script, Served
from fixtures import StartServer
from support.http import send
from support.lazy import openai

from engine.api import EngineRequest, FinishReason, TokenLogprobs
from engine.errors import EngineUnavailableError, QueueFullError
from engine.stream import RequestStream
from engine.text.tokenizer import Tokenizer
from gateway.generate.choices import ChoiceState

HI: Any = [{"role": "user", "content": "hi"}]


async def chat(served: Served, **fields: Any) -> Any:
    async with client_of(served) as client:
        return await client.chat.completions.create(**{"model": MODEL, "messages": HI, **fields})


async def chunks_of(served: Served, **fields: Any) -> list[Any]:
    async with client_of(served) as client:
        stream = await client.chat.completions.create(**{"model": MODEL, "messages": HI, "stream": True, **fields})
        return [chunk async for chunk in stream]


async def post(served: Served, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps({"model": MODEL, "messages": HI, **body}).encode()
    return await send(served, "POST", path, content=content, headers={"content-type": "application/json"})


@pytest.fixture
async def served(start_server: StartServer) -> Served:
    return await start_server("hello wörld 🙂")


async def test_a_whole_answer(served: Served, tokenizer: Tokenizer) -> None:
    answer = await chat(served)
    size = len(tokenizer.encode("hello wörld 🙂")) + 1
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello wörld 🙂"
    assert answer.choices[0].finish_reason == "stop"
    prompt = served.engine.requests[0].prompt_token_ids
    assert list(prompt) == await asyncio.to_thread(tokenizer.encode_chat, HI)
    assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == size
    assert answer.usage.total_tokens == len(prompt) + size
    assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) // 2
    assert answer.service_tier == "default"


async def test_a_stream_has_one_chunk_per_token_and_the_role_in_the_first(served: Served, tokenizer: Tokenizer) -> None:
    chunks = await chunks_of(served)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == "hello wörld 🙂"
    # every token that ends a character has its chunk; the one that ends the answer has no text
    ids = tokenizer.encode("hello wörld 🙂")
    pieces = [tokenizer.token_bytes(i) for i in ids]
    whole = sum(1 for n in range(len(ids)) if _is_text(b"".join(pieces[: n + 1])))
    assert len(chunks) == whole + 1 and deltas[-1].content is None
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * whole + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


async def test_the_wire_format_of_a_stream(served: Served) -> None:
    answer = await post(served, {"stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    data = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert data[-1]["choices"] == [] and data[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in data[:-1])
    assert data[0]["choices"][0]["delta"] == {"role": "assistant", "content": "hello"}
    assert data[0]["choices"][0]["logprobs"] is None and data[0]["choices"][0]["finish_reason"] is None


async def test_usage_in_every_chunk(served: Served) -> None:
    """With it each token of a character of several tokens has a chunk, else only the last."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    shown = await chunks_of(served, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in shown]
    assert counts == [*range(1, len(counts)), len(counts) - 1] and not shown[-1].choices
    texts = [chunk.choices[0].delta.content or "" for chunk in shown[:-1]]
    assert "".join(texts) == "hello wörld 🙂" and "" in texts[:-1]
    plain = await chunks_of(served)
    assert "" not in [chunk.choices[0].delta.content for chunk in plain[:-1]] and len(plain) < len(texts)
    silent = await chunks_of(served, stream_options={"continuous_usage_stats": True})
    assert all(chunk.usage is None for chunk in silent), "without include_usage there is none"


async def test_length_ends_with_its_last_token(served: Served) -> None:
    answer = await chat(served, max_completion_tokens=1)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hello", "length")
    chunks = await chunks_of(served, max_tokens=2)
    assert [c.choices[0].delta.content for c in chunks] == ["hello", " w"]
    assert chunks[-1].choices[0].finish_reason == "length"
    cut = [(await chat(served, max_tokens=3)).choices[0].message.content]
    cut.append("".join(c.choices[0].delta.content or "" for c in await chunks_of(served, max_tokens=3)))
    assert cut == ["hello w\ufffd"] * 2, "the third token is the first byte of ö"


async def test_a_stop_token_alone_still_opens_the_message(start_server: StartServer) -> None:
    served = await start_server("")
    chunks = await chunks_of(served)
    assert len(chunks) == 1
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].finish_reason == "stop"
    answer = await chat(served)
    assert answer.choices[0].message.content == "" and answer.usage.completion_tokens == 1


async def test_default_length_is_the_rest_of_the_context(served: Served) -> None:
    await chat(served)
    request = served.engine.requests[0]
    assert request.sampling.max_tokens == served.engine.info.max_model_len - len(request.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_three_choices_with_seeds_of_their_own(
    start_server: StartServer, tokenizer: Tokenizer, stream: bool
) -> None:
    texts = ["one fox", "two dogs here", "a"]
    eos = tokenizer.eos_token_id
    assert eos is not None

    def script(request: EngineRequest) -> Script:
        return Script([*tokenizer.encode(texts[int(request.request_id[-1])]), eos])

    served = await start_server(script)
    if stream:
        found = dict.fromkeys(range(3), "")
        ends: dict[int, str] = {}
        for chunk in await chunks_of(served, n=3, seed=7, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                found[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    ends[choice.index] = choice.finish_reason
        usage = chunk.usage
        assert ends == dict.fromkeys(range(3), "stop")
    else:
        answer = await chat(served, n=3, seed=7)
        found = {choice.index: choice.message.content for choice in answer.choices}
        usage = answer.usage
    assert found == dict(enumerate(texts))
    assert usage.prompt_tokens == len(served.engine.requests[0].prompt_token_ids)
    assert usage.completion_tokens == sum(len(tokenizer.encode(text)) + 1 for text in texts)
    assert {r.prompt_token_ids for r in served.engine.requests} == {served.engine.requests[0].prompt_token_ids}


async def test_unseeded_requests_draw_different_seeds(served: Served) -> None:
    await chat(served, n=4)
    assert len({request.sampling.seed for request in served.engine.requests}) == 4


async def test_random_numbers_depend_on_seed_prompt_and_choice_alone(served: Served) -> None:
    """One seed over many prompts is no single draw, and choices of near seeds do not overlap."""
    texts, seeds = ("a", "b"), (-(2**63), -1, 0, 1, 2**63 - 1)
    bodies = [(text, seed, n) for text in texts for seed in seeds for n in (3, 1)]
    for text, seed, n in bodies:
        await chat(served, messages=[{"role": "user", "content": text}], seed=seed, n=n)
    found = iter([request.sampling.seed for request in served.engine.requests])
    drawn = [[next(found) for _ in range(n)] for _, _, n in bodies]
    three, alone = drawn[::2], drawn[1::2]
    assert [each[:1] for each in three] == alone, "choice 0 of n is that of a request alone"
    assert len({seed for each in three for seed in each}) == 3 * len(texts) * len(seeds)


async def test_sampling_fields_reach_the_engine(served: Served) -> None:
    await chat(
        served,
        temperature=0.3,
        top_p=0.8,
        presence_penalty=1.5,
        frequency_penalty=-1,
        logit_bias={"5": -100, "7": 2.5},
        seed=-3,
        max_tokens=9,
        user="u",
        metadata={"k": "v"},
        store=True,
        extra_body={"top_k": 11, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9]},
    )
    sampling = served.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.8, 11, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.5, -1, 1.1)
    assert dict(sampling.logit_bias) == {5: -100, 7: 2.5}
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (9, 2, None)
    assert sampling.stop_token_ids == served.engine.info.eos_token_ids | {9}


async def test_ignoring_the_end_of_sequence(served: Served) -> None:
    answer = await chat(served, max_tokens=30, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 30
    assert served.engine.requests[0].sampling.stop_token_ids == frozenset()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("burst", [1, 2, 50])
async def test_a_stop_string_across_tokens_ends_the_request(
    start_server: StartServer, tokenizer: Tokenizer, stream: bool, burst: int
) -> None:
    """The request is aborted, surplus tokens are dropped, and usage ends with the token that completed the string."""
    text = "the quick brown fox jumps over the lazy dog"
    served = await start_server(text, burst=burst)
    if stream:
        chunks = await chunks_of(served, stop=["n/a", "own fo"], stream_options={"include_usage": True})
        found = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        answer = await chat(served, stop=["n/a", "own fo"])
        found, reason, usage = answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage
    assert (found, reason) == ("the quick br", "stop")
    ids = tokenizer.encode(text)
    needed = next(n for n in range(len(ids)) if "own fo" in tokenizer.decode(ids[:n]))
    assert usage.completion_tokens == needed
    if burst < 50:
        assert served.engine.aborts == [(served.engine.requests[0].request_id, FinishReason.STOP)]
    assert served.engine.num_open == 0


async def test_what_could_have_been_a_stop_string_is_shown_in_the_end(start_server: StartServer) -> None:
    served = await start_server("hello stop")
    chunks = await chunks_of(served, stop="stop now")
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello stop"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_logprobs_spell_the_text(served: Served, tokenizer: Tokenizer) -> None:
    answer = await chat(served, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "hello wörld 🙂"
    assert entries[0].token == "hello" and entries[0].logprob == -0.5
    assert entries[0].top_logprobs[0].token == "hello" and entries[0].top_logprobs[1].logprob == -9999.0
    streamed = [
        entry
        for chunk in await chunks_of(served, logprobs=True, top_logprobs=2)
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]
    assert served.engine.requests[0].sampling.logprobs == 2


async def test_logprobs_of_tokens_before_a_stop_string_only(start_server: StartServer, tokenizer: Tokenizer) -> None:
    def logprobs(token: int, _: int) -> TokenLogprobs:
        return TokenLogprobs(-float(token), ())

    eos = tokenizer.eos_token_id
    assert eos is not None
    ids = tokenizer.encode("hello there, stop here")
    served = await start_server(lambda _: Script([*ids, eos], burst=3, logprobs=logprobs))
    answer = await chat(served, logprobs=True, stop=[", stop"])
    entries = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content == "hello there"
    assert b"".join(bytes(entry.bytes) for entry in entries).startswith(b"hello there")
    assert [entry.logprob for entry in entries] == [-float(token) for token in ids[: len(entries)]]
    assert all(entry.top_logprobs == [] for entry in entries)


async def test_token_ids_in_the_answer(served: Served, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hello wörld 🙂"), tokenizer.eos_token_id]
    answer = (await post(served, {"return_token_ids": True})).json()
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == await asyncio.to_thread(tokenizer.encode_chat, HI)
    chunks = await chunks_of(served, extra_body={"return_token_ids": True})
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == ids
    assert [hasattr(chunk, "prompt_token_ids") for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


async def test_roles_parts_and_control_tokens(served: Served, tokenizer: Tokenizer) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "<|im_end|>"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]  # fmt: skip
    await chat(served, messages=messages)
    prompt = served.engine.requests[0].prompt_token_ids
    assert tokenizer.decode(prompt, skip_special_tokens=False).startswith("<|im_start|>system\nbe brief")
    assert prompt.count(tokenizer.eos_token_id) == len(messages)


# --- errors before a token


async def test_a_full_queue_is_429_with_retry_after(served: Served) -> None:
    for fields in ({}, {"stream": True}):
        served.engine.add_errors = [QueueFullError("12 requests are waiting already.", retry_after=2.2)]
        answer = await post(served, fields)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)


async def test_the_official_client_retries_as_told(served: Served) -> None:
    served.engine.add_errors = [EngineUnavailableError("busy", retry_after=0.1)]
    async with client_of(served).with_options(max_retries=1) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].finish_reason == "stop" and not served.engine.add_errors


async def test_choices_are_queued_together_or_not_at_all(served: Served) -> None:
    served.engine.script = lambda _: Script([5], hold_after=0)
    add, calls = served.engine.add, 0

    def third_fails(request: EngineRequest) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise QueueFullError("full")
        return add(request)

    served.engine.add = third_fails  # type: ignore[method-assign]
    assert (await post(served, {"n": 4})).status_code == 429
    assert calls == 3 and served.engine.num_open == 0
    assert [reason for _, reason in served.engine.aborts] == [FinishReason.ABORT] * 2


async def test_an_engine_that_is_down_is_503(served: Served) -> None:
    served.engine.dead = True
    for answer in (await post(served, {}), await post(served, {"stream": True})):
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["type"] == "server_error"


# --- errors in mid-answer


async def test_an_error_in_mid_stream_is_an_event_and_no_done(start_server: StartServer) -> None:
    served = await start_server("hello world", fail_after=2)
    answer = await post(served, {"stream": True})
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert answer.status_code == 200 and "[DONE]" not in answer.text
    assert json.loads(events[-1])["error"]["code"] == "engine_error"
    assert len(events) == 3
    with pytest.raises(openai.APIError, match="model step failed"):
        await chunks_of(served)
    whole = await post(served, {})
    assert whole.status_code == 500 and whole.json()["error"]["message"].startswith("The model step failed")


async def test_one_failing_choice_ends_the_others(start_server: StartServer, tokenizer: Tokenizer) -> None:
    def script(request: EngineRequest) -> Script:
        ids = tokenizer.encode("hello world")
        return Script(ids, fail_after=1) if request.request_id.endswith("-1") else Script(ids, hold_after=1)

    served = await start_server(script)
    assert (await post(served, {"n": 2, "seed": 0})).status_code == 500
    await served.engine.wait(lambda: served.engine.num_open == 0)
    assert [reason for _, reason in served.engine.aborts] == [FinishReason.ABORT]


async def test_a_request_that_the_engine_ended_itself(start_server: StartServer) -> None:
    served = await start_server("hello world", hold_after=1)
    waiting = asyncio.ensure_future(post(served, {}))
    await served.engine.wait_for_event("token")
    served.engine.abort(served.engine.requests[0].request_id)
    assert (await waiting).status_code == 503


async def test_a_bug_is_a_500_that_says_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret prompt")

    monkeypatch.setattr("gateway.generate.completions.read_form", broken)
    answer = await post(served, {})
    assert answer.status_code == 500 and "x-request-id" in answer.headers
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text and "secret" not in caplog.text and "RuntimeError" in caplog.text


# --- clients that leave


async def leave(served: Served, body: dict[str, Any], kind: str, count: int = 1) -> None:
    """Send a request and go away once the engine has seen `kind`."""
    content = json.dumps({"model": MODEL, "messages": HI, **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(content), content))
    await served.engine.wait_for_event(kind, count)
    if body.get("stream") and kind == "token":
        await reader.readuntil(b"data: ")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("hold_after", [0, 2])
@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"n": 3}, {"n": 3, "stream": True}])
async def test_a_client_that_leaves_ends_its_requests(
    start_server: StartServer, fields: dict[str, Any], hold_after: int
) -> None:
    """Before the first token and in mid-answer, streamed or not: no answer goes on without its client."""
    served = await start_server("hello world again", hold_after=hold_after)
    n = fields.get("n", 1)
    await leave(served, fields, "token" if hold_after else "add", n)
    await served.engine.wait_for_event("abort", n)
    await served.engine.wait(lambda: served.engine.num_open == 0)
    assert [reason for _, reason in served.engine.aborts] == [FinishReason.ABORT] * n
    served.engine.release()
    assert (await chat(served)).choices[0].finish_reason == "stop"


async def test_plain_tokens_are_written_directly_as_the_reader_would(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first outputs, before the reader waits, and the last go through it; stop strings need it for each."""
    served = await start_server("hello world, hello world, hello again 🙂")
    through_reader: list[int] = []
    advance = ChoiceState.advance
    monkeypatch.setattr(
        ChoiceState, "advance", lambda self, output: through_reader.append(1) or advance(self, output)
    )  # fmt: skip

    async def texts(**fields: Any) -> list[tuple[Any, ...]]:
        through_reader.clear()
        chunks = await chunks_of(served, stream_options={"include_usage": True}, **fields)
        usage = [chunk.usage and chunk.usage.completion_tokens for chunk in chunks]
        deltas = [[(each.delta.role, each.delta.content, each.finish_reason) for each in c.choices] for c in chunks]
        return [(deltas, usage)]

    direct = await texts()
    assert len(through_reader) <= 2
    assert await texts(stop=["☃"]) == direct and len(through_reader) > 8
    monkeypatch.setattr(RequestStream, "send_directly", lambda *_: None)
    assert await texts() == direct and len(through_reader) > 8
