"""The output stream of a request: a bounded queue between the engine loop and one reader on the same event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

from engine.api import EngineRequest, RequestClass, RequestOutput
from engine.turns import Turns

STREAM_LIMIT = 1024
TOGETHER_SECONDS = 0.05
"""Interval of offline outputs, seconds. Fewer writes leave more of the event loop to chats, and offline tokens have no
latency objective."""


class RequestStream:
    """Implementation of engine.client.OutputStream.

    Args:
        abort: Ends the request; called by `aclose`.
        final_only: Merge all outputs into the terminal one, so that a slow reader needs no queue.
        together: Interval in which outputs are merged, seconds; 0 returns each output by itself. A terminal output with
            an error is never merged.
        turns: Limits how many streams return an output per round of the event loop.
    """

    def __init__(
        self, abort: Callable[[], None], *, final_only: bool, together: float = 0.0, turns: Turns | None = None
    ) -> None:
        self._abort = abort
        self._turns = turns
        self._final_only, self._held = final_only, list[RequestOutput]()
        self._together, self._not_before = together, 0.0
        self._outputs: deque[RequestOutput] = deque()
        self._readable = asyncio.Event()
        self._is_awaited = False
        self._direct: Callable[[RequestOutput], bool] | None = None
        self._ended = False

    @classmethod
    def of(cls, request: EngineRequest, abort: Callable[[], None]) -> "RequestStream":
        """Return a stream for a request; offline requests are merged and take turns."""
        if request.request_class is RequestClass.ONLINE:
            return cls(abort, final_only=request.final_only)
        together = 0.0 if request.final_only else TOGETHER_SECONDS
        return cls(abort, final_only=request.final_only, together=together, turns=Turns.of_loop())

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._ended:
                raise StopAsyncIteration
            self._readable.clear()
            self._is_awaited = True
            try:
                await self._readable.wait()
            finally:
                self._is_awaited = False
        if self._together:
            await self._rest()
        if self._turns is not None:
            await self._turns.take()
        return self._gather() if self._together else self._outputs.popleft()

    async def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._ended and (rest := self._not_before - loop.time()) > 0.0:
            await asyncio.sleep(rest)
        self._not_before = loop.time() + self._together

    def _gather(self) -> RequestOutput:
        outputs, self._outputs = self._outputs, deque()
        if len(outputs) > 1 and outputs[-1].error is not None:  # the tokens before the error are still an answer
            self._outputs.append(outputs.pop())
        return _merged(outputs) if len(outputs) > 1 else outputs[0]

    def send_directly(self, send: Callable[[RequestOutput], bool]) -> None:
        """See OutputStream. Merged outputs always go to the reader."""
        if not (self._final_only or self._together):
            self._direct = send

    def rebind(self, abort: Callable[[], None]) -> None:
        """Set another `abort`, after another engine has taken over the request."""
        self._abort = abort

    async def aclose(self) -> None:
        """Abort the request if it has not ended."""
        self._abort()

    def push(self, output: RequestOutput) -> bool:
        """Queue an output for the reader. Return False if the reader is STREAM_LIMIT outputs behind."""
        if self._final_only:
            self._held.append(output)
            if output.finish_reason is None:
                return True
            output = _merged(self._held)
        elif self._direct is not None and self._may_pass(output) and self._direct(output):
            return True
        self._outputs.append(output)
        self._ended = output.finish_reason is not None
        self._readable.set()
        return self._ended or len(self._outputs) < STREAM_LIMIT

    def _may_pass(self, output: RequestOutput) -> bool:
        return self._is_awaited and not self._outputs and output.finish_reason is None


def _merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Return the last output with the tokens and logprobs of all."""
    token_ids = tuple(chain.from_iterable(output.token_ids for output in outputs))
    logprobs = tuple(chain.from_iterable(output.logprobs or () for output in outputs))
    return outputs[-1]._replace(token_ids=token_ids, logprobs=logprobs or outputs[-1].logprobs)
