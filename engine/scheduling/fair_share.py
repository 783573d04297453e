"""Fair sharing between keys: virtual token counters (VTC, Sheng et al., 2024).

A key with work is *active* and has a counter of the service charged to it; the lowest counter goes first. A key that
becomes active starts at the lowest counter among the active keys, so that absence earns no credit. It keeps its own
counter if that is higher, so that leaving cancels no debt. While all keys have work, two counters differ by at most one
charge. The module uses no requests, clock or unit of service.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace


@dataclass(slots=True)
class _Account:
    service: float
    order: int
    num_active: int = 0


class FairShare:
    """Counters by key. A key is active while it has entered more often than it has left."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._num_entered = 0

    def copy(self) -> "FairShare":
        """Return an independent copy."""
        other = FairShare()
        other._accounts = {key: replace(account) for key, account in self._accounts.items()}
        other._num_entered = self._num_entered
        return other

    def enter(self, key: str) -> None:
        """Record one more piece of work of `key`."""
        account = self._accounts.get(key)
        if account is None or not account.num_active:
            own = 0.0 if account is None else account.service
            account = self._accounts[key] = _Account(max(own, self.least()), self._num_entered)
            self._num_entered += 1
        account.num_active += 1

    def leave(self, key: str) -> None:
        """Record the end of a piece of work.

        An inactive key keeps its counter while it exceeds the lowest active one.
        """
        account = self._accounts[key]
        account.num_active -= 1
        assert account.num_active >= 0, "more work has ended than was there"
        if not account.num_active:
            least = min(self._active(), default=math.inf)
            self._accounts = {k: a for k, a in self._accounts.items() if a.num_active or a.service > least}

    def charge(self, key: str, service: float) -> None:
        """Charge service to `key`, or return some if negative. A closed account is not charged."""
        if (account := self._accounts.get(key)) is not None:
            account.service += service

    def is_active(self, key: str) -> bool:
        """Return whether `key` has work."""
        account = self._accounts.get(key)
        return account is not None and account.num_active > 0

    def service(self, key: str) -> float:
        """Return the service charged to an active key."""
        return self._accounts[key].service

    def least(self) -> float:
        """Return the lowest counter among active keys, or 0 without any."""
        return min(self._active(), default=0.0)

    def standing(self, key: str) -> tuple[float, int]:
        """Return the sort key of an active key; the lowest is served next."""
        account = self._accounts[key]
        return account.service, account.order

    def _active(self) -> Iterator[float]:
        return (account.service for account in self._accounts.values() if account.num_active)


class FairWalk:
    """Simulate the order in which keys would be served, without changing the counters.

    `head` is the next key; call `charge` with the service it gets, or `drop` if it has no more work. `paid`: service by
    key that the walk will charge although it was charged before; it is deducted first.
    """

    def __init__(self, share: FairShare, keys: Iterable[str], paid: Mapping[str, float] | None = None) -> None:
        paid = paid or {}
        standings = ((*share.standing(key), key) for key in keys)
        self._heap = [(service - paid.get(key, 0.0), order, key) for service, order, key in standings]
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def head(self) -> str:
        return self._heap[0][2]

    def charge(self, service: float) -> None:
        """Charge the head for one piece of work."""
        before, order, key = self._heap[0]
        heapreplace(self._heap, (before + service, order, key))

    def drop(self) -> None:
        """Remove the head, which has no more work."""
        last = self._heap.pop()
        if self._heap:
            heapreplace(self._heap, last)
