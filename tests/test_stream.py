"""The outputs of one request between the engine loop and its reader."""

import asyncio
from typing import Any

from driver import make_request

from engine.api import FinishReason, RequestClass, RequestOutput, RequestTimes
from engine.errors import EngineStepError, ErrorInfo
from engine.stream import RequestStream


def output(*tokens: int, **changes: Any) -> RequestOutput:
    return RequestOutput("r", tokens, None, RequestTimes(0.0), 3, 0, len(tokens))._replace(**changes)


def stream_of(request_class: RequestClass) -> RequestStream:
    return RequestStream.of(make_request("r", [0, 1, 2], 9, request_class=request_class), lambda: None)


async def test_offline_tokens_that_came_meanwhile_are_read_as_one() -> None:
    stream = stream_of(RequestClass.OFFLINE)
    stream.push(output(1))
    assert (await anext(stream)).token_ids == (1,), "nothing came before the first: it is read at once"
    stream.push(output(2))
    read = asyncio.ensure_future(anext(stream))
    stream.push(output(3))
    await asyncio.sleep(0)
    stream.push(output(4, finish_reason=FinishReason.LENGTH))
    last = await read
    assert last.token_ids == (2, 3, 4) and last.finish_reason is FinishReason.LENGTH
    assert [each async for each in stream] == []


async def test_online_tokens_are_read_one_by_one() -> None:
    stream = stream_of(RequestClass.ONLINE)
    for token in (1, 2, 3):
        stream.push(output(token))
    assert [(await anext(stream)).token_ids for _ in range(3)] == [(1,), (2,), (3,)]


async def test_tokens_before_an_error_are_read_before_it() -> None:
    stream = stream_of(RequestClass.OFFLINE)
    stream.push(output(1))
    stream.push(output(2))
    stream.push(output(finish_reason=FinishReason.ERROR, error=ErrorInfo.of(EngineStepError("broken"))))
    read = [each async for each in stream]
    assert [each.token_ids for each in read] == [(1, 2), ()]
    assert read[0].error is None and read[1].error is not None
