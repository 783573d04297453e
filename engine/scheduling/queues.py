"""Waiting and running requests of one service class, in arrival order."""

from bisect import bisect_left, insort
from operator import attrgetter

from engine.request import Request

_by_arrival = attrgetter("arrival_order")


class RequestQueues:
    """Two lists sorted by arrival. A preempted request returns to its place by age, ahead of later arrivals."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add_waiting(self, request: Request) -> None:
        insort(self.waiting, request, key=_by_arrival)

    def remove_waiting(self, request: Request) -> None:
        _remove(self.waiting, request)

    def add_running(self, request: Request) -> None:
        insort(self.running, request, key=_by_arrival)

    def remove_running(self, request: Request) -> None:
        _remove(self.running, request)


def _remove(requests: list[Request], request: Request) -> None:
    index = bisect_left(requests, request.arrival_order, key=_by_arrival)
    assert requests[index] is request, "request is not in the queue that its status says"
    del requests[index]
