"""Rate limit per round of the event loop, for offline work without a latency objective."""

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

EACH_ROUND = 2
"""Offline outputs processed per round of the event loop. Each takes 0.1 to 0.2 ms including its write, so a hundred
streams in the same round would delay the tokens of chats by 10 to 20 ms."""


class Turns:
    """Lets at most `each` waiting tasks continue per round of the event loop, in order of arrival.

    Between two rounds, the loop reads its sockets.
    """

    def __init__(self, each: int = EACH_ROUND) -> None:
        self._each = each
        self._left = each
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    @classmethod
    def of_loop(cls) -> "Turns":
        """Return the shared instance of the running event loop."""
        loop = asyncio.get_running_loop()
        found = _of_loops.get(loop)
        if found is None:
            found = _of_loops[loop] = cls()
        return found

    async def take(self) -> None:
        """Wait for a turn; return at once if this round has one left and no other task waits."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._begin_round, loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._each
        while self._waiting and self._left > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # done: the waiting task was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < self._each:
            loop.call_soon(self._begin_round, loop)
        else:
            self._counting = False


_of_loops: "WeakKeyDictionary[asyncio.AbstractEventLoop, Turns]" = WeakKeyDictionary()
