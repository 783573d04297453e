"""Online policies: in which order waiting requests compete for a step. One pure function each, chosen by name."""

from collections.abc import Callable

from engine.request import Request

OnlinePolicy = Callable[[list[Request]], list[Request]]


def fcfs(waiting: list[Request]) -> list[Request]:
    """First come, first served; the queue is kept by arrival, and a preempted request keeps its age."""
    return waiting


ONLINE_POLICIES: dict[str, OnlinePolicy] = {"fcfs": fcfs}
