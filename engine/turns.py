"""Turns on an event loop: work that nobody was promised a moment for goes on a little in each of the loop's rounds."""

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

EACH_ROUND = 2
"""Offline answers that go on in one round of the event loop. A write with all that leads to it takes 0.1 to 0.2 ms; a
hundred streams that come due in the same round would keep a chat's token, which waits in a socket, for 10 to 20 ms."""


class Turns:
    """At most `each` of those who wait go on in a round of the event loop, first come, first served; between two
    rounds the loop reads its sockets."""

    def __init__(self, each: int = EACH_ROUND) -> None:
        self._each = each
        self._left = each
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    @classmethod
    def of_loop(cls) -> "Turns":
        """Those of offline work on the running event loop."""
        loop = asyncio.get_running_loop()
        found = _of_loops.get(loop)
        if found is None:
            found = _of_loops[loop] = cls()
        return found

    async def take(self) -> None:
        """Go on at once if this round has a turn left and nobody waits, else wait for one."""
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
            if not turn.done():  # whoever waited was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < self._each:
            loop.call_soon(self._begin_round, loop)
        else:
            self._counting = False


_of_loops: "WeakKeyDictionary[asyncio.AbstractEventLoop, Turns]" = WeakKeyDictionary()
