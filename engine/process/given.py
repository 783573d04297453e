"""What an engine process was given and has not yet told of: its load is what it said last, and this."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from engine.api import EngineRequest, LoadReport


class Given:
    """`report`: what the process said last; None before its first word."""

    def __init__(self) -> None:
        self.report: LoadReport | None = None
        self._number = 0
        self._requests: deque[tuple[int, EngineRequest]] = deque()

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """These are being sent."""
        for request in requests:
            self._number += 1
            self._requests.append((self._number, request))

    def hear(self, report: LoadReport | None) -> None:
        """The process says how it is; it names how many requests have reached it, so those are in its figures."""
        if report is None:
            return
        self.report = report
        while self._requests and self._requests[0][0] <= report.received:
            self._requests.popleft()

    @property
    def unreported(self) -> Iterable[EngineRequest]:
        """What has been sent since, in order."""
        return _second(self._requests)


def _second(pairs: Iterable[tuple[int, EngineRequest]]) -> Iterator[EngineRequest]:
    return (request for _, request in pairs)
