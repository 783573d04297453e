"""The outputs of one request: a bounded queue between the engine loop and one reader on the same event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

from engine.api import RequestOutput, TokenLogprobs

STREAM_LIMIT = 1024


class RequestStream:
    """Implements engine.api.OutputStream. `abort` ends the request; it is called by `aclose`.

    With `final_only` everything is merged into one terminal output, so nothing piles up however slow the reader.
    """

    def __init__(self, abort: Callable[[], None], *, final_only: bool) -> None:
        self._abort = abort
        self._merged = _Merged() if final_only else None
        self._outputs: deque[RequestOutput] = deque()
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

    def rebind(self, abort: Callable[[], None]) -> None:
        """Another engine goes on with the request."""
        self._abort = abort

    async def aclose(self) -> None:
        """Abort the request if it has not ended; safe to call at any time."""
        self._abort()

    def push(self, output: RequestOutput) -> bool:
        """Queue an output for the reader; False when the reader is too far behind."""
        if self._merged is not None:
            self._merged.add(output)
            if output.finish_reason is None:
                return True
            output = self._merged.whole(output)
        self._outputs.append(output)
        self._ended = output.finish_reason is not None
        self._readable.set()
        return self._ended or len(self._outputs) < STREAM_LIMIT


class _Merged:
    """The tokens of all outputs so far."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, output: RequestOutput) -> None:
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs or ())

    def whole(self, last: RequestOutput) -> RequestOutput:
        """The last output, with everything."""
        logprobs = tuple(self._logprobs) or last.logprobs
        return last._replace(token_ids=tuple(self._token_ids), logprobs=logprobs)
