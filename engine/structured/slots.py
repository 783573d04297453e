"""Slots for work of several tenants, assigned in turn."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.api import RequestClass

ORDER = (RequestClass.ONLINE, RequestClass.OFFLINE)


class Slots:
    """`size` slots. Online work precedes offline work; within a class, tenants take turns."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: dict[RequestClass, OrderedDict[str, deque[asyncio.Future[None]]]] = {
            request_class: OrderedDict() for request_class in ORDER
        }

    @asynccontextmanager
    async def place(self, tenant: str, request_class: RequestClass, patience: float | None) -> AsyncIterator[None]:
        """Hold a slot during the block. Raises TimeoutError if none is free within `patience` seconds."""
        await self._take(tenant, request_class, patience)
        try:
            yield
        finally:
            self._free += 1
            self._hand_out()

    async def _take(self, tenant: str, request_class: RequestClass, patience: float | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request_class].setdefault(tenant, deque()).append(turn)
        self._hand_out()
        try:
            async with asyncio.timeout(patience):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the slot was assigned at the same time
                self._free += 1
            else:
                turn.cancel()
            self._hand_out()
            raise

    def _hand_out(self) -> None:
        while self._free and (turn := self._next()) is not None:
            self._free -= 1
            turn.set_result(None)

    def _next(self) -> "asyncio.Future[None] | None":
        for request_class in ORDER:
            tenants = self._waiting[request_class]
            while tenants:
                tenant, turns = tenants.popitem(last=False)
                while turns and turns[0].done():  # cancelled
                    turns.popleft()
                if not turns:
                    continue
                turn = turns.popleft()
                if turns:
                    tenants[tenant] = turns
                return turn
        return None
