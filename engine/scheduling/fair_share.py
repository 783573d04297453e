"""Fair sharing between keys: virtual token counters (VTC, Sheng et al., 2024).

A key with work is *active* and has a counter of the service charged to it; the lowest counter goes first. A key that
becomes active starts at the lowest counter among the active keys, so that absence earns no credit. It keeps its own
counter if that is higher, so that leaving cancels no debt. While all keys have work, two counters differ by at most one
charge. `FairShare` uses no requests, clock or unit of service.

`OnlineShare` keeps the counters of tenants with online requests. A request is charged when it first starts: for its
missing prompt tokens and the mean output of recent answers. At its end the charge is corrected to the actual cost.
`engine.scheduling.urgency` orders requests within a tenant.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from engine.api import TokenCosts
from engine.request import Request, RequestStatus


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
            own, least = 0.0 if account is None else account.service, min(self._active(), default=0.0)
            account = self._accounts[key] = _Account(max(own, least), self._num_entered)
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


FORGETTING = 0.05
"""Weight of the newest answer in the mean answer length."""


class OnlineShare:
    """Accounts of tenants with online requests. `costs` gives the price of tokens.

    Attributes:
        let_in: Requests for which a row was freed.
        moved: Requests that lost their row to another tenant.
    """

    def __init__(self, costs: TokenCosts) -> None:
        self._costs = costs
        self._share = FairShare()
        self._num_requests: Counter[str] = Counter()
        self._charged: dict[str, float | None] = {}
        self._mean_output = 0.0
        self.let_in: set[Request] = set()
        self.moved: set[Request] = set()

    @property
    def is_contested(self) -> bool:
        """Return whether more than one tenant has requests. Otherwise the accounts have no effect."""
        return len(self._num_requests) > 1

    def waiting(self, running: Mapping[str, int]) -> list[str]:
        """Return the tenants with more requests than `running` counts for them."""
        return [tenant for tenant, count in self._num_requests.items() if count > running.get(tenant, 0)]

    def enter(self, request: Request) -> None:
        """Record a queued request."""
        self._num_requests[request.spec.tenant] += 1
        self._charged[request.request_id] = None
        self._share.enter(request.spec.tenant)

    def start(self, request: Request) -> None:
        """Charge a request that runs for the first time."""
        if self._charged.get(request.request_id, 0.0) is None:
            self._charged[request.request_id] = cost = self.price(request)
            self._share.charge(request.spec.tenant, cost)

    def end(self, request: Request) -> None:
        """Settle a request that ended in any state. The canary never entered and is ignored."""
        self.let_in.discard(request)
        self.moved.discard(request)
        if request.request_id not in self._charged:
            return
        tenant, charged = request.spec.tenant, self._charged.pop(request.request_id)
        if charged is not None:
            self._mean_output += FORGETTING * (request.num_output_tokens - self._mean_output)
            self._share.charge(tenant, self._actual(request) - charged)
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant]
        self._share.leave(tenant)

    def with_arrival(self, tenant: str) -> "OnlineShare":
        """Return a read-only view of the accounts with one more request of `tenant`."""
        view = OnlineShare(self._costs)
        view._share = self._share.copy()
        view._share.enter(tenant)
        view._num_requests = self._num_requests + Counter((tenant,))
        view._charged, view._mean_output = self._charged, self._mean_output
        return view

    def by_standing(self, tenants: Iterable[str]) -> list[str]:
        """Sort tenants with requests, the next to be served first."""
        return sorted(tenants, key=self._share.standing)

    def received(self, tenant: str, running: Iterable[Request]) -> float:
        """Return the service that a tenant has received, or -inf if it has no requests.

        Includes the service of its `running` requests beyond their charge.
        """
        beyond = 0.0
        for request in running:
            if request.spec.tenant == tenant and (charged := self._charged.get(request.request_id)) is not None:
                beyond += max(0.0, self._actual(request) - charged)
        return self._share.service(tenant) + beyond if tenant in self._num_requests else -math.inf

    def walk(self, groups: Mapping[str, Iterable[Request]]) -> FairWalk:
        """Simulate the order in which the tenants in `groups` would be served, each request at its `price`.

        Requests that already started were charged before, so their charge is deducted first.
        """
        paid = {
            tenant: sum(self._charged.get(r.request_id) or 0.0 for r in group if r.status is not RequestStatus.WAITING)
            for tenant, group in groups.items()
        }
        return FairWalk(self._share, groups, paid)

    def price(self, request: Request) -> float:
        """Return the charge of a request, or its charge if it started now."""
        if charged := self._charged.get(request.request_id):
            return charged
        return self._costs.of(request.num_missing_tokens, min(self._mean_output, request.spec.sampling.max_tokens))

    def _actual(self, request: Request) -> float:
        """Return the cost of a request so far."""
        return self._costs.of(request.num_prompt_tokens - request.num_cached_tokens, request.num_output_tokens)


def by_tenant(requests: Iterable[Request]) -> dict[str, list[Request]]:
    """Group requests by tenant, in the given order."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.spec.tenant, []).append(request)
    return groups
