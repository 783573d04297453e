"""Who of several goes next, so that all have had the same service: virtual token counters (VTC, Sheng et al., 2024).

A tenant that has work is *active* and has a counter of the service charged to it; the least counter goes first.
A tenant that becomes active takes the least counter among the active ones, so that being away saves up no service, or
keeps its own where that is higher, so that leaving sheds no debt. While all have work, two counters differ
by at most one charge. Knows nothing of requests, time or units of service.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace

MOST_OUTDATED = 8
"""Entries of a heap for each account, at which outdated entries are removed."""


@dataclass(slots=True)
class _Account:
    service: float
    order: int
    num_active: int = 0


class FairShare:
    """Counters by key; a key is active while it has entered more often than it has left."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._num_entered = 0
        self._num_active = 0
        # Heaps of (service, key) by whether the key is active. An entry counts only if the account still says the same.
        self._standings: dict[bool, list[tuple[float, str]]] = {True: [], False: []}

    def copy(self) -> "FairShare":
        """Counters of their own, the same as these."""
        other = FairShare()
        other._accounts = {key: replace(account) for key, account in self._accounts.items()}
        other._num_entered, other._num_active = self._num_entered, self._num_active
        other._standings = {active: list(heap) for active, heap in self._standings.items()}
        return other

    def enter(self, key: str) -> None:
        """One more piece of work of `key` is there."""
        account = self._accounts.get(key)
        if account is None or not account.num_active:
            least = self.least()
            own = 0.0 if account is None else account.service
            account = self._accounts[key] = _Account(max(own, least), self._num_entered)
            self._num_entered += 1
            self._num_active += 1
            account.num_active = 1
            self._note(key, account)
            return
        account.num_active += 1

    def leave(self, key: str) -> None:
        """A piece of work of `key` has ended. Debts are kept while somebody is there to whom they are owed."""
        account = self._accounts[key]
        account.num_active -= 1
        assert account.num_active >= 0, "more work has ended than was there"
        if account.num_active:
            return
        self._num_active -= 1
        if not self._num_active:
            self._accounts.clear()
            self._standings = {True: [], False: []}
            return
        self._note(key, account)
        least = self.least()
        while (lowest := self._lowest(active=False)) is not None and lowest[0] <= least:
            del self._accounts[lowest[1]]

    def charge(self, key: str, service: float) -> None:
        """`key` got this service (or gives some back, if negative). An account that was closed is not charged."""
        if (account := self._accounts.get(key)) is not None:
            account.service += service
            self._note(key, account)

    def is_active(self, key: str) -> bool:
        """Whether work of `key` is there."""
        account = self._accounts.get(key)
        return account is not None and account.num_active > 0

    def service(self, key: str) -> float:
        """What was charged to an active key."""
        return self._accounts[key].service

    def least(self) -> float:
        """The least counter among active keys; 0 if there is none."""
        lowest = self._lowest(active=True)
        return 0.0 if lowest is None else lowest[0]

    def standing(self, key: str) -> tuple[float, int]:
        """What to sort active keys by, the next to be served first."""
        account = self._accounts[key]
        return account.service, account.order

    def _note(self, key: str, account: _Account) -> None:
        """The counter of a key, or whether the key is active, has changed. Logarithmic time on average."""
        heap = self._standings[account.num_active > 0]
        heappush(heap, (account.service, key))
        if len(heap) > MOST_OUTDATED * len(self._accounts):
            active = heap is self._standings[True]
            heap[:] = [(a.service, k) for k, a in self._accounts.items() if (a.num_active > 0) is active]
            heapify(heap)

    def _lowest(self, *, active: bool) -> tuple[float, str] | None:
        """The least counter of the keys that are active, or of those that are not, and its key."""
        heap = self._standings[active]
        while heap:
            service, key = heap[0]
            account = self._accounts.get(key)
            if account is not None and account.service == service and (account.num_active > 0) is active:
                return heap[0]
            heappop(heap)
        return None


class FairWalk:
    """In which order keys would be served from now on, without touching the counters: `head` is next; then say what it
    was charged, or that it has nothing more. `paid`: what will be charged again on the way, by key."""

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
        """The head was served."""
        before, order, key = self._heap[0]
        heapreplace(self._heap, (before + service, order, key))

    def drop(self) -> None:
        """The head has nothing more."""
        last = self._heap.pop()
        if self._heap:
            heapreplace(self._heap, last)
