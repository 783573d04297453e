"""The outputs of one request between the engine loop and its reader."""

import asyncio
from itertools import pairwise
from typing import Any

from driver import make_request

from engine.api import FinishReason, RequestClass, RequestOutput, RequestTimes
from engine.errors import EngineStepError, ErrorInfo
from engine.stream import RequestStream
from engine.turns import EACH_ROUND, Turns


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


async def test_tokens_before_an_error_are_read_before_it() -> None:
    stream = stream_of(RequestClass.OFFLINE)
    stream.push(output(1))
    stream.push(output(2))
    stream.push(output(finish_reason=FinishReason.ERROR, error=ErrorInfo.of(EngineStepError("broken"))))
    read = [each async for each in stream]
    assert [each.token_ids for each in read] == [(1, 2), ()]
    assert read[0].error is None and read[1].error is not None


async def test_offline_answers_go_on_a_few_in_each_round_of_the_loop_and_online_ones_at_once() -> None:
    streams = [stream_of(RequestClass.OFFLINE) for _ in range(40)]
    chat = stream_of(RequestClass.ONLINE)
    order: list[int] = []

    async def read(number: int, stream: RequestStream) -> None:
        await anext(stream)
        order.append(number)

    readers = [asyncio.ensure_future(read(i, stream)) for i, stream in enumerate(streams)]
    await asyncio.sleep(0)
    for stream in streams:
        stream.push(output(1))
    await asyncio.sleep(0)
    in_a_round = []
    while len(order) < 20:
        before = len(order)
        await asyncio.sleep(0)
        in_a_round.append(len(order) - before)
    assert max(in_a_round) <= EACH_ROUND
    online = asyncio.ensure_future(read(-1, chat))
    chat.push(output(1))
    await online
    assert order.index(-1) <= 20 + 3 * EACH_ROUND, "a chat's token waits for two rounds at most"
    readers[-1].cancel()
    await asyncio.wait(readers)
    assert [i for i in order if i >= 0] == list(range(39)), "first come, first served; one that left is passed over"


async def test_turns_are_of_a_round_and_nothing_runs_when_nobody_asks() -> None:
    turns = Turns(each=3)
    done: list[int] = []

    async def go(number: int) -> None:
        await turns.take()
        done.append(number)

    tasks = [asyncio.ensure_future(go(i)) for i in range(7)]
    counts = []
    while len(done) < 7:
        await asyncio.sleep(0)
        counts.append(len(done))
    assert counts[0] == 3 and max(b - a for a, b in pairwise(counts)) <= 3
    await asyncio.gather(*tasks)
    for _ in range(4):
        await asyncio.sleep(0)
    assert not turns._counting


async def test_outputs_pass_directly_while_the_reader_waits() -> None:
    """The order stays: not while others are queued, not the last, and not an output that is refused."""
    stream, direct, accepts = stream_of(RequestClass.ONLINE), [], True

    def send(each: RequestOutput) -> bool:
        if accepts:
            direct.append(each.token_ids)
        return accepts

    stream.send_directly(send)
    stream.push(output(1))
    assert not direct, "the reader does not wait yet"
    assert (await anext(stream)).token_ids == (1,)
    read = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.push(output(2))
    await asyncio.sleep(0)
    assert direct == [(2,)] and not read.done()
    accepts = False
    stream.push(output(3))
    accepts = True
    stream.push(output(4))
    assert (await read).token_ids == (3,) and (await anext(stream)).token_ids == (4,) and direct == [(2,)]
    read = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.push(output(5, finish_reason=FinishReason.LENGTH))
    assert (await read).token_ids == (5,) and direct == [(2,)]
    offline = stream_of(RequestClass.OFFLINE)
    offline.send_directly(send)
    read = asyncio.ensure_future(anext(offline))
    await asyncio.sleep(0)
    offline.push(output(6))
    assert (await read).token_ids == (6,)
