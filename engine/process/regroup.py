"""The gateway's side of an engine process that joins or leaves a pipeline.

It sends the orders and moves open requests between engines without interrupting their streams.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from engine.api import FinishReason
from engine.errors import EngineUnavailableError
from engine.process import frames
from engine.process.link import Calls, GoneError
from engine.process.orders import Order, Past, Reset
from engine.process.requests import OpenRequest, OpenRequests, take_over
from engine.process.suspects import Suspects


class Regrouping:
    """The orders and the open requests of one engine.

    Attributes:
        life: Number of processes that have ended so far.
        parted: Whether the process has lost the other engine of its pipeline.
    """

    def __init__(
        self, calls: Calls, requests: OpenRequests, suspects: Suspects, abort: Callable[[str, FinishReason], None]
    ) -> None:
        self.life = 0
        self.parted = False
        self._calls = calls
        self._requests = requests
        self._suspects = suspects
        self._abort = abort

    @property
    def is_calm(self) -> bool:
        """Whether no open request is a suspect."""
        return not any(entry.request.request_id in self._suspects for entry in self._requests)

    def lost(self) -> None:
        """Record the end of the process. The next process is a whole engine."""
        self.life += 1
        self.parted = False

    async def order(self, order: Order) -> tuple[Past, ...]:
        """Send an order and return its answer. Raise the error with which the process refuses it."""
        try:
            pasts: tuple[Past, ...] = await self._calls.ask(lambda call: frames.Regroup(call, order))
        except GoneError:
            raise EngineUnavailableError("the engine process ended") from None
        return pasts

    async def reset(self, num_units: int) -> None:
        """Make the process a whole engine again, with the open requests. Raise the error of the order."""
        known = tuple(entry.request.request_id for entry in self._requests)
        accepted = [entry for entry in self._requests.accepted() if entry.request.request_id not in self._suspects]
        requests = tuple(entry.resumed() for entry in accepted)
        await self.order(Reset(num_units, known, requests))
        self.parted = False

    def accepted(self) -> list[OpenRequest]:
        """Return the open requests that the process has accepted, in order of arrival."""
        return sorted(self._requests.accepted(), key=lambda entry: entry.arrival)

    def leave(self, request_ids: Collection[str] | None = None) -> list[OpenRequest]:
        """Remove and return the accepted requests that another engine continues: `request_ids`, or all if None."""
        taken = self._requests.take(lambda e: request_ids is None or e.request.request_id in request_ids)
        for entry in taken:
            entry.suspicion = self._suspects.release(entry.request.request_id)
        return taken

    def join(self, entries: Sequence[OpenRequest]) -> None:
        """Add requests of another engine. An order tells the process about them."""
        for entry in entries:
            entry.stream.rebind(partial(self._abort, entry.request.request_id))
        take_over(entries, self._requests, self._suspects)
