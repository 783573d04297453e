"""Lists of requests kept in arrival order: a preempted request returns to its place, ahead of later arrivals."""

from bisect import bisect_left, insort
from operator import attrgetter

from engine.request import Request

_by_age = attrgetter("arrival_order")


def insert_by_age(requests: list[Request], request: Request) -> None:
    insort(requests, request, key=_by_age)


def remove_by_age(requests: list[Request], request: Request) -> None:
    index = bisect_left(requests, request.arrival_order, key=_by_age)
    assert requests[index] is request, "request is not in the queue that its status says"
    del requests[index]
