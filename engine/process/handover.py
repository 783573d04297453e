"""Open requests of an engine without a process go to another one: which of them may, and what goes with them."""

from collections.abc import Sequence

from engine.process.requests import OpenRequest, OpenRequests
from engine.process.suspects import Suspects


def hand_over(requests: OpenRequests, suspects: Suspects, *, given_up: bool) -> list[OpenRequest]:
    """Take out what another engine is to go on with: all but suspects, which are tried where they are. Of an engine
    that is `given_up` all, but none for a second time: what several engines have died with is not carried further."""
    taken = requests.take(lambda e: not e.moved if given_up else e.request.request_id not in suspects)
    for entry in taken:
        entry.moved = entry.moved or given_up
        entry.suspicion = suspects.release(entry.request.request_id)
    return taken


def take_over(entries: Sequence[OpenRequest], requests: OpenRequests, suspects: Suspects) -> list[OpenRequest]:
    """Take them in with what is held against them; returns those that may run beside others."""
    for entry in entries:
        requests.add(entry)
        if entry.suspicion is not None:
            suspects.admit(entry.request.request_id, entry.suspicion)
            entry.suspicion = None
    return [entry for entry in entries if entry.request.request_id not in suspects]
