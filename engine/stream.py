"""The outputs of one request: a bounded queue between the engine loop and one reader on the same event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

from engine.request import RequestOutput

STREAM_LIMIT = 1024


class RequestStream:
    """Implements engine.client.OutputStream. `abort` ends the request; it is called by `aclose`.

    With `final_only` everything is merged into one terminal output, so nothing piles up however slow the reader.
    """

    def __init__(self, abort: Callable[[], None], *, final_only: bool) -> None:
        self._abort = abort
        self._final_only = final_only
        self._outputs: deque[RequestOutput] = deque()
        self._pending: RequestOutput | None = None
        self._readable = asyncio.Event()
        self._ended = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._ended:
                raise StopAsyncIteration
            self._readable.clear()
            await self._readable.wait()
        return self._outputs.popleft()

    async def aclose(self) -> None:
        """Abort the request if it has not ended; safe to call at any time."""
        self._abort()

    def push(self, output: RequestOutput) -> bool:
        """Queue an output for the reader; False when the reader is too far behind."""
        if self._final_only:
            output = self._pending = _merged(self._pending, output)
            if output.finish_reason is None:
                return True
        self._outputs.append(output)
        self._ended = output.finish_reason is not None
        self._readable.set()
        return self._ended or len(self._outputs) < STREAM_LIMIT


def _merged(pending: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    """The newest output carrying all tokens so far, appended in place: one list however long the answer."""
    if pending is not None:
        pending.token_ids.extend(output.token_ids)
        output.token_ids = pending.token_ids
        if pending.logprobs is not None:
            pending.logprobs.extend(output.logprobs or [])
            output.logprobs = pending.logprobs
    return output
