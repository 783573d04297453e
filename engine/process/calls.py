"""Questions to an engine process whose answers have not come yet."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.api import EngineRequest
from engine.process import frames


class GoneError(Exception):
    """The process died before it answered."""


@dataclass(slots=True)
class _Call:
    answer: "asyncio.Future[Any]"
    submitted: Sequence[EngineRequest] = ()


@dataclass(slots=True)
class Calls:
    """By number; `send` takes a message to the process."""

    send: Callable[[frames.Message], None]
    _open: dict[int, _Call] = field(default_factory=dict)
    _number: int = 0

    async def ask(self, make: Callable[[int], frames.Message], submitted: Sequence[EngineRequest] = ()) -> Any:
        """Ask, and wait for the answer. Raises what it is refused with, or GoneError."""
        self._number += 1
        number = self._number
        call = self._open[number] = _Call(asyncio.get_running_loop().create_future(), submitted)
        try:
            self.send(make(number))
            return await call.answer
        finally:
            self._open.pop(number, None)

    def submitted(self, number: int) -> Sequence[EngineRequest]:
        """What was to be queued by it."""
        call = self._open.get(number)
        return () if call is None else call.submitted

    def settle(self, number: int, value: Any = None) -> None:
        """The answer has come. Who asked may have left."""
        call = self._open.get(number)
        if call is not None and not call.answer.done():
            call.answer.set_result(value)

    def refuse(self, number: int, error: Exception) -> None:
        call = self._open.get(number)
        if call is not None and not call.answer.done():
            call.answer.set_exception(error)

    def end(self) -> None:
        """The process is gone."""
        for number in list(self._open):
            self.refuse(number, GoneError())
        self._open.clear()
